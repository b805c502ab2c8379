"""Plotly figures as HTML of their own: without a network, in Jupyter, in exported pages and in Sphinx."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import sys
import uuid
from string import Template
from typing import Any

# Put into a page once, compressed: 2 MB in place of 5. `module` and `define` are hidden from it, or it would hand
# itself to the loader of an old notebook page and leave nothing to draw with.
_LIBRARY = Template("""<script>
if (!window.Plotly && !window.plotlyOnItsWay) {
  window.plotlyOnItsWay = true;
  const bytes = Uint8Array.from(atob("$packed"), letter => letter.charCodeAt(0));
  new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text()
    .then(text => new Function("module", "define", text)());
}
</script>""")

# Outputs of a page may come to life in any order, and unpacking takes a moment: a picture waits for its library.
_PICTURE = Template("""<div id="$name" style="background:#fff;color:#1f2328;width:100%;height:${height}px">
<p class="waiting" style="padding:.6em .8em">$waiting</p></div>
<script>
(function draw() {
  const place = document.getElementById("$name");
  if (!window.Plotly) { setTimeout(draw, 100); return; }
  if (!place) return;
  const figure = $figure;
  place.querySelector(".waiting")?.remove();
  Plotly.newPlot(place, figure.data, figure.layout, {responsive: true, displaylogo: false});
})();
</script>""")

_WAITING = "An interactive picture: it needs JavaScript, and the outputs of the cells above it."

_HEIGHT = 450  # plotly's own, where a figure asks for none


class _Page:
    """Which cell of this kernel has carried the library; pages show all cells, so one is enough."""

    carrier: str | None = None

    @classmethod
    def needs_library(cls) -> bool:
        """Whether what is shown now has to bring the library along."""
        cell = _cell()
        # In Colab every output is a page of its own. A cell that is run again replaces what it carried.
        if "google.colab" in sys.modules or cls.carrier in (None, cell):
            cls.carrier = cell
            return True
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class Interactive:
    """A plotly figure that shows itself as self-contained HTML.

    The first one that a kernel shows carries plotly.js; the others of the page use it.

    Example::

        Interactive(plotly.graph_objects.Figure(...))   # as the last line of a cell

    Attributes:
        figure: A ``plotly.graph_objects.Figure``.
    """

    figure: Any

    def _repr_html_(self) -> str:
        return self.html(library=_Page.needs_library())

    def html(self, *, library: bool = True) -> str:
        """A piece of HTML.

        Args:
            library: Whether plotly.js comes with it; one picture of a page has to bring it.
        """
        # "<" may not stand in a script as it is: a token of a text can be "</script>" or "<!--".
        figure = json.dumps(json.loads(self.figure.to_json()), separators=(",", ":")).replace("<", "\\u003c")
        height = self.figure.layout.height or _HEIGHT
        picture = _PICTURE.substitute(
            name=f"picture-{uuid.uuid4().hex}", height=int(height), waiting=_WAITING, figure=figure
        )
        return (_library() if library else "") + picture


def _library() -> str:
    from plotly.offline import get_plotlyjs

    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return _LIBRARY.substitute(packed=base64.b64encode(packed).decode())


def _cell() -> str:
    """The cell that runs now; outside Jupyter all is one."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython() if ipython else None, "kernel", None)
    if kernel is None:
        return ""
    parent = kernel.get_parent()
    return parent.get("metadata", {}).get("cellId") or parent.get("header", {}).get("msg_id") or ""
