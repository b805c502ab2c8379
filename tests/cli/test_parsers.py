"""Values of options and lines of prompt files are read as written, or refused with the reason."""

from __future__ import annotations

import dataclasses
import inspect
import io
import itertools
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models_on_disk import write_bytes_target
from tokenizers import Tokenizer

from eagle3_jax import ChatTemplate, LoadedTarget, load_target
from eagle3_jax.cli import plan, run, train
from eagle3_jax.cli._commands import app
from eagle3_jax.cli._options import parse_ids, parse_numbers, parse_schedule, parse_tree
from eagle3_jax.conversion.files import read_tokenizer
from eagle3_jax.files.sources import bundled
from eagle3_jax.prompts.benchmark import (
    Prompt,
    in_turn,
    random_prompts,
    read_prompts,
    resize_prompt,
)
from eagle3_jax.prompts.reading import read_requests
from eagle3_jax.prompts.request import Request
from eagle3_jax.text.tokens import tokenized

ROOT = Path(__file__).parent.parent.parent
OFFICIAL = ROOT / "tests" / "golden" / "official"
TOKENIZER = Tokenizer.from_file(str(bundled("target") / "tokenizer.json"))
PAIR = ("--target", str(OFFICIAL / "target"), "--drafter", str(OFFICIAL / "eagle3"))
QUESTION = {"question_id": 7, "category": "math", "turns": ["What is 1 + 1?", "And 2 + 2?"]}
MANY = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# ---------------------------------------------------------------- numbers


class Option(NamedTuple):
    command: tuple[str, ...]
    name: str
    required: tuple[str, ...]  # the other arguments that the command requires


def leaves(hint: Any) -> Iterator[Any]:
    inner = typing.get_args(hint)
    yield from itertools.chain.from_iterable(map(leaves, inner)) if inner else (hint,)


def numeric_options() -> Iterator[Option]:
    for prefix, group in (((), app), (("plan",), plan.app), (("train",), train.app)):
        for command in group.registered_commands:
            hints = typing.get_type_hints(command.callback, include_extras=True)
            names = {}
            required = {}
            for name, parameter in inspect.signature(command.callback).parameters.items():
                (info, *_) = getattr(hints[name], "__metadata__", (None,))
                declared = getattr(info, "param_decls", None) or ()
                names[name] = declared[0] if declared else f"--{name.replace('_', '-')}"
                if parameter.default is parameter.empty:
                    is_argument = isinstance(info, typer.models.ArgumentInfo)
                    required[name] = ("x",) if is_argument else (names[name], "1")

            for name in names:
                if {int, float} & set(leaves(hints[name])):
                    others = [words for argument, words in required.items() if argument != name]
                    command_name = command.name or command.callback.__name__
                    words = tuple(itertools.chain.from_iterable(others))
                    yield Option((*prefix, command_name), names[name], words)


OPTIONS = list(numeric_options())


@pytest.mark.parametrize(
    "option", OPTIONS, ids=lambda option: " ".join((*option.command, option.name))
)
@pytest.mark.parametrize("value", ["-1", "nan"])
def test_no_option_takes_what_is_no_finite_number_of_at_least_zero(option, value, refused):
    line = refused(*option.command, *option.required, option.name, value)
    assert (
        option.name.strip("-").split("-")[0] in line
        or "alpha" in option.name
        or "-K" in option.name
    )


# ---------------------------------------------------------------- lists, trees, schedules and ids


def parsed(parse, text, named: str):
    """Returns the parsed value; ``None`` if it was refused with a message that holds ``named``."""
    try:
        return parse(text)
    except ValueError as error:
        refusal = str(error)
    assert named in refusal
    return None


KEYS = st.sampled_from(["prompt", "prompt_ids", "max_new_tokens", "max_tokens", "name"]) | st.text(
    max_size=3
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=5,
)
NUMBER = st.integers(-(10**13), 10**13).map(str) | st.sampled_from(
    ["", "٣", "1e9", "nan", " 5", "9" * 5000]
)
TREES = st.lists(
    st.tuples(
        st.sampled_from(["num_nodes", "max_depth", "top_k", "", "x"]),
        st.integers(-1, 70).map(str) | NUMBER,
    ),
    max_size=4,
).map(lambda pairs: ",".join(f"{name}={value}" for name, value in pairs))
SCHEDULES = st.lists(
    st.lists(st.integers(-1, 20) | st.integers(), max_size=4) | VALUES, max_size=3
).map(json.dumps)
LISTS = st.lists(NUMBER | st.integers(0, 20).map(str), max_size=4).flatmap(
    lambda parts: st.sampled_from([",".join(parts), "-".join(parts)])
)


