"""What a command line leaves open: commands choose it, say so, and refuse a wrong name at once."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from checkpoints import Head, edit_config, write_llama
from models_on_disk import write_chat_target

import eagle3_jax as e3
from eagle3_jax.cli._parts import default_dtype, measured_drafter
from eagle3_jax.conversion.acceptance import Agreement
from eagle3_jax.files.sources import bundled

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
TARGET = ("--target", OFFICIAL / "target")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("generate", "x", *TARGET, "--drafter", "ngrams"), "did you mean ngram?"),
        (("chat", *TARGET, "--drafter", "layerskip=2"), "did you mean layer-skip=E?"),
        (("serve", *TARGET, "--port", 0, "--drafter", "absent"), "absent is not a directory"),
        (
            ("bench", *TARGET, "--dtype", "float32", "--drafter", "ngram+absent"),
            "absent is not a directory",
        ),
        (("tune", *TARGET, "--dtype", "float32", "--drafter", "sufix"), "did you mean suffix?"),
        (
            ("train", "data", OFFICIAL / "target", "texts", "absent.jsonl"),
            "absent.jsonl: No such file",
        ),
        (
            ("train", "head", OFFICIAL / "target", "texts", "head"),
            "texts holds no texts to learn from",
        ),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, tuple) else "",
)
def test_a_wrong_name_is_refused_before_a_model_is_loaded(
    refused, tmp_path, monkeypatch, arguments, named
) -> None:
    def load(*_: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(e3, "load_target", load)
    monkeypatch.chdir(tmp_path)
    assert named in refused(*arguments)


def test_a_similar_checkpoint_next_to_a_wrong_path_is_suggested(refused, tmp_path) -> None:
    (tmp_path / "llama-8b").mkdir()
    assert f"did you mean {tmp_path / 'llama-8b'}?" in refused("inspect", tmp_path / "lama-8b")


def test_targets_without_a_drafter_are_measured_with_ngrams() -> None:
    assert [measured_drafter(target) for target in (None, "smollm2", "a target")] == [
        None,
        "smollm2",
        "ngram",
    ]


def test_weights_in_bfloat16_stay_so_except_on_cpus(tmp_path, monkeypatch) -> None:
    in_float32 = write_llama(tmp_path / "target")
    in_bfloat16 = bundled("target")
    for device, expected in (("cpu", "float32"), ("gpu", "bfloat16")):
        monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
        assert default_dtype(str(in_float32)) == "float32"
        assert default_dtype(str(in_bfloat16)) == expected


def test_the_doctor_examines_a_target_alone(cli, refused, tmp_path) -> None:
    target = write_chat_target(tmp_path / "target")
    code, out, _ = cli("doctor", "--target", target, "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0
    assert list(checks)[:5] == ["target", "tokenizer", "chat template", "stop tokens", "weights"]
    assert {check["status"] for check in list(checks.values())[:5]} == {"ok"}
    assert all(set(check) == {"name", "status", "detail"} for check in checks.values())
    assert "Why?" in checks["chat template"]["detail"]

    edit_config(target, eos_token_id=None)
    (target / "tokenizer_config.json").write_text('{"chat_template": "{{"}')
    code, out, _ = cli("doctor", "--target", target, "--json")
    checks = {check["name"]: check["status"] for check in json.loads(out)["checks"]}
    assert code == 1
    assert checks["tokenizer and chat template"] == "failure"
    assert checks["stop tokens"] == "warning"

    assert "add one, or leave it out" in refused(
        "doctor", "--target", target, "--prompts", "x.jsonl"
    )
    assert "no files to check" in refused("doctor", "--drafter", "ngram")


def test_the_doctor_measures_acceptance_on_prompts(cli, refused, tmp_path, monkeypatch) -> None:
    measured = []

    def agreement(target: object, drafter: object, prompts: list[list[int]]) -> Agreement:
        measured.extend(prompts)
        return Agreement(rates=(0.7,), counts=(20,))

    monkeypatch.setattr("eagle3_jax.conversion.doctor.forced_agreement", agreement)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1, 2, 3]}\n{"prompt_ids": [4, 5]}\n')
    pair = (*TARGET, "--drafter", OFFICIAL / "eagle3")
    code, out, _ = cli("doctor", *pair, "--prompts", file)
    assert (code, measured) == (0, [[1, 2, 3], [4, 5]])
    assert "random prompts" not in out
    file.write_text('{"prompt_ids": [1]}\n')
    assert "has one token" in refused("doctor", *pair, "--prompts", file)


def test_inspect_shows_template_and_stop_tokens_and_the_configuration_on_request(
    cli, tmp_path
) -> None:
    target = write_chat_target(tmp_path / "target")
    _, out, _ = cli("inspect", target)
    lines = dict(
        line.split(None, 2)[::2] if line[:4] in ("chat", "stop") else (line, "")
        for line in out.splitlines()
    )

    assert lines["chat"].endswith("characters; --all prints it")
    assert "'" in lines["stop"]
    assert "config.hidden_size" in out
    assert "config.rms_norm_eps" not in out

    _, out, _ = cli("inspect", target, "--all")
    assert "config.rms_norm_eps" in out
    assert "add_generation_prompt" in out
    assert json.loads(cli("inspect", target, "--json")[1])["config"]["rms_norm_eps"]


def test_convert_recognizes_the_layout_and_writes_that_of_vllm(cli, tmp_path) -> None:
    head = Head().write(tmp_path / "head", "eagle")
    code, out, _ = cli(
        "convert", head, tmp_path / "out", "--target", write_llama(tmp_path / "target")
    )
    assert (code, out) == (
        0,
        f"read the head {head} (eagle layout), wrote {tmp_path / 'out'} (vllm layout)\n",
    )
    assert json.loads(cli("inspect", tmp_path / "out", "--json")[1])["dialect"] == "vllm"


def test_convert_reads_the_head_of_a_short_name_where_a_target_is_given(refused, tmp_path) -> None:
    target = write_llama(tmp_path / "target")
    message = refused("convert", "smollm2", tmp_path / "out", "--target", target)
    assert "assets/smollm2" in message
    assert "target" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--target", "is a language model, and --target names the target that a head belongs to"),
        ("--to", "is a language model, which has no layout 'eagle'; use --to jax, or one of vllm"),
    ],
)
def test_convert_refuses_options_that_a_target_has_not(
    cli, refused, tmp_path, option: str, message: str
) -> None:
    target = write_llama(tmp_path / "target")
    value = {"--target": target, "--to": "eagle"}[option]
    assert message in refused("convert", target, tmp_path / "out", option, value)
    assert not (tmp_path / "out").exists()

    _, out, _ = cli("convert", target, tmp_path / "out", "--to", "sglang")
    assert out == (
        f"read the target {target} (huggingface layout), wrote {tmp_path / 'out'} (huggingface"
        " layout)\n"
    )


def test_generate_prints_its_summary_before_it_compares(cli, monkeypatch) -> None:
    monkeypatch.setattr("eagle3_jax.cli.generate._comparison", lambda job: ["compared"])
    options = ("--max-new-tokens", 12, "--compare", "--compilation-cache", "none", "--ignore-eos")
    lines = cli("generate", "--prompt-ids", "[1, 2]", *TARGET, *options)[1].splitlines()
    speed = next(
        number
        for number, line in enumerate(lines)
        if line.startswith("12 tokens; first token after ")
    )
    assert lines[speed].endswith(" tokens/s from the second round on")
    assert lines[speed + 1].startswith("before that: loading ")
    assert lines.index("compared") == len(lines) - 1
