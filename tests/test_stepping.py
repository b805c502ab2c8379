"""Rounds driven by hand: what may change in a state, and the errors of a consumed state."""

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
from eagle3_jax.topology import Chain
from eagle3_jax.types import DraftSampling, SamplingParams

TARGET = tiny.target(13)
PROMPTS = tiny.random_prompts(3, 13, seed=2)
SAMPLED = SamplingParams(temperature=0.8)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, NGram(3))


def step_to_the_end(decoder: SpeculativeDecoder, state) -> np.ndarray:
    while bool(np.any(state.running)):
        state = decoder.step(state).state
    return np.asarray(state.tokens)


def test_a_state_that_was_consumed_says_so(decoder: SpeculativeDecoder) -> None:
    state = decoder.prefill(PROMPTS, max_new_tokens=9)
    latest = decoder.step(state)
    with pytest.raises(
        ValueError, match=r"consumed by the step before.*state = decoder\.step\(state\)\.state"
    ):
        decoder.step(state)
    # An array of it in a fresh state is consumed, too.
    with pytest.raises(ValueError, match="consumed"):
        decoder.step(latest.state.replace(tokens=state.tokens))
    decoder.step(latest.state)


def test_what_a_step_returned_is_not_read_back(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampling mode is read from the device once for new sampling parameters, never again."""
    read = []
    original = decode.sampling_mode_of
    monkeypatch.setattr(
        decode, "sampling_mode_of", lambda sampling: read.append(sampling) or original(sampling)
    )

    state = decoder.prefill(PROMPTS, max_new_tokens=9)
    read.clear()
    for _ in range(3):
        state = decoder.step(state).state
    assert len(read) == 1

    warm = state.replace(
        sampling=SamplingParams(temperature=jnp.full((3,), 5.0, jnp.float32), top_k=0, top_p=1.0)
    )
    latest = decoder.step(warm).state
    assert len(read) == 2
    assert float(latest.sampling.temperature[0]) == 5.0


def test_scalars_replace_the_sampling_of_every_row(decoder: SpeculativeDecoder) -> None:
    """Scalars, arrays and the options of the prefill give the same tokens."""
    expected = step_to_the_end(
        decoder, decoder.prefill(PROMPTS, max_new_tokens=9, sampling=SAMPLED, seed=1)
    )
    state = decoder.prefill(PROMPTS, max_new_tokens=9, sampling=SAMPLED, seed=1)
    assert np.array_equal(expected, step_to_the_end(decoder, state.replace(sampling=SAMPLED)))
    mixed = decoder.prefill(PROMPTS, max_new_tokens=9, sampling=SAMPLED, seed=1)
    mixed = mixed.replace(sampling=SamplingParams(temperature=mixed.sampling.temperature, top_k=13))
    assert np.array_equal(expected, step_to_the_end(decoder, mixed))


def test_a_top_k_beyond_every_integer_keeps_all_tokens(decoder: SpeculativeDecoder) -> None:
    options = {"max_new_tokens": 5, "seed": 3}
    huge = decoder.generate(
        PROMPTS, sampling=SamplingParams(temperature=0.8, top_k=10**12), **options
    )
    assert huge.tokens == decoder.generate(PROMPTS, sampling=SAMPLED, **options).tokens


def test_stages_of_sampled_chains_can_be_stepped() -> None:
    """A stage without a draft declares no distribution; rounds of all stages have one structure."""
    head = tiny.eagle3(TARGET, Chain(2), draft_sampling=DraftSampling.PROBABILISTIC)
    decoder = SpeculativeDecoder(TARGET, head, schedule=SpeculationSchedule(((1, 2, 2), (3, 3, 0))))
    *_, last = decoder.rounds(PROMPTS, max_new_tokens=[3, 6, 9], sampling=SAMPLED, seed=4)
    assert not bool(np.any(jax.device_get(last.state.running)))
    assert int(last.state.stats.num_draft_tokens.sum()) > 0


def test_every_way_of_decoding_gives_the_text_of_the_target() -> None:
    """Greedy decoding is the truth, for ``rounds``, ``step`` and ``stream`` as for ``generate``."""
    limits = [4, 7, 9]
    plain = SpeculativeDecoder(TARGET)
    expected = [
        plain.generate(prompt, max_new_tokens=limit).tokens[0]
        for prompt, limit in zip(PROMPTS, limits, strict=True)
    ]

    schedule = SpeculationSchedule(((1, 2, 3), (3, 3, 2)))
    for decoder in (plain, SpeculativeDecoder(TARGET, tiny.eagle3(TARGET), schedule=schedule)):
        generated = decoder.generate(PROMPTS, max_new_tokens=limits)
        assert generated.tokens == expected

        *_, last = decoder.rounds(PROMPTS, max_new_tokens=limits)
        counters = [row.stats for row in generated.rows]
        assert tiny.same_bits(
            last.state.stats, jax.tree.map(lambda *rows: np.stack(rows), *counters)
        )

        by_rounds = np.asarray(last.state.tokens)
        by_steps = step_to_the_end(decoder, decoder.prefill(PROMPTS, max_new_tokens=limits))
        for row, (prompt, text) in enumerate(zip(PROMPTS, expected, strict=True)):
            new = slice(len(prompt), len(prompt) + limits[row])
            assert by_rounds[row, new].tolist() == by_steps[row, new].tolist() == text
            chunks = decoder.stream(prompt, max_new_tokens=limits[row])
            assert [token for chunk in chunks for token in chunk.tokens] == text