@MANY
@given(
    tree=TREES | st.text(max_size=8),
    schedule=SCHEDULES | st.text(max_size=8),
    numbers=LISTS | st.text(max_size=8),
)
def test_any_value_of_an_option_is_what_it_says_or_one_clear_line(tree, schedule, numbers):
    shape = parsed(parse_tree, tree, "--tree ")
    assert shape is None or 2 <= shape.num_nodes <= 2**20 + 1
    stages = parsed(parse_schedule, f"[{schedule.removeprefix('[')}", "--schedule ")
    assert stages is None or stages.steps(10**9)
    lengths = parsed(lambda text: parse_numbers(text, "--chains"), numbers, "--chains ")
    assert lengths is None or all(1 <= number <= 100_000 for number in lengths)
    ids = parsed(parse_ids, schedule, "--prompt-ids")
    assert ids is None or all(type(token) is int for token in ids)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1-4", [1, 2, 3, 4]), ("1-3, 8,2", [1, 2, 3, 8]), ("0-3", None), ("3-1", None), ("1-", None)],
)
def test_numbers_are_ranges_and_lists(text, numbers):
    assert parsed(lambda text: parse_numbers(text, "--chains"), text, "--chains ") == numbers
    assert parse_numbers("none", "--ngram", or_none=True) == []


# ---------------------------------------------------------------- lines of prompt files


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target()


def requests_of(tmp_path: Path, content: str | bytes) -> list[Request]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_requests(path, Request("", 7))


LINES = st.dictionaries(
    KEYS, VALUES | st.integers(1, 9) | st.lists(st.integers(0, 9)), max_size=3
).map(json.dumps)
FILES = st.binary(max_size=60) | st.lists(LINES | st.text(max_size=12), max_size=3).map(
    lambda lines: "\n".join(lines).encode("utf-8", "surrogatepass")
)


@MANY
@given(FILES)
def test_any_file_is_a_list_of_prompts_or_one_clear_line(tmp_path, content):
    requests = parsed(lambda content: requests_of(tmp_path, content), content, "prompts.jsonl")
    if requests is None:
        return
    # The values are those that another reader of JSON finds.
    rows = [json.loads(line) for line in content.decode("utf-8-sig").split("\n") if line.strip()]

    for row, request in zip(rows, requests, strict=True):
        assert request.prompt == row.get("prompt", row.get("prompt_ids"))
        assert isinstance(request.prompt, str) or all(
            type(token) is int for token in request.prompt
        )
        assert request.max_new_tokens == row.get("max_new_tokens", 7)
        assert type(request.max_new_tokens) is int
        assert 1 <= request.max_new_tokens <= 10**9


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            '{"prompt": "a", "max_tokens": 3}',
            "'max_tokens' is not known; did you mean 'max_new_tokens'?",
        ),
        (
            '{"text": "a"}',
            "'text' is not known; expected 'prompt', 'prompt_ids', 'messages', 'turns', 'question',",
        ),
        ('{"prompt": "a", "ignore_eos": 1}', "it is given for all prompts, with --ignore-eos"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' occurs twice"),
        (
            '{"prompt": "a", "max_new_tokens": true}',
            "max_new_tokens is True; expected a whole number from 1 to",
        ),
        ('{"prompt": "a", "max_new_tokens": NaN}', "NaN is not a number of JSON"),
        ('{"prompt": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
        (
            '{"prompt": "a", "max_new_tokens": ' + "1" * 5000 + "}",
            "not JSON (a number has 5000 digits)",
        ),
        (
            '{"prompt": "a", "max_new_tokens": 1e999}',
            "max_new_tokens is inf; expected a whole number from 1 to",
        ),
        ('{"prompt": "a", "max_new_tokens": ' + "1" * 4000 + "}", "max_new_tokens is 111"),
        ('{"' + "k" * 500 + '": 1, "' + "k" * 500 + '": 2}', "... occurs twice"),
        ('{"prompt_ids": [1.0]}', "prompt token 1.0 is not a token id"),
        ('{"prompt_ids": [-1]}', "prompt token -1 is not a token id"),
        ('{"prompt": 3}', "'prompt' is 3; expected a text"),
        ('{"prompt": "x", "prompt_ids": [1]}', "with one of 'prompt', 'prompt_ids', 'messages'"),
        ("{} {}", "not JSON"),
        ("null", "not an object"),
        (b"\xe9", "is not a text file in UTF-8 (byte 19)"),
    ],
)
def test_a_line_that_would_not_do_what_it_says_is_refused(tmp_path, line, named):
    with pytest.raises(ValueError, match=r"prompts\.jsonl ") as refusal:
        requests_of(
            tmp_path, b'{"prompt": "fine"}\n' + (line if isinstance(line, bytes) else line.encode())
        )
    assert named in str(refusal.value)
    assert len(str(refusal.value)) < 600


