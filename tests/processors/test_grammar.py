"""Automata of regular expressions against Python's `re`, and outputs that follow them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import sys
from typing import Any

import numpy as np
import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models

import eagle3_jax as e3
from eagle3_jax.processors import grammar
from eagle3_jax.processors.schema import schema_to_regex

pytest.importorskip("outlines_core")
jsonschema = pytest.importorskip("jsonschema")
PROMPTS = ["def add(a, b):\n", "class Queue:\n", "import "]
SAMPLED = e3.SamplingParams(temperature=1.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["function", "class"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        "parent": {"anyOf": [{"type": "null"}, {"const": "root"}]},
    },
    "required": ["name", "kind", "sizes", "parent"],
}


def small(*, stop_tokens: tuple[int, ...] = (3, 6)) -> e3.LoadedTarget:
    """Returns a target of eight tokens.

    They are a, b, ab, a stop token, the two bytes of é, another stop token, and one without text.
    """
    words = ["a", "b", "ab", "<e>", "Ã", "©", "<f>"]  # as a byte-level tokenizer spells bytes
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<e>", special=True), AddedToken("<f>", special=True)])
    return dataclasses.replace(tiny.target(8), tokenizer=tokenizer, stop_tokens=stop_tokens)


# Dollar signs in classes and after a backslash are characters.
TEXTS = [
    "(ab)+", "a*b?", "é(a|b){0,2}", "", "^a?é?|b{3}$", ".*", r"a\$?|[^a]{2}", "a[$b^]+", "[]$a]b", "[^$^]a", "(?s).a",
    r"\S\w", r"\Da|b\S?", "(?i)A[^B]", r"(?P<x>a)(?:b){1,2}", r"(?s:a.)b|.a$", r"^\\?a$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", TEXTS)
def test_an_automaton_allows_the_texts_that_match(pattern: str) -> None:
    """Of all sequences of up to four tokens, exactly those that match may end."""
    target = small()
    automaton = e3.TokenAutomaton.from_regex(pattern, target)
    table, columns = (np.asarray(array) for array in automaton.arrays(8))
    spelled = {0: b"a", 1: b"b", 2: b"ab", 4: b"\xc3", 5: b"\xa9"}

    allowed = set()
    expected = set()
    for length in range(5):
        for tokens in itertools.product(spelled, repeat=length):
            state = 0
            for token in tokens:
                state = -1 if state < 0 else table[state, columns[token]]

            if state >= 0 and table[state, columns[3]] >= 0:
                assert table[state, columns[3]] == table[state, columns[6]] == len(table) - 1
                allowed.add(tokens)

            with contextlib.suppress(UnicodeDecodeError):  # no text
                if re.fullmatch(pattern, b"".join(spelled[token] for token in tokens).decode()):
                    expected.add(tokens)

    assert allowed == expected
    assert allowed
    assert np.all(table[:, columns[7]] == -1)  # the tokenizer has no such token
    assert table.shape[1] == len({tuple(table[:, column]) for column in columns})


DRAFTERS = {
    "n-grams": lambda target: e3.drafters.NGram(4),
    "the shipped head, a tree": lambda target: e3.load_drafter(target=target),
}


@pytest.mark.parametrize("sampling", [e3.SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_outputs_match_a_regular_expression(
    shipped: e3.LoadedTarget, drafter: str, sampling: Any
) -> None:
    pattern = r"    return [a-z]{1,8}( [+*] [a-z0-9]{1,8}){0,3}\n"
    changed = e3.with_processors(shipped, e3.TokenAutomaton.from_regex(pattern, shipped))
    tree = e3.DynamicTree(num_nodes=12, max_depth=4, top_k=4) if "tree" in drafter else None
    head = DRAFTERS[drafter](shipped)

    result = e3.SpeculativeDecoder(changed, head, tree=tree).generate(
        PROMPTS, max_new_tokens=48, sampling=sampling
    )

    for row in result.rows:
        assert row.finish_reason is e3.FinishReason.STOP, row.text
        assert re.fullmatch(pattern, row.text or ""), row.text

    assert result.stats.num_accepted_tokens > 0
    if sampling is not SAMPLED:
        plain = e3.SpeculativeDecoder(changed).generate(PROMPTS, max_new_tokens=48)
        assert result.tokens == plain.tokens


def test_outputs_follow_a_json_schema(shipped: e3.LoadedTarget) -> None:
    changed = e3.with_processors(shipped, e3.TokenAutomaton.from_json_schema(SCHEMA, shipped))
    result = e3.SpeculativeDecoder(changed, e3.drafters.NGram(4)).generate(
        PROMPTS * 4, max_new_tokens=100, sampling=SAMPLED, seed=range(12)
    )

    values = [
        json.loads(row.text or "")
        for row in result.rows
        if row.finish_reason is e3.FinishReason.STOP
    ]

    assert len(values) > 6
    for value in values:
        jsonschema.validate(value, SCHEMA)
        assert list(value) == list(SCHEMA["properties"])

    text = schema_to_regex(json.dumps(SCHEMA), r"\s*")
    assert re.fullmatch(text, '{"name":"x",\n"kind":\t"class", "sizes":[true],"parent":null}')


def test_the_bytes_of_tokens_are_those_of_the_decoder(shipped: e3.LoadedTarget) -> None:
    text = 'def f(x):\n\treturn "é√😀"  # \x7f\r\n'
    assert shipped.tokenizer is not None
    spelled = grammar.token_bytes(shipped.tokenizer)
    assert b"".join(spelled[token] for token in shipped.tokenizer.encode(text).ids) == text.encode()
    assert set(spelled) == set(range(1, 4096))  # token 0 ends a text

    words = ["<unk>", "▁", "▁a", "b", "<0xC3>", "<0xA9>"]
    llama = Tokenizer(
        models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True)
    )
    llama.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    llama.add_special_tokens([AddedToken("<unk>", special=True)])
    llama.add_tokens(["<tool>"])
    spelled = grammar.token_bytes(llama)
    assert spelled == {1: b" ", 2: b" a", 3: b"b", 4: b"\xc3", 5: b"\xa9", 6: b"<tool>"}
    tokens = [3, 2, 4, 5, 1, 3]
    assert b"".join(spelled[token] for token in tokens).decode() == llama.decode(tokens)
    with pytest.raises(ValueError, match="neither a byte-level BPE nor one of SentencePiece"):
        grammar.token_bytes(Tokenizer(models.WordPiece({"a": 0}, unk_token="a")))


def test_equal_columns_are_merged() -> None:
    random = np.random.default_rng(0)
    few = random.integers(-1, 6, (6, 4)).astype(np.int32)
    dense = few[:, random.integers(0, 4, 50)]
    table, columns = grammar.merge_columns(lambda: dense)
    assert np.array_equal(table[:, columns], dense)
    assert table.shape[1] == len(np.unique(dense, axis=1).T)
    ours = e3.TokenAutomaton(table, start=2, columns=columns).arrays(50)
    theirs = e3.TokenAutomaton(dense, start=2).arrays(50)
    assert tiny.same_bits(ours, theirs)


PATTERNS = (
    ("(", "'.' is not supported by outlines-core"),
    ("a(?=b)", "'a.*' is not supported by outlines-core: .*NFA"),
    ("az", "vocabulary provided is incompatible with .*az.*missing tokens"),
    (3, "is not supported by outlines-core"),
    ("a)|(b", "a parenthesis is closed that is not opened"),
    ("(?x)a b", "the flag x is not supported"),
    ("(?sx:a b)", "the flag x is not supported"),
)
INNER = (
    "(a+(b+|$))",
    "a|^b",
    "a(^b)?",
    r"\ba",
    r"a\Bb",
    r"\Aa",
    r"a\z",
    r"a\<b",
    r"[^]$]|$a",
    r"\\$a",
    "^^a",
    "a$$",
    "(?i)^a",
)


@pytest.mark.parametrize(
    ("pattern", "message"), [*PATTERNS, *((pattern, "anchors may only be") for pattern in INNER)]
)
def test_a_bad_pattern_is_refused_in_one_line(pattern: Any, message: str) -> None:
    with tiny.unchecked(), pytest.raises(ValueError, match=message) as caught:
        e3.TokenAutomaton.from_regex(pattern, small())
    assert "\n" not in str(caught.value)


NO_GRAMMAR = (
    (
        lambda: e3.with_processors(tiny.target(13), e3.TokenAutomaton.from_regex("a", small())),
        "of 8 tokens .* one of 13",
    ),
    (
        lambda: e3.TokenAutomaton(np.zeros((1, 1), np.int32), columns=np.array([0, 1])).arrays(2),
        "not all from 0 to 0",
    ),
    (lambda: e3.TokenAutomaton.from_regex("a", small(stop_tokens=())), "has no stop token"),
    (lambda: e3.TokenAutomaton.from_regex("a", tiny.target(8)), "has no tokenizer"),
)


@pytest.mark.parametrize(
    ("make", "message"), NO_GRAMMAR, ids=[message for _, message in NO_GRAMMAR]
)
def test_a_target_that_has_no_grammar_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_limits_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MOST_ENTRIES", 8)
    with pytest.raises(
        ValueError, match="has 3 states and 3 different columns, more than 8 entries"
    ):
        e3.TokenAutomaton.from_regex("a", small())
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(ValueError, match=r"pip install 'eagle3-jax\[grammar\]'"):
        e3.TokenAutomaton.from_regex("a", small())
