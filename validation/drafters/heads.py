"""Tiny trained heads in vLLM's formats, one per drafting method, and how they were made.

    python -m validation.drafters.heads           # train all of them again, into tests/golden/vllm_drafters
    python -m validation.drafters.heads medusa    # one of them

They know the greedy continuations of most of the recorded prompts by heart and nothing else, which is all they are for:
a head that is accepted by chance only would agree with vLLM for any positions, norms and layers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from eagle3_jax import LoadedTarget, SpeculativeDecoder, load_target
from eagle3_jax.conversion.tensors import read_tensors, write_tensors
from eagle3_jax.models.memory import causal_mask
from validation.drafters import networks
from validation.drafters.networks import Heads, Text, Weights

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
TARGET, RECORDED = GOLDEN / "vllm" / "target", GOLDEN / "vllm_drafters"
V, D = 512, 128
AUX = (2, 4, 5)  # what enters these layers; where a format counts layers from their end, one less
MASK_ID = 3
NEW_TOKENS = 40
PROMPTS = [np.random.default_rng(row).integers(4, V, 6 + 2 * row).tolist() for row in range(8)]
LEARNED = 6  # of the prompts; the others are drafted for by what the heads make of unknown text

# Training ends at this share of the longest acceptance: counts of all kinds occur, from nothing to everything.
LENGTH, MOST_STEPS = 0.7, 1000

_SMALL, _FULL = Heads(2, 1, 32), Heads()
_DRAFT_WIDTH = 64

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
_LLAMA: Config = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@dataclasses.dataclass(frozen=True)
class TinyHead:
    """A head to be trained.

    Attributes:
        config: Its ``config.json``.
        shapes: Of its tensors, by the names in its file.
        network: Logits ``[B T K V]`` of drafted tokens.
        depths: ``K`` in training.
    """

    config: Config
    shapes: Mapping[str, tuple[int, ...]]
    network: Callable[[Weights, Text, int], jax.Array]
    depths: int = 4


def layer(
    name: str,
    *,
    width: int = D,
    reads: int | None = None,
    inner: int | None = None,
    biases: bool = False,
    heads: Heads = _FULL,
) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer without the norm before its attention, which some heads lack."""
    reads, inner = reads or width, inner or width
    queries, keys = heads.queries * heads.width, heads.keys * heads.width
    sizes = {
        f"{name}.self_attn.{one}_proj.bias": (size,) for one, size in zip("qkv", (queries, keys, keys), strict=True)
    }
    return (sizes if biases else {}) | {
        f"{name}.self_attn.q_proj.weight": (queries, reads),
        f"{name}.self_attn.k_proj.weight": (keys, reads),
        f"{name}.self_attn.v_proj.weight": (keys, reads),
        f"{name}.self_attn.o_proj.weight": (width, queries),
        f"{name}.mlp.gate_proj.weight": (inner, width),
        f"{name}.mlp.up_proj.weight": (inner, width),
        f"{name}.mlp.down_proj.weight": (width, inner),
        f"{name}.post_attention_layernorm.weight": (width,),
    }


def norms(*names: str, width: int = D) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,) for name in names}


def _dflash(causal: bool) -> TinyHead:
    shapes = {"fc.weight": (D, len(AUX) * D)} | norms("hidden_norm", "norm")
    for index in range(2):
        name = f"layers.{index}"
        shapes |= layer(name) | norms(f"{name}.input_layernorm")
        shapes |= norms(f"{name}.self_attn.q_norm", f"{name}.self_attn.k_norm", width=32)
    options = {"mask_token_id": MASK_ID, "target_layer_ids": [index - 1 for index in AUX], "causal": causal}
    return TinyHead(
        _LLAMA
        | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "block_size": 5,
            "dflash_config": options,
        },
        shapes,
        functools.partial(networks.block_diffusion, heads=_FULL, aux=AUX, mask_id=MASK_ID, causal=causal),
    )


HEADS: dict[str, TinyHead] = {
    "draft_model": TinyHead(
        _LLAMA
        | {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": _DRAFT_WIDTH,
            "intermediate_size": _DRAFT_WIDTH,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        {"model.embed_tokens.weight": (V, _DRAFT_WIDTH)}
        | layer("model.layers.0", width=_DRAFT_WIDTH, heads=_SMALL)
        | norms("model.layers.0.input_layernorm", "model.norm", width=_DRAFT_WIDTH),
        functools.partial(networks.language_model, heads=_SMALL),
    ),
    "medusa": TinyHead(
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": D,
            "vocab_size": V,
            "num_heads": 3,
            "num_hidden_layers": 1,
            "torch_dtype": "bfloat16",
        },
        {f"blocks.{head}.layers.0.weight": (D, D) for head in range(3)}
        | {f"lm_heads.{head}.weight": (V, D) for head in range(3)},
        networks.medusa,
        depths=3,
    ),
    "eagle": TinyHead(
        _LLAMA | {"architectures": ["LlamaForCausalLM"], "bias": False},
        {"fc.weight": (D, 2 * D)} | layer("layers.0"),
        functools.partial(networks.eagle, heads=_FULL),
    ),
    "p_eagle": TinyHead(
        _LLAMA
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 2,
            "draft_vocab_size": V,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(AUX),
            "ptd_token_id": MASK_ID,
        },
        {"fc.weight": (D, len(AUX) * D), "mask_hidden": (1, 1, len(AUX) * D), "lm_head.weight": (V, D)}
        | layer("layers.0", reads=2 * D)
        | layer("layers.1")
        | norms("layers.0.input_layernorm", "layers.0.hidden_norm", "layers.1.input_layernorm", "norm"),
        functools.partial(networks.parallel_eagle, heads=_FULL, aux=AUX, mask_id=MASK_ID),
    ),
    "dflash": _dflash(causal=False),
    "jetspec": _dflash(causal=True),
    "mtp": TinyHead(
        _LLAMA
        | {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "intermediate_size": 2 * D,  # as the target's own layers
            "num_hidden_layers": 8,  # the target's
            "num_nextn_predict_layers": 1,
        },
        {"model.mtp_layers.0.input_proj.weight": (D, 2 * D)}
        | layer("model.mtp_layers.0", inner=2 * D, biases=True)
        | norms(
            *(
                f"model.mtp_layers.0.{name}"
                for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
            )
        ),
        functools.partial(networks.mtp, heads=_FULL),
    ),
}


