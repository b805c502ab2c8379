"""Answers to one prompt that share its caches: texts, distribution, log-probabilities.

A policy learns from them in reinforcement learning, so its gradient has their distribution, too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from sampled_texts import ALPHA, DRAFTERS, HORIZON, TARGET, VOCABULARY, chi_square, logits_after

from eagle3_jax import SpeculationSchedule, SpeculativeDecoder
from eagle3_jax.drafters import NGram
from eagle3_jax.engine.engine import Engine
from eagle3_jax.engine.refill import complete
from eagle3_jax.prompts.request import Request
from eagle3_jax.types import Verdict

pytestmark = pytest.mark.core

PROMPT = (1, 3, 0)
DRAFTED = ("n-grams", "a sampled EAGLE-3 chain")


def groups(prompts: Sequence[Sequence[int]], samples: int, **options: float) -> list[Request]:
    """Returns ``samples`` requests of each prompt, one group after the other."""
    return [
        Request(list(prompt), HORIZON, seed=number * samples + sample, **options)
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_answer_is_that_of_its_prompt_alone(name: str, temperature: float) -> None:
    """Prompts of one token too, fewer rows than answers, and groups that no power of two fits."""
    decoder = SpeculativeDecoder(TARGET, DRAFTERS[name]())
    requests = groups([[2], PROMPT, [0] * 20], 5, temperature=temperature)

    answers = dict(complete(decoder, requests, slots=7, logprobs=0, share_prompts=True))

    single = dict(complete(decoder, requests, slots=7, logprobs=0))
    assert {number: answer.tokens for number, answer in answers.items()} == {
        number: answer.tokens for number, answer in single.items()
    }
    for number, answer in answers.items():
        assert answer.stats == single[number].stats
        scores = [[token.logprob for token in row.logprobs] for row in (answer, single[number])]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_a_prompt_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[list[int]] = []
    original = Engine._run_prefix

    def counted(engine: Engine, entry):
        run.append(entry.request.tokens)
        return original(engine, entry)

    monkeypatch.setattr(Engine, "_run_prefix", counted)
    decoder = SpeculativeDecoder(TARGET, NGram(3))
    prompts = [[2, 1], list(PROMPT)]
    requests = groups(prompts, 6)
    answers = list(complete(decoder, requests, slots=4, share_prompts=True))
    assert len(answers) == 12
    assert run == prompts


@pytest.mark.parametrize("name", DRAFTED)
def test_answers_follow_the_targets_distribution(name: str) -> None:
    """A text whose probability is a third off is seen; a draft that is always accepted is."""
    setting = (1.3, 3, 0.9)
    counts = sampled_counts(SpeculativeDecoder(TARGET, DRAFTERS[name]()), 1024, setting)
    p_value, report = chi_square(counts, expected_texts(setting))
    assert p_value > ALPHA, report


def test_a_rule_that_accepts_every_draft_has_another_distribution() -> None:
    decoder = SpeculativeDecoder(
        TARGET, DRAFTERS["a sampled EAGLE-3 chain"](), verifier=AcceptAll()
    )
    setting = (1.3, 3, 0.9)
    p_value, _ = chi_square(sampled_counts(decoder, 512, setting), expected_texts(setting))
    assert p_value < ALPHA


def sampled_counts(
    decoder: SpeculativeDecoder, samples: int, setting: tuple[float, int, float]
) -> Counter:
    temperature, top_k, top_p = setting
    requests = groups([PROMPT], samples, temperature=temperature, top_k=top_k, top_p=top_p)
    answers = complete(decoder, requests, slots=256, share_prompts=True)
    return Counter(tuple(answer.tokens) for _, answer in answers)


def expected_texts(setting: tuple[float, int, float]) -> oracle.TextDistribution:
    known = logits_after(PROMPT)
    return oracle.autoregressive_distribution(
        lambda prefix: oracle.warped(known[prefix], *setting), HORIZON
    )


class AcceptAll:
    """A wrong rule: it accepts every valid draft of a chain, and samples nothing."""

    lossless = True

    def __call__(self, draft, logits, sampling, keys, *, sampling_mode, max_depth) -> Verdict:
        del sampling, keys, sampling_mode
        valid = jnp.cumprod(draft.valid[:, 1:].astype(jnp.int32), axis=1)
        count = jnp.sum(valid, axis=1, dtype=jnp.int32)
        node = jnp.arange(1, max_depth + 1, dtype=jnp.int32)[None]
        path = jnp.where(node <= count[:, None], node, -1)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        next_token = jnp.take_along_axis(best, count[:, None], axis=1)[:, 0]
        return Verdict(path=path, num_accepted=count, next_token=next_token)

    def __hash__(self) -> int:
        return hash(AcceptAll)

    def __eq__(self, rule: object) -> bool:
        return isinstance(rule, AcceptAll)


# Log-probabilities


@pytest.mark.parametrize("setting", [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 3, 0.8), (0.0, 0, 1.0)])
def test_log_probabilities_are_those_of_the_model_and_of_what_was_sampled_from(
    setting: tuple[float, int, float],
) -> None:
    temperature, top_k, top_p = setting
    requests = groups([PROMPT, [2]], 4, temperature=temperature, top_k=top_k, top_p=top_p)
    decoder = SpeculativeDecoder(TARGET, DRAFTERS["a sampled EAGLE-3 chain"]())
    answers = complete(
        decoder, requests, slots=4, logprobs=0, sampling_logprobs=True, share_prompts=True
    )
    for number, answer in answers:
        known = logits_after(tuple(requests[number].tokens))
        for index, token in enumerate(answer.tokens):
            logits = known[tuple(answer.tokens[:index])]
            score = answer.logprobs[index]
            expected = float(jax.nn.log_softmax(jnp.array(logits, jnp.float32))[token])
            assert score.logprob == pytest.approx(expected, abs=1e-5)
            warped = oracle.warped(logits, *setting)
            assert score.sampled == pytest.approx(math.log(warped[token]), abs=1e-5)


def test_without_being_asked_for_they_are_not_recorded() -> None:
    decoder = SpeculativeDecoder(TARGET, NGram(3))
    ((_, answer),) = complete(decoder, groups([PROMPT], 1), slots=1, logprobs=0)
    assert [score.sampled for score in answer.logprobs] == [None] * HORIZON


def test_chunks_and_shared_prompts_exclude_each_other() -> None:
    decoder = SpeculativeDecoder(TARGET, NGram(3))
    with pytest.raises(ValueError, match=r"chunk is 4 with share_prompts; .* so leave chunk out"):
        Engine(decoder, slots=2, capacity=32, chunk=4, share_prompts=True)


def test_a_schedule_drafts_for_the_last_rows_only() -> None:
    """Rows that end early leave few running ones, for which drafts pay off."""
    schedule = SpeculationSchedule(((1, 2, 3), (3, 8, 0)))
    decoder = SpeculativeDecoder(TARGET, NGram(3), schedule=schedule)
    requests = groups([PROMPT], 8)
    answers = dict(complete(decoder, requests, slots=8, share_prompts=True))
    plain = SpeculativeDecoder(TARGET).generate(list(PROMPT), max_new_tokens=HORIZON).tokens[0]
    assert [answers[number].tokens for number in range(8)] == [plain] * 8


# The policy gradient

LENGTH = 3
GROUP = 2
TEXTS = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
# No function of the model: any numbers will do.
REWARDS = np.random.default_rng(0).random(len(TEXTS))


def score_gradients() -> tuple[np.ndarray, np.ndarray]:
    """Returns the probability of every text, ``[N]``, and the gradients of its logarithm, ``[N P]``."""
    rows = jnp.array([(*PROMPT, *text) for text in TEXTS], jnp.int32)

    def scores(scale: jax.Array) -> jax.Array:
        norm = {**TARGET.params["norm"], "scale": scale}
        logits = tiny.forward(TARGET.model, {**TARGET.params, "norm": norm}, rows)[0]
        logprobs = jax.nn.log_softmax(logits[:, len(PROMPT) - 1 : -1])
        chosen = jnp.take_along_axis(logprobs, rows[:, len(PROMPT) :, None], axis=-1)
        return jnp.sum(chosen, axis=(1, 2))

    scale = TARGET.params["norm"]["scale"]
    return np.exp(scores(scale)), np.asarray(jax.jacobian(scores)(scale), np.float64)


def group_gradient(chosen: Sequence[int], gradients: np.ndarray) -> np.ndarray:
    """Returns the gradient of a group: its rewards less their mean, times those of the scores."""
    rewards = REWARDS[list(chosen)]
    return (rewards - rewards.mean()) @ gradients[list(chosen)] / GROUP


def expected_gradient(probs: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and variance of a group's gradient, over all groups."""
    pairs = list(itertools.product(range(len(TEXTS)), repeat=GROUP))
    weights = np.array([math.prod(probs[i] for i in pair) for pair in pairs])
    values = np.array([group_gradient(pair, gradients) for pair in pairs])
    mean = weights @ values
    return mean, weights @ (values - mean) ** 2


