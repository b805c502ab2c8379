"""The target transformer: one decoder for all kinds of layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import Cache, KeyValue
from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.models import flash
from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
    NormKind,
    NormPlaces,
    key_sources,
)
from eagle3_jax.models.context import (
    AttentionContext,
    RecurrentContext,
    SharedContext,
    attention_contexts,
    empty_cache,
)
from eagle3_jax.models.delta import GatedDeltaNet
from eagle3_jax.models.experts import ExpertMLP
from eagle3_jax.models.functional import (
    Params,
    bind,
    call_cached,
    init_params,
    param_axes,
    param_products,
    param_shapes,
)
from eagle3_jax.models.grouped import Attention
from eagle3_jax.models.latent import LatentAttention
from eagle3_jax.models.layers import (
    FLOAT32,
    Linear,
    Precision,
    RMSNorm,
    SwiGLU,
    embed,
    keep_stream,
    normal_param,
    normalised,
    product_by_table,
    scaled,
)
from eagle3_jax.models.quantised import OUTPUT
from eagle3_jax.types import EmbeddingTables, TargetOutput

# The module of each kind of mixer and of MLP.
MIXERS: dict[type, Callable[..., nnx.Module]] = {
    GroupedQuery: Attention,
    Latent: LatentAttention,
    GatedDelta: GatedDeltaNet,
}
MLPS: dict[type, Callable[..., nnx.Module]] = {GatedMLP: SwiGLU, Experts: ExpertMLP}


# On CPUs a sum over another number of slots than a multiple of this may have another order.
_SLOTS = 64


class Block(nnx.Module):
    """Residual block, by default ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    :data:`~eagle3_jax.models.config.NormPlaces` decides which of the four norms it has, and whether
    MLP and attention have the same input. Without ``input_norm`` the input of attention is ``x``
    itself. With an ``input_width`` a vector of each token gates one more residual branch.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        width: int,
        norm_eps: float,
        norm_kind: NormKind = "plain",
        input_norm: bool = True,
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        norms: dict[str, Any] = {"norm_eps": norm_eps, "norm_kind": norm_kind}
        options: dict[str, Any] = {"precision": precision, "rngs": rngs}

        post_eps = norm_eps if config.post_norm_eps is None else config.post_norm_eps

        def norm(*places: NormPlaces, eps: float = norm_eps) -> RMSNorm | None:
            if config.norms not in places:
                return None
            return RMSNorm(width, eps, norm_kind, invariant=precision.invariant)

        self.attention_norm = norm("before", "around", "parallel") if input_norm else None
        self.attention = MIXERS[type(config.mixer)](
            config.mixer, d_in=width, width=width, **norms, **options
        )
        self.attention_post_norm = norm("after", "around", eps=post_eps)
        self.mlp_norm = norm("before", "around")
        self.mlp = MLPS[type(config.mlp)](width, config.mlp, **options)
        self.mlp_post_norm = norm("after", "around", eps=post_eps)
        if config.input_width:
            self.input_gate = Linear(width, config.input_width, **options)
            self.input_projection = Linear(config.input_width, width, **options)
            self.input_norm = RMSNorm(width, norm_eps, norm_kind)
        self.output_scale = nnx.Param(jnp.ones((1,), jnp.float32)) if config.output_scale else None

        self.parallel = config.norms == "parallel"
        self.residual_scale = config.residual_scale
        self.invariant = precision.invariant

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        context: AttentionContext | RecurrentContext,
        inputs: Float[Array, "B T P"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the residual stream after the block, and an entry of ``TargetOutput.written``.

        ``inputs`` are the vectors of the tokens for this layer, if it reads some.
        """
        normalised = _normalise(self.attention_norm, x)
        attended, written = self.attention(normalised, positions, context)
        attended = _normalise(self.attention_post_norm, attended)
        between = x + scaled(attended, self.residual_scale)
        if self.invariant:
            # Without it the norm reads the sum rounded, and the sum below may not.
            between = lax.optimization_barrier(between)

        mlp_input = normalised if self.parallel else _normalise(self.mlp_norm, between)
        mlp_output = _normalise(self.mlp_post_norm, self.mlp(mlp_input))
        x = between + scaled(mlp_output, self.residual_scale)
        if inputs is not None:
            # GELU is approximated by tanh, as in Gemma.
            gated = jax.nn.gelu(self.input_gate(x)) * inputs
            x = x + self.input_norm(self.input_projection(gated))
        if self.output_scale is not None:
            x = x * lax.broadcast_to_rank(self.output_scale[...].astype(x.dtype), x.ndim)
        return x, written


def _normalise(norm: RMSNorm | None, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns ``norm(x)``, or ``x`` without a norm."""
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """Embedding, ``L`` blocks, final norm and output projection."""

    def __init__(self, config: DecoderConfig, *, precision: Precision, rngs: nnx.Rngs):
        self.config = config
        self.precision = precision
        shape = (config.vocab_size, config.width)
        vocab = Axis(VOCAB, config.vocab_size)
        # Every lookup in a divided table needs an all-reduce, so it is divided only if it is the
        # output matrix as well.
        metadata: dict[str, Any] = (
            {"axes": (vocab, None), "product": OUTPUT} if config.tie_embeddings else {}
        )
        self.embedding = normal_param(rngs, shape, 0.02, **metadata)

        options: dict[str, Any] = {"precision": precision, "rngs": rngs}
        norms: dict[str, Any] = {"norm_eps": config.norm_eps, "norm_kind": config.norm_kind}
        self.blocks = nnx.List(
            [Block(layer, width=config.width, **norms, **options) for layer in config.layers]
        )
        final_kind = config.final_norm_kind or config.norm_kind
        self.norm = RMSNorm(
            config.width, config.norm_eps, final_kind, invariant=precision.invariant
        )
        if not config.tie_embeddings:
            self.head = Linear(
                config.width, config.vocab_size, axes=(None, vocab), product=OUTPUT, **options
            )
        if config.input_width:
            columns = config.num_layers * config.input_width
            self.input_embedding = normal_param(rngs, (config.vocab_size, columns), 0.02)
            self.input_projection = Linear(config.width, columns, **options)
            self.input_norm = RMSNorm(config.input_width, config.norm_eps, config.norm_kind)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        contexts: Sequence[AttentionContext | RecurrentContext],
        aux_layers: tuple[int, ...],
    ) -> TargetOutput:
        """Runs the layers; see :class:`eagle3_jax.types.TargetModel`.

        ``contexts`` has an entry for each layer.
        """
        for token in self.config.media_tokens:
            tokens = jnp.where(tokens == token, 0, tokens)
        x = embed(self.embedding[...], tokens, self.precision)
        if self.config.embedding_scale != 1.0:
            # The factor is rounded first, as in the PyTorch models.
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.config.embedding_norm:
            x = normalised(x, self.config.norm_eps).astype(x.dtype)

        # Entry l is the stream that layer l reads. The last two are the output and its norm.
        streams = [x]
        written = []
        inputs = self._inputs(tokens, x)
        sources = key_sources(self.config.layers)
        for block, context, source, more in zip(
            self.blocks, contexts, sources, inputs, strict=True
        ):
            if source is not None:
                context = SharedContext(context, written[source])  # type: ignore[arg-type]
            x, layer_written = call_cached(block, x, positions, context, *more)
            x = lax.optimization_barrier(x) if self.precision.invariant else keep_stream(x)
            streams.append(x)
            written.append(layer_written)

        final = self.norm(x)
        streams.append(final)
        empty = jnp.zeros((*x.shape[:2], 0, x.shape[2]), x.dtype)
        features = (
            jnp.stack([streams[layer] for layer in aux_layers], axis=2) if aux_layers else empty
        )
        return TargetOutput(final=final, features=features, written=tuple(written))

    def _inputs(
        self, tokens: Int[Array, "B T"], embedded: Float[Array, "B T D"]
    ) -> list[tuple[Float[Array, "B T P"], ...]]:
        """Returns for every layer its vectors of the tokens; empty for a model without them.

        They are the mean of a vector from a table and of a projection of the embedding, times √2.
        """
        width = self.config.input_width
        layers = self.config.num_layers
        if not width:
            return [()] * layers
        shape = (*tokens.shape, layers, width)

        # The factor is rounded first, as that of the embedding.
        looked_up = embed(self.input_embedding[...], tokens, self.precision)
        looked_up = looked_up * jnp.asarray(width**0.5, looked_up.dtype)
        projected = scaled(self.input_projection(embedded), self.config.width**-0.5)
        normed = self.input_norm(projected.reshape(shape))
        inputs = scaled(normed + looked_up.reshape(shape), 2**-0.5)
        return [(inputs[:, :, layer],) for layer in range(layers)]

    def unembed(self, final: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Returns logits in float32, scaled and capped as the configuration has it."""
        cap = self.config.logit_softcap
        if self.config.tie_embeddings:
            logits = product_by_table(final, self.embedding[...], self.precision)
        else:
            logits = self.head(final)
        logits = scaled(logits.astype(jnp.float32), self.config.logit_scale)
        return logits if cap is None else cap * jnp.tanh(logits / cap)


@dataclasses.dataclass(frozen=True)
class DecoderTarget:
    """The :class:`~eagle3_jax.types.TargetModel` of a :class:`Decoder`.

    It is hashable, because it is a static argument of the compiled loop.
    """

    config: DecoderConfig
    precision: Precision = FLOAT32

    def __post_init__(self) -> None:
        # A configuration of many layers is hashed once here, instead of at every call of a compiled
        # function.
        object.__setattr__(self, "_hash", hash((self.config, self.precision)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def init(self, key: jax.Array) -> Params:
        """Returns random float32 parameters, for tests and training."""
        return init_params(Decoder, self.config, self.precision, key)

    def param_shapes(self) -> Params:
        """Returns the ``jax.ShapeDtypeStruct`` of every parameter, as a nested dictionary."""
        return param_shapes(Decoder, self.config, self.precision)

    def param_axes(self) -> Params:
        """Returns the :data:`~eagle3_jax.devices.sharding.Axes` of every parameter."""
        return param_axes(Decoder, self.config, self.precision)

    def param_products(self) -> Params:
        """Returns for every parameter the kind of kernel that it is, if it may be in eight bits.

        See ``eagle3_jax.models.functional.param_products``.
        """
        return param_products(Decoder, self.config, self.precision)

    def invariant(self, weights: str = "dense") -> DecoderTarget:
        """Returns the same target with bits that depend on nothing but a token and those before it.

        They do not depend on the number of tokens that are run together, the batch, or the capacity
        of the cache. Every block is then a chain.

        Args:
            weights: How kernels are stored, as ``models.quantised.WEIGHTS`` names it.

        Raises:
            ValueError: A part of the target cannot be computed so on this device.
        """
        if problem := self._without_invariance(weights):
            raise ValueError(f"invariant was given, but {problem}; leave it out")
        return dataclasses.replace(
            self, precision=dataclasses.replace(self.precision, invariant=True)
        )

    def _without_invariance(self, weights: str) -> str:
        """Returns why :meth:`invariant` cannot be had; empty if it can."""
        for index, layer in enumerate(self.config.layers):
            mixer = layer.mixer
            if not isinstance(mixer, GroupedQuery) or mixer.sinks or mixer.qk_l2_norm:
                return f"layer {index} has another attention than grouped queries without sinks"
            if mixer.value_norm or mixer.shares_keys or layer.input_width:
                return f"layer {index} normalises values, shares keys or reads vectors of tokens"
            if not isinstance(layer.mlp, GatedMLP):
                return f"layer {index} has {type(layer.mlp).__name__} in place of a dense MLP"
        if self.config.norm_kind == "layer" or self.config.embedding_norm:
            return "the target has layer norms or a norm of the embedding, not RMS norms alone"

        backend = jax.default_backend()
        if backend == "cpu":
            fits = weights in ("dense", "int8")
            return "" if fits else f"weights are {weights}, not dense or int8"
        if backend != "gpu":
            return f"the device is a {backend.upper()}, not a CPU or an NVIDIA GPU"
        if weights != "dense" or self.precision.name != "bfloat16":
            return (
                f"weights are {weights} in {self.precision.name}, and on a GPU it takes dense ones"
                " in bfloat16"
            )
        heads = {
            layer.mixer.head_dim
            for layer in self.config.layers
            if isinstance(layer.mixer, GroupedQuery)
        }
        if not flash.is_enabled() or not all(map(flash.fits, heads)):
            return "the attention kernel is off, or does not support the size of its heads"
        return ""

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.config.vocab_size

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache of ``capacity`` slots per row.

        An invariant target rounds it up to a multiple of 64.
        """
        dtype = self.precision.activations
        if self.precision.invariant:
            capacity = -(-capacity // _SLOTS) * _SLOTS
        return empty_cache(self.config.layers, batch=batch, capacity=capacity, dtype=dtype)

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B M"],
        mask: Bool[Array, "#B T M"],
        cache: Cache | None = None,
        aux_layers: tuple[int, ...] = (),
        length: Int[Array, " B"] | None = None,
        is_chain: bool = False,
    ) -> TargetOutput:
        """Runs a block; see :class:`eagle3_jax.types.TargetModel`.

        ``tokens`` may be the last ``T`` of the ``M`` tokens of a block; see
        :func:`~eagle3_jax.models.context.attention_contexts`.

        Raises:
            ValueError: ``aux_layers`` names a layer that the target does not have.
        """
        layers = self.config.num_layers
        if not all(0 <= layer <= layers + 1 for layer in aux_layers):
            raise ValueError(
                f"aux_layers is {aux_layers}; expected 0 to {layers} (the output of the last of"
                f" {layers} layers), or {layers + 1} (after the final norm)"
            )

        is_prompt = cache is None
        invariant = self.precision.invariant
        if invariant and is_prompt:
            # A prompt attends as later tokens do: to the slots of a cache. Without the barrier XLA
            # spends minutes of compilation on folding attention over an empty cache.
            cache = lax.optimization_barrier(self.init_cache(*tokens.shape))
        elif invariant and not is_chain:
            raise ValueError(
                "the draft is a tree; an invariant target takes chains, whose tokens are in order"
            )

        per_layer = attention_contexts(
            self.config.layers,
            mask,
            positions,
            cache,
            length,
            is_chain=is_chain or invariant,
            invariant=invariant,
        )
        if positions.shape != tokens.shape:
            positions = positions[:, positions.shape[1] - tokens.shape[1] :]
        decoder = bind(Decoder, self.config, self.precision, params)
        output = decoder(tokens, positions, per_layer, aux_layers)
        if not (invariant and is_prompt):
            return output

        # A prompt returns its own keys and values, not the buffers that it was written to.
        of_prompt = [
            KeyValue(*(buffer[:, :, : tokens.shape[1]] for buffer in layer))
            for layer in output.written
        ]
        return output.replace(written=tuple(of_prompt))

    def unembed(self, params: Params, final: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Returns logits in float32 for outputs of the final norm."""
        return bind(Decoder, self.config, self.precision, params).unembed(final)

    def tables(self, params: Params) -> EmbeddingTables:
        """Returns the matrices that draft heads borrow: the embedding and the output matrix.

        Heads apply neither factor nor norm of the embedding, nor factor and cap of the logits.
        """
        output = None if self.config.tie_embeddings else params["head"]["kernel"]
        return EmbeddingTables(params["embedding"], output)