def text_of(target: LoadedTarget) -> tuple[Text, np.ndarray]:
    """The text of the target after the prompts, its features there, and the anchors with a draft to learn."""
    outputs = SpeculativeDecoder(target, stop_tokens=()).generate(PROMPTS, max_new_tokens=NEW_TOKENS).tokens
    rows = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)][:LEARNED]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    anchors = np.zeros(tokens.shape, np.int32)  # tokens known of the continuation after each place
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
        anchors[index, len(PROMPTS[index]) : len(row)] = np.arange(NEW_TOKENS)[::-1]
    layers = target.model.config.num_layers
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    seen = target.model(
        target.params, jnp.asarray(tokens), positions, causal_mask(tokens.shape[1]), aux_layers=tuple(range(layers + 2))
    ).features
    tables = target.model.tables(target.params)
    assert tables.output is not None
    return Text(jnp.asarray(tokens), seen[:, :, :-1], seen[:, :, -1], tables.embedding, tables.output.T), anchors


def train(head: TinyHead, text: Text, anchors: np.ndarray) -> tuple[Tensors, float]:
    """Learn the continuations by heart.

    Returns:
        Tensors in bfloat16, and the mean acceptance length over all anchors, were each the start of a round.
    """
    random = np.random.default_rng(0)
    weights: Weights = {}
    for name, shape in head.shapes.items():
        size = D**-0.5 if name == "mask_hidden" else 0.02 if "embed" in name else shape[-1] ** -0.5
        if name.endswith("norm.weight"):  # far from one, or one norm would do for another
            weights[name] = random.uniform(0.5, 1.5, shape)
        else:
            weights[name] = random.normal(0.0, size, shape)
    weights = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}
    labels = jnp.stack([text.ahead(depth + 1) for depth in range(head.depths)], axis=2)
    counted = jnp.asarray(anchors[:, :, None] > np.arange(head.depths))
    counted &= jnp.asarray(anchors[:, :, None] > 0)

    def loss_of(weights: Weights) -> tuple[jax.Array, jax.Array]:
        logits = head.network(weights, text, head.depths)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        right = jnp.cumprod((jnp.argmax(logits, axis=-1) == labels) & counted, axis=2)
        return jnp.sum(loss * counted) / jnp.sum(counted), 1 + jnp.sum(right) / jnp.sum(counted[:, :, 0])

    optimizer = optax.adam(1e-3)

    @jax.jit
    def learn(weights: Weights, state: Any) -> tuple[Weights, Any, jax.Array]:
        (_, length), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, length

    state = optimizer.init(weights)
    for _ in range(MOST_STEPS):
        weights, state, length = learn(weights, state)
        if length > LENGTH * (1 + head.depths):
            break
    stored = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in weights.items()}
    rounded = {name: jnp.asarray(value.astype(np.float32)) for name, value in stored.items()}
    return stored, float(jax.jit(loss_of)(rounded)[1])


def main(names: list[str]) -> None:
    """Train, and write."""
    text, anchors = text_of(load_target(TARGET))
    for name in names or list(HEADS):
        start = time.perf_counter()
        tensors, length = train(HEADS[name], text, anchors)
        directory = RECORDED / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(HEADS[name].config, indent=1) + "\n")
        write_tensors(directory / "model.safetensors", tensors)
        print(f"{name}: acceptance length {length:.2f}, {time.perf_counter() - start:.0f} s", flush=True)


def rewritten(source: Path, directory: Path, change: Callable[[Config, Tensors], None]) -> Path:
    """A checkpoint, changed.

    Args:
        source: The checkpoint.
        directory: Where to; made if missing.
        change: Is given ``config.json`` and the tensors.
    """
    config, tensors = json.loads((source / "config.json").read_text()), dict(read_tensors(source))
    change(config, tensors)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def with_mtp(directory: Path, module: Path) -> Path:
    """The golden target as a model of MiMo's family, with an MTP module; vLLM knows no other way to give it one."""

    def join(config: Config, tensors: Tensors) -> None:
        config.clear()
        config |= HEADS["mtp"].config | {"torch_dtype": "float32"}
        for name, value in list(tensors.items()):
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):  # that family has biases
                tensors[name.replace("weight", "bias")] = np.zeros(len(value), np.float32)
        tensors |= {name: value.astype(np.float32) for name, value in read_tensors(module).items()}

    return rewritten(TARGET, directory, join)


if __name__ == "__main__":
    main(sys.argv[1:])
