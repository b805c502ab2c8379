"""What a drafter must not change: the output of the compiled loop, and its law."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from eagle3_jax import loop as loops
from eagle3_jax.contract.frequencies import Law, chi_square
from eagle3_jax.contract.report import ALPHA, Broken, NotRun
from eagle3_jax.contract.subject import Subject
from eagle3_jax.decode import LoadedTarget, SpeculativeDecoder
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.sampling import row_keys
from eagle3_jax.state import LoopParams, Prompts
from eagle3_jax.types import FinishReason, SamplingParams, Warping, per_row

TOP, HORIZON = 3, 4  # the law of four tokens, each among the three likeliest: a vocabulary of three
_NEAR = 1e-3  # logits closer than this may change places with the order of sums


def leaves_greedy_output_alone(subject: Subject) -> str:
    """Greedy output on a ragged batch is that of plain decoding in blocks of the same shape."""
    prompts, limits = _prompts(subject, (5, 2, 9, 1)), [24, 7, 16, 1]
    nodes = subject.loaded.drafter.num_nodes
    ours, theirs = (
        SpeculativeDecoder(subject.target, drafter, stop_tokens=()).generate(prompts, max_new_tokens=limits)
        for drafter in (subject.loaded, Plain(nodes))
    )
    near = []
    for row, (one, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        if one == other:
            continue
        at = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        gap = math.inf if at is None else _gap(subject.target, [*prompts[row], *other[:at]])
        if gap > (3e-2 if subject.rounds_off else 1e-4):
            raise Broken(
                f"row {row} writes {one[:8]}... from token {at} on, where plain decoding writes {other[:8]}...; "
                "please report this: the loop should not let a drafter do that"
            )
        near.append(row)
    accepted, drafted = int(ours.stats.num_accepted_tokens), int(ours.stats.num_draft_tokens)
    if drafted and not accepted:
        raise NotRun("the output is equal, but no draft token was accepted, so refusals alone were compared")
    parted = f"; {len(near)} of {len(prompts)} rows parted at a tie within rounding" if near else ""
    return f"{accepted} of {drafted} draft tokens accepted{parted}"


def leaves_the_law_alone(subject: Subject) -> str:
    """Sampled sequences of a vocabulary cut to three tokens have the target's law, enumerated."""
    if subject.rounds_off:
        raise NotRun("it or its target computes in less than 32 bits, where rounding alone would show")
    candidates = _prompts(subject, (1, 3) * 4)
    prompts = list(itertools.islice((prompt for prompt in candidates if _law(subject.target, prompt)), 2))
    if not prompts:
        raise NotRun("the target's third and fourth likeliest tokens lie too close together")
    accepted, counts = 0, [Counter() for _ in prompts]
    for index, tokens, of_draft in _sampled(subject, prompts):
        counts[index][tokens] += 1
        accepted += of_draft
    verdicts = [chi_square(seen, _law(subject.target, p), alpha=ALPHA) for seen, p in zip(counts, prompts, strict=True)]
    for verdict in verdicts:
        if verdict.p_value < ALPHA:
            raise Broken(f"the law of {HORIZON} tokens is not the target's: {verdict.why} (p = {verdict.p_value:.1g})")
    if accepted == 0:
        raise NotRun("the law is right, but no draft token was accepted, so refusals alone were compared")
    smallest = max(verdict.visible for verdict in verdicts)
    return (
        f"{sum(map(Counter.total, counts))} sequences, {accepted} draft tokens accepted; a deviation of {smallest:.1%} "
        "(rms over sequences) would have shown nine times in ten"
    )


def _sampled(subject: Subject, prompts: list[list[int]]) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Sequences of the compiled loop: which prompt, what was written, how many draft tokens were accepted for it."""
    drafter, rows = subject.loaded.drafter, 512 * len(prompts)
    loop = SpeculativeLoop(subject.target.model, drafter, warping=Warping.TRUNCATED)
    params = LoopParams(subject.target.params, subject.loaded.params)
    width = max(map(len, prompts))
    tokens = np.zeros((rows, width), np.int32)
    length = np.array([len(prompts[row % len(prompts)]) for row in range(rows)], np.int32)
    for row in range(rows):
        tokens[row, : length[row]] = prompts[row % len(prompts)]
    batch = Prompts(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(length),
        limit=jnp.asarray(length + HORIZON),
        limit_reason=jnp.full((rows,), int(FinishReason.LENGTH), jnp.int32),
        stop_tokens=jnp.zeros((rows, 0), jnp.int32),
        sampling=per_row(SamplingParams(temperature=1.0, top_k=TOP), rows),
        keys=row_keys(subject.seed, rows),
    )
    for run in range(max(1, subject.samples // rows)):
        fresh = batch.replace(keys=row_keys(subject.seed + run, rows))  # type: ignore[attr-defined]
        outcome = jax.device_get(loops.generate(loop, params, fresh, capacity=width + HORIZON + drafter.num_nodes))
        for row in range(rows):
            written = outcome.tokens[row, length[row] : outcome.length[row]].tolist()
            yield row % len(prompts), tuple(written), int(outcome.stats.num_accepted_tokens[row])


def _law(target: LoadedTarget, prompt: list[int]) -> Law:
    """Probability of every sequence, by plain forwards of the target; empty where the cut is too near a tie."""
    law: Law = {(): 1.0}
    for _ in range(HORIZON):
        logits = _last_logits(target, [[*prompt, *tokens] for tokens in law])
        longer: Law = {}
        for tokens, values in zip(law, logits, strict=True):
            order = np.argsort(-values)
            kept = order[:TOP]
            if len(order) > TOP and values[kept[-1]] - values[order[TOP]] < _NEAR:
                return {}
            weights = np.exp(values[kept] - values[kept[0]])
            for token, weight in zip(kept.tolist(), weights / weights.sum(), strict=True):
                longer[*tokens, token] = law[tokens] * float(weight)
        law = longer
    return law


def _last_logits(target: LoadedTarget, rows: list[list[int]]) -> Float[np.ndarray, "B V"]:
    """After the last token of every row: one plain causal forward, without a cache."""
    length = len(rows[0])
    tokens = np.zeros((TOP ** (HORIZON - 1), 32), np.int32)  # one program for everything asked here
    tokens[: len(rows), :length] = rows
    logits = _forward(target.model, target.params, jnp.asarray(tokens), jnp.int32(length - 1))
    return np.asarray(logits, np.float64)[: len(rows)]


@functools.partial(jax.jit, static_argnums=0)
def _forward(model: Any, params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    output = model(params, tokens, positions, causal_mask(tokens.shape[1]))
    return model.unembed(params, jnp.take(output.final, last, axis=1))


def _gap(target: LoadedTarget, text: list[int]) -> float:
    """Between the two likeliest tokens after a text, as a share of the largest logit."""
    values = _last_logits(target, [text])[0]
    second, first = np.sort(values)[-2:]
    return float((first - second) / max(np.abs(values).max(), 1e-9))


def _prompts(subject: Subject, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng([subject.seed, *lengths])
    return [rng.integers(0, subject.target.vocab_size, size).tolist() for size in lengths]
