"""An exported generation against the decoder that it came from, in a process without models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import eagle3_jax as e3

pytest.importorskip("flatbuffers")

from eagle3_jax.export import PLATFORMS, ExportedGeneration, export_generation, parameters_of

ROOT = Path(__file__).parent.parent.parent
OFFICIAL = Path(__file__).parent.parent / "golden" / "official"
PROMPTS = [[1, 17, 5, 42, 33, 9, 71, 8], [3], [8] * 12]
DRAFTS = {
    "chain": {"num_speculative_tokens": 3},
    "tree": {"tree": e3.DynamicTree(num_nodes=12, max_depth=4, top_k=3)},
    "none": {},
}


def decoder_of(name: str, **options) -> e3.SpeculativeDecoder:
    target = e3.load_target(OFFICIAL / "target")
    drafter = None if name == "none" else e3.load_drafter(OFFICIAL / "eagle3", target=target)
    return e3.SpeculativeDecoder(target, drafter, **DRAFTS[name], **options)


@pytest.fixture(scope="module")
def chain():
    decoder = decoder_of("chain")
    return decoder, export_generation(decoder, batch=3, prompt_tokens=16, max_new_tokens=9)


def test_a_process_without_models_writes_the_decoders_tokens(chain, tmp_path):
    decoder, exported = chain
    exported.save(tmp_path / "generation.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["generation.zip"]
    save_file({k: np.asarray(v) for k, v in parameters_of(decoder).items()}, tmp_path / "weights.safetensors")
    code = f"""
import json, sys, jax
from safetensors.numpy import load_file
traced = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **details: traced.append(details["fun_name"]) if event.endswith("jaxpr_trace_duration") else None
)
from eagle3_jax.export import PLATFORMS, ExportedGeneration
generation = ExportedGeneration.load({str(tmp_path / "generation.zip")!r})
rows = generation(load_file({str(tmp_path / "weights.safetensors")!r}), {PROMPTS})
loaded = [name for name in sys.modules if name.split(".")[0] in ("flax", "eagle3_jax", "conversion", "tokenizers")]
print(json.dumps([[row.tokens for row in rows], loaded, traced]))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens, loaded, traced = json.loads(done.stdout.splitlines()[-1])
    assert tokens == decoder.generate(PROMPTS, max_new_tokens=9).tokens
    assert any(len(row) < 9 for row in tokens)  # a stop token ends the first one, as it does there
    assert sorted(loaded) == ["eagle3_jax", "eagle3_jax._unshaped", "eagle3_jax.export"]
    assert traced == ["call"]  # the one call that runs it


SETTINGS = (((0.0, 0, 1.0), 0), ((0.9, 20, 0.9), 2**32 - 1))


