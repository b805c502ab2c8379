"""The ledger of random keys: a run uses each random key for one decision only.

The acceptance rule gives the right output distribution only if no two decisions share random
numbers. Frequencies show shared numbers only where they change a frequency. So these tests record
every random number that a run draws, with the key that it was derived from and the history of that
key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from drafter_table import ALL_DRAFTERS, TARGET, drafter_of
from worlds import WIDE

import eagle3_jax
from eagle3_jax import BlockVerification, SimulatedAcceptance, SpeculativeDecoder, TypicalAcceptance
from eagle3_jax.checks import per_row
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import Plain
from eagle3_jax.sampling import num_digits, row_keys
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.testing.drafter import subject_of
from eagle3_jax.topology import Chain
from eagle3_jax.types import DraftSampling, SamplingMode, SamplingParams

pytestmark = pytest.mark.core

LIBRARY = Path(eagle3_jax.__file__).parent
ROUNDS = 4
PROMPTS = [[5, 70, 3], [79]]
PROBABILISTIC = DraftSampling.PROBABILISTIC
DIGITS = num_digits(80)

# For each function that draws: what it decides, which numbers are folded into the row's key, and
# how many uniforms it draws. `n` is the length of the row, its last token included; K is the number
# of drafted tokens, N of nodes with the root, U of digits of an id and W of digits of a draft id.
LEDGER = {
    "loop._choose_first": ("the first token", "n, 1", "U"),
    "drafters.grow.sample_chain": ("the drafted tokens of a chain", "n, 0", "K * W"),
    "drafters.static_tree.sample_static_tree": (
        "the drafted tokens of a static tree",
        "n, 0",
        "(N - 1) * W",
    ),
    "acceptance.verification_uniforms": (
        "which nodes are accepted, and the next token",
        "n, 1",
        "N + U",
    ),
    "verifiers.simulated.__call__": ("how many tokens simulated acceptance takes", "n, 1, 0", "1"),
}
# The function, the row with the numbers folded into its key, and the number of uniforms.
Use = tuple[str, tuple[int, ...], int]


def use(who: str, row: int, length: int, sizes: dict[str, int]) -> Use:
    """Returns an entry of the ledger in numbers."""
    _, folds, count = LEDGER[who]
    folded = tuple(length if fold == "n" else int(fold) for fold in folds.split(", "))
    return who, (row, *folded), eval(count, {}, sizes)


class Ledger:
    """Keys with their history, and the functions that drew from them.

    Attributes:
        history: The folds of each key, by the words of the key; the key of a row has the row alone.
        uses: The function, the key and the number of uniforms of every draw.
    """

    def __init__(self, keys: jax.Array) -> None:
        self.history = {words(key): (row,) for row, key in enumerate(jax.random.key_data(keys))}
        self.folds: list[tuple[bytes, int, bytes]] = []
        self.draws: list[tuple[str, int, bytes]] = []

    @property
    def uses(self) -> list[Use]:
        """In no order, because devices report asynchronously."""
        jax.effects_barrier()
        known = dict(self.history)
        before = -1
        while len(known) > before:
            before = len(known)
            known |= {
                new: (*known[old], int(data)) for old, data, new in self.folds if old in known
            }
        return [(who, known.get(key, ()), count) for who, count, key in self.draws]

    def __str__(self) -> str:
        title = f"{'row, folds':12} {'uniforms':>8}  for"
        rows = [
            f"{', '.join(map(str, history)):12} {count:8}  {who}"
            for who, history, count in sorted(self.uses)
        ]
        return "\n".join([title, *rows])


def words(key: Any) -> bytes:
    return np.asarray(key, np.uint32).tobytes()


@contextlib.contextmanager
def recorded(keys: jax.Array) -> Iterator[Ledger]:
    """Records the random numbers of programs compiled in this context, of `uniforms` or not."""
    ledger = Ledger(keys)
    fold_in = jax.random.fold_in
    bits = jax.random.bits
    data = jax.random.key_data

    def folding(key, number):
        new = fold_in(key, number)
        keep = lambda old, number, new: ledger.folds.append((words(old), int(number), words(new)))
        jax.debug.callback(keep, data(key), jnp.asarray(number), data(new))
        return new

    def drawing(key, shape=(), dtype=None):
        who = caller()
        count = int(np.prod(shape))
        jax.debug.callback(lambda key: ledger.draws.append((who, count, words(key))), data(key))
        return bits(key, shape, dtype)

    def sampling(name: str) -> Callable:
        sampler = getattr(jax.random, name)

        def noted(key, *args, **options):
            who = f"{caller()} by jax.random.{name}"
            jax.debug.callback(lambda key: ledger.draws.append((who, 0, words(key))), data(key))
            return sampler(key, *args, **options)

        return noted

    samplers = (
        "uniform", "normal", "categorical", "gumbel", "bernoulli", "randint", "choice",
        "exponential", "split"
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "fold_in", folding)
        patch.setattr(jax.random, "bits", drawing)
        for name in samplers:
            patch.setattr(jax.random, name, sampling(name))
        yield ledger


def caller() -> str:
    """Returns the calling function of the library outside ``sampling`` and ``kernels``."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(LIBRARY) and path.name not in ("sampling.py", "kernels.py"):
            module = ".".join(path.relative_to(LIBRARY).with_suffix("").parts)
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "a caller outside the library"


