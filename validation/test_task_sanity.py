"""L7: accuracy with speculation equals that without. The proof is in other levels."""

from __future__ import annotations

import pytest

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.engine.refill import complete
from eagle3_jax.prompts.request import Request
from validation.runs import Check
from validation.subject import Setting, Subject
from validation.tasks import discordant_interval, is_right, questions

pytestmark = pytest.mark.level("L7")

BATCH = 8
NEW_TOKENS = 256


@pytest.mark.parametrize("num_speculative_tokens", [3])
def test_accuracy_does_not_depend_on_speculation(
    check: Check, subject: Subject, setting: Setting, num_speculative_tokens: int
) -> None:
    try:
        prompts = questions(subject, rehearsal=setting.rehearsal)
    except ValueError as reason:
        pytest.skip(str(reason))

    target, head = subject.pair(subject.dtypes[0])
    new_tokens = 16 if setting.rehearsal else NEW_TOKENS
    right = []
    for decoder in (
        SpeculativeDecoder(target),
        SpeculativeDecoder(target, head, num_speculative_tokens=num_speculative_tokens),
    ):
        requests = [Request(prompt.tokens, new_tokens) for prompt in prompts]
        answers = dict(complete(decoder, requests, slots=BATCH))
        texts = [answers[number].text for number in range(len(prompts))]
        pairs = zip(texts, prompts, strict=True)
        right.append([is_right(text or "", prompt.reference or "") for text, prompt in pairs])

    without, with_ = right
    both = list(zip(with_, without, strict=True))
    only_with = both.count((True, False))
    only_without = both.count((False, True))
    check.number(
        questions=len(prompts),
        accuracy_with_speculation=sum(with_) / len(prompts),
        accuracy_without=sum(without) / len(prompts),
        only_right_with=only_with,
        only_right_without=only_without,
    )

    if only_with + only_without:
        low, high = discordant_interval(only_with, only_without)
        check.number(interval_of_the_difference=f"{low:.2f} to {high:.2f} around 0.5")
        assert low <= 0.5 <= high
