"""What `pytest validation` fits, measures and reports on a GPU: everything but the GPU itself."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny

pytest.importorskip("scipy")

from eagle3_jax import LoadedTarget, load_target
from eagle3_jax.drafters import Eagle3Drafter
from eagle3_jax.measure.random_models import (
    SHAPES,
    bytes_needed,
    random_pair,
    shape_named,
    why_not,
)
from eagle3_jax.measure.results import Report
from eagle3_jax.measure.roofline import bandwidth, ceiling, step_bytes
from eagle3_jax.models.config import Experts, LayerConfig, usual_head
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16, MIXED, Precision
from eagle3_jax.rivals.memory import SHARE_OF_JAX, SHARE_OF_VLLM, share_memory
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.cost import cost_per_million_tokens
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment, memory_plan
from eagle3_jax.theory.sizes import parameters
from validation import speeds
from validation.checks import Check
from validation.device import share_of_jax
from validation.required import expected
from validation.subject import Subject, choose
from validation.tasks import answered_number, discordant_interval, is_right, questions, reference_number

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target()


def shipped_pair() -> Subject:
    return choose(gpu=False, rehearsal=False, target=None, drafter=None, prompt_files=[])


# ---------------------------------------------------------------- random models


def test_models_of_every_named_shape_have_the_sizes_that_planning_counts() -> None:
    for config in SHAPES.values():
        config = dataclasses.replace(config, layers=config.layers[:2])  # the others are like these, and take a minute
        leaves = tiny.jax.tree.leaves(DecoderTarget(config, BFLOAT16).param_shapes())
        assert sum(leaf.size for leaf in leaves) == parameters(config).total


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama-3.1-8B", 8.03), ("llama-3.2-1b", 1.24), ("Qwen3-8B", 8.19), ("Llama-100M", 0.10)]
)
def test_models_of_real_shapes_have_their_published_sizes(name: str, billions: float) -> None:
    """Parameters as the model cards count them."""
    leaves = tiny.jax.tree.leaves(DecoderTarget(shape_named(name), BFLOAT16).param_shapes())
    assert round(sum(leaf.size for leaf in leaves) / 1e9, 2) == billions


def test_an_unknown_shape_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"no shape 'GPT-9'; use one of Llama-3.2-1B, .*Llama-100M"):
        shape_named("GPT-9")


def test_the_head_of_llama_has_the_published_shape() -> None:
    config = usual_head(shape_named("Llama-3.1-8B"))
    assert (config.draft_vocab_size, config.aux_layers, config.num_layers) == (32_000, (2, 16, 29), 1)
    shapes = Eagle3Drafter(config, precision=BFLOAT16).param_shapes()
    assert shapes["fc"]["kernel"].shape == (3 * 4096, 4096)
    assert shapes["head"]["kernel"].shape == (4096, 32_000)


@pytest.mark.parametrize(
    ("name", "precision", "dtypes"),
    [
        ("Llama-tiny", BFLOAT16, {"bfloat16"}),
        ("Qwen3-tiny", BFLOAT16, {"bfloat16"}),
        ("Llama-tiny", MIXED, {"bfloat16", "float32"}),
    ],
)
def test_a_random_pair_decodes(name: str, precision: Precision, dtypes: set[str]) -> None:
    import eagle3_jax as e3

    target, drafter = random_pair(name.lower(), precision=precision)
    leaves = tiny.jax.tree.leaves((target.params, drafter.params["head"]))
    assert {str(leaf.dtype) for leaf in leaves} == dtypes
    result = e3.SpeculativeDecoder(target, drafter, num_speculative_tokens=2).generate([[1, 2, 3]], max_new_tokens=5)
    assert len(result.tokens[0]) == 5


def test_whether_a_model_fits_is_read_from_the_device() -> None:
    assert why_not(5 * 2**30, {"bytes_limit": 8 * 2**30, "bytes_in_use": 3 * 2**30}) is None
    reason = why_not(6 * 2**30, {"bytes_limit": 8 * 2**30, "bytes_in_use": 3 * 2**30})
    assert reason == "it needs 6.0 GiB and the device has 5.0 GiB left"
    assert why_not(1, None) == "the device does not tell how much memory it has"


def test_the_memory_of_a_model_is_that_of_its_weights_and_caches() -> None:
    config = shape_named("Llama-3.1-8B")
    weights = 2 * (8.03e9 + 3 * 4096**2 + 4096 * 32_000)  # and the head's layer, a few hundred million
    assert weights < bytes_needed(config, batch=1, capacity=1024) < 1.2 * weights
    more = bytes_needed(config, batch=1, capacity=2048) - bytes_needed(config, batch=1, capacity=1024)
    assert more == pytest.approx(1.1 * 1024 * 33 * 2 * 8 * 128 * 2, rel=1e-6)  # 32 layers and the head's


# ---------------------------------------------------------------- roofline and cost


def test_the_bytes_of_a_step_are_weights_and_caches(target: LoadedTarget) -> None:
    # 12 layers of attention (256 x (256 + 128 + 128) + 256 x 256) and SwiGLU (3 x 256 x 704) with two norms each, a
    # norm, and the output projection; the embedding is looked up, not read.
    weights = 4 * (12 * (256 * 512 + 256 * 256 + 3 * 256 * 704 + 2 * 256) + 256 + 256 * 4096)
    assert step_bytes(target, rows=1, context=0) == weights
    assert step_bytes(target, rows=3, context=10) == weights + 3 * 10 * 12 * 2 * 2 * 64 * 4
    layer = LayerConfig(
        mixer=tiny.layers(1)[0].mixer,
        mlp=Experts(num_experts=4, per_token=1, width=6, router="softmax", shared_width=5, bias=True),
    )
    routed = tiny.target(13, layers=(layer,))
    width = routed.model.config.width
    unread = 3 * 4 * (3 * width * 6 + 2 * 6 + width)  # three experts with their biases, in float32
    whole = sum(leaf.nbytes for leaf in tiny.jax.tree.leaves(routed.params)) - routed.params["embedding"].nbytes
    assert step_bytes(routed, rows=1, context=0) == whole - unread
    tied = tiny.target(13, tie_embeddings=True)
    assert step_bytes(tied, rows=1, context=0) == sum(leaf.nbytes for leaf in tiny.jax.tree.leaves(tied.params))


def test_bandwidth_is_that_of_some_memory(target: LoadedTarget) -> None:
    assert 1e8 < bandwidth(2**22) < 1e14
    assert ceiling(target, rows=1, context=0, large=2**22) > 1e8


def test_cost_by_hand() -> None:
    # 3.60 an hour is 0.001 a second; 500 tokens in it, so a million take 2,000 seconds.
    assert cost_per_million_tokens(500.0, 3.6) == pytest.approx(2.0)


# ---------------------------------------------------------------- speeds


def test_the_shipped_pairs_speed_on_a_gpu_is_no_claim() -> None:
    check, subject = Check("L9", "speed"), shipped_pair()
    assert speeds.is_quoted(subject, types.SimpleNamespace(gpu=False))
    assert not speeds.is_quoted(subject, types.SimpleNamespace(gpu=True))
    assert speeds.is_quoted(dataclasses.replace(subject, name="8B"), types.SimpleNamespace(gpu=True))
    report = Report(
        rows=[], baseline="plain", num_prompts=4, max_new_tokens=100, repeats=3, batch_size=1,
        programs_after_warm_up=0, bytes_per_second=None, not_measured=[],
    )  # fmt: skip
    speeds.keep(check, report, None, [], title="No claim: ", quoted=False)
    assert check.tables[0].title.startswith("No claim: ") and not check.plots
    assert list(check.numbers) == ["note"]


def test_a_rival_that_does_not_fit_is_missing_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(directory: Path, **options: object) -> list:
        raise RuntimeError(said)

    monkeypatch.setattr(speeds.TransformersContender, "load", load)
    missing: list[list] = []
    said = "CUDA out of memory. Tried to allocate 16 GiB"
    setting = types.SimpleNamespace(gpu=True, rehearsal=False)
    assert speeds.transformers_or_why_not(shipped_pair(), 4, setting, missing) == []
    assert missing[0][0] == "transformers generate" and missing[0][-1] == said
    said = "CUDA error: device-side assert triggered"
    with pytest.raises(RuntimeError, match="device-side"):
        speeds.transformers_or_why_not(shipped_pair(), 4, setting, missing)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "rehearsal"])
def test_few_engines_of_vllm_are_loaded_for_speed(kind: str) -> None:
    """Each takes minutes to load and compile: eight of them never fitted into the ten minutes of a command."""
    assert 2 <= expected(kind)["L9"]["speed beside vllm"] <= 3


# ---------------------------------------------------------------- task answers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 + 4 = <<3+4=7>>7 apples\n#### 7", "7"),
        ("#### $1,200.50 in all", "1200.5"),
        ("so 12 apples\n#### -3.00", "-3"),
        ("#### none", None),
        ("no mark: 5", None),
    ],
)
def test_the_number_of_a_reference(text: str, number: str | None) -> None:
    assert reference_number(text) == number


def test_an_answer_is_its_last_number() -> None:
    assert answered_number("First 3, then 4, so the answer is 12.") == "12"
    assert answered_number("#### 9 because of 4") == "9"
    assert answered_number("no idea") is None
    assert is_right("The total is $1,080.", "...\n#### 1080")
    assert not is_right("The total is 108.", "...\n#### 1080")


def test_code_is_right_when_it_begins_as_the_reference() -> None:
    reference = "    for e in l:\n        if e >= t:\n            return False\n    return True\n"
    assert is_right(
        "    for e in l:  # each\n\n        if e >= t:\n            return False\n    return True\n\nprint()", reference
    )
    assert not is_right("    return all(e < t for e in l)\n", reference)


def test_only_questions_that_one_side_missed_speak_about_a_difference() -> None:
    low, high = discordant_interval(4, 4)
    assert low < 0.5 < high
    assert discordant_interval(0, 12)[1] < 0.5  # 2 · 2^-12 < 0.01
    assert discordant_interval(0, 3)[1] > 0.5


def test_task_sanity_needs_a_target_that_answers_and_answers_to_compare(tmp_path: Path) -> None:
    subject = shipped_pair()
    with pytest.raises(ValueError, match="no chat template"):
        questions(subject, rehearsal=False)
    assert len(questions(subject, rehearsal=True)) == 8


# ---------------------------------------------------------------- the flow


def validate(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, "-m", "pytest", "--report-dir", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    report = tmp_path / "report.json"
    return done, json.loads(report.read_text()) if report.is_file() else {}


def test_a_rehearsal_runs_the_flow_and_says_that_it_is_one(tmp_path: Path) -> None:
    done, report = validate(
        tmp_path, "validation/test_task_sanity.py", "validation/test_speed.py", "--gpu", "--rehearse",
        "--price-per-hour", "3.6", "-k", "accuracy_does_not or Qwen3-tiny-batch-1]",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert report["rehearsal"] is True
    assert report["verdict"] != "passed"
    ran = {check["level"]: check for check in report["checks"] if check["verdict"] == "passed"}
    assert ran["L7"]["numbers"]["questions"] == 8
    rows = ran["L9"]["tables"][0]["rows"]
    assert [row[0] for row in rows] == ["plain bfloat16", "chain K=3", "tree N=16 G=4"]
    assert "accepted with probability 0.7" in ran["L9"]["tables"][0]["title"]
    assert all(isinstance(row[13], float) for row in rows)  # the cost
    assert report["environment"]["subject"]["name"] == "the shipped pair"


def test_without_a_gpu_task_sanity_is_no_part_of_the_run(tmp_path: Path) -> None:
    done, report = validate(tmp_path, "validation/test_task_sanity.py")
    assert done.returncode == 5, done.stdout[-3000:]  # nothing left to run
    (check,) = [check for check in report["checks"] if check["level"] == "L7"]
    assert (check["verdict"], check["reason"]) == ("not run", "only with --gpu")


def test_what_the_guide_says_of_memory_is_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines share the device; the smallest share, vLLM's, decides. JAX's is read as it is set."""
    guide = " ".join((ROOT / "validation" / "README.md").read_text().split())
    target = KNOWN_MODELS["Llama-3.1-8B"]
    fits, share_in_float32 = {}, 0.33
    for weights in ("bfloat16", "float32"):
        for name in ("H100", "H200"):
            one = Deployment(
                target=target,
                head=usual_head(target),
                accelerator=accelerator_named(name),
                weights=weights,
                cache=weights,
            )
            for share in (SHARE_OF_JAX, SHARE_OF_VLLM if weights == "bfloat16" else share_in_float32):
                plan = memory_plan(
                    one, batch=8, context=2048, num_draft_tokens=5, prefill_tokens=2048, utilization=share
                )
                fits[weights, name, share] = plan.fits
            assert f"{plan.total / 1e9:.0f} GB" in guide
            assert f"{one.accelerator.memory_bytes / 1e9:.0f} GB" in guide
    assert f"`--vllm-memory {share_in_float32}` gives it {plan.budget / 1e9:.0f} GB" in guide
    assert all(fit is (key[:2] != ("float32", "H100")) for key, fit in fits.items())
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    assert share_of_jax() == 0.75
    share_memory()
    assert share_of_jax() == SHARE_OF_JAX
