"""Tiny targets, heads and test-only drafters. They run the library's own code, not mocks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax import drafters, load_drafter, load_target
from eagle3_jax import loop as loops
from eagle3_jax.cache import Cache, KeyValues
from eagle3_jax.checks import per_row
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.drafters import (
    DFlash2Config,
    DFlash2Drafter,
    DFlashConfig,
    DFlashDrafter,
    Eagle1Config,
    Eagle1Drafter,
    Eagle3Config,
    Eagle3Drafter,
    Gemma4AssistantConfig,
    Gemma4AssistantDrafter,
    MedusaConfig,
    MedusaDrafter,
    MTPConfig,
    MTPDrafter,
    PEagleConfig,
    PEagleDrafter,
)
from eagle3_jax.loop import LoopParams, Prompts, SpeculativeLoop
from eagle3_jax.models.config import (
    DecoderConfig,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    grouped,
    uniform,
)
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import FLOAT32, Precision
from eagle3_jax.results import GenerationResult
from eagle3_jax.sampling import row_keys
from eagle3_jax.testing.scripted import FixedTree, RootState, chain_parents
from eagle3_jax.topology import Chain, StaticTree, Topology
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, DraftSampling, FinishReason, Observation, SamplingParams

GOLDEN = Path(__file__).parent.parent / "golden"
STATIC_TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
AUX_LAYERS = (0, 1, 2)


def layers(count: int = 2, **mixer: Any) -> tuple[LayerConfig, ...]:
    """Returns layers of a few hundred parameters, with grouped queries."""
    return uniform(
        count,
        GroupedQuery(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **mixer}),
        GatedMLP(width=24),
    )


def config(vocab_size: int, num_layers: int = 2, **options: Any) -> DecoderConfig:
    """Returns a decoder of a few hundred parameters, with grouped queries."""
    stack = {"width": 16, "layers": layers(num_layers), "max_positions": 512}
    return DecoderConfig(vocab_size=vocab_size, **{**stack, **options})


def target(
    vocab_size: int = 13, *, seed: int = 0, precision: Precision = FLOAT32, **options: Any
) -> LoadedTarget:
    """Returns a random target whose next token depends strongly on its context."""
    model = DecoderTarget(config(vocab_size, **options), precision)
    params = copied(_random_params(model, seed))
    # It is initialised with 0.02, too faint to matter without training.
    params["embedding"] = params["embedding"] * 50.0
    return LoadedTarget(model, params, vocab_size, model.config.max_positions)


random_target = target  # for functions with a parameter `target`


@functools.cache
def _random_params(model: DecoderTarget, seed: int) -> Any:
    """Initialises a model once: tests build the same models often, and compiling takes long."""
    return model.init(jax.random.key(seed))


@functools.cache
def _random_network(kind: Any, config: Any, precision: Precision, seed: int) -> Any:
    return kind(config, precision=precision).init_params(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0)
def forward(model: Any, params: Any, tokens: Int[Array, "B T"]) -> tuple[Array, Array]:
    """Returns logits and final states of texts, by one causal pass without a cache."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    final = model(params, tokens, positions, causal_mask(tokens.shape[1])).final
    return model.unembed(params, final), final