CHAIN = "drafters.grow.sample_chain"
TREE = "drafters.static_tree.sample_static_tree"


def sampled_chain(**options: Any) -> LoadedDrafter:
    return WIDE.drafter(Chain(3), draft_sampling=PROBABILISTIC, **options)


# A drafter, options of the decoder, functions that draw in addition to the verifier, and sizes that
# override the drafter's.
CASES: dict[
    str, tuple[Callable[[], LoadedDrafter], dict[str, Any], tuple[str, ...], dict[str, int]]
] = {
    "plain decoding": (lambda: LoadedDrafter(Plain()), {}, (), {}),
    "the likeliest tokens": (lambda: WIDE.drafter(Chain(3)), {}, (), {}),
    "a sampled chain": (sampled_chain, {}, (CHAIN,), {}),
    "a sampled chain of 50 tokens": (
        lambda: sampled_chain(ids=tuple(range(50))),
        {},
        (CHAIN,),
        {"W": 1},
    ),
    "a sampled tree": (
        lambda: WIDE.drafter(tiny.STATIC_TREE, draft_sampling=PROBABILISTIC),
        {},
        (TREE,),
        {},
    ),
    "block verification": (sampled_chain, {"verifier": BlockVerification()}, (CHAIN,), {}),
    "simulated acceptance": (
        sampled_chain,
        {"verifier": SimulatedAcceptance.of_conditional_rate(0.6, 3)},
        (CHAIN, "verifiers.simulated.__call__"),
        {},
    ),
    "typical acceptance": (
        sampled_chain,
        {"verifier": TypicalAcceptance(draws_next=True)},
        (CHAIN,),
        {},
    ),
    "a schedule": (
        sampled_chain,
        {"schedule": SpeculationSchedule(((1, 1, 3), (2, 4, 2)))},
        (CHAIN,),
        {"K": 2, "N": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_key_is_used_once_and_as_documented_with(name: str) -> None:
    """A prefill and some rounds draw the numbers of the ledger, and use no key twice."""
    drafter, options, drawing, sizes = CASES[name]
    decoder = SpeculativeDecoder(WIDE.target, drafter(), stop_tokens=(), **options)
    loop = dataclasses.replace(decoder.loop, sampling_mode=SamplingMode.TEMPERATURE)
    shape = {"N": loop.drafter.num_nodes, "K": loop.drafter.max_depth}
    sizes = shape | {"U": DIGITS, "W": DIGITS} | sizes

    batch = tiny.prompts(PROMPTS, limit=99, sampling=SamplingParams(temperature=0.9), seed=7)

    steps: dict[Any, Any] = {}
    with recorded(batch.keys) as ledger:
        state = jax.jit(functools.partial(loop.prefill, capacity=64))(decoder.params, batch)
        expected = [
            use("loop._choose_first", row, len(prompt), sizes) for row, prompt in enumerate(PROMPTS)
        ]

        for _ in range(ROUNDS):
            for row, length in enumerate(np.asarray(state.length).tolist()):
                expected += [
                    use(who, row, length, sizes)
                    for who in ("acceptance.verification_uniforms", *drawing)
                ]

            stage = loop.at(state)  # of a schedule; otherwise the loop itself
            step = lambda params, state, stage=stage: stage.step(params, state).state
            compiled = steps.setdefault(stage, jax.jit(step))
            state = compiled(decoder.params, state)

        assert np.asarray(state.running).all()
        judged(name, ledger, expected)


def judged(name: str, ledger: Ledger, expected: list[Use]) -> None:
    often = Counter(history for _, history, _ in ledger.uses)
    twice = sorted(history for history, count in often.items() if count > 1)
    assert not twice, f"{name}: the keys {twice} are used more than once\n{ledger}"
    assert sorted(ledger.uses) == sorted(expected), f"{name}: not the documented keys\n{ledger}"


@pytest.mark.parametrize(
    "name", [name for name in ALL_DRAFTERS if "sampled" in name or "drawn" in name]
)
def test_every_drafter_draws_once_from_the_key_that_it_is_given(name: str) -> None:
    subject = subject_of(drafter_of(name), TARGET)
    keys = row_keys(7, 2)
    drafter = subject.part
    sampling = per_row(SamplingParams(temperature=0.9), 2)

    def propose(params):
        return drafter.propose(params, drafter.init(params, 2, 16), keys, sampling).tokens

    with recorded(keys) as ledger:
        jax.jit(propose)(subject.params)
        who = CHAIN if drafter.num_nodes == drafter.max_depth + 1 else TREE
        judged(name, ledger, [(who, (row,), drafter.num_nodes - 1) for row in range(2)])


def test_the_ledger_is_the_one_in_the_documentation() -> None:
    page = (Path(__file__).parent.parent / "docs" / "algorithm.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("|")]
    rows = [line for line in table if any(f"`{who}`" in line for who in LEDGER)]
    assert rows == [
        f"| {decision} | `{who}` | {folds} | {count} |"
        for who, (decision, folds, count) in LEDGER.items()
    ]
