"""Latent attention: its absorbed form against explicit keys and values, and in a target.

`test_families.py` compares it with transformers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractMesh, PartitionSpec
from scipy.special import softmax

from eagle3_jax import LoadedTarget
from eagle3_jax.devices.sharding import MESH_AXES, param_shardings, row_shardings
from eagle3_jax.models.config import GatedMLP, Latent, RopeConfig, uniform
from eagle3_jax.models.context import BlockContext
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import bind, init_params
from eagle3_jax.models.latent import LatentAttention
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, MIXED, Precision, cast
from eagle3_jax.models.rope import inverse_frequencies

pytestmark = pytest.mark.core

WIDTH = 16
FED = 6
BATCH = 3
SMALL = Latent(num_heads=4, q_rank=10, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=5)
YARN = {"theta": 1e4, "type": "yarn", "factor": 8.0, "original_max_positions": 32, "mscale": 1.0}


def build(config: Any, *, precision: Any, rngs: Any) -> LatentAttention:
    return LatentAttention(
        config, d_in=WIDTH, width=WIDTH, norm_eps=0.5, precision=precision, rngs=rngs
    )


@functools.cache
def small(config: Latent = SMALL) -> dict[str, Any]:
    """Returns random parameters, those of norms included."""
    params = init_params(build, config, FLOAT32, jax.random.key(0))
    for seed, name in enumerate(("q_a_norm", "kv_a_norm")):
        if name in params:
            shape = params[name]["scale"].shape
            params[name]["scale"] = 1 + 0.3 * jax.random.normal(jax.random.key(seed), shape)
    for seed, name in enumerate(("q_a", "kv_a", "o")):
        if "bias" in params.get(name, ()):
            params[name]["bias"] = jax.random.normal(
                jax.random.key(seed), params[name]["bias"].shape
            )
    return params


def norm(x: np.ndarray, scale: Any) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale, np.float64)


def rotated(rope: RopeConfig, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Pairs of channels as complex numbers, each turned by its angle."""
    frequencies, scale = inverse_frequencies(rope, x.shape[-1])
    half = x.shape[-1] // 2
    first = x[..., ::2] if rope.interleaved else x[..., :half]
    second = x[..., 1::2] if rope.interleaved else x[..., half:]
    angles = positions[:, :, None, None] * frequencies
    turned = (first + 1j * second) * scale * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=-1 if rope.interleaved else -2).reshape(
        x.shape
    )


