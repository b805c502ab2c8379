"""Level 2, over many rounds: every token of long texts from the loop follows its distribution.

``test_sampling_distribution`` counts short sequences. It detects large bugs of one round, and no
bug of many rounds, such as keys that repeat after eight tokens. Here texts are long and tables make
tokens cheap. The distribution of each token given the earlier ones is known in closed form. Counts
minus expected counts are summed within strata of the past: the context, the position, the token
``lag`` positions earlier, the token of the row before. Seeds are fixed; an exact loop fails an
assertion once in a million. Each group of strata computes the smallest deviation that it detects. A
vocabulary of 80 tokens takes two uniforms to draw from, like any real one; four tokens, with all
their contexts, take one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_targets
import tables
import tiny
from worlds import WIDE, World

from eagle3_jax import drafters
from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.drafters import Fallback, Markov, NGram, Plain, Suffix
from eagle3_jax.models.config import GatedDelta, GatedMLP, LayerConfig
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import DraftSampling, SamplingMode
from validation.statistics import Excess, Fluctuation

VOCABULARY = 4
ORDER = 3
HORIZON = 24
CONTEXTS = VOCABULARY**ORDER
ALPHA = 1e-6
# Nearer tokens are the context; a round of these drafts is at most 4 tokens long.
LAGS = range(ORDER + 1, 18)
Setting = tuple[float, int, float]  # temperature, top-k, top-p
TEMPERATURES: tuple[Setting, ...] = ((0.8, 0, 1.0), (1.2, 0, 1.0))
TRUNCATIONS: tuple[Setting, ...] = ((1.0, 2, 1.0), (1.0, 0, 0.8), (1.3, 3, 0.75), (0.0, 0, 1.0))

_rng = np.random.default_rng(0)
# The last token is rare, so truncation of a tail removes a large part of its probability.
TARGET_LOGITS = _rng.normal(size=(CONTEXTS, VOCABULARY)) * 0.8 - np.array([0.0, 0.0, 0.0, 2.0])
DRAFTER_LOGITS = TARGET_LOGITS + _rng.normal(size=TARGET_LOGITS.shape)
TARGET_LOGITS = TARGET_LOGITS.astype(np.float32)
DRAFTER_LOGITS = DRAFTER_LOGITS.astype(np.float32)

NARROW = World(ORDER, np.arange(CONTEXTS), TARGET_LOGITS, DRAFTER_LOGITS)
PROBABILISTIC = DraftSampling.PROBABILISTIC
TREE = DynamicTree(num_nodes=7, max_depth=3, top_k=2)

DRAFTERS: dict[str, Callable[[], LoadedDrafter]] = {
    "plain decoding": lambda: LoadedDrafter(Plain()),
    "n-grams": lambda: LoadedDrafter(NGram(3)),
    "a chain of the likeliest tokens": lambda: NARROW.drafter(Chain(3)),
    "a chain of sampled tokens": lambda: NARROW.drafter(
        Chain(3), ids=(0, 2, 3), draft_sampling=PROBABILISTIC
    ),
    "a dynamic tree": lambda: NARROW.drafter(TREE),
    "a static tree": lambda: NARROW.drafter(tiny.STATIC_TREE, ids=(0, 1, 3)),
    "a static tree of sampled tokens": lambda: NARROW.drafter(
        tiny.STATIC_TREE, ids=(0, 1, 3), draft_sampling=PROBABILISTIC
    ),
    "a schedule": lambda: NARROW.drafter(Chain(3), draft_sampling=PROBABILISTIC),
}
WIDE_DRAFTERS: dict[str, Callable[[], LoadedDrafter]] = {
    "plain decoding, two digits": DRAFTERS["plain decoding"],
    "a chain of sampled tokens, two digits": lambda: WIDE.drafter(
        Chain(3), ids=tuple(range(3, 80)), draft_sampling=PROBABILISTIC
    ),
    "a static tree of sampled tokens, two digits": lambda: WIDE.drafter(
        tiny.STATIC_TREE, ids=tuple(range(77)), draft_sampling=PROBABILISTIC
    ),
}


def remembering() -> LoadedTarget:
    """A recurrent layer below one of attention, whose state decays slowly and matters."""
    mixer = GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6)
    layers = (LayerConfig(mixer=mixer, mlp=GatedMLP(width=24)), *tiny.layers(1))
    target = tiny.target(VOCABULARY, layers=layers, norm_kind="zero-centred")
    layer = target.params["blocks"][0]["attention"]
    layer |= {
        "a_log": jnp.full_like(layer["a_log"], -3.0),
        "o": {"kernel": 4.0 * layer["o"]["kernel"]},
    }
    return target


FLAX = tiny.target(VOCABULARY)
RECURRENT = remembering()
FP8 = random_targets.in_eight_bits(FLAX, "fp8")
SAMPLED: dict[str, Any] = {"draft_sampling": PROBABILISTIC}
# No tables: random decoders of a few hundred parameters, and random heads on them.
HEADS: dict[str, tuple[LoadedTarget, Callable[[LoadedTarget], LoadedDrafter]]] = {
    "an EAGLE-3 chain of sampled tokens": (
        FLAX,
        lambda target: tiny.eagle3(target, Chain(3), seed=2, draft_vocab_size=3, **SAMPLED),
    ),
    "suffixes": (FLAX, lambda target: LoadedDrafter(Suffix(3))),
    "n-grams, else an EAGLE-3 chain of sampled tokens": (
        FLAX,
        lambda target: Fallback.of(NGram(2, min_ngram=3), tiny.eagle3(target, Chain(3), **SAMPLED)),
    ),
    "an EAGLE-3 dynamic tree": (FLAX, lambda target: tiny.eagle3(target, TREE)),
    "an EAGLE-1 static tree of sampled tokens": (
        FLAX,
        lambda target: tiny.eagle1(target, tiny.STATIC_TREE, **SAMPLED),
    ),
    "a P-EAGLE chain of sampled tokens": (
        FLAX,
        lambda target: tiny.p_eagle(target, Chain(3), draft_vocab_size=3, **SAMPLED),
    ),
    "an MTP chain of sampled tokens": (FLAX, lambda target: tiny.mtp(target, Chain(3), **SAMPLED)),
    "three MTP modules' chain of sampled tokens": (
        FLAX,
        lambda target: tiny.mtp(target, Chain(4), layers=tiny.layers(3), **SAMPLED),
    ),
    "a Medusa static tree of sampled tokens": (
        FLAX,
        lambda target: tiny.medusa(target, tiny.STATIC_TREE, **SAMPLED),
    ),
    "a DFlash chain of sampled tokens": (
        FLAX,
        lambda target: tiny.dflash(target, Chain(3), draft_vocab_size=3, **SAMPLED),
    ),
    "a DSpark chain of sampled tokens": (
        FLAX,
        lambda target: tiny.dflash(target, Chain(3), markov=Markov(rank=4), **SAMPLED),
    ),
    "a DFlash2 chain of sampled tokens": (
        FLAX,
        lambda target: tiny.dflash2(target, Chain(3), selector_top_k=3, **SAMPLED),
    ),
    "a Gemma 4 assistant's chain of sampled tokens": (
        FLAX,
        lambda target: tiny.gemma4(target, Chain(3), **SAMPLED),
    ),
    "a draft model's chain of sampled tokens": (
        FLAX,
        lambda target: tiny.draft_model(target, Chain(3), **SAMPLED),
    ),
    "a chain of sampled tokens for a recurrent target": (
        RECURRENT,
        lambda target: tiny.eagle3(target, Chain(3), **SAMPLED),
    ),
    "a static tree of sampled tokens for a recurrent target": (
        RECURRENT,
        lambda target: tiny.eagle1(target, tiny.STATIC_TREE, **SAMPLED),
    ),
    "a chain of sampled tokens for weights in FP8": (
        FP8,
        lambda target: tiny.eagle3(target, Chain(3), **SAMPLED),
    ),
}


@dataclasses.dataclass(frozen=True)
class Texts:
    """The tokens that a batch of rows wrote, with the distribution that each was sampled from."""

    before: np.ndarray  #: ``[B ORDER]``, the end of the prompts.
    tokens: np.ndarray  #: ``[B H]``, padded with -1.
    p: np.ndarray  #: ``[C V]``, all distributions, in float64.
    distributions: np.ndarray  #: ``[B H]``, index of the distribution of each token.
    world: World = NARROW  #: Whose contexts count.

    def strata(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """Yields name, stratum of every token (-1: none) and number of strata.

        None depends on the token itself.
        """
        batch, horizon = self.tokens.shape
        yield "all together", np.zeros((batch, horizon), int), 1
        contexts = after(self.world, np.concatenate([self.before, self.tokens], axis=1))
        yield "context", contexts, len(self.world.target_logits)

        yield "position", np.broadcast_to(np.arange(horizon), (batch, horizon)), horizon

        # Of many tokens a few kinds.
        kind = np.where(self.tokens < 0, -1, self.tokens % VOCABULARY)
        row_before = np.concatenate([np.full((1, horizon), -1), kind[:-1]])
        yield "row before", row_before, VOCABULARY

        for lag in LAGS:
            gap = np.full((batch, lag), -1)
            earlier = np.concatenate([gap, kind[:, : horizon - lag]], axis=1)
            yield f"{lag} tokens earlier", earlier, VOCABULARY

    def excess(self) -> dict[str, Excess]:
        """Returns the counts by the name of the strata."""
        counts = {}
        for name, stratum, size in (*self.strata(), *self._cells()):
            chosen = (self.tokens >= 0) & (stratum >= 0)
            counts[name] = Excess.of(
                self.p, self.distributions[chosen], self.tokens[chosen], stratum[chosen], size
            )

        # A deviation that changes its direction at every token cancels in all of these. It shows in
        # the rank.
        chosen = self.tokens >= 0
        order = np.argsort(-self.p, axis=1, kind="stable")
        distributions = self.distributions[chosen]
        ranks = np.argsort(order, axis=1)
        rank = ranks[distributions, self.tokens[chosen]]
        counts["rank"] = Excess.of(
            np.take_along_axis(self.p, order, 1), distributions, rank, np.zeros_like(rank), 1
        )
        return counts

    def _cells(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """Yields each distribution as a stratum, if many tokens share it."""
        if len(self.p) < self.tokens.size:
            yield "setting and context", self.distributions, len(self.p)


def after(world: World, texts: np.ndarray) -> np.ndarray:
    """Returns ``[B H]``: which distribution each token after the first ``order`` tokens has."""
    horizon = texts.shape[1] - world.order
    size = world.target_logits.shape[1]
    past = [texts[:, world.order - 1 - back :][:, :horizon] for back in range(world.order)]
    return world.follows[sum(np.maximum(token, 0) * size**back for back, token in enumerate(past))]


@functools.cache
def distributions_of(settings: tuple[Setting, ...], world: World = NARROW) -> np.ndarray:
    """Returns ``[settings x distributions, V]``."""
    return np.array(
        [
            oracle.warped(row.tolist(), *setting)
            for setting in settings
            for row in world.target_logits
        ]
    )


@functools.cache
def paired(name: str) -> tuple[LoadedTarget, LoadedDrafter]:
    """A target and its drafter."""
    if name in HEADS:
        target, drafter = HEADS[name]
        return target, drafter(target)
    return (WIDE if name in WIDE_DRAFTERS else NARROW).target, {**DRAFTERS, **WIDE_DRAFTERS}[name]()


def written(name: str, settings: tuple[Setting, ...], *, rows: int, run: int) -> Texts:
    """Runs one batch through the compiled loop, with all settings in its rows."""
    rng = np.random.default_rng(run)
    world = WIDE if name in WIDE_DRAFTERS else NARROW
    size = world.target_logits.shape[1]
    order = world.order
    # Longer than the context by one token.
    prompts = rng.integers(0, size, (rows, order + 1))
    setting_of_row = np.arange(rows) % len(settings)

    limit = np.full(rows, HORIZON)
    schedule = None
    # Rows end one after the other, so that every length has its rounds.
    if name == "a schedule":
        schedule = SpeculationSchedule(
            ((1, rows // 4, 3), (rows // 4 + 1, rows // 2, 2), (rows // 2 + 1, rows - 9, 0))
        )
        limit = rng.integers(HORIZON // 3, HORIZON + 1, rows)

    target, drafter = paired(name)
    decoder = SpeculativeDecoder(target, drafter, schedule=schedule, stop_tokens=())
    truncates = any(k or p < 1 for _, k, p in settings)
    sampling_mode = SamplingMode.TRUNCATED if truncates else SamplingMode.TEMPERATURE

    sampling = tiny.sampling_of([settings[index] for index in setting_of_row])
    batch = tiny.prompts(prompts.tolist(), limit=limit.tolist(), sampling=sampling, seed=run)
    tokens = generated(
        dataclasses.replace(decoder.loop, sampling_mode=sampling_mode), decoder, batch
    )
    tokens = np.where(np.arange(HORIZON) < limit[:, None], tokens, -1)

    everything = np.concatenate([prompts, tokens], axis=1)
    if name in HEADS:
        heat = np.array([settings[index][0] for index in setting_of_row])
        p = distributions_of_the_decoder(target, everything, heat)
        distributions = np.arange(tokens.size).reshape(tokens.shape)
    else:
        p = distributions_of(settings, world)
        follows = after(world, everything[:, 1:])
        distributions = np.where(
            tokens >= 0, setting_of_row[:, None] * len(world.target_logits) + follows, 0
        )
    return Texts(prompts[:, -order:], tokens, p, distributions, world)


def distributions_of_the_decoder(
    target: LoadedTarget, texts: np.ndarray, temperature: np.ndarray
) -> np.ndarray:
    """Returns ``[B H V]``, flattened, from one causal forward of the texts.

    Without cache, blocks or drafter.
    """
    fed = jnp.array(texts[:, :-1], jnp.int32)
    logits = np.asarray(tiny.forward(target.model, target.params, fed)[0][:, -HORIZON:], np.float64)
    logits /= temperature[:, None, None]
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).reshape(-1, VOCABULARY)


def generated(
    loop: loops.SpeculativeLoop, decoder: SpeculativeDecoder, batch: loops.Prompts
) -> np.ndarray:
    """Returns ``[B H]`` tokens; after a row's limit they are arbitrary."""
    start = batch.tokens.shape[1]
    capacity = start + HORIZON + loop.drafter.num_nodes
    outcome = loops.generate(loop, decoder.params, batch, capacity=capacity)
    assert np.array_equal(outcome.length, batch.limit)
    if not isinstance(loop.drafter, Plain):  # rounds without deep acceptance would test little
        assert np.asarray(outcome.stats.num_accepted_tokens_per_pos).sum(axis=0).min() > 0
    return np.asarray(outcome.tokens)[:, start : start + HORIZON].astype(int)


