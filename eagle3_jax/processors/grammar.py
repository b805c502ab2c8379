"""Compiles regular expressions to automata over the tokens of a target, with outlines-core.

The library runs once, on the host. Inside the compiled program the automaton is a table.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from eagle3_jax.loaded import LoadedTarget

# No token spells these two characters. Each compiled expression is put between them, because of two
# bugs of outlines-core 0.2.14. It forbids some tokens after a text that matches and can continue:
# "a" after "ab" in (ab)+. It also compiles a search for matches that begin anywhere, which has 2^n
# states for a JSON string of up to n characters.
_FIRST = "\U0010fffe"
_LAST = "\U0010ffff"
# No other character has the first byte of these.
_PRIVATE = r"[\x{100000}-\x{10FFFF}]"
_PRIVATE_BYTE = _LAST.encode()[0]
# A table of 1 GiB.
MOST_ENTRIES = 2**28
_ANCHORS = ("^", "$", r"\A", r"\z", r"\b", r"\B", r"\<", r"\>")
_ESCAPE = r"\\[pP](?:\{[^}]*\}|.)|\\."
# Pieces outside and inside a class: an escape, the beginning of a class with a literal "]", that of
# a group, a repetition of a repetition, an operator of classes, or a character.
_OUTSIDE = re.compile(
    rf"{_ESCAPE}|\[\^?\]?|\(\?(?:P?<[^>]*>|[^):]*.)|\{{,|[*+?}}][*+{{]|.", re.DOTALL
)
_INSIDE = re.compile(rf"{_ESCAPE}|\[\^?\]?|&&|--|~~|.", re.DOTALL)


class Piece(NamedTuple):
    """A part of a regular expression that has a meaning of its own."""

    text: str
    #: The number of character classes that contain it. The brackets of a class are inside it.
    depth: int


class Row(NamedTuple):
    """A state of an automaton over tokens."""

    tokens: Int[np.ndarray, " n"]  #: The allowed tokens.
    after: Int[np.ndarray, " n"]  #: The number of the state after each of them.
    is_match: bool  #: Whether the text so far matches.


def pieces_of(pattern: str) -> list[Piece]:
    """Returns the pieces of a regular expression without the anchors around it."""
    pieces: list[Piece] = []
    index = 0
    depth = 0
    while match := (_INSIDE if depth else _OUTSIDE).match(pattern, index):
        piece = match[0]
        index = match.end()
        depth += piece[0] == "["
        pieces.append(Piece(piece, depth))
        depth -= piece == "]" and depth > 0

    if pieces[:1] == [("^", 0)]:
        pieces = pieces[1:]
    return pieces[:-1] if pieces[-1:] == [("$", 0)] else pieces


def bytes_of(pattern: str) -> set[int]:
    """Returns the bytes of all texts that match a regular expression.

    Private characters do not count.

    Raises:
        ValueError: The expression is not supported.
    """
    one_token_per_byte = {bytes([byte]): [byte] for byte in range(_PRIVATE_BYTE)}
    rows = _explore(pattern, one_token_per_byte, 256)
    return {int(byte) for row in rows for byte in row.tokens}


def compile_regex(
    pattern: str, target: LoadedTarget
) -> tuple[Int[np.ndarray, "S C"], Int[np.ndarray, " V"]]:
    """Returns the table and the columns of a :class:`~eagle3_jax.processors.logits.TokenAutomaton`.

    State 0 is the first and the last state follows a stop token.

    Args:
        pattern: A regular expression that the whole output matches.
        target: The target, for its tokenizer, vocabulary and stop tokens.

    Raises:
        ValueError: See :meth:`~eagle3_jax.processors.logits.TokenAutomaton.from_regex`.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer; a regular expression needs one")
    if not target.stop_tokens:
        raise ValueError(
            f"{target.name} has no stop token, so no output could end; set stop_tokens of the"
            " target"
        )

    spelled: dict[bytes, list[int]] = {}
    for token, spelling in token_bytes(target.tokenizer).items():
        writes = token not in target.stop_tokens and token < target.vocab_size
        if writes and spelling and _PRIVATE_BYTE not in spelling:
            spelled.setdefault(spelling, []).append(token)
    rows = _explore(pattern, spelled, target.vocab_size)
    return merge_columns(lambda: _dense(rows, target))


def _dense(rows: list[Row], target: LoadedTarget) -> Iterator[np.ndarray]:
    """Yields the rows ``[V]`` of a table.

    The last row is that of the state after a stop token, which allows nothing.
    """
    for state in rows:
        row = np.full(target.vocab_size, -1, np.int32)
        row[state.tokens] = state.after
        row[list(target.stop_tokens)] = len(rows) if state.is_match else -1
        yield row
    yield np.full(target.vocab_size, -1, np.int32)


def _explore(pattern: str, spelled: Mapping[bytes, list[int]], vocab_size: int) -> list[Row]:
    """Returns the states of the automaton of a regular expression. The first state is number 0.

    Args:
        pattern: The expression.
        spelled: The tokens that have each spelling; none spells a private character.
        vocab_size: The number of tokens.

    Raises:
        ValueError: The expression is not supported.
    """
    first = vocab_size
    last = vocab_size + 1
    outlines = _outlines()
    try:
        enclosing = {_FIRST.encode(): [first], _LAST.encode(): [last]}
        enclosed = _enclose(pattern)
        vocabulary = outlines.Vocabulary(last + 1, {**spelled, **enclosing})
        index = outlines.Index(enclosed, vocabulary)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the regular expression {pattern!r:.60} is not supported by outlines-core:"
            f" {first_line(error)}"
        ) from None

    # The first state is that after _FIRST, if the expression has it.
    initial = index.get_initial_state()
    states = [index.get_next_state(initial, first) if enclosed.startswith(_FIRST) else initial]
    number = {states[0]: 0}
    rows = []
    # The list of states grows within the loop.
    for state in states:
        allowed = [token for token in index.get_allowed_tokens(state) if token < first]
        after = [index.get_next_state(state, token) for token in allowed]
        for new in dict.fromkeys(after):
            if number.setdefault(new, len(states)) == len(states):
                states.append(new)

        end = index.get_next_state(state, last)
        is_match = end is not None and index.is_final_state(end)
        numbers = np.array([number[new] for new in after], np.int32)
        rows.append(Row(np.array(allowed, np.int32), numbers, is_match))
    return rows