def laid_out(
    config: Latent, params: Any, x: np.ndarray, positions: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Computes the definition in float64, with keys and values of every head for every token."""
    weight = lambda *path: np.asarray(
        functools.reduce(lambda node, name: node[name], path, params), np.float64
    )
    bias = lambda name: np.asarray(params[name].get("bias", 0), np.float64)
    turned = lambda x: rotated(config.rope, x, positions)

    if config.q_rank is None:
        queries = x @ weight("q", "kernel")
    else:
        latents = norm(x @ weight("q_a", "kernel") + bias("q_a"), params["q_a_norm"]["scale"])
        queries = latents @ weight("q_b", "kernel")

    queries = queries.reshape(*x.shape[:2], config.num_heads, -1)
    queries[..., config.nope_dim :] = turned(queries[..., config.nope_dim :])

    both = x @ weight("kv_a", "kernel") + bias("kv_a")
    latents = norm(both[..., : config.kv_rank], params["kv_a_norm"]["scale"])
    shared = np.repeat(turned(both[:, :, None, config.kv_rank :]), config.num_heads, axis=2)

    keys = np.concatenate([np.einsum("bsr,hdr->bshd", latents, weight("key_up")), shared], axis=-1)
    values = np.einsum("bsr,hrd->bshd", latents, weight("value_up"))
    scale = config.scale or (config.nope_dim + config.rope_dim) ** -0.5
    scores = np.where(mask[:, None], np.einsum("bthd,bshd->bhts", queries, keys) * scale, -np.inf)
    out = np.einsum("bhts,bshd->bthd", softmax(scores, -1), values).reshape(*x.shape[:2], -1)

    return out @ weight("o", "kernel") + bias("o")


def random_inputs(fed: int = FED, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs, ragged positions and a random mask: every token sees itself."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, fed, WIDTH)).astype(np.float32)
    positions = rng.integers(0, 40, (BATCH, fed)).astype(np.int32)
    return x, positions, (rng.random((BATCH, fed, fed)) < 0.5) | np.eye(fed, dtype=bool)


VARIANTS = {
    "pairs of neighbours": SMALL,
    "halves": dataclasses.replace(SMALL, rope=RopeConfig()),
    "no rank of the queries": dataclasses.replace(SMALL, q_rank=None),
    "a scale of its own": dataclasses.replace(SMALL, scale=0.7),
    "biases": dataclasses.replace(SMALL, bias=True),
    "yarn": dataclasses.replace(
        SMALL, rope=RopeConfig(**YARN, mscale_all_dim=0.5, interleaved=True)
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_absorbed_form_is_the_definition_under_any_mask(name: str) -> None:
    config = VARIANTS[name]
    x, positions, mask = random_inputs()
    module = bind(build, config, FLOAT32, small(config))
    ours, _ = module(jnp.asarray(x), jnp.asarray(positions), BlockContext(mask=jnp.asarray(mask)))
    np.testing.assert_allclose(ours, laid_out(config, small(config), x, positions, mask), atol=2e-5)


@pytest.mark.parametrize("fed", [1, FED])
@pytest.mark.parametrize("precision", [BFLOAT16, MIXED], ids=lambda array: array.name)
def test_narrow_products_come_near_the_definition(precision: Precision, fed: int) -> None:
    x, positions, mask = (array[:, :fed] for array in random_inputs())
    module = bind(build, SMALL, precision, cast(small(), precision))
    run = jax.jit(lambda x, positions, mask: module(x, positions, BlockContext(mask=mask))[0])
    ours = run(jnp.asarray(x, precision.activations), positions, mask[:, :, :fed])
    assert ours.dtype == precision.activations
    expected = laid_out(SMALL, small(), x, positions, mask[:, :, :fed])
    np.testing.assert_allclose(
        np.asarray(ours, np.float64), expected, atol=0.03 * np.abs(expected).max()
    )


def test_the_cache_holds_one_latent_and_one_rotated_key_of_a_token() -> None:
    model = target().model
    cache = model.init_cache(2, 32)
    assert [leaf.shape for leaf in jax.tree.leaves(cache.layers)] == [(2, 1, 32, 12 + 4)] * 2


def target(vocab_size: int = 13, *, seed: int = 0, **options: Any) -> LoadedTarget:
    return tiny.target(
        vocab_size, seed=seed, layers=uniform(2, SMALL, GatedMLP(width=24)), **options
    )


PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4], [0, 1, 0, 1, 0]]


def test_a_latent_model_drafts_for_another() -> None:
    large = target()
    drafter = tiny.draft_model(large, num_layers=1, layers=uniform(1, SMALL, GatedMLP(width=24)))
    tiny.check_same_text(large, drafter, PROMPTS, max_new_tokens=12)


def test_a_mesh_divides_heads_and_no_latents() -> None:
    mesh = AbstractMesh((1, 2), MESH_AXES)
    model = target().model
    assert isinstance(model, DecoderTarget)
    specs = jax.tree.map(
        lambda sharding: sharding.spec, param_shardings(mesh, model, model.param_shapes())
    )

    attention = specs["blocks"][0]["attention"]
    divided = {"q_b": (None, "model"), "o": ("model", None)}
    for name in ("q_a", "q_b", "kv_a", "o"):
        assert attention[name]["kernel"] == PartitionSpec(*divided.get(name, ())), name
    assert attention["key_up"] == attention["value_up"] == PartitionSpec("model")

    cache = model.init_cache(2, 32)
    # It is a tree of shardings where arrays are announced.
    with tiny.unchecked():
        shardings = jax.tree.leaves(row_shardings(mesh, cache))
    assert [sharding.spec for sharding in shardings] == [PartitionSpec("data")] * 3
