"""``eagle3 train head``: where a head begins, what of it is learned, and what is measured."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import edit_config, edit_tensors, same_params
from models_on_disk import write_chat_target, write_llama
from safetensors.numpy import load_file
from training_runs import kill_after, written_texts

import eagle3_jax as e3
from eagle3_jax.cli.train.files import read_texts, write_head
from eagle3_jax.cli.train.head import _continued, _head_to_continue
from eagle3_jax.training import features
from eagle3_jax.training.methods import RECIPES, HeadOptions

pytestmark = pytest.mark.usefixtures("optax_promotion")

SHAPE = ("--batch", 2, "--unroll", 2, "--dtype", "float32", "--store", "float32")
HEAD = (*SHAPE, "--draft-vocab-size", 32)
ONE_STEP = ("--steps", 1, "--warmup-steps", 0)
STILL = (
    *ONE_STEP, "--learning-rate", 1e-25, "--embedding-learning-rate", 1e-25, "--evaluate-every", 0
)  # fmt: skip


@pytest.fixture(scope="module")
def optax_promotion():
    """Optax raises floats to integer step counts, which the suite's strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A random target, texts that it wrote itself, and a head that has learned some of them."""
    from eagle3_jax.cli import run

    folder = tmp_path_factory.mktemp("files")
    target = write_llama(folder / "target", width=16)
    edit_config(target, eos_token_id=None)  # it would stop at once
    data = written_texts(folder / "data", writer=target)
    head = folder / "head"
    learning = ("--steps", 60, "--warmup-steps", 1, "--learning-rate", 0.02, "--evaluate-every", 0)
    with jax.numpy_dtype_promotion("standard"):
        assert (
            run(
                [
                    str(argument)
                    for argument in ("train", "head", target, data, head, *HEAD, *learning)
                ]
            )
            == 0
        )
    return SimpleNamespace(target=target, data=data, head=head)


