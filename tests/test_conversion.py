"""Checkpoints come in exactly, go out exactly, and anything that is not what it claims to be is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoints import (
    TARGET,
    Head,
    edit_config,
    edit_tensors,
    llama_model,
    same_params,
    torch_draft,
    write_checkpoint,
    write_llama,
)

import conversion
from conversion import CheckpointError
from conversion.acceptance import Agreement, forced_agreement
from conversion.doctor import suspected_cause
from eagle3_jax.drafters.eagle3 import Eagle3Drafter, Eagle3Head
from eagle3_jax.models.decoder import BlockMemory, DecoderTarget, causal_mask
from eagle3_jax.models.functional import bind
from eagle3_jax.models.layers import FLOAT32
from eagle3_jax.tree import Chain
from eagle3_jax.types import Observation, SamplingParams

GOLDEN = Path(__file__).parent / "golden"


def assert_close(ours: Any, truth: np.ndarray) -> None:
    assert np.abs(np.asarray(ours) - truth).max() <= 1e-4 * np.abs(truth).max()


# ---------------------------------------------------------------------------------------------------- targets

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

TARGETS = {
    "one key head, head_dim 16": {"num_key_value_heads": 1, "head_dim": 16},
    "head_dim 80, tied": {"head_dim": 80, "tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 16},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "yarn": {"rope_parameters": YARN, "head_dim": 16},
    "yarn, every field": {
        "rope_parameters": YARN
        | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        "head_dim": 32,
    },
}


@pytest.mark.parametrize("name", TARGETS)
def test_logits_and_features_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    import torch

    model = llama_model(**TARGETS[name])
    model.save_pretrained(tmp_path / "target")
    checkpoint = conversion.read_target(tmp_path / "target")
    tokens = np.random.default_rng(0).integers(0, 61, (2, 40))
    with torch.no_grad():
        truth = model(torch.from_numpy(tokens), output_hidden_states=True)

    target = DecoderTarget(checkpoint.config)
    params = jax.tree.map(jnp.asarray, checkpoint.params)

    @jax.jit
    def forward(params: Any, tokens: jax.Array) -> Any:
        positions = jnp.broadcast_to(jnp.arange(40), tokens.shape)
        out = target(params, tokens, positions, causal_mask(40), aux_layers=(0, 1, 2))
        return target.unembed(params, out.final), out.features

    logits, features = forward(params, jnp.asarray(tokens))
    assert_close(logits, truth.logits.numpy())
    for layer in range(3):
        assert_close(features[:, :, layer], truth.hidden_states[layer].numpy())


@pytest.mark.parametrize("name", TARGETS)
def test_written_target_reads_back_bit_equal_and_transformers_reads_it(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import LlamaForCausalLM

    model = llama_model(**TARGETS[name])
    model.save_pretrained(tmp_path / "source")
    source = conversion.read_target(tmp_path / "source")
    conversion.convert(tmp_path / "source", tmp_path / "native", "jax")
    conversion.convert(tmp_path / "native", tmp_path / "back", "vllm")
    for directory in ("native", "back"):
        again = conversion.read_target(tmp_path / directory)
        assert (again.config, again.stop_tokens, again.dtype) == (source.config, (2,), "float32")
        assert same_params(source.params, again.params)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "back")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["sharded safetensors", "pickle", "sharded pickle"])
def test_every_file_layout_reads_the_same_bits(tmp_path: Path, dtype: str, layout: str) -> None:
    import torch

    model = llama_model(num_hidden_layers=1).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "plain")
    if layout == "sharded safetensors":
        model.save_pretrained(tmp_path / "other", max_shard_size="8KB")
    else:
        (tmp_path / "other").mkdir()
        (tmp_path / "other/config.json").write_text((tmp_path / "plain/config.json").read_text())
        state = model.state_dict()
        if layout == "pickle":
            torch.save(state, tmp_path / "other/pytorch_model.bin")
        else:
            names = sorted(state)
            shards = {"a.bin": names[:5], "b.bin": names[5:]}
            for shard, held in shards.items():
                torch.save({name: state[name] for name in held}, tmp_path / "other" / shard)
            weight_map = {name: shard for shard, held in shards.items() for name in held}
            index = tmp_path / "other/pytorch_model.bin.index.json"
            index.write_text(json.dumps({"weight_map": weight_map}))
    plain, other = (conversion.read_target(tmp_path / name) for name in ("plain", "other"))
    assert plain.dtype == other.dtype == dtype
    assert same_params(plain.params, other.params)


def test_both_notations_of_rope_mean_the_same(tmp_path: Path) -> None:
    old, new = write_llama(tmp_path / "old"), write_llama(tmp_path / "new")
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_config(old, rope_theta=500.0, rope_scaling={"type": scaling.pop("rope_type"), **scaling})
    edit_config(new, rope_parameters=LLAMA3)
    assert (
        conversion.read_target(old).config.layers[0].mixer.rope
        == conversion.read_target(new).config.layers[0].mixer.rope
    )
    edit_config(new, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling disagree"):
        conversion.read_target(new)


def test_a_target_that_says_nothing_of_rope_has_the_original_base(tmp_path: Path) -> None:
    config = conversion.read_target(write_llama(tmp_path / "target")).config
    rope = config.layers[0].mixer.rope
    assert rope is not None and (rope.theta, rope.type) == (10_000.0, "default")


@pytest.mark.parametrize(
    ("generation", "stop_tokens"),
    [(None, (2,)), ({"eos_token_id": [5, 7]}, (5, 7)), ({"eos_token_id": 3}, (3,)), ({}, (2,))],
)
def test_stop_tokens_come_from_the_generation_configuration_first(
    tmp_path: Path, generation: Any, stop_tokens: tuple[int, ...]
) -> None:
    directory = write_llama(tmp_path / "target")
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    source = conversion.read_target(directory)
    assert source.stop_tokens == stop_tokens
    conversion.write_target(source, tmp_path / "copy")
    assert conversion.read_target(tmp_path / "copy").stop_tokens == stop_tokens


def test_known_extras_are_harmless_and_only_those(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "target")
    edit_tensors(directory, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    conversion.read_target(directory)
    edit_tensors(directory, model__layers__0__self_attn__extra=np.ones(4, np.float32))
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.0\.self_attn\.extra"):
        conversion.read_target(directory)


def test_a_tied_projection_may_only_repeat_the_embedding(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "target")
    edit_config(directory, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        conversion.read_target(directory)
    from safetensors.numpy import load_file

    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(directory, lm_head__weight=embedding)
    assert conversion.read_target(directory).config.tie_embeddings


ROPE = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TARGET_REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "activation": ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "'dynamic' is not supported"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, {}, "'longrope' is not supported"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, {}, "has no factor"),
    "llama3 without context": ({"rope_scaling": ROPE}, {}, "has no original_max_position_embeddings"),
    "unknown rope field": ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, {}, "mrope_section"),
    "two thetas": ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, {}, "rope_theta is 1.0 but 2.0"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor"),
    "sliding window": ({"sliding_window": 16}, {}, "sliding_window is 16"),
    "sliding layers": ({"layer_types": ["sliding_attention"]}, {}, "'sliding_attention'"),
    "scaled logits": ({"logit_scale": 0.5}, {}, "logit_scale is 0.5"),
    "quantised": ({"quantization_config": {"bits": 4}}, {}, "quantization_config"),
    "no eps": ({"rms_norm_eps": None}, {}, "has no rms_norm_eps"),
    "no width": ({"hidden_size": None}, {}, "has no hidden_size"),
    "text for a number": ({"hidden_size": "32"}, {}, "hidden_size is '32'; expected a whole number"),
    "number for a flag": ({"attention_bias": 1}, {}, "attention_bias is 1; expected true or false"),
    "uneven groups": ({"num_key_value_heads": 3}, {}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    "odd head": ({"head_dim": 7}, {}, "head_dim is 7"),
    "width no multiple": ({"num_attention_heads": 5}, {}, "not a multiple of num_attention_heads 5"),
    "stop token": ({"eos_token_id": "</s>"}, {}, "eos_token_id is '</s>'"),
    "missing": ({}, {"model__norm__weight": None}, r"misses model\.norm\.weight"),
    "too few layers": ({"num_hidden_layers": 7}, {}, r"num_hidden_layers is 7; the file holds 8 layers"),
    "shape": (
        {},
        {"model__norm__weight": np.ones(31, np.float32)},
        r"model\.norm\.weight has shape \[31\]; config.json asks for \[32\]",
    ),
    "dtype": ({}, {"model__norm__weight": np.ones(32, np.int32)}, r"model\.norm\.weight is stored as int32"),
    "double": ({}, {"model__norm__weight": np.ones(32, np.float64)}, "stored as float64"),
}


@pytest.mark.parametrize("name", TARGET_REFUSALS)
def test_a_target_that_is_not_computed_is_refused(tmp_path: Path, name: str) -> None:
    fields, tensors, message = TARGET_REFUSALS[name]
    directory = write_llama(tmp_path / "target")
    edit_config(directory, **fields)
    if tensors:
        edit_tensors(directory, **tensors)
    with pytest.raises(CheckpointError, match=message) as refusal:
        conversion.read_target(directory)
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------------------------------------------- files


def broken_files(directory: Path) -> dict[str, Any]:
    weights = directory / "model.safetensors"

    def shard(**index: Any) -> None:
        weights.rename(directory / "one.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    def names() -> list[str]:
        from safetensors import safe_open

        with safe_open(directory / "one.safetensors", "np") as file:
            return list(file.keys())

    def in_one(**more: str) -> None:
        shard()
        index = {"weight_map": dict.fromkeys(names(), "one.safetensors") | more}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    def pickled(value: Any) -> None:
        import torch

        weights.unlink()
        torch.save(value, directory / "pytorch_model.bin")

    def damaged_pickle() -> None:
        weights.unlink()
        (directory / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not a checkpoint")

    return {
        "no weights": (weights.unlink, "not a checkpoint: it holds no weights"),
        "stray name": (lambda: weights.rename(directory / "weights.safetensors"), "holds weights.safetensors but"),
        "truncated": (lambda: weights.write_bytes(weights.read_bytes()[:-8]), "truncated or damaged"),
        "empty": (lambda: weights.write_bytes(b""), "truncated or damaged"),
        "no config": ((directory / "config.json").unlink, "has no config.json"),
        "config no JSON": (lambda: (directory / "config.json").write_text("{"), "is not valid JSON"),
        "config a list": (lambda: (directory / "config.json").write_text("[]"), "holds a JSON list"),
        "no weight map": (lambda: shard(metadata={}), "has no weight_map"),
        "missing shard": (lambda: in_one(more="two.safetensors"), r"two\.safetensors is missing"),
        "shard without its tensor": (lambda: in_one(more="one.safetensors"), "does not hold more"),
        "shard elsewhere": (lambda: in_one(more="../two.safetensors"), "without directories"),
        "damaged pickle": (damaged_pickle, "truncated, damaged or no file of plain tensors"),
        "pickled list": (lambda: pickled([1]), "expected a dictionary of tensors"),
        "pickled number": (lambda: pickled({"a": 1}), "a is a int; expected a tensor"),
        "pickled code": (lambda: pickled({"a": Path()}), "no file of plain tensors"),
    }


@pytest.mark.parametrize("name", list(broken_files(Path())))
def test_a_damaged_directory_is_refused(tmp_path: Path, name: str) -> None:
    directory = write_llama(tmp_path / "target")
    damage, message = broken_files(directory)[name]
    damage()
    with pytest.raises(CheckpointError, match=message) as refusal:
        conversion.read_target(directory)
    assert "\n" not in str(refusal.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    directory = write_llama(tmp_path / "target")
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "b.safetensors").write_bytes(data)
    from safetensors import safe_open

    with safe_open(directory / "a.safetensors", "np") as file:
        weight_map = dict.fromkeys(file.keys(), "a.safetensors")
    weight_map["more"] = "b.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="twice"):
        conversion.read_target(directory)


@pytest.mark.parametrize("read", [conversion.read_target, conversion.read_head, conversion.describe])
def test_a_place_that_is_no_directory_is_refused(tmp_path: Path, read: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="does not exist"):
        read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is a file"):
        read(tmp_path / "file")


def test_a_pickle_without_torch_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_llama(tmp_path / "target")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=re.escape("pip install 'eagle3-jax[convert]'")):
        conversion.read_target(directory)


@pytest.mark.parametrize("to", ["jax", "vllm"])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    source = write_llama(tmp_path / "target")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for module in ("targets", "native"):
        monkeypatch.setattr(f"conversion.{module}.copy_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        conversion.convert(source, tmp_path / "out", to)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("to", ["jax", "eagle", "sglang", "vllm"])
def test_an_existing_directory_is_not_written_to(tmp_path: Path, to: str) -> None:
    head = Head().write(tmp_path / "head")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        conversion.convert(head, tmp_path / "out", to, TARGET)
    assert not list((tmp_path / "out").iterdir())


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "target")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    for to in ("jax", "vllm"):
        conversion.convert(source, tmp_path / to, to)
        assert (tmp_path / to / "tokenizer.json").read_text() == "{}"
        assert (tmp_path / to / "chat_template.jinja").exists()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'gguf' is not known; use one of jax, eagle, sglang, vllm"):
        conversion.convert(write_llama(tmp_path / "target"), tmp_path / "out", "gguf")


# ---------------------------------------------------------------------------------------------------- heads

HEADS = {
    "official": Head(),
    "rope theta": Head(theta=500.0),
    "equal vocabulary": Head(draft_vocab=61),
    "norm_before_residual": Head(norm_before_residual=True),
    "norm_output": Head(norm_output=True),
    "fc_norm": Head(fc_norm=True, norm_output=True),
    "norm_before_fc": Head(norm_before_fc=True),
    "qk_norm": Head(qk_norm=True, head_dim=16),
    "biases": Head(bias=True),
    "two layers": Head(layers=2),
    "four auxiliary layers": Head(aux=(1, 3, 5, 8)),
    "own embedding, other width": Head(width=48, heads=3, kv_heads=1, head_dim=16, own_embedding=True),
    "own embedding": Head(own_embedding=True),
}
HALVES = {name: dataclasses.replace(head, dtype=ml_dtypes.bfloat16) for name, head in HEADS.items()}
NOT_EXPRESSIBLE = {
    "eagle": {
        "norm_before_residual": "norm_before_residual",
        "norm_output": "norm_output",
        "fc_norm": "fc_norm",
        "norm_before_fc": "norm_before_fc",
        "qk_norm": "qk_norm",
        "biases": "attention_bias",
        "two layers": "num_layers 2",
        "four auxiliary layers": r"aux_layers \(1, 3, 5, 8\)",
    },
    "sglang": {
        "norm_before_residual": "norm_before_residual",
        "qk_norm": "qk_norm",
        "biases": "attention_bias",
        "two layers": "num_layers 2",
        "four auxiliary layers": r"aux_layers \(1, 3, 5, 8\)",
    },
    "vllm": {},
    "jax": {},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_as_its_independent_torch_twin(tmp_path: Path, name: str) -> None:
    head = HEADS[name]
    checkpoint = conversion.read_head(head.write(tmp_path / "head"), TARGET)
    random = np.random.default_rng(3)
    fed, depth = 9, 4
    features = random.normal(size=(fed, len(head.aux), head.target_width)).astype(np.float32)
    tokens = random.integers(0, 61, fed + 1)
    embedding = checkpoint.embedding
    if embedding is None:
        embedding = random.normal(size=(61, head.width)).astype(np.float32)
    truth = torch_draft(head, embedding, features, tokens[1:], depth)

    drafter = Eagle3Drafter(checkpoint.config, Chain(depth))
    params = jax.tree.map(
        jnp.asarray,
        {"head": checkpoint.head, "embedding": embedding, "draft_to_target": checkpoint.draft_to_target},
    )

    @jax.jit
    def run(params: Any, state: Any, features: jax.Array, tokens: jax.Array) -> Any:
        network = bind(Eagle3Head, checkpoint.config, FLOAT32, params["head"])
        memories = [BlockMemory(mask=causal_mask(fed))] * head.layers
        fused = network.fuse(features)
        output, _ = network(params["embedding"][tokens[:, 1:]], fused, jnp.arange(fed)[None], memories)
        seen = Observation(
            tokens=tokens[:, :-1], features=features, length=jnp.full((1,), fed), next_token=tokens[:, -1]
        )
        state = drafter.observe(params, state, seen)
        keys = jax.random.split(jax.random.key(0), 1)
        return network.logits(output), drafter.propose(params, state, keys, SamplingParams()).tokens

    logits, drafted = run(
        params, drafter.init(params, 1, 16), jnp.asarray(features)[None], jnp.asarray(tokens, jnp.int32)[None]
    )
    assert_close(logits[0], truth.logits)
    assert drafted[0, 1:].tolist() == truth.tokens


@pytest.mark.parametrize("to", ["jax", "eagle", "sglang", "vllm"])
@pytest.mark.parametrize("name", HALVES)
def test_a_head_round_trips_bit_equal_or_is_refused_by_flag(tmp_path: Path, name: str, to: str) -> None:
    directory = HALVES[name].write(tmp_path / "head")
    source = conversion.read_head(directory, TARGET)
    assert source.dtype == "bfloat16"
    if name in NOT_EXPRESSIBLE[to]:
        with pytest.raises(CheckpointError, match=NOT_EXPRESSIBLE[to][name]):
            conversion.convert(directory, tmp_path / "out", to, TARGET)
        assert not (tmp_path / "out").exists()
        return
    conversion.convert(directory, tmp_path / "out", to, TARGET)
    again = conversion.read_head(tmp_path / "out", TARGET)
    assert again.config == source.config
    assert again.dialect == to
    assert same_params(source.head, again.head)
    np.testing.assert_array_equal(source.draft_to_target, again.draft_to_target)
    assert again.draft_to_target.dtype == np.int32
    assert (again.embedding is None) == (source.embedding is None)
    if source.embedding is not None:
        assert same_params({"embedding": source.embedding}, {"embedding": again.embedding})


@pytest.mark.parametrize("dialect", ["eagle", "sglang", "speculators", "modelopt"])
@pytest.mark.parametrize("name", ["official", "norm_before_residual", "qk_norm", "own embedding, other width"])
def test_every_dialect_gives_the_same_head(tmp_path: Path, name: str, dialect: str) -> None:
    head = HEADS[name]
    first = conversion.read_head(head.write(tmp_path / "first"), TARGET)
    second = conversion.read_head(head.write(tmp_path / "second", dialect), TARGET)
    assert second.dialect == dialect
    assert first.config == second.config
    assert same_params(first.head, second.head)
    np.testing.assert_array_equal(first.draft_to_target, second.draft_to_target)


def test_draft_ids_are_absolute_in_memory(tmp_path: Path) -> None:
    head = Head()
    tensors = head.tensors()
    checkpoint = conversion.read_head(head.write(tmp_path / "head"), TARGET)
    np.testing.assert_array_equal(checkpoint.draft_to_target, np.flatnonzero(tensors["t2d"]))


def test_auxiliary_layers_may_stand_in_any_order_and_place(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head")
    assert conversion.read_head(directory, TARGET).config.aux_layers == (2, 4, 5)
    edit_config(directory, eagle_aux_hidden_state_layer_ids=[6, 0, 3])
    assert conversion.read_head(directory, None).config.aux_layers == (0, 3, 6)
    edit_config(directory, eagle_aux_hidden_state_layer_ids=None, eagle_config={"layer_ids": [7, 8, 1]})
    assert conversion.read_head(directory, TARGET).config.aux_layers == (1, 7, 8)


def test_speculators_heads_normalise_the_residual_unless_they_say_otherwise(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head", "speculators")
    assert not conversion.read_head(directory, TARGET).config.norm_before_residual
    edit_config(directory, norm_before_residual=None)
    assert conversion.read_head(directory, TARGET).config.norm_before_residual


def test_the_number_of_layers_comes_from_the_tensors(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head")
    edit_config(directory, num_hidden_layers=40)
    assert conversion.read_head(directory, TARGET).config.num_layers == 1


def test_sglang_names_of_further_layers_are_understood(tmp_path: Path) -> None:
    head = Head(layers=2)
    tensors = {}
    for name, value in head.tensors().items():
        new = name.replace("layers.1.", "additional_layers.0.")
        tensors["model." + new.replace("0.input_layernorm", "0.hidden_norm")] = value
    first = conversion.read_head(head.write(tmp_path / "first"), TARGET)
    tensors["lm_head.weight"] = tensors.pop("model.lm_head.weight")
    tensors |= {name: tensors.pop(f"model.{name}") for name in ("d2t", "t2d")}
    second = conversion.read_head(write_checkpoint(tmp_path / "second", head.config(), tensors), TARGET)
    assert same_params(first.head, second.head)


def other(value: np.ndarray, **changes: Any) -> np.ndarray:
    """A copy with elements replaced: ``_3=7`` sets element 3."""
    value = value.copy()
    for index, element in changes.items():
        value[int(index[1:])] = element
    return value


TENSORS = Head().tensors()
OFFSETS, MASK = TENSORS["d2t"], TENSORS["t2d"]
LEFT = int(np.flatnonzero(~MASK)[0])
MATRIX = np.ones((32, 64), np.float32)
HEAD_REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no d2t": ({}, {"d2t": None}, "no d2t, but its draft vocabulary of 40 is smaller than the target's 61"),
    "d2t out of range": ({}, {"d2t": other(OFFSETS, _39=40)}, "draft id 39 to target id 79, out of range"),
    "absolute d2t": ({}, {"d2t": OFFSETS + np.arange(40)}, "d2t must hold offsets"),
    "d2t duplicates": ({}, {"d2t": other(OFFSETS, _1=OFFSETS[0] - 1)}, "d2t has duplicates"),
    "d2t shape": ({}, {"d2t": OFFSETS[:39]}, r"d2t is int64\[39\]; expected whole numbers of shape \[40\]"),
    "d2t floats": ({}, {"d2t": OFFSETS.astype(np.float32)}, "d2t is float32"),
    "t2d count": ({}, {"t2d": ~np.zeros_like(MASK)}, "t2d marks 61 tokens but d2t maps 40"),
    "t2d contradicts": (
        {},
        {"t2d": other(MASK, **{f"_{LEFT}": True, f"_{np.flatnonzero(MASK)[0]}": False})},
        "which t2d does not mark",
    ),
    "t2d numbers": ({}, {"t2d": MASK.astype(np.int64)}, "t2d is int64"),
    "no lm_head": ({}, {"lm_head__weight": None}, "no lm_head.weight"),
    "missing norm": ({}, {"midlayer__hidden_norm__weight": None}, r"misses layers\.0\.hidden_norm\.weight"),
    "unexpected": ({}, {"fc__bias": np.ones(32, np.float32)}, r"unexpected fc\.bias"),
    "both names": ({}, {"layers__0__hidden_norm__weight": np.ones(32, np.float32)}, "mean the same tensor"),
    "gap": ({}, {"layers__2__hidden_norm__weight": np.ones(32, np.float32)}, r"numbered \[0, 2\]"),
    "fc shape": ({}, {"fc__weight": MATRIX}, r"fc\.weight has shape \[32, 64\]; config.json asks for \[32, 96\]"),
    "integer weight": ({}, {"norm__weight": np.ones(32, np.int8)}, r"norm\.weight is stored as int8"),
    "other vocabulary": ({"vocab_size": 62}, {}, "vocabulary of 62 but the target has 61"),
    "other width": ({"target_hidden_size": 48}, {}, "width 48 but the target has 32"),
    "deep aux": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, {}, "auxiliary layer 9 but the target has 8"),
    "double aux": ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, {}, "expected distinct layers"),
    "odd aux": ({"eagle_aux_hidden_state_layer_ids": ["2"]}, {}, "expected a list of layer numbers"),
    "contradicting aux": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_config": {"layer_ids": [2, 3, 4]}},
        {},
        "they must agree",
    ),
    "contradicting count": ({"num_aux_hidden_states": 4}, {}, "num_aux_hidden_states is 4"),
    "contradicting flag": (
        {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
        {},
        "norm_before_fc is True",
    ),
    "no features": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state is false"),
    "no last norm": ({"eagle_config": {"use_last_layernorm": False}}, {}, "use_last_layernorm is False"),
    "sliding": ({"layer_types": ["sliding_attention"]}, {}, "'sliding_attention'"),
    "logit scale": ({"logit_scale": 2.0}, {}, "logit_scale is 2.0"),
    "activation": ({"hidden_act": "relu"}, {}, "hidden_act is 'relu'"),
    "architecture": ({"model_type": "deepseek_v3"}, {}, "model_type is 'deepseek_v3'"),
    "qwen3 without head_dim": ({"model_type": "qwen3"}, {}, "has no head_dim"),
    "no eps": ({"rms_norm_eps": None}, {}, "has no rms_norm_eps"),
    "draft vocabulary too large": ({"draft_vocab_size": 62}, {}, "draft_vocab_size is 62"),
    "two input norms": ({"fc_norm": True, "norm_before_fc": True}, {}, "exclude each other"),
    "flag without tensors": ({"fc_norm": True}, {}, r"misses fc_norm\.0\.weight"),
    "embedding shape": ({}, {"embed_tokens__weight": np.ones((60, 32), np.float32)}, r"shape \[60, 32\]"),
}


@pytest.mark.parametrize("name", HEAD_REFUSALS)
def test_a_head_that_does_not_add_up_is_refused(tmp_path: Path, name: str) -> None:
    fields, tensors, message = HEAD_REFUSALS[name]
    directory = Head().write(tmp_path / "head")
    edit_config(directory, **fields)
    if tensors:
        edit_tensors(directory, **tensors)
    with pytest.raises(CheckpointError, match=message) as refusal:
        conversion.read_head(directory, TARGET)
    assert "\n" not in str(refusal.value)


def test_a_full_draft_vocabulary_must_not_be_reordered(tmp_path: Path) -> None:
    directory = Head(draft_vocab=61).write(tmp_path / "head")
    edit_tensors(directory, d2t=np.zeros(61, np.int64), t2d=np.ones(61, np.bool_))
    conversion.read_head(directory, TARGET)
    edit_tensors(directory, d2t=60 - 2 * np.arange(61))
    with pytest.raises(CheckpointError, match="reorders tokens"):
        conversion.read_head(directory, TARGET)


def test_a_head_of_another_width_needs_its_own_embedding(tmp_path: Path) -> None:
    directory = HEADS["own embedding, other width"].write(tmp_path / "head")
    edit_tensors(directory, embed_tokens__weight=None)
    with pytest.raises(CheckpointError, match=r"no embed_tokens\.weight, but its width 48 differs from"):
        conversion.read_head(directory, TARGET)


def test_defaulted_auxiliary_layers_need_a_target_deep_enough(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head")
    with pytest.raises(conversion.TargetNeededError, match="give the target as well"):
        conversion.read_head(directory)
    with pytest.raises(CheckpointError, match="a target of 6 layers is too shallow"):
        conversion.read_head(directory, dataclasses.replace(TARGET, layers=TARGET.layers[:6]))


def test_official_layout_refuses_layers_that_are_the_default_of_another_depth(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head")
    edit_config(directory, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    deeper = dataclasses.replace(TARGET, layers=TARGET.layers[:1] * 10)
    with pytest.raises(CheckpointError, match=r"aux_layers \(2, 4, 5\)"):
        conversion.convert(directory, tmp_path / "out", "eagle", deeper)


def test_official_layout_refuses_rope_that_it_reads_otherwise(tmp_path: Path) -> None:
    directory = Head().write(tmp_path / "head")
    edit_config(directory, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(CheckpointError, match="linear rope with rope_theta 500"):
        conversion.convert(directory, tmp_path / "a", "eagle", TARGET)
    edit_config(directory, rope_scaling={key: value for key, value in LLAMA3.items() if key != "rope_theta"})
    with pytest.raises(CheckpointError, match="rope type 'llama3'"):
        conversion.convert(directory, tmp_path / "b", "eagle", TARGET)


def test_official_layout_refuses_a_free_head_dim(tmp_path: Path) -> None:
    directory = Head(head_dim=16).write(tmp_path / "head")
    with pytest.raises(CheckpointError, match="head_dim 16"):
        conversion.convert(directory, tmp_path / "out", "eagle", TARGET)


def test_exported_configurations_say_what_engines_read(tmp_path: Path) -> None:
    directory = Head(aux=(0, 3, 5, 8), norm_before_residual=True).write(tmp_path / "head")
    conversion.convert(directory, tmp_path / "vllm", "vllm", TARGET)
    values = json.loads((tmp_path / "vllm/config.json").read_text())
    ids = [0, 3, 5, 8]
    assert (
        values["eagle_aux_hidden_state_layer_ids"] == values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
    )
    assert values["num_aux_hidden_states"] == 4
    assert values["norm_before_residual"] is True
    assert values["norm_output"] is False
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 10_000.0
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]


def foreign(directory: Path, kind: str) -> Path:
    config: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    one = np.ones((4, 4), np.float32)
    layer = {f"layers.0.self_attn.{name}_proj.weight": one for name in "qkvo"}
    if kind == "EAGLE-1/2":
        return write_checkpoint(directory, config, {"fc.weight": one, "fc.bias": one[0], **layer})
    if kind == "Medusa":
        return write_checkpoint(directory, {"medusa_num_heads": 1}, {"0.0.linear.weight": one, "0.1.weight": one})
    if kind == "P-EAGLE":
        return write_checkpoint(directory, config, Head().tensors() | {"mask_hidden": one})
    if kind == "DFlash":
        return write_checkpoint(directory, {"dflash_config": {}, **config}, {"fc.weight": one, **layer})
    return write_llama(directory)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("EAGLE-1/2", "is an EAGLE-1/2 head.*this loads EAGLE-3 heads only"),
        ("Medusa", "is a Medusa head"),
        ("P-EAGLE", "is a P-EAGLE head"),
        ("DFlash", "is a DFlash drafter"),
        ("language model", "is a language model, not a draft head; give it as the target"),
    ],
)
def test_another_kind_of_checkpoint_is_no_head_but_is_described(tmp_path: Path, kind: str, message: str) -> None:
    directory = foreign(tmp_path / "other", kind)
    with pytest.raises(CheckpointError, match=message):
        conversion.read_head(directory, TARGET)
    description = conversion.describe(directory)
    if kind == "language model":
        assert description.kind == "target: Llama"
        assert description.loadable
    else:
        assert kind in description.kind
        assert not description.loadable
        assert "not loadable here" in description.kind
        assert description.problem
        with pytest.raises(CheckpointError, match="not a target"):
            conversion.read_target(directory)
        with pytest.raises(CheckpointError, match="only EAGLE-3 heads and targets"):
            conversion.convert(directory, tmp_path / "out", "jax")


def test_a_head_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is an EAGLE-3 head, not a target"):
        conversion.read_target(Head().write(tmp_path / "head"))
    conversion.convert(tmp_path / "head", tmp_path / "native", "jax", TARGET)
    with pytest.raises(CheckpointError, match="give it as the drafter"):
        conversion.read_target(tmp_path / "native")


def test_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "vision", {"model_type": "vit"}, {"patches.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="neither a target nor a draft head"):
        conversion.describe(directory)


# ---------------------------------------------------------------------------------------------------- describe


@pytest.mark.parametrize("layout", ["huggingface", "native"])
def test_a_description_counts_what_is_stored(tmp_path: Path, layout: str) -> None:
    head = Head(dtype=ml_dtypes.bfloat16)
    directory = head.write(tmp_path / "head")
    if layout == "native":
        conversion.convert(directory, tmp_path / "native", "jax", TARGET)
        directory = tmp_path / "native"
    description = conversion.describe(directory)
    floats = sum(value.size for name, value in head.tensors().items() if name not in ("d2t", "t2d"))
    assert description.kind == "draft head: EAGLE-3"
    assert description.loadable
    assert description.num_parameters == floats
    assert description.dtypes == {"bfloat16": floats}
    assert not description.has_tokenizer
    assert json.loads(json.dumps(description.to_json()))["num_tensors"] == (11 if layout == "native" else 15)


# ---------------------------------------------------------------------------------------------------- doctor


def statuses(checks: list[conversion.Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def detail(checks: list[conversion.Check], name: str) -> str:
    return next(check.detail for check in checks if check.name == name)


def test_the_doctor_reports_what_cannot_be_read_and_skips_the_rest(tmp_path: Path) -> None:
    target, head = write_llama(tmp_path / "target"), foreign(tmp_path / "eagle1", "EAGLE-1/2")
    checks = conversion.diagnose(target, head)
    assert statuses(checks)["target"] == "ok"
    assert statuses(checks)["generation of the head"] == "failure"
    assert "EAGLE-1/2" in detail(checks, "generation of the head")
    assert {check.status for check in checks[2:]} == {"skipped"}
    assert statuses(conversion.diagnose(tmp_path / "nowhere", head))["target"] == "failure"


def test_the_doctor_names_each_suspicion(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    edit_config(target, max_position_embeddings=128, rope_theta=500.0)
    (target / "tokenizer.json").write_text("{}")
    head = Head(dtype=np.float16, norm_output=True).write(tmp_path / "head", "sglang")
    (head / "tokenizer.json").write_text("{} ")
    edit_tensors(
        head,
        d2t=np.zeros(40, np.int64),
        t2d=np.arange(61) < 40,
        norm__weight=np.ones(32, np.float16),
        fc__weight=np.full((32, 96), np.nan, np.float16),
        embed_tokens__weight=np.ones((61, 32), np.float16),
    )
    edit_config(head, eagle_aux_hidden_state_layer_ids=[1, 4, 5])
    checks = conversion.diagnose(target, head)
    found = statuses(checks)
    expected = {
        "widths": "differs from the target's",
        "vocabulary": "d2t is all zero",
        "auxiliary layers": r"try \[2, 5, 6\]",
        "norm flags": "old SpecForge files",
        "rope": "theta 500",
        "positions": "head 64, target 128",
        "dtype": "head float16, target float32",
        "tokenizer": "at the target but",
        "chat template": "the target has none",
    }
    for name, message in expected.items():
        assert found[name] == "warning", name
        assert re.search(message, detail(checks, name)), name
    assert found["weights of the head"] == "failure"
    assert "fc.kernel holds NaN" in detail(checks, "weights of the head")
    assert found["agreement"] == "skipped"


@pytest.mark.parametrize(
    ("rates", "cause"),
    [((0.0, 0.0, 0.0), "d2t"), ((0.6, 0.05, 0.0), "feedback norm"), ((0.6, 0.5, 0.4), None)],
)
def test_the_signature_of_rates_suggests_the_cause(rates: tuple[float, ...], cause: str | None) -> None:
    found = suspected_cause(Agreement(rates=rates, counts=(100, 60, 30)))
    assert found is None if cause is None else cause in (found or "")


@pytest.mark.skipif(not (GOLDEN / "vllm").exists(), reason="golden checkpoints are not here")
def test_the_doctor_tells_a_healthy_pair_from_a_lost_map(tmp_path: Path) -> None:
    trace = json.loads((GOLDEN / "vllm/trace_eagle3_k3_float32.json").read_text())
    prompts = [request["prompt"] for request in trace["requests"]][:4]
    checks = conversion.diagnose(GOLDEN / "vllm/target", GOLDEN / "vllm/eagle3", prompts=prompts)
    assert statuses(checks)["agreement"] == "ok"
    assert "failure" not in statuses(checks).values()

    target = conversion.read_target(GOLDEN / "vllm/target")
    head = conversion.read_head(GOLDEN / "vllm/eagle3", target.config)
    lost = dataclasses.replace(head, draft_to_target=np.roll(head.draft_to_target, 1))
    agreement = forced_agreement(target, lost, prompts)
    assert "d2t" in (suspected_cause(agreement) or "")