def in_blocks(
    model: DecoderTarget, params: Any, texts: np.ndarray, *, prompt: int, size: int, capacity: int
) -> tuple[np.ndarray, Cache]:
    """Returns the logits after a prompt, ``size`` tokens of every text at a time, and the cache.

    The last block is left out if it is not full.
    """
    tokens = jnp.asarray(texts)
    batch, end = tokens.shape
    lengths = jnp.full((batch,), prompt, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(prompt, dtype=jnp.int32), (batch, prompt))

    @jax.jit
    def prefill(params: Any) -> Cache:
        output = model(params, tokens[:, :prompt], positions, causal_mask(prompt), length=lengths)
        return model.init_cache(batch, capacity).fill(output.written, lengths)

    @jax.jit
    def step(params: Any, cache: Cache, block: Array) -> tuple[Array, Cache]:
        at = cache.length[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        output = model(params, block, at, causal_mask(size), cache, is_chain=True)
        return model.unembed(params, output.final), cache.commit(
            output.written, jnp.full((batch,), size, jnp.int32)
        )

    cache = prefill(params)
    logits = []
    for start in range(prompt, end - size + 1, size):
        block_logits, cache = step(params, cache, tokens[:, start : start + size])
        logits.append(np.asarray(block_logits))
    return np.concatenate(logits, axis=1), cache


def copied(params: Any) -> Any:
    """Returns new dictionaries that hold the same arrays."""
    return jax.tree.map(lambda leaf: leaf, params)


def eagle3(
    target: LoadedTarget, topology: Topology = Chain(3), *, num_layers: int = 1, **options: Any
) -> LoadedDrafter:
    """Returns a random EAGLE-3 head; its draft ids are random, in ascending order."""
    return _of_features(
        target, Eagle3Drafter, Eagle3Config, topology, **{"layers": layers(num_layers), **options}
    )


def p_eagle(target: LoadedTarget, topology: Topology = Chain(3), **options: Any) -> LoadedDrafter:
    """Returns a random P-EAGLE head of two layers, with the options of :func:`eagle3`."""
    fields = {"layers": layers(2), "mask_token_id": target.vocab_size - 1, **options}
    return _of_features(target, PEagleDrafter, PEagleConfig, topology, **fields)


def _of_features(
    target: LoadedTarget, drafter: Any, config: Any, topology: Topology, **options: Any
) -> LoadedDrafter:
    options = {
        "draft_vocab_size": target.vocab_size,
        "target_width": target.model.config.width,
        **options,
    }
    return _random_drafter(
        target, drafter, config, topology, aux_layers=AUX_LAYERS, ids_needed=True, **options
    )


def eagle1(
    target: LoadedTarget, topology: Topology = Chain(3), *, num_layers: int = 1, **options: Any
) -> LoadedDrafter:
    """Returns a random EAGLE-1 head for a target."""
    depth = target.model.config.num_layers
    return _random_drafter(
        target,
        Eagle1Drafter,
        Eagle1Config,
        topology,
        layers=layers(num_layers),
        num_target_layers=depth,
        **options,
    )


def mtp(
    target: LoadedTarget, topology: Topology | None = Chain(3), **options: Any
) -> LoadedDrafter:
    """Returns random MTP modules for a target, by default one."""
    depth = target.model.config.num_layers
    fields = {"layers": layers(1), "num_target_layers": depth}
    return _random_drafter(target, MTPDrafter, MTPConfig, topology, **{**fields, **options})


def dflash(
    target: LoadedTarget,
    topology: Topology | None = None,
    *,
    draft_vocab_size: int | None = None,
    **options: Any,
) -> LoadedDrafter:
    """Returns a random block drafter of one layer, whose blocks draft four tokens."""
    return _block_drafter(target, DFlashDrafter, DFlashConfig, topology, draft_vocab_size, options)


def dflash2(
    target: LoadedTarget, topology: Topology | None = None, **options: Any
) -> LoadedDrafter:
    """Returns a random DFlash2 drafter of one layer, whose rows keep five candidates."""
    sizes = {"conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5}
    loaded = _block_drafter(
        target, DFlash2Drafter, DFlash2Config, topology, None, {**sizes, **options}
    )
    for table in ("before", "after"):
        # They are initialised with 0.02, too faint to matter without training.
        loaded.params["head"]["selector"][table] *= 100.0
    return loaded


def _block_drafter(
    target: LoadedTarget,
    drafter: Any,
    config: Any,
    topology: Topology | None,
    draft_vocab_size: int | None,
    options: dict[str, Any],
) -> LoadedDrafter:
    size = draft_vocab_size or target.vocab_size
    fields = {
        "layers": layers(1, qk_norm=True),
        "draft_vocab_size": size,
        "target_width": target.model.config.width,
        "aux_layers": AUX_LAYERS,
        "mask_token": target.vocab_size - 1,
        "own_output": size < target.vocab_size,
        "block_size": 5,
    }

    loaded = _random_drafter(target, drafter, config, topology, **{**fields, **options})
    if loaded.drafter.config.markov is not None:
        # It is initialised with 0.01, too faint to matter without training.
        loaded.params["head"]["markov"]["before"] *= 200.0

    return loaded


def medusa(target: LoadedTarget, topology: Topology | None = None, **options: Any) -> LoadedDrafter:
    """Returns random Medusa heads. Their ids are a random subset of the target's, in no order."""
    fields = {
        "draft_vocab_size": target.vocab_size,
        "num_heads": 4,
        "num_target_layers": target.model.config.num_layers,
        "width": None,
        "max_positions": None,
        "target_width": target.model.config.width,
    }
    return _random_drafter(
        target, MedusaDrafter, MedusaConfig, topology, in_order=False, **{**fields, **options}
    )


def gemma4(target: LoadedTarget, topology: Topology | None = None, **options: Any) -> LoadedDrafter:
    """Returns a random assistant of Gemma 4 that reads the keys of the target's last layer."""
    depth = target.model.config.num_layers
    mixer = dataclasses.replace(
        grouped(target.model.config.layers[-1]), shares_keys=True, qk_norm=True
    )
    layer = LayerConfig(mixer=mixer, mlp=GatedMLP(width=24), norms="around", output_scale=True)
    fields = {
        "layers": (layer,),
        "key_layers": (depth - 1,),
        "num_target_layers": depth,
        "target_width": target.model.config.width,
        "hidden_width": 12,
        "width": None,
        **options,
    }
    clustered = fields.get("num_centroids") is not None
    return _random_drafter(
        target,
        Gemma4AssistantDrafter,
        Gemma4AssistantConfig,
        topology,
        ids_needed=clustered,
        in_order=False,
        **fields,
    )


def _random_drafter(
    target: LoadedTarget,
    drafter: Any,
    config: Any,
    topology: Topology | None,
    *,
    seed: int = 1,
    draft_sampling: DraftSampling = DraftSampling.GREEDY,
    ids_needed: bool = False,
    in_order: bool = True,
    **fields: Any,
) -> LoadedDrafter:
    """Returns a random drafter that shares the target's tables; ``None`` leaves a field out."""
    fields = {
        "vocab_size": target.vocab_size,
        "width": target.model.config.width,
        "max_positions": 512,
        **fields,
    }

    shape = config(**{name: value for name, value in fields.items() if value is not None})
    topology_option = {} if topology is None else {"topology": topology}
    method = drafter(
        shape, precision=target.model.precision, draft_sampling=draft_sampling, **topology_option
    )

    size = fields.get("draft_vocab_size", target.vocab_size)
    ids = None
    if ids_needed or size < target.vocab_size:
        chosen = np.random.default_rng(seed).permutation(target.vocab_size)[:size].astype(np.int32)
        ids = jnp.asarray(np.sort(chosen) if in_order else chosen)

    head = copied(_random_network(drafter, shape, target.model.precision, seed))
    return LoadedDrafter(
        method, method.assemble(head, target.model.tables(target.params), draft_to_target=ids)
    )


def draft_model(
    target: LoadedTarget,
    topology: Topology = Chain(3),
    *,
    seed: int = 1,
    draft_sampling: DraftSampling = DraftSampling.GREEDY,
    **options: Any,
) -> LoadedDrafter:
    """Returns a random draft model of one layer, with the options of :func:`target`."""
    small = random_target(
        target.vocab_size,
        seed=seed,
        precision=target.model.precision,
        **{"num_layers": 1, **options},
    )
    loaded = drafters.draft_model(small, target)
    return dataclasses.replace(
        loaded, drafter=loaded.drafter.with_topology(topology, draft_sampling)
    )


def sampling_of(settings: Sequence[tuple[float, int, float]]) -> SamplingParams:
    """Returns the parameters of a batch from the temperature, top-k and top-p of every row."""
    temperature, top_k, top_p = zip(*settings, strict=True)
    return SamplingParams(
        temperature=jnp.array(temperature, jnp.float32),
        top_k=jnp.array(top_k, jnp.int32),
        top_p=jnp.array(top_p, jnp.float32),
    )


def draft_of(tokens: Any, parents: Any, valid: Any = None, probs: Any = None) -> Draft:
    """Returns a draft. One row of parents is that of every row; by default every node is valid."""
    tokens = jnp.asarray(tokens, jnp.int32)
    return Draft(
        tokens=tokens,
        parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), tokens.shape),
        valid=jnp.ones(tokens.shape, bool) if valid is None else jnp.asarray(valid, bool),
        probs=None if probs is None else jnp.asarray(probs, jnp.float32),
    )


