"""A small target of every family, of sizes that vLLM has for CPUs, and a head for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle3_jax import (
    LoadedDrafter,
    LoadedTarget,
    SpeculativeDecoder,
    conversion,
    load_drafter,
    load_target,
)
from eagle3_jax.drafters import NGram
from validation import peaked
from validation.agreement import Judged
from validation.engines.vllm.bridge import EngineOptions, Generated, Tokens, eagle3
from validation.engines.vllm.process import Process
from validation.forcing import reference
from validation.parity import Parity, parity_with
from validation.peaked import Recipe

VOCAB = 256
NEW_TOKENS = 40
TRAINING_STEPS = 120
# Of the length that the heads have learned from.
_SHORT = peaked.random_prompts(6, VOCAB, seed=2)
_LEARNED = peaked.random_prompts(64, VOCAB, seed=1)
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_HALF_ROTARY = _ROTARY | {"partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0,
    "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
}  # fmt: skip
# One latent of 512 and one rotated key of 64: no other sizes are compiled.
_LATENT = {
    "q_lora_rank": 48, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
_DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_IMAGES = _HALF_ROTARY | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
# Fields of published files that transformers does not write, and vLLM needs.
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How a family is tried."""

    recipe: Recipe  #: A model of it.
    #: Fields that are added to its ``config.json``.
    published: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Fields that are added to its ``generation_config.json``.
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"  #: Type of the products in both engines.
    with_heads: bool = True  #: vLLM drafts for it with EAGLE-3; with n-grams where it does not.
    loudness: float = 4.0  #: See :func:`peaked.write_peaked`.
    longest: int = 120  #: Tokens of the longest prompt.

    @property
    def prompts(self) -> list[Tokens]:
        """Eight; the long ones leave every window and chunk."""
        long = [
            peaked.random_prompts(1, VOCAB, seed=3, length=40),
            peaked.random_prompts(1, VOCAB, seed=4, length=self.longest),
        ]
        return [*_SHORT, *(prompts[0] for prompts in long)]


def _recipe(model_type: str, **fields: Any) -> Recipe:
    return Recipe(model_type, _SIZES | fields, 0)


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        recipe=_recipe("qwen3_moe", **_EXPERTS, head_dim=32, norm_topk_prob=True,
        mlp_only_layers=[1])
    ),
    "gpt_oss": Family(
        recipe=_recipe(
            "gpt_oss", head_dim=32, num_local_experts=8, num_experts_per_tok=3,
            intermediate_size=32, sliding_window=16, rope_parameters=_YARN | {"truncate": False},
        )
    ),
    "glm4_moe": Family(
        recipe=_recipe(
            "glm4_moe", **_ROUTED, head_dim=32, attention_bias=True, use_qk_norm=True, n_group=1,
            topk_group=1,
            first_k_dense_replace=1, num_nextn_predict_layers=0, rope_parameters=_HALF_ROTARY,
        ),
        with_heads=False,
        loudness=1.5,
    ),
    "llama4_text": Family(
        recipe=_recipe(
            "llama4_text", head_dim=32, intermediate_size=32, intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1, interleave_moe_layer_step=1, use_qk_norm=True,
            no_rope_layers=[1, 1, 0, 1],
            attention_chunk_size=128, attn_temperature_tuning=True, floor_scale=16, attn_scale=0.5,
            rope_parameters=_ROTARY,
        ),
        # vLLM takes it from here, or from the longest text that it was started for, and not from
        # config.json.
        generation={"attn_temperature_tuning": True},
        # Within a chunk of 128: beyond one vLLM's CPU build has other logits (docs/validation.md).
        longest=80,
    ),
    "deepseek_v3": Family(
        recipe=_recipe(
            "deepseek_v3", **_LATENT, **_ROUTED, n_group=4, topk_group=2, first_k_dense_replace=1,
            num_nextn_predict_layers=0, rope_parameters=_YARN | {"mscale": 1.0,
            "mscale_all_dim": 1.0},
        ),
        published=_SIGMOID,
        # Its caches for latents and for a head have no block size in common on CPUs.
        with_heads=False,
        loudness=1.5,
    ),
    "qwen3_next": Family(
        recipe=_recipe(
            "qwen3_next", **_DELTA, **_EXPERTS, shared_expert_intermediate_size=32,
            norm_topk_prob=True, mlp_only_layers=[1], rope_parameters=_HALF_ROTARY,
        ),
        dtype="bfloat16",
    ),
    "qwen3_5": Family(
        recipe=_recipe("qwen3_5_text", **_DELTA, rope_parameters=_IMAGES),
        dtype="bfloat16",
    ),
}  # fmt: skip


