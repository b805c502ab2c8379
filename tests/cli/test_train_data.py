"""``eagle3 train data``: what it writes, how it goes on after an interruption, what it refuses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models_on_disk import POSITIONS, write_chat_target

import eagle3_jax as e3
from eagle3_jax.cli.train import data as train_data
from eagle3_jax.cli.train.files import joined_texts, read_texts
from eagle3_jax.training import own_text
from eagle3_jax.training.texts import Text, Texts

QUESTIONS = ("why not", "how so", "tell me more", "who is it", "what now")
OPENING = "tell me about "
REWRITING = ("--rewrite", "--greedy-share", 1, "--length", 60, "--rows", 2)
SUMMARY = (
    r"wrote (.*): ([\d,]+) texts, ([\d,]+) tokens to learn; ([\d,]+) texts held out"
    r"(?:; left out now: (.*))?\n"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts in a file."""
    monkeypatch.setattr(train_data, "_TEXTS_OF_A_SHARD", 2)


def asked(*questions: str, answer: str | None = None) -> list[dict[str, Any]]:
    answered = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [
        {"messages": [{"role": "user", "content": question}, *answered]} for question in questions
    ]


def written(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def rows_of(texts: Texts) -> list[tuple[list[int], list[bool], int]]:
    """Token ids, mask and document of each text."""
    borders = np.cumsum(texts.length)[:-1]
    parts = zip(
        np.split(texts.tokens, borders), np.split(texts.learn, borders), texts.document, strict=True
    )
    return [(tokens.tolist(), learn.tolist(), int(document)) for tokens, learn, document in parts]


def numbers(out: str) -> list[int]:
    """Texts, tokens to learn and held-out texts of the summary."""
    summary = re.search(SUMMARY, out)
    assert summary is not None, out
    return [int(summary[index].replace(",", "")) for index in (2, 3, 4)]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ---------------------------------------------------------------- what is written


def test_documents_of_the_three_forms_become_token_ids(cli, target, tmp_path):
    rows = [
        *asked("why not", answer="so it is"),
        {"prompt": "one two", "completion": " three", "id": 7},
        {"text": "once upon a time"},
        *({"text": f"once upon a {letter}"} for letter in "cdefghijk"),
        {"text": "once upon a time"},
    ]
    out = tmp_path / "data"
    file = written(tmp_path / "own.jsonl", *rows)
    options = ("--length", 80, "--held-out", 0.5)
    code, printed, _ = cli("train", "data", target, out, file, *options)
    assert code == 0
    assert sorted(contents(out)) == ["data.json", "texts-00000.npz"]
    texts = Texts.load(out / "texts-00000.npz")
    tokenizer = e3.load_target(target).tokenizer
    assert tokenizer is not None
    stop = "<|im_end|>"
    expected = [
        ("<|im_start|>user\nwhy not<|im_end|>\n<|im_start|>assistant\n", f"so it is{stop}"),
        ("one two", f" three{stop}"),
        ("", f"once upon a time{stop}"),
    ]
    for (tokens, learn, _), (prompt, answer) in zip(rows_of(texts), expected, strict=False):
        prompt_tokens = tokenizer.encode(prompt).ids
        answer_tokens = tokenizer.encode(answer).ids
        assert tokens == prompt_tokens + answer_tokens
        assert learn == [False] * len(prompt_tokens) + [True] * len(answer_tokens)

    fields = [{name: value for name, value in row.items() if name != "id"} for row in rows[:-1]]
    canonical = [json.dumps(row, sort_keys=True, separators=(",", ":")) for row in fields]
    hashes = [int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) for text in canonical]
    assert texts.document.tolist() == hashes
    low = [number for number in hashes if number < 2**63]
    assert 0 < len(low) < len(hashes)
    assert numbers(printed) == [12, int(texts.learn.sum()), len(low)]
    assert printed.endswith("; left out now: 1 (duplicate)\n")
    learnt, held_out = read_texts(out)
    assert held_out.document.tolist() == low
    assert sorted([*learnt.document.tolist(), *low]) == sorted(hashes)


