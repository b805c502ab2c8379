"""Heads with windows, sinks and latent attention: trees, training, files and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import tiny
import torch
from checkpoints import (
    TARGET,
    Head,
    TorchHead,
    assert_close,
    edit_config,
    edited,
    loaded_head,
    refused,
    same_head,
    target_tables,
    write_checkpoint,
    write_llama,
)

from eagle3_jax import conversion
from eagle3_jax.conversion.heads import eagle3
from eagle3_jax.models.config import grouped
from eagle3_jax.training import ttt
from eagle3_jax.training.batches import TTTBatch

pytestmark = pytest.mark.torch

LATENT = (10, 12, 6, 4, 5)
HEADS = {
    "a window": Head(windows=(2,), draft_vocab=61),
    "sinks and windows": Head(layers=2, windows=(3, None), sinks=True, draft_vocab=61),
    "latent attention": Head(latent=LATENT, draft_vocab=61),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_tree_is_that_of_the_torch_twin(name: str) -> None:
    """Two rounds; the second follows the draft of the first. A node sees its own path."""
    head = HEADS[name]
    random = np.random.default_rng(5)
    features = random.normal(size=(11, 3, head.target_width)).astype(np.float32)
    tokens = random.integers(0, 61, 11)
    network = TorchHead(head, target_tables()[0])

    def after(path: tuple[int, ...], length: int) -> list[int]:
        """Returns the drafted tokens by rank below a path of ranks."""
        ids = torch.from_numpy(tokens[1 : length + 1]).long()
        stream = network.fuse(features[:length])
        for rank in path:
            out = network.run(ids, stream)
            best = network.logits(out)[-1].argsort(descending=True)
            ids = torch.cat([ids, best[rank : rank + 1]])
            stream = torch.cat([stream, out[-1:]])
        return network.logits(network.run(ids, stream))[-1].argsort(descending=True).tolist()

    drafter, params = loaded_head(head.write, tiny.STATIC_TREE)
    state = drafter.init(params, 1, 24)
    for (length,), seen in tiny.ragged_rounds(tokens[None], features[None], [[7], [3]]):
        draft = tiny.next_draft(drafter, params, state, seen)
        state = draft.state
        expected = [after(path[:-1], length)[path[-1]] for path in tiny.STATIC_TREE.paths]
        assert draft.tokens[0, 1:].tolist() == expected


@pytest.mark.parametrize("name", HEADS)
def test_each_step_of_training_is_a_draft_of_the_torch_twin(name: str) -> None:
    """Row ``t`` of step ``k`` follows the true pairs 0 to ``t`` and ``k`` guesses."""
    head = HEADS[name]
    steps = 3
    size = 7
    random = np.random.default_rng(3)
    features = random.normal(size=(size, 3, head.target_width)).astype(np.float32)
    tokens = random.integers(0, 61, size)
    drafter, params = loaded_head(head.write)
    every = jnp.ones((1, size), jnp.bool_)
    ids = jnp.asarray(tokens[None], jnp.int32)
    batch = TTTBatch(tokens=ids, attention_mask=every, loss_mask=every)
    logits = jax.jit(ttt.unroll, static_argnums=(0, 5))(
        drafter, params["head"], params["embedding"], features[None], batch, steps
    )

    network = TorchHead(head, target_tables()[0])
    fused = network.fuse(features)
    known = torch.from_numpy(tokens).long()
    for row in range(size - steps):
        stream = fused[: row + 1]
        for step in range(steps):
            out = network.run(known[1 : row + step + 2], stream)
            assert_close(logits[step][0, row], network.logits(out)[-1].numpy())
            stream = torch.cat([stream, out[-1:]])


LATENT_HEAD = Head(latent=LATENT)
ATTENTION = "layers__0__self_attn__"


@pytest.mark.parametrize("name", ["fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"])
def test_a_fused_product_is_read_as_its_two_parts(tmp_path: Path, name: str) -> None:
    """As vLLM and as SGLang name it: the rows of the queries' latent first."""
    tensors = LATENT_HEAD.tensors()
    parts = [tensors.pop(f"midlayer.self_attn.{part}.weight") for part in PARTS]
    fused = {**tensors, f"midlayer.self_attn.{name}.weight": np.concatenate(parts)}
    first = write_checkpoint(tmp_path / "fused", LATENT_HEAD.config(), fused)
    second = LATENT_HEAD.write(tmp_path / "apart")
    assert same_head(*(conversion.read_head(path, TARGET) for path in (first, second)))


PARTS = ("q_a_proj", "kv_a_proj_with_mqa")


def test_the_doctor_and_the_planner_take_a_latent_head(tmp_path: Path, cli: Any) -> None:
    target = write_llama(tmp_path / "target")
    head = LATENT_HEAD.write(tmp_path / "head")
    checks = {check.name: check for check in conversion.diagnose(target, head)}
    assert all(check.status != "failure" for check in checks.values()), checks
    assert checks["rope"].detail == "head: default, theta 10000; target: default, theta 10000"

    code, out, _ = cli(
        "plan", "memory", "--target", target, "--drafter", head, "--gpu", "H100", "--json"
    )
    assert code == 0
    # A latent of 12 channels and a key of 4, of two bytes each.
    assert json.loads(out)["drafter_cache_bytes_per_token"] == 2 * (12 + 4)

    smaller = write_llama(tmp_path / "other", dataclasses.replace(TARGET, vocab_size=60))
    checks = {check.name: check for check in conversion.diagnose(smaller, head)}
    assert "a vocabulary of 61 but the target has 60" in checks["head"].detail


