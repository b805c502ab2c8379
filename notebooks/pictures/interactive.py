"""Plotly figures as self-contained HTML for Jupyter, exported pages and the site."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
import json
import uuid
from string import Template
from typing import Any

# The library is compressed: 2 MB instead of 5. `module` and `define` are hidden from it, because it
# would register with the module loader of an old notebook page, and `Plotly` would be undefined.
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
<p class="waiting" style="padding:.6em .8em">This picture needs JavaScript.</p></div>
<script>
(function draw() {
  const place = document.getElementById("$name");
  if (!window.Plotly) { setTimeout(draw, 100); return; }
  if (!place) return;
  const figure = $figure;
  place.querySelector(".waiting")?.remove();
  Plotly.newPlot(place, figure.data, figure.layout, {responsive: true, displayModeBar: false});
})();
</script>""")

_HEIGHT = 450  # plotly's default


@dataclasses.dataclass(frozen=True, eq=False)
class Interactive:
    """A plotly figure that shows itself as self-contained HTML, plotly.js included.

    Example::

        Interactive(plotly.graph_objects.Figure(...))   # as the last line of a cell
    """

    figure: Any  #: A ``plotly.graph_objects.Figure``.

    def _repr_html_(self) -> str:
        # "<" is escaped, because a token of a text can be "</script>" or "<!--".
        figure = json.dumps(json.loads(self.figure.to_json()), separators=(",", ":")).replace(
            "<", "\\u003c"
        )
        height = self.figure.layout.height or _HEIGHT
        alt = html.escape(self.figure.layout.title.text or "interactive plot")
        name = f"picture-{uuid.uuid4().hex}"
        picture = _PICTURE.substitute(name=name, alt=alt, height=int(height), figure=figure)
        return _library() + picture


def _library() -> str:
    from plotly.offline import get_plotlyjs

    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return _LIBRARY.substitute(packed=base64.b64encode(packed).decode())
