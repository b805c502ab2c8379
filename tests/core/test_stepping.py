"""Driving rounds by hand: what a state allows, and what it answers where it does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import decode
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters import NGram
from eagle3_jax.schedule import SpeculationSchedule
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import DraftSampling, SamplingParams

TARGET = tiny.target(13)
PROMPTS = tiny.random_prompts(3, 13, seed=2)
SAMPLED = SamplingParams(temperature=0.8)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, NGram(3))


def rest_of(decoder: SpeculativeDecoder, state) -> np.ndarray:
    while bool(np.any(state.running)):
        state = decoder.step(state).state
    return np.asarray(state.tokens)


def test_a_state_that_was_consumed_says_so(decoder: SpeculativeDecoder) -> None:
    state = decoder.prefill(PROMPTS, max_new_tokens=9)
    latest = decoder.step(state)
    with pytest.raises(ValueError, match=r"consumed by the step before.*state = decoder\.step\(state\)\.state"):
        decoder.step(state)
    # A part of it in a fresh state is as gone as the whole.
    with pytest.raises(ValueError, match="consumed"):
        decoder.step(latest.state.replace(tokens=state.tokens))
    decoder.step(latest.state)


def test_what_a_step_returned_is_not_read_back(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much sampling asks for is read from the device where it is new, and in no round after that."""
    read = []
    original = decode.sampling_mode_of
    monkeypatch.setattr(decode, "sampling_mode_of", lambda sampling: read.append(sampling) or original(sampling))
    state = decoder.prefill(PROMPTS, max_new_tokens=9)
    read.clear()
    for _ in range(3):
        state = decoder.step(state).state
    assert len(read) == 1
    warm = state.replace(sampling=SamplingParams(temperature=jnp.full((3,), 5.0, jnp.float32), top_k=0, top_p=1.0))
    latest = decoder.step(warm).state
    assert len(read) == 2 and float(latest.sampling.temperature[0]) == 5.0


def test_scalars_replace_the_sampling_of_every_row(decoder: SpeculativeDecoder) -> None:
    """Scalars, arrays and what the prefill was told are one and the same."""
    told = rest_of(decoder, decoder.prefill(PROMPTS, max_new_tokens=9, sampling=SAMPLED, seed=1))
    keep = decoder.prefill(PROMPTS, max_new_tokens=9, sampling=SAMPLED, seed=1)
    scalars = rest_of(decoder, keep.replace(sampling=SAMPLED))
    assert np.array_equal(told, scalars)
    mixed = decoder.prefill(PROMPTS, max_new_tokens=9, sampling=SAMPLED, seed=1)
    mixed = mixed.replace(sampling=SamplingParams(temperature=mixed.sampling.temperature, top_k=13))
    assert np.array_equal(told, rest_of(decoder, mixed))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(temperature=jnp.array([0.5, 0.5], jnp.float32)), r"temperature has shape \(2,\) for 3 rows"),
        (SamplingParams(temperature=-1.0), "temperature is -1"),
        (SamplingParams(temperature=float("inf")), "temperature is inf; expected 0 .* finite"),
        (SamplingParams(top_p=float("nan")), "top_p is nan"),
        (SamplingParams(top_k=-(10**12)), "top_k is -1"),
    ],
)
def test_sampling_that_no_row_can_have_is_refused(
    decoder: SpeculativeDecoder, sampling: SamplingParams, message: str
) -> None:
    state = decoder.prefill(PROMPTS, max_new_tokens=9)
    with pytest.raises(ValueError, match=message):
        decoder.step(state.replace(sampling=sampling))
    with pytest.raises(ValueError, match=message):
        decoder.prefill(PROMPTS, max_new_tokens=9, sampling=sampling)


def test_a_top_k_beyond_every_integer_keeps_all_tokens(decoder: SpeculativeDecoder) -> None:
    options = {"max_new_tokens": 5, "seed": 3}
    huge = decoder.generate(PROMPTS, sampling=SamplingParams(temperature=0.8, top_k=10**12), **options)
    assert huge.tokens == decoder.generate(PROMPTS, sampling=SAMPLED, **options).tokens


@pytest.mark.parametrize("limit", [2**31 - 1, 10**12, np.int64(10**12)])
def test_a_limit_past_every_position_ends_at_the_last_one(limit: int) -> None:
    target = tiny.target(13, max_positions=20)
    with tiny.unchecked():
        row = SpeculativeDecoder(target).generate([1, 2, 3], max_new_tokens=limit).rows[0]
    assert (len(row.tokens), row.finish_reason.name) == (17, "CAPACITY")


def test_stages_of_sampled_chains_can_be_stepped() -> None:
    """A stage without a draft has no distribution to show, and the rounds of all stages are one structure."""
    head = tiny.eagle3(TARGET, Chain(2), draft_sampling=DraftSampling.PROBABILISTIC)
    decoder = SpeculativeDecoder(TARGET, head, schedule=SpeculationSchedule(((1, 2, 2), (3, 3, 0))))
    *_, last = decoder.rounds(PROMPTS, max_new_tokens=[3, 6, 9], sampling=SAMPLED, seed=4)
    assert not bool(np.any(jax.device_get(last.state.running)))
    assert int(last.state.stats.num_draft_tokens.sum()) > 0


WAYS = {
    "none": {},
    "the default": {"drafter": tiny.eagle3(TARGET)},
    "a tree": {"drafter": tiny.eagle3(TARGET), "tree": DynamicTree(num_nodes=6, max_depth=2, top_k=2)},
    "one stage": {"drafter": tiny.eagle3(TARGET), "schedule": SpeculationSchedule(((1, 9, 2),))},
    "stages": {"drafter": tiny.eagle3(TARGET), "schedule": SpeculationSchedule(((1, 2, 3), (3, 3, 2)))},
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_decoding_gives_the_text_of_the_target(way: str, batch: int) -> None:
    """Greedy decoding is the truth; ``rounds``, ``step`` and ``stream`` agree with it as ``generate`` does."""
    prompts = tiny.random_prompts(batch, 13, seed=5)
    limits = [4, 7, 9, 12][:batch]
    truth = [
        SpeculativeDecoder(TARGET).generate(row, max_new_tokens=one).tokens[0]
        for row, one in zip(prompts, limits, strict=True)
    ]
    decoder = SpeculativeDecoder(TARGET, **WAYS[way])
    assert decoder.generate(prompts, max_new_tokens=limits).tokens == truth
    *_, last = decoder.rounds(prompts, max_new_tokens=limits)
    stepped = rest_of(decoder, decoder.prefill(prompts, max_new_tokens=limits))
    for row, prompt in enumerate(prompts):
        end = len(prompt) + limits[row]
        assert np.asarray(last.state.tokens)[row, len(prompt) : end].tolist() == truth[row]
        assert stepped[row, len(prompt) : end].tolist() == truth[row]
        chunks = decoder.stream(prompt, max_new_tokens=limits[row])
        assert [token for chunk in chunks for token in chunk.tokens] == truth[row]
