"""One trained head rewritten into every variation that published heads have.

Random heads are accepted by chance only, so counts of theirs prove little. Each variation here
starts from a trained head and changes it as little as the variation allows: it still drafts well,
and what it drafts depends on the change.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.conversion.tensors import read_tensors, write_tensors


@dataclasses.dataclass
class Head:
    """A checkpoint under change."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]  # by their official names, in float32
    embedding: np.ndarray  # the target's, [V D], and so the next
    unembedding: np.ndarray
    random: np.random.Generator

    def rename(self, old: str, new: str) -> None:
        """Rename all tensors that start with ``old``."""
        self.tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: value
            for name, value in self.tensors.items()
        }

    def scales(self, size: int, around: float) -> np.ndarray:
        """Weights of a norm that bring its output to about the size of ``around``."""
        return (around * self.random.uniform(0.8, 1.2, size)).astype(np.float32)


TRAINED_LAYERS = (2, 6, 9)
# Root mean square of the shipped target's features of these layers: a norm with such weights
# changes little.
FEATURE_SCALES = (14.0, 20.5, 25.5)


def write_variation(name: str, head: Path, target: Path, directory: Path) -> None:
    """Write one of :data:`VARIATIONS` of a head with the shipped head's layout, in float32."""
    around = read_tensors(target)
    stored = {
        key: value if value.dtype in (np.bool_, np.int64) else value.astype(np.float32)
        for key, value in read_tensors(head).items()
    }
    changed = Head(
        config=json.loads((head / "config.json").read_text())
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "torch_dtype": "float32",
            "dtype": "float32",
        },
        tensors=stored,
        embedding=around["model.embed_tokens.weight"].astype(np.float32),
        unembedding=around["lm_head.weight"].astype(np.float32),
        random=np.random.default_rng(0),
    )

    VARIATIONS[name](changed)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(changed.config, indent=2))
    write_tensors(directory / "model.safetensors", changed.tensors)


def _configured(head: Head, **fields: Any) -> None:
    head.config |= fields


def _one_norm_per_feature(head: Head) -> None:
    head.config["fc_norm"] = True
    for chunk, scale in enumerate(FEATURE_SCALES):
        head.tensors[f"fc_norm.{chunk}.weight"] = head.scales(head.config["hidden_size"], scale)


def _one_norm_for_all_features(head: Head) -> None:
    head.config["norm_before_fc"] = True
    scale = float(np.sqrt(np.mean(np.square(FEATURE_SCALES))))
    head.tensors["input_norm.weight"] = head.scales(head.tensors["fc.weight"].shape[1], scale)


def _features_of(head: Head, *, layers: tuple[int, ...]) -> None:
    chunks = dict(
        zip(
            TRAINED_LAYERS,
            np.split(head.tensors["fc.weight"], len(TRAINED_LAYERS), axis=1),
            strict=True,
        )
    )

    spread = 0.5 * head.tensors["fc.weight"].std()
    shape = chunks[TRAINED_LAYERS[0]].shape
    new = {
        layer: head.random.normal(0, spread, shape).astype(np.float32)
        for layer in layers
        if layer not in chunks
    }
    head.tensors["fc.weight"] = np.concatenate([(chunks | new)[layer] for layer in layers], axis=1)

    # Three places, because readers look in different ones.
    head.config |= {
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "num_aux_hidden_states": len(layers),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }


def _full_vocabulary(head: Head) -> None:
    trained = head.tensors["lm_head.weight"]
    ids = np.arange(len(trained)) + head.tensors.pop("d2t")
    del head.tensors["t2d"]
    rows = 1.2 * head.unembedding * trained.std() / head.unembedding.std()
    rows[ids] = trained
    head.tensors["lm_head.weight"] = rows
    head.config["draft_vocab_size"] = len(rows)


def _own_embedding(head: Head) -> None:
    noise = head.random.normal(0, 0.2 * head.embedding.std(), head.embedding.shape)
    head.tensors["embed_tokens.weight"] = (head.embedding + noise).astype(np.float32)


def _queries_and_keys_normed(head: Head) -> None:
    size = head.config["hidden_size"] // head.config["num_attention_heads"]
    head.config |= {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": size,
    }
    for part in "qk":
        head.tensors[f"midlayer.self_attn.{part}_norm.weight"] = head.scales(size, 1.5)


def _two_layers(head: Head) -> None:
    head.config["num_hidden_layers"] = 2
    head.rename("midlayer.", "layers.0.")
    for name, value in list(head.tensors.items()):
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            second = value * 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else value
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                second = second[:, head.config["hidden_size"] :]  # this layer reads no embedding
            head.tensors[name.replace("layers.0.", "layers.1.")] = second


def _speculators_format(head: Head) -> None:
    layer = {
        key: value
        for key, value in head.config.items()
        if key not in ("draft_vocab_size", "architectures")
    }

    head.config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.config["draft_vocab_size"],
        "target_hidden_size": None,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(TRAINED_LAYERS),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
    }
    head.rename("midlayer.", "layers.0.")


VARIATIONS: dict[str, Callable[[Head], None]] = {
    "residual from the norm": functools.partial(_configured, norm_before_residual=True),
    "fed back after the norm": functools.partial(_configured, norm_output=True),
    "one norm per feature": _one_norm_per_feature,
    "one norm for all features": _one_norm_for_all_features,
    "two auxiliary layers": functools.partial(_features_of, layers=(6, 9)),
    "four auxiliary layers": functools.partial(_features_of, layers=(0, 2, 6, 9)),
    "five auxiliary layers, the output of the last layer included": functools.partial(
        _features_of, layers=(2, 4, 6, 9, 12)
    ),
    "full vocabulary": _full_vocabulary,
    "own embedding": _own_embedding,
    "queries and keys normed, as in Qwen3": _queries_and_keys_normed,
    "two layers": _two_layers,
    "speculators format": _speculators_format,
}