def test_what_editors_and_published_files_add_is_no_mistake(tmp_path):
    lines = [
        '{"prompt": "a\u2028b", "max_new_tokens": 5}\r',
        "",
        '{"task_id": "HumanEval/0", "prompt": "def f(x):", "entry_point": "f", "test": "",'
        ' "canonical_solution": ""}',
        '{"name": "x", "kind": "code", "prompt_ids": [1, 2]}',
    ]

    read = requests_of(tmp_path, b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert [(request.prompt, request.max_new_tokens) for request in read] == [
        ("a\u2028b", 5),
        ("def f(x):", 7),
        ([1, 2], 7),
    ]

    for content in (b"", b"\n \r\n", b"\xef\xbb\xbf"):
        with pytest.raises(ValueError, match="holds no lines"):
            requests_of(tmp_path, content)


# ---------------------------------------------------------------- prompts of a benchmark


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_format_is_read_and_questions_go_through_the_chat_template(
    tmp_path: Path, target: LoadedTarget
) -> None:
    path = written(
        tmp_path,
        QUESTION | {"reference": ["2\n#### 2", "4"]},
        {"question": "What is 1 + 1?", "answer": "#### 2"},
        {"prompt": "def f(x):", "max_new_tokens": 5},
        {"prompt_ids": [1, 2, 3], "name": "three", "reference": "abc"},
    )

    turns, question, text, ids = read_prompts(path, target, max_new_tokens=9)
    tokens = TOKENIZER.encode("What is 1 + 1?").ids
    assert turns == Prompt("7", "math", tokens, "What is 1 + 1?", "2\n#### 2", 9)
    name = "questions.jsonl line {}".format
    assert question == Prompt(name(2), "questions", tokens, "What is 1 + 1?", "#### 2", 9)
    assert text == Prompt(
        name(3), "questions", TOKENIZER.encode("def f(x):").ids, "def f(x):", None, 5
    )
    assert ids == Prompt("three", "questions", [1, 2, 3], None, "abc", 9)

    templated = dataclasses.replace(
        target, chat_template=ChatTemplate("Q: {{ messages[0].content }} A:")
    )
    question_ids = TOKENIZER.encode("Q: What is 1 + 1? A:").ids
    prompts = read_prompts(path, templated, max_new_tokens=9)
    expected = [question_ids, question_ids, text.tokens, ids.tokens]
    assert [prompt.tokens for prompt in prompts] == expected

    sized = read_prompts(path, templated, max_new_tokens=4, length=50)
    assert [len(prompt.tokens) for prompt in sized] == [50] * 4
    assert (question_ids * 50)[-50:] == sized[0].tokens


def test_messages_are_requests_with_options_of_their_own(
    tmp_path: Path, target: LoadedTarget
) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "why?"}]
    file = written(tmp_path, {"messages": messages, "seed": 3})
    defaults = Request("", 7, temperature=0.5, stops=("\n",))
    expected = Request(
        "why?", 7, 0.5, seed=3, stops=("\n",), messages=messages, where=f"{file} line 1: "
    )
    assert read_requests(file, defaults) == [expected]

    for wrong, says in (
        ([], r"messages are \[\]; expected a list of turns"),
        ([{"role": "user"}], "message 1 is .*expected a list of turns such as"),
        (
            [*messages, {"role": "oracle", "content": ""}],
            "message 3 has the role 'oracle'; expected system, user, a",
        ),
    ):
        with pytest.raises(ValueError, match=rf"questions\.jsonl line 1: {says}"):
            read_requests(written(tmp_path, {"messages": wrong}), Request("", 7))

    for row, says in (
        ({"messages": messages}, "has no chat template"),
        ({"prompt": "a", "temperature": 1}, "it is given for all prompts, with --temperature"),
    ):
        with pytest.raises(ValueError, match=says):
            read_prompts(written(tmp_path, row), target, max_new_tokens=7)


