"""Every command refuses in one line, before it prints or writes, and ends quietly when ended."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest
from checkpoints import write_llama as write_small_llama
from heads_on_disk import CHECKPOINTS
from models_on_disk import write_llama

from eagle3_jax.cli import run

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
VLLM = Path(__file__).parent.parent / "golden" / "vllm"
TARGET = ("--target", str(OFFICIAL / "target"))
HEAD = ("--drafter", str(OFFICIAL / "eagle3"))
PAIR = (*TARGET, *HEAD)
PROMPT = ("--prompt-ids", "[1, 17, 5, 42]", "--max-new-tokens", "8", "--ignore-eos")
ASKED = ("generate", *PAIR, *PROMPT)
TREE = ("--tree", "num_nodes=60,max_depth=8,top_k=10")
TUNE = ("tune", "--compilation-cache", "none")
BIG = ("--target", "Llama-3.3-70B", "--weights", "fp8", "--gpu", "H200")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generat",), "--help"),
        # Prompts of generate.
        (("generate", *PAIR, "--prompt-ids", "[]"), "empty"),
        (("generate", *PAIR, "hello", "--prompt-ids", "[1]"), "one of"),
        # Drafts of generate.
        (
            (*ASKED, "--num-speculative-tokens", "1000000"),
            "--num-speculative-tokens 1000000: a draft of 1000000",
        ),
        ((*ASKED, "--schedule", "[[1,4,2]]", "--num-speculative-tokens", "2"), "more than one of"),
        ((*ASKED, "--tree", "num_nodes=3"), "expected num_nodes=N,max_depth=G,top_k=K"),
        ((*ASKED, "--num-speculative-tokens", "3", *TREE), "a chain, a tree"),
        ((*ASKED, *TREE, "--draft-sampling", "probabilistic"), "draft a chain"),
        ((*ASKED, "--top-p", "1.5"), "error: --top-p is 1.5; expected above 0"),
        (
            (*ASKED, "--num-speculative-tokens", "0"),
            "error: --num-speculative-tokens is 0; expected at least 1",
        ),
        (
            (*ASKED, "--num-speculative-tokens", "9000"),
            "; lower --num-speculative-tokens or max_depth to at most",
        ),
        ((*ASKED, "--logprobs", "1"), "stop texts and --logprobs work with --json"),
        # Models of generate.
        (("generate", "--target", "", "--drafter", "none", *PROMPT), "--target is empty"),
        (
            ("generate", *TARGET, "--drafter", "none", *PROMPT, "--num-speculative-tokens", "3"),
            "error: --num-speculative-tokens 3: there is no drafter; add --drafter HEAD or",
        ),
        (("generate", *PROMPT, "--target", "GPT-5"), "did you mean gpt-oss-20b?"),
        (
            ("generate", *PROMPT, "--target", "llama-3.1-8b"),
            "did you mean the hub id of Llama-3.1-8B?",
        ),
        (
            ("generate", *TARGET, "--drafter", str(VLLM / "target"), *PROMPT),
            "a draft model needs the target's own",
        ),
        # bench
        (("bench", "--tree", "none", *TREE), "--tree none"),
        (("bench", *TARGET, "--drafter", "ngrams"), "did you mean ngram?"),
        (("bench", "--batch-size", "1,9"), "--batch-size 9 needs as many prompts, and there are 8"),
        (("bench", "--rivals", "sglang"), "'sglang' is not one of 'transformers', 'none'"),
        (
            ("bench", "--simulated-acceptance-length", "2", "--simulated-acceptance-rate", "0.5"),
            "both given",
        ),
        (("bench", "--verifier", "typical", "--simulated-acceptance-rate", "0.5"), "by one rule"),
        (("bench", "--shape", "Llama-100M", "--target", "x"), "--shape"),
        (("bench", "--shape", "Llama-100M", "--prompts", "x.jsonl"), "--shape has no tokenizer"),
        (("bench", "--shape", "GPT-9"), "there is no shape 'GPT-9'"),
        (("bench", "--drafter", "none", "--drafter", "ngram"), "--drafter none"),
        (("bench", "--tasks", "poetry"), "no prompts of 'poetry'; there are code, prose"),
        (
            ("bench", *PAIR, "--dtype", "float32", "--chains", "100000"),
            "chain K=100000: a draft of 100000 levels is",
        ),
        # tune
        ((*TUNE, "--chains", "1-99", "--max-new-tokens", "64"), "drafts of 1 to 63"),
        ((*TUNE, "--drafter", "none"), "--drafter none"),
        ((*TUNE, "--output", "/nowhere/at/all.json"), "/nowhere/at"),
        # plan
        (("plan", "memory", "--gpu", "H300"), "did you mean H200? known are B200, H200,"),
        (
            ("plan", "memory", "-K", "512"),
            "the bundled head has 512 positions, so K is at most 511",
        ),
        (("plan", "memory", "--context", "513"), "beyond the 512 positions"),
        (("plan", "roofline", "--target", "Llama-3.1-9B"), "did you mean Llama-3.1-8B?"),
        (("plan", "roofline", "--target", "nosuch"), "is not a directory; give a checkpoint"),
        (("plan", "roofline", "--claim", "9"), "add --batch-size"),
        (("plan", "memory", "--memory-gb", "80"), "add --bandwidth-gb-per-s"),
        (("plan", "memory", "--weights", "nf4"), "'nf4' are not known"),
        (("plan", "memory", "--target", "Qwen3-8B", *HEAD), "features of width"),
        (("plan", "memory", "--drafter", "layer-skip=12"), "so give 1 to 11"),
        (("plan", "speedup", "--alpha", "0.5", "--draft-acceptance-rate", "0.5"), "give one"),
        (("plan", "speedup", "--traffic", "much"), "SHARE:ALPHA"),
        (("plan", "speedup", "--traffic", "1:0.5", "--alpha", "0.5"), "leave the other options"),
        (
            ("plan", "cost", "--tokens-per-second", "10", "--price-per-hour", "0"),
            "no number per dollar",
        ),
        (("plan", "rollout", "--verify-cost", "1.2"), "give both or neither"),
        (("plan", "rollout", "--out", "/nowhere/rollout.md"), "cannot be written"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, tuple) else "",
)
def test_a_command_refuses_in_one_line(refused, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "generate":
        arguments = (*arguments, "--trace", "trace.json", "--json")
    assert named in refused(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("drafter", "most"), [("Medusa head (vllm layout)", 3), ("DFlash head (vllm layout)", 4)]
)
def test_a_plan_drafts_no_more_than_the_head_does(refused, tmp_path, drafter, most):
    target = write_small_llama(tmp_path / "target")
    head = CHECKPOINTS[drafter](tmp_path / "head")
    line = refused("plan", "memory", "--target", target, "--drafter", head, "-K", most + 1)
    assert f"drafts at most {most}" in line


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"prompt_ids": [1]}\n{"prompt_ids": [1}\n', "line 2"),
        ('{"prompt_ids": [1]}\n\n{"prompt_ids": [1000]}\n', "line 3"),
        (
            '{"prompt_ids": [1]}\n{"prompt_ids": [1], "temperature": 1' + "0" * 400 + "}\n",
            "line 2: ",
        ),
        ('{"prompt_ids": [1]}\n{"prompt_ids": [1], "top_p": 1' + "0" * 400 + "}\n", "line 2: "),
        (
            '{"prompt_ids": [1]}\n{"prompt_ids": [1' + "0" * 4000 + "]}\n",
            "line 2: prompt token 100000",
        ),
        ("\n\n", "holds no lines"),
    ],
)
def test_a_bad_prompt_file_is_refused_by_line_before_anything_is_printed(
    refused, tmp_path, content, named
):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    for command in ("generate", "bench", "tune"):
        line = refused(command, *PAIR, "--prompts", path, "--json")
        assert named in line and str(path) in line


def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    refused, tmp_path, monkeypatch
):
    traced = ("generate", "--target", "/none", *PROMPT, "--trace")
    assert "No such file or directory" in refused(*traced, tmp_path / "no" / "t.json")
    assert "is a directory" in refused(*traced, tmp_path)
    assert "name too long" in refused(*traced, tmp_path / ("x" * 250))
    assert list(tmp_path.iterdir()) == []

    new = ("bench", "--shape", "GPT-9", "--output")
    assert "no shape" in refused(*new, tmp_path / "new" / "one")
    assert list(tmp_path.iterdir()) == []  # misuse writes nothing

    (tmp_path / "file").write_text("")
    assert "is not empty" in refused(*new, tmp_path)
    assert "is a file" in refused(*new, tmp_path / "file" / "below")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "no permission" in refused(*new, tmp_path / "new" / "one")


def test_checkpoints_that_do_not_fit_are_refused(refused, tmp_path):
    target = write_llama(tmp_path / "narrow", width=64)
    line = refused("generate", "--target", target, *HEAD, *PROMPT)
    assert "128" in line and "64" in line
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in refused(
        "generate", "--target", tmp_path / "empty", *HEAD, *PROMPT
    )
    assert str(tmp_path / "empty") in refused("inspect", tmp_path / "empty")


def test_a_schedule_that_found_none_says_what_to_do(refused, tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text('{"num_speculative_tokens_per_batch_size": null}')
    assert "--drafter none" in refused(*ASKED, "--schedule", path)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, ()),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 99 bytes.\n lots of detail"),
            1,
            ("out of memory", "--tree"),
        ),
    ],
    ids=["interrupted", "exhausted"],
)
def test_an_interruption_and_an_exhausted_device_end_quietly(cli, monkeypatch, error, code, words):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("eagle3_jax.load_target", fail)
    ending, out, err = cli(*ASKED)
    assert (ending, out, err.count("\n")) == (code, "", min(len(words), 1))
    assert all(word in err for word in words)


def test_a_fault_of_the_program_is_not_hidden(monkeypatch):
    def fail(*arguments, **options):
        raise TypeError("a bug")

    monkeypatch.setattr("eagle3_jax.load_target", fail)
    with pytest.raises(TypeError):
        run(list(ASKED))