def test_a_wrong_init_is_refused_before_the_target_is_loaded(
    refused, files, tmp_path, monkeypatch
) -> None:
    def load(*_: object, **options: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(e3, "load_target", load)
    absent = tmp_path / "absent"
    line = refused(
        "train", "head", files.target, files.data, tmp_path / "out", *HEAD, "--init", absent
    )
    assert f"{absent} does not exist" in line


def logged(out: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (out / "checkpoints" / "log.jsonl").read_text().splitlines()
    ]


def weights(head: Path) -> dict[str, np.ndarray]:
    return load_file(head / "model.safetensors")


# ---------------------------------------------------------------- where a head begins


def test_a_head_continues_from_another_one(cli, files, tmp_path):
    first_losses = []
    for name, options in (("fresh", ()), ("continued", ("--init", files.head))):
        arguments = (
            files.target, files.data, tmp_path / name, *HEAD, *ONE_STEP, "--evaluate-every", 1,
            *options
        )  # fmt: skip
        assert cli("train", "head", *arguments)[0] == 0
        first_losses.append(logged(tmp_path / name)[0]["loss"])
    assert first_losses[1] < 0.9 * first_losses[0]  # equal if the other head were not read


def test_another_draft_vocabulary_keeps_all_but_the_output_matrix(cli, files, tmp_path):
    out = tmp_path / "out"
    arguments = (
        files.target, files.data, out, *SHAPE, "--draft-vocab-size", 24, *STILL,
        "--init", files.head
    )  # fmt: skip
    assert cli("train", "head", *arguments)[0] == 0

    before = weights(files.head)
    after = weights(out)
    assert before.keys() == after.keys()
    for name in before.keys() - {"lm_head.weight", "d2t", "t2d"}:
        assert np.array_equal(before[name], after[name]), name

    ids = after["d2t"] + np.arange(24)
    table = load_file(files.target / "model.safetensors")["lm_head.weight"]
    assert np.array_equal(after["lm_head.weight"], table[ids])


@pytest.mark.parametrize("method", [method for method in RECIPES if method != "draft-model"])
def test_heads_of_every_method_can_be_continued(files, tmp_path, method):
    recipe = RECIPES[method]
    target = e3.load_target(files.target)
    model: Any = target.model
    reduced = "draft_vocab_size" in recipe.choices
    options = HeadOptions(depth=2, draft_vocab_size=20 if reduced else None)
    config = recipe.config(model.config, options)
    drafter = recipe.drafter(config)
    ids = np.arange(20, dtype=np.int32) if reduced else None
    keys = jax.random.split(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 0.5, recipe.start(drafter, target, ids, keys[0]))
    write_head(tmp_path / "head", config, params, ids, dtype="float32", num_target_layers=8)

    read = _head_to_continue(tmp_path / "head", method, config, target)
    start = recipe.start(drafter, target, ids, keys[1])
    assert same_params(
        jax.tree.map(np.asarray, _continued(read, start, ids)), jax.tree.map(np.asarray, params)
    )
    if not reduced:
        return
    # With other draft tokens all that has a column for each of them begins anew.
    other_tokens = np.arange(30, 50, dtype=np.int32)
    fresh = recipe.start(drafter, target, other_tokens, keys[1])
    smaller = recipe.drafter(
        recipe.config(model.config, dataclasses.replace(options, draft_vocab_size=19))
    )
    columns = jax.tree.map(
        lambda before, after: before.shape != after.shape,
        drafter.param_shapes(),
        smaller.param_shapes(),
    )
    expected = jax.tree.map(
        lambda is_new, before, after: after if is_new else before, columns, params, fresh
    )
    assert any(jax.tree.leaves(columns))
    assert same_params(
        jax.tree.map(np.asarray, _continued(read, fresh, other_tokens)),
        jax.tree.map(np.asarray, expected),
    )


def test_a_head_that_the_run_cannot_continue_is_refused(refused, files, tmp_path):
    own_embedding = shutil.copytree(files.head, tmp_path / "own_embedding")
    edit_tensors(own_embedding, embed_tokens__weight=np.ones((96, 16), np.float32))
    wider = write_llama(tmp_path / "wider", width=32)
    other_method = "is a head of the method eagle3, and --method is {}; give the same"

    for target, init, options, says in (
        (files.target, tmp_path / "absent", HEAD, "absent"),
        (files.target, files.target, HEAD, "is a language model, not a draft head"),
        (files.target, own_embedding, HEAD, "has its own embedding, which cannot be trained"),
        (
            files.target,
            files.head,
            (*HEAD, "--mlp-width", 8),
            "is another head than the options describe: layers is ",
        ),
        (wider, files.head, HEAD, "reads features of width 16 but the target has 32"),
        (files.target, files.head, (*HEAD, "--method", "p-eagle"), other_method.format("p-eagle")),
        (files.target, files.head, (*SHAPE, "--method", "eagle1"), other_method.format("eagle1")),
        (
            files.target,
            files.head,
            (*SHAPE, "--method", "draft-model"),
            other_method.format("draft-model"),
        ),
    ):
        arguments = (target, files.data, tmp_path / "out", *options, *ONE_STEP)
        assert says in refused("train", "head", *arguments, "--init", init)
        assert not (tmp_path / "out").exists()


def test_a_run_knows_the_head_that_it_began_from(cli, refused, files, tmp_path, monkeypatch):
    """By its weights: the directory may move, and its content may not change."""
    head = shutil.copytree(files.head, tmp_path / "head")
    out = tmp_path / "out"
    arguments = (
        "train", "head", files.target, files.data, out, *HEAD, "--steps", 2, "--warmup-steps", 1,
        "--evaluate-every", 0, "--init",
    )  # fmt: skip

    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        assert cli(*arguments, head)[0] == 130

    norm = load_file(head / "model.safetensors")["norm.weight"]
    edit_tensors(head, norm__weight=norm + 1)
    assert "--init was sha256 " in refused(*arguments, head)
    assert "--init was sha256 " in refused(*arguments[:-1])

    code, printed, _ = cli(*arguments, files.head)
    assert code == 0 and "continuing from step 1" in printed


# ---------------------------------------------------------------- what is learned


def test_a_frozen_output_matrix_is_the_targets(cli, files, tmp_path):
    out = tmp_path / "out"
    options = ("--steps", 3, "--warmup-steps", 1, "--freeze-output", "--evaluate-every", 0)
    assert cli("train", "head", files.target, files.data, out, *HEAD, *options)[0] == 0

    head = weights(out)
    table = load_file(files.target / "model.safetensors")["lm_head.weight"]
    ids = head["d2t"] + np.arange(32)
    assert head["lm_head.weight"].dtype == np.float32
    assert head["lm_head.weight"].tobytes() == table[ids].tobytes()

    learned = weights(files.head)
    assert not np.array_equal(learned["lm_head.weight"], table[learned["d2t"] + np.arange(32)]), (
        "unless it is frozen"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--method", "medusa", "--freeze-output"),
            "--freeze-output: a head of the method medusa has no output matrix",
        ),
        (
            ("--method", "eagle1", "--freeze-output"),
            "--freeze-output: a head of the method eagle1 has no output matrix",
        ),
        (
            ("--method", "eagle1", "--noise", 0.1),
            "noise is 0.1, and this method has no choice of it; leave it out",
        ),
        (
            ("--method", "dflash", "--noise", 0.1),
            "noise is 0.1, and this method has no choice of it; leave it out",
        ),
        (("--optimizer", "sgd"), "optimizer 'sgd' is not known; use 'adamw' or 'muon'"),
        (("--warmup-steps", 5), "5 warm-up steps of 1 steps; expected fewer"),
        (("--method", "eagle9"), "--method 'eagle9' is not known; use one of eagle3, "),
    ],
)
def test_options_that_a_method_does_not_have_leave_nothing(refused, files, tmp_path, options, says):
    arguments = (files.target, files.data, tmp_path / "out", *SHAPE, *ONE_STEP, *options)
    assert says in refused("train", "head", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_draft_model_is_written_with_the_tokenizer_of_its_target(cli, tmp_path):
    target = write_chat_target(tmp_path / "target", layers=2)
    documents = tmp_path / "own.jsonl"
    letters = [{"prompt": f"one {letter}", "completion": "two"} for letter in "cdefghij"]
    documents.write_text("".join(json.dumps(row) + "\n" for row in letters))

    data = tmp_path / "data"
    assert cli("train", "data", target, data, documents, "--held-out", 0.5, "--length", 20)[0] == 0

    out = tmp_path / "out"
    arguments = (
        target, data, out, *SHAPE, *ONE_STEP, "--method", "draft-model", "--evaluate-every", 0
    )  # fmt: skip
    assert cli("train", "head", *arguments)[0] == 0

    assert (out / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    # A draft model is half as wide as its target.
    assert e3.load_drafter(out, target=e3.load_target(target)).drafter.model.config.width == 8


# ---------------------------------------------------------------- features


def test_features_that_are_stored_give_the_loss_that_the_target_gives(cli, files, tmp_path):
    losses = []
    for name, options in (("stored", ()), ("online", ("--online",))):
        arguments = (
            files.target, files.data, tmp_path / name, *HEAD, *ONE_STEP, "--evaluate-every", 1,
            *options
        )  # fmt: skip
        assert cli("train", "head", *arguments)[0] == 0
        losses.append(logged(tmp_path / name)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.01)  # bfloat16 has 8 bits
    assert losses[0] != losses[1]


def test_a_full_disk_leaves_whole_parts_of_features(cli, refused, files, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "TEXTS_OF_A_PART", 4)
    data = written_texts(tmp_path / "data")
    arguments = (
        "train", "head", files.target, data, tmp_path / "out", *HEAD, *ONE_STEP,
        "--evaluate-every", 0
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
        assert f"disk full: {data / 'features'}" in cli(*arguments)[2]
    assert not (data / "features").exists()

    save = np.save
    parts: list[Any] = []

    def full(file: Any, records: np.ndarray) -> None:
        parts.append(file)
        if len(parts) < 2:
            save(file, records)
            return
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        code, _, err = cli(*arguments)
    assert (code, err.count("\n")) == (2, 1) and err.startswith("error: disk full: ")
    assert [path.name for path in (data / "features").rglob("*") if path.is_file()] == ["00000.npy"]
    first = next((data / "features").rglob("00000.npy")).stat().st_mtime_ns
    assert cli(*arguments)[0] == 0
    assert next((data / "features").rglob("texts/00000.npy")).stat().st_mtime_ns == first


# ---------------------------------------------------------------- what is measured


def test_the_log_says_how_the_head_decodes(cli, files, tmp_path, monkeypatch):
    unbroken = tmp_path / "unbroken"
    out = tmp_path / "out"
    options = (
        *HEAD, "--steps", 3, "--warmup-steps", 1, "--evaluate-every", 1, "--init", files.head
    )  # fmt: skip
    assert cli("train", "head", files.target, files.data, unbroken, *options)[0] == 0
    lines = logged(unbroken)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["held_out_tau"] >= 1 and line["held_out_rounds"] > 0 for line in lines)

    target = e3.load_target(files.target)
    decoder = e3.SpeculativeDecoder(
        target, e3.load_drafter(unbroken, target=target), num_speculative_tokens=2
    )
    _, held_out = read_texts(files.data)
    assert len(held_out) == 1
    prompt = held_out.tokens[: np.argmax(held_out.learn)].tolist()
    assert lines[-1]["tau_decoded"] > 1
    assert (
        lines[-1]["tau_decoded"]
        == decoder.generate([prompt], max_new_tokens=64).stats.mean_acceptance_length
    )

    # A run that was killed without a checkpoint repeats its steps, and its log has each of them
    # once.
    with monkeypatch.context() as patch:
        kill_after(patch, 2)
        patch.setattr("eagle3_jax.training.loop.Trainer.save", lambda *_: None)
        assert cli("train", "head", files.target, files.data, out, *options)[0] == 130
    assert logged(out) == lines[:2]
    assert cli("train", "head", files.target, files.data, out, *options)[0] == 0
    assert logged(out) == lines
