"""Memory of a target and its draft head on each accelerator: weights, caches, activations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from eagle3_jax.models.config import (
    DecoderConfig,
    Eagle3Config,
    GatedDelta,
    GatedMLP,
    Latent,
    LayerConfig,
)
from eagle3_jax.theory.accelerators import CACHE_BYTES, WEIGHT_BITS, Accelerator
from eagle3_jax.theory.sizes import EqualLayers, Model, Sizes, sizes_of

# gpt-oss is published in it: everything except the experts stays in bfloat16.
_EXPERTS_ONLY = "mxfp4"
# Upper end of the search for a number that fits.
_MOST_ACCELERATORS = 1024


class LayerBits(NamedTuple):
    """Bits of a weight inside layers, with its share of scales."""

    attention: float  #: Of projections of attention and of recurrent layers.
    mlp: float  #: Of MLPs that every token goes through.
    experts: float  #: Of experts.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """A target and a head on accelerators of one kind.

    Tensor parallelism divides the layers' matrices, both embeddings and output projections, and the
    key/value heads of both caches. Every accelerator holds norms, biases and the head's fusion in
    full, and a key/value head of its own when there are fewer of those than accelerators. Quantized
    weights are those inside the target's layers; its embedding, output projection and vectors keep
    16 bits (32 in float32), as in published checkpoints. With FP8 all kernels of a draft head have
    8 bits too, as this library stores them; with the other types it keeps 16 bits.
    """

    target: DecoderConfig  #: Configuration of the target.
    head: Eagle3Config | Sizes | None  #: The drafter; ``None`` for plain decoding.
    accelerator: Accelerator  #: Kind of the accelerators.
    num_accelerators: int = 1  #: Tensor-parallel size ``n``.
    weights: str = "bfloat16"  #: A key of ``WEIGHT_BITS``.
    cache: str = "bfloat16"  #: A key of ``CACHE_BYTES``, for both caches.
    #: Bits of the target's weights as its file stores them; ``None``: those of ``weights``.
    stored: LayerBits | None = None
    target_name: str = "target"  #: Name of the target for tables and messages.
    head_name: str = "head"  #: Name of the head for tables and messages.

    def __post_init__(self) -> None:
        if self.weights not in WEIGHT_BITS:
            raise ValueError(
                f"weights {self.weights!r} are not known; use one of {', '.join(WEIGHT_BITS)}"
            )
        if self.cache not in CACHE_BYTES:
            raise ValueError(
                f"cache type {self.cache!r} is not known; use one of {', '.join(CACHE_BYTES)}"
            )

        for name, model in ((self.target_name, self.target), (self.head_name, self.head)):
            for num_heads in attention_heads(model) if model else ():
                if num_heads % self.num_accelerators:
                    raise ValueError(
                        f"{num_heads} attention heads of the {name} cannot be divided by "
                        f"{self.num_accelerators} accelerators; use a number that divides them"
                    )

        if self.head and self.head.target_width != self.target.width:
            raise ValueError(
                f"the head reads features of width {self.head.target_width} but {self.target_name}"
                f" has {self.target.width}; give the head that was trained for this target"
            )

    @property
    def models(self) -> list[Model]:
        """The target, and the head where there is one."""
        return [self.target, self.head] if self.head else [self.target]

    @property
    def plain_bytes(self) -> int:
        """Bytes of a number that is never quantized, as in tables, vectors and activations."""
        return 4 if self.weights == "float32" else 2

    @property
    def layer_bits(self) -> LayerBits:
        """Bits of the target's weights inside layers."""
        if self.stored is not None:
            return self.stored
        bits = WEIGHT_BITS[self.weights]
        dense = 8.0 * self.plain_bytes if self.weights == _EXPERTS_ONLY else bits
        return LayerBits(attention=dense, mlp=dense, experts=bits)

    def weight_bytes(self, model: Model) -> float:
        """Counts the weights on each accelerator that the model owns, the embedding included."""
        sizes = sizes_of(model)
        if not sizes.owned.total:
            return 0.0
        tables = sizes.owned.embedding + sizes.owned.output - sizes.read.output
        return self.streamed_bytes(model) + self.plain_bytes * tables / self.num_accelerators

    def streamed_bytes(
        self, model: Model, *, tokens: int | None = None, fuse: bool = True
    ) -> float:
        """Counts the weights that each accelerator reads in a forward: all but the embedding.

        ``bits/8·(qo + mlp + r·kv + experts)/n + wide·(output/n + fusion + vectors)``. With FP8 the
        output projection and the fusion of a head have one byte. ``r`` is the number of
        accelerators that share a key/value head, 1 when there are enough heads.

        Args:
            model: The target or the head.
            tokens: Number of tokens that choose between experts; ``None`` reads all experts.
            fuse: Whether the fusion of target features is read.
        """
        sizes = sizes_of(model)
        read = sizes.read
        wide = self.plain_bytes
        is_fp8 = self.weights == "fp8"
        is_quantized = is_fp8 or isinstance(model, DecoderConfig)
        bits = self.layer_bits if is_quantized else LayerBits(*[8.0 * wide] * 3)

        kernel = 1 if is_fp8 and sizes.is_head else wide
        owned_output = min(sizes.owned.output, read.output)
        divided = kernel * owned_output + wide * (read.output - owned_output)
        for equal in sizes.layers:
            layer = equal.sizes
            attention = layer.query_output + layer.key_value * self._shared_by(equal)
            divided += (
                bits.attention * attention
                + bits.mlp * layer.mlp
                + bits.experts * equal.experts_read(tokens)
            ) / 8

        fusion = kernel * read.fusion if fuse else 0
        return divided / self.num_accelerators + wide * (read.vectors + read.routers) + fusion

    def cache_bytes_per_token(self, model: Model) -> float:
        """Counts the bytes of a token's keys and values on each accelerator.

        These are ``Σ 2·C·H·r/n`` numbers, over all layers. A layer of latents has ``r + dr`` on
        every accelerator, a recurrent layer nothing. Layers with a window hold the whole sequence
        like the others; an engine that frees what has left the window needs less.
        """
        return sum(map(self.layer_cache_bytes, sizes_of(model).layers), 0.0)

    def layer_cache_bytes(self, equal: EqualLayers) -> float:
        """Counts the bytes of a token's keys and values in equal layers, on each accelerator."""
        values = equal.cache_values_per_token * self._shared_by(equal) / self.num_accelerators
        return values * CACHE_BYTES[self.cache]

    def state_bytes(self, model: Model) -> float:
        """Counts the bytes of a sequence's recurrent states on each accelerator.

        These are ``4·Hv·dk·dv`` a layer. The ``K - 1`` inputs that convolutions look back at are in
        the type of the activations.
        """
        layers = sizes_of(model).layers
        values = sum(
            4 * equal.state_values + self.plain_bytes * equal.window_values for equal in layers
        )
        return values / self.num_accelerators

    def _shared_by(self, equal: EqualLayers) -> float:
        """Number of accelerators that hold the same key/value head."""
        mixer = equal.layer.mixer
        # A latent counts as one head; what has no key/value heads is divided.
        heads = getattr(mixer, "num_kv_heads", self.num_accelerators)
        if isinstance(mixer, Latent):
            heads = 1
        return max(1.0, self.num_accelerators / heads)


