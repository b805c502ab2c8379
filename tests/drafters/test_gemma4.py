"""Gemma 4's assistant: sampled output, files, and pairs that do not fit."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoints import edit_config, edit_tensors
from declared_distributions import Declared, Prefix
from exact_distributions import CHAIN
from oracle import Tree
from scipy import special

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion.doctor import diagnose
from eagle3_jax.conversion.inspect import describe
from eagle3_jax.loop import SpeculativeLoop
from eagle3_jax.sampling import row_keys
from eagle3_jax.testing.drafter import WithCache
from eagle3_jax.topology import Chain, DynamicTree

pytestmark = pytest.mark.core

PUBLISHED = Path(__file__).parent.parent / "golden" / "published"
NAMES = ("gemma4_dense", "gemma4_e")
SAMPLING = e3.SamplingParams(temperature=1.0)


@functools.cache
def target_of(name: str) -> e3.LoadedTarget:
    return e3.load_target(PUBLISHED / name / "target")


@functools.cache
def drafter_of(name: str) -> e3.LoadedDrafter:
    return e3.load_drafter(PUBLISHED / name / "drafter", target=target_of(name))


@functools.cache
def declared() -> Declared:
    """Returns the distributions of clusters of one token, of which two are computed."""
    target = tiny.target(3)
    sampling = {"draft_sampling": "probabilistic"}
    loaded = tiny.gemma4(target, Chain(2), num_centroids=3, num_clusters=2, **sampling)
    return Declared(target, loaded)


def likeliest(prefix: Prefix) -> Iterator[tuple[Fraction, Tree]]:
    """The likeliest tokens, declared as if they were sampled: transformers' issue 47932."""
    q = declared().q[prefix]
    first = int(np.argmax(q[()]))
    rows = [[Fraction(0)] * 3, q[()], q[first,]]
    second = int(np.argmax(rows[2]))
    yield Fraction(1), Tree((0, first, second), CHAIN, rows, [True] * 3)


def test_sampled_output_has_the_targets_distribution_and_that_of_transformers_has_not() -> None:
    assert declared().distance(declared().sampled) < 1e-6
    assert declared().distance(likeliest) > 0.02


