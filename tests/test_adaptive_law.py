"""Cutting drafts short: which rules are exact, by enumeration, and the loop that cuts, by the law of every token.

A width shared by thousands of rows hardly depends on any of them, which would hide that it depends on the wrong things.
So thousands of loops of one row each run side by side here (``vmap``), each with widths of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tables
import test_exact_law
import test_long_law
import tiny
from oracle import Tree
from test_exact_law import CHAIN, Distribution, Drafts, sampled
from test_long_law import DRAFTED, ORDER, PROBABILISTIC, VOCABULARY, WANTED

from eagle3_jax import AdaptiveVerification, BlockVerification, RoundCosts, SpeculativeDecoder
from eagle3_jax import loop as loops
from eagle3_jax.acceptance import verify
from eagle3_jax.block import verify_block
from eagle3_jax.sampling import draw, num_digits, probabilities, uniforms
from eagle3_jax.tree import Chain
from eagle3_jax.types import Draft, SamplingParams, Verifier, Warping

# ---------------------------------------------------------------- rules, enumerated

P, Q = test_exact_law.distribution("adaptive target"), test_exact_law.distribution("adaptive draft")
RULES = {"token": (verify, oracle.cells), "block": (verify_block, oracle.block_cells)}


def cut(q: Distribution, keeps: Callable[[tuple[int, ...], Tree], int]) -> Drafts:
    """A drawn chain of two of which a rule keeps 0, 1 or 2 tokens."""

    def drafts(prefix: tuple[int, ...]) -> Iterator[tuple[Fraction, Tree]]:
        for mass, tree in sampled(q, CHAIN)(prefix):
            kept = keeps(prefix, tree)
            yield mass, tree._replace(valid=tuple(node <= kept for node in range(3)))

    return drafts


def surely(tree: Tree, node: int) -> Fraction:
    """The confidence in a node: the largest probability of the law it was drawn from."""
    return max(tree.q[node])


def stops_at_doubt(prefix: tuple[int, ...], tree: Tree) -> int:
    """Known before it is drawn: the second token is dropped where its law is flat."""
    return 1 if surely(tree, 2) < Fraction(1, 2) else 2


def drops_unlikely_tokens(prefix: tuple[int, ...], tree: Tree) -> int:
    kept = 0
    while kept < 2 and tree.q[kept + 1][tree.tokens[kept + 1]] >= Fraction(2, 5):
        kept += 1
    return kept


def best_width_now(prefix: tuple[int, ...], tree: Tree) -> int:
    """The width of the most tokens for its cost, by this draft's own survivals; verifying any costs a step."""
    survival = [surely(tree, 1), surely(tree, 1) * surely(tree, 2)]
    gain = [Fraction(1), (1 + survival[0]) / Fraction(16, 10), (1 + sum(survival)) / Fraction(18, 10)]
    return gain.index(max(gain))


def lengths(keeps: Callable) -> set[int]:
    """How many tokens it keeps, after some prefix or other."""
    return {keeps(prefix, tree) for prefix in ((), (0,), (1,), (2,)) for _, tree in sampled(Q, CHAIN)(prefix)}


def distance(keeps: Callable, rule: str, q: Distribution = Q) -> float:
    """Total variation of three emitted tokens from the target's law."""
    rounds = test_exact_law.law_of_the_code(P, cut(q, keeps), 3, *RULES[rule])
    law = oracle.law_of_rounds(rounds, 3)
    return float(oracle.total_variation(law, oracle.autoregressive_law(P, 3)))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_decides_before_the_token_is_known_is_exact(rule: str) -> None:
    assert lengths(stops_at_doubt) == {1, 2}
    assert distance(stops_at_doubt, rule) == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keeps", [drops_unlikely_tokens, best_width_now])
def test_a_rule_that_looks_at_the_token_it_drops_is_not(keeps: Callable, rule: str) -> None:
    assert lengths(keeps) >= {0, 2}
    assert distance(keeps, rule) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_where_no_law_follows_from_a_drawn_token_the_best_width_is_exact_too(rule: str) -> None:
    """Each ``q`` follows from the committed text and the depth, as Medusa's and P-EAGLE's do."""
    parallel = test_exact_law.distribution("parallel draft")
    q = lambda committed, context: parallel((*committed, len(context)))

    def drafts(prefix: tuple[int, ...]) -> Distribution:
        return lambda full: q(prefix, full[len(prefix) :])

    def both(prefix: tuple[int, ...]) -> Iterator[tuple[Fraction, Tree]]:
        yield from cut(drafts(prefix), best_width_now)(prefix)

    widths = {tree.valid for prefix in ((), (0,), (1,), (2,), (0, 1), (2, 2)) for _, tree in both(prefix)}
    assert len(widths) > 1
    rounds = test_exact_law.law_of_the_code(P, both, 3, *RULES[rule])
    assert oracle.total_variation(oracle.law_of_rounds(rounds, 3), oracle.autoregressive_law(P, 3)) == 0


# ---------------------------------------------------------------- the loop, token by token


@dataclasses.dataclass(frozen=True)
class OneShape(tables.TableDrafter):
    """Has the one shape that it was built with, so that its drafts are made in full and then cut."""

    drafting: Any = None  # no method of that name


