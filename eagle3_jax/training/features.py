"""The target's features and states at every token of the texts, computed once.

A head reads features of the target and learns its distributions. Both are the same in every pass,
so they are stored. A token takes ``2 (A + 1) D + 8`` bytes for ``A`` layers of width ``D`` (4.6 KB
for three layers of width 576). Training then needs no forward of the target.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax.files.writing import check_free, whole_file
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.texts import Texts, buckets_of, padded
from eagle3_jax.tree import causal_mask

# About 60,000 tokens: minutes of work that an interruption loses.
TEXTS_OF_A_PART = 256
_TOKENS_AT_ONCE = 2048


class Known(struct.PyTreeNode, kw_only=True):
    """The target's features and states at each token of a batch.

    Attributes:
        features: ``[B T A D]``, the features that the head fuses.
        final: ``[B T D]``, the state after the final norm.
        likeliest: ``[B T]``, the likeliest next token.
        log_norm: ``[B T]``, the logarithm of the sum of the exponentials of all logits.
    """

    features: Float[Array, "B T A D"]
    final: Float[Array, "B T D"]
    likeliest: Int[Array, "B T"]
    log_norm: Float[Array, "B T"]


def _record(num_layers: int, width: int) -> np.dtype:
    """Returns the type of one token's record.

    Integers hold bfloat16, for which files of NumPy have no name.
    """
    return np.dtype(
        [
            ("features", np.uint16, (num_layers, width)),
            ("final", np.uint16, (width,)),
            ("likeliest", np.int32),
            ("log_norm", np.float32),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Features:
    """The stored features of texts.

    Attributes:
        texts: The texts.
        parts: For each group of ``TEXTS_OF_A_PART`` texts, the records of its tokens,
            memory-mapped.
    """

    texts: Texts
    parts: tuple[np.ndarray, ...]

    def of(self, chosen: Int[np.ndarray, " b"], length: int, count: int) -> Known:
        """Reads a batch.

        Args:
            chosen: Indices of at most ``count`` texts.
            length: ``T``, tokens of a row; entries after a text are zero.
            count: ``B``.
        """
        rows = np.zeros((count, length), self.parts[0].dtype)
        start = self.texts.start
        for row, index in enumerate(chosen):
            part, first = divmod(int(index), TEXTS_OF_A_PART)
            begin = start[index] - start[index - first]
            size = int(self.texts.length[index])
            rows[row, :size] = self.parts[part][begin : begin + size]

        return Known(
            features=jnp.asarray(rows["features"].view(jnp.bfloat16)),
            final=jnp.asarray(rows["final"].view(jnp.bfloat16)),
            likeliest=jnp.asarray(rows["likeliest"]),
            log_norm=jnp.asarray(rows["log_norm"]),
        )


def stored_features(
    target: LoadedTarget, texts: Texts, aux_layers: tuple[int, ...], directory: Path
) -> Iterator[Features | None]:
    """Computes the features that are not stored yet, part by part.

    Args:
        target: The target, whose model is a :class:`~eagle3_jax.models.decoder.DecoderTarget`.
        texts: The texts.
        aux_layers: The layers that the head reads.
        directory: The folder of the parts. It belongs to one target, these texts and these layers.

    Yields:
        ``None`` after every part, and finally the features.

    Raises:
        WriteError: The disk is full. The parts that were written are complete, and the next call
            uses them.
    """
    record = _record(len(aux_layers), target.model.config.width)  # type: ignore[attr-defined]
    firsts = range(0, len(texts), TEXTS_OF_A_PART)
    sizes = [int(texts.length[first : first + TEXTS_OF_A_PART].sum()) for first in firsts]
    paths = [directory / f"{number:05}.npy" for number in range(len(firsts))]
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    check_free(directory, sum(sizes[number] for number in missing) * record.itemsize)

    for number in missing:
        part = range(firsts[number], min(firsts[number] + TEXTS_OF_A_PART, len(texts)))
        with whole_file(paths[number]) as partial, open(partial, "wb") as file:
            np.save(file, _compute_part(target, texts, part, aux_layers, record))
        yield None

    parts = [_open_part(path, record, size) for path, size in zip(paths, sizes, strict=True)]
    yield Features(texts, tuple(parts))


def _open_part(path: Path, record: np.dtype, size: int) -> np.ndarray:
    try:
        records = np.load(path, mmap_mode="r")
    except (ValueError, EOFError):
        records = np.empty(0, record)
    if records.dtype != record or records.shape != (size,):
        raise ValueError(f"{path} is damaged; remove it, and its features are computed again")
    return records


@functools.partial(jax.jit, static_argnames=("model", "aux_layers"))
def _forward(
    model: DecoderTarget,
    params: Params,
    tokens: Int[Array, "B T"],
    length: Int[Array, " B"],
    *,
    aux_layers: tuple[int, ...],
) -> dict[str, Array]:
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    seen = causal_mask(tokens.shape[1]) & (index[None] < length[:, None])[:, None, :]
    output = model(
        params, tokens, jnp.broadcast_to(index, tokens.shape), seen, aux_layers=aux_layers
    )
    logits = model.unembed(params, output.final)

    def bits(states: Array) -> Array:
        return lax.bitcast_convert_type(states.astype(jnp.bfloat16), jnp.uint16)

    return {
        "features": bits(output.features),
        "final": bits(output.final),
        "likeliest": jnp.argmax(logits, axis=-1).astype(jnp.int32),
        "log_norm": jax.nn.logsumexp(logits, axis=-1),
    }


def _compute_part(
    target: LoadedTarget, texts: Texts, part: range, aux_layers: tuple[int, ...], record: np.dtype
) -> np.ndarray:
    """Returns the records of the texts of a part, one after the other."""
    begin = texts.start[part.start]
    records = np.zeros(texts.length[part.start : part.stop].sum(), record)

    # The buckets of all texts, so that all parts share their programs.
    for bucket in buckets_of(texts.length):
        count = max(1, _TOKENS_AT_ONCE // bucket.length)
        in_part = bucket.texts[(bucket.texts >= part.start) & (bucket.texts < part.stop)]
        for offset in range(0, len(in_part), count):
            rows = in_part[offset : offset + count]
            tokens, real = padded(texts, rows, bucket.length, count)
            length = jnp.asarray(real.sum(axis=1), jnp.int32)
            output = _forward(
                target.model, target.params, jnp.asarray(tokens), length, aux_layers=aux_layers
            )
            values = jax.device_get(output)

            for row, index in enumerate(rows):
                size = int(texts.length[index])
                first = texts.start[index] - begin
                for name, value in values.items():
                    records[name][first : first + size] = value[row, :size]
    return records
