"""Training text for draft heads, written by the target itself.

A head learns to predict what its target says; text by others teaches it what the target would not have said
(EAGLE-3, section 4; the largest single gain that published trainers report).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eagle3_jax.decode import LoadedTarget, SpeculativeDecoder
from eagle3_jax.types import SamplingParams
from eagle3_jax.writing import whole_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerationConfig:
    """Number of rows, their lengths and their sampling."""

    num_rows: int = 4096  #: Number of rows.
    prompt_length: int = 64  #: Tokens of corpus text that open each row.
    length: int = 256  #: Tokens per row, prompt included.
    batch: int = 64  #: Rows generated at once.
    greedy_share: float = 0.6  #: Part of the rows decoded greedily; the rest is sampled.
    temperature: float = 0.8  #: Temperature of the sampled rows.
    seed: int = 0  #: Random seed of prompts and samples.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Text with the part that the target wrote."""

    tokens: np.ndarray  #: ``[R T]``, padded with 0.
    prompt_length: np.ndarray  #: ``[R]``.
    length: np.ndarray  #: ``[R]``, prompt included.

    def save(self, path: Path) -> None:
        """Write an ``.npz`` file; it appears under its name only when complete."""
        with whole_file(path) as partial:
            np.savez(partial, tokens=self.tokens, prompt_length=self.prompt_length, length=self.length)

    @classmethod
    def load(cls, path: Path) -> Rows:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: It is another file, or its numbers contradict each other.
        """
        try:
            with np.load(path) as data:
                rows = cls(data["tokens"], data["prompt_length"], data["length"])
            count, size = rows.tokens.shape
            good = rows.prompt_length.shape == rows.length.shape == (count,) and rows.tokens.size > 0
            good &= all(array.dtype.kind in "iu" for array in (rows.tokens, rows.prompt_length, rows.length))
            good &= bool(
                np.all((rows.prompt_length >= 1) & (rows.prompt_length <= rows.length) & (rows.length <= size))
            )
        except FileNotFoundError:
            raise
        except Exception:  # of zipfile, zlib, numpy and its parser of headers
            good = False
        if not good:
            raise ValueError(
                f"{path} is damaged or holds something else; expected the .npz file that `eagle3 train regenerate "
                "TARGET CORPUS OUT.npz` writes"
            )
        return rows

    @property
    def masks(self) -> tuple[np.ndarray, np.ndarray]:
        """``[R T]`` each: which tokens are real, and which of them the target wrote."""
        index = np.arange(self.tokens.shape[1])[None, :]
        real = index < self.length[:, None]
        return real, real & (index >= self.prompt_length[:, None])


def regenerate(target: LoadedTarget, corpus: np.ndarray, config: RegenerationConfig) -> Iterator[Rows]:
    """Let the target continue windows of the corpus, batch by batch.

    Args:
        target: The target that continues the prompts.
        corpus: One long row of training tokens; prompts start at random places.
        config: Number, lengths and sampling of the rows.
    """
    rng = np.random.default_rng(config.seed)
    decoder = SpeculativeDecoder(target)
    num_greedy = round(config.batch * config.greedy_share)
    temperature = np.where(np.arange(config.batch) < num_greedy, 0.0, config.temperature).astype(np.float32)
    kind = np.uint16 if target.vocab_size <= 2**16 else np.uint32
    for batch in range(-(-config.num_rows // config.batch)):
        starts = rng.integers(0, len(corpus) - config.prompt_length, config.batch)
        prompts = [corpus[start : start + config.prompt_length].astype(int).tolist() for start in starts]
        result = decoder.generate(
            prompts,
            max_new_tokens=config.length - config.prompt_length,
            sampling=SamplingParams(temperature=temperature),
            seed=config.seed + batch,
        )
        tokens = np.zeros((config.batch, config.length), kind)
        lengths = np.zeros(config.batch, np.int32)
        for row, (prompt, new) in enumerate(zip(prompts, result.tokens, strict=True)):
            text = [*prompt, *new]
            tokens[row, : len(text)], lengths[row] = text, len(text)
        yield Rows(tokens, np.full(config.batch, config.prompt_length, np.int32), lengths)
