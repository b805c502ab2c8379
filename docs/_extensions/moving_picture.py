"""The directive ``moving-picture``: a picture of notebooks/pictures that readers can move."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

sys.path.append(str(Path(__file__).resolve().parents[2] / "notebooks"))

from pictures.moving import Moving


class MovingPicture(Directive):
    """Shows ``notebooks/pictures/NAME.js``; the argument is the name, the content the values."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Returns the picture as HTML."""
        values = json.loads("\n".join(self.content))
        return [nodes.raw("", Moving(self.arguments[0], values)._repr_html_(), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directive."""
    app.add_directive("moving-picture", MovingPicture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