def test_the_target_answers_the_prompts_of_files(cli, target, tmp_path, small_shards):
    file = written(tmp_path / "own.jsonl", *asked(*QUESTIONS, answer="of another model"))
    code, printed, _ = cli("train", "data", target, tmp_path / "data", file, *REWRITING)
    assert code == 0
    texts = joined_texts(tmp_path / "data")
    loaded = e3.load_target(target)
    decoder = e3.SpeculativeDecoder(loaded)
    expected = []
    for question in QUESTIONS:
        prompt = loaded.apply_chat_template([{"role": "user", "content": question}])
        answer = decoder.generate(prompt, max_new_tokens=60 - len(prompt)).tokens[0]
        expected.append((prompt + answer, [False] * len(prompt) + [True] * len(answer)))
    assert sorted((tokens, learn) for tokens, learn, _ in rows_of(texts)) == sorted(expected)
    assert numbers(printed) == [
        5,
        int(texts.learn.sum()),
        int((texts.document < 0.02 * 2.0**64).sum()),
    ]
    assert len(list((tmp_path / "data").glob("texts-*.npz"))) == 3

    code, printed, _ = cli(
        "train", "data", target, tmp_path / "fewer", file, *REWRITING, "--most", 3
    )
    assert code == 0 and numbers(printed)[0] == 3
    fewer = {tuple(tokens) for tokens, _, _ in rows_of(joined_texts(tmp_path / "fewer"))}
    prompts = {tuple(tokens[: learn.index(True)]) for tokens, learn in expected}
    assert {
        next(prompt for prompt in prompts if row[: len(prompt)] == prompt) for row in fewer
    } < prompts


def test_every_piece_of_a_long_text_is_kept(cli, target, tmp_path, small_shards):
    """The pieces have one document, and are in several files."""
    file = written(
        tmp_path / "own.jsonl", {"text": "".join(chr(99 + index * 7 % 23) for index in range(200))}
    )
    options = ("--rewrite", "--length", 40, "--opening-tokens", 8, "--rows", 2)
    code, printed, _ = cli("train", "data", target, tmp_path / "data", file, *options)
    assert code == 0 and numbers(printed)[0] == 5
    assert len({document for _, _, document in rows_of(joined_texts(tmp_path / "data"))}) == 1


def test_the_target_writes_conversations_alone(cli, target, tmp_path, small_shards):
    openings = tmp_path / "openings.txt"
    openings.write_text(f"\n{OPENING}\n")
    options = (
        "--self", 9, "--openings", openings, "--length", 140, "--rows", 3, "--temperature", 2
    )  # fmt: skip
    code, printed, _ = cli("train", "data", target, tmp_path / "data", *options)
    assert code == 0

    texts = joined_texts(tmp_path / "data")
    assert numbers(printed)[:2] == [len(texts), int(texts.learn.sum())]
    reasons = re.search(SUMMARY, printed)
    assert reasons is not None
    left_out = sum(map(int, re.findall(r"(\d+) \(", reasons[5] or "")))
    assert len(texts) + left_out == 9 and len(texts) >= 4
    assert len(list((tmp_path / "data").glob("texts-*.npz"))) == 5

    loaded = e3.load_target(target)
    assert loaded.tokenizer is not None
    turns = []

    for tokens, learn, _ in rows_of(texts):
        prompt = tokens[: learn.index(True)]
        assert learn == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
        text = loaded.tokenizer.decode(prompt, skip_special_tokens=False)
        turns.append(text.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0])
        assert prompt == loaded.apply_chat_template([{"role": "user", "content": turns[-1]}])

    assert 0 < sum(turn.startswith(OPENING.strip()) for turn in turns) < len(turns)


def test_a_question_that_is_in_two_files_counts_once(tmp_path):
    question = [5, 6, 7]
    rows = [
        [
            Text([*question, 1], [False, False, False, True], 10),
            Text([*question, 2], [False, False, False, True], 11),
        ],
        [
            Text([*question, 3, 4], [False, False, False, True, True], 10),
            Text([8, 9], [False, True], 2**63),
        ],
    ]

    for number, texts in enumerate(rows):
        Texts.of(texts).save(tmp_path / f"texts-0000{number}.npz")
    (tmp_path / "data.json").write_text(json.dumps({"options": {"--held-out": 0.5}, "shards": 2}))

    learnt, held_out = read_texts(tmp_path)
    assert [tokens for tokens, _, _ in rows_of(held_out)] == [[*question, 1], [*question, 2]]
    assert [tokens for tokens, _, _ in rows_of(learnt)] == [[8, 9]]


def test_a_file_whose_texts_are_all_left_out_is_whole(cli, target, tmp_path, monkeypatch):
    monkeypatch.setattr(train_data, "_TEXTS_OF_A_SHARD", 1)
    verdicts = iter([False, True, False])
    monkeypatch.setattr(own_text, "_loops", lambda tokens: next(verdicts))
    file = written(tmp_path / "own.jsonl", *asked(*QUESTIONS[:3]))
    for _ in range(2):  # the second time it only counts
        code, printed, err = cli("train", "data", target, tmp_path / "data", file, *REWRITING)
        assert (code, err) == (0, "") and numbers(printed)[0] == 2


