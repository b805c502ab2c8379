"""DFlash2: a DFlash block with short convolutions, and a selector of candidates.

z-lab published it in August 2026. It adds two parts to DFlash
(:mod:`eagle3_jax.drafters.dflash`).

Convolutions
    Attention and MLP of a layer stand between two causal convolutions over the rows of the block,
    whose kernels depend on the row: ``y_i = sum_t (base_t + change_{i,t}) x_{i-t}``. All changes
    follow from the input of the part by a projection, and channels of a group share theirs. Rows
    before the block are zero, so no committed token is read and nothing is stored.

Selector
    A row keeps the ``C`` tokens with the largest logits ``u``. A candidate ``b`` after the token
    ``a`` has the score ``u(b) + <A[a] * (W h), B[b]>``, and ``q = softmax(scores / temperature)``
    is zero outside of the candidates. The candidates do not depend on ``a``, so a tree needs no
    further pass either.

Weaknesses: those of DFlash; and a token that is not among the candidates of its row is never
drafted, whatever precedes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax.drafters.base import width_of
from eagle3_jax.drafters.dflash import DFlashConfig, DFlashDrafter, DFlashHead
from eagle3_jax.drafters.grow import Level
from eagle3_jax.models.config import LayerConfig, check_range, check_sizes
from eagle3_jax.models.context import AttentionContext
from eagle3_jax.models.decoder import Block
from eagle3_jax.models.functional import Params
from eagle3_jax.models.layers import (
    Linear,
    Precision,
    embed,
    matmul_precision,
    normal_param,
    scaled,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """A block drafter with convolutions and a selector.

    It proposes tokens of the target's whole vocabulary, and the row of ``x_n`` predicts nothing.

    Attributes:
        conv_kernel_size: Rows that a convolution reads, its own included.
        conv_group_size: Neighbouring channels that share the change of a kernel.
        selector_rank: ``R``, rank of the score of a pair of tokens.
        selector_top_k: ``C``, tokens that a row keeps.
        input_embedding_scale: Factor of the embedded tokens of the block.
        output_multiplier: Factor of the logits.
        final_logit_softcapping: ``c``: logits become ``c * tanh(logit / c)`` after that; ``None``
            for no cap.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        check_range(
            self, 1e-6, 1e6, "input_embedding_scale", "output_multiplier", "final_logit_softcapping"
        )
        if self.from_anchor or self.markov is not None or self.confidence is not None:
            raise ValueError(
                "a DFlash2 drafter has no from_anchor, markov or confidence; leave them out"
            )

        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} of {self.vocab_size}; a DFlash2"
                " drafter has the whole vocabulary of its target"
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"selector_top_k is {self.selector_top_k}; expected 1 to the vocabulary's"
                f" {self.vocab_size}"
            )
        if self.width % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}; expected a divisor of the width"
                f" {self.width}"
            )
        if self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size}; expected 1 to the"
                f" {self.block_size} rows of a block"
            )


class Convolution(nnx.Module):
    """The convolutions before and after a part of a layer.

    More rows than a block has are several blocks, as in training.
    """

    def __init__(self, config: DFlash2Config, *, precision: Precision, rngs: nnx.Rngs):
        width = config.width
        groups = width // config.conv_group_size
        unchanged = jnp.zeros((2, config.conv_kernel_size, width), jnp.float32).at[:, 0].set(1.0)
        self.base = nnx.Param(unchanged)
        self.changes = Linear(
            width, 2 * config.conv_kernel_size * groups, precision=precision, rngs=rngs
        )
        self.config = config

    def __call__(
        self, x: Float[Array, "B T D"], part: Callable[[Float[Array, "B T D"]], Array]
    ) -> Float[Array, "B T D"]:
        """Runs a part of a layer between the convolutions; both have kernels that follow from x."""
        changes = self.changes(x).reshape(*x.shape[:2], 2, self.config.conv_kernel_size, -1)
        before = self._convolve(x, changes[:, :, 0], self.base[0])
        return self._convolve(part(before), changes[:, :, 1], self.base[1])

    def _convolve(
        self,
        x: Float[Array, "B T D"],
        changes: Float[Array, "B T taps groups"],
        base: Float[Array, "taps D"],
    ) -> Float[Array, "B T D"]:
        # Products and sums are in float32 and rounded once.
        size = min(x.shape[1], self.config.block_size)
        blocks = x.astype(jnp.float32).reshape(-1, size, x.shape[-1])
        total = jnp.zeros(x.shape, jnp.float32)
        for tap in range(self.config.conv_kernel_size):
            change = jnp.repeat(changes[:, :, tap], self.config.conv_group_size, axis=-1)
            kernel = base[None, None, tap].astype(jnp.float32) + change.astype(jnp.float32)
            earlier = jnp.pad(blocks, ((0, 0), (tap, 0), (0, 0)))[:, :size]
            total = total + kernel * earlier.reshape(x.shape)
        return total.astype(x.dtype)


