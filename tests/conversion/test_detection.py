"""The files of a directory determine the drafting method; others are refused in one line."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    TARGET,
    Head,
    edit_config,
    edit_tensors,
    refused,
    write_checkpoint,
    write_llama,
)
from heads_on_disk import (
    ASSISTANT,
    CHECKPOINTS,
    DFLASH,
    DFLASH2,
    DRAFT_MODEL,
    DSPARK,
    EAGLE1,
    EAGLE3,
    JETSPEC,
    MEDUSA,
    MTP_HEAD,
    P_EAGLE,
)

from eagle3_jax import LoadedTarget, SpeculativeDecoder, conversion, load_drafter, load_target
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.load import named_drafter
from eagle3_jax.topology import DynamicTree

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def target(directory: Path) -> LoadedTarget:
    return load_target(directory)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_loaded_drafter_is_described_by_its_method(
    tmp_path: Path, target: LoadedTarget, name: str
) -> None:
    directory = CHECKPOINTS[name](tmp_path / "drafter")
    decoder = SpeculativeDecoder(target, load_drafter(directory, target=target))
    # All rows of a block, all heads of Medusa, or the default.
    length = {DFLASH: 4, ASSISTANT: 4, JETSPEC: 4, DSPARK: 5, DFLASH2: 4}.get(name, 3)
    assert decoder.method == f"{name}, chain K={length}, greedy draft sampling"
    assert re.fullmatch(
        "every row sees its whole block.*" if name in (DFLASH, ASSISTANT, DSPARK, DFLASH2) else "",
        decoder.drafter.note,
    )

    description = conversion.describe(directory)
    assert description.loadable
    assert {DRAFT_MODEL: "may be given as the drafter", DFLASH: "draft 4 tokens"}.get(
        name, ""
    ) in description.note


def test_a_drafter_without_files_is_described_by_its_method(target: LoadedTarget) -> None:
    methods = {
        "ngram": "NGram, chain K=3",
        "suffix": "Suffix, chain K=3",
        "layer-skip=2": "layer skip (2 of 8 layers), chain K=3, greedy draft sampling",
        "none": "none",
    }
    for name, method in methods.items():
        assert SpeculativeDecoder(target, named_drafter(name, target)).method == method

    tree = DynamicTree(num_nodes=9, max_depth=3, top_k=3)
    decoder = SpeculativeDecoder(target, named_drafter("layer-skip=2", target), tree=tree)
    assert (
        decoder.method
        == "layer skip (2 of 8 layers), tree of 9 nodes, 3 deep, greedy draft sampling"
    )


BLOCK = {
    "dflash_config": {"mask_token_id": 57, "target_layer_ids": [1, 2, 3]},
    "block_size": 4,
    "rope_theta": 1e4,
}
# The head, fields that make it look like another one, and the refusal.
# fmt: off
MIXTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "EAGLE-1 as EAGLE-3": (
        EAGLE1,
        {"architectures": ["LlamaForCausalLMEagle3"]},
        "named as those of EAGLE-1/2 heads are",
    ),
    "EAGLE-3 as P-EAGLE": (
        EAGLE3, {"ptd_token_id": 57}, "misses mask_hidden.* named as those of EAGLE-3 heads"
    ),
    "P-EAGLE as EAGLE-3": (
        P_EAGLE, {"speculators_model_type": "eagle3"}, "only 'peagle' heads have"
    ),
    "EAGLE-3 as DFlash": (
        EAGLE3, BLOCK, "named as those of EAGLE-3 heads are, .* describes DFlash"
    ),
    "MTP as Medusa": (
        MTP_HEAD,
        {"medusa_num_heads": 3, "medusa_num_layers": 1},
        "named as those of MTP heads are, .* describes Medusa",
    ),
    "DFlash as MTP": (
        DFLASH, {"speculators_model_type": "mtp"}, "named as those of DFlash heads are, .* MTP"
    ),
}
# fmt: on


@pytest.mark.parametrize("name", MIXTURES)
def test_files_of_two_methods_are_refused(tmp_path: Path, name: str) -> None:
    head, fields, message = MIXTURES[name]
    directory = CHECKPOINTS[head](tmp_path / "head")
    edit_config(directory, **fields)
    refused(lambda path: conversion.read_head(path, TARGET), directory, message)


def test_a_damaged_head_is_not_taken_for_another_method(tmp_path: Path) -> None:
    head = Head().write(tmp_path / "head")
    edit_tensors(head, norm__weight=np.ones(3, np.float32))
    with pytest.raises(CheckpointError, match=r"norm\.weight") as refusal:
        conversion.read_head(head, TARGET)
    assert "named as those" not in str(refusal.value)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_target_of_another_vocabulary_or_width_is_refused(tmp_path: Path, name: str) -> None:
    drafter = CHECKPOINTS[name](tmp_path / "drafter")
    mixer = dataclasses.replace(TARGET.layers[0].mixer, head_dim=12)
    wide = tuple(dataclasses.replace(layer, mixer=mixer) for layer in TARGET.layers)
    cases = [({"vocab_size": 60}, "60")]
    if name != DRAFT_MODEL:
        cases.append(({"width": 48, "layers": wide}, "features of width 32 but the target has 48"))
    for changes, message in cases:
        other_target = load_target(
            write_llama(tmp_path / "other", dataclasses.replace(TARGET, **changes))
        )
        with pytest.raises(ValueError, match=message):
            load_drafter(drafter, target=other_target)


OPTIONS = {
    (MEDUSA, "--num-speculative-tokens", "4"): "needs as many Medusa heads and there are 3",
    (
        MEDUSA,
        "--tree",
        "medusa-63",
    ): "--tree medusa-63: a draft of 4 tokens needs as many Medusa heads",
    (DFLASH, "--num-speculative-tokens", "5"): "a block of 5 predicts 4 tokens",
    ("ngram", "--draft-sampling", "probabilistic"): "NGram has no distribution to draw from",
}


@pytest.mark.parametrize("arguments", OPTIONS, ids=" ".join)
def test_an_option_that_a_method_does_not_support_is_refused(
    tmp_path: Path, directory: Path, cli: Any, arguments: tuple
) -> None:
    name, *options = arguments
    drafter = CHECKPOINTS[name](tmp_path / "drafter") if name in CHECKPOINTS else name
    prompt = ("--prompt-ids", "[1, 2]", "--max-new-tokens", "4")
    code, out, err = cli("generate", "--target", directory, "--drafter", drafter, *prompt, *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert OPTIONS[arguments] in err


@pytest.mark.torch
def test_a_description_needs_no_target() -> None:
    for head in ("eagle3", "eagle1"):  # the second is a pickle
        description = conversion.describe(OFFICIAL / head)
        assert (description.loadable, description.problem) == (True, "")
        assert "give the target as well" in description.note


def test_targets_heads_and_other_models_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="is a language model, not a draft head; give it as the target"
    ):
        conversion.read_head(write_llama(tmp_path / "other"), TARGET)
    description = conversion.describe(tmp_path / "other")
    assert description.kind == "target: Llama" and description.loadable
    conversion.convert(Head().write(tmp_path / "head"), tmp_path / "native", "jax", TARGET)
    for name in ("head", "native"):
        with pytest.raises(
            CheckpointError, match="is an EAGLE-3 head, not a target; give it as the drafter"
        ):
            conversion.read_target(tmp_path / name)
    patches = {"patches.weight": np.ones(3, np.float32)}
    with pytest.raises(CheckpointError, match="neither a target nor a draft head"):
        conversion.describe(write_checkpoint(tmp_path / "vision", {"model_type": "vit"}, patches))


@pytest.mark.parametrize("layout", ["huggingface", "native"])
def test_a_description_counts_stored_parameters(tmp_path: Path, layout: str) -> None:
    head = Head(dtype=ml_dtypes.bfloat16)
    directory = head.write(tmp_path / "head")
    if layout == "native":
        conversion.convert(directory, tmp_path / "native", "jax", TARGET)
        directory = tmp_path / "native"
    description = conversion.describe(directory)
    num_floats = sum(
        value.size for name, value in head.tensors().items() if name not in ("d2t", "t2d")
    )
    expected = {
        "kind": "draft head: EAGLE-3",
        "loadable": True,
        "num_parameters": num_floats,
        "dtypes": {"bfloat16": num_floats},
        "has_tokenizer": False,
        "num_tensors": 11 if layout == "native" else 15,
    }
    assert expected.items() <= json.loads(json.dumps(description.to_json())).items()


SPARK = {
    "model_type": "deepseek_v4",
    "dspark_block_size": 5,
    "num_nextn_predict_layers": 1,
    "vocab_size": 61,
}
BACKBONE = {"layers.0.attn.wq_a.weight": (4, 32), "embed.weight": (61, 32)}
DRAFTING = {"mtp.0.attn.wq_a.weight": (4, 32), "mtp.2.markov_head.markov_w1.weight": (61, 4)}


@pytest.mark.parametrize(
    ("fields", "shapes", "message"),
    [
        (SPARK, BACKBONE | DRAFTING, r"DeepSeek V4 is not read .*mtp.*DSpark, not MTP"),
        (
            {"model_type": "deepseek_v4"},
            BACKBONE,
            r"DeepSeek V4 is not read .*mtp.*, which are MTP",
        ),
        (
            SPARK,
            DRAFTING,
            r"mtp\.\* tensors that are DSpark, not MTP|is a DFlash head, not a target",
        ),
    ],
    ids=["with DSpark", "with MTP", "DSpark alone"],
)
def test_the_tensors_under_mtp_of_deepseek_v4_are_named_for_what_they_are(
    tmp_path: Path, fields: dict[str, Any], shapes: dict[str, Any], message: str
) -> None:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    directory = write_checkpoint(tmp_path / "files", fields, tensors)
    refused(lambda path: conversion.read_head(path, TARGET), directory, message)
    refused(conversion.read_target, directory, message)


def test_the_parameters_of_a_target_are_counted_without_its_module_that_drafts() -> None:
    directory = OFFICIAL.parent / "published" / "deepseek_v3_mtp1" / "target"
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    sizes = {
        name: value.size
        for name, value in read_tensors(directory).items()
        if not name.startswith(f"model.layers.{layers}.")
    }
    assert conversion.describe(directory).num_parameters == sum(sizes.values())
