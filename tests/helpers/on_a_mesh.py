"""Runs generations on a mesh of eight devices, and prints a JSON object for ``test_mesh.py``.

In float32, and with seeds at which no two logits nearly tie: a product that is summed on several
devices differs in its last bits from the same one on one device.
"""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
import tiny

import eagle3_jax as e3
from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.devices import groups
from eagle3_jax.devices.sharding import make_mesh, parse_mesh, row_shardings
from eagle3_jax.drafters import NGram
from eagle3_jax.engine.engine import Engine
from eagle3_jax.models import attention
from eagle3_jax.models.config import GatedMLP, GroupedQuery, LayerConfig, uniform
from eagle3_jax.prompts.request import Request
from eagle3_jax.types import SamplingMode

MIXED = "model=4,data=2"
LAYERS = 2
CHAIN = {"num_speculative_tokens": 3}
TREE = {"tree": e3.DynamicTree(num_nodes=8, max_depth=3, top_k=4)}
SAMPLED = CHAIN | {"draft_sampling": e3.DraftSampling.PROBABILISTIC}
# None is drafted while more than six rows run.
SCHEDULE = {"schedule": e3.SpeculationSchedule(((1, 2, 3), (3, 6, 2)))}
WARM = e3.SamplingParams(temperature=1.0)
NUCLEUS = e3.SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
PROMPTS = tiny.random_prompts(8, 60, seed=3)
LIMITS = [5, 17, 9, 20, 1, 12, 16, 7]  # rows end in different rounds
MOVES = re.compile(
    r"= \(?\w+\[([\d,]*)\].*?"
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def pair(**options: Any) -> tuple[LoadedTarget, LoadedDrafter]:
    """Returns a pair with eight key heads; four devices divide its vocabulary, eight do not."""
    layers = stack(LAYERS)
    target = tiny.target(60, layers=layers, **options)
    return target, tiny.eagle3(target, draft_vocab_size=32, layers=stack(1))


def stack(count: int) -> tuple[LayerConfig, ...]:
    return uniform(
        count, GroupedQuery(num_heads=16, num_kv_heads=8, head_dim=4), GatedMLP(width=24)
    )


def mesh_of(text: str) -> jax.sharding.Mesh:
    return make_mesh(text, devices=jax.devices()[: math.prod(parse_mesh(text).values())])


def generated(
    models: Any, text: str | None, sampling: Any = None, **options: Any
) -> list[list[int]]:
    decoder = e3.SpeculativeDecoder(
        *models, mesh=None if text is None else mesh_of(text), **options
    )
    return decoder.generate(PROMPTS, max_new_tokens=LIMITS, sampling=sampling, seed=7).tokens


def streamed(models: Any, text: str, row: int, **options: Any) -> list[int]:
    decoder = e3.SpeculativeDecoder(*models, mesh=mesh_of(text), **options)
    chunks = decoder.stream(PROMPTS[row], max_new_tokens=LIMITS[row])
    return [token for chunk in chunks for token in chunk.tokens]


def driven(models: Any, text: str, **options: Any) -> list[list[int]]:
    """Generates round by round, and checks the sharding of every leaf of the state."""
    decoder = e3.SpeculativeDecoder(*models, mesh=mesh_of(text), **options)
    state = decoder.prefill(PROMPTS, max_new_tokens=LIMITS)
    shardings = row_shardings(mesh_of(text), state)

    while state.running.any():
        for leaf, sharding in zip(*map(jax.tree.leaves, (state, shardings)), strict=True):
            assert leaf.size == 0 or leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (
                leaf.sharding,
                sharding,
            )
        state = decoder.step(state).state

    rows = zip(PROMPTS, state.tokens.tolist(), state.length.tolist(), strict=True)
    return [tokens[len(prompt) : length] for prompt, tokens, length in rows]


def pooled(models: Any, text: str, **options: Any) -> list[list[int]]:
    """Generates in four rows that are given to other prompts as they end."""
    decoder = e3.SpeculativeDecoder(*models, mesh=mesh_of(text), **CHAIN)
    requests = [Request(prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    return Engine(decoder, slots=4, capacity=64, sampling_mode=SamplingMode.GREEDY, **options).run(
        requests
    )


def moved(models: Any, text: str, sampling: Any = None, **options: Any) -> Mapping[str, Any]:
    """Returns the collectives of a step, the largest, and a layer's keys on a device."""
    mesh = mesh_of(text)
    sampling_mode = SamplingMode.GREEDY if sampling is None else SamplingMode.TRUNCATED
    decoder = e3.SpeculativeDecoder(*models, mesh=mesh, **options)
    loop = loops.SpeculativeLoop(
        decoder.loop.target, decoder.loop.drafter, sampling_mode=sampling_mode
    )

    batch = tiny.prompts(PROMPTS, limit=20, width=16)
    state = jax.eval_shape(lambda params: loop.prefill(params, batch, 128), decoder.params)
    on_mesh = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    state = jax.tree.map(on_mesh, state, row_shardings(mesh, state))

    with jax.set_mesh(mesh):
        compiled = loops.step.lower(loop, decoder.params, state).compile()

    size_of = lambda shape: math.prod(map(int, filter(None, shape.split(","))))
    collectives = [(kind, size_of(shape)) for shape, kind in MOVES.findall(compiled.as_text())]
    keys = jax.tree.leaves(state.cache.layers[0])[0]

    return {
        "moves": collections.Counter(kind for kind, _ in collectives),
        "largest": max((size for _, size in collectives), default=0),
        "keys": math.prod(keys.sharding.shard_shape(keys.shape)),
    }


def prefilled(models: Any, text: str, rows_per_group: int) -> Mapping[str, Any]:
    """Returns collectives and tokens of a prefill of ``rows_per_group`` rows at a time.

    Queries are processed 64 at a time.
    """
    # Compiled programs do not depend on the limits that are set here.
    jax.clear_caches()
    mesh = mesh_of(text)
    fed = 192
    limits = (
        (rows_per_group * fed // mesh.shape["data"], 1)
        if rows_per_group < len(PROMPTS)
        else (10**9, 10**9)
    )

    with (
        mock.patch.object(groups, "TOKENS", limits[0]),
        mock.patch.object(attention, "_SCORES", limits[1]),
    ):
        decoder = e3.SpeculativeDecoder(*models, mesh=mesh, **CHAIN)
        batch = tiny.prompts(PROMPTS, limit=20, width=fed)
        batch = jax.device_put(batch, row_shardings(mesh, batch))
        with jax.set_mesh(mesh):
            compiled = loops.prefill.lower(
                decoder.loop, decoder.params, batch, capacity=256
            ).compile()
            state = compiled(decoder.params, batch)

    moves = MOVES.findall(compiled.as_text())
    return {
        "moves": collections.Counter(kind for _, kind in moves),
        "tokens": state.tokens.tolist(),
    }


if __name__ == "__main__":
    models = pair()
    tied = pair(tie_embeddings=True, seed=2)
    greedy = generated(models, None, **CHAIN)
    of_tied = generated(tied, None, **CHAIN)
    ngram = (models[0], NGram(3))
    # Greedy texts are those of plain decoding, whatever drafts.
    same = {
        "chain, data=8": generated(models, "data=8", **CHAIN) == greedy,
        "chain, model=8": generated(models, "model=8", **CHAIN) == greedy,
        "chain": generated(models, MIXED, **CHAIN) == greedy,
        "tree": generated(models, MIXED, **TREE) == greedy,
        "plain": generated(models[:1], MIXED) == greedy,
        "n-gram": generated(ngram, MIXED) == greedy,
        "schedule": generated(models, MIXED, **SCHEDULE) == greedy,
        "schedule, model=8": generated(models, "model=8", **SCHEDULE) == greedy,
        "a tied table": generated(tied, MIXED, **CHAIN) == of_tied,
        "stream, model=8": streamed(models, "model=8", 3, **CHAIN) == greedy[3],
        "rows given to other prompts": pooled(models, MIXED) == greedy,
        "prompts in chunks": pooled(models, MIXED, chunk=4) == greedy,
        "round by round": driven(models, MIXED, **CHAIN) == greedy,
    }
    for name, sampling, options in (
        ("chain, sampled", NUCLEUS, CHAIN),
        ("tree, sampled", NUCLEUS, TREE),
        ("sampled chain", WARM, SAMPLED),
    ):
        on_one_device = generated(models, None, sampling, **options)
        assert on_one_device != greedy
        same[name] = generated(models, MIXED, sampling, **options) == on_one_device
    steps = {
        "chain": moved(models, MIXED, **CHAIN),
        "chain, data=8": moved(models, "data=8", **CHAIN),
        "chain, tied": moved(tied, MIXED, **CHAIN),
        "tree": moved(models, MIXED, **TREE),
        "tree, sampled": moved(models, MIXED, NUCLEUS, **TREE),
        "n-gram, data=8": moved(ngram, "data=8"),
    }
    at_once, parts = (prefilled(models, MIXED, rows) for rows in (len(PROMPTS), 4))
    same["prefill in parts"] = at_once["tokens"] == parts["tokens"]
    prefills = [prefill["moves"] for prefill in (at_once, parts)]
    print(json.dumps({"same": same, "steps": steps, "prefills": prefills}))
