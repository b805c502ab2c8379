"""Lists of prompts that are longer than a batch: a row that ends is given to the next prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from eagle3_jax.checks import checked_sampling, sampling_mode_of
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.engine.engine import Engine, Request, sampling_of
from eagle3_jax.results import Generation
from eagle3_jax.stats import TokenLogProb
from eagle3_jax.types import FinishReason


@dataclasses.dataclass
class _Answer:
    """What a request has written so far."""

    number: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogProb] = dataclasses.field(default_factory=list)


def complete(
    decoder: SpeculativeDecoder,
    requests: Sequence[Request],
    *,
    slots: int,
    logprobs: int | None = None,
    stops: Sequence[Sequence[str]] | None = None,
) -> Iterator[tuple[int, Generation]]:
    """Completes prompts in a fixed number of rows, each as ``decoder.generate`` completes it alone.

    Args:
        decoder: Target and drafter.
        requests: Prompts with their limits, sampling and seeds. A limit beyond the target's
            positions ends there.
        slots: Number of rows.
        logprobs: Record log-probabilities of new tokens and of this many likeliest ones.
        stops: Texts that end each answer, which is cut before them. Default: none.

    Yields:
        The number of a request and its result, in the order in which they end.

    Raises:
        ValueError: A request is refused; see :meth:`Engine.check`.
    """
    if not requests:
        return
    bounded = [_bounded(decoder, request) for request in requests]
    params = checked_sampling(sampling_of(requests), len(requests))
    longest = max(len(request.tokens) + request.max_new_tokens for request in bounded)
    engine = Engine(
        decoder,
        slots=slots,
        capacity=longest + decoder.loop.drafter.num_nodes,
        sampling_mode=sampling_mode_of(params),
        logprobs=logprobs,
        prefill_rows=slots,
    )
    answers = {engine.submit(request): _Answer(number) for number, request in enumerate(bounded)}
    while not engine.idle:
        for event in engine.tick():
            if event.ticket not in answers:  # a stop text in the first token has ended it
                continue
            answer = answers[event.ticket]
            request = requests[answer.number]
            reason = event.finish_reason
            answer.logprobs += event.logprobs or []
            text = _add(
                decoder, answer, event.tokens, [] if stops is None else stops[answer.number]
            )
            if text is not None:
                engine.cancel(event.ticket)
                reason = FinishReason.STOP
            if reason is FinishReason.RUNNING:
                continue
            del answers[event.ticket]
            is_cut = reason is FinishReason.LENGTH and bounded[answer.number] is not request
            result = Generation(
                prompt_tokens=request.tokens,
                tokens=answer.tokens,
                text=decoder.text_of(answer.tokens, reason) if text is None else text,
                finish_reason=FinishReason.CAPACITY if is_cut else reason,
                stats=event.stats,
                logprobs=None if logprobs is None else answer.logprobs[: len(answer.tokens)],
            )
            yield answer.number, result


def _bounded(decoder: SpeculativeDecoder, request: Request) -> Request:
    """Returns the request with a limit that the target's positions allow."""
    room = decoder.target.max_positions - len(request.tokens)
    return (
        request
        if request.max_new_tokens <= room
        else dataclasses.replace(request, max_new_tokens=room)
    )


def _add(
    decoder: SpeculativeDecoder, answer: _Answer, tokens: Sequence[int], stops: Sequence[str]
) -> str | None:
    """Adds new tokens to an answer, up to the one that completes a stop text. Then returns the text before that."""
    for token in tokens:
        answer.tokens.append(token)
        text = decoder.text_before(stops, answer.tokens) if stops else None
        if text is not None:
            return text
    return None
