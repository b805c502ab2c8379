"""Every number that `eagle3 plan` and `eagle3 train` take, at 0, -1, 10**12 and NaN: an answer or one line, soon."""

from __future__ import annotations

import json
import math
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.models import OptionInfo

from eagle3_jax.cli import plan as plan_commands
from eagle3_jax.cli import run
from eagle3_jax.cli import train as train_commands

EXTREMES = ("0", "-1", "1000000000000", "nan", "inf", "1e-320", "-0.0")
# What else a command needs before its numbers are looked at.
GIVEN = {
    "plan cost": ("--price-per-hour", "2"),
    "plan roofline": ("--gpu", "H100", "--batch-size", "4"),
    "plan memory": ("--bandwidth-gb-per-s", "3000"),
}


class Option(NamedTuple):
    """One numeric option."""

    command: str
    flag: str
    takes_floats: bool


def options(group: str) -> Iterator[Option]:
    """Every option of every command of a group that a number is given to, from the commands' signatures."""
    for command in {"plan": plan_commands, "train": train_commands}[group].app.registered_commands:
        assert command.callback is not None
        for name, hint in typing.get_type_hints(command.callback, include_extras=True).items():
            if typing.get_origin(hint) is not typing.Annotated:
                continue
            plain, option = typing.get_args(hint)
            kinds = {plain, *typing.get_args(plain)} | {
                inner for part in typing.get_args(plain) for inner in typing.get_args(part)
            }
            if isinstance(option, OptionInfo) and kinds & {int, float}:
                flag = (option.param_decls or (f"--{name.replace('_', '-')}",))[0]
                yield Option(f"{group} {command.name}", flag, float in kinds)


def finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def test_the_sweep_sees_every_command() -> None:
    assert len(list(options("plan"))) > 45
    assert len({option.command for option in (*options("plan"), *options("train"))}) == 9


@pytest.mark.parametrize("option", list(options("plan")), ids=lambda option: f"{option.command} {option.flag}")
def test_a_plan_of_an_extreme_number_is_finite_or_refused_in_one_line(option: Option, capsys: Any) -> None:
    for value in EXTREMES:
        begun = time.process_time()
        code = run([*option.command.split(), *GIVEN.get(option.command, ()), option.flag, value, "--json"])
        out, err = capsys.readouterr()
        assert time.process_time() - begun < 5, value
        if code == 2:
            assert (out, err.count("\n"), err[:7]) == ("", 1, "error: "), value
        else:
            assert code in (0, 1), (value, err)
            assert finite(json.loads(out)), value
        assert value != "nan" or code == 2, "NaN is never a number that was meant"


class Reached(Exception):
    """The work would begin now."""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of one file, and training that stops where it would begin."""
    stdlib = tmp_path / "Lib"
    stdlib.mkdir()
    for name in ("ast", "bisect"):  # the second is held out
        (stdlib / f"{name}.py").write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(60)))
    assert run(["train", "corpus", str(tmp_path / "data"), "--stdlib", str(stdlib), "--vocab-size", "280"]) == 0

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    monkeypatch.setattr(train_commands, "_train", reached)
    monkeypatch.setattr("eagle3_jax.training.regenerate.regenerate", reached)
    monkeypatch.setattr("eagle3_jax.training.corpus.train_tokenizer", reached)
    return tmp_path


# What may be as large, or as small, as one likes.
HARMLESS = {("--seed", "0"), ("--warmup-steps", "0"), ("--weight-decay", "0"), ("--temperature", "0")}
HARMLESS |= {("--greedy-share", "0"), ("--embedding-learning-rate", "0"), ("--learning-rate", "0")}


@pytest.mark.parametrize("command", sorted({option.command for option in options("train")}))
def test_training_with_an_extreme_number_is_refused_before_anything_is_written(
    command: str, corpus: Path, capsys: Any
) -> None:
    data, out = corpus / "data", corpus / "out"
    text = corpus / "text.npz"
    np.savez(text, tokens=np.ones((16, 24), np.uint16), prompt_length=np.full(16, 4), length=np.full(16, 24))
    official = str(Path(__file__).parent / "golden" / "official" / "target")
    arguments = {
        "train corpus": [str(out), "--stdlib", str(corpus / "Lib")],
        "train target": [str(data), str(out), "--phases", "2x16"],
        "train regenerate": [official, str(data), f"{out}.npz"],
        "train head": [official, str(text), str(out), "--draft-vocab-size", "64"],
    }[command]
    for option in options("train"):
        if option.command != command:
            continue
        for value in EXTREMES[:4]:
            if (option.flag, str(abs(float(value)))[:1]) in HARMLESS and float(value) == 0:
                continue
            before = time.process_time()
            capsys.readouterr()
            try:
                code = run([*command.split(), *arguments, option.flag, value])
            except Reached:
                pytest.fail(f"{command} {option.flag} {value} was accepted")
            printed, err = capsys.readouterr()
            assert (code, err.count("\n"), err[:7]) == (2, 1, "error: "), (option.flag, value, printed, err)
            assert time.process_time() - before < 5
    assert not out.exists()
