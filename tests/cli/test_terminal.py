"""The command as a process: in a terminal, interrupted, and with its output closed or full."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from models_on_disk import write_bytes_target
from terminals import EAGLE3, InTerminal, environment

from eagle3_jax.cli import run

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
PAIR = ("--target", str(OFFICIAL / "target"), "--drafter", str(OFFICIAL / "eagle3"))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(write_bytes_target(tmp_path_factory.mktemp("model") / "bytes"))


# ---------------------------------------------------------------- in a terminal


def test_the_prompt_stays_on_the_screen(target):
    text = "def f(x):\n    return '\N{SNOWMAN}'\r + x"
    options = ("--target", target, "--drafter", "ngram", "--max-new-tokens", "6")
    wide = InTerminal("generate", text, *options, "--compare")
    lines = wide.finish()
    assert wide.code == 0

    assert lines[0] == "def f(x):"
    # The carriage return is shown and not obeyed, and the model's text goes on in the same line.
    assert lines[1].startswith("    return '\N{SNOWMAN}'\N{SYMBOL FOR CARRIAGE RETURN} + x")
    assert "[stopped: reached --max-new-tokens 6]" in lines
    assert b"measuring against plain decoding" in wide.seen
    # Progress disappears when it is done.
    assert not any("measuring" in line or "compiling" in line for line in lines)
    assert not wide.screen.cursor.hidden


def test_lines_of_json_go_to_the_standard_output_while_a_bar_is_shown(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 17]}\n{"prompt_ids": [9, 3]}\n')
    options = ("generate", *PAIR, "--prompts", str(prompts), "--max-new-tokens", "4", "--json")
    piped = InTerminal(*options, pipe=True)
    screen = piped.finish()
    assert [json.loads(line)["prompt_ids"] for line in piped.output.splitlines()] == [
        [1, 17],
        [9, 3],
    ]
    assert not any("token_ids" in line for line in screen)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_terminal_leaves_a_cursor_and_no_traceback(number):
    started = InTerminal(
        "generate", *PAIR, "--prompt-ids", "[1, 17]", "--max-new-tokens", "300", "--ignore-eos"
    )
    started.read(until=b"\x1b[?25l")  # the spinner has hidden the cursor
    os.killpg(started.process.pid, number)
    lines = started.finish()
    assert started.code in (128 + number, -number)  # a shell shows both as 128 + number
    assert not started.screen.cursor.hidden
    assert not any("Traceback" in line or "Error" in line for line in lines)
    assert started.screen.cursor.x == 0


# -------------------------------------------------------------- outputs that do not take everything


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [
        (
            "plan speedup --json > /dev/full",
            2,
            "error: disk full: the output (No space left on device)\n",
        ),
        ("plan speedup >&-", 0, ""),
        ("plan nothing 2> /dev/full", 2, ""),
    ],
)
def test_an_output_that_is_full_or_closed_is_one_line_at_most(redirection, code, error):
    command = ["bash", "-c", f"{sys.executable} -m eagle3_jax {redirection}"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (code, error)


def test_characters_that_the_encoding_of_the_output_lacks_are_escaped():
    command = [*EAGLE3, "plan", "speedup"]
    result = subprocess.run(
        command, env=environment(PYTHONIOENCODING="ascii"), capture_output=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, b"") and b"\\u03c4" in result.stdout


def test_a_reader_that_leaves_in_the_middle_of_a_text_is_no_error():
    process = subprocess.Popen(
        [
            *EAGLE3, "generate", *PAIR, "--prompt-ids", "[1, 17]",
            "--max-new-tokens", "400", "--ignore-eos",
        ],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


# ---------------------------------------------------------------- what is printed


@pytest.fixture
def printed(capfd):
    def call(*arguments: str) -> str:
        code = run(["generate", *arguments])
        out, err = capfd.readouterr()
        assert (code, err) == (0, "")
        return out

    return call


@pytest.mark.parametrize(
    "prompt", ["a\tb\r\nc", "\N{SNOWMAN} \N{GRINNING FACE}", "[bold]x[/bold] \x1b[2J"]
)
def test_the_text_in_a_pipe_is_the_prompt_and_the_text_of_json_to_the_letter(
    printed, target, prompt
):
    options = (prompt, "--target", target, "--drafter", "ngram", "--max-new-tokens", "24")
    row = json.loads(printed(*options, "--json"))
    shown = printed(*options)
    assert "�" in row["text"]
    assert shown.split("\n[stopped: reached --max-new-tokens 24]\n")[0] == prompt + row["text"]


def test_every_figure_follows_from_the_json(printed, target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "aaaaaa"}\n{"prompt": "abcabcabc", "max_new_tokens": 9}\n')
    options = ("--target", target, "--drafter", "ngram", "--max-new-tokens", "20")
    options += ("--prompts", str(prompts))
    rows = [json.loads(line)["stats"] for line in printed(*options, "--json").splitlines()]
    shown = printed(*options, "--compare")

    drafts, drafted, accepted = (
        sum(row[name] for row in rows)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    tau = 1 + accepted / drafts
    accepted_in = f"{accepted} accepted in {drafts} drafts"
    assert f"τ = {tau:.2f} tokens per round (1 + accepted / drafts: {accepted_in})" in shown

    assert f"{accepted / drafted:.0%} of the drafted tokens accepted" in shown
    depths = zip(*(row["num_accepted_tokens_per_pos"] for row in rows), strict=True)
    rates = " ".join(f"{sum(depth) / drafts:.2f}" for depth in depths)
    assert f"accepted at depth 1, 2, ...: {rates}" in shown

    speeds = re.search(
        r"([\d.]+)x[^(]* plain decoding \(([\d.]+) vs ([\d.]+) tokens/s;.* identical output: yes",
        shown,
    )
    ratio, ours, plain = map(float, speeds.groups())
    assert ratio == pytest.approx(ours / plain, abs=0.00501)


def comparison(ours: Sequence[float], plain: Sequence[float]) -> str:
    from eagle3_jax.bench.comparison import Comparison
    from eagle3_jax.cli.generate import speed_line
    from eagle3_jax.measure.timing import Spread

    ratios = tuple(speed / baseline for speed, baseline in zip(ours, plain, strict=True))
    return speed_line(
        Comparison(Spread.of(ours), Spread.of(plain), ratios, is_plain=False, same_output=True)
    )


def test_the_ratio_is_that_of_the_two_printed_speeds():
    # By repeat the ratios are 1.19, 0.60 and 1.67, whose median is not the ratio of the two
    # medians, 334.4 and 340.7.
    noise = comparison([334.4, 280.0, 569.2], [281.0, 466.7, 340.7])
    assert noise == (
        "0.98x, no measurable difference from plain decoding (334.4 vs 340.7 tokens/s; 0.60x to"
        " 1.67x in 3 runs), identical output: yes"
    )

    faster = comparison([3.0, 3.2, 3.1], [2.0, 2.0, 1.994])
    assert faster == (
        "1.55x faster than plain decoding (3.1 vs 2 tokens/s; 1.50x to 1.60x in 3 runs),"
        " identical output: yes"
    )

    slow = comparison([0.0123], [0.0204])
    line = "0.60x the speed of plain decoding (0.0123 vs 0.0204 tokens/s; 0.60x to 0.60x in 1 runs)"
    assert slow == f"{line}, identical output: yes"


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_loses_columns_in_a_narrow_terminal_and_no_cell(width):
    from eagle3_jax.cli._printing import fit_table
    from eagle3_jax.measure.tables import Table

    columns = [
        "method",
        "dtype",
        "tokens/s",
        "ratio",
        "95 %",
        "τ",
        "total",
        "total ratio",
        "roofline",
        "compile",
    ]
    table = Table(
        "Speed",
        columns,
        [["chain K=3", "float32", "123.4", "1.40 (1.38-1.42)", *["[1.30-1.50]"] * 6]],
    )
    shown = fit_table(table, width)
    assert sum(2 + len(str(cell)) for cell in shown.rows[0]) <= width
    assert {"method", "tokens/s", "ratio", "τ"} <= set(shown.columns)
    assert (shown.columns == columns) == (width == 200)
