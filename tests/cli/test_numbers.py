"""Every numeric option of every command at odd values: refused in one line, or accepted where it means something.

A plan of such a number is made and finite; the work of the other commands is not begun.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import shutil
import signal
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import eagle3_jax
from eagle3_jax.cli import plan, run, train
from eagle3_jax.cli._commands import app
from eagle3_jax.prompts import Request
from eagle3_jax.sources import bundled

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
PAIR = ("--target", str(OFFICIAL / "target"), "--drafter", str(OFFICIAL / "eagle3"))
VALUES = ("0", "-0.0", "1e-320", "-1", "1000000000000", "1e400", "nan", "", "x")
SECONDS = 60  # far more than any answer takes, on a busy machine too

# How each command is called, so that it gets as far as its work, which is not done.
SMALL = (
    "--layers", "2", "--width", "16", "--mlp-width", "16", "--heads", "2", "--kv-heads", "1", "--head-dim", "8",
    "--max-positions", "64", "--phases", "2x16", "--warmup-steps", "1",
)  # fmt: skip
FEW = ("--prompts", "random", "--chains", "2", "--tree", "none", "--ngram", "none", "--rivals", "none")
CALLS = {
    "generate": (*PAIR, "--prompt-ids", "[1, 2]", "--json"),
    "bench": (*PAIR, *FEW, "--dtype", "float32"),
    "tune": (*PAIR, "--dtype", "float32"),
    "plan speedup": ("--json",),
    "plan memory": ("--bandwidth-gb-per-s", "3000", "--json"),
    "plan cost": ("--price-per-hour", "10", "--json"),
    "plan roofline": ("--gpu", "H100", "--batch-size", "4", "--json"),
    "plan rollout": ("--verify-cost", "1.2", "--draft-cost", "0.1", "--json"),
    "train corpus": ("{new}",),
    "train target": ("{corpus}", "{new}", *SMALL),
    "train regenerate": (PAIR[1], "{corpus}", "{new}.npz"),
    "train head": (PAIR[1], "text.npz", "{new}", "--draft-vocab-size", "8", "--warmup-steps", "1"),
}

PLACES: dict[str, str] = {}  # where what the tests write is

# Where a value means something. Whatever is not here is refused: nothing else, no negative number, no NaN. The smallest
# number is one wherever fractions are.
HUGE = "1000000000000"
MEANT = {
    "0": {
        "--alpha", "--context", "--draft-acceptance-rate", "--draft-cost", "--greedy-share", "--price-per-hour",
        "--reserve-gb", "--seed", "--simulate", "--simulated-acceptance-rate", "--temperature", "--top-k",
        "--warmup-steps", "--weight-decay",
    },
    HUGE: {
        "--bandwidth-gb-per-s", "--batch", "--batch-size", "--claim", "--concurrency", "--draft-cost", "--length",
        "--memory-gb", "--output-tokens", "--peak-tflops", "--prefill-tokens", "--price-per-hour", "--prompt-tokens",
        "--requests-per-second", "--reserve-gb", "--rows", "--save-every", "--seed", "--simulated-acceptance-length",
        "--steps", "--temperature", "--tokens-per-second", "--verify-cost", "--vocab-size", "--wanted",
    },
}  # fmt: skip


class Reached(BaseException):
    """The work would begin now."""


class TooLong(BaseException):
    """It did not answer."""


class Option(NamedTuple):
    command: str
    name: str


def numeric_options() -> Iterator[Option]:
    for prefix, group in (("", app), ("plan ", plan.app), ("train ", train.app)):
        for one in group.registered_commands:
            command = prefix + (one.name or one.callback.__name__)
            for name, hint in typing.get_type_hints(one.callback, include_extras=True).items():
                kinds = set(leaves(hint))
                if kinds & {int, float}:
                    declared = [text for info in getattr(hint, "__metadata__", ()) for text in info.param_decls or ()]
                    yield Option(command, declared[0] if declared else f"--{name.replace('_', '-')}")


def leaves(hint: Any) -> Iterator[Any]:
    inner = typing.get_args(hint)
    yield from itertools.chain.from_iterable(map(leaves, inner)) if inner else (hint,)


OPTIONS = sorted(set(numeric_options()))


@pytest.fixture(scope="module", autouse=True)
def no_work(tmp_path_factory):
    """Models are read once, and whatever takes its time is not begun."""
    from eagle3_jax.bench import tune as tuning
    from eagle3_jax.cli import bench, generate, tune
    from eagle3_jax.training import corpus, methods, regenerate

    def reached(*arguments: Any, **options: Any) -> None:
        raise Reached

    PLACES["{corpus}"] = str(folder := tmp_path_factory.mktemp("corpus"))
    np.save(folder / "train.npy", np.zeros(4096, np.uint16))
    documents = [corpus.Document(name, "x = 1\n" * 99) for name in ("code/ast.py", corpus.HELD_OUT[0])]
    shutil.copy(bundled("target") / "tokenizer.json", folder)
    rows = regenerate.Rows(np.ones((8, 16), np.int32), np.full(8, 2, np.int32), np.full(8, 16, np.int32))
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (generate, "_print_json"), (bench, "_measure"), (tuning, "tune"), (corpus, "train_tokenizer"),
            (train, "_train"), (regenerate, "regenerate"),
        ):  # fmt: skip
            patch.setattr(module, name, reached)
        patch.setitem(methods.RECIPES, "eagle3", methods.RECIPES["eagle3"]._replace(start=reached))
        patch.setattr(eagle3_jax, "load_target", target_of)
        patch.setattr(eagle3_jax, "load_drafter", drafter_of)
        patch.setattr(tune, "_requests", lambda path, most: [Request([1, 2], 1)])
        patch.setattr(corpus, "read_corpus", lambda source, docs: documents)
        patch.setattr(regenerate.Rows, "load", lambda path: rows)
        yield


@functools.cache
def target_of(source: str, dtype: str = "float32", mesh: Any = None, weights: str = "dense") -> Any:
    from eagle3_jax.load import load_target

    return load_target(source, dtype=dtype, mesh=mesh, weights=weights)


@functools.cache
def drafter_of(source: str, target: Any, layer_ids: str | None = None) -> Any:
    from eagle3_jax.load import load_drafter

    return load_drafter(source, target=target, layer_ids=layer_ids)


def outcome(option: Option, value: str | None, folder: Path) -> str:
    """``refused``, ``accepted``, or what is wrong with how it ended."""
    given = list(CALLS.get(option.command, ()))
    for name, place in (PLACES | {"{new}": str(folder / "new")}).items():
        given = [word.replace(name, place) for word in given]
    if option.name in given:
        at = given.index(option.name)
        del given[at : at + 2]
    if value is not None:
        given += [option.name, value]
    out, error = io.StringIO(), io.StringIO()

    def late(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = run([*option.command.split(), *given])
    except Reached:
        return "accepted"
    except BaseException as raised:
        return f"{type(raised).__name__}: {raised}"[:200]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    said = error.getvalue()
    if code in (0, 1):
        if said or not is_finite(json.loads(out.getvalue())):
            return f"exit {code}, {out.getvalue()[:200]} and {said}"
        return "accepted"
    if any(path.name.startswith("new") for path in folder.iterdir()):
        return "refused after something was written"
    return "refused" if code == 2 and said.startswith("error: ") and said.count("\n") == 1 else f"exit {code}: {said}"


def is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("command", sorted({option.command for option in OPTIONS}))
def test_without_the_odd_value_the_command_gets_to_its_work(command, tmp_path):
    assert outcome(Option(command, ""), None, tmp_path) == "accepted"


def test_every_command_with_a_number_is_walked():
    assert {option.command for option in OPTIONS} == set(CALLS)
    assert len(OPTIONS) > 90


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: f"{option.command} {option.name}")
def test_an_odd_number_is_refused_in_one_line_or_means_something(option, tmp_path):
    found = {}
    for number, value in enumerate(VALUES):
        (folder := tmp_path / str(number)).mkdir()
        found[value] = outcome(option, value, folder)
    assert {value: end for value, end in found.items() if end not in ("accepted", "refused")} == {}
    meant = {value for value, names in MEANT.items() if option.name in names or tuple(option) in names}
    meant |= {"1e-320"} | ({"-0.0"} if "0" in meant else set())
    assert {value for value, end in found.items() if end == "accepted"} <= meant
