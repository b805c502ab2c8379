"""MTP modules in the files of a target: what is read, named, converted and refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from checkpoints import edited, same_params, same_target, write_checkpoint

from eagle3_jax import conversion, load_drafter, load_target
from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.drafters import DraftModel, MTPDrafter

pytestmark = pytest.mark.core

RECORDINGS = tiny.GOLDEN / "published"
DEEPSEEK = RECORDINGS / "deepseek_v3_mtp2" / "target"
GLM = RECORDINGS / "glm4_moe_mtp1" / "target"
MELLUM = RECORDINGS / "mellum_mtp1" / "target"


def copied(source: Path, directory: Path) -> Path:
    shutil.copytree(source, directory)
    return directory


def test_the_targets_own_directory_and_a_name_give_its_modules(tmp_path: Path) -> None:
    target = load_target(GLM)
    for source in ("mtp", GLM, f"{GLM}/../target"):
        loaded = load_drafter(source, target=target)
        assert isinstance(loaded.drafter, MTPDrafter)
        assert loaded.described == "MTP in the target's files"
        assert "copies of the target's embedding" in loaded.note

    # Elsewhere they are those of another target, however equal the files are.
    elsewhere = load_drafter(copied(GLM, tmp_path / "glm"), target=target)
    assert isinstance(elsewhere.drafter, DraftModel)
    assert elsewhere.note.startswith("it holds 1 MTP module (--drafter mtp, for itself)")
    assert "2 MTP modules (--drafter mtp, for itself)" in conversion.describe(DEEPSEEK).note


def test_a_target_without_files_or_modules_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mtp' is in the target's own files, and target was not"):
        load_drafter("mtp", target=tiny.target())
    with pytest.raises(ValueError, match="holds no MTP modules; give the directory of a target"):
        load_drafter("mtp", target=load_target())
    conversion.convert(MELLUM, tmp_path / "native", "jax")
    with pytest.raises(ValueError, match="holds no MTP modules besides a target"):
        load_drafter("mtp", target=load_target(tmp_path / "native"))


WIDE = np.ones((64, 64), ml_dtypes.bfloat16)
REFUSALS: dict[str, tuple[Path, dict[str, Any], dict[str, Any], str]] = {
    "fewer than stated": (GLM, {"num_nextn_predict_layers": 2}, {}, "states 2 MTP modules, and the file holds 1;"),
    "more than stated": (DEEPSEEK, {"num_nextn_predict_layers": 1}, {}, "states 1 MTP module, and the file holds 2;"),
    "two by default": (DEEPSEEK, {"num_nextn_predict_layers": None}, {}, "states 1 MTP module, and the file holds 2;"),
    "two names": (GLM, {"num_mtp_layers": 2}, {}, "num_nextn_predict_layers is 1 and num_mtp_layers is 2; they must agree"),
    "width": (GLM, {}, {"model__layers__5__eh_proj__weight": WIDE}, r"5\.eh_proj\.weight has shape \[64, 64\]; .* \[56, 112\]"),
    "a norm": (GLM, {}, {"model__layers__5__enorm__weight": None}, r"misses model\.layers\.5\.enorm\.weight"),
    "an expert": (MELLUM, {}, {"mtp__layers__0__mlp__experts__5__up_proj__weight": None}, r"misses mtp\.layers\.0\.mlp\.experts\.5"),
    "another expert": (MELLUM, {}, {"mtp__layers__0__mlp__experts__6__up_proj__weight": WIDE}, r"unexpected mtp\.layers\.0\.mlp\.experts\.6"),
    "an embedding": (MELLUM, {"mtp_use_dedicated_embeddings": True}, {}, "mtp_use_dedicated_embeddings is True"),
    "a kind of layer": (MELLUM, {"mtp_layer_types": ["linear_attention"]}, {}, "layer_types has 'linear_attention'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_modules_that_do_not_add_up_are_refused_and_the_target_is_not(
    tmp_path: Path, name: str
) -> None:
    source, fields, tensors, says = REFUSALS[name]
    directory = edited(copied(source, tmp_path / "target"), fields, tensors)
    target = load_target(directory)
    with pytest.raises(ValueError, match=says) as refusal:
        load_drafter("mtp", target=target)
    assert "\n" not in str(refusal.value)


def test_a_file_without_the_tensors_has_no_modules_whatever_it_states(tmp_path: Path) -> None:
    """transformers writes the default number, and no modules."""
    tensors = {name: value for name, value in read_tensors(GLM).items() if "layers.5." not in name}
    directory = copied(GLM, tmp_path / "target")
    (directory / "model.safetensors").unlink()
    write_checkpoint(directory, {}, tensors)
    shutil.copy(GLM / "config.json", directory)
    assert same_target(conversion.read_target(directory), conversion.read_target(GLM))
    with pytest.raises(ValueError, match="holds no MTP modules"):
        load_drafter("mtp", target=load_target(directory))


def test_modules_become_a_native_drafter_and_no_layout_that_cannot_express_them(
    tmp_path: Path, cli: Any, refused: Any
) -> None:
    assert cli("convert", "mtp", tmp_path / "native", "--target", DEEPSEEK)[0] == 0
    target = load_target(DEEPSEEK)
    ours, again = (load_drafter(source, target=target) for source in ("mtp", tmp_path / "native"))
    assert ours.drafter == again.drafter
    assert same_params(ours.params, again.params)

    expressed = {
        DEEPSEEK: "2 modules; Latent attention with Experts",
        MELLUM: "GroupedQuery attention with Experts; a window",
    }
    for source, says in expressed.items():
        options = ("--target", source, "--to", "deepseek")
        line = refused("convert", "mtp", tmp_path / "out", *options)
        assert f"the 'deepseek' layout cannot express {says}; use --to jax" in line
    assert "add --target" in refused("convert", "mtp", tmp_path / "out")


def test_a_plan_counts_the_modules_that_a_configuration_states(cli: Any, refused: Any) -> None:
    code, out, _ = cli("plan", "memory", "--target", DEEPSEEK, "--drafter", "mtp", "--json")
    assert code == 0
    loaded = load_drafter("mtp", target=load_target(DEEPSEEK))
    count = sum(leaf.size for leaf in jax.tree.leaves(loaded.params["head"]))
    assert f'"drafter_parameters": {count}' in out
    assert "known by its layers alone" in refused(
        "plan", "memory", "--target", "llama-3.1-8b", "--drafter", "mtp"
    )


def test_files_of_two_kinds_of_drafters_are_refused(tmp_path: Path) -> None:
    module = {
        name: value
        for name, value in read_tensors(GLM).items()
        if name.startswith("model.layers.5")
    }
    eagle3 = {
        "midlayer.self_attn.q_proj.weight": WIDE,
        "fc.weight": WIDE,
        "d2t": np.zeros(8, np.int64),
    }
    directory = write_checkpoint(tmp_path / "both", {"model_type": "llama"}, module | eagle3)
    with pytest.raises(ValueError, match="holds an MTP module and a head of EAGLE-3; expected the"):
        load_drafter(directory, target=load_target(GLM))


def test_the_doctor_examines_modules_in_the_targets_files(cli: Any) -> None:
    code, out, _ = cli("doctor", "--target", MELLUM, "--drafter", "mtp", "--json")
    assert code == 0
    assert '"MTP modules in the target\'s files"' in out
