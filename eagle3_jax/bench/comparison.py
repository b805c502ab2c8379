"""The small benchmark at the end of ``eagle3 generate``: a decoder against plain decoding."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from eagle3_jax.bench.contenders import Tokens
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.measure.timing import Spread
from eagle3_jax.types import SamplingParams

_FEWEST = 3  # measured turns


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A decoder against plain decoding with the same target and precision, prefill included."""

    tokens_per_second: Spread  #: Speed of the decoder.
    plain_tokens_per_second: Spread  #: Speed of plain decoding.
    #: Speed of the decoder over that of plain decoding in each repeat, whose two runs follow each
    #: other.
    ratios: tuple[float, ...]
    is_plain: bool  #: Whether the decoder is plain decoding itself, so that nothing was compared.
    same_output: bool | None  #: Whether both wrote the same tokens; ``None`` for sampled tokens.


def compare_with_plain(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: Sequence[int],
    sampling: SamplingParams,
    seed: int,
    repeats: int,
    seconds: float = math.inf,
) -> Comparison:
    """Decodes the prompts one by one with and without speculation.

    Both take turns, after a warm-up. There are ``repeats`` turns, but after three of them none
    begins once ``seconds`` have passed.
    """
    plain = SpeculativeDecoder(decoder.target, stop_tokens=decoder.stop_tokens)
    is_plain = isinstance(decoder.loop.drafter, Plain)
    decoders = [plain] if is_plain else [plain, decoder]

    speeds: list[list[float]] = []
    outputs: list[list[Tokens]] = [[] for _ in decoders]
    start = time.perf_counter()
    while len(speeds) <= repeats:
        if len(speeds) > _FEWEST and time.perf_counter() - start > seconds:
            break
        turn = []
        for index, contender in enumerate(decoders):
            results = [
                contender.generate([prompt], max_new_tokens=[limit], sampling=sampling, seed=seed)
                for prompt, limit in zip(prompts, max_new_tokens, strict=True)
            ]
            outputs[index] = [result.tokens[0] for result in results]
            total = sum(result.seconds for result in results)
            turn.append(sum(map(len, outputs[index])) / total)
        speeds.append(turn)
        # The first turn compiles.
        if len(speeds) == 1:
            start = time.perf_counter()

    measured = np.array(speeds[1:])
    plain_speeds = measured[:, 0]
    speeds_of_decoder = measured[:, -1]
    greedy = not jnp.any(jnp.asarray(sampling.temperature) > 0)
    return Comparison(
        tokens_per_second=Spread.of(speeds_of_decoder),
        plain_tokens_per_second=Spread.of(plain_speeds),
        ratios=tuple((speeds_of_decoder / plain_speeds).tolist()),
        is_plain=is_plain,
        same_output=outputs[-1] == outputs[0] if greedy else None,
    )
