"""The command line as its users meet it: what it prints, and what it writes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import corpus
import jax
import pytest

import eagle3_jax as e3

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
VLLM = Path(__file__).parent.parent / "golden" / "vllm"
PAIR = ("--target", str(OFFICIAL / "target"), "--drafter", str(OFFICIAL / "eagle3"))
PROMPT = ("--prompt-ids", "[1, 17, 5, 42]", "--max-new-tokens", "8", "--ignore-eos")
TREE = ("--tree", "num_nodes=60,max_depth=8,top_k=10")
COMMANDS = [
    "generate", "convert", "inspect", "doctor", "bench", "tune",
    "train", "train target", "train data", "train head",
    "plan speedup", "plan memory", "plan roofline", "plan cost", "plan rollout",
]  # fmt: skip


# What it prints


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example_that_parses(cli, command):
    code, out, err = cli(*command.split(), "--help")
    assert (code, err) == (0, "")
    example = out[out.index("Example") :]
    assert f"eagle3 {command}" in " ".join(example.split())
    for line in re.findall(rf"eagle3 {command}.*", example):
        for option in [word for word in shlex.split(line) if word.startswith("--")]:
            assert option in out[: out.index("Example")], option


def test_the_help_of_the_program_lists_the_commands(cli):
    commands = ("generate", "convert", "inspect", "doctor", "train", "bench", "tune", "plan")
    for arguments in ((), ("--help",)):
        code, out, _ = cli(*arguments)
        assert code == 0
        for command in commands:
            assert re.search(rf"^  {command} ", out, re.MULTILINE)


def test_json_is_one_object_per_prompt_with_the_promised_fields(cli, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt_ids": [1, 17, 5, 42], "max_new_tokens": 5}\n\n{"prompt_ids": [9, 3]}\n'
    )

    code, out, err = cli(
        "generate", *PAIR, "--prompts", prompts, "--max-new-tokens", 7, "--ignore-eos", "--json"
    )
    assert (code, err) == (0, "")

    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt_ids"] for row in rows] == [[1, 17, 5, 42], [9, 3]]
    assert [len(row["token_ids"]) for row in rows] == [5, 7]

    for row in rows:
        assert set(row) == {
            "prompt_ids", "token_ids", "text", "finish_reason", "lossless", "weights",
            "drafter_method", "seconds", "stats",
        }  # fmt: skip
        # These checkpoints have no tokenizer.
        assert row["text"] is None
        assert row["finish_reason"] == "length"
        assert row["lossless"] is True
        assert 0 < row["seconds"] < 60

        stats = row["stats"]
        assert set(stats) == {
            "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos",
            "mean_acceptance_length", "draft_acceptance_rate",
        }  # fmt: skip
        assert sum(stats["num_accepted_tokens_per_pos"]) == stats["num_accepted_tokens"]
        tau = 1 + stats["num_accepted_tokens"] / stats["num_drafts"]
        assert stats["mean_acceptance_length"] == tau


@pytest.mark.parametrize(("option", "reason"), [((), "stop"), (("--ignore-eos",), "length")])
def test_it_says_why_it_stopped(cli, option, reason):
    code, out, _ = cli(
        "generate", *PAIR, "--prompt-ids", "[1, 17, 5, 42, 33, 9, 71, 8]", "--max-new-tokens", 8,
        *option, "--json"
    )  # fmt: skip
    row = json.loads(out)
    assert (code, row["finish_reason"]) == (0, reason)
    # The recorded official run continues 94 36 51 2 1 ..., and 2 ends a text.
    assert row["token_ids"] == (
        [94, 36, 51, 2] if reason == "stop" else [94, 36, 51, 2, 1, 16, 37, 67]
    )


def test_drafters_and_batches_do_not_change_greedy_output(cli, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt_ids": row}) + "\n" for row in ([1, 17, 5, 42], [3], [8, 8, 8]))
    )

    outputs = []

    head = OFFICIAL / "eagle3"
    for options in (
        ("none",),
        ("ngram",),
        (head,),
        (head, "--batch-size", 2),
        (head, "--schedule", "[[1, 2, 2], [3, 8, 0]]"),
    ):
        code, out, _ = cli(
            "generate", *PAIR[:2], "--drafter", *options, "--prompts", prompts,
            "--max-new-tokens", 6, "--ignore-eos", "--json",
        )  # fmt: skip
        assert code == 0
        outputs.append([json.loads(line)["token_ids"] for line in out.splitlines()])
    assert outputs == [outputs[0]] * 5


def test_json_has_log_probabilities_and_ends_at_a_stop_text(cli):
    options = (
        "generate", "def add(a, b):", "--max-new-tokens", 24, "--json", "--stop", "retu",
        "--logprobs", 1
    )  # fmt: skip
    code, out, _ = cli(*options)
    row = json.loads(out)
    assert code == 0 and row["finish_reason"] == "stop" and "retu" not in row["text"]
    assert [token["top"][0][0] for token in row["logprobs"]] == row["token_ids"]
    assert all(token["logprob"] == token["top"][0][1] <= 0 for token in row["logprobs"])


def test_a_line_of_a_file_has_sampling_a_seed_and_stop_texts_of_its_own(cli, tmp_path):
    """Each line gives what a call of its own gives in Python, whatever its batch."""
    lines = [
        {"prompt": "def add(a, b):", "temperature": 0.9, "top_k": 20, "seed": 7, "stop": "return"},
        {"prompt": "class Queue:", "stop": "self", "top_p": 0.9, "seed": 9, "max_new_tokens": 20},
        {"prompt": "import ", "temperature": 1.5, "top_p": 0.7, "seed": 8, "stop": ["\n", "numpy"]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (
        "generate", "--prompts", file, "--drafter", "none", "--max-new-tokens", 12,
        "--temperature", 0.7
    )  # fmt: skip

    decoder = e3.SpeculativeDecoder(e3.load_target())
    expected = []
    for line in lines:
        changes = {name: line[name] for name in ("temperature", "top_k", "top_p") if name in line}
        sampling = e3.SamplingParams(**{"temperature": 0.7} | changes)
        limit = line.get("max_new_tokens", 12)
        result = decoder.generate(
            line["prompt"],
            max_new_tokens=limit,
            sampling=sampling,
            seed=line.get("seed", 0),
            stop=line.get("stop", ()),
        )
        expected.append((result.tokens[0], result.texts[0]))

    for batch_size in (3, 2, 1):
        code, out, _ = cli(*options, "--json", "--batch-size", batch_size)
        rows = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and [(row["token_ids"], row["text"]) for row in rows] == expected

    code, out, err = cli(*options)
    assert (code, out) == (2, "") and "stop texts and --logprobs work with --json" in err

    for line in lines:
        del line["stop"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = cli(*options, "--compare")
    assert code == 0 and (expected[0][1] or "") in out
    assert "no comparison with plain decoding: the lines of the file sample differently" in out

    for line, message in (
        ({"temperature": "1"}, "temperature is '1'; expected a number"),
        ({"temperature": -1}, "temperature is -1; expected 0 (greedy) or more"),
        ({"top_k": 1.5}, "top_k is 1.5; expected a whole number from 0"),
        ({"seed": True}, "seed is True; expected a whole number from 0 to 4294967295"),
        ({"stop": ["a", ""]}, "stop is ['a', '']; expected a text or a list of texts"),
        ({"messages": []}, "with one of 'prompt', 'prompt_ids', 'messages'"),
        ({"ignore_eos": True}, "it is given for all prompts, with --ignore-eos"),
    ):
        file.write_text(json.dumps({"prompt": "x"} | line) + "\n")
        code, out, err = cli(*options, "--json")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "prompts.jsonl line 1: " in err and message in err


def test_equal_prompts_are_sampled_apart_and_reproducibly(cli, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 17]}\n' * 2)
    arguments = (
        "generate", *PAIR[:2], "--drafter", "none", "--prompts", prompts,
        "--max-new-tokens", 12, "--ignore-eos", "--temperature", 1, "--json",
    )  # fmt: skip

    runs = [
        [json.loads(line)["token_ids"] for line in cli(*arguments)[1].splitlines()]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "head"),
    [("trace_eagle3_greedy_fp32.json", "eagle3"), ("trace_sharp_60_7_10.json", "eagle3_sharp")],
)
def test_the_trace_of_a_tree_equals_the_official_one(cli, tmp_path, name, head):
    golden = json.loads((OFFICIAL / name).read_text())
    path = tmp_path / "trace.json"
    code, out, err = cli(
        "generate", *PAIR[:2], "--drafter", OFFICIAL / head,
        "--prompt-ids", json.dumps(golden["prompt"]),
        "--max-new-tokens", golden["max_new_tokens"],
        "--ignore-eos", *TREE, "--trace", path, "--json",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]

    (prompt,) = json.loads(path.read_text())["prompts"]
    assert prompt["prompt_ids"] == golden["prompt"]
    output = golden["output"][len(golden["prompt"]) :]
    assert json.loads(out)["token_ids"] == output[: golden["max_new_tokens"]]

    # The official loop overshoots its limit.
    assert len(prompt["rounds"]) >= len(golden["rounds"]) - 1
    for ours, theirs in zip(prompt["rounds"], golden["rounds"], strict=False):
        assert set(ours) == {"tokens", "parents", "positions", "path", "num_accepted", "next_token"}
        assert ours["tokens"] == theirs["draft_tokens"]
        assert ours["parents"] == [
            deepest_ancestor(row, node) for node, row in enumerate(theirs["tree_mask"])
        ]
        assert ours["positions"] == [
            theirs["input_len"] + level for level in theirs["tree_position_ids"]
        ]
        assert ours["num_accepted"] == theirs["accept"] == len(ours["path"])
        assert ours["path"] == theirs["retrieve_indices"][theirs["best"]][1 : 1 + theirs["accept"]]


def deepest_ancestor(mask: str, node: int) -> int:
    """Parents precede their children: the deepest proper ancestor is the last visible node."""
    return max((ancestor for ancestor, seen in enumerate(mask[:node]) if seen == "1"), default=-1)


# The other commands


def test_convert_writes_a_head_that_generates_the_same(cli, refused, tmp_path):
    out = tmp_path / "converted"
    code, _, err = cli(
        "convert", OFFICIAL / "eagle3", out, "--to", "eagle", "--target", OFFICIAL / "target"
    )
    assert (code, err) == (0, "")

    results = [
        json.loads(cli("generate", *PAIR[:2], "--drafter", head, *PROMPT, "--json")[1])
        for head in (OFFICIAL / "eagle3", out)
    ]
    assert results[0]["token_ids"] == results[1]["token_ids"]
    assert results[0]["stats"] == results[1]["stats"]

    before = sorted(path.name for path in out.iterdir())
    assert str(out) in refused(
        "convert", OFFICIAL / "eagle3", out, "--to", "eagle", "--target", OFFICIAL / "target"
    )
    assert sorted(path.name for path in out.iterdir()) == before
    assert "sglang" in refused("convert", OFFICIAL / "eagle3", tmp_path / "x", "--to", "keras")


def test_doctor_fails_a_mismatch(cli):
    code, out, _ = cli("doctor", "--target", OFFICIAL / "target", "--drafter", VLLM / "eagle3")
    assert code == 1
    assert "failure" in out


@jax.numpy_dtype_promotion("standard")  # optax's own arithmetic mixes types
def test_a_pair_is_trained_from_sources_alone(cli, refused, tmp_path):
    """Corpus, target, its text, head: each step reads what the last wrote; the pair decodes."""
    stdlib = tmp_path / "Lib"
    data = tmp_path / "data"
    target = tmp_path / "target"
    texts = tmp_path / "texts"
    head = tmp_path / "head"
    stdlib.mkdir()
    for name in ("bisect", "ast", "cmd"):
        (stdlib / f"{name}.py").write_text(
            "".join(f"def {name}{i}(x):\n    return x + {i}\n" for i in range(60))
        )
    corpus.main([str(data), "--stdlib", str(stdlib), "--vocab-size", "280"])
    parts = {
        row["name"]: row["part"]
        for row in map(json.loads, (data / "corpus.jsonl").read_text().splitlines())
    }
    assert parts == {"code/ast.py": "train", "code/bisect.py": "held-out", "code/cmd.py": "train"}

    shape = (
        "--layers", 8, "--width", 16, "--mlp-width", 16, "--heads", 2, "--kv-heads", 1,
        "--head-dim", 8, "--max-positions", 64, "--phases", "2x16", "--warmup-steps", 1,
        "--dtype", "float32",
    )  # fmt: skip
    code, _, err = cli("train", "target", data, target, "--steps", 2, *shape)
    assert (code, err) == (0, "")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in target.iterdir()
    }
    assert str(target) in refused("train", "target", data, target, "--steps", 2, *shape)

    writing = (
        "--rewrite", "--opening-tokens", 4, "--length", 24, "--rows", 2, "--held-out", 0.5,
        "--dtype", "float32"
    )  # fmt: skip
    assert cli("train", "data", target, texts, data / "train.jsonl", *writing)[0] == 0
    options = (
        "--steps", 2, "--batch", 2, "--draft-vocab-size", 64, "--unroll", "1:1,2",
        "--warmup-steps", 1, "--dtype", "float32",
    )  # fmt: skip
    assert cli("train", "head", target, texts, head, *options)[0] == 0
    code, out, err = cli(
        "generate", "def f", "--target", target, "--drafter", head, "--max-new-tokens", 6, "--json"
    )
    assert (code, err) == (0, "")
    row = json.loads(out)
    assert row["stats"]["num_drafts"] > 0
    assert isinstance(row["text"], str)