def test_the_likeliest_token_declared_as_sampled_changes_what_recorded_models_write() -> None:
    """A token of probability 0.015 comes out with 0.072; 4000 draws of transformers gave 0.067."""
    name = "gemma4_dense"
    row = json.loads((PUBLISHED / name / "rounds.json").read_text())["prompts"][2]
    recorded = np.load(PUBLISHED / name / "drafter_logits.npz")
    target = target_of(name)
    text = jnp.asarray([[*row["prompt"], row["greedy"][0]]], jnp.int32)
    logits, _ = tiny.forward(target.model, target.params, text)
    p = special.softmax(np.asarray(logits[0, -1], np.float64))
    q = special.softmax(recorded["2_0"][0].astype(np.float64))

    token = int(q.argmax())
    residual = np.maximum(p - q, 0)
    residual /= residual.sum()
    accepted = min(1.0, p[token] / q[token])
    frequency = accepted + (1 - accepted) * residual[token]
    assert p[token] == pytest.approx(0.0154, abs=5e-4)
    assert frequency == pytest.approx(0.0723, abs=5e-4)
    # Sampled from q instead: every token is proposed with its probability, and p comes out.
    accept = np.minimum(1, p / q)
    np.testing.assert_allclose(q * accept + (1 - q @ accept) * residual, p, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    """After a prompt longer than the window, where a step sees one key more than the target."""
    target = target_of(name)
    loaded = drafter_of(name)
    rows = json.loads((PUBLISHED / name / "rounds.json").read_text())["prompts"]
    recorded = np.load(PUBLISHED / name / "drafter_logits.npz")
    part = WithCache(loaded.drafter.with_topology(None, "probabilistic"), target.model)
    params = (loaded.params, target.params)
    index = 5
    prompt = rows[index]["prompt"]
    size = len(prompt)

    @jax.jit
    def probs() -> jax.Array:
        tokens = jnp.asarray([prompt], jnp.int32)
        positions = jnp.arange(size, dtype=jnp.int32)[None]
        mask = tiny.causal_mask(size)
        read = target.model(target.params, tokens, positions, mask, aux_layers=part.aux_layers)
        seen = tiny.seen_of([prompt], read.features, [size], rows[index]["greedy"][:1])
        state = part.observe(params, part.init(params, 1, size + 8), seen)
        return part.propose(params, state, row_keys(0, 1), tiny.per_row(SAMPLING, 1)).probs

    # What is declared for the first token does not depend on the sample.
    expected = special.softmax(recorded[f"{index}_0"][0].astype(np.float64))
    # Processors round logits apart by 1e-4. Without the extra key a probability is 0.1 away.
    np.testing.assert_allclose(np.asarray(probs())[0, 1], expected, rtol=3e-4)


def decoders() -> dict[str, Callable[[], e3.SpeculativeDecoder]]:
    make = functools.partial(e3.SpeculativeDecoder, stop_tokens=())
    name = NAMES[1]
    schedule = e3.SpeculationSchedule(((1, 1, 0), (2, 8, 2)))
    tree = DynamicTree(num_nodes=9, max_depth=3, top_k=3)
    lookup = e3.drafters.NGram()
    return {
        "a tree": lambda: make(target_of(name), drafter_of(name), tree=tree),
        "a lookup": lambda: make(target_of(name), e3.Fallback.of(lookup, drafter_of(name))),
        "a schedule": lambda: make(target_of(name), drafter_of(name), schedule=schedule),
    }


@pytest.mark.parametrize("kind", decoders())
def test_greedy_text_is_kept_with(kind: str) -> None:
    prompts = [[5, 9, 30, 7, 7, 41, 3, 9, 30, 11, 2, 77], [4]]
    options = {"max_new_tokens": 12}
    plain = e3.SpeculativeDecoder(target_of(NAMES[1]), stop_tokens=())
    result = decoders()[kind]().generate(prompts, **options)
    assert result.tokens == plain.generate(prompts, **options).tokens
    assert result.stats.num_accepted_tokens > 0


def test_its_file_names_the_length_of_a_draft(tmp_path: Path) -> None:
    assert [drafter_of(name).drafter.max_depth for name in NAMES] == [4, 3]
    assert drafter_of(NAMES[0]).drafter.with_topology(Chain(2), None).max_depth == 2
    copied = shutil.copytree(PUBLISHED / NAMES[0] / "drafter", tmp_path / "drafter")
    (copied / "generation_config.json").unlink()
    assert e3.load_drafter(copied, target=target_of(NAMES[0])).drafter.topology is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["huggingface", "jax"])
def test_what_came_in_goes_out_again(tmp_path: Path, name: str, layout: str) -> None:
    source = PUBLISHED / name / "drafter"
    config = target_of(name).model.config
    conversion.convert(source, tmp_path / "out", layout, config)
    first = conversion.read_head(source, config)
    again = conversion.read_head(tmp_path / "out", config)
    assert again.config == first.config
    jax.tree.map(np.testing.assert_array_equal, again.head, first.head)
    np.testing.assert_array_equal(again.draft_to_target, first.draft_to_target)


