"""Plotly figures as self-contained HTML for Jupyter, exported pages and the site."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import json
import sys
import uuid
from string import Template
from typing import Any

# A page contains the library once, compressed: 2 MB instead of 5. `module` and `define` are hidden
# from it. Otherwise it would register with the module loader of an old notebook page, and `Plotly`
# would be undefined.
_LIBRARY = Template("""<script>
if (!window.Plotly && !window.plotlyOnItsWay) {
  window.plotlyOnItsWay = true;
  const bytes = Uint8Array.from(atob("$packed"), letter => letter.charCodeAt(0));
  new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text()
    .then(text => new Function("module", "define", text)());
}
</script>""")

# The outputs of a page run in any order, and decompression takes time, so a picture waits for the
# library.
_PICTURE = Template("""<div id="$name" role="img" aria-label="$alt"
 style="background:#fff;color:#1f2328;width:100%;height:${height}px">
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

_WAITING = "Interactive picture: needs JavaScript and the outputs of the cells above."

_HEIGHT = 450  # plotly's default


#: the cell of this kernel whose output contains the library; a page shows all cells
_CARRIER: list[str] = []


def _needs_library() -> bool:
    """Whether the current output has to contain the library."""
    # In Colab every output is a separate page. A cell that runs again replaces its output.
    if not _CARRIER or "google.colab" in sys.modules:
        _CARRIER[:] = [_cell()]
    return [_cell()] == _CARRIER


@dataclasses.dataclass(frozen=True, eq=False)
class Interactive:
    """A plotly figure that shows itself as self-contained HTML.

    The first output of a kernel contains plotly.js; all others use it.

    Example::

        Interactive(plotly.graph_objects.Figure(...))   # as the last line of a cell
    """

    figure: Any  #: A ``plotly.graph_objects.Figure``.

    def _repr_html_(self) -> str:
        return self.html(library=_needs_library())

    def html(self, *, library: bool = True) -> str:
        """Makes a fragment of HTML.

        Args:
            library: Whether to include plotly.js; one picture of a page has to.
        """
        # "<" is escaped, because a token of a text can be "</script>" or "<!--".
        figure = json.dumps(json.loads(self.figure.to_json()), separators=(",", ":")).replace(
            "<", "\\u003c"
        )
        height = self.figure.layout.height or _HEIGHT
        alt = html.escape(self.figure.layout.title.text or "interactive plot")
        name = f"picture-{uuid.uuid4().hex}"
        picture = _PICTURE.substitute(
            name=name, alt=alt, height=int(height), waiting=_WAITING, figure=figure
        )
        return (_library() if library else "") + picture


def _library() -> str:
    from plotly.offline import get_plotlyjs

    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return _LIBRARY.substitute(packed=base64.b64encode(packed).decode())


def _cell() -> str:
    """Identifier of the cell that is running; empty outside Jupyter."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython() if ipython else None, "kernel", None)
    if kernel is None:
        return ""
    parent = kernel.get_parent()
    return parent.get("metadata", {}).get("cellId") or parent.get("header", {}).get("msg_id") or ""
