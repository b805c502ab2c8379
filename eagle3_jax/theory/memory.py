"""Memory that a target and its draft head occupy on each accelerator: weights, both caches, activations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from eagle3_jax.models.config import DecoderConfig, Eagle3Config, GatedDelta, GatedMLP, Latent, LayerConfig, Mixer
from eagle3_jax.theory.accelerators import CACHE_BYTES, WEIGHT_BITS, Accelerator
from eagle3_jax.theory.sizes import LayerRun, Model, Sizes, sizes_of

_EXPERTS_ONLY = "mxfp4"  # gpt-oss is published in it: everything except the experts stays in bfloat16
_MOST_ACCELERATORS = 1024  # upper end of the search for a number that fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """A target and a head on accelerators of one kind.

    Tensor parallelism divides the layers' matrices, both embeddings and output projections, and the key/value heads of
    both caches. Every accelerator holds norms, biases and the head's fusion in full, and a key/value head of its own
    when there are fewer of those than accelerators. Quantized weights are those inside the target's layers; its
    embedding, output projection and vectors keep 16 bits (32 in float32), as in published checkpoints. With FP8 all
    kernels of a draft head have 8 bits too, as this library stores them; with the other types it keeps 16 bits.

    Attributes:
        target: Configuration of the target.
        head: The drafter; ``None`` for plain decoding.
        accelerator: Kind of the accelerators.
        num_accelerators: Tensor-parallel size ``n``.
        weights: A key of ``WEIGHT_BITS``.
        cache: A key of ``CACHE_BYTES``, for both caches.
        target_name: Name of the target for tables and messages.
        head_name: Name of the head for tables and messages.
    """

    target: DecoderConfig
    head: Eagle3Config | Sizes | None
    accelerator: Accelerator
    num_accelerators: int = 1
    weights: str = "bfloat16"
    cache: str = "bfloat16"
    target_name: str = "target"
    head_name: str = "head"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHT_BITS:
            raise ValueError(f"weights {self.weights!r} are not known; use one of {', '.join(WEIGHT_BITS)}")
        if self.cache not in CACHE_BYTES:
            raise ValueError(f"cache type {self.cache!r} is not known; use one of {', '.join(CACHE_BYTES)}")
        if self.num_accelerators < 1:
            raise ValueError(f"{self.num_accelerators} accelerators; expected at least 1")
        for name, model in ((self.target_name, self.target), (self.head_name, self.head)):
            for num_heads in attention_heads(model) if model else ():
                if num_heads % self.num_accelerators:
                    raise ValueError(
                        f"{num_heads} attention heads of the {name} cannot be divided by "
                        f"{self.num_accelerators} accelerators; use a number that divides them"
                    )
        if self.head and self.head.target_width != self.target.width:
            raise ValueError(
                f"the head reads features of width {self.head.target_width} but {self.target_name} has "
                f"{self.target.width}; give the head that was trained for this target"
            )

    @property
    def plain_bytes(self) -> int:
        """Bytes of a number that is never quantized: in tables, routers, vectors, head and activations."""
        return 4 if self.weights == "float32" else 2

    def weight_bytes(self, model: Model) -> float:
        """Weights on each accelerator: ``bits/8·(qo + mlp + r·kv)/n + wide·((embed + output)/n + fusion + vectors)``.

        With FP8 the output projection and the fusion of a head have one byte. ``r`` is the number of accelerators that
        share a key/value head, 1 when there are enough heads. Parameters that a drafter borrows are not counted.
        """
        sizes = sizes_of(model)
        if not sizes.owned.total:
            return 0.0
        tables = sizes.owned.embedding + sizes.owned.output - sizes.read.output
        return self.streamed_bytes(model) + self.plain_bytes * tables / self.num_accelerators

    def streamed_bytes(self, model: Model, *, tokens: int | None = None) -> float:
        """Weights that each accelerator reads in a forward: all but the embedding, of which a token reads one row.

        Args:
            model: The target or the head.
            tokens: Number of tokens that choose between experts; ``None`` reads all experts.
        """
        sizes = sizes_of(model)
        read, own = sizes.read, min(sizes.owned.output, sizes.read.output)
        output = self._kernel_bytes(sizes) * own + self.plain_bytes * (read.output - own)
        full = self.fusion_bytes(model) + self.plain_bytes * (read.vectors + read.routers)
        return self._layer_bytes(model, tokens) + output / self.num_accelerators + full

    def fusion_bytes(self, model: Model) -> float:
        """Weights of the fusion, which every accelerator holds in full."""
        sizes = sizes_of(model)
        return float(self._kernel_bytes(sizes) * sizes.read.fusion)

    def _kernel_bytes(self, sizes: Sizes) -> int:
        """Bytes of a number in a kernel outside of layers."""
        return 1 if sizes.is_head and self.weights == "fp8" else self.plain_bytes

    def cache_bytes_per_token(self, model: Model) -> float:
        """Keys and values of one token on each accelerator: ``Σ 2·C·H`` numbers, ``·r/n``, over the layers.

        A layer of latents has ``r + dr`` on every accelerator, a recurrent layer nothing. Layers with a window hold
        the whole sequence like the others; an engine that frees what has left the window needs less.
        """
        return sum((self.run_cache_bytes(run) for run in sizes_of(model).runs), 0.0)

    def run_cache_bytes(self, run: LayerRun) -> float:
        """Keys and values of one token in some layers, in bytes on each accelerator."""
        return run.cache_values_per_token * self._shared_by(run) / self.num_accelerators * CACHE_BYTES[self.cache]

    def state_bytes(self, model: Model) -> float:
        """Recurrent states of a sequence on each accelerator, whatever its length: ``4·Hv·dk·dv`` bytes a layer.

        The ``K - 1`` inputs that convolutions look back at are in the type of the activations.
        """
        runs = sizes_of(model).runs
        windows = self.plain_bytes * sum(run.window_values for run in runs)
        return (4 * sum(run.state_values for run in runs) + windows) / self.num_accelerators

    def _layer_bytes(self, model: Model, tokens: int | None) -> float:
        wide = 8.0 * self.plain_bytes
        is_quantized = isinstance(model, DecoderConfig) or self.weights == "fp8"
        experts_bits = WEIGHT_BITS[self.weights] if is_quantized else wide
        bits = wide if self.weights == _EXPERTS_ONLY else experts_bits
        divided = sum(
            bits * (run.sizes.query_output + run.sizes.mlp + run.sizes.key_value * self._shared_by(run))
            + experts_bits * run.experts_read(tokens)
            for run in sizes_of(model).runs
        )
        return divided / 8 / self.num_accelerators

    def _shared_by(self, run: LayerRun) -> float:
        return max(1.0, self.num_accelerators / _key_heads(run.layer.mixer))


def attention_heads(model: Model) -> set[int]:
    """Numbers of heads that accelerators divide: query heads, or key heads of recurrent layers, which are fewer."""
    mixers = [run.layer.mixer for run in sizes_of(model).runs]
    return {mixer.num_key_heads if isinstance(mixer, GatedDelta) else mixer.num_heads for mixer in mixers}


def _key_heads(mixer: Mixer) -> int:
    """Heads that keys and values are divided by; a latent counts as one."""
    if isinstance(mixer, Latent):
        return 1
    return mixer.num_key_heads if isinstance(mixer, GatedDelta) else mixer.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on each accelerator.

    Attributes:
        target_weights: Weights of the target.
        head_weights: Weights of the head, without the embedding that it borrows.
        target_cache: The target's keys and values of all sequences.
        head_cache: The head's own keys and values of the same tokens.
        states: Recurrent states of all sequences and both models.
        activations: Estimate of the largest forward.
        reserve: Kept for the engine: context, graphs, workspaces, fragments.
        budget: Bytes that may be used.
        cache_bytes_per_token: Bytes of one token in both caches.
    """

    target_weights: float
    head_weights: float
    target_cache: float
    head_cache: float
    states: float
    activations: float
    reserve: float
    budget: float
    cache_bytes_per_token: float

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
        """Tokens of all sequences together that the rest of the budget can hold; infinite without a budget."""
        left = max(self.budget - self.without_caches - self.states, 0.0)
        if not self.cache_bytes_per_token:
            return math.inf if left else 0.0
        return left if math.isinf(left) else left // self.cache_bytes_per_token