def attention_heads(model: Model) -> set[int]:
    """Returns the numbers of heads that accelerators divide.

    These are query heads, or key heads of recurrent layers.
    """
    mixers = [equal.layer.mixer for equal in sizes_of(model).layers]
    return {
        mixer.num_key_heads if isinstance(mixer, GatedDelta) else mixer.num_heads
        for mixer in mixers
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on each accelerator."""

    target_weights: float  #: Weights of the target.
    head_weights: float  #: Weights of the head, without the embedding that it borrows.
    target_cache: float  #: The target's keys and values of all sequences.
    head_cache: float  #: The head's own keys and values of the same tokens.
    states: float  #: Recurrent states of all sequences and both models.
    activations: float  #: Estimate of the largest forward.
    reserve: float  #: Reserve for the context, graphs, workspaces and fragments of the engine.
    budget: float  #: Bytes that may be used.
    cache_bytes_per_token: float  #: Bytes of one token in both caches.

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.without_caches + self.target_cache + self.head_cache + self.states

    @property
    def without_caches(self) -> float:
        """Bytes that are occupied before the first token."""
        return self.target_weights + self.head_weights + self.activations + self.reserve

    @property
    def fits(self) -> bool:
        """Whether the total is within the budget."""
        return self.total <= self.budget

    @property
    def cache_capacity_tokens(self) -> float:
        """Tokens of all sequences together for which memory remains; infinite without a budget."""
        remaining = max(self.budget - self.without_caches - self.states, 0.0)
        if not self.cache_bytes_per_token:
            return math.inf if remaining else 0.0
        return remaining if math.isinf(remaining) else remaining // self.cache_bytes_per_token


# Attention scores that a prefill makes at once, of all heads and rows
# (eagle3_jax.models.attention).
SCORES = 2**27


def _activation_bytes(
    deployment: Deployment, batch: int, context: int, num_draft_tokens: int, prefill_tokens: int
) -> float:
    """Estimates the memory of this library's largest forward on each accelerator, within a tenth.

    ``T·wide·(4·D + (2·mlp + (heads + 2·C)·H)/n + A·D) + (4 + wide)·scores/n + 2·4·B·(K+1)·V/n``:
    for the ``T`` tokens of the forward the residual stream and three vectors like it, the inner
    vectors of the widest layer, and the features kept for the head; attention scores in float32 and
    as weights, ``heads·T·context`` of them, but no more than ``SCORES`` of a prefill; for the
    verified tokens logits and probabilities in float32. A prefill keeps keys and values of its
    tokens until the caches take them. One in several forwards (``eagle3_jax/devices/groups.py``)
    also makes caches of up to ``2·T`` slots for each. Other engines differ.
    """
    target = deployment.target
    n = deployment.num_accelerators
    verified = batch * (num_draft_tokens + 1)
    prefill_tokens = min(prefill_tokens, batch * context)
    features = sizes_of(deployment.head).num_features * target.width if deployment.head else 0
    kinds = set(target.layers)
    inner_width = max(map(_inner_width, kinds))
    per_token = deployment.plain_bytes * (4 * target.width + inner_width / n + features)

    heads = max(
        (layer.mixer.num_heads for layer in kinds if not isinstance(layer.mixer, GatedDelta)),
        default=0,
    )
    scores_per_query = heads * context
    prefill_queries = min(prefill_tokens, SCORES / (scores_per_query or 1))
    scores = scores_per_query * max(verified, prefill_queries)

    cached = prefill_tokens
    if batch * context > prefill_tokens:
        cached += min(2 * prefill_tokens, batch * context)
    cache_bytes = sum(map(deployment.cache_bytes_per_token, deployment.models))

    return (
        max(verified, prefill_tokens) * per_token
        + (4 + deployment.plain_bytes) * scores / n
        + cached * cache_bytes
        + 2 * 4 * verified * target.vocab_size / n
    )


def _inner_width(layer: LayerConfig) -> int:
    """Returns the width of all inner vectors of a token in a layer."""
    mixer = layer.mixer
    mlp = layer.mlp
    is_dense = isinstance(mlp, GatedMLP)
    mlp_width = mlp.width if is_dense else mlp.per_token * mlp.width + mlp.shared_width
    inner = 2 * mlp_width

    # Query and output of each head, in the latent's space.
    if isinstance(mixer, Latent):
        return inner + 2 * mixer.num_heads * (mixer.kv_rank + mixer.rope_dim)
    if isinstance(mixer, GatedDelta):
        keys = mixer.num_key_heads * mixer.key_dim
        values = mixer.num_value_heads * mixer.value_dim
        return inner + 2 * (keys + values)

    num_vectors = mixer.num_heads + 2 * mixer.num_kv_heads
    if mixer.output_gate:
        num_vectors += mixer.num_heads
    return inner + num_vectors * mixer.head_dim


def memory_plan(
    deployment: Deployment,
    *,
    batch: int,
    context: int,
    num_draft_tokens: int,
    prefill_tokens: int = 8192,
    utilization: float = 0.9,
    reserve_bytes: float = 2e9,
) -> MemoryPlan:
    """Plans the bytes on each accelerator while ``batch`` sequences are ``context`` tokens long.

    The caches also hold the ``K + 1`` tokens under verification: ``B·(context + K + 1)`` tokens
    each.

    Args:
        deployment: Models and accelerators.
        batch: Sequences at once.
        context: Tokens of a sequence, prompt and answer.
        num_draft_tokens: ``K``; 0 without a head.
        prefill_tokens: Maximum number of prompt tokens in a forward.
        utilization: Share of the accelerator that the engine may take (vLLM's
            ``gpu_memory_utilization``).
        reserve_bytes: Bytes for everything that is not counted here.

    Raises:
        ValueError: The utilization is not a share.
    """
    if not 0 < utilization <= 1:
        raise ValueError(
            f"memory utilization is {utilization:g}; expected more than 0 and at most 1"
        )

    target = deployment.target
    head = deployment.head
    tokens = batch * (context + num_draft_tokens + 1)
    target_token = deployment.cache_bytes_per_token(target)
    head_token = deployment.cache_bytes_per_token(head) if head else 0.0

    return MemoryPlan(
        target_weights=deployment.weight_bytes(target),
        head_weights=deployment.weight_bytes(head) if head else 0.0,
        target_cache=tokens * target_token,
        head_cache=tokens * head_token,
        states=batch * sum(map(deployment.state_bytes, deployment.models)),
        activations=_activation_bytes(deployment, batch, context, num_draft_tokens, prefill_tokens),
        reserve=reserve_bytes,
        budget=deployment.accelerator.memory_bytes * utilization,
        cache_bytes_per_token=target_token + head_token,
    )


def remedy_of(deployment: Deployment, **load: Any) -> dict[str, Any]:
    """Returns what would make :func:`memory_plan` fit.

    It is the smallest number of accelerators, and the widest type of weights; ``None`` where none
    fits.

    Args:
        deployment: A deployment that does not fit.
        load: The other arguments of :func:`memory_plan`.
    """
    heads = math.gcd(*(number for model in deployment.models for number in attention_heads(model)))
    larger = [
        n for n in range(deployment.num_accelerators + 1, _MOST_ACCELERATORS + 1) if heads % n == 0
    ]
    smaller = [name for name, bits in WEIGHT_BITS.items() if bits < WEIGHT_BITS[deployment.weights]]

    def fits(**change: Any) -> bool:
        return memory_plan(dataclasses.replace(deployment, **change), **load).fits

    return {
        "num_accelerators": next((n for n in larger if fits(num_accelerators=n)), None),
        "weights": next((name for name in smaller if fits(weights=name, stored=None)), None),
    }