def check_long_distribution(
    name: str,
    *,
    settings: tuple[Setting, ...] = TEMPERATURES,
    rows: int = 4096,
    runs: int = 2,
    first: int = 0,
) -> dict[str, Fluctuation]:
    """Checks every stratum of every text of some runs, and returns the fluctuations by name."""
    return judged(
        name, (written(name, settings, rows=rows, run=first + run) for run in range(runs))
    )


def judged(name: str, texts: Iterator[Texts]) -> dict[str, Fluctuation]:
    total: dict[str, Excess] = {}
    for text in texts:
        for group, excess in text.excess().items():
            total[group] = total[group] + excess if group in total else excess

    fluctuations = {group: excess.fluctuation() for group, excess in total.items()}
    wrong = [
        f"by {group}: chi-square {moved.statistic:.1f} on {moved.degrees} degrees, p"
        f" {moved.p_value:.2g}"
        + f", {moved.impossible} tokens without mass"
        * (moved.impossible > 0)
        for group, moved in fluctuations.items()
        if not moved.p_value > ALPHA
    ]

    assert not wrong, (
        f"{name}: {len(wrong)} of {len(fluctuations)} groups of strata, {'; '.join(wrong[:3])}"
    )
    return fluctuations


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("name", DRAFTERS)
def test_long_texts_follow_the_distribution_token_by_token_with(name: str) -> None:
    fluctuations = check_long_distribution(name, rows=8192, runs=5)
    assert fluctuations["setting and context"].sees(ALPHA) < 0.018
    assert fluctuations["all together"].sees(ALPHA) < 0.0095


