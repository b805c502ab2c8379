"""Multi-token prediction as DeepSeek-V3 has it: more blocks, trained with the model.

DeepSeek-AI (2024, arXiv 2412.19437, section 2.2). At each position ``t`` it reads the target's
final state ``g_t`` (after the final norm; before it in MiMo) and the *next* token ``x_{t+1}``::

    z_t = W [norm_e(embedding(x_{t+1})); norm_h(g_t)]
    g'_{t+1} = norm(block(z_t))                              q = softmax(g'_{t+1} · output matrix)

The block is a whole decoder layer with its input norm. Its normed output replaces ``g`` in the next
step, so one module drafts any number of tokens. DeepSeek trained it on the first of them alone; the
acceptance of the second and third token grows with training on its own output
(``training/methods.py``). The embedding and the output matrix are the target's, unless the file has
others. vLLM sets the embedding at position 0 to zero (``zero_first``), and files in its layouts are
read so; speculators and transformers leave it. ``q`` depends on the tokens sampled before it.

A file of ``M`` modules has one for each drafted token. Module ``k`` reads tokens shifted by ``k``
more, and in source of ``g_t`` the normed output of module ``k - 1`` in the same row::

    row t of module k: x_{t+1+k}, module k-1's output in row t    predicts x_{t+2+k}

A row that reads drafted tokens is computed again when they are known. So module ``k`` keeps the
rows up to ``L - 2 - k`` of a text of ``L`` tokens, and a draft runs it on ``k`` rows more. A draft
of more than ``M`` tokens feeds the last module its own output. Such drafts are chains.

Two things weaken it. It reads the last state alone, of a target that was not trained for it
(DeepSeek trains both together). And each further step is further from what the module has seen in
training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.cache import Cache, LayerCache
from eagle3_jax.devices.kernels import indices
from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.base import FinalStateConfig
from eagle3_jax.drafters.eagle3 import Eagle3Drafter, FeedbackState, following
from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.models.config import NormKind
from eagle3_jax.models.context import AttentionContext, attention_contexts, empty_cache
from eagle3_jax.models.decoder import Block
from eagle3_jax.models.functional import Params, call_cached
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, embed
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, Observation, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(FinalStateConfig):
    """MTP modules of one block each, which are its layers.

    Attributes:
        own_output: Whether they have an output matrix of their own.
        zero_first: Whether the embedding at position 0 counts as zero.
        normed_state: Whether they read the target's state after its final norm, or before it.
        norm_kind: The kind of all norms.
    """

    own_output: bool = False
    zero_first: bool = True
    normed_state: bool = True
    norm_kind: NormKind = "plain"

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The output of the target's final norm, or its input."""
        return (self.num_target_layers + self.normed_state,)


