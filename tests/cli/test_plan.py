"""The command `eagle3 plan`: pages for people, objects for machines, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest
import tiny

from eagle3_jax.cli import run

OFFICIAL = tiny.GOLDEN / "official"


@pytest.fixture
def cli(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


BIG = ("--target", "Llama-3.3-70B", "--weights", "fp8", "--gpu", "H200")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("speedup", "--simulate", "100", "--traffic", "0.7:0.7,0.3:0.4"), "simulation"),
        (("speedup", "--mean-acceptance-length", "2.5", "--wanted", "2"), "wanted"),
        (("memory", *BIG), "fits"),
        (("memory", "--bandwidth-gb-per-s", "500"), "cache_capacity_tokens"),
        (("roofline",), "accelerators"),
        (("roofline", "--drafter", "none"), "accelerators"),
        (("roofline", *BIG, "--batch-size", "4", "--claim", "6200"), "accelerators"),
        (("cost", "--price-per-hour", "4", *BIG), "costs"),
        (("cost", "--price-per-hour", "4", "--tokens-per-second", "100"), "costs"),
        (("rollout", *BIG), "stages"),
    ],
)
def test_every_plan_is_a_page_for_people_and_an_object_for_machines(cli, arguments, field):
    code, out, err = cli(*arguments)
    assert (code, err) == (0, "")
    assert len(out) > 100
    for rate in re.finditer(r"(\w+)\s+acceptance[\s_-]rate", out):
        assert rate[1] in ("draft", "conditional"), out
    code, out, err = cli(*arguments, "--json")
    assert (code, err) == (0, "")
    assert field in json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_the_traffic_of_the_articles_is_blended_by_rounds(cli):
    _, out, _ = cli("speedup", "--traffic", "0.7:0.7,0.3:0.4", "--json")
    assert json.loads(out)["mean_acceptance_length"] == pytest.approx(2.388, abs=0.001)


def test_a_rollout_is_written_to_a_file(cli, tmp_path):
    path = tmp_path / "rollout.md"
    assert cli("rollout", *BIG, "--out", path)[:2] == (0, "")
    assert path.read_text().startswith("# Rollout of speculative decoding: Llama-3.3-70B\n")


def test_a_target_with_experts_says_what_verification_reads_of_them(cli):
    code, out, err = cli("roofline", "--target", "Qwen3-30B-A3B", "--gpu", "H200", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)["accelerators"][0]
    assert found["target_parameters"] == 30_532_122_624
    assert found["target_active_parameters"] == 3_041_867_776
    assert [round(128 * one["experts"]) for one in found["nodes"]] == [8, 16, 29, 52, 82, 112, 125]
    assert found["pays_from_batch"] == 5
    code, out, _ = cli("roofline", "--target", "Qwen3-30B-A3B", "--gpu", "H200")
    assert code == 0
    assert re.search(r"nodes +experts read +v\n1 +6\.2% +1\.00\n", out)
    assert "Speculation pays from batch 5 on." in out
    assert "at batch 1 and α = 0.70, a chain of K = 1 gains most" in out
    _, dense, _ = cli("roofline", *BIG)
    assert "experts" not in dense and "Speculation pays below batch" in dense


def test_memory_names_active_parameters_and_recurrent_states(cli):
    _, out, _ = cli("memory", "--target", "Qwen3-Next-80B-A3B", "--gpu", "H200", "--weights", "fp8")
    assert "79.674 billion, 3.564 of them active, fp8" in out
    assert re.search(r"states +0\.62 +of recurrent layers, whatever the length", out)
    _, out, _ = cli("memory", "--target", "gpt-oss-120b", "--gpu", "H100", "--weights", "mxfp4", "--batch-size", "4")
    assert re.search(r"target +65\.19 ", out) and "states" not in out  # the published files are 65.2 GB
    _, out, _ = cli("memory", *BIG)
    assert "active" not in out and "states" not in out