def seen_of(tokens: Any, features: Any, length: Any, next_token: Any) -> Observation:
    """Returns an observation."""
    numbers = {"tokens": tokens, "length": length, "next_token": next_token}
    numbers = {name: jnp.asarray(value, jnp.int32) for name, value in numbers.items()}
    return Observation(features=jnp.asarray(features, jnp.float32), **numbers)


@functools.partial(jax.jit, static_argnames=("drafter", "temperature"))
def next_draft(
    drafter: Any, params: Any, state: Any, seen: Observation, temperature: float = 0.0
) -> Draft:
    """Returns the draft after an observation, with the drafter's state after it."""
    batch = seen.length.shape[0]
    keys = jax.random.split(jax.random.key(0), batch)
    state = drafter.observe(params, state, seen)
    return drafter.propose(
        params, state, keys, per_row(SamplingParams(temperature=temperature), batch)
    )


def ragged_rounds(
    tokens: np.ndarray, features: np.ndarray, counts: Sequence[Sequence[int]]
) -> Iterator[tuple[np.ndarray, Observation]]:
    """Shows texts ``[B S]`` in pieces of ``counts`` tokens.

    Yields the known tokens after each piece, and an observation.
    """
    known = np.zeros(len(tokens), int)
    rows = np.arange(len(tokens))
    longest = max(map(max, counts))
    for count in counts:
        following = known[:, None] + np.arange(longest)
        columns = np.minimum(following, tokens.shape[1] - 1)
        known = known + count
        shown = tokens[rows[:, None], columns], features[rows[:, None], columns]
        yield known, seen_of(*shown, count, tokens[rows, known])


