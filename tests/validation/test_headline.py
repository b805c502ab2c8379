"""The headline experiment runs at a tiny shape, without vLLM, and measures each cell once."""

from __future__ import annotations

import json
from pathlib import Path

import headline
import tiny

MODELS = tiny.GOLDEN / "vllm"


def test_a_rehearsal_measures_every_cell_once(tmp_path: Path) -> None:
    prompts = tmp_path / "short.jsonl"
    lines = [json.dumps({"prompt_ids": [3 + row, 7, 9, 11]}) for row in range(3)]
    prompts.write_text("\n".join(lines) + "\n")
    options = [
        "--rehearse",
        "--target",
        str(MODELS / "target"),
        "--drafter",
        str(MODELS / "eagle3"),
    ]
    options += ["--prompts", f"short={prompts}", "--output", str(tmp_path)]
    options += ["--batches", "2", "--chains", "2", "--tree", "4", "2", "2"]
    options += ["--max-new-tokens", "5"]

    headline.main(options)
    record = json.loads((tmp_path / "headline.json").read_text())
    assert record["rehearsal"]
    for cell in record["cells"].values():
        assert [row["name"] for row in cell["rows"]] == ["plain", "chain K=2", "tree N=4"]
        # In float32 greedy text is that of plain decoding; sampled text is another.
        expected = None if cell["temperature"] else cell["num_prompts"]
        assert [row["same_texts"] for row in cell["rows"]] == [expected] * 3
    table = (tmp_path / "headline.md").read_text()
    assert table.startswith("A REHEARSAL: no figure counts.") and table.count("| short") == 2 * 3

    headline.main(options)
    assert json.loads((tmp_path / "headline.json").read_text()) == record
