"""HF: transformers as a second witness of the target's mathematics and of the decoder's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from eagle3_jax import LoadedTarget, SpeculativeDecoder, load_target
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.tree import causal_mask
from validation.agreement import Judged
from validation.engines.vllm.bridge import Tokens
from validation.forcing import reference
from validation.odd_models import SHAPES, write_odd_model
from validation.runs import Check
from validation.subject import Setting, Subject, random_prompts

torch = pytest.importorskip("torch", reason="transformers needs PyTorch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.level("HF")

TOLERANCE = (
    1e-4  # relative to the largest logit; float32 sums in another order differ by about 1e-6
)


def load_witness(directory: Path) -> Any:
    """The same checkpoint in float32, in eager PyTorch; on the GPU where both have one."""
    on_gpu = jax.default_backend() != "cpu" and torch.cuda.is_available()
    # Its default, which something imported may have changed.
    torch.set_float32_matmul_precision("highest")
    witness = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    return witness.to("cuda") if on_gpu else witness


def check_forward(check: Check, witness: Any, target: LoadedTarget, prompts: list[Tokens]) -> None:
    """Logits of every position, and the stream entering every layer."""
    config = target.model.config  # type: ignore[attr-defined]
    assert isinstance(config, DecoderConfig)
    # The last entry of transformers is after the final norm.
    layers = tuple(range(config.num_layers))

    logits_apart = []
    features_apart = []
    for prompt in prompts:
        with torch.inference_mode():
            theirs = witness(
                torch.tensor([prompt], device=witness.device), output_hidden_states=True
            )

        positions = jnp.arange(len(prompt), dtype=jnp.int32)[None]
        output = target.model(
            target.params,
            jnp.asarray([prompt], jnp.int32),
            positions,
            causal_mask(len(prompt)),
            aux_layers=layers,
        )
        logits_apart.append(
            relative_difference(target.model.unembed(target.params, output.final), theirs.logits)
        )
        features_apart += [
            relative_difference(output.features[:, :, layer], theirs.hidden_states[layer])
            for layer in layers
        ]

    largest = {"logits_apart": max(logits_apart), "features_apart": max(features_apart)}
    check.number(positions=sum(map(len, prompts)), layers=len(layers), **largest)
    assert max(largest.values()) < TOLERANCE, largest


def relative_difference(ours: Array, theirs: Any) -> float:
    expected = theirs.cpu().numpy()
    return float(np.abs(np.asarray(ours) - expected).max() / np.abs(expected).max())


def test_logits_and_features_of_the_target_equal_transformers(
    check: Check, subject: Subject
) -> None:
    target, _ = subject.pair("float32")
    prompts = [prompt[:100] for prompt in subject.prompt_tokens[:6]]
    check_forward(check, load_witness(subject.target_directory), target, prompts)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_features_of_an_odd_shape_equal_transformers(
    check: Check, tmp_path: Path, shape: str
) -> None:
    directory = write_odd_model(shape, tmp_path / "target")
    target = load_target(directory)
    # Beyond the 64 positions that scaled rotary embeddings count as their own, where they differ.
    prompts = random_prompts(4, target.vocab_size, seed=1, low=80, high=120)
    check_forward(check, load_witness(directory), target, prompts)


def test_greedy_text_equals_transformers(check: Check, subject: Subject, setting: Setting) -> None:
    target, drafter = subject.pair("float32")
    witness = load_witness(subject.target_directory)
    prompts = [prompt[-100:] for prompt in subject.prompt_tokens[: 6 if setting.quick else 20]]
    theirs = [generate(witness, prompt, 64) for prompt in prompts]
    agreed = Judged(
        "transformers", "us", "float32", theirs, reference(target, prompts, theirs)
    ).agreed

    decoder = SpeculativeDecoder(target, drafter, num_speculative_tokens=5, stop_tokens=())
    ours = decoder.generate(prompts, max_new_tokens=64).tokens
    same = sum(our_text == their_text for our_text, their_text in zip(ours, theirs, strict=True))
    check.number(
        prompts=len(prompts),
        tokens=agreed.tokens,
        texts_equal=same,
        ties=agreed.ties,
        largest_gap=agreed.largest_gap,
    )

    assert not agreed.disagreements, (
        "transformers wrote a token that is neither our choice nor a tie"
    )
    assert len(prompts) - same <= agreed.ties, "texts differ that no tie explains"


def generate(witness: Any, prompt: Tokens, max_new_tokens: int) -> Tokens:
    """Greedy, to the limit, stop tokens ignored."""
    ids = torch.tensor([prompt], device=witness.device)
    with torch.inference_mode():
        output = witness.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_new_tokens,
            max_new_tokens=max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()
