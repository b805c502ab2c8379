"""The headline experiment at a tiny shape, without vLLM: cells are kept as they are measured, and measured once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import headline
import pytest
import tiny

MODELS = tiny.GOLDEN / "vllm"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("headline")
    for name, first in (("one", 3), ("two", 40)):
        lines = [json.dumps({"prompt_ids": [first + row, 7, 9, 11]}) for row in range(3)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    files = [f"{name}={directory / name}.jsonl" for name in ("one", "two")]
    options = ["--target", str(MODELS / "target"), "--drafter", str(MODELS / "eagle3")]
    options += ["--output", str(directory / "out"), "--prompts", *files]
    return [
        "--rehearse",
        *options,
        "--batches",
        "2",
        "--chains",
        "2",
        "--tree",
        "4",
        "2",
        "2",
        "--max-new-tokens",
        "5",
    ]


@pytest.fixture(scope="module")
def runs(arguments: list[str]) -> dict[str, Any]:
    """A run that is interrupted in its third cell, one in which a cell fails, and one that completes the rest."""
    path = Path(arguments[arguments.index("--output") + 1]) / "headline.json"
    records: dict[str, Any] = {"path": path}

    def run(name: str, errors: dict[int, BaseException] | None = None) -> None:
        """Runs the script with an error in some cells; keeps the record and the number of cells measured."""
        numbers = itertools.count(1)
        measure = headline.measure

        def counting(contenders: Any, prompts: Any, **options: Any) -> Any:
            if error := (errors or {}).get(next(numbers)):
                raise error
            return measure(contenders, prompts, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(headline, "measure", counting)
            try:
                headline.main(arguments)
            finally:
                records[name] = json.loads(path.read_text())
                records[f"cells {name}"] = next(numbers) - 1

    with pytest.raises(KeyboardInterrupt):
        run("interrupted", {3: KeyboardInterrupt()})
    with pytest.raises(
        SystemExit, match=r"1 cells failed; .* measures them again: two, T=1, batch 2, ours"
    ):
        run("failed", {2: RuntimeError("out of\nmemory")})
    run("complete")
    run("again")
    return records


def test_a_cell_is_kept_as_soon_as_it_is_measured_and_measured_once(runs: dict[str, Any]) -> None:
    assert list(runs["interrupted"]["cells"]) == [
        "one, T=0, batch 2, ours",
        "one, T=1, batch 2, ours",
    ]
    cells = runs["failed"]["cells"]
    assert len(cells) == 4
    assert [cell["failed"] for cell in cells.values() if "failed" in cell] == [
        "RuntimeError: out of memory"
    ]
    assert (runs["cells complete"], runs["cells again"]) == (1, 0)
    complete = runs["complete"]["cells"]
    assert not any("failed" in cell for cell in complete.values())
    assert (
        complete["one, T=0, batch 2, ours"]
        == runs["interrupted"]["cells"]["one, T=0, batch 2, ours"]
    )


def test_the_record_holds_what_the_table_is_made_of(runs: dict[str, Any]) -> None:
    record = runs["complete"]
    assert record["rehearsal"] and record["environment"]["target"] == record["target"]
    for cell in record["cells"].values():
        assert [row["name"] for row in cell["rows"]] == ["plain", "chain K=2", "tree N=4"]
        plain, chain, tree = cell["rows"]
        assert (
            plain["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
            and plain["acceptance"] is None
        )
        assert (
            len(chain["acceptance"]["per_position"]) == len(tree["acceptance"]["per_position"]) == 2
        )
        assert all(row["bandwidth_share"] > 0 for row in cell["rows"])
        # In float32 greedy text is that of plain decoding; sampled text is another.
        expected = None if cell["temperature"] else cell["num_prompts"]
        assert [row["same_texts"] for row in cell["rows"]] == [expected] * 3


def test_the_table_has_every_cell(runs: dict[str, Any]) -> None:
    table = (runs["path"].parent / "headline.md").read_text()
    assert table.startswith("A REHEARSAL: no figure counts.")
    assert (
        len([line for line in table.splitlines() if line.startswith(("| one", "| two"))])
        == 2 * 2 * 3
    )


def test_our_rows_have_the_ratios_to_vllm(runs: dict[str, Any]) -> None:
    """A record to which cells of vLLM were added by hand: its row appears, ours gives the ratio and the texts."""
    record = json.loads(json.dumps(runs["complete"]))
    cell = json.loads(json.dumps(record["cells"]["one, T=0, batch 2, ours"]))
    ours = next(row for row in cell["rows"] if row["name"] == "chain K=2")
    theirs = ours | {"name": "vLLM chain K=2"}
    ours |= {"ratio": {"median": 1.25, "low": 1.125, "high": 1.5}, "same_texts": 1}
    record["cells"]["one, T=0, batch 2, chain K=2"] = cell | {
        "rival": "chain K=2",
        "rows": [ours, theirs],
    }
    rows = [row for row in headline.table(record) if row[:3] == ["one", "0", "2"]]
    assert [row[3] for row in rows] == ["plain", "chain K=2", "tree N=4", "vLLM chain K=2"]
    over_vllm, texts = (headline.COLUMNS.index(name) for name in ("over vLLM", "same texts"))
    assert [row[over_vllm] for row in rows] == ["", "1.25 (1.12\N{EN DASH}1.5)", "", ""]
    assert [row[texts] for row in rows] == ["", "2 of 2", "2 of 2", "1 of 2"]


BAD = {
    "no record": (["--output", "NONE"], "is no record of this experiment"),
    "other options": (
        ["--repeats", "3"],
        "holds a run with another options; give another --output",
    ),
    "a file without a name": (["--prompts", "test.jsonl"], "expected NAME=FILE"),
    "no rows": (["--batches", "0"], "numbers of at least 1"),
    "a negative temperature": (["--temperatures", "-1"], "--temperatures of at least 0"),
}


@pytest.mark.parametrize(("more", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_2(
    runs, arguments: list[str], more: list[str], words: str, tmp_path, capsys
) -> None:
    (tmp_path / "headline.json").write_text("[1]")
    more = [str(tmp_path) if word == "NONE" else word for word in more]
    with pytest.raises(SystemExit) as ended:
        headline.main([*arguments, *more])
    assert ended.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "error: " in last and words in last