# Attention scores that a prefill makes at once, of all heads and rows (eagle3_jax.models.attention).
SCORES = 2**27


def activation_bytes(
    deployment: Deployment, *, batch: int, context: int, num_draft_tokens: int, prefill_tokens: int
) -> float:
    """Working memory of this library's largest forward on each accelerator, within a tenth of what compilers report.

    ``T·wide·(4·D + (2·mlp + (heads + 2·C)·H)/n + A·D) + (4 + wide)·scores/n + 2·4·B·(K+1)·V/n``: for the ``T`` tokens
    of the forward the residual stream and three vectors like it, the inner vectors of the widest layer, and the
    features kept for the head; attention scores in float32 and as weights, ``heads·T·context`` of them, but no more
    than ``SCORES`` of a prefill; for the verified tokens logits and probabilities in float32. A prefill keeps keys
    and values of its tokens until the caches take them. One in several forwards (``eagle3_jax/groups.py``) also makes
    caches of up to ``2·T`` slots for each. Other engines differ.

    Args:
        deployment: Models and accelerators.
        batch: ``B`` sequences.
        context: Tokens of each.
        num_draft_tokens: ``K``.
        prefill_tokens: Maximum number of prompt tokens in a forward.
    """
    target, n = deployment.target, deployment.num_accelerators
    verified, prefill_tokens = batch * (num_draft_tokens + 1), min(prefill_tokens, batch * context)
    features = sizes_of(deployment.head).num_features * target.width if deployment.head else 0
    kinds = list(dict.fromkeys(target.layers))
    per_token = deployment.plain_bytes * (4 * target.width + max(map(_inner_width, kinds)) / n + features)
    heads = max((layer.mixer.num_heads for layer in kinds if not isinstance(layer.mixer, GatedDelta)), default=0)
    scores = heads * context * max(verified, min(prefill_tokens, SCORES / (heads * context or 1)))
    kept = prefill_tokens + (min(2 * prefill_tokens, batch * context) if batch * context > prefill_tokens else 0)
    kept_token = sum(deployment.cache_bytes_per_token(model) for model in (target, deployment.head) if model)
    return (
        max(verified, prefill_tokens) * per_token
        + (4 + deployment.plain_bytes) * scores / n
        + kept * kept_token
        + 2 * 4 * verified * target.vocab_size / n
    )


