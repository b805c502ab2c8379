"""Prompts from files, the standard input and options: read as they stand, or refused in one line that says why."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models_on_disk import write_bytes_target
from tokenizers import Tokenizer

from eagle3_jax import load_target
from eagle3_jax.cli import run
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import parse_ids, parse_numbers, parse_schedule, parse_tree
from eagle3_jax.load import read_tokenizer
from eagle3_jax.prompts import Renderer, Request, read_prompts, read_requests
from eagle3_jax.sources import bundled
from eagle3_jax.text import tokenized

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
TOKENIZER = Tokenizer.from_file(str(bundled("target") / "tokenizer.json"))
PAIR = ("--target", str(OFFICIAL / "target"), "--drafter", str(OFFICIAL / "eagle3"))


def requests_of(tmp_path: Path, content: str | bytes) -> list[Request]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_requests(path, 7)


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"prompt": "a", "max_tokens": 3}', "'max_tokens' is not known; did you mean 'max_new_tokens'?"),
        ('{"prompt": "a", "max_new_token": 3}', "'max_new_token' is not known; did you mean 'max_new_tokens'?"),
        ('{"promt": "a"}', "'promt' is not known; did you mean 'prompt'?"),
        ('{"text": "a"}', "'text' is not known; did you mean 'prompt'?"),
        ('{"input_ids": [1]}', "'input_ids' is not known; did you mean 'prompt_ids'?"),
        ('{"prompt": "a", "temperature": 1}', "it is given for all prompts, with --temperature"),
        ('{"prompt": "a", "color": 1}', "'color' is not known; expected 'prompt', 'prompt_ids', 'max_new_tokens'"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' stands there twice"),
        ('{"prompt": {"a": 1, "a": 2}}', "'a' stands there twice"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0; expected a whole number from 1 to"),
        ('{"prompt": "a", "max_new_tokens": -1}', "max_new_tokens is -1"),
        ('{"prompt": "a", "max_new_tokens": 1000000000000}', "max_new_tokens is 1000000000000"),
        ('{"prompt": "a", "max_new_tokens": 1e400}', "max_new_tokens is inf"),
        ('{"prompt": "a", "max_new_tokens": 1.5}', "max_new_tokens is 1.5"),
        ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens is True"),
        ('{"prompt": "a", "max_new_tokens": null}', "max_new_tokens is None"),
        ('{"prompt": "a", "max_new_tokens": "5"}', "max_new_tokens is '5'"),
        ('{"prompt": "a", "max_new_tokens": NaN}', "NaN is no number of JSON"),
        ('{"prompt": "a", "max_new_tokens": ' + "9" * 5000 + "}", "not JSON"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
        ('{"prompt_ids": [' + "[" * 300 + "]" * 300 + "]}", "is not a token id"),
        ('{"prompt_ids": [true]}', "prompt token True is not a token id"),
        ('{"prompt_ids": [1.0]}', "prompt token 1.0 is not a token id"),
        ('{"prompt": true}', "'prompt' must be a text"),
        ('{"prompt": "a"', "not JSON"),
        ("{} {}", "not JSON"),
        ("null", "not an object"),
    ],
)
def test_a_line_that_would_not_do_what_it_says_is_refused(tmp_path, line, named):
    with pytest.raises(ValueError, match=r"prompts\.jsonl line 2: ") as refusal:
        requests_of(tmp_path, '{"prompt": "fine"}\n' + line)
    assert named in str(refusal.value)
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "holds no prompts"),
        (b"\n \r\n", "holds no prompts"),
        (b"\xef\xbb\xbf", "holds no prompts"),
        (b'{"prompt": "\xe9"}\n', r"is not a text file in UTF-8 \(byte 12\)"),
        ('{"prompt": "a"}'.encode("utf-16"), "is in UTF-16; save it in UTF-8"),
        (b"\x00\x01", "not JSON"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path, content, named):
    with pytest.raises(ValueError, match=named):
        requests_of(tmp_path, content)


def test_what_editors_and_published_files_add_is_no_mistake(tmp_path):
    lines = [
        '{"prompt": "a\u2028b", "max_new_tokens": 5}\r',
        "",
        '{"task_id": "HumanEval/0", "prompt": "def f(x):", "entry_point": "f", "test": "", "canonical_solution": ""}',
        '{"name": "x", "kind": "code", "prompt_ids": [1, 2]}',
    ]
    read = requests_of(tmp_path, b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert [(one.prompt, one.max_new_tokens) for one in read] == [("a\u2028b", 5), ("def f(x):", 7), ([1, 2], 7)]


def test_a_limit_in_a_benchmark_question_is_not_ignored(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2", "max_tokens": 5}\n')
    with pytest.raises(ValueError, match="line 1: 'max_tokens' is not known; did you mean 'max_new_tokens'"):
        read_prompts(path, load_target(), Renderer("plain"), max_new_tokens=4)


# ---------------------------------------------------------------- anything at all

KEYS = st.sampled_from(["prompt", "prompt_ids", "max_new_tokens", "max_tokens", "name"]) | st.text(max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=5,
)
LINES = st.dictionaries(KEYS, VALUES | st.integers(1, 9) | st.lists(st.integers(0, 9)), max_size=3).map(json.dumps)
FILES = st.binary(max_size=60) | st.lists(LINES | st.text(max_size=12), max_size=3).map(
    lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")
)
MANY = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def taken(parse, given, named: str):
    """What is made of it; ``None`` when it was refused as everything is."""
    try:
        return parse(given)
    except ValueError as error:
        refusal = str(error)
    assert named in refusal
    return None


@MANY
@given(FILES)
def test_any_file_is_a_list_of_prompts_or_one_clear_line(tmp_path, content):
    found = taken(lambda content: requests_of(tmp_path, content), content, "prompts.jsonl")
    if found is None:
        return
    # What was taken is what another reader of JSON finds there.
    rows = [json.loads(line) for line in content.decode("utf-8-sig").split("\n") if line.strip()]
    for row, one in zip(rows, found, strict=True):
        assert one.prompt == row.get("prompt", row.get("prompt_ids"))
        assert isinstance(one.prompt, str) or all(type(token) is int for token in one.prompt)
        assert one.max_new_tokens == row.get("max_new_tokens", 7)
        assert type(one.max_new_tokens) is int
        assert 1 <= one.max_new_tokens <= 10**9


NUMBER = st.integers(-(10**13), 10**13).map(str) | st.sampled_from(["", "٣", "1e9", "nan", " 5", "9" * 5000])
TREES = st.lists(
    st.tuples(st.sampled_from(["num_nodes", "max_depth", "top_k", "", "x"]), st.integers(-1, 70).map(str) | NUMBER),
    max_size=4,
).map(lambda pairs: ",".join(f"{name}={value}" for name, value in pairs))
SCHEDULES = st.lists(st.lists(st.integers(-1, 20) | st.integers(), max_size=4) | VALUES, max_size=3).map(json.dumps)
LISTS = st.lists(NUMBER | st.integers(0, 20).map(str), max_size=4).flatmap(
    lambda parts: st.sampled_from([",".join(parts), "-".join(parts)])
)


@MANY
@given(tree=TREES | st.text(max_size=8), schedule=SCHEDULES | st.text(max_size=8), numbers=LISTS | st.text(max_size=8))
def test_any_value_of_an_option_is_what_it_says_or_one_clear_line(tree, schedule, numbers):
    shape = taken(parse_tree, tree, "--tree ")
    assert shape is None or 2 <= shape.num_nodes <= 2**20 + 1
    stages = taken(parse_schedule, f"[{schedule.removeprefix('[')}", "--schedule ")
    assert stages is None or stages.steps(10**9)
    lengths = taken(lambda text: parse_numbers(text, "--chains"), numbers, "--chains ")
    assert lengths is None or all(1 <= number <= 100_000 for number in lengths)
    ids = taken(parse_ids, schedule, "--prompt-ids")
    assert ids is None or all(type(token) is int for token in ids)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("1-4", [1, 2, 3, 4]), ("5,1,5", [1, 5]), ("1-3, 8", [1, 2, 3, 8]), ("100000", [100000])],
)
def test_numbers_are_ranges_and_lists(text, numbers):
    assert parse_numbers(text, "--chains") == numbers


@pytest.mark.parametrize(
    "text", ["", "0-3", "3-1", "-1", "1-", "1,,2", "1-2-3", "1.5", "none", "100001", "1-999999999999"]
)
def test_other_numbers_are_one_line(text):
    with pytest.raises(Misuse, match=r"--chains .* expected whole numbers from 1 to 100000, such as '1-7' or '1,3,5'$"):
        parse_numbers(text, "--chains")
    assert parse_numbers("none", "--ngram", or_none=True) == []
    assert parse_numbers("0,3", "--vllm-chains", least=0) == [0, 3]


# ---------------------------------------------------------------- the standard input


def pipe(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_dash_is_the_standard_input_for_a_prompt_and_for_a_file_of_prompts(monkeypatch, capsys, refused, tmp_path):
    pipe(monkeypatch, b'{"prompt_ids": [1, 17]}\n')
    assert run(["generate", *PAIR, "--prompts", "-", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_ids"] == [1, 17]

    pipe(monkeypatch, "\ufeffdef f(x):\n".encode())
    target = ("--target", str(write_bytes_target(tmp_path / "bytes")), "--drafter", "none")
    assert run(["generate", "-", *target, "--max-new-tokens", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["prompt_ids"]) == len("def f(x):\n")  # to the letter

    pipe(monkeypatch, b"")
    assert "the prompt is empty" in refused("generate", "-")
    pipe(monkeypatch, b"\xff")
    assert "the standard input is not a text file in UTF-8 (byte 0)" in refused("generate", "-")
    pipe(monkeypatch, b'{"prompt_ids": []}')
    assert "the standard input line 1: the prompt is empty" in refused("generate", *PAIR, "--prompts", "-")
    monkeypatch.setattr(sys, "stdin", None)
    assert "the standard input is closed" in refused("generate", "-")


# ---------------------------------------------------------------- text that is none, and too much of it


def test_half_a_character_is_refused_in_one_line(refused, tmp_path):
    # What Python makes of an argument that is not UTF-8, and what JSON can spell.
    assert "character 2 is '\\udcff'" in refused("generate", "a\udcffb")
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\\ud800b"}\n')
    assert "line 1: the prompt's character 2 is '\\ud800'" in refused("generate", "--prompts", path)
    assert "no/such" in refused("generate", "--target", "/no/such\udcff", "--drafter", "none", "a")


@pytest.mark.parametrize("text", ["def f(x): return x\n" * 550_000, "a" * 10_000_000, " " * 10_000_000])
def test_ten_megabytes_are_refused_by_their_beginning(text):
    seen = []

    def encode(part: str) -> list[int]:
        seen.append(len(part))
        return TOKENIZER.encode(part).ids

    with pytest.raises(ValueError, match=r"the prompt has \d+ characters, far more tokens than the 512 positions"):
        tokenized(text, encode, positions=512)
    assert sum(seen) < 200_000


def test_a_long_text_of_few_tokens_is_no_long_prompt():
    text = TOKENIZER.decode([TOKENIZER.token_to_id("=" * 40)]) * 500
    assert len(text) > 512 * 2 * 6
    ids = TOKENIZER.encode(text).ids
    assert tokenized(text, lambda part: TOKENIZER.encode(part).ids, positions=512) == ids


@pytest.mark.parametrize("content", ["{}", "", "[1]", '{"model": {"type": "BPE"}}', "[" * 100_000])
def test_a_tokenizer_that_is_none_is_refused_in_one_line(refused, tmp_path, content):
    target = tmp_path / "target"
    shutil.copytree(OFFICIAL / "target", target)
    (target / "tokenizer.json").write_text(content)
    line = refused("generate", "x", "--target", target, "--drafter", "none")
    assert "tokenizer.json is not a tokenizer" in line


def test_a_tokenizer_that_was_saved_with_a_length_cuts_and_pads_nothing(tmp_path):
    tokenizer = Tokenizer.from_file(str(bundled("target") / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "def fibonacci(number):"
    assert read_tokenizer(tmp_path / "tokenizer.json").encode(text).ids == TOKENIZER.encode(text).ids
