"""Equations as MathML, which browsers show without a script, a font or a server."""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

_LOG = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_visit, None), (_visit, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _visit(self: Any, node: nodes.Element) -> None:
    tex = node.astext()
    block = isinstance(node, nodes.math_block)
    try:
        # In one line: the converter indents, and browsers would show the spaces.
        shown = re.sub(r">\s+<", "><", tex2mathml(tex, as_block=block).strip())
    except Exception as error:  # MathError of docutils, and any error of its parser
        _LOG.warning(f"docutils cannot convert the equation {tex!r}: {error}", location=node)
        shown = f"<code>{html.escape(tex)}</code>"
    self.body.append(f'<div class="math-block">{shown}</div>\n' if block else shown)
    raise nodes.SkipNode
