"""The command `eagle3 plan`: pages for people, objects for machines, and what it refuses."""

from __future__ import annotations

import json
import re
import sys

import pytest
import tiny

from eagle3_jax.cli import run
from eagle3_jax.load import bundled

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
        (("speedup", "--simulate", "100", "--traffic", "0.7:0.7,0.3:0.4"), "break_even_map"),
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


def test_an_impossible_claim_is_called_so(cli):
    _, out, _ = cli("roofline", *BIG, "--context", "0", "--batch-size", "4", "--claim", "6200")
    assert "IMPOSSIBLE" in out
    assert "batch 92" in out


def test_figures_of_a_model_that_fits_into_a_cache_are_not_called_bounds(cli):
    _, out, _ = cli("roofline", "--gpu", "H100")
    assert "no bound for it" in out


@pytest.mark.parametrize("command", ["speedup", "roofline"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_written_where_it_is_asked_for(cli, tmp_path, command, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    assert cli(command, *(BIG if command == "roofline" else ()), "--plot", path)[0] == 0
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_plot_without_matplotlib_says_what_to_install(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    code, out, err = cli("speedup", "--plot", tmp_path / "plot.png")
    assert (code, out) == (2, "")
    assert err == "error: this needs matplotlib: pip install 'eagle3-jax[plot]'\n"


def test_the_exercises_are_printed_and_a_rollout_is_written_to_a_file(cli, tmp_path):
    assert cli("speedup", "--exercises")[1].count("?") >= 5
    path = tmp_path / "rollout.md"
    assert cli("rollout", *BIG, "--out", path)[:2] == (0, "")
    assert path.read_text().startswith("# Rollout of speculative decoding: Llama-3.3-70B\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("memory", "--gpu", "H300"), "did you mean H200? known are B200, H200,"),
        (("memory", "--gpu", "abacus"), "'abacus' is not known; known are B200"),
        (("cost", "--tokens-per-second", "10"), "--price-per-hour"),
        (("memory", "-K", "512"), "the bundled head has 512 positions, so K is at most 511"),
        (("roofline", *BIG, "-K", "2048"), "K is at most 2047"),
        (("memory", "--context", "513"), "beyond the 512 positions"),
        (("roofline", "--target", "nosuch"), "neither a directory, a hub id"),
        (("roofline", "--claim", "9"), "add --batch-size"),
        (("roofline", "--claim", "9", "--batch-size", "1"), "add --gpu"),
        (("memory", "--memory-gb", "80"), "add --bandwidth-gb-per-s"),
        (("memory", "--weights", "nf4"), "'nf4' are not known"),
        (("memory", "--cache", "int4"), "'int4' is not known"),
        (("memory", "--target", "Qwen3-8B", "--num-gpus", "3"), "cannot be divided by 3"),
        (("memory", "--target", "Qwen3-8B", "--drafter", OFFICIAL / "eagle3"), "features of width"),
        (
            ("memory", "--target", "Qwen3-8B", "--drafter", OFFICIAL / "target"),
            "model of 96 tokens and Qwen3-8B",
        ),
        (("speedup", "--alpha", "0.5", "--draft-acceptance-rate", "0.5"), "give one"),
        (("speedup", "--mean-acceptance-length", "7"), "a round emits 1 to 6"),
        (("speedup", "--traffic", "0.5:0.3"), "sum to 1"),
        (("speedup", "--traffic", "much"), "SHARE:ALPHA"),
        (("speedup", "--traffic", "1:0.5", "--alpha", "0.5"), "leave the other options"),
        (("speedup", "--plot", "plot.gif"), ".png or .svg"),
        (("rollout", "--drafter", "none"), "needs a head"),
        (("rollout", "--verify-cost", "1.2"), "give both or neither"),
        (("rollout", "--out", "/nowhere/rollout.md"), "cannot be written"),
    ],
)
def test_bad_input_is_refused_with_one_line(cli, arguments, message):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"model_type": "mixtral"}, "the families of targets are llama, mistral"),
        ({"sliding_window": 4096}, "only full attention"),
        ({"head_dim": None, "hidden_size": 65}, "add head_dim"),
    ],
)
def test_a_config_that_cannot_be_planned_with_says_what_is_wrong(cli, tmp_path, changes, message):
    config = json.loads((bundled("target") / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = cli("memory", "--target", tmp_path)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


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
    assert re.search(r"nodes +experts read +GB +v\n1 +6\.2% +6\.18 +1\.00\n", out)
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
