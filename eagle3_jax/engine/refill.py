"""Lists of prompts that are longer than a batch: a row that ends is given to the next prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from eagle3_jax.checks import checked_sampling, sampling_mode_of
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.engine.engine import Engine, sampling_of
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.prompts.request import Request
from eagle3_jax.results import Generation
from eagle3_jax.stats import TokenLogProb
from eagle3_jax.text.stops import StoppedText
from eagle3_jax.types import FinishReason


@dataclasses.dataclass
class _Answer:
    """What a request has written so far."""

    number: int
    text: StoppedText
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogProb] = dataclasses.field(default_factory=list)


def complete(
    decoder: SpeculativeDecoder,
    requests: Sequence[Request],
    *,
    slots: int,
    logprobs: int | None = None,
    sampling_logprobs: bool = False,
    share_prompts: bool = False,
    capacity: int | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Completes prompts in a fixed number of rows, each as ``decoder.generate`` completes it alone.

    Args:
        decoder: Target and drafter.
        requests: Prompts with their limits, sampling, seeds and stop texts. A limit beyond the
            target's positions ends there.
        slots: Number of rows.
        logprobs: Record log-probabilities of new tokens and of this many likeliest ones.
        sampling_logprobs: See :class:`Engine`.
        share_prompts: See :class:`Engine`; the first tokens of an answer may then differ by
            rounding from those of ``decoder.generate``.
        capacity: Tokens per row, if lists of other lengths are to share programs. Default: those of
            the longest request.

    Yields:
        The number of a request and its result, in the order in which they end.

    Raises:
        ValueError: A request is refused; see ``Engine.checked``.
    """
    if not requests:
        return
    target = decoder.target
    # The limits as the target's positions allow them; results report the prompts as encoded.
    encoded = [request.encoded(target) for request in requests]
    bounded = [_bounded(request, target) for request in encoded]

    params = checked_sampling(sampling_of(bounded), len(bounded))
    longest = max(len(request.tokens) + request.max_new_tokens for request in bounded)
    engine = Engine(
        decoder,
        slots=slots,
        capacity=capacity or longest + decoder.loop.drafter.num_nodes,
        sampling_mode=sampling_mode_of(params),
        logprobs=logprobs,
        sampling_logprobs=sampling_logprobs,
        prefill_rows=slots,
        share_prompts=share_prompts,
    )

    answers = {
        engine.submit(request): _Answer(number, StoppedText(target.tokenizer, request.stops))
        for number, request in enumerate(bounded)
    }

    while not engine.idle:
        for event in engine.tick():
            answer = answers.get(event.request_id)
            # A request that a stop text has ended may have another event from the same tick.
            if answer is None:
                continue

            reason = event.finish_reason
            pieces = answer.text.add(event.tokens, reason)
            answer.tokens += event.tokens[: len(pieces)]
            answer.logprobs += (event.logprobs or [])[: len(pieces)]

            text = None
            if answer.text.stop is not None:
                text = answer.text.text
                reason = FinishReason.STOP
                engine.cancel(event.request_id)
            if reason is FinishReason.RUNNING:
                continue

            del answers[event.request_id]
            request = encoded[answer.number]
            is_cut = reason is FinishReason.LENGTH and bounded[answer.number] is not request
            result = Generation(
                prompt_tokens=request.tokens,
                tokens=answer.tokens,
                text=decoder.text_of(answer.tokens, reason) if text is None else text,
                finish_reason=FinishReason.CAPACITY if is_cut else reason,
                stats=event.stats,
                logprobs=None if logprobs is None else answer.logprobs,
            )
            yield answer.number, result


def _bounded(request: Request, target: LoadedTarget) -> Request:
    """Returns the request with a limit that the target's positions allow."""
    room = target.max_positions - len(request.tokens)
    if request.max_new_tokens <= room:
        return request
    return dataclasses.replace(request, max_new_tokens=room)
