"""The command line refuses in one line, before anything is printed or written, and ends quietly when it is ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from models_on_disk import write_llama
from safetensors.numpy import load_file, save_file

from eagle3_jax.cli import run

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
VLLM = Path(__file__).parent.parent / "golden" / "vllm"
PAIR = ("--target", str(OFFICIAL / "target"), "--drafter", str(OFFICIAL / "eagle3"))
PROMPT = ("--prompt-ids", "[1, 17, 5, 42]", "--max-new-tokens", "8", "--ignore-eos")
TREE = ("--tree", "num_nodes=60,max_depth=8,top_k=10")


def head_with(folder: Path, change, config=None) -> Path:
    """A copy of the official head with other tensors or another configuration."""
    head = folder / "head"
    head.mkdir()
    settings = json.loads((OFFICIAL / "eagle3" / "config.json").read_text()) | (config or {})
    (head / "config.json").write_text(json.dumps(settings))
    tensors = load_file(OFFICIAL / "eagle3" / "model.safetensors")
    save_file(change(tensors) or tensors, head / "model.safetensors")
    return head


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((*PAIR, "--prompt-ids", "[]"), "empty"),
        ((*PAIR, ""), "tokenizer"),
        ((*PAIR, "--prompt-ids", "[1, 96]"), "96"),
        ((*PAIR, "--prompt-ids", "[-1]"), "-1"),
        ((*PAIR, "--prompt-ids", '["a"]'), "'a'"),
        ((*PAIR, "--prompt-ids", "1, 2"), "JSON list"),
        ((*PAIR, "--prompt-ids", json.dumps([1] * 512)), "512"),
        ((*PAIR, "hello"), "tokenizer"),
        ((*PAIR, "hello", "--prompt-ids", "[1]"), "one of"),
        (PAIR, "one of"),
        (
            (*PAIR, *PROMPT, "--num-speculative-tokens", "1000000"),
            "--num-speculative-tokens 1000000: a draft of 1000000",
        ),
        (
            (*PAIR, *PROMPT, "--num-speculative-tokens", "512"),
            "lower num_speculative_tokens or max_depth to at most 511",
        ),
        ((*PAIR, *PROMPT, "--schedule", "[[1, 4, 1000000]]"), "--schedule [[1, 4, 1000000]]: a draft of 1000000"),
        ((*PAIR, *PROMPT, "--schedule", "[[1, 1000000000000, 3]]"), "reaches 1000000000000 rows"),
        ((*PAIR, *PROMPT, "--tree", "num_nodes=10000000,max_depth=9,top_k=2000"), "--tree 'num_nodes=10000000,"),
        ((*PAIR, *PROMPT, "--tree", "num_nodes=10000000,max_depth=10000000,top_k=1"), "scores 10000000 nodes"),
        ((*PAIR, *PROMPT, "--tree", "num_nodes=513,max_depth=9,top_k=30"), "lower num_nodes to at most 512"),
        ((*PAIR, *PROMPT, "--num-speculative-tokens", "3", *TREE), "a chain, a tree"),
        ((*PAIR, *PROMPT, "--tree", "num_nodes=60,max_depth=2,top_k=4"), "num_nodes=60"),
        ((*PAIR, *PROMPT, "--tree", "num_nodes=3,max_depth=8,top_k=4"), "num_nodes=3"),
        ((*PAIR, *PROMPT, "--tree", "num_nodes=3"), "max_depth, top_k missing"),
        ((*PAIR, *PROMPT, "--tree", "num_nodes=x,max_depth=8,top_k=4"), "'x'"),
        ((*PAIR, *PROMPT, "--top-p", "1.5"), "top_p is 1.5"),
        ((*PAIR, *PROMPT, "--temperature", "1e39"), "temperature is inf"),  # in the 32 bits of the device
        ((*PAIR, *PROMPT, "--compilation-cache", ""), "--compilation-cache"),
        ((*PAIR, *PROMPT, "--dtype", "float8"), "float8"),
        ((*PAIR, *PROMPT, "--no-such-option"), "--no-such-option"),
        ((*PAIR, "--prompt-ids"), "--prompt-ids"),
        ((*PAIR, "--prompts", "/no/such/file.jsonl"), "/no/such/file.jsonl"),
        ((*PAIR[:2], *PROMPT), "--drafter"),
        (("--target", "", "--drafter", "none", *PROMPT), "--target is empty"),
        ((*PAIR[:2], "--drafter", "", *PROMPT), "--drafter is empty"),
        ((*PAIR[:2], "--drafter", "none", *PROMPT, "--num-speculative-tokens", "3"), "without a drafter"),
        ((*PAIR[:2], "--drafter", "ngram", *PROMPT, *TREE), "NGram"),
        ((*PAIR, *PROMPT, *TREE, "--draft-sampling", "probabilistic"), "draft a chain"),
        ((*PAIR, *PROMPT, "--draft-sampling", "sometimes"), "--draft-sampling"),
        (("--target", "/no/such/model", "--drafter", "none", *PROMPT), "/no/such/model"),
        ((*PAIR[:2], "--drafter", "/no/such/head", *PROMPT), "/no/such/head"),
        ((*PAIR[:2], "--drafter", str(VLLM / "eagle3"), *PROMPT), "vocab"),
        ((*PAIR[:2], "--drafter", str(VLLM / "target"), *PROMPT), "a draft model needs the target's own"),
        ((*PAIR[:2], "--drafter", "layer-skip=99", *PROMPT), "layer skip of 99 layers"),
    ],
)
def test_generate_refuses(refused, tmp_path, options, named):
    assert named in refused("generate", *options, "--trace", tmp_path / "trace.json", "--json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"prompt_ids": [1]}\n{"prompt_ids": [1}\n', "line 2"),
        ('{"prompt_ids": [1]}\n\n[1, 2]\n', "line 3"),
        ('{"text": "a"}\n', "line 1"),
        ('{"prompt": "a", "prompt_ids": [1]}\n', "line 1"),
        ('{"prompt": 3}\n', "line 1"),
        ('{"prompt_ids": [1]}\n{"prompt_ids": [1], "max_new_tokens": 0}\n', "line 2"),
        ('{"prompt_ids": [1]}\n{"prompt_ids": []}\n', "line 2"),
        ('{"prompt_ids": [1]}\n{"prompt_ids": [1000]}\n', "line 2"),
        ("", "no prompts"),
        ("\n\n", "no prompts"),
    ],
)
def test_a_bad_prompt_file_is_refused_by_line_before_anything_is_printed(refused, tmp_path, content, named):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    line = refused("generate", *PAIR, "--prompts", path, "--json")
    assert named in line
    assert str(path) in line


def test_checkpoints_that_do_not_fit_are_refused(refused, tmp_path):
    for make, named in (
        (lambda t: t.pop("fc.weight") is None or None, "fc.weight"),
        (lambda t: t.update({"surplus.weight": np.zeros(3, np.float32)}), "surplus.weight"),
        (lambda t: t.update({"d2t": t["d2t"] + 1000}), "d2t"),
    ):
        head = head_with(tmp_path, make)
        assert named in refused("generate", *PAIR[:2], "--drafter", head, *PROMPT)
        shutil.rmtree(head)


def test_a_truncated_file_is_refused(refused, tmp_path):
    head = head_with(tmp_path, lambda tensors: None)
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refused("generate", *PAIR[:2], "--drafter", head, *PROMPT)


def test_a_folder_that_is_no_checkpoint_is_refused(refused, tmp_path):
    (tmp_path / "README.md").write_text("nothing here")
    assert str(tmp_path) in refused("generate", "--target", tmp_path, "--drafter", "none", *PROMPT)
    assert str(tmp_path) in refused("inspect", tmp_path)


def test_a_head_of_another_width_is_refused(refused, tmp_path):
    target = write_llama(tmp_path / "narrow", width=64)
    line = refused("generate", "--target", target, "--drafter", OFFICIAL / "eagle3", *PROMPT)
    assert "128" in line
    assert "64" in line


def test_a_trace_that_cannot_be_written_is_refused_before_any_work(refused, tmp_path):
    assert "no directory" in refused("generate", "--target", "/none", *PROMPT, "--trace", tmp_path / "no" / "t.json")
    assert "is a directory" in refused("generate", "--target", "/none", *PROMPT, "--trace", tmp_path)
    assert "name too long" in refused("generate", "--target", "/none", *PROMPT, "--trace", tmp_path / ("x" * 250))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["generat", "train targets", "convert", "convert a", "bench x"])
def test_a_wrong_command_line_is_refused(refused, command):
    assert "--help" in refused(*command.split())


def test_an_interruption_ends_quietly(cli, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle3_jax.load_target", interrupt)
    assert cli("generate", *PAIR, *PROMPT)[0] == 130


def test_an_exhausted_device_is_explained(cli, monkeypatch):
    def exhaust(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\n lots of detail")

    monkeypatch.setattr("eagle3_jax.load_target", exhaust)
    code, _, err = cli("generate", *PAIR, *PROMPT)
    assert (code, err.count("\n")) == (1, 1)
    assert "out of memory" in err
    assert "--tree" in err


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    def fail(*arguments, **options):
        raise TypeError("a bug")

    monkeypatch.setattr("eagle3_jax.load_target", fail)
    with pytest.raises(TypeError):
        run(["generate", *PAIR, *PROMPT])