def test_all_commands_read_the_same_lines(tmp_path: Path, target: LoadedTarget) -> None:
    templated = dataclasses.replace(
        target,
        chat_template=ChatTemplate(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        ),
    )
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    rows = (
        {"messages": turns, "category": "chat"},
        QUESTION,
        {"question": "Why?", "answer": "So."},
        {"prompt": "def f(x):", "max_new_tokens": 5},
        {"prompt_ids": [1, 2, 3]},
    )
    file = written(tmp_path, *rows)
    of_bench = read_prompts(file, templated, max_new_tokens=9)
    of_generate = [request.encoded(templated) for request in read_requests(file, Request("", 9))]
    assert [prompt.tokens for prompt in of_bench] == [request.tokens for request in of_generate]
    assert [prompt.max_new_tokens for prompt in of_bench] == [9, 9, 9, 5, 9]
    assert of_bench[0].tokens == TOKENIZER.encode("system: Be kind.user: Why?").ids
    assert (of_bench[0].category, of_bench[0].text) == ("chat", "Why?")

    # Without a template a question is continued, and a conversation is refused.
    questions = written(tmp_path, *rows[1:])
    first = read_requests(questions, Request("", 9))[0].encoded(target)
    assert first.tokens == TOKENIZER.encode("What is 1 + 1?").ids


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "'text' is not known; expected 'prompt', 'prompt_ids', 'messages'"),
        ({"name": "x"}, "expected an object such as .* with one of 'prompt', 'prompt_ids'"),
        ({"turns": []}, r"'turns' is \[\]; expected a list of texts, at least one"),
        ({"question": ""}, "'question' is ''; expected a text"),
        (QUESTION | {"reference": 3}, "'reference' must be"),
        (
            {"question": "1 + 1?", "max_tokens": 5},
            "'max_tokens' is not known; did you mean 'max_new_tokens'",
        ),
        ({"prompt_ids": [4096]}, "prompt token 4096"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_ids": [1] * 510}, "the prompt has 510 tokens and is given 9 more"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, target: LoadedTarget, row: object, message: str
) -> None:
    path = written(tmp_path, {"prompt": "x"}, row)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path, target, max_new_tokens=9)
    assert str(caught.value).startswith(f"{path} line 2: ")
    assert "\n" not in str(caught.value)


def test_prompts_of_a_fixed_length_and_in_turn():
    assert resize_prompt([1, 2, 3], 2) == [2, 3]
    assert resize_prompt([1, 2, 3], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert random_prompts(2, 10, 5) == random_prompts(2, 10, 5)
    assert {token for prompt in random_prompts(50, 4, 5) for token in prompt.tokens} == {0, 1, 2, 3}
    files = [(file, line) for file in ("a1", "a2", "b1") for line in (1, 2)]
    every = [Prompt(f"{file}:{line}", file[0], [1], None, None, 1) for file, line in files]
    assert [prompt.name for prompt in in_turn(every, 4)] == ["a1:1", "a2:1", "b1:1", "b1:2"]
    assert {prompt.name for prompt in in_turn(every, 9)} == {prompt.name for prompt in every}


# ------------------------------------------------------ the standard input, and texts that are none


def pipe(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_dash_is_the_standard_input_for_a_prompt_and_for_a_file_of_prompts(
    monkeypatch, capsys, refused, tmp_path
):
    pipe(monkeypatch, b'{"prompt_ids": [1, 17]}\n')
    assert run(["generate", *PAIR, "--prompts", "-", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_ids"] == [1, 17]

    pipe(monkeypatch, "\ufeffdef f(x):\n".encode())
    target = ("--target", str(write_bytes_target(tmp_path / "bytes")), "--drafter", "none")
    assert run(["generate", "-", *target, "--max-new-tokens", "2", "--json"]) == 0
    # A text is taken to the letter.
    assert len(json.loads(capsys.readouterr().out)["prompt_ids"]) == len("def f(x):\n")

    pipe(monkeypatch, b"\xff")
    assert "the standard input is not a text file in UTF-8 (byte 0)" in refused("generate", "-")
    pipe(monkeypatch, b'{"prompt_ids": []}')
    assert "the standard input line 1: the prompt is empty" in refused(
        "generate", *PAIR, "--prompts", "-"
    )
    monkeypatch.setattr(sys, "stdin", None)
    assert "the standard input is closed" in refused("generate", "-")
    # This is what Python makes of an argument that is not UTF-8.
    assert "character 2 is '\\udcff'" in refused("generate", "a\udcffb")


@pytest.mark.parametrize(
    "text", ["def f(x): return x\n" * 550_000, "a" * 10_000_000, " " * 10_000_000]
)
def test_ten_megabytes_are_refused_by_their_beginning(text):
    seen = []

    def encode(part: str) -> list[int]:
        seen.append(len(part))
        return TOKENIZER.encode(part).ids

    with pytest.raises(
        ValueError, match=r"the prompt has \d+ characters, far more tokens than the 512 positions"
    ):
        tokenized(text, encode, positions=512)
    assert sum(seen) < 200_000


def test_a_long_text_of_few_tokens_is_no_long_prompt():
    text = TOKENIZER.decode([TOKENIZER.token_to_id("=" * 40)]) * 500
    ids = TOKENIZER.encode(text).ids
    assert tokenized(text, lambda part: TOKENIZER.encode(part).ids, positions=512) == ids


def test_a_tokenizer_that_was_saved_with_a_length_cuts_and_pads_nothing(tmp_path):
    tokenizer = Tokenizer.from_file(str(bundled("target") / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "def fibonacci(number):"
    expected = TOKENIZER.encode(text).ids
    assert read_tokenizer(tmp_path / "tokenizer.json").encode(text).ids == expected

    for content in ("{}", "", '{"model": {"type": "BPE"}}', "[" * 100_000):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
            read_tokenizer(tmp_path / "tokenizer.json")
