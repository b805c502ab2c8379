"""Equations as MathML, which browsers show by themselves: no script, no font and no server elsewhere."""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

_LOG = logging.getLogger(__name__)
# What docutils does not know, by what it knows.
_OTHER_NAMES = {
    "dots": "ldots",
    "iff": "Leftrightarrow",
    "implies": "Rightarrow",
    "tfrac": "frac",
    "dfrac": "frac",
    "operatorname": "mathrm",
    "lVert": "Vert",
    "rVert": "Vert",
    "lvert": "vert",
    "rvert": "vert",
    "bigl": "big",
    "bigr": "big",
    "Bigl": "Big",
    "Bigr": "Big",
}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math-block">{_mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
    tex = node.astext()
    for name, known in _OTHER_NAMES.items():
        tex = re.sub(rf"\\{name}(?![a-zA-Z])", lambda _, known=known: f"\\{known}", tex)
    try:
        found = tex2mathml(tex, as_block=as_block)
    except Exception as error:  # MathError of docutils, and what its parser trips over
        _LOG.warning(f"an equation that is not understood: {tex!r}: {error}", location=node)
        return f"<code>{html.escape(tex)}</code>"
    # One line: templates indent, and the spaces would show.
    return re.sub(r">\s+<", "><", found.strip())
