"""Attention of a verify block with a library's kernel for the committed prefix, as a target of one's own.

    python examples/verify_block_attention.py [--rehearse]      # times it

The core attends over prefix and block at once, under a mask of the whole capacity. Here the two are apart: the prefix
needs no mask but a length for each row, which kernels of libraries take, and the block (a chain or a tree) sees itself
under its ancestor mask. The two parts are joined by their log-sum-exp. Three kernels can do the prefix:

- `cudnn`: `jax.nn.dot_product_attention`. Wants `[B S C H]`, so the core's caches are transposed for it. Its
  log-sum-exp is returned in the type of the queries: in bfloat16 the two parts are weighed to two or three digits.
- `pallas`: `jax.experimental.pallas.ops.gpu.decode_attention`, which splits the prefix over the whole GPU. The tokens
  of the block are folded into the group of heads that shares a key head. Deprecated in JAX after 0.11.
- `xla`: the first one without cuDNN, for any device.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eagle3_jax.cache import Cache, KeyValue, KeyValues, Segment, visible
from eagle3_jax.measure.timing import Spread
from eagle3_jax.models.attention import Scoring, attention
from eagle3_jax.models.decoder import Decoder, DecoderTarget
from eagle3_jax.models.functional import bind
from eagle3_jax.types import TargetOutput

if TYPE_CHECKING:  # a checkout runs without it
    from jaxtyping import Array, Bool, Float, Int

KERNELS = ("xla", "cudnn", "pallas")


def block_attention(
    queries: Float[Array, "B T heads H"],
    prefix: KeyValue,
    length: Int[Array, " B"],
    block: KeyValue,
    mask: Bool[Array, "#B T T"],
    *,
    kernel: str,
) -> Float[Array, "B T width"]:
    """What :func:`eagle3_jax.models.layers.attention` gives over a prefix and a block.

    Args:
        queries: Rotated queries of the block.
        prefix: Keys and values of which each row's first ``length`` are committed; at least one.
        length: Committed tokens.
        block: Keys and values of the block.
        mask: Which tokens of the block each one sees; itself at least.
        kernel: Of :data:`KERNELS`.
    """
    batch, fed, heads, size = queries.shape
    kv_heads = block.keys.shape[1]
    over_prefix, prefix_sum = _prefix(queries, prefix, length, kernel)
    rows = queries.reshape(batch, fed, kv_heads, heads // kv_heads, size)
    contract = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
    scores = contract("btcgh,bcuh->btcgu", rows, block.keys) * size**-0.5
    scores = jnp.where(mask[:, :, None, None, :], scores, -jnp.inf)
    block_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    over_block = contract("btcgu,bcuh->btcgh", jnp.exp(scores - block_sum), block.values)
    shape = (batch, fed, kv_heads, heads // kv_heads)
    share = jax.nn.sigmoid(prefix_sum.reshape(*shape, 1).astype(jnp.float32) - block_sum)
    out = over_prefix.reshape(*shape, size).astype(jnp.float32) * share + over_block * (1 - share)
    return out.astype(queries.dtype).reshape(batch, fed, heads * size)


def _prefix(
    queries: Float[Array, "B T heads H"], prefix: KeyValue, length: Int[Array, " B"], kernel: str
) -> tuple[Float[Array, "B T heads H"], Float[Array, "B T heads"]]:
    """Attention over the committed tokens, and the log of the sum of its weights."""
    keys, values = (jnp.swapaxes(part, 1, 2) for part in prefix)  # [B S C H], as libraries take them
    if kernel != "pallas":
        return jax.nn.dot_product_attention(
            queries, keys, values, key_value_seq_lengths=length, implementation=kernel, return_residual=True  # type: ignore[arg-type]
        )  # fmt: skip
    from jax.experimental.pallas.ops.gpu import decode_attention  # elsewhere, or gone, in later versions

    batch, fed, heads, size = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(batch, fed, kv_heads, heads // kv_heads, size)
    folded = jnp.moveaxis(grouped, 1, 2).reshape(batch, kv_heads * fed * (heads // kv_heads), size)
    on_gpu = jax.default_backend() == "gpu"
    with jax.numpy_dtype_promotion("standard"):  # it mixes types, which a strict setting refuses
        out, (total, largest) = decode_attention.gqa(
            folded, keys, values, kv_seq_len=length, start_idx=jnp.zeros_like(length), return_residuals=True,
            k_splits=16 if on_gpu else 2, interpret=not on_gpu,
        )  # fmt: skip
    out, log_sum = (
        jnp.moveaxis(part.reshape(batch, kv_heads, fed, heads // kv_heads, *part.shape[2:]), 2, 1)
        for part in (out, largest + jnp.log(total))
    )
    return out.reshape(queries.shape), log_sum.reshape(batch, fed, heads)


class PrefixMemory(NamedTuple):
    """A :class:`eagle3_jax.models.decoder.Memory`: the committed prefix by a library's kernel, the block beside it.

    Attributes:
        layer: The layer's cache.
        length: ``[B]``, committed slots.
        mask: ``[B T T]``, which tokens of the block each one sees.
        kernel: Of :data:`KERNELS`.
    """

    layer: KeyValues
    length: Int[Array, " B"]
    mask: Bool[Array, "#B T T"]
    kernel: str

    def attend(
        self, queries: Float[Array, "B T heads H"], kv: KeyValue, scoring: Scoring = Scoring()
    ) -> tuple[Float[Array, "B T width"], KeyValue]:
        """See :class:`eagle3_jax.models.memory.Memory`; keeps the whole buffers. The scores are plain ones."""
        assert scoring == Scoring()
        prefix = KeyValue(self.layer.keys, self.layer.values)
        return block_attention(queries, prefix, self.length, kv, self.mask, kernel=self.kernel), self.layer.write(
            kv, self.length
        )


@dataclasses.dataclass(frozen=True)
class PrefixTarget(DecoderTarget):
    """A :class:`DecoderTarget` without windows whose blocks attend by :func:`block_attention`.

    Attributes:
        kernel: Of :data:`KERNELS`.
    """

    kernel: str = "cudnn"
    __hash__ = DecoderTarget.__hash__

    def __call__(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "#B T T"],
        cache: Cache | None = None,
        aux_layers: tuple[int, ...] = (),
        length: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        """See :class:`eagle3_jax.types.TargetModel`; a prefill is the core's."""
        if cache is None:
            return super().__call__(params, tokens, positions, mask, cache, aux_layers, length)
        layers: Any = cache.layers
        memories = [PrefixMemory(layer, cache.length, mask, self.kernel) for layer in layers]
        return bind(Decoder, self.config, self.precision, params)(tokens, positions, memories, aux_layers)


