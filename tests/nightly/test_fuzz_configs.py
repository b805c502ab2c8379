"""Every field of a ``config.json``, one at a time with another value: logits stay transformers'.

transformers decides what a field means. A value that moves its logits must move ours to the same
logits, and a value that leaves them must leave ours, unless an error refuses the file. A value with
which transformers cannot build the model, or cannot load all of its weights, is skipped.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import torch
import transformers
from families import BASE, LLAMAS, RECIPES, WRAPPED, Recipe, build, eager, parametrize

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.tree import causal_mask

pytestmark = pytest.mark.torch


def _more(name: str, **fields: Any) -> Recipe:
    """A recipe with more fields, of its language model where it is of a model of images."""
    recipe = (RECIPES | WRAPPED)[name]
    if "text_config" in recipe.fields:
        fields = {"text_config": recipe.fields["text_config"] | fields}
    return recipe._replace(fields=recipe.fields | fields)


def _with_images(name: str, model_type: str) -> Recipe:
    recipe = RECIPES[name]
    text = BASE | recipe.fields | {"model_type": recipe.model_type}
    vision = {
        "hidden_size": 16, "patch_size": 14, "num_heads": 2, "depth": 1,
        "intermediate_size": 64, "out_hidden_size": 32,
    }  # fmt: skip
    return Recipe(
        model_type,
        {"text_config": text, "vision_config": vision, "tie_word_embeddings": False},
        recipe.seed,
    )


# Llama 4 with images is left out: transformers 5.24 raises an error for text without images.
ALL = (
    RECIPES
    | LLAMAS
    | WRAPPED
    | {
        "qwen3_moe, windows": _more("qwen3_moe", use_sliding_window=True, sliding_window=5),
        "ministral3, windows": _more("ministral3", sliding_window=5),
        "mistral3, of mistral, windows": _more("mistral3, of mistral", sliding_window=5),
        "qwen3_vl, a window that is off": _more(
            "qwen3_vl", use_sliding_window=False, sliding_window=5, max_window_layers=0
        ),
        "qwen3_5, images": _with_images("qwen3_5_text", "qwen3_5"),
        "qwen3_5_moe, images": _with_images("qwen3_5_moe_text", "qwen3_5_moe"),
    }
)

# Longer than every window and chunk of the recipes.
TOKENS = np.random.default_rng(0).permutation(np.arange(3, 96))[:24]
ABSENT = object()
# These choose the class, or the type of the weights, or belong to another part of the model.
UNCHANGED = (
    "model_type",
    "architectures",
    "dtype",
    "transformers_version",
    "vision_config",
    "id2label",
    "label2id",
)
LAYERS = 4
MIXED = ["sliding_attention", "full_attention"] * 2
TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES = (
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    YARN,
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)
# Values of fields that a file of some family has. Every family is tried with all of them.
GENERIC: dict[str, tuple[Any, ...]] = {
    "attention_bias": (True, False),
    "attention_chunk_size": (5,),
    "attention_multiplier": (0.1,),
    "attn_logit_softcapping": (2.0, None),
    "attn_output_gate": (False, True),
    "attn_temperature_tuning": (True, 4),
    "embedding_multiplier": (3.0,),
    "final_logit_softcapping": (2.0, None),
    "first_k_dense_replace": (0, 2),
    "full_attention_interval": (2,),
    "head_dim": (8, 16),
    "hidden_act": ("gelu", "relu", "swish", "gelu_pytorch_tanh"),
    "hidden_activation": ("gelu", "silu"),
    "is_causal": (False, True, None),
    "is_decoder": (False, True),
    "is_encoder_decoder": (True,),
    "layer_norm_eps": (0.5,),
    "layer_types": (*([kind] * LAYERS for kind in TYPES), MIXED),
    "logit_scale": (0.3,),
    "logits_scaling": (3.0,),
    "max_window_layers": (0, 2),
    "mlp_bias": (True, False),
    "mlp_layer_types": (["dense"] * LAYERS, ["sparse"] * LAYERS),
    "mlp_only_layers": ([], [0]),
    "moe_layers": ([0], [0, 1, 2, 3]),
    "no_rope_layer_interval": (2,),
    "no_rope_layers": ([1, 0] * 2, [0, 1] * 2),
    "norm_topk_prob": (True, False),
    "num_nextn_predict_layers": (1,),
    "original_max_position_embeddings": (8,),
    "partial_rotary_factor": (0.5, 1.0),
    "per_layer_config": ({"1": {"rms_norm_eps": 0.5}},),
    "query_pre_attn_scalar": (64,),
    "residual_multiplier": (0.3,),
    "rms_norm_eps": (0.5,),
    "rope_interleave": (True, False),
    "rope_local_base_freq": (50.0,),
    "rope_parameters": ROPES,
    "rope_scaling": (*ROPES, None),
    "rope_theta": (500.0,),
    "rotary_pct": (0.5,),
    "scoring_func": ("softmax",),
    "sliding_window": (4, None),
    "sliding_window_pattern": (2,),
    "tie_word_embeddings": (True, False),
    "topk_method": ("greedy",),
    "use_bidirectional_attention": (True, "all"),
    "use_qk_norm": (True, False),
    "use_sliding_window": (True, False),
}


def other_values(name: str, value: Any) -> list[Any]:
    """Values of :data:`GENERIC`; for a field of the file or its class also variations.

    Null and no such field are among them.
    """
    values = list(GENERIC.get(name, ()))
    if value is ABSENT:
        return values

    if isinstance(value, bool):
        values.append(not value)
    elif isinstance(value, int):
        values += [value * 2, value // 2]
    elif isinstance(value, float):
        values += [value * 1.5, 0.0]
    elif isinstance(value, str):
        values.append("other")
    elif isinstance(value, list):
        values += [value[::-1], value[:1] * len(value), []]
    elif value is None:
        values += [True, 4, 0.5]

    return [*values, None, ABSENT]


def changes(
    values: dict[str, Any], known: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[Any, Any]]:
    """Yields every change of one field: its path and its value.

    Args:
        values: The fields of the file.
        known: The fields of its class in transformers, with their values.
        path: Where the fields are in the file.
    """
    generic = () if "rope" in "".join(path) else GENERIC
    for name in dict.fromkeys([*values, *known, *generic]):
        if name in UNCHANGED:
            continue
        value = values.get(name, known.get(name, ABSENT))
        if isinstance(value, dict):
            yield from changes(values.get(name) or {}, value, (*path, name))

        for new_value in other_values(name, value):
            if new_value is not values.get(name, ABSENT) and (
                new_value is ABSENT or new_value != values.get(name, ABSENT)
            ):
                yield (*path, name), new_value


def changed(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The fields of the file with another value at a path."""
    first, *deeper = path
    if deeper:
        value = changed(values.get(first) or {}, tuple(deeper), value)
    unchanged = {name: field_value for name, field_value in values.items() if name != first}
    return unchanged if value is ABSENT else unchanged | {first: value}


