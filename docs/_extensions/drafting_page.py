"""The page that computes with recorded distributions: in drafting.md, and as one file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "recorded"))

import gpu
from page_tables import cores, record, version
from speeds import CHAT

DOCS = Path(__file__).resolve().parents[1]

RECORD = DOCS / "recorded" / "drafting.json"
PARTS = DOCS / "drafting"
TREES = DOCS.parent / "eagle3_jax" / "server" / "page" / "trees.js"
FILE = "drafting.html"
_PLACE = '<div id="drafting-page"></div>'  # in drafting.md
_SHOWN = 24  # number of the prompt that is shown first


def setup(app: Any) -> dict[str, Any]:
    """Shows the page in its place, and writes the file after the site."""
    app.connect("html-page-context", _show)
    app.connect("build-finished", _write)
    return {"version": "1", "parallel_read_safe": True}


def fragment() -> str:
    """Returns the page with its scripts and data."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    about = recorded.pop("about")
    origin = (
        f"SmolLM2-135M-Instruct in int8 and its EAGLE-3 head wrote these texts. {version(about)},"
        f" {cores(about)}. The prompts are first questions of MT-bench (Apache-2.0), HumanEval"
        " (MIT) and GSM8K (MIT)."
    )
    recorded |= {"origin": origin.replace("`", ""), "shown": _SHOWN, "machines": [_cpu(), _gpu()]}
    # "<" is escaped, because a token of a text can be "</script>".
    data = json.dumps(recorded, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    files = [TREES, *(PARTS / f"{name}.js" for name in ("rounds", "page"))]
    script = "\n".join(file.read_text(encoding="utf-8") for file in files)
    page = (PARTS / "page.html").read_text(encoding="utf-8")
    return (
        f'{page}<script type="application/json" id="drafting-record">{data}</script>\n'
        f"<script>(() => {{\n{script}\n}})();</script>\n"
    )


def whole_page() -> str:
    """Returns the page as a file that needs no other file and no network."""
    head = (PARTS / "head.html").read_text(encoding="utf-8")
    return f"{head}{fragment()}</main></body></html>\n"


def _cpu() -> dict[str, Any]:
    """Returns the costs and speed-ups on a CPU, a draft length after the other."""
    rows = CHAT.chains()
    report = CHAT.report
    measured = [
        {"speedup": row["ratio"]["median"], "tau": row["acceptance"]["mean_acceptance_length"]}
        for row in rows
    ]
    return {
        "name": "two cores of a CPU",
        "about": f"SmolLM2-135M-Instruct on {cores(record(CHAT.name)['about'])}, int8, batch 1.",
        "prompts": f"{report['num_prompts']} {CHAT.prompts}, {report['max_new_tokens']} tokens"
        " each",
        "verification": [round(row["verify_cost"], 2) for row in rows],
        "draftStep": next(row["draft_cost"] for row in rows if row["num_draft_steps"] == 3),
        "measured": measured,
    }


def _gpu() -> dict[str, Any]:
    """Returns the costs on a GPU; up to 6 tokens are verified at nearly the same cost."""
    verification = gpu.FIGURES["verify 6"]["round_in_bases"]["median"]
    return {
        "name": "one H100, a model of 8 B parameters",
        "about": f"Llama-3.1-8B's shape with random weights on one {gpu.RECORD['device']},"
        " bfloat16, batch 1: a verification of 6 tokens. The texts stay those of the small model.",
        "verification": [verification] * 5,
        "draftStep": gpu.FIGURES["draft step"]["round_in_bases"]["median"],
        "measured": [None] * 5,
    }


def _show(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Puts the page into the HTML only: texts for language models and the search leave it out."""
    if name == "drafting":
        context["body"] = context["body"].replace(_PLACE, fragment())


def _write(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "_static" / FILE).write_text(whole_page(), encoding="utf-8")
