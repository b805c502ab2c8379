"""Texts to learn from: token ids with a mask of the tokens that are learnt, and their files."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt64

from eagle3_jax.files.writing import whole_file


class Text(NamedTuple):
    """One text to learn from."""

    tokens: list[int]  #: Token ids.
    learn: list[bool]  #: For each token, whether the head learns to draft it.
    #: The first 8 bytes of the SHA-256 of the document; equal documents are learnt or held out
    #: together.
    document: int


def document_hash(text: str) -> int:
    """Returns the first 8 bytes of the SHA-256 of a document, as an integer."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclasses.dataclass(frozen=True)
class Texts:
    """``R`` texts with ``N`` tokens in total, one after the other.

    Attributes:
        tokens: ``[N]`` token ids.
        learn: ``[N]``, whether a head learns to draft the token.
        length: ``[R]``, tokens of each text.
        document: ``[R]``, the hash of each text's document.
    """

    tokens: Int[np.ndarray, " N"]
    learn: Bool[np.ndarray, " N"]
    length: Int[np.ndarray, " R"]
    document: UInt64[np.ndarray, " R"]

    @classmethod
    def of(cls, texts: Iterable[Text]) -> Texts:
        """Joins texts."""
        rows = list(texts)
        return cls(
            tokens=np.fromiter(itertools.chain.from_iterable(row.tokens for row in rows), np.int32),
            learn=np.fromiter(itertools.chain.from_iterable(row.learn for row in rows), np.bool_),
            length=np.array([len(row.tokens) for row in rows], np.int32),
            document=np.array([row.document for row in rows], np.uint64),
        )

    @classmethod
    def joined(cls, parts: Iterable[Texts]) -> Texts:
        """Joins several groups of texts."""
        groups = list(parts)
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(group, name) for group in groups]) for name in names))

    def __len__(self) -> int:
        """``R``."""
        return len(self.length)

    @functools.cached_property
    def start(self) -> Int[np.ndarray, " R"]:
        """The index of the first token of each text."""
        return np.cumsum(self.length, dtype=np.int64) - self.length

    def span(self, index: int | np.integer) -> slice:
        """Returns the indices of a text's tokens."""
        return slice(self.start[index], self.start[index] + self.length[index])

    def chosen(self, mask: Bool[np.ndarray, " R"]) -> Texts:
        """Returns the texts for which the mask is True."""
        tokens = np.repeat(mask, self.length)
        return Texts(
            self.tokens[tokens], self.learn[tokens], self.length[mask], self.document[mask]
        )

    def prompts(self) -> list[tuple[int, bytes]]:
        """Returns the prompt of each text.

        It is its document, and the bytes of the token ids before the first learnt one.
        """
        prompts = []
        for index, document in enumerate(self.document):
            learnt = np.flatnonzero(self.learn[self.span(index)])
            size = learnt[0] if len(learnt) else None
            prompts.append((int(document), self.tokens[self.span(index)][:size].tobytes()))
        return prompts

    def held_out(self, share: float) -> Bool[np.ndarray, " R"]:
        """Returns a mask of the texts that are held out: those of the documents of lowest hashes.

        Args:
            share: Share of all documents, 0 to 1.
        """
        return self.document < np.uint64(min(int(share * 2**64), 2**64 - 1))

    def save(self, path: Path) -> None:
        """Writes an ``.npz`` file, which appears under its name only when it is complete."""
        with whole_file(path) as partial, open(partial, "wb") as file:
            np.savez(
                file,
                **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            )

    @classmethod
    def load(cls, path: Path) -> Texts:
        """Reads a file that :meth:`save` wrote.

        Raises:
            ValueError: The file is damaged or has other content.
        """
        try:
            with np.load(path) as arrays:
                texts = cls(*(arrays[field.name] for field in dataclasses.fields(cls)))

            complete = texts.length.sum() == len(texts.tokens) == len(texts.learn)
            complete &= len(texts.document) == len(texts.length) and texts.length.min(initial=1) > 0
            complete &= texts.tokens.min(initial=0) >= 0 and texts.learn.dtype == np.bool_
        except FileNotFoundError:
            raise
        # Of zipfile, zlib, numpy and its parser of headers.
        except Exception:
            complete = False

        if not complete:
            raise ValueError(
                f"{path} is damaged or holds something else; expected a file that `eagle3 train"
                " data` wrote"
            )
        return texts


def token_counts(texts: Texts, vocab_size: int) -> Int[np.ndarray, " V"]:
    """Returns how often each token is learnt.

    Raises:
        ValueError: A token is outside the vocabulary.
    """
    highest = int(texts.tokens.max(initial=0))
    if highest >= vocab_size:
        raise ValueError(
            f"the texts hold token {highest}; expected 0 to {vocab_size - 1}: they were encoded"
            " with another tokenizer"
        )
    return np.bincount(texts.tokens[texts.learn], minlength=vocab_size)


# Batches


class Bucket(NamedTuple):
    """Texts that are padded to one length."""

    length: int  #: Tokens of a padded row.
    texts: Int[np.ndarray, " n"]  #: Indices of the texts, each of at most ``length`` tokens.


def buckets_of(length: Int[np.ndarray, " R"], most: int = 6, multiple: int = 16) -> list[Bucket]:
    """Divides texts by their lengths, so that padding is small and few shapes are compiled.

    Args:
        length: ``[R]``, tokens of each text.
        most: Maximum number of buckets; each has about as many texts.
        multiple: Padded lengths are multiples of this number.
    """
    quantiles = np.quantile(length, np.arange(1, most + 1) / most, method="higher")
    padded_lengths = np.unique(-(-quantiles.astype(np.int64) // multiple) * multiple)
    bucket = np.searchsorted(padded_lengths, length)
    return [
        Bucket(int(size), np.flatnonzero(bucket == index))
        for index, size in enumerate(padded_lengths)
    ]


def padded(
    texts: Texts, chosen: Int[np.ndarray, " b"], length: int, count: int
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Returns the token ids of a batch, and a mask of the real ones.

    Args:
        texts: The texts.
        chosen: Indices of at most ``count`` texts.
        length: ``T``, tokens of a row.
        count: ``B``. Rows without a text hold one token, because the attention of an empty row is
            undefined.
    """
    tokens = np.zeros((count, length), np.int32)
    real = np.zeros((count, length), np.bool_)
    real[:, 0] = True
    for row, index in enumerate(chosen):
        size = texts.length[index]
        tokens[row, :size] = texts.tokens[texts.span(index)]
        real[row, :size] = True
    return tokens, real