@pytest.mark.parametrize("name", WIDE_DRAFTERS)
def test_long_texts_of_two_digits_follow_the_distribution_token_by_token_with(name: str) -> None:
    fluctuations = check_long_distribution(name, rows=4096, runs=1)
    assert fluctuations["setting and context"].sees(ALPHA) < 0.053
    assert fluctuations["all together"].sees(ALPHA) < 0.033


@pytest.mark.parametrize("name", ["a chain of sampled tokens", "a dynamic tree"])
def test_long_truncated_texts_follow_the_distribution_token_by_token_with(name: str) -> None:
    check_long_distribution(name, settings=TRUNCATIONS, rows=8192, runs=1)


@pytest.mark.parametrize("name", [name for name in HEADS if "dynamic" not in name])
def test_long_texts_of_a_decoder_follow_the_distribution_token_by_token_with(name: str) -> None:
    fluctuations = check_long_distribution(name, rows=2048, runs=1)
    assert fluctuations["context"].sees(ALPHA) < 0.06
    assert fluctuations["all together"].sees(ALPHA) < 0.04


def test_no_method_is_left_out() -> None:
    tested = {type(paired(name)[1].drafter) for name in (*DRAFTERS, *HEADS)}
    methods = {
        member
        for member in vars(drafters).values()
        if isinstance(member, type) and hasattr(member, "propose")
    }
    assert methods - {drafters.Silent} == tested - {tables.TableDrafter}  # Silent drafts nothing