class ConvolvedBlock(Block):
    """A layer of a DFlash2 drafter: attention and MLP between convolutions."""

    def __init__(self, layer: LayerConfig, config: DFlash2Config, **options: Any):
        super().__init__(layer, width=config.width, norm_eps=config.norm_eps, **options)
        self.attention_convolution = Convolution(config, **options)
        self.mlp_convolution = Convolution(config, **options)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], context: AttentionContext
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the residual stream after the layer; its keys and values are not stored."""
        assert self.attention_norm is not None
        assert self.mlp_norm is not None

        def attend(rows: Array) -> Array:
            return self.attention(rows, positions, context)[0]

        between = x + self.attention_convolution(self.attention_norm(x), attend)
        return between + self.mlp_convolution(self.mlp_norm(between), self.mlp), ()


class Selector(nnx.Module):
    """The factors of the score of a candidate after the token before it."""

    def __init__(self, config: DFlash2Config, *, precision: Precision, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.selector_rank)
        self.before = normal_param(rngs, shape, 0.02)
        self.after = normal_param(rngs, shape, 0.02)
        self.hidden = Linear(config.width, config.selector_rank, precision=precision, rngs=rngs)
        self.precision = precision

    def score(
        self,
        before: Int[Array, "B k"],
        candidates: Int[Array, "B C"],
        hidden: Float[Array, "B D"],
    ) -> Float[Array, "B k C"]:
        """Returns the scores of candidates after each of some tokens, in float32."""
        factors = embed(self.before[...], before, self.precision) * self.hidden(hidden)[:, None]
        after = embed(self.after[...], candidates, self.precision)
        precision = matmul_precision(factors.dtype)
        return jnp.einsum(
            "bkr,bcr->bkc",
            factors,
            after,
            precision=precision,
            preferred_element_type=jnp.float32,
        )


class DFlash2Head(DFlashHead):
    """The network: a DFlash backbone with convolutions, and the selector."""

    def __init__(self, config: DFlash2Config, *, precision: Precision, rngs: nnx.Rngs):
        super().__init__(config, precision=precision, rngs=rngs)
        self.selector = Selector(config, precision=precision, rngs=rngs)

    @staticmethod
    def block_of(layer: LayerConfig, config: Any, **options: Any) -> Block:
        """See :meth:`DFlashHead.block_of`."""
        return ConvolvedBlock(layer, config, **options)


@dataclasses.dataclass(frozen=True)
class DFlash2Drafter(DFlashDrafter):
    """Drafts with a DFlash2 head; a node has at most ``selector_top_k`` children.

    The attributes are those of :class:`DFlashDrafter`.
    """

    network: ClassVar[type[nnx.Module]] = DFlash2Head

    config: DFlash2Config

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.config.selector_top_k
        width = width_of(self.shape)
        if width > most:
            raise ValueError(
                f"the tree draws {width} children of a node, and a DFlash2 row has {most}"
                f" candidates; lower top_k to at most {most}"
            )

    def embedded(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """See :meth:`DFlashDrafter.embedded`."""
        return scaled(super().embedded(params, tokens), self.config.input_embedding_scale)

    def logits(
        self, params: Params, head: DFlashHead, hidden: Float[Array, "B T D"]
    ) -> Float[Array, "B T V"]:
        """Returns the logits of the block's rows in float32, without the scores of pairs."""
        logits = scaled(super().logits(params, head, hidden), self.config.output_multiplier)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def level(
        self, head: DFlash2Head, hidden: Float[Array, "B K D"], base: Float[Array, "B K V"]
    ) -> Callable[[int, Any, Any], Level]:
        """See :meth:`DFlashDrafter.level`; the logits of other tokens than candidates are -inf."""
        unary, candidates = lax.top_k(base, self.config.selector_top_k)

        def level(depth: int, tokens: Int[Array, "B k"], carry: Any) -> Level:
            ids = candidates[:, depth]
            scores = head.selector.score(tokens, ids, hidden[:, depth]) + unary[:, depth, None]
            batch, count, _ = scores.shape
            nothing = jnp.full((batch, count, base.shape[-1]), -jnp.inf, jnp.float32)
            rows = jnp.arange(batch)[:, None, None]
            nodes = jnp.arange(count)[None, :, None]
            return Level(nothing.at[rows, nodes, ids[:, None]].set(scores), carry, memory=())

        return level