# Timing: attention alone, of as many layers as a model has, each with a cache of its own


def core(queries: Array, prefix: KeyValue, length: Array, block: KeyValue, mask: Array) -> Float[Array, "B T width"]:
    """The core's attention over the same."""
    layer = KeyValues(keys=prefix.keys, values=prefix.values)
    seen = visible(mask, length, layer.capacity)
    return attention(queries, (Segment(layer.write(block, length), seen),))


def layers_seconds(
    kernel: str, *, batch: int, fed: int, context: int, layers: int, heads: tuple[int, int, int], dtype: Any,
    repeats: int,
) -> list[float]:  # fmt: skip
    """Seconds that attention of all layers takes in each repeat, after a warm-up. ``core`` is the core's own."""
    num_heads, kv_heads, size = heads
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, dtype)
    queries, new = draw(0, batch, fed, num_heads, size), draw(1, batch, kv_heads, fed, size)
    caches = [KeyValue(*(draw(7 * i + j, batch, kv_heads, context, size) for j in (2, 3))) for i in range(layers)]
    length = jnp.full((batch,), context - fed, jnp.int32)
    mask = jnp.tril(jnp.ones((1, fed, fed), jnp.bool_))

    @jax.jit
    def run(queries: Array, caches: list[KeyValue]) -> Array:
        for cache in caches:  # one after the other, as in a model
            of_kernel = functools.partial(block_attention, kernel=kernel) if kernel != "core" else core
            queries = of_kernel(queries, cache, length, KeyValue(new, new), mask).reshape(queries.shape)
        return queries

    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(run(queries, caches))
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def rows(*, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Seconds of every kernel, and of the core, over batches, blocks and contexts."""
    if rehearse:
        points, layers, heads, dtype, repeats = [(1, 4, 64)], 2, (4, 2, 16), jnp.float32, 2
    else:
        points = [(batch, fed, context) for context in (1024, 8192) for batch in (1, 8) for fed in (6, 60)]
        layers, heads, dtype, repeats = 32, (32, 8, 128), jnp.bfloat16, 10
    for batch, fed, context in points:
        row: dict[str, Any] = {"batch": batch, "block": fed, "context": context}
        for kernel in ("core", *KERNELS):
            sizes = {"batch": batch, "fed": fed, "context": context, "layers": layers, "heads": heads}
            try:
                seconds = layers_seconds(kernel, **sizes, dtype=dtype, repeats=repeats)
                row[kernel] = Spread.of(seconds).to_json()
            except Exception as error:
                row[kernel] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
        yield row


def main() -> None:
    """Print them, a row each line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="Tiny shapes, on any device.")
    given = parser.parse_args()
    for row in rows(rehearse=given.rehearse):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
