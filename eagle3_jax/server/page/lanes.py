"""One request decoded twice, plainly and with drafts, with probabilities of drafted tokens."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle3_jax.acceptance import Exact
from eagle3_jax.cache import Cache
from eagle3_jax.checks import sampling_mode_of
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.devices.sharding import to_host
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.measure.trace import describe
from eagle3_jax.prompts.request import Request
from eagle3_jax.sampling import probabilities, residual
from eagle3_jax.state import GenerationState
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.text.tokens import Pieces
from eagle3_jax.tree import ancestor_mask, causal_mask
from eagle3_jax.types import Draft, FinishReason, SamplingParams

PLAIN = "plain"
SPECULATIVE = "speculative"
_NUM_BARS = 5  # most likely tokens of each distribution that are reported
_DIGITS = 4  # of a probability
_SECONDS = 5  # digits of a time
Record = dict[str, Any]
T = TypeVar("T")


def run_lanes(decoders: Mapping[str, SpeculativeDecoder], request: Request) -> Iterator[Record]:
    """Decodes a request with each decoder, one after the other, and yields what happens as JSON.

    Each round is one step of the iterator. The events are ``compiling`` and ``compiled`` of each
    lane; ``first``, the ``round`` events and ``end`` of one lane after the other; ``probabilities``
    of each speculative round; and ``done``. Seconds are those of the lane's own work, without
    compilation and without the time between two steps.

    Args:
        decoders: A decoder for each of the lanes ``"plain"`` and ``"speculative"``, with the same
            target.
        request: The prompt, its limit and its sampling; ``ignore_stop`` is not read.
    """
    for lane, decoder in decoders.items():
        yield {"event": "compiling", "lane": lane}
        yield {
            "event": "compiled",
            "lane": lane,
            "seconds": round(_warm_up(decoder, request), _SECONDS),
        }
    outputs = []
    for lane, decoder in decoders.items():
        output = yield from _decode(lane, decoder, request)
        outputs.append(output)
    yield from _examine(decoders[SPECULATIVE], request)
    yield {"event": "done", "same_text": outputs[0] == outputs[1]}


def _warm_up(decoder: SpeculativeDecoder, request: Request) -> float:
    """Runs the prompt and one round, and returns the seconds of compilation."""
    with CompileClock() as clock:
        state = decoder.step(_prefill(decoder, request)).state
        jax.block_until_ready(state)
    return clock.seconds


def _prefill(decoder: SpeculativeDecoder, request: Request) -> GenerationState:
    return decoder.prefill(
        [request.tokens],
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        seed=request.seed,
    )


def _decode(
    lane: str, decoder: SpeculativeDecoder, request: Request
) -> Generator[Record, None, list[int]]:
    """Decodes a request in one lane: yields every event of the lane, and returns the tokens."""
    pieces = Pieces(decoder.target.tokenizer)
    state, seconds = _timed(lambda: _prefill(decoder, request))
    length, finish = _progress(state)
    output = to_host(state.tokens)[0, len(request.tokens) : length].tolist()
    texts = _texts(pieces, decoder, output, finish)
    yield {"event": "first", "lane": lane, "seconds": round(seconds, _SECONDS), "texts": texts}

    passes = 0
    total = 0.0
    while finish is FinishReason.RUNNING:
        before = length
        latest, seconds = _timed(functools.partial(decoder.step, state))
        state = latest.state
        length, finish = _progress(state)
        total += seconds
        passes += 1

        # The round may add more tokens than the limit leaves room for.
        record = describe(latest)[0]
        accepted = [record["tokens"][node] for node in record["path"]]
        emitted = [*accepted, record["next_token"]][: length - before]
        output += emitted
        yield {
            "event": "round",
            "lane": lane,
            "seconds": round(seconds, _SECONDS),
            "tokens": record["tokens"],
            "labels": [label(decoder, token) for token in record["tokens"]],
            "parents": record["parents"],
            "path": record["path"],
            "next_token": record["next_token"],
            "next_label": label(decoder, record["next_token"]),
            "texts": _texts(pieces, decoder, emitted, finish),
        }

    stats = SpeculationStats.merge([to_host(state.stats)])
    yield {
        "event": "end",
        "lane": lane,
        "seconds": round(total, _SECONDS),
        "passes": passes,
        "tokens": len(output),
        "finish_reason": finish.name.lower(),
        "drafts": int(stats.num_drafts),
        "drafted": int(stats.num_draft_tokens),
        "accepted": int(stats.num_accepted_tokens),
        "tau": _rounded(stats.mean_acceptance_length),
    }
    return output


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    """Returns the result of a program, and the seconds until the device had it."""
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return result, time.perf_counter() - start


def _progress(state: GenerationState) -> tuple[int, FinishReason]:
    """Returns the number of tokens and the reason of the end."""
    length, finish = to_host((state.length, state.finish))
    return int(length[0]), FinishReason(int(finish[0]))


def _texts(
    pieces: Pieces, decoder: SpeculativeDecoder, new: list[int], finish: FinishReason
) -> list[str]:
    """Returns the text that each new token completes; without a tokenizer its id."""
    if decoder.target.tokenizer is None:
        return [f"{token} " for token in new]
    return pieces.decode(new, finish)


def label(decoder: SpeculativeDecoder, token: int) -> str:
    """Returns the text of one token, or its id without a tokenizer."""
    tokenizer = decoder.target.tokenizer
    return str(token) if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def _examine(decoder: SpeculativeDecoder, request: Request) -> Iterator[Record]:
    """Decodes the request again, and yields the probabilities of each round.

    The rounds are those of the timed lane, because the programs, the prompt and the seed are the
    same. Before each round the target's cache is copied, so that a second forward pass over the
    draft gives the target's logits.
    """
    state = _prefill(decoder, request)
    mode = sampling_mode_of(to_host(state.sampling))
    number = 0
    while _progress(state)[1] is FinishReason.RUNNING:
        loop = dataclasses.replace(decoder.loop.at(state), sampling_mode=mode)
        cache = jax.tree.map(jnp.copy, state.cache)
        latest = decoder.step(state)
        state = latest.state
        nodes_of_draft = latest.draft.replace(probs=None)
        params = decoder.params.target
        distributions = _distributions(
            loop, params, nodes_of_draft, latest.positions, cache, state.sampling
        )
        valid, q, p, at_one = to_host((latest.draft.valid, latest.draft.probs, *distributions))
        shown = p if request.temperature > 0 else at_one
        nodes = np.flatnonzero(valid[0])  # `describe` numbers the nodes in the same way
        q = None if q is None else q[0, nodes]
        record = describe(latest)[0]
        yield {
            "event": "probabilities",
            "round": number,
            "nodes": _values(decoder, record, p=p[0, nodes], q=q, shown=shown[0, nodes]),
        }
        number += 1


@functools.partial(jax.jit, static_argnames=("loop",))
def _distributions(
    loop: SpeculativeLoop,
    params: Any,
    draft: Draft,
    positions: Int[Array, "B N"],
    cache: Cache,
    sampling: SamplingParams,
) -> tuple[Float[Array, "B N V"], Float[Array, "B N V"]]:
    """Returns the target's distributions after each node: the round's, and at temperature 1."""
    size = draft.tokens.shape[1]
    mask = (
        causal_mask(size) if loop.is_chain else ancestor_mask(draft.parents, loop.drafter.max_depth)
    )
    output = loop.target(params, draft.tokens, positions, mask, cache, **loop.target_options)
    logits = loop.target.unembed(params, output.final)
    return probabilities(logits, sampling, loop.sampling_mode), jax.nn.softmax(logits)


def _values(
    decoder: SpeculativeDecoder,
    record: Record,
    *,
    p: Float[np.ndarray, "N V"],
    q: Float[np.ndarray, "N V"] | None,
    shown: Float[np.ndarray, "N V"],
) -> list[Record]:
    """Returns the probabilities of each node, and the distribution after it.

    Args:
        decoder: The decoder; its target has the texts of tokens.
        record: The round.
        p: The distribution after each node that the acceptance rule compares with.
        q: The distribution that each node was sampled from; ``None`` for point masses.
        shown: The target's distribution after each node that is shown: ``p``, or that of
            temperature 1.
    """
    tokens = record["tokens"]
    parents = record["parents"]
    last = record["path"][-1] if record["path"] else 0
    is_exact = type(decoder.loop.verifier) is Exact
    chances = acceptance(tokens, parents, p=p, q=q) if is_exact else [None] * len(tokens)

    nodes = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        children = [
            child for child, parent_of_child in enumerate(parents) if parent_of_child == node
        ]
        # Tokens that have a bar, however unlikely they are.
        named = {tokens[child] for child in children}
        if node == last:
            named.add(record["next_token"])
        proposal = None if q is None or not children else q[children[0]]
        values: Record = {"bars": _bars(decoder, shown[node], proposal, named)}
        if parent >= 0:
            values["p"] = _rounded(shown[parent, token])
            values["q"] = 1.0 if q is None else _rounded(q[node, token])
            values["accept"] = chances[node]
        nodes.append(values)
    return nodes


def acceptance(
    tokens: Sequence[int],
    parents: Sequence[int],
    *,
    p: Float[np.ndarray, "N V"],
    q: Float[np.ndarray, "N V"] | None,
) -> list[float]:
    """Returns the probability that each node is accepted, if its parent is and no elder sibling is.

    :func:`~eagle3_jax.acceptance.verify` accepts ``x`` if ``u · q(x) < p(x)``, with probability
    ``min(1, p(x) / q(x))``. A rejected sibling has left the :func:`~eagle3_jax.sampling.residual`
    of ``p``. The entry of the root is 1.

    Args:
        tokens: ``[N]``, node 0 is the root.
        parents: ``[N]``, -1 at the root.
        p: The target's distribution after each node.
        q: The distribution that each node was sampled from; ``None`` for point masses.
    """
    remaining = p.copy()
    chances = [1.0]
    for node in range(1, len(tokens)):
        parent = parents[node]
        token = tokens[node]
        proposal = np.eye(1, p.shape[1], token)[0] if q is None else q[node]
        ratio = remaining[parent, token] / proposal[token] if proposal[token] > 0 else 1.0
        chances.append(_rounded(min(1.0, ratio)))
        remaining[parent], _ = residual(jnp.asarray(remaining[parent]), jnp.asarray(proposal))
    return chances


def _bars(
    decoder: SpeculativeDecoder,
    p: Float[np.ndarray, " V"],
    q: Float[np.ndarray, " V"] | None,
    named: set[int],
) -> list[list[Any]]:
    """Returns id, text, ``p`` and ``q`` of the most likely and the named tokens, by ``p``."""
    likely = [*np.argsort(-p)[:_NUM_BARS], *([] if q is None else np.argsort(-q)[:_NUM_BARS])]
    tokens = named | {
        int(token) for token in likely if p[token] > 0 or (q is not None and q[token] > 0)
    }
    return [
        [
            token,
            label(decoder, token),
            _rounded(p[token]),
            None if q is None else _rounded(q[token]),
        ]
        for token in sorted(tokens, key=lambda token: (-p[token], token))
    ]


def _rounded(value: SupportsFloat) -> float:
    return round(float(value), _DIGITS)
