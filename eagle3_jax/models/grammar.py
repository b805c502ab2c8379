"""Compiles regular expressions and JSON schemas to automata over the tokens of a target, with outlines-core.

The library runs once, on the host. Inside the compiled program the automaton is a table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from eagle3_jax.loaded import LoadedTarget

LAST = "\U0010ffff".encode()  # its first byte begins private characters only
MOST_ENTRIES = 2**28  # of a table, 1 GiB
# Keywords of JSON schemas that outlines-core 0.2.14 reads past, or, allOf, translates wrongly.
IGNORED = {
    "allOf", "not", "if", "then", "else", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "uniqueItems", "contains", "minContains", "maxContains", "minProperties", "maxProperties", "patternProperties",
    "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip


def schema_to_regex(schema: str | Mapping[str, Any], whitespace: str | None = None) -> str:
    """Returns the regular expression of JSON texts that follow a schema.

    Args:
        schema: The schema, as JSON text or as a mapping.
        whitespace: A regular expression for the space between two JSON tokens. Default: ``[ ]?``.

    Raises:
        ValueError: The schema is no JSON, or has a keyword that outlines-core refuses or would ignore.
    """
    library = _outlines()
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _refuse_ignored(json.loads(text))
        return library.json_schema.build_regex_from_schema(text, whitespace)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema is not supported: {_first_line(error)}") from None


def _refuse_ignored(schema: Any) -> None:
    """Raises ``ValueError`` if a part of the schema has a keyword that would be ignored."""
    if isinstance(schema, list):
        for one in schema:
            _refuse_ignored(one)
    if not isinstance(schema, dict):
        return
    known = schema.get("properties", {})
    if names := [name for name in schema if name in IGNORED]:
        raise ValueError(f"{names[0]!r} would be ignored; leave it out and check the output for it")
    if names := [name for name in schema.get("required", ()) if name not in known]:
        raise ValueError(f"the property {names[0]!r} is required and not described")
    for name, part in schema.items():
        if name not in ("const", "enum", "default", "examples", "required"):
            _refuse_ignored(list(part.values()) if name in ("properties", "$defs", "definitions") else part)


def compile_regex(pattern: str, target: LoadedTarget) -> tuple[Int[np.ndarray, "S C"], Int[np.ndarray, " V"]]:
    """Returns the table and the columns of a :class:`~eagle3_jax.models.processors.TokenAutomaton`.

    State 0 is the first and the last state follows a stop token.

    Args:
        pattern: A regular expression that the whole output matches.
        target: The target, for its tokenizer, vocabulary and stop tokens.

    Raises:
        ValueError: See :meth:`~eagle3_jax.models.processors.TokenAutomaton.from_regex`.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer; a regular expression needs one")
    if not target.stop_tokens:
        raise ValueError(f"{target.name} has no stop token, so no output could end; set stop_tokens of the target")
    # outlines-core 0.2.14 forbids some tokens after a text that matches and can go on: "a" after "ab" in (ab)+. With a
    # last character that no token spells, no such text exists.
    library, spelled, last = _outlines(), dict[bytes, list[int]](), target.vocab_size
    for token, spelling in token_bytes(target.tokenizer).items():
        if spelling and LAST[0] not in spelling and token not in target.stop_tokens and token < last:
            spelled.setdefault(spelling, []).append(token)
    try:
        body = re.sub(r"(?<!\\)((?:\\\\)*)\$\Z", r"\1", pattern.removeprefix("^"))
        vocabulary = library.Vocabulary(last + 1, spelled | {LAST: [last]})
        index = library.Index(f"(?:{body}){LAST.decode()}", vocabulary)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the regular expression {pattern!r:.60} is not supported by outlines-core: {_first_line(error)}"
        ) from None
    number = {index.get_initial_state(): 0}
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    states = list(number)
    for state in states:  # grows
        allowed = [token for token in index.get_allowed_tokens(state) if token < last]
        after = [index.get_next_state(state, token) for token in allowed]
        for new in dict.fromkeys(after):
            if new not in number:
                number[new] = len(states)
                states.append(new)
        rows.append((np.array(allowed, np.int32), np.array([number[new] for new in after], np.int32)))
    end, stop = len(states), np.array(target.stop_tokens, np.int32)
    rows.append((stop[:0], stop[:0]))
    for at, (tokens, after) in enumerate(rows):
        ended = None if at == end else index.get_next_state(states[at], last)
        if at == end or (ended is not None and index.is_final_state(ended)):
            rows[at] = np.append(tokens, stop), np.append(after, np.full_like(stop, end))

    def dense() -> Iterator[np.ndarray]:
        for tokens, after in rows:
            row = np.full(target.vocab_size, -1, np.int32)
            row[tokens] = after
            yield row

    return merge_columns(dense)


def merge_columns(rows: Callable[[], Iterable[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different columns of a table ``[S V]`` as ``[S C]``, and the number of each token's column, ``[V]``.

    Args:
        rows: Returns the rows ``[V]`` of the table. It is called several times, so that a large table need not exist.

    Raises:
        ValueError: The merged table has more than ``MOST_ENTRIES``.
    """
    states, digests = 0, np.zeros((), np.uint64)
    for row in rows():
        states, digests = states + 1, (digests ^ row.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        digests ^= digests >> np.uint64(32)
    _, first, columns = np.unique(digests, return_index=True, return_inverse=True)
    if states * len(first) > MOST_ENTRIES:
        raise ValueError(
            f"the automaton has {states} states and {len(first)} different columns, more than {MOST_ENTRIES} entries; "
            "limit the lengths of its parts, or simplify it"
        )
    table = np.stack([row[first] for row in rows()])
    assert all(np.array_equal(short[columns], row) for short, row in zip(table, rows(), strict=True))
    return table, columns.astype(np.int32)


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Returns the bytes of each token's text by token id. Special tokens have none and are left out.

    Raises:
        ValueError: The tokenizer is neither a byte-level BPE nor one of SentencePiece.
    """
    decoder = str(tokenizer.decoder)
    if "ByteLevel" in decoder:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        alphabet = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
        assert set(alphabet) == set(ByteLevel.alphabet())
        spell = lambda token: bytes(alphabet[one] for one in token)
    elif "▁" in decoder:
        spell = lambda token: (
            bytes([int(token[3:5], 16)])
            if len(token) == 6 and token.startswith("<0x")
            else token.replace("▁", " ").encode()
        )
    else:
        raise ValueError("the tokenizer is neither a byte-level BPE nor one of SentencePiece; build the table yourself")
    added = tokenizer.get_added_tokens_decoder()
    found = {token: spell(text) for text, token in tokenizer.get_vocab(False).items() if token not in added}
    return found | {token: one.content.encode() for token, one in added.items() if not one.special}


def _outlines() -> Any:
    """The library outlines-core."""
    try:
        import outlines_core
    except ImportError:
        raise ValueError(
            "regular expressions and JSON schemas need outlines-core: pip install 'eagle3-jax[grammar]'"
        ) from None
    return outlines_core


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].replace(LAST.decode(), "")
