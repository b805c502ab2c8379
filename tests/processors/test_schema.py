"""JSON schemas: random texts of automata against the package jsonschema, and refusals."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
import tiny
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

import eagle3_jax as e3
from eagle3_jax.processors import grammar
from eagle3_jax.processors.schema import schema_to_regex

pytest.importorskip("outlines_core")
jsonschema = pytest.importorskip("jsonschema")
STEPS = 40


def target() -> e3.LoadedTarget:
    """Returns a target whose tokens are all bytes, some longer texts, and a stop token."""
    words = [
        *sorted(ByteLevel.alphabet()),
        '{"', '":', '",', '"}', '\\"', "tr", "ull", "00", "aa", "]]", ",Ġ", "<e>",
    ]  # fmt: skip

    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return dataclasses.replace(
        tiny.target(len(words)), tokenizer=tokenizer, stop_tokens=(len(words) - 1,)
    )


TARGET = target()
assert TARGET.tokenizer is not None
SPELLED = grammar.token_bytes(TARGET.tokenizer)
STOP = TARGET.stop_tokens[0]


@dataclasses.dataclass
class Automaton:
    """A compiled schema's dense table, and each state's least number of tokens to the end."""

    table: np.ndarray
    distance: np.ndarray

    @classmethod
    def of(cls, schema: Any, whitespace: str | None = None) -> Automaton:
        table, columns = grammar.compile_regex(schema_to_regex(schema, whitespace), TARGET)
        distance = np.full(len(table), np.inf)
        distance[-1] = 0
        while True:
            nearer = 1 + np.where(table >= 0, distance[table], np.inf).min(axis=1)
            nearer = np.minimum(distance, nearer)
            if np.array_equal(nearer, distance):
                break
            distance = nearer
        assert np.all(np.isfinite(distance)), "a state from which no text ends"
        return cls(table[:, columns], distance)

    def accepts(self, text: str) -> bool:
        state = 0
        for byte in text.encode():
            token = next(token for token, spelling in SPELLED.items() if spelling == bytes([byte]))
            state = self.table[state, token]
            if state < 0:
                return False
        return bool(self.table[state, STOP] >= 0)

    def walk(self, rng: np.random.Generator) -> str:
        """Returns a random text, which takes the shortest way to the end after some tokens."""
        state = 0
        spelled = b""

        for step in itertools.count():
            after = self.table[state]
            allowed = np.flatnonzero(after >= 0)
            if step >= STEPS:
                allowed = allowed[self.distance[after[allowed]] < self.distance[state]]

            # First the next state, then the token: otherwise a string would hardly ever end.
            chosen = rng.choice(np.unique(after[allowed]))
            token = int(rng.choice(allowed[after[allowed] == chosen]))

            if token == STOP:
                return spelled.decode()
            spelled = spelled + SPELLED[token]
            state = chosen

        raise AssertionError


NAMES = {
    "type": "object",
    "properties": {'q"': {}, "b\\s": {"type": "null"}, "é\n/~ .*": {"const": 1}},
}
OPTIONAL = {
    name: {"type": kind}
    for name, kind in (("a", "null"), ("b", "boolean"), ("c", "integer"), ("d", "number"))
}
TUPLE = {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}]}
TREE = {
    "leaf": {"type": "integer"},
    "node": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
}
# Each: a schema, documents that follow it and are written, and documents that are not.
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    (
        {},
        ["0", "-1.5e+3", '"a"', "null", '{"a":[1, 2], "b": true}', "[ ]"],
        ["", "01", "1.", "'a'", '{"a"}', "[1,]"],
    ),
    ({"anyOf": [True]}, ["false"], ["False"]),
    ({"type": "null", "title": "x", "default": 1}, ["null"], ["none"]),
    ({"type": "boolean"}, ["true", "false"], ["0"]),
    ({"type": "integer"}, ["0", "-12"], ["1.0", "00", "+1"]),
    ({"type": "number"}, ["0", "-12.50", "1e5", "1E-5"], [".5", "1.e5"]),
    ({"type": "string"}, ['""', r'"\"\\\n"', '"é😀"'], ['"', '"a"b"', '"\n"', r'"\q"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', r'"\"é😀"'], ['"a"', '"abcd"']),
    ({"type": "string", "maxLength": 1000}, [json.dumps("a" * 1000)], [json.dumps("a" * 1001)]),
    ({"minLength": 1}, ['"a"'], ['""', "1"]),
    ({"type": "string", "pattern": r"^[a-z]{2}\d+$"}, ['"ab12"'], ['"ab"', '"ab٣"', '"xab12"']),
    (
        {"type": "string", "pattern": r"\w*[$^]\$(?:a|.)[^\D]"},
        ['"a_$$é1"', '"^$a2"'],
        ['"é$$a1"', '"$$\\"1"', "$$a1"],
    ),
    ({"type": "string", "pattern": "a|b"}, ['"a"', '"b"'], ['"a', 'b"', '"ab"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2023-04-31"']),
    (
        {"type": "string", "format": "time"},
        ['"23:59:59Z"', '"00:00:00.25+01:30"'],
        ['"24:00:00Z"', '"00:00:00"'],
    ),
    (
        {"type": "string", "format": "date-time"},
        ['"2000-02-29T12:00:00-08:00"'],
        ['"2000-02-29 12:00:00Z"'],
    ),
    (
        {"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-A456-426614174000"'],
        ['"123e4567"'],
    ),
    (
        {"enum": ["a b", "é", '"\\\n', 1.5, None, True, {"a": [1]}, "\ud800", "\U0010fffe"]},
        ['"a b"', "null"],
        ['"a"'],
    ),
    ({"enum": [1, 1.0, 2.5, True, "a"], "type": "integer"}, ["1", "1.0"], ["2.5", "true"]),
    ({"enum": [1, True, "a", None], "type": ["string", "null"]}, ['"a"', "null"], ["1"]),
    ({"const": "a.", "type": "string", "description": "x"}, ['"a."'], ['"ab"']),
    ({"anyOf": [{"type": "null"}, {"const": 3}]}, ["null", "3"], ["null3"]),
    ({"type": ["integer", "string", "null"], "maxLength": 1}, ["12", '"a"', "null"], ['"ab"']),
    ({"type": ["null"]}, ["null"], []),
    (
        {
            "$ref": "#/$defs/node",
            "$defs": TREE,
            "$schema": "https://json-schema.org/draft/2020-12/schema",
        },
        ["[1]"],
        ["1"],
    ),
    (
        {"$defs": {"a/b ": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/a~1b%20"}, {"const": 0}]},
        ["null", "0"],
        [],
    ),
    ({"type": "array"}, ["[]", '[1, "a",[ [] ]]'], ["[1 2]"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2}, ["[null,null]"], ["[null]"]),
    (
        {"type": "array", "items": {"type": "null"}, "maxItems": 1},
        ["[]", "[null]"],
        ["[null,null]"],
    ),
    (
        {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
        ["[null]"],
        ["[]", "[null,]"],
    ),
    ({"type": "array", "maxItems": 0}, ["[]", "[ ]"], ["[1]"]),
    ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    (TUPLE, ["[]", "[null]", "[null, true]"], ["[true]", "[null,true,1]"]),
    (TUPLE | {"minItems": 2}, ["[null,true]"], ["[null]"]),
    (TUPLE | {"maxItems": 1}, ["[]", "[null]"], ["[null,true]"]),
    (
        TUPLE | {"items": {"const": 7}, "minItems": 1, "maxItems": 4},
        ["[null]", "[null,true,7,7]"],
        ["[]", "[null,7]"],
    ),
    (
        TUPLE | {"items": {"const": 7}, "minItems": 3},
        ["[null,true,7]", "[null,true,7,7]"],
        ["[null,true]"],
    ),
    ({"type": "object"}, ["{}", '{"a": 1,"b":{"c":[]}}'], ['{"a"}', "{,}"]),
    (
        {"type": "object", "properties": {"a": {}}},
        ["{}", '{"a":0}', '{"a":[true]}'],
        ["0", '{"b":0}', '{"a":0'],
    ),
    ({"properties": {"a": True}, "required": ["a"]}, ['{"a":"x"}'], ["{}"]),
    (
        {"type": "object", "additionalProperties": {"type": "null"}},
        ['{"a":null, "b":null}'],
        ['{"a":1}'],
    ),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
    (
        {"type": "object", "properties": OPTIONAL},
        ["{}", '{"b":true,"d":1}', '{"d":1}'],
        ['{"d":1,"b":true}', '{,"d":1}'],
    ),
    (
        {
            "type": "object",
            "properties": OPTIONAL,
            "required": ["c"],
            "additionalProperties": False,
        },
        ['{"c":1}', '{"a":null,"c":1}', '{"b":true,"c":1,"d":1}'],
        ['{"a":null}', "{}", '{"c":1,}', '{"a":null"c":1}'],
    ),
    (
        NAMES,
        [json.dumps({'q"': 1, "b\\s": None, "é\n/~ .*": 1}, ensure_ascii=False)],
        ['{"q"":1}', '{"b\\s":null}'],
    ),
]


@pytest.mark.parametrize(
    ("schema", "written", "others"), SCHEMAS, ids=[json.dumps(row[0])[:60] for row in SCHEMAS]
)
def test_texts_follow_the_schema(schema: Any, written: list[str], others: list[str]) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    automaton = Automaton.of(schema)
    rng = np.random.default_rng(0)
    texts = {automaton.walk(rng) for _ in range(30)}
    for text in [*texts, *written]:
        validator.validate(json.loads(text))
    assert [text for text in written if not automaton.accepts(text)] == []
    assert [text for text in others if automaton.accepts(text)] == []


def test_the_format_date_writes_the_days_of_the_calendar() -> None:
    pattern = re.compile(schema_to_regex({"type": "string", "format": "date"}))
    for year, month, day in itertools.product(
        (1000, 1900, 1999, 2000, 2004, 2100, 2110, 9996), range(14), range(33)
    ):
        try:
            text = datetime.date(year, month, day).isoformat()
        except ValueError:
            assert not pattern.fullmatch(f'"{year}-{month:02}-{day:02}"')
        else:
            assert pattern.fullmatch(f'"{text}"')


def test_white_space_is_that_of_json() -> None:
    automaton = Automaton.of({"type": "array", "items": {"const": 1}}, r"\s|\n{2}")
    assert automaton.accepts("[\t1\r,\n\n1 ]")
    assert not automaton.accepts("[1]")
    assert not any(automaton.accepts(f"[{space}1 ]") for space in ("\x0b", "\xa0", "\n\n\n"))

    for whitespace, message in (
        ("x?", "matches 'x'"),
        (".*", "matches"),
        (" ) | ( ", "not opened"),
        (" $|\t", "is inside"),
    ):
        with pytest.raises(ValueError, match=f"^the JSON schema is not supported: .*{message}"):
            schema_to_regex({}, whitespace)


def inside(part: Any) -> Any:
    return {"type": "object", "properties": {"a/b": {"type": "array", "items": part}}}


# Each: a part of a schema, and what the message says of it.
PARTS: list[tuple[Any, str]] = [
    ({"anyOf": [False]}, "is False; expected an object or true"),
    ([], "expected an object or true"),
    ({"type": "nope"}, "has the type 'nope'; expected one or more of null, boolean"),
    ({"type": []}, "has the type .*; expected one or more of"),
    ({"type": [["null"]]}, "has the type .*; expected one or more of"),
    ({"maximum": 3}, "'maximum' is not supported; leave it out"),
    ({"type": "integer", "maximum": 3}, "'maximum' is not supported together with 'type' integer"),
    ({"type": "number", "multipleOf": 3}, "'multipleOf' is not supported"),
    ({"type": "null", "minLength": 3}, "'minLength' is not supported together with 'type' null"),
    (
        {"type": "string", "minLength": 3, "pattern": "a"},
        "'pattern' is not supported .* 'type' string and 'minLength'",
    ),
    ({"pattern": "a", "maxLength": 3}, "'maxLength' is not supported together with 'pattern'"),
    ({"format": "date", "maxLength": 3}, "'maxLength' is not supported together with 'format'"),
    ({"format": "date", "pattern": "a"}, "'pattern' is not supported together with 'format'"),
    ({"enum": ["a"], "minLength": 3}, "'minLength' is not supported together with 'enum'"),
    ({"enum": ["a"], "const": "a"}, "'const' is not supported together with 'enum'"),
    (
        {"type": ["string", "null"], "enum": ["a"], "maxLength": 1},
        "'maxLength' is .* 'type' string, null and 'enum'",
    ),
    (
        {"anyOf": [{}], "type": "object"},
        "'anyOf' is not supported together with 'type' object; leave it",
    ),
    ({"anyOf": [{}], "properties": {}}, "'properties' is not supported together with 'anyOf'"),
    ({"oneOf": [{}]}, "'oneOf' is not supported; write anyOf"),
    ({"allOf": [{}]}, "'allOf' is not supported"),
    ({"not": {}}, "'not' is not supported"),
    ({"$ref": "#", "type": "object"}, "'.ref' is not supported together with 'type' object"),
    ({"$id": "x", "type": "null"}, "'.id' is not supported"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
    ({"type": "object", "patternProperties": {}}, "'patternProperties' is not supported"),
    (
        {"type": ["array", "null"], "minimum": 1},
        "'minimum' is not supported together with 'type' array",
    ),
    ({"enum": []}, "allows no value"),
    ({"enum": [1, True], "type": "string"}, "allows no value"),
    ({"enum": "ab"}, "has the enum 'ab'; expected a list"),
    ({"anyOf": []}, "has an empty anyOf; give a schema"),
    ({"anyOf": {}}, "has the anyOf .*; expected a list of schemas"),
    ({"$ref": "#/$defs/x"}, "has the .ref '#/.defs/x', and there is no such place"),
    ({"$ref": "#/properties/a~1b/-1"}, "there is no such place"),
    ({"$ref": "other.json"}, "has the .ref 'other.json'; expected '#/'"),
    ({"$ref": "#x"}, "has the .ref '#x'; expected '#/'"),
    ({"$ref": "#"}, "'#' contains itself"),
    ({"type": "object", "required": ["x"]}, "the property 'x' is required and not described"),
    (
        {"type": "object", "properties": {}, "required": "x"},
        "has the required 'x'; expected a list",
    ),
    ({"type": "object", "properties": []}, "has the properties .*; expected an object"),
    (
        {"properties": {"x": {}}, "additionalProperties": {"type": "null"}},
        "'additionalProperties' is a schema",
    ),
    ({"type": "array", "items": [{}]}, "expected an object or true"),
    ({"type": "array", "prefixItems": {}}, "has the prefixItems .*; expected a list"),
    (
        {"prefixItems": [{}], "minItems": 2},
        "has 1 items at most and minItems 2; no list follows it",
    ),
    (
        {"type": "array", "minItems": 2, "maxItems": 1},
        "has minItems 2 and maxItems 1; no value follows it",
    ),
    (
        {"type": "string", "minLength": True},
        "has minLength True; expected a whole number from 0 to 10000",
    ),
    ({"type": "string", "minLength": -1}, "has minLength -1"),
    ({"type": "string", "maxLength": 10**30}, "has maxLength 10*; expected a whole number"),
    ({"type": "string", "maxLength": "3"}, "has maxLength '3'"),
    (
        {"type": "string", "format": "email"},
        "has the format 'email'; expected one of date, time, date-time, uuid",
    ),
    ({"type": "string", "format": ["date"]}, "has the format .*; expected one of"),
    ({"type": "string", "pattern": 3}, "has the pattern 3; expected a text"),
    (
        {"type": "string", "pattern": "[^a]"},
        r"the pattern '\[.a\]' matches '.*', which JSON writes with a backslash",
    ),
    ({"type": "string", "pattern": 'a"'}, "matches '\"', which JSON"),
    ({"type": "string", "pattern": r"\\"}, r"matches '\\\\', which JSON"),
    ({"type": "string", "pattern": r"\x22"}, "matches '\"', which JSON"),
    ({"type": "string", "pattern": "a\nb"}, "matches '.n', which JSON"),
    ({"type": "string", "pattern": r"\s"}, "which JSON writes with a backslash"),
    ({"type": "string", "pattern": "a$|b"}, ". is inside"),
    ({"type": "string", "pattern": r"\bab"}, "b is inside"),
    ({"type": "string", "pattern": "^^a"}, ". is inside"),
    ({"type": "string", "pattern": "a)|(b"}, "closed that is not opened"),
    ({"type": "string", "pattern": "(a"}, "is not supported by outlines-core"),
    ({"type": "string", "pattern": "(?i)a"}, r"'\(.i\)' in the pattern '.*' is not supported"),
    ({"type": "string", "pattern": "(?=a)a"}, "in the pattern '.*' is not supported"),
    ({"type": "string", "pattern": "[a&&b]"}, "'&&' in the pattern '.*' is not supported"),
    ({"type": "string", "pattern": "[a[b]]"}, "in the pattern '.*' is not supported"),
    ({"type": "string", "pattern": "[]a]"}, "in the pattern '.*' is not supported"),
    ({"type": "string", "pattern": "a{,3}"}, "'{,' in the pattern '.*' is not supported"),
    ({"type": "string", "pattern": "a++a"}, r"'\+\+' in the pattern '.*' is not supported"),
]


@pytest.mark.parametrize(("part", "message"), PARTS, ids=[json.dumps(row[0])[:60] for row in PARTS])
def test_another_form_is_refused_in_one_line_that_names_the_place(part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        schema_to_regex(inside(part))
    assert str(caught.value).startswith("the JSON schema is not supported: ")
    assert "\n" not in str(caught.value)
    assert "'#/properties/a~1b/items" in str(caught.value) or "'#'" in str(caught.value)


DEEP: Any = {}
for _ in range(5000):
    DEEP = {"items": DEEP}
WIDE: Any = {"type": "string"}
for _ in range(30):
    WIDE = {"type": "array", "items": WIDE}
# Texts and objects that are not a schema.
WHOLE: list[tuple[Any, str]] = [
    ("{", "Expecting property name"),
    ('{"type": "null", "type": "string"}', "'type' occurs twice"),
    ('{"const": NaN}', "NaN is not a number of JSON"),
    ('{"const": 1e999}', "Out of range float values"),
    ({"const": float("inf")}, "Out of range float values"),
    ({"const": {1}}, "not JSON serializable"),
    ([], "'#' is .*; expected an object or true"),
    ("3", "'#' is 3; expected an object or true"),
    (DEEP, "is nested too deeply"),
    (WIDE, "needs a regular expression of .* characters, more than 1000000"),
    ('{"const": ' + "1" * 5000 + "}", "a number has 5000 digits"),
]


@pytest.mark.parametrize(("schema", "message"), WHOLE, ids=[str(at) for at in range(len(WHOLE))])
def test_what_is_no_schema_is_refused_in_one_line(schema: Any, message: str) -> None:
    with tiny.unchecked(), pytest.raises(ValueError, match=message) as caught:
        schema_to_regex(schema)
    assert str(caught.value).startswith("the JSON schema is not supported: ")
    assert "\n" not in str(caught.value)