# ---------------------------------------------------------------- interruptions


def interrupted(monkeypatch: pytest.MonkeyPatch, error: BaseException, files: int) -> None:
    """Raises when a file is to be written after a number of them."""
    save = Texts.save
    count = 0

    def saved(texts: Texts, path: Path) -> None:
        nonlocal count
        if count == files:
            raise error
        count += 1
        save(texts, path)

    monkeypatch.setattr(Texts, "save", saved)


def test_an_interrupted_directory_is_continued_with_the_same_options_alone(
    cli, refused, target, tmp_path, small_shards, monkeypatch
):
    file = written(tmp_path / "own.jsonl", *asked(*QUESTIONS[:3]))
    options = (*REWRITING[:3], "--length", 140, "--rows", 2, "--self", 3)
    unbroken = tmp_path / "unbroken"
    out = tmp_path / "out"
    assert cli("train", "data", target, unbroken, file, *options)[0] == 0
    with monkeypatch.context() as patch:
        interrupted(patch, KeyboardInterrupt(), 1)
        assert cli("train", "data", target, out, file, *options)[0] == 130
    begun = contents(out)
    assert sorted(begun) == ["data.json", "texts-00000.npz"]

    other_file = written(tmp_path / "other.jsonl", *asked("why"))
    other_target = write_chat_target(tmp_path / "other", layers=1)
    for arguments, says in (
        ((target, out, other_file, *options), "FILES was ['sha256 "),
        ((other_target, out, file, *options), "TARGET was sha256 "),
        ((target, out, file, *options, "--seed", 1), "--seed was 0 and is 1"),
        ((target, out, file, *options, "--length", 130), "--length was 140 and is 130"),
        ((target, out, file, *options, "--most", 2), "--most was left out and is 2"),
        ((target, out, file, *options[:-1], 4), "--self was 3 and is 4"),
    ):
        line = refused("train", "data", *arguments)
        assert says in line and f"{out} holds the texts of another run" in line
        assert contents(out) == begun

    written_first = (out / "texts-00000.npz").stat().st_mtime_ns
    code, printed, _ = cli("train", "data", target, out, file, *options)
    assert code == 0 and printed.startswith("2 of 4: ")
    assert contents(out) == contents(unbroken)
    assert (out / "texts-00000.npz").stat().st_mtime_ns == written_first


def test_a_full_disk_leaves_whole_files_alone(cli, target, tmp_path, small_shards, monkeypatch):
    file = written(tmp_path / "own.jsonl", *asked(*QUESTIONS[:3]))
    out = tmp_path / "data"
    savez = np.savez
    files: list[Any] = []

    def full(to: Any, **arrays: Any) -> None:
        files.append(to)
        if len(files) < 2:
            savez(to, **arrays)
            return
        to.write(b"PK")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        code, _, err = cli("train", "data", target, out, file, *REWRITING)
    assert (code, err.count("\n")) == (
        2,
        1,
    ) and f"error: disk full: {out / 'texts-00001.npz'}; " in err
    assert sorted(contents(out)) == ["data.json", "texts-00000.npz"]
    code, printed, _ = cli("train", "data", target, out, file, *REWRITING)
    assert code == 0 and numbers(printed)[0] == 3


def test_files_that_a_killed_write_left_are_removed(cli, target, tmp_path):
    file = written(tmp_path / "own.jsonl", {"text": "once upon a time"})
    out = tmp_path / "data"
    for name in (".data.json.abc.partial", ".texts-00000.npz.abc.partial"):
        (out / name).mkdir(parents=True)
    assert cli("train", "data", target, out, file, "--length", 40)[0] == 0
    assert sorted(contents(out)) == ["data.json", "texts-00000.npz"]


# ---------------------------------------------------------------- what is refused