def padded(rows: Sequence[Sequence[int]], width: int | None = None) -> np.ndarray:
    """Returns rows of tokens as one array, with zeros after shorter ones."""
    tokens = np.zeros((len(rows), width or max(map(len, rows))), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens


def prompts(
    rows: list[list[int]],
    *,
    limit: int | list[int],
    sampling: SamplingParams | None = None,
    seed: int = 0,
    width: int | None = None,
    stop_tokens: tuple[int, ...] = (),
) -> Prompts:
    """Returns a ragged batch; ``limit`` counts new tokens."""
    length = np.array([len(row) for row in rows], np.int32)
    limits = length + np.asarray(limit, np.int32)
    stops = np.tile(np.array(stop_tokens, np.int32), (len(rows), 1))

    return Prompts(
        tokens=jnp.asarray(padded(rows, width)),
        length=jnp.asarray(length),
        limit=jnp.asarray(limits),
        limit_reason=jnp.full((len(rows),), int(FinishReason.LENGTH), jnp.int32),
        stop_tokens=jnp.asarray(stops),
        sampling=per_row(sampling or SamplingParams(), len(rows)),
        keys=row_keys(seed, len(rows)),
    )


def bind(
    target: LoadedTarget, drafter: LoadedDrafter, **options: Any
) -> tuple[SpeculativeLoop, LoopParams]:
    """Returns the loop of a pair and its parameters."""
    return SpeculativeLoop(target.model, drafter.drafter, **options), LoopParams(
        target.params, drafter.params
    )


def check_same_text(
    target: LoadedTarget,
    drafter: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: Any,
    **options: Any,
) -> GenerationResult:
    """Checks that drafts leave the greedy text as it is; returns the result with drafts."""
    plain, drafted = (
        SpeculativeDecoder(target, stop_tokens=(), **arguments).generate(
            prompts, max_new_tokens=max_new_tokens
        )
        for arguments in ({}, {"drafter": drafter, **options})
    )
    assert drafted.tokens == plain.tokens
    assert int(drafted.stats.num_draft_tokens) > 0
    return drafted


def outputs(outcome: loops.Outcome, batch: Prompts) -> list[list[int]]:
    """Returns the new tokens of each row."""
    tokens = np.asarray(outcome.tokens)
    start = np.asarray(batch.length)
    end = np.asarray(outcome.length)
    return [tokens[row, start[row] : end[row]].tolist() for row in range(len(start))]


def random_prompts(
    count: int, vocab_size: int, *, seed: int = 0, low: int = 1, high: int = 12
) -> list[list[int]]:
    """Returns ragged rows of random token ids."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, vocab_size, size=rng.integers(low, high)).tolist() for _ in range(count)
    ]


@functools.cache
def golden_pair(recorder: str, head: str = "eagle3") -> tuple[LoadedTarget, LoadedDrafter]:
    """Loads the models of a recorded run with the public loaders."""
    target = load_target(GOLDEN / recorder / "target")
    return target, load_drafter(GOLDEN / recorder / head, target=target)


def golden_trace(name: str) -> dict[str, Any]:
    """Reads a recorded run of another implementation; see ``tests/golden``."""
    return json.loads((GOLDEN / name).read_text())


@dataclasses.dataclass(frozen=True)
class Sampled(FixedTree):
    """Samples every node from a table ``[V V]`` of ``q(. | parent's token)``, and declares it.

    The released drafters draw siblings without replacement, so this one alone takes independent
    ones through the loop.
    """

    parents: tuple[int, ...] = (-1, 0, 1, 2)

    def propose(
        self, params: Any, state: RootState, keys: Array, sampling: SamplingParams
    ) -> Draft:
        tokens = [state.root]
        probs = [jnp.zeros((state.root.shape[0], params.shape[1]), jnp.float32)]
        for node, parent in enumerate(self.parents[1:], 1):
            q = params[tokens[parent]]
            key = jax.vmap(jax.random.fold_in, (0, None))(keys, node)
            tokens.append(jax.vmap(jax.random.categorical)(key, jnp.log(q)).astype(jnp.int32))
            probs.append(q)
        return self.draft(state, jnp.stack(tokens, axis=1), jnp.stack(probs, axis=1))


@dataclasses.dataclass(frozen=True)
class Scripted(FixedTree):
    """Proposes the next tokens of its parameters ``[B S]``, plus ``shift``.

    It is perfect at 0 and never right at 1.
    """

    parents: tuple[int, ...] = chain_parents(4)
    shift: int = 0
    vocab_size: int = 13

    def with_topology(self, topology: Chain, draft_sampling: DraftSampling | None) -> Scripted:
        return dataclasses.replace(self, parents=chain_parents(topology.num_speculative_tokens))

    def propose(
        self, params: Any, state: RootState, keys: Array, sampling: SamplingParams
    ) -> Draft:
        return self.draft(state, (self.scripted(params, state) + self.shift) % self.vocab_size)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Switches off the suite's shape checks, which raise before the library's own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def known(tree: Any) -> Any:
    """Returns a state with zeros behind the committed slots, where content has no meaning."""

    def clean(leaf: Any) -> Any:
        if not isinstance(leaf, Cache):
            return leaf

        def keep(layer: KeyValues) -> KeyValues:
            committed = (jnp.arange(layer.capacity)[None] < leaf.length[:, None])[:, None, :, None]
            return jax.tree.map(lambda buffer: jnp.where(committed, buffer, 0), layer)

        return leaf.replace(layers=tuple(map(keep, leaf.layers)))

    return jax.tree.map(clean, tree, is_leaf=lambda leaf: isinstance(leaf, Cache))


def draw(seed: int, *shape: int) -> np.ndarray:
    """Returns standard normal numbers in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same_bits(first: Any, second: Any) -> bool:
    """Returns whether all leaves of two trees are equal."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)