class Fuzzed:
    """A recipe's model in a directory whose ``config.json`` changes."""

    def __init__(self, name: str, directory: Path) -> None:
        model = build(ALL[name])
        model.save_pretrained(directory)
        self.directory = directory
        self.file = directory / "config.json"
        self.values = json.loads(self.file.read_text())
        self.known = json.loads(model.config.to_json_string(use_diff=False))
        self.shapes = {key: value.shape for key, value in model.state_dict().items()}

        has_images = "text_config" in ALL[name].fields
        image_class = transformers.AutoModelForImageTextToText
        self.auto = image_class if has_images else transformers.AutoModelForCausalLM
        self.logits: dict[Any, np.ndarray] = {}

    def theirs(self, *, sized: bool = True) -> np.ndarray | None:
        """Logits of transformers ``[T V]``; ``None`` where it cannot build or load the model.

        ``sized`` says that the file names every size. The default sizes of a class take gigabytes.
        """
        with contextlib.suppress(Exception):
            if not sized:
                with torch.device("meta"):
                    model = self.auto.from_config(
                        transformers.AutoConfig.from_pretrained(self.directory)
                    )
                if any(
                    self.shapes.get(key) != value.shape for key, value in model.state_dict().items()
                ):
                    return None

            model, loaded = self.auto.from_pretrained(
                self.directory, attn_implementation="eager", output_loading_info=True
            )
            if loaded["missing_keys"]:
                return None

            with torch.no_grad():
                tokens = torch.from_numpy(TOKENS)[None]
                logits = eager(model).float()(tokens, use_cache=False).logits[0].numpy()
            return logits if np.isfinite(logits).all() else None
        return None

    def ours(self) -> np.ndarray | None:
        """Our logits ``[T V]``; ``None`` where the file, or a text of this length, is refused."""
        try:
            config = conversion.read_target(self.directory).config
        except CheckpointError:
            return None

        if config not in self.logits:
            target: Any = e3.load_target(self.directory)
            if target.max_positions < len(TOKENS):
                return None
            tokens = jnp.asarray(TOKENS, jnp.int32)[None]
            positions = jnp.arange(len(TOKENS))[None]
            # Four times faster than a program for every configuration.
            with jax.disable_jit():
                out = target.model(target.params, tokens, positions, causal_mask(len(TOKENS)))
                self.logits[config] = np.asarray(target.model.unembed(target.params, out.final)[0])
        return self.logits[config]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize(metafunc, ALL, few=())


def test_a_field_means_what_it_means_to_transformers(name: str, tmp_path: Path) -> None:
    fuzzed = Fuzzed(name, tmp_path)
    before = fuzzed.theirs()
    assert before is not None
    np.testing.assert_allclose(fuzzed.ours(), before, atol=1e-4)

    wrong = []
    compared = 0

    for path, value in changes(fuzzed.values, fuzzed.known):
        fuzzed.file.write_text(json.dumps(changed(fuzzed.values, path, value)))
        ours = fuzzed.ours()
        is_sized = value is not None and value is not ABSENT
        theirs = None if ours is None else fuzzed.theirs(sized=is_sized)
        if ours is None or theirs is None:
            continue

        compared += 1
        # Values that make logits larger round more.
        if not np.allclose(ours, theirs, atol=3e-4):
            moved = [float(np.abs(logits - before).max()) for logits in (theirs, ours)]
            shown = "absent" if value is ABSENT else repr(value)
            wrong.append(
                f"{'.'.join(path)} {shown}: theirs moved by {moved[0]:.1e}, ours by {moved[1]:.1e}"
            )

    assert not wrong, "\n".join(wrong)
    assert compared > 30