def test_names_of_the_first_eagle31_heads_are_understood(tmp_path: Path) -> None:
    """SGLang reads them for ``fc_norm``, and ModelOpt counts layers of ``midlayer``."""
    head = Head(fc_norm=True, layers=2)
    tensors = {}
    for name, tensor in head.tensors().items():
        for index, chunk in enumerate(("low", "mid", "high")):
            name = name.replace(f"fc_norm.{index}", f"aux_norm_{chunk}")
        tensors[name.replace("midlayer.", "midlayer.0.").replace("layers.1.", "midlayer.1.")] = (
            tensor
        )
    config = {**head.config(), "use_aux_norm": True}
    del config["fc_norm"]
    first = write_checkpoint(tmp_path / "first", config, tensors)
    second = head.write(tmp_path / "second")
    assert same_head(*(conversion.read_head(path, TARGET) for path in (first, second)))


def test_fields_say_which_layers_have_sinks(tmp_path: Path) -> None:
    """MiMo's fields and its name of the tensor; a field has priority over the tensors."""
    head = Head(layers=2, windows=(3, None), sinks=True)
    tensors = {
        name.replace(".sinks", ".attention_sink_bias"): tensor
        for name, tensor in head.tensors().items()
    }
    fields = {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
    directory = write_checkpoint(tmp_path / "head", head.config() | fields, tensors)
    refused(
        lambda path: conversion.read_head(path, TARGET), directory, "unexpected layers.1.*sinks"
    )

    del tensors["layers.1.self_attn.attention_sink_bias"]
    write_checkpoint(directory, head.config() | fields, tensors)
    config = conversion.read_head(directory, TARGET).config
    assert [grouped(layer).sinks for layer in config.layers] == [True, False]


MROPE = {"type": "mrope", "mrope_section": [1, 1, 2]}


def test_mrope_of_a_head_is_the_usual_one(tmp_path: Path) -> None:
    first = Head(theta=500.0).write(tmp_path / "first")
    second = Head(theta=500.0).write(tmp_path / "second")
    edit_config(second, rope_scaling=MROPE)
    assert same_head(*(conversion.read_head(path, TARGET) for path in (first, second)))


# Fields and tensors of a head, and what the refusal says.
REFUSALS: dict[str, tuple[Head, dict[str, Any], dict[str, Any], str]] = {
    "a window of zero": (
        Head(windows=(3,)),
        {"sliding_window": 0},
        {},
        "sliding_window is 0; expected a whole number from 1",
    ),
    "sinks of another number": (
        Head(sinks=True),
        {},
        {f"{ATTENTION}sinks": np.ones(3, np.float32), "midlayer__self_attn__sinks": None},
        r"layers\.0\.self_attn\.sinks .* \[3\].*\[4\]",
    ),
    "sinks that are said and missing": (
        Head(),
        {"attention_sink_bias": True},
        {},
        r"misses layers\.0\.self_attn\.sinks",
    ),
    "an unknown field": (
        Head(),
        {"attention_value_scale": 0.7},
        {},
        "attention_value_scale is 0.7, which is not read in an EAGLE-3 head; remove it",
    ),
    "another rank of keys": (
        LATENT_HEAD,
        {"kv_lora_rank": 11},
        {},
        r"kv_a_proj_with_mqa\.weight .*\[16, 64\].*\[15, 64\]",
    ),
    "another rank of queries": (
        LATENT_HEAD,
        {"q_lora_rank": 9},
        {},
        r"q_a_proj\.weight .*\[10, 64\].*\[9, 64\]",
    ),
    "no rank of queries": (LATENT_HEAD, {"q_lora_rank": 0}, {}, "q_lora_rank is 0; expected"),
    "a window of latents": (
        LATENT_HEAD,
        {"sliding_window": 3},
        {},
        "sliding_window is 3; only full attention",
    ),
    "biases of latents": (LATENT_HEAD, {"attention_bias": True}, {}, "attention_bias is True"),
    "an index": (LATENT_HEAD, {"index_topk": 8}, {}, "index_topk is 8; heads with an index"),
    "channels in halves": (LATENT_HEAD, {"rope_interleave": False}, {}, "rope_interleave is False"),
    "a gate": (
        LATENT_HEAD,
        {},
        {f"{ATTENTION}g_proj__weight": np.ones((20, 64), np.float32)},
        r"unexpected layers\.0\.self_attn\.g_proj\.weight",
    ),
    "speculators' layout": (
        LATENT_HEAD,
        {"speculators_model_type": "eagle3", "transformer_layer_config": LATENT_HEAD.config()},
        {},
        "latent attention in speculators' layout",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_head_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    head, fields, tensors, message = REFUSALS[name]
    directory = edited(head.write(tmp_path / "head"), fields, tensors)
    refused(lambda path: conversion.read_head(path, TARGET), directory, message)


def test_a_latent_head_is_not_written_where_engines_would_read_another(tmp_path: Path) -> None:
    head = conversion.read_head(LATENT_HEAD.write(tmp_path / "head"), TARGET)
    (layer,) = head.config.layers
    mixer = dataclasses.replace(layer.mixer, norm_eps=1e-6)
    config = dataclasses.replace(
        head.config, layers=(dataclasses.replace(layer, mixer=mixer),), norm_before_fc=True
    )
    with pytest.raises(conversion.CheckpointError, match="norm_before_fc; norms of latents with"):
        eagle3.write(dataclasses.replace(head, config=config), "vllm")