@pytest.mark.parametrize(("name", "asked"), [("chain", SETTINGS), ("tree", SETTINGS[-1:])])
def test_it_samples_as_the_decoder_does(name, asked):
    decoder = decoder_of(name, stop_tokens=())
    exported = export_generation(
        decoder, batch=3, prompt_tokens=16, max_new_tokens=9, sampling_mode=e3.SamplingMode.TRUNCATED
    )
    for settings, seed in asked:
        temperature, top_k, top_p = settings
        sampling = e3.SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        expected = decoder.generate(PROMPTS, max_new_tokens=9, sampling=sampling, seed=seed)
        rows = exported(parameters_of(decoder), PROMPTS, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        assert [row.tokens for row in rows] == expected.tokens
        assert sum(row.num_drafts for row in rows) == int(expected.stats.num_drafts)
        assert sum(row.num_accepted_tokens for row in rows) == int(expected.stats.num_accepted_tokens)


def test_it_stops_where_the_target_has_no_more_positions():
    decoder = decoder_of("none", stop_tokens=())
    exported = export_generation(decoder, prompt_tokens=510, max_new_tokens=9)
    assert len(exported(parameters_of(decoder), [[1] * 508])[0].tokens) == 512 - 508


def test_one_file_runs_on_several_platforms(chain, tmp_path):
    decoder, _ = chain
    exported = export_generation(decoder, prompt_tokens=4, max_new_tokens=2, platforms=PLATFORMS)
    exported.save(tmp_path / "both.zip")
    loaded = ExportedGeneration.load(tmp_path / "both.zip")
    assert loaded.about == exported.about
    assert tuple(loaded.about.platforms) == loaded.program.platforms == PLATFORMS
    parameters = parameters_of(decoder)
    assert loaded(parameters, [[1, 17]])[0].tokens == decoder.generate([[1, 17]], max_new_tokens=2).tokens[0]


@pytest.mark.parametrize("platforms", [("nonsense",), ("cpu", "gpu"), "cpu", ()])
def test_an_unknown_platform_is_refused_before_anything_is_traced(chain, platforms):
    with pytest.raises(ValueError, match=r"^platforms is .*; expected one or several of cpu, cuda, rocm, tpu, such as"):
        export_generation(chain[0], platforms=platforms)


def test_a_shared_array_is_one_parameter(chain):
    decoder, exported = chain
    assert decoder.params.drafter["embedding"] is decoder.params.target["embedding"]
    names = list(exported.about.parameters)
    assert sum(name.endswith("embedding") for name in names) == 1
    assert len(names) == len({id(leaf) for leaf in jax.tree.leaves(decoder.params)})


def test_what_it_was_not_made_for_is_refused(chain):
    decoder, exported = chain
    parameters = parameters_of(decoder)
    name, *others = parameters
    fewer = {other: parameters[other] for other in others}
    for given, prompts, options, message in (
        (parameters, PROMPTS[:2], {}, "2 prompts were given; exported for exactly 3"),
        (parameters, [[1], [2], [3] * 17], {}, "a prompt is empty or too long; exported for 1 to 16"),
        (parameters, [[1], [2], []], {}, "a prompt is empty or too long; exported for 1 to 16"),
        (parameters, [[1], [2], [96]], {}, "outside the vocabulary; expected 0 to 95"),
        (parameters, PROMPTS, {"max_new_tokens": 10}, "max_new_tokens is 10; exported for 1 to 9"),
        (parameters, PROMPTS, {"temperature": 1.0}, "exported with sampling_mode temperature; this one is greedy"),
        (parameters, PROMPTS, {"temperature": 1.0, "top_k": 5}, "with sampling_mode truncated; this one is greedy"),
        (parameters, PROMPTS, {"seed": -1}, "and seed -1; expected"),
        (parameters, PROMPTS, {"temperature": -1.0}, "expected at least 0"),
        ({**parameters, name: parameters[name][:1]}, PROMPTS, {}, f"{name} is float32.*; exported for float32"),
        (fewer, PROMPTS, {}, f"the parameter {name} is missing; exported for float32"),
    ):
        with pytest.raises(ValueError, match=message):
            exported(given, prompts, **options)
    with pytest.raises(ValueError, match="a prompt shorter than the 512 positions"):
        export_generation(decoder, prompt_tokens=512)
    with pytest.raises(ValueError, match="accepts by SimulatedAcceptance, so its output is not the target's"):
        export_generation(decoder_of("chain", verifier=e3.SimulatedAcceptance((0.5, 0.5, 0.5))))


def test_a_file_that_cannot_be_read_is_refused_in_one_line(chain, tmp_path):
    path = tmp_path / "generation.zip"
    chain[1].save(path)
    with zipfile.ZipFile(path) as archive:
        about = archive.read("about.json")
        program = archive.read("program.jax")

    def rewritten(about: bytes, program: bytes | None) -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("about.json", about)
            if program is not None:
                archive.writestr("program.jax", program)
        return path

    for broken, message in (
        (lambda: rewritten(about, None), "is not an exported generation"),
        (lambda: rewritten(about[:50], program), "is not an exported generation"),
        (lambda: rewritten(about.replace(b'"format": 2', b'"format": 3'), program), "is of format 3; this version"),
        (lambda: rewritten(about, program[: len(program) // 2]), "was written with jax .* cannot read it .*; export"),
        (lambda: path.write_text("text"), "is not an exported generation"),
    ):
        broken()
        with pytest.raises(ValueError, match=message) as refused:
            ExportedGeneration.load(path)
        assert "\n" not in str(refused.value)
