"""Pictures with sliders and buttons, in plain JavaScript: one file of this folder each."""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from string import Template
from typing import Any

HERE = Path(__file__).parent
# The script that draws trees is that of the server's page.
_TREES = (HERE.parents[1] / "eagle3_jax" / "server" / "page" / "trees.js", HERE / "frame.js")
# The scripts that a picture needs before its own.
_NEEDED = {"draft_tree": _TREES, "rounds": _TREES}
_FRAGMENT = Template("""<div id="$element" class="moving">This picture needs JavaScript.</div>
<script>(() => {
$script
$name(document.getElementById("$element"), $values);
})();</script>""")


@dataclasses.dataclass(frozen=True)
class Moving:
    """A picture that a reader can move, as self-contained HTML for Jupyter and for the site.

    Example::

        Moving("speedup", {"tau": 2.4, "v": 1.2, "c": 0.1, "K": 3})   # as the last line of a cell
    """

    name: str  #: The file without its suffix, which is also its function.
    #: The values of this picture; the first lines of the file describe them.
    values: dict[str, Any]

    def _repr_html_(self) -> str:
        files = [*_NEEDED.get(self.name, ()), HERE / f"{self.name}.js"]
        script = "\n".join(file.read_text(encoding="utf-8") for file in files)
        # "<" is escaped, because a token of a text can be "</script>".
        values = json.dumps(self.values).replace("<", "\\u003c")
        element = f"moving-{uuid.uuid4().hex}"
        return _FRAGMENT.substitute(element=element, script=script, name=self.name, values=values)