def test_doctor_and_inspect_describe_a_right_pair_and_refuse_a_wrong_one() -> None:
    folder = PUBLISHED / "gemma4_e"
    checks = {check.name: check for check in diagnose(folder / "target", folder / "drafter")}
    assert (
        checks["keys"].detail
        == "of target layers 3 (9 tokens), 3 (9 tokens), 3 (9 tokens), 2 (all tokens)"
    )
    assert checks["clusters"].detail == "6 of 20 with 10 tokens each"
    assert not [check for check in checks.values() if check.status == "failure"]

    wrong = diagnose(PUBLISHED / "gemma4_dense" / "target", folder / "drafter")
    (failure,) = [check for check in wrong if check.status == "failure"]
    assert failure.detail.endswith(
        "reads features of width 56 but the target has 64; give the target that the head was"
        " trained for"
    )
    described = describe(folder / "drafter")
    assert described.kind == "draft head: Gemma 4 assistant"
    assert described.loadable and "give the target as well" in described.note


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"backbone_hidden_size": 60}, "reads features of width 60 but the target has 56"),
    "other heads": ({"text.head_dim": 10}, "1 key heads of 10 channels of target layer 3, which has 1 of 12"),
    "another kind": ({"text.layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
    "an end without full attention": (
        {"text.layer_types": ["sliding_attention"] * 4}, "layer_types ends with 'sliding_attention'",
    ),
    "clusters of two sizes": ({"num_centroids": 30}, "num_centroids 30 does not divide the vocabulary of 200"),
    "too many clusters": ({"centroid_intermediate_top_k": 21}, "centroid_intermediate_top_k is 21 of 20"),
    "an unknown field": ({"num_experts_of_mine": 2}, "num_experts_of_mine is not a known field"),
    "an unknown field of the layers": ({"text.flux": 2}, "flux is not a known field"),
    "no clusters": ({"use_ordered_embeddings": False}, "holds a masked_embedding.token_ordering"),
    "experts": ({"text.enable_moe_block": True}, "enable_moe_block is True; only False is supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_one_line(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    folder = shutil.copytree(PUBLISHED / "gemma4_e" / "drafter", tmp_path / "drafter")
    fields = {key: value for key, value in changes.items() if not key.startswith("text.")}
    inner = {key[5:]: value for key, value in changes.items() if key.startswith("text.")}
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit_config(folder, **fields, text_config={**text, **inner})
    with pytest.raises(conversion.CheckpointError) as error:
        e3.load_drafter(folder, target=target_of("gemma4_e"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_refuses_an_ordering_that_repeats_a_token(tmp_path: Path) -> None:
    folder = shutil.copytree(PUBLISHED / "gemma4_e" / "drafter", tmp_path / "drafter")
    edit_tensors(folder, **{"masked_embedding.token_ordering": np.zeros(200, np.int64)})
    with pytest.raises(conversion.CheckpointError, match="not a list of different target ids"):
        e3.load_drafter(folder, target=target_of("gemma4_e"))


def test_refuses_targets_without_the_keys_that_it_reads() -> None:
    head = conversion.read_head(
        PUBLISHED / "gemma4_e" / "drafter", target_of("gemma4_e").model.config
    )
    config = target_of("gemma4_e").model.config
    full = tuple(
        dataclasses.replace(
            layer,
            mixer=dataclasses.replace(layer.mixer, window=None, head_dim=16, shares_keys=False),
        )
        for layer in config.layers
    )
    without = dataclasses.replace(config, layers=full)
    with pytest.raises(
        conversion.CheckpointError, match="'sliding_attention', and the target has no keys"
    ):
        conversion.read_head(PUBLISHED / "gemma4_e" / "drafter", without)
    assert "of target layer 3, which has 1 of 16" in head.config.misfit(without)

    # By hand the cache is checked when the program is traced.
    target = tiny.target(13)
    loaded = tiny.gemma4(target, Chain(2), key_layers=(7,))
    with pytest.raises(ValueError, match="the target's layer 7 caches no keys"):
        e3.SpeculativeDecoder(target, loaded).generate([[1, 2]], max_new_tokens=2)


def test_a_drafter_that_reads_the_cache_takes_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class Deaf(e3.drafters.NGram):
        reads_cache: bool = True

    with pytest.raises(ValueError, match="takes no argument `cache`"):
        SpeculativeLoop(tiny.target(13).model, Deaf(2))