GOOD = {"text": "once"}
QUESTION = asked("why not")[0]
ANSWERED = asked("why not", answer="so")[0]


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        (None, (), "there is nothing to write; give JSONL files, or --self N"),
        (
            None,
            ("--rewrite", "--self", 2),
            "--rewrite answers the prompts of files; give JSONL files",
        ),
        (
            [GOOD],
            ("--most", 2),
            "--most is an option of --rewrite; give that as well, or leave --most out",
        ),
        (
            [GOOD],
            ("--opening-tokens", 8),
            "--opening-tokens is an option of --rewrite; give that as well",
        ),
        (
            [GOOD],
            ("--openings", "absent.txt"),
            "--openings is an option of --self; give that as well",
        ),
        (
            [GOOD],
            ("--temperature", 1),
            "--temperature is an option of --rewrite or --self; give that as well",
        ),
        ([GOOD], ("--greedy-share", 1), "--greedy-share is an option of --rewrite or --self"),
        ([GOOD], ("--rows", 2), "--rows is an option of --rewrite or --self"),
        ([GOOD, "{"], (), "own.jsonl line 2: not JSON"),
        ([GOOD, {"text": 5}], ("--rewrite",), "own.jsonl line 2: 'text' is 5; expected a text"),
        (
            [GOOD, QUESTION],
            (),
            "own.jsonl line 2: the assistant answers nothing; give an answer, or use --rewrite",
        ),
        (
            [GOOD],
            ("--length", POSITIONS + 1),
            f"length is {POSITIONS + 1}; expected 2 to the {POSITIONS} positions",
        ),
        (
            None,
            ("--self", 2, "--length", POSITIONS + 1),
            f"holds {POSITIONS} positions; lower length",
        ),
        (
            None,
            ("--self", 2, "--length", 50),
            "length is 50; expected at least 103 for a user's turn",
        ),
        (None, ("--self", 2, "--openings", "absent.txt"), "absent.txt: No such file or directory"),
        ([GOOD], ("--length", 1), "--length"),
        ([GOOD], ("--held-out", 2), "--held-out"),
        (
            [{"text": "e"}],
            ("--rewrite", "--length", 2, "--opening-tokens", 9, "--temperature", "nan"),
            "--temperature",
        ),
    ],
)
def test_nothing_is_left_of_what_cannot_be_begun(refused, target, tmp_path, lines, options, says):
    files = [] if lines is None else [written(tmp_path / "own.jsonl", *lines)]
    assert says in refused(
        "train", "data", target, tmp_path / "data", *files, "--length", 120, *options
    )
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "line 2: .* has no chat template; give 'prompt' and 'completion', or 'text'"),
        ("{{ raise_exception('never') }}", "line 2: the chat template does not take .*: never"),
    ],
)
def test_a_template_that_does_not_serve_is_named(refused, tmp_path, template, says):
    target = write_chat_target(tmp_path / "target", template=template)
    file = written(tmp_path / "own.jsonl", GOOD, ANSWERED)
    for options in ((), ("--rewrite",)):
        assert re.search(
            says,
            refused("train", "data", target, tmp_path / "data", file, "--length", 60, *options),
        )
        assert not (tmp_path / "data").exists()
    line = refused("train", "data", target, tmp_path / "data", "--self", 2, "--length", 120)
    assert "chat template" in line
    assert not (tmp_path / "data").exists()


def archive(path: Path) -> Path:
    np.savez(path, tokens=np.arange(1000))
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path, "own.npz: No such file or directory"),
        (archive, "own.npz is not a text file in UTF-8"),
        (lambda path: written(path), "own.npz holds no lines; expected an object with"),
    ],
    ids=["absent", "archive", "empty"],
)
def test_files_that_hold_no_documents_are_refused(
    refused, target, tmp_path, make: Callable[[Path], Path], says
):
    file = make(tmp_path / "own.npz")
    assert says in refused("train", "data", target, tmp_path / "data", file, "--length", 60)
    assert not (tmp_path / "data").exists()


def test_openings_withprinted_are_refused(refused, target, tmp_path):
    empty = written(tmp_path / "openings.txt", " ", "")
    line = refused(
        "train", "data", target, tmp_path / "data", "--self", 2, "--openings", empty,
        "--length", 120
    )  # fmt: skip
    assert "openings.txt has no line with text" in line
    assert not (tmp_path / "data").exists()


def test_a_directory_of_something_else_stays_as_it_is(refused, target, tmp_path):
    file = written(tmp_path / "own.jsonl", GOOD)
    before = file.read_bytes()
    assert f"{file} is a file; name a directory" in refused(
        "train", "data", target, file, file, "--length", 60
    )
    assert file.read_bytes() == before

    directory = tmp_path / "other"
    directory.mkdir()
    written(directory / "notes.txt", "mine")
    line = refused("train", "data", target, directory, file, "--length", 60)
    assert "exists already and holds no texts of `eagle3 train data`; name a new directory" in line
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