def _inner_width(layer: LayerConfig) -> int:
    """Width of all inner vectors of a token in a layer."""
    mixer, mlp = layer.mixer, layer.mlp
    inner = 2 * mlp.width if isinstance(mlp, GatedMLP) else 2 * (mlp.per_token * mlp.width + mlp.shared_width)
    if isinstance(mixer, Latent):  # each head's query, and what it attended to, in the latent's space
        return inner + 2 * mixer.num_heads * (mixer.kv_rank + mixer.rope_dim)
    if isinstance(mixer, GatedDelta):
        return inner + 2 * mixer.num_key_heads * mixer.key_dim + 2 * mixer.num_value_heads * mixer.value_dim
    gate = mixer.num_heads * mixer.head_dim if mixer.output_gate else 0
    return inner + (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim + gate


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
    """Bytes on each accelerator while ``batch`` sequences are ``context`` tokens long.

    The caches also hold the ``K + 1`` tokens under verification: ``B·(context + K + 1)`` tokens each.

    Args:
        deployment: Models and accelerators.
        batch: Sequences at once.
        context: Tokens of each, prompt and answer.
        num_draft_tokens: ``K``; 0 without a head.
        prefill_tokens: Maximum number of prompt tokens in a forward.
        utilization: Share of the accelerator that the engine may take (vLLM's ``gpu_memory_utilization``).
        reserve_bytes: Bytes kept for everything that is not counted here.

    Raises:
        ValueError: A number is out of its range.
    """
    if batch < 1 or context < 1:
        raise ValueError(f"batch {batch} and context {context} must both be at least 1")
    if not 0 < utilization <= 1:
        raise ValueError(f"memory utilization is {utilization:g}; expected more than 0 and at most 1")
    if not 0 <= reserve_bytes < math.inf:
        raise ValueError(f"the reserve is {reserve_bytes:g} bytes; expected 0 or more")
    target, head = deployment.target, deployment.head
    tokens = batch * (context + num_draft_tokens + 1)
    target_token = deployment.cache_bytes_per_token(target)
    head_token = deployment.cache_bytes_per_token(head) if head else 0.0
    return MemoryPlan(
        target_weights=deployment.weight_bytes(target),
        head_weights=deployment.weight_bytes(head) if head else 0.0,
        target_cache=tokens * target_token,
        head_cache=tokens * head_token,
        states=batch * sum(deployment.state_bytes(model) for model in (target, head) if model),
        activations=activation_bytes(
            deployment,
            batch=batch,
            context=context,
            num_draft_tokens=num_draft_tokens,
            prefill_tokens=prefill_tokens,
        ),
        reserve=reserve_bytes,
        budget=deployment.accelerator.memory_bytes * utilization,
        cache_bytes_per_token=target_token + head_token,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """The smallest changes that would make a plan fit.

    Attributes:
        num_accelerators: Smallest sufficient number with the same weights; ``None`` if there is none.
        weights: Widest sufficient weight type on as many as now; ``None`` if there is none.
    """

    num_accelerators: int | None
    weights: str | None


def remedy_of(deployment: Deployment, **asked: Any) -> Remedy:
    """The smallest changes with which :func:`memory_plan` fits.

    Args:
        deployment: A deployment that does not fit.
        asked: The other arguments of :func:`memory_plan`.
    """

    def fits(**changes: Any) -> bool:
        return memory_plan(dataclasses.replace(deployment, **changes), **asked).fits

    models = [deployment.target, *([deployment.head] if deployment.head else [])]
    heads = math.gcd(*(number for model in models for number in attention_heads(model)))
    numbers = range(deployment.num_accelerators + 1, min(heads, _MOST_ACCELERATORS) + 1)
    narrower = [name for name, size in WEIGHT_BITS.items() if size < WEIGHT_BITS[deployment.weights]]
    return Remedy(
        num_accelerators=next((n for n in numbers if heads % n == 0 and fits(num_accelerators=n)), None),
        weights=next((name for name in narrower if fits(weights=name)), None),
    )
