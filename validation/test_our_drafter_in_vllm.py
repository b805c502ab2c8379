"""JV: vLLM verifies what our drafter proposes.

vLLM's ``custom_class`` drafter knows token ids only. Here it asks for drafts over the channel to
the vLLM process; ours are made from those ids alone, with our target's features and our head. There
is no exporter between the two, so no error of an exporter can hide on both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int

from eagle3_jax import SpeculativeDecoder, SpeculativeLoop
from eagle3_jax.checks import per_row
from eagle3_jax.sampling import row_keys
from eagle3_jax.state import LoopParams
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Observation, SamplingParams
from validation.engines.vllm.bridge import EngineOptions, Tokens
from validation.engines.vllm.process import Process
from validation.forcing import padded
from validation.parity import parity
from validation.runs import Check
from validation.subject import CONTEXT, Subject

pytestmark = pytest.mark.level("JV")

ROWS = 8
WIDTH = 256
MAX_NEW_TOKENS = 32
K = 4


@functools.partial(jax.jit, static_argnums=0)
def draft(
    loop: SpeculativeLoop, params: LoopParams, tokens: Int[Array, "B T"], length: Int[Array, " B"]
) -> Any:
    """Draft after whole sequences without a cache; the last token of each is the root."""
    batch, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
    output = loop.target(
        params.target, tokens, positions, causal_mask(width), aux_layers=loop.drafter.aux_layers
    )

    root = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
    seen = Observation(tokens=tokens, features=output.features, length=length - 1, next_token=root)
    state = loop.drafter.observe(
        params.drafter, loop.drafter.init(params.drafter, batch, width), seen
    )
    return loop.drafter.propose(
        params.drafter, state, row_keys(0, batch), per_row(SamplingParams(), batch)
    ).tokens


def proposer(decoder: SpeculativeDecoder) -> Any:
    """Drafts for sequences of token ids."""

    def propose(sequences: Sequence[Tokens]) -> list[Tokens]:
        length = np.full((ROWS,), 2, np.int32)
        length[: len(sequences)] = [len(sequence) for sequence in sequences]
        drafted = draft(
            decoder.loop, decoder.params, padded(sequences, WIDTH, ROWS), jnp.asarray(length)
        )
        return np.asarray(drafted)[: len(sequences), 1:].tolist()

    return propose


def test_vllm_accepts_what_we_accept_from_our_own_drafter(
    check: Check, vllm_process: Process, subject: Subject
) -> None:
    target, drafter = subject.pair("float32")
    decoder = SpeculativeDecoder(target, drafter, num_speculative_tokens=K, stop_tokens=())
    prompts = [prompt[-CONTEXT:] for prompt in subject.prompt_tokens[:8]]
    options = EngineOptions(model=str(subject.target_directory), max_num_seqs=ROWS)

    plain = vllm_process.engine(options).generate(prompts, max_new_tokens=MAX_NEW_TOKENS)
    speculating = EngineOptions(
        model=options.model, max_num_seqs=ROWS, speculative={"num_speculative_tokens": K}
    )
    engine = vllm_process.engine(speculating, propose=proposer(decoder))
    compared = parity(decoder, engine, prompts, max_new_tokens=MAX_NEW_TOKENS, batch_size=ROWS)

    theirs = compared.theirs
    check.number(
        prompts=len(prompts),
        tokens=sum(map(len, theirs.outputs)),
        drafts=theirs.counters["num_drafts"],
        accepted=theirs.counters["num_accepted_tokens"],
        mean_acceptance_length=compared.stats.mean_acceptance_length,
    )
    assert theirs.outputs == plain.outputs
    assert compared.difference is None, compared.difference