class Trial(NamedTuple):
    """One family in both engines."""

    prompts: list[Tokens]
    target: LoadedTarget
    drafter: LoadedDrafter | NGram
    judged: list[Judged]  # ours, scored by vLLM, then vLLM's, scored by us: plain, and with drafts
    theirs: Generated

    def parity(self, drafter: LoadedDrafter | NGram) -> Parity:
        """Our rounds with a drafter, next to vLLM's."""
        decoder = SpeculativeDecoder(
            self.target, drafter, num_speculative_tokens=peaked.DEPTH, stop_tokens=()
        )
        amounts = {"max_new_tokens": NEW_TOKENS, "batch_size": len(self.prompts)}
        return parity_with(self.theirs, decoder, self.prompts, **amounts)


def write_target(family: Family, directory: Path) -> Path:
    """Write a peaked model of a family, with the fields that published files have."""
    peaked.write_peaked(family.recipe, directory, loudness=family.loudness)
    for name, added in (
        ("config.json", family.published),
        ("generation_config.json", family.generation),
    ):
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(values | added, indent=1))
    return directory


def write_head(drafter: LoadedDrafter, directory: Path) -> Path:
    """A head as vLLM reads it."""
    config = drafter.drafter.config  # type: ignore[attr-defined]
    checkpoint = conversion.HeadCheckpoint(
        method="eagle3",
        config=config,
        head=jax.tree.map(np.asarray, drafter.params["head"]),
        draft_to_target=np.arange(config.draft_vocab_size),
        embedding=None,
        dialect="vllm",
        source=directory,
        dtype="float32",
        num_target_layers=4,
    )
    conversion.write_head(checkpoint, directory, "vllm")
    return directory


def trial(vllm: Process, family: Family, directory: Path) -> Trial:
    """Write a target, train its head, and let both engines generate and score.

    ``directory`` must be empty.
    """
    path = write_target(family, directory / "target")
    prompts = family.prompts
    target = load_target(path, dtype=family.dtype)

    drafter: LoadedDrafter | NGram = NGram(max_ngram=3, min_ngram=1, earliest=True)
    drafted = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    if family.with_heads:
        written = (
            SpeculativeDecoder(target, stop_tokens=())
            .generate(_LEARNED, max_new_tokens=NEW_TOKENS)
            .tokens
        )
        head, _ = peaked.learned(load_target(path), _LEARNED, written, steps=TRAINING_STEPS)
        files = write_head(head, directory / "head")
        drafter = load_drafter(files, target=target)
        drafted = eagle3(files, peaked.DEPTH)

    options = EngineOptions(model=str(path), dtype=family.dtype, max_num_seqs=len(prompts))
    decoders = {
        "ours, plain": SpeculativeDecoder(target, stop_tokens=()),
        "ours, drafting": SpeculativeDecoder(
            target, drafter, num_speculative_tokens=peaked.DEPTH, stop_tokens=()
        ),
    }
    our_texts = {
        name: decoder.generate(prompts, max_new_tokens=NEW_TOKENS).tokens
        for name, decoder in decoders.items()
    }

    engine = vllm.engine(options)
    plain_text = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
    judged = [
        Judged(name, "vLLM", family.dtype, texts, engine.score(prompts, texts))
        for name, texts in our_texts.items()
    ]

    drafting = vllm.engine(dataclasses.replace(options, speculative=drafted))
    theirs = drafting.generate(prompts, max_new_tokens=NEW_TOKENS)
    others = {"vLLM, plain": plain_text.outputs, "vLLM, drafting": theirs.outputs}
    judged += [
        Judged(name, "us", family.dtype, texts, reference(target, prompts, texts))
        for name, texts in others.items()
    ]

    return Trial(prompts, target, drafter, judged, theirs)