def _enclose(pattern: str) -> str:
    """Returns a regular expression between two characters that it does not match.

    Anchors around it are removed.

    Raises:
        ValueError: An anchor is inside the expression, it ignores white space, or a parenthesis is
            not opened.
    """
    pieces = pieces_of(pattern)
    body = "".join(_exclude_private(piece, depth) for piece, depth in pieces)
    outside = [piece for piece, depth in pieces if not depth]
    flags = "".join(piece[2:-1] for piece in outside if piece[:2] == "(?" and piece[-1] in ":)")
    steps = [(piece[0] == "(" and piece[-1] != ")") - (piece == ")") for piece in outside]
    if min(itertools.accumulate(steps), default=0) < 0:
        raise ValueError("a parenthesis is closed that is not opened")
    if "x" in flags:
        raise ValueError(
            "the flag x is not supported; write the expression without spaces and comments"
        )

    # The flags s, R and u change what a dot or a class matches.
    if flags.strip("i"):
        return f"(?:{''.join(piece for piece, _ in pieces)}){_LAST}"
    return f"{_FIRST}(?:{body}){_LAST}"


def _exclude_private(piece: str, depth: int) -> str:
    """Returns a piece of a regular expression without private characters.

    Raises:
        ValueError: The piece is an anchor.
    """
    if depth == 1 and piece[0] == "[":
        return f"[{piece}"
    if depth == 1 and piece == "]":
        return f"]--{_PRIVATE}]"
    if depth:
        return piece
    if piece in _ANCHORS:
        raise ValueError(
            f"{piece} is inside; anchors may only be around the expression, and are not needed"
            " there"
        )
    if piece in (r"\S", r"\W", r"\D") or piece[:2] in (r"\p", r"\P"):
        return f"[{piece}--{_PRIVATE}]"
    return rf"[^\n--{_PRIVATE}]" if piece == "." else piece


def merge_columns(rows: Callable[[], Iterable[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different columns of a table ``[S V]`` as ``[S C]``.

    With them it returns the number of each token's column, ``[V]``.

    Args:
        rows: Returns the rows ``[V]`` of the table. It is called several times, so that a large
            table need not exist.

    Raises:
        ValueError: The merged table has more than ``MOST_ENTRIES``.
    """
    # A column is known by a 64-bit digest of its entries, so that no column is stored.
    states = 0
    digests = np.zeros((), np.uint64)
    for row in rows():
        states = states + 1
        digests = (digests ^ row.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        digests ^= digests >> np.uint64(32)
    _, first, columns = np.unique(digests, return_index=True, return_inverse=True)
    if states * len(first) > MOST_ENTRIES:
        raise ValueError(
            f"the automaton has {states} states and {len(first)} different columns, more than"
            f" {MOST_ENTRIES} entries; limit the lengths of its parts, or simplify it"
        )

    # Two columns of one digest would be different here.
    table = np.stack([row[first] for row in rows()])
    assert all(
        np.array_equal(short[columns], row) for short, row in zip(table, rows(), strict=True)
    )
    return table, columns.astype(np.int32)


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Returns the bytes of each token's text by token id, without special tokens.

    Raises:
        ValueError: The tokenizer is neither a byte-level BPE nor one of SentencePiece.
    """
    decoder = str(tokenizer.decoder)
    if "ByteLevel" in decoder:
        spell = _spell_bytes
    elif "▁" in decoder:
        spell = _spell_sentencepiece
    else:
        raise ValueError(
            "the tokenizer is neither a byte-level BPE nor one of SentencePiece; build the table"
            " yourself"
        )

    added = tokenizer.get_added_tokens_decoder()
    spelled = {
        token: spell(text)
        for text, token in tokenizer.get_vocab(False).items()
        if token not in added
    }
    spelled |= {
        token: entry.content.encode() for token, entry in added.items() if not entry.special
    }
    return spelled


def _spell_bytes(text: str) -> bytes:
    """Returns the bytes that a token of a byte-level BPE spells, a character each."""
    alphabet = _byte_level_alphabet()
    return bytes(alphabet[character] for character in text)


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte that each character of a byte-level BPE spells."""
    # The characters of printable bytes are the bytes themselves and come first.
    characters = sorted(ByteLevel.alphabet())
    printable = [ord(character) for character in characters if ord(character) < 256]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(characters, printable + others, strict=True))


def _spell_sentencepiece(text: str) -> bytes:
    """Returns the bytes that a token of SentencePiece spells: text, or a byte as in ``<0x0A>``."""
    if len(text) == 6 and text.startswith("<0x"):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()


def _outlines() -> Any:
    """Returns the library outlines-core.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import outlines_core
    except ImportError:
        raise ValueError(
            "regular expressions and JSON schemas need outlines-core: pip install"
            " 'eagle3-jax[grammar]'"
        ) from None
    return outlines_core


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return str(error).strip().partition("\n")[0].replace(_FIRST, "").replace(_LAST, "")
