"""Logits processors: sampled texts have the distribution of a closed form in plain Python."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from sampled_texts import ALPHA, DRAFTERS, HORIZON, TARGET, chi_square, logits_after
from sampled_texts import VOCABULARY as V

from eagle3_jax import FinishReason, SamplingParams, SpeculativeDecoder, check_target
from eagle3_jax import loop as loops
from eagle3_jax.drafters import NGram, Plain
from eagle3_jax.models.layers import BFLOAT16
from eagle3_jax.processors.logits import LogitBias, MinP, Penalty, TokenAutomaton, with_processors
from eagle3_jax.sampling import row_keys
from eagle3_jax.topology import DynamicTree
from eagle3_jax.types import SamplingMode

PROMPTS = ([2], [1, 3, 0])
TABLE = np.array([[1, 0, -1, 2], [-1, 2, 2, -1], [0, -1, 1, 2]], np.int32)  # three states
Logits = list[float]


def penalised(
    logits: Logits, tokens: list[int], repetition: float, presence: float, frequency: float
) -> Logits:
    """Applies a penalty with a dictionary of counts."""
    counts = Counter(tokens)
    changed = []
    for token, logit in enumerate(logits):
        if token in counts:
            logit = (
                (logit / repetition if logit > 0 else logit * repetition)
                - presence
                - frequency * counts[token]
            )
        changed.append(logit)
    return changed


def allowed(logits: Logits, tokens: list[int], start: int) -> Logits:
    """Applies an automaton by a walk from its first state."""
    state = start
    for token in tokens:
        state = TABLE[state][token]
    return [logit if TABLE[state][token] >= 0 else -math.inf for token, logit in enumerate(logits)]


def at_least(logits: Logits, share: float) -> Logits:
    weights = [math.exp(logit) for logit in logits]
    return [
        logit if weight >= share * max(weights) else -math.inf
        for logit, weight in zip(logits, weights, strict=True)
    ]


# Each: the processors, and the changed logits from the logits, the prompt and what was written
# after it.
CASES: dict[str, tuple[tuple[Any, ...], Callable[[Logits, list[int], list[int]], Logits]]] = {
    "a ban and a bias": (
        (LogitBias({1: -math.inf, 3: 1.5}),),
        lambda logits, prompt, text: [logits[0], -math.inf, logits[2], logits[3] + 1.5],
    ),
    "min-p": ((MinP(0.4),), lambda logits, prompt, text: at_least(logits, 0.4)),
    "repetition, the prompt too": (
        (Penalty(repetition=1.8, prompt=True),),
        lambda logits, prompt, text: penalised(logits, prompt + text, 1.8, 0, 0),
    ),
    "presence and frequency of the output": (
        (Penalty(presence=0.5, frequency=0.7),),
        lambda logits, prompt, text: penalised(logits, text, 1, 0.5, 0.7),
    ),
    "an automaton": (
        (TokenAutomaton(TABLE, start=1),),
        lambda logits, prompt, text: allowed(logits, text, 1),
    ),
    "an automaton, then a penalty and min-p": (
        (TokenAutomaton(TABLE), Penalty(frequency=1.0), MinP(0.2)),
        lambda logits, prompt, text: at_least(
            penalised(allowed(logits, text, 0), text, 1, 0, 1.0), 0.2
        ),
    ),
}
ALL = "an automaton, then a penalty and min-p"
CHAIN = "a sampled EAGLE-3 chain"
OTHERS = ("plain decoding", "n-grams", "an EAGLE-3 dynamic tree")


@functools.cache
def exact_distribution(name: str, prompt: tuple[int, ...]) -> oracle.TextDistribution:
    known = logits_after(prompt)
    change = CASES[name][1]
    after = lambda text: oracle.warped(change(known[text], list(prompt), list(text)), 1.0, 0, 1.0)
    return oracle.autoregressive_distribution(after, HORIZON)


@pytest.mark.parametrize(
    ("name", "drafter"), [(name, CHAIN) for name in CASES] + [(ALL, drafter) for drafter in OTHERS]
)
def test_sampled_texts_have_the_changed_distribution(name: str, drafter: str) -> None:
    head = DRAFTERS[drafter]()
    target = with_processors(TARGET, *CASES[name][0])
    loop, params = tiny.bind(target, head, sampling_mode=SamplingMode.TEMPERATURE)

    rows = [prompt for prompt in PROMPTS for _ in range(2048)]
    batch = tiny.prompts(rows, limit=HORIZON, sampling=SamplingParams(temperature=1.0))
    outcome = loops.generate(loop, params, batch.replace(keys=row_keys(5, len(rows))), capacity=24)

    texts = [tuple(row) for row in tiny.outputs(outcome, batch)]
    for index, prompt in enumerate(PROMPTS):
        counts = Counter(texts[index * 2048 : (index + 1) * 2048])
        p_value, report = chi_square(counts, exact_distribution(name, tuple(prompt)))
        assert p_value > ALPHA, f"{name}, {drafter}, {prompt}: {report}"

    assert drafter == "plain decoding" or int(outcome.stats.num_accepted_tokens.sum()) > 0


@dataclasses.dataclass(frozen=True)
class Discouraging(TokenAutomaton):
    """Lowers the logits of forbidden tokens, because the contract compares finite logits."""

    def __call__(self, params, state, logits):
        return jnp.maximum(TokenAutomaton.__call__(self, params, state, logits), logits - 2.0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_changed_target_keeps_the_contract_of_a_target(precision: str) -> None:
    """The contract is about texts, so processors with a state read the prompt here."""
    target = tiny.target(V, seed=2, **({"precision": BFLOAT16} if precision == "bfloat16" else {}))
    table = np.abs(TABLE)  # total, so that it goes on after any text
    table[table == 2] = -1
    penalty = Penalty(repetition=1.3, frequency=0.1, prompt=True)
    report = check_target(with_processors(target, Discouraging(table, prompt=True), penalty))
    assert report.ok, str(report)


def test_a_row_ends_with_a_reason_when_nothing_is_allowed() -> None:
    table = np.array([[1] * V, [-1] * V], np.int32)
    for processor in (TokenAutomaton(table), LogitBias(dict.fromkeys(range(V), -math.inf))):
        target = with_processors(TARGET, processor)
        for drafter in (None, NGram(3)):
            row = SpeculativeDecoder(target, drafter).generate([1, 2, 1], max_new_tokens=5).rows[0]
            assert row.finish_reason is FinishReason.NOT_FINITE
            assert len(row.tokens) == isinstance(processor, TokenAutomaton)


def test_a_changed_target_shares_the_arrays_of_the_target() -> None:
    changed = with_processors(TARGET, MinP(0.5)).params["target"]
    assert all(map(operator.is_, jax.tree.leaves(changed), jax.tree.leaves(TARGET.params)))


def test_other_numbers_need_no_other_program() -> None:
    first = with_processors(TARGET, Penalty(presence=1.0), TokenAutomaton(TABLE, start=1))
    second = with_processors(TARGET, Penalty(presence=2.0), TokenAutomaton(TABLE, start=2))
    assert first.model == second.model
    assert hash(first.model) == hash(second.model)
    run = lambda target: SpeculativeDecoder(target).generate([1, 2], max_new_tokens=9).tokens
    assert run(first) != run(second)


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
)
@pytest.mark.parametrize("states", [3, 101, 128])
def test_an_automaton_may_have_a_table_of_any_integers(dtype: str, states: int) -> None:
    """All states but the first follow each other; an unsigned table cannot forbid a token."""
    table = (np.arange(states)[:, None] + np.arange(V)) % states
    table[0, 0] = 0 if dtype.startswith("u") else -1
    start = states - 2
    ours, columns = map(np.asarray, TokenAutomaton(table.astype(dtype), start=start).arrays(V))
    # The number of each state once the first is 0.
    number = [(state - start) % states for state in range(states)]
    for state, row in enumerate(table):
        expected = [number[after] if after >= 0 else -1 for after in row]
        assert ours[number[state], columns].tolist() == expected


def test_a_bias_may_have_numbers_of_numpy() -> None:
    with tiny.unchecked():
        values = {np.int64(1): np.float32(1.5), np.uint8(2): 3}
        bias = LogitBias(values | {3: np.float64(-math.inf), 0: np.array(-2)})
        assert bias.arrays(4).tolist() == [-2.0, 1.5, 3.0, -math.inf]


WRONG: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: LogitBias({0: math.inf}), "is inf; expected a number, or -math.inf"),
    (lambda: LogitBias({0: math.nan}), "is nan; expected a number, or -math.inf"),
    (lambda: LogitBias({0: 1e300}), "token 0 is 1e.300; expected a number of float32"),
    (lambda: LogitBias({0: 10**400}), "token 0 is 1000.*; expected a number"),
    (lambda: LogitBias({0: True}), "token 0 is True; expected a number"),
    (lambda: LogitBias({0: "1"}), "token 0 is '1'; expected a number"),
    (lambda: LogitBias({True: 1.0}), "names the token True; expected ids from 0 to 3"),
    (lambda: LogitBias({"1": 1.0}), "names the token '1'; expected ids from 0 to 3"),
    (lambda: LogitBias({V: 1.0}), "names the token 4; expected ids from 0 to 3"),
    (lambda: LogitBias([1.0]), "expected a number for each token id"),
    (lambda: MinP("0.5"), "min_p is '0.5'; expected a number"),
    (lambda: MinP(0.0), "min_p is 0.0; expected above 0"),
    (lambda: Penalty(repetition=1e300), "repetition is 1e.300; expected a number of float32"),
    (lambda: Penalty(repetition=1e-300), "expected repetition above 0"),
    (lambda: Penalty(frequency=-math.inf), "presence and frequency finite"),
    (
        lambda: TokenAutomaton(TABLE, start=True),
        "starts in the state True; expected a whole number",
    ),
    (lambda: TokenAutomaton(TABLE, start=3), "starts in the state 3"),
    (
        lambda: TokenAutomaton(TABLE.astype(np.uint32)),
        "names the states 0 to 4294967295; expected 0 to 2",
    ),
    (lambda: TokenAutomaton(TABLE + 1), "names the states 0 to 3; expected 0 to 2"),
    (lambda: TokenAutomaton(TABLE.astype(bool)), "is bool.3, 4.; expected integers"),
    (lambda: TokenAutomaton(TABLE[0]), "is int32.4.; expected integers"),
    (
        lambda: TokenAutomaton(TABLE, columns=np.zeros(4)),
        "columns are float64.4.; expected integers .V.",
    ),
)


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_number_is_one_line(make: Callable[[], Any], message: str) -> None:
    with tiny.unchecked(), pytest.raises(ValueError, match=message) as caught:
        make().arrays(V)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("drafter", [NGram(3), "tree"])
def test_greedy_texts_with_a_draft_are_those_without(drafter: Any) -> None:
    target = with_processors(
        tiny.target(13), Penalty(repetition=1.3, frequency=0.4, prompt=True), LogitBias({4: -9.0})
    )

    tree = DynamicTree(num_nodes=9, max_depth=3, top_k=3)
    head = tiny.eagle3(tiny.target(13), tree) if drafter == "tree" else drafter
    prompts = [[1, 2, 3], [4], [5, 6, 5, 6, 5]]

    plain = SpeculativeDecoder(target, Plain()).generate(prompts, max_new_tokens=40)
    drafted = SpeculativeDecoder(target, head).generate(prompts, max_new_tokens=40)
    assert plain.tokens == drafted.tokens
    assert drafted.stats.num_accepted_tokens > 0

    unchanged = SpeculativeDecoder(tiny.target(13)).generate(prompts, max_new_tokens=40)
    assert plain.tokens != unchanged.tokens
