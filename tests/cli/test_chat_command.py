"""``eagle3 chat`` and ``eagle3 generate --chat``: piped, at a terminal, interrupted, refused."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import jax
import pytest
from models_on_disk import write_bytes_target
from terminals import InTerminal

import eagle3_jax as e3
from eagle3_jax.chat.repetition import Repetition

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if messages[0].content == 'No.' %}{{ raise_exception('not that') }}{% endif %}<answer>"
)
SHORT = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random target with a chat template."""
    folder = write_bytes_target(tmp_path_factory.mktemp("chat") / "bytes")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def expected(folder: Path, *questions: str, system: str | None = None, **options) -> list[str]:
    decoder = e3.SpeculativeDecoder(e3.load_target(folder))
    conversation = e3.Chat(decoder, system=system, **({"max_new_tokens": 6} | options))
    return [conversation.send(question).text or "" for question in questions]


# ---------------------------------------------------------------- from a pipe


@pytest.fixture
def piped(cli, monkeypatch):
    def call(text: str, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return cli("chat", *arguments)

    return call


def test_each_line_of_a_pipe_is_a_turn_and_answers_are_plain_text(piped, folder: Path) -> None:
    first = expected(folder, "Why?", "  And then?".strip(), system="Be kind.")
    again = expected(folder, "Why?", system="Be kind.")
    options = ("--target", folder, *SHORT, "--system", "Be kind.")
    code, out, err = piped("Why?\n\n  And then?\n/reset\nWhy?\n/exit\nnot read\n", *options)
    assert (code, err) == (0, "")
    assert out == "".join(f"{answer}\n" for answer in (*first, *again))


def test_the_options_of_a_command_line_are_those_of_the_conversation(piped, folder: Path) -> None:
    sampling = e3.SamplingParams(temperature=1.0, top_k=40)
    texts = expected(folder, "Why?", "So?", sampling=sampling, seed=3, max_new_tokens=9)
    options = (
        "--target", folder, "--drafter", "none", "--max-new-tokens", 9, "--temperature", 1,
        "--top-k", 40
    )  # fmt: skip
    code, out, err = piped("Why?\nSo?", *options, "--seed", 3)
    assert (code, out, err) == (0, "".join(f"{text}\n" for text in texts), "")


def test_a_loop_ends_an_answer_and_a_line_says_so(piped, folder: Path, monkeypatch) -> None:
    def loop_after_five(tokens: list[int]) -> Repetition | None:
        return Repetition(1, 5) if len(tokens) >= 5 else None

    monkeypatch.setattr("eagle3_jax.cli.chat.repetition_of", loop_after_five)
    (text,) = expected(folder, "Why?", max_new_tokens=12)
    options = ("--target", folder, "--drafter", "none", "--max-new-tokens", 12)
    code, out, err = piped("Why?", *options)
    assert (code, err) == (
        0,
        "[stopped: the last token came 5 times in a row; --no-stop-repeating lets an answer go"
        " on]\n",
    )
    answer = out.rstrip("\n")
    assert answer
    assert text.startswith(answer)
    assert len(answer) < len(text)
    assert piped("Why?", *options, "--no-stop-repeating") == (0, f"{text}\n", "")


def test_an_unknown_command_is_named(piped, folder: Path) -> None:
    code, out, _ = piped("/foo\n/help\n", "--target", folder)
    assert code == 0
    unknown, *lines = out.splitlines()
    assert unknown == "unknown command /foo; there are"
    assert lines[0].startswith("/reset  begins a new conversation")
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_without_lines_there_is_nothing_but_that_a_rule_is_not_lossless(
    piped, folder: Path
) -> None:
    assert piped("", "--target", folder) == (0, "", "")
    code, out, err = piped("", "--target", folder, "--verifier", "typical")
    assert (code, out) == (
        0,
        "",
    ) and "not lossless: drafts were accepted by TypicalAcceptance" in err


@pytest.mark.parametrize(
    ("options", "lines", "named"),
    [
        (
            (),
            "Why?\n",
            "the bundled target has no chat template; name a model that has one with --target",
        ),
        (("--system", "No."), "", "the chat template does not take "),
        (("--temperature", "-1"), "", "--temperature is -1"),
        (("--top-p", "2"), "", "--top-p is 2"),
        (("--drafter", ""), "", "--drafter is empty"),
        (("--tree", "num_nodes=3"), "", "expected num_nodes=N"),
        (("--max-new-tokens", "0"), "", "--max-new-tokens"),
        ((), "x" * 3000, "the conversation has 3014 tokens with this question"),
    ],
    ids=[
        "no template",
        "system",
        "temperature",
        "top-p",
        "drafter",
        "tree",
        "no tokens",
        "too long",
    ],
)
def test_it_refuses_in_one_line(
    refused, monkeypatch, folder: Path, options: tuple[str, ...], lines: str, named: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    target = () if "bundled" in named else ("--target", folder)
    assert named in refused("chat", *target, *options)


# ---------------------------------------------------------------- generate --chat


def test_generate_asks_a_prompt_as_a_question(cli, refused, folder: Path, tmp_path: Path) -> None:
    (text,) = expected(folder, "Why?")
    question = ("generate", "--chat", "Why?", "--target", folder, *SHORT)
    code, out, _ = cli(*question)
    assert code == 0 and out.startswith(
        f"user: Why?\nassistant: {text}\n[stopped: reached --max-new-tokens 6]\n"
    )
    # No drafter is named on a CPU.
    assert "drafter: none" in out

    row = json.loads(cli(*question, "--json")[1])
    messages = [{"role": "user", "content": "Why?"}]
    assert row["text"] == text
    assert row["prompt_ids"] == e3.load_target(folder).apply_chat_template(messages)

    # A conversation in a file is the same prompt; what its template refuses is refused by line.
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    from_file = ("generate", "--prompts", file, "--target", folder, *SHORT, "--json")
    ignored = {"seconds": 0}
    assert json.loads(cli(*from_file)[1]) | ignored == row | ignored
    file.write_text(json.dumps({"messages": [messages[0] | {"content": "No."}]}))
    assert f"{file} line 1: the chat template does not take " in refused(*from_file)

    file.write_text(json.dumps({"messages": messages}))
    assert f"{file} line 1: the bundled target has no chat template" in refused(
        "generate", "--prompts", file
    )
    assert "no chat template; leave --chat out" in refused("generate", "--chat", "Why?")
    assert "--chat asks a PROMPT" in refused("generate", "--chat", "--prompts", file)


def test_the_drafter_of_a_target_without_one_depends_on_the_device(monkeypatch) -> None:
    from eagle3_jax.cli._parts import default_drafter

    for device, expected in (("cpu", "none"), ("gpu", "ngram"), ("tpu", "ngram")):
        monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
        assert default_drafter("a target", "dense") == expected
        assert default_drafter("a target", "int8") == "ngram"
        assert default_drafter(None, "dense") is None  # the bundled head
    for device, dense, int8 in (("cpu", "none", "ngram+smollm2"), ("gpu", "smollm2", "smollm2")):
        monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
        assert default_drafter("smollm2", "dense") == dense
        assert default_drafter("smollm2", "int8") == int8


def test_a_server_drafts_with_the_head_of_its_target(monkeypatch) -> None:
    """Its page shows drafts."""
    from eagle3_jax.cli import _parts
    from eagle3_jax.cli._options import ModelOptions

    monkeypatch.setattr(_parts, "fetch_first", lambda *sources: None)
    for target, weights, expected in (
        ("smollm2", "dense", "smollm2"),
        ("smollm2", "int8", "ngram+smollm2"),
        ("a target", "dense", "none"),
        (None, "dense", None),
    ):
        models = ModelOptions(target=target, weights=weights)
        chosen, _ = _parts.chosen_models(models, "float32", shows_drafts=True)
        assert chosen.drafter == expected


# ---------------------------------------------------------------- at a terminal


def test_a_bare_text_for_a_chat_model_is_continued_with_a_hint(folder: Path) -> None:
    options = ("Why?", "--target", str(folder), *SHORT)
    hinted = InTerminal("generate", *options, pipe=True)
    chat = InTerminal("generate", "--chat", *options, pipe=True)
    line = "the text is continued as it is; --chat asks it as a question"
    assert line in hinted.finish() and line not in hinted.output
    assert line not in chat.finish()


class Typing(InTerminal):
    """A process that is typed to."""

    def type(self, text: str, until: bytes = b"> ") -> list[str]:
        """The lines of the screen once the answer to this text has been written."""
        os.write(self.master, text.encode())
        return self.wait(until)

    def wait(self, until: bytes = b"> ") -> list[str]:
        self.seen = b""
        self.read(until)
        return [line.rstrip() for line in self.screen.display if line.strip()]


def test_a_conversation_at_a_terminal(folder: Path) -> None:
    options = (
        *("--target", str(folder), "--drafter", "ngram", "--max-new-tokens", "3000"),
        "--no-stop-repeating",
    )
    chat = Typing("chat", *options)
    *header, mark = chat.wait()
    assert header[0] == "drafter: NGram, chain K=3" and mark == ">"
    assert "".join(header[1:]) == f"{folder}: /help lists commands, Ctrl-D ends"

    assert "/reset  begins a new conversation" in chat.type("/help\n")

    # An interrupted answer ends, and the program does not.
    os.write(chat.master, b"Why?\n")
    # The spinner is gone.
    chat.wait(b"\x1b[?25h")
    assert b"preparing programs for this length; the first time they are compiled" in chat.seen
    os.killpg(chat.process.pid, signal.SIGINT)
    lines = chat.wait()
    assert lines[-2:] == ["[interrupted]", ">"]

    # At the prompt it ends the line. A signal between the prompt and its reading would be answered
    # after the next key.
    time.sleep(0.5)
    os.killpg(chat.process.pid, signal.SIGINT)
    assert chat.wait()[-2:] == ["(Ctrl-D ends)", ">"]

    lines = chat.type("x" * 3000 + "\n")
    assert any("error: the conversation has" in line for line in lines) and lines[-1] == ">"

    os.write(chat.master, b"\x04")
    chat.finish()
    assert chat.code == 0
    assert chat.screen.cursor.x == 0 and not chat.screen.cursor.hidden


def test_the_line_after_an_answer_counts_it(folder: Path) -> None:
    chat = Typing("chat", "--target", str(folder), "--drafter", "ngram", *SHORT, columns=120)
    chat.wait()
    lines = chat.type("Why?\n")
    facts = re.fullmatch(
        r"\[stopped: reached --max-new-tokens 6\] · 6 tokens · (\d\.\d\d) tokens per round( ·"
        r" [\d.]+ tokens/s)?"
        r"( · (compilation|reading compiled programs) \(\d+ s\) left out)?",
        lines[-2],
    )
    assert facts and 1 <= float(facts[1]) <= 4

    # An empty line ends it.
    os.write(chat.master, b"\n")
    chat.finish()
    assert chat.code == 0