@dataclasses.dataclass(frozen=True)
class Parallel(tables.TableDrafter):
    """Draws every token after the last committed ones alone, by its place: Medusa in the small."""

    is_parallel: bool = True

    def propose(self, params: Any, state: tables.Window, keys: Any, sampling: SamplingParams) -> Draft:
        table, _ = params
        context = sum(state.tokens[:, self.order - 1 - back] * self.vocab_size**back for back in range(self.order))
        place = (context[:, None] + 7 * jnp.arange(self.max_depth)) % table.shape[0]
        q = probabilities(table[place], sampling, Warping.TEMPERATURE)
        digits = num_digits(self.vocab_size)
        drawn = draw(q, uniforms(keys, self.max_depth * digits).reshape(*q.shape[:2], digits))
        tokens = jnp.concatenate([state.tokens[:, -1:], drawn], axis=1).astype(jnp.int32)
        first = lambda leaf: jnp.pad(leaf, ((0, 0), (1, 0)) + ((0, 0),) * (leaf.ndim - 2))
        return Draft(
            tokens=tokens,
            parents=jnp.broadcast_to(jnp.arange(-1, self.max_depth), tokens.shape),
            valid=jnp.ones(tokens.shape, bool),
            probs=first(q),
            confidence=first(jnp.max(q, axis=-1)),
        )


# Costs with a step, so that the best width hangs on the survivals.
STEPS = RoundCosts(((1, ((1, 1.5), (2, 1.95), (3, 2.0))),))
ADAPTIVE = AdaptiveVerification(costs=STEPS, widths=(1, 2, 3), rounds_per_update=3)
# The last token alone decides: behind 0 and 1 the next one is nearly certain, behind 2 and 3 it is any of four. A chain
# that starts behind a certain token pays in full if its second token is followed by a certain one, and else does not.
CLEAR = np.log(np.array([[0.03, 0.03, 0.91, 0.03], [0.03, 0.03, 0.03, 0.91], [0.25] * 4, [0.25] * 4]))
CLEAR = np.tile(CLEAR, (test_long_law.CONTEXTS // VOCABULARY, 1)).astype(np.float32)
BORDERLINE = AdaptiveVerification(costs=RoundCosts(((1, ((1, 1.5), (3, 1.8))),)), widths=(1, 3), rounds_per_update=1000)
THRESHOLD = AdaptiveVerification(
    costs=RoundCosts(((1, ((3, 1.001),)),)), widths=(3,), rounds_per_update=1000, least_survival=0.35
)
SHARP = (2.5 * DRAFTED).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """Tables of logits ``[C V]``, and how they are used."""

    drafter: type[tables.TableDrafter]
    wanted: np.ndarray
    drafted: np.ndarray
    adaptive: AdaptiveVerification
    verifier: Verifier | None = None
    settings: tuple[test_long_law.Setting, ...] = test_long_law.TEMPERATURES


CASES = {
    "a threshold on a drawn chain": Case(tables.TableDrafter, WANTED, SHARP, THRESHOLD),
    "widths of a chain that is drawn whole": Case(OneShape, CLEAR, CLEAR, BORDERLINE, settings=((1.0, 0, 1.0),)),
    "widths of a parallel draft, in blocks": Case(Parallel, WANTED, DRAFTED, ADAPTIVE, BlockVerification()),
}


def written(name: str, *, rows: int, run: int) -> tuple[test_long_law.Texts, float]:
    """What many loops of one row wrote, and how many tokens they verified in a round on average."""
    case, horizon = CASES[name], test_long_law.HORIZON
    rng = np.random.default_rng(run)
    prompts = rng.integers(0, VOCABULARY, (rows, ORDER + 1))
    which = np.arange(rows) % len(case.settings)
    loaded = tables.drafter(case.drafted, ORDER, Chain(3), draft_sampling=PROBABILISTIC)
    method = case.drafter(VOCABULARY, ORDER, Chain(3), PROBABILISTIC)
    decoder = SpeculativeDecoder(
        tables.target(case.wanted, ORDER),
        dataclasses.replace(loaded, drafter=method),
        stop_tokens=(),
        adaptive=case.adaptive,
        verifier=case.verifier,
    )
    batch = test_long_law.batch_of(prompts, [case.settings[index] for index in which], np.full(rows, horizon), run)
    loop = dataclasses.replace(decoder.loop, warping=Warping.TEMPERATURE)
    outcome = alone(loop, decoder.params, batch, batch.tokens.shape[1] + horizon + loop.drafter.num_nodes)
    tokens = np.asarray(outcome.tokens)[:, 0, ORDER + 1 :][:, :horizon].astype(int)
    everything = np.concatenate([prompts, tokens], axis=1)
    context = sum(everything[:, ORDER - back :][:, :horizon] * VOCABULARY**back for back in range(ORDER))
    laws = np.array([oracle.warped(row.tolist(), *setting) for setting in case.settings for row in case.wanted])
    verified = float(np.sum(outcome.stats.num_draft_tokens) / np.sum(outcome.stats.num_drafts))
    texts = test_long_law.Texts(prompts[:, -ORDER:], tokens, laws, which[:, None] * len(case.wanted) + context)
    return texts, verified


def alone(loop: loops.SpeculativeLoop, params: Any, batch: loops.Prompts, capacity: int) -> loops.Outcome:
    """Every row as a batch of its own."""

    def one(row: loops.Prompts) -> loops.Outcome:
        return loop.generate(params, jax.tree.map(lambda leaf: leaf[None], row), capacity)

    with tiny.unchecked():  # which takes a row without its batch for a mistake
        return jax.jit(jax.vmap(one))(batch)


def check_adaptive_law(name: str, *, rows: int = 2048, runs: int = 1) -> None:
    """Every token has its law given those before it, and drafted ones were verified."""
    texts = [written(name, rows=rows, run=run) for run in range(runs)]
    assert all(1.1 < verified <= 3 for _, verified in texts), texts[0][1]
    found = test_long_law.judged(name, (text for text, _ in texts))
    assert found["all together"].sees(test_long_law.ALPHA) < 0.06


@pytest.mark.parametrize("name", CASES)
def test_what_is_cut_short_still_follows_the_law_token_by_token_with(name: str) -> None:
    check_adaptive_law(name)