class MTPModule(nnx.Module):
    """The network of the first module, with the ``later`` ones; the embedding is an input."""

    def __init__(self, config: MTPConfig, *, precision: Precision, rngs: nnx.Rngs, index: int = 0):
        width = config.width
        eps = config.norm_eps
        kind = config.norm_kind
        self.embedding_norm = RMSNorm(width, eps, kind)
        self.feature_norm = RMSNorm(width, eps, kind)
        self.fc = Linear(2 * width, width, precision=precision, rngs=rngs)
        self.block = Block(
            config.layers[index],
            width=width,
            norm_eps=eps,
            norm_kind=kind,
            precision=precision,
            rngs=rngs,
        )

        self.norm = RMSNorm(width, eps, kind)
        if index:
            return
        if config.own_output:
            vocab = Axis(VOCAB, config.vocab_size)
            self.head = Linear(
                width, config.vocab_size, axes=(None, vocab), precision=precision, rngs=rngs
            )
        if config.num_layers > 1:
            later = range(1, config.num_layers)
            self.later = nnx.List(
                [MTPModule(config, precision=precision, rngs=rngs, index=k) for k in later]
            )

    def fuse(self, features: Float[Array, "B T 1 D"]) -> Float[Array, "B T D"]:
        """Returns the target's state unchanged: every step reads it with the embedding."""
        return features[:, :, 0]

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        stream: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        contexts: Sequence[AttentionContext],
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
        """Runs one step: from the normed state of the target, or of a module, to the next state.

        Returns:
            The state, and what the block's cache keeps.
        """
        embedding_and_state = jnp.concatenate(
            [self.embedding_norm(embedded), self.feature_norm(stream)], axis=-1
        )
        x, kv = call_cached(self.block, self.fc(embedding_and_state), positions, contexts[0])
        return self.norm(x), (kv,)

    def logits(self, output: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns logits in float32 from the module's output matrix."""
        return self.head(output).astype(jnp.float32)


class ModulesState(struct.PyTreeNode, kw_only=True):
    """The state of several modules after the committed tokens.

    Attributes:
        cache: A layer for each module. Its length ``s`` is that of module 0; module ``k`` has
            ``max(0, s - k)`` rows, those that read committed tokens alone.
        outputs: ``[B M D]``, the output of every module in the last of its rows.
        root: ``[B]``, the last token chosen by the target.
    """

    cache: Cache
    outputs: Float[Array, "B M D"]
    root: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class MTPDrafter(Eagle3Drafter):
    """Drafts with MTP modules: one of them a chain or a tree as EAGLE-3 does, several a chain.

    Parameters: ``head`` (the network), ``embedding [V D]`` (its own or the target's) and the
    target's output matrix (:meth:`~eagle3_jax.drafters.base.NetworkDrafter.assemble`).
    """

    network: ClassVar[type[nnx.Module]] = MTPModule
    borrows_output: ClassVar[bool] = True

    config: MTPConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.num_layers > 1 and not isinstance(self.shape, Chain):
            raise ValueError(
                f"{self.config.num_layers} MTP modules draft a chain, a token each; leave the tree"
                " out"
            )

    @property
    def shape(self) -> Topology:
        """The topology. Default: a token for each of several modules."""
        if self.topology is None and self.config.num_layers > 1:
            return Chain(self.config.num_layers)
        return super().shape

    @property
    def shape_note(self) -> str:
        """What a description adds to the shape: the steps beyond the number of several modules."""
        modules = self.config.num_layers
        repeats = self.max_depth - modules
        if modules == 1 or repeats <= 0:
            return ""
        return f"the last of {modules} modules is fed back for {repeats}"

    def init(self, params: Params, batch: int, capacity: int) -> Any:
        """Returns an empty state; see :class:`eagle3_jax.types.Drafter`."""
        config = self.config
        if config.num_layers == 1:
            return super().init(params, batch, capacity)
        dtype = self.precision.activations
        return ModulesState(
            cache=empty_cache(config.layers, batch=batch, capacity=capacity, dtype=dtype),
            outputs=jnp.zeros((batch, config.num_layers, config.width), dtype),
            root=jnp.zeros((batch,), jnp.int32),
        )

    def observe(self, params: Params, state: Any, seen: Observation) -> Any:
        """Runs every module on the rows whose tokens are now committed; see the module's text."""
        if isinstance(state, FeedbackState):
            return super().observe(params, state, seen)
        network = self.bind(params)
        count = seen.tokens.shape[1]
        observed = state.cache.length
        next_tokens = following(seen)
        # What the module reads: states of the target, then outputs of the module before it.
        stream = network.fuse(seen.features)

        layers = []
        outputs = []
        for k, module in enumerate(_modules(network)):
            length = jnp.maximum(observed - k, 0)
            # Rows before the text do not exist: near its beginning a module reads fewer tokens.
            absent = jnp.maximum(k - observed, 0)
            source = jnp.minimum(indices(count)[None, :] + absent[:, None], count - 1)
            tokens = jnp.take_along_axis(next_tokens, source, axis=1)
            if k:
                # Its first row is the last one that the module before it already had.
                earlier = state.outputs[:, k - 1, None]
                shifted = jnp.concatenate([earlier, stream[:, :-1]], axis=1)
                stream = jnp.where((observed >= k)[:, None, None], shifted, stream)

            layer = state.cache.layers[k]
            stream, written = self._run(params, module, k, layer, length, tokens, stream)
            new = jnp.maximum(seen.length - absent, 0)
            layers.append(layer.commit(written, length, new, None))
            newest = jnp.maximum(new - 1, 0)[:, None, None]
            output = jnp.take_along_axis(stream, newest, axis=1)[:, 0]
            outputs.append(jnp.where((new > 0)[:, None], output, state.outputs[:, k]))

        root = jnp.where(seen.length > 0, seen.next_token, state.root)
        cache = Cache(layers=tuple(layers), length=observed + seen.length)
        return ModulesState(cache=cache, outputs=jnp.stack(outputs, axis=1), root=root)

    def propose(
        self, params: Params, state: Any, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Drafts with each of several modules once, then with the last again."""
        if isinstance(state, FeedbackState):
            return super().propose(params, state, keys, sampling)
        network = self.bind(params)
        modules = _modules(network)
        committed = state.cache.length

        def run(tokens, carry, depth, mask, memory):
            del mask  # of a chain
            layers, drafted = memory
            drafted = jnp.concatenate([drafted, tokens], axis=1)
            k = min(depth + 1, len(modules) - 1)
            beyond = depth + 1 - k
            if beyond:
                # One more row of the last module: its own output replaces the state.
                length = committed + beyond - 1
                count = jnp.ones_like(committed)
                block = tokens
                stream = carry[:, -1:]
            else:
                # Its rows that read drafted tokens. Near the text's beginning there are fewer.
                length = jnp.maximum(committed - k, 0)
                count = jnp.minimum(committed, k)
                source = jnp.minimum(indices(k)[None, :] + (k - count)[:, None], k - 1)
                block = jnp.take_along_axis(drafted, source, axis=1)
                # The last output in a row of committed tokens, then those of this draft.
                earlier = state.outputs[:, k - 1, None]
                at_beginning = jnp.concatenate([carry[:, : k - 1], earlier], axis=1)
                shifted = jnp.concatenate([earlier, carry[:, : k - 1]], axis=1)
                stream = jnp.where((committed >= k)[:, None, None], shifted, at_beginning)

            output, written = self._run(params, modules[k], k, layers[k], length, block, stream)
            layer = layers[k].commit(written, length, count, None)
            layers = (*layers[:k], layer, *layers[k + 1 :])
            newest = jnp.maximum(count - 1, 0)[:, None, None]
            last = jnp.take_along_axis(output, newest, axis=1)
            # The rows of this draft, and at the end the one that predicts.
            carry = jnp.concatenate([output, last], axis=1)
            return Level(self.logits(params, network, last), carry, (layers, drafted))

        output = state.outputs[:, :1]
        nothing = jnp.zeros((committed.shape[0], 0), jnp.int32)
        first = Level(self.logits(params, network, output), output, (state.cache.layers, nothing))
        inputs = DraftInputs(
            root=state.root,
            first=first,
            run=run,
            draft_to_target=None,
            vocab_size=self.config.vocab_size,
            keys=keys,
            sampling=sampling,
        )
        draft, (layers, _) = self.grow(inputs)
        # Guesses are after the committed slots. Returning this cache saves a copy.
        return draft.replace(state=state.replace(cache=Cache(layers=layers, length=committed)))

    def _run(
        self,
        params: Params,
        module: Any,
        k: int,
        layer: LayerCache,
        length: Int[Array, " B"],
        tokens: Int[Array, "B T"],
        stream: Float[Array, "B T D"],
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs module ``k`` on rows after ``length`` ones; returns outputs, and what was written.

        A row's slot is its position: rotary embeddings see differences alone.
        """
        count = tokens.shape[1]
        positions = length[:, None] + indices(count)[None, :]
        contexts = attention_contexts(
            self.config.layers[k : k + 1],
            causal_mask(count),
            positions,
            Cache(layers=(layer,), length=length),
            is_chain=True,
        )
        embedded = self.embed(params, tokens, positions)
        output, (written,) = module(embedded, stream, positions, contexts)
        return output, written

    def embed(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns embeddings of the tokens; zero at position 0 if ``zero_first``."""
        embedded = embed(params["embedding"], tokens, self.precision)
        if not self.config.zero_first:
            return embedded
        return jnp.where(positions[..., None] == 0, 0, embedded)

    def logits(
        self, params: Params, head: Any, output: Float[Array, "B T D"]
    ) -> Float[Array, "B T V"]:
        """Returns logits in float32, from the target's output matrix or the module's."""
        if self.config.own_output:
            return head.logits(output)
        return super().logits(params, head, output)


def _modules(network: MTPModule) -> list[MTPModule]:
    """Returns all modules of a network."""
    return [network, *getattr(network, "later", ())]