def largest_deviation(decoder: SpeculativeDecoder, num_groups: int) -> float:
    """Returns by how many standard errors the sampled gradient is off, in its worst entry."""
    probs, gradients = score_gradients()
    mean, variance = expected_gradient(probs, gradients)
    requests = [
        Request(list(PROMPT), LENGTH, temperature=1.0, seed=seed)
        for seed in range(num_groups * GROUP)
    ]
    answers = dict(complete(decoder, requests, slots=256, share_prompts=True))
    numbers = [TEXTS.index(tuple(answers[seed].tokens)) for seed in range(len(requests))]
    sampled = [group_gradient(group, gradients) for group in in_groups(numbers)]
    return float(np.max(np.abs(np.mean(sampled, axis=0) - mean) / np.sqrt(variance / num_groups)))


def in_groups(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    return (numbers[start : start + GROUP] for start in range(0, len(numbers), GROUP))


@pytest.mark.parametrize("name", DRAFTED)
def test_the_policy_gradient_has_the_expectation_of_plain_rollouts(name: str) -> None:
    """Sixteen entries, each within five standard errors: one false alarm in 100,000 runs.

    A deviation of eight standard errors, a fourth of an entry's own spread here, is seen.
    """
    assert largest_deviation(SpeculativeDecoder(TARGET, DRAFTERS[name]()), 1024) < 5


def test_a_rule_that_accepts_every_draft_has_another_policy_gradient() -> None:
    decoder = SpeculativeDecoder(
        TARGET, DRAFTERS["a sampled EAGLE-3 chain"](), verifier=AcceptAll()
    )
    assert largest_deviation(decoder, 256) > 5
