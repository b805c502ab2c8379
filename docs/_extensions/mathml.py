"""Equations as MathML, which browsers show by themselves: no script, no font and no server elsewhere."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(_mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math-block">{_mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def _mathml(tex: str, *, as_block: bool) -> str:
    try:
        found = tex2mathml(tex, as_block=as_block)
    except Exception as error:  # MathError of docutils, and what its parser trips over
        raise ExtensionError(f"an equation that is not understood: {tex!r}: {error}") from error
    # One line: templates indent, and the spaces would show.
    return re.sub(r">\s+<", "><", found.strip())
