r"""Translates JSON schemas to regular expressions of the JSON texts that follow them.

A schema is read as draft 2020-12. The expression may match fewer texts than the schema allows,
never others. A part of a schema has one of the forms of ``_FORMS``. Every other combination of
keywords is refused.

outlines-core has a translation too, ``build_regex_from_schema``. It is not used, because release
0.2.14 writes texts that do not follow the schema: it ignores keywords that it does not know, lets
the alternatives of a ``pattern`` and of ``{}`` run into what is around them, does not escape names
of properties, changes the last digit of many numbers, and writes dates such as February 31.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from eagle3_jax.files.jsonl import parse_json, shown
from eagle3_jax.processors.grammar import bytes_of, first_line, pieces_of

# The keywords that may occur together, by form. The names of most forms are types.
_FORMS = {
    "null": ("type",),
    "boolean": ("type",),
    "integer": ("type",),
    "number": ("type",),
    "string": ("type minLength maxLength", "type pattern", "type format"),
    "array": ("type items prefixItems minItems maxItems",),
    "object": ("type properties required additionalProperties",),
    "values": ("type enum", "type const"),
    "alternatives": ("anyOf",),
    "reference": ("$ref",),
}
# Keywords that allow and forbid nothing. They may occur in every form.
_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_NOTES |= {"$comment", "$defs", "definitions"}
_NOTES_OF_ROOT = {"$schema", "$id"}
_TYPES = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": int | float,
    "string": str,
    "array": list,
    "object": dict,
}

# The type of a keyword's value, with its name in messages.
_VALUES = {
    "pattern": (str, "a text"),
    "prefixItems": (list, "a list of schemas"),
    "properties": (dict, "an object of schemas"),
    "required": (list, "a list of names"),
    "enum": (list, "a list of values"),
    "anyOf": (list, "a list of schemas"),
}

# Most characters of all of the expression.
_MOST_CHARACTERS = 1_000_000
# A repetition needs states. 100,000 of them take minutes to compile.
_MOST_ITEMS = 10_000
# Lists and objects inside each other, where the schema allows any value.
_ANY_DEPTH = 2

# A character that a JSON text shows as it is.
_PLAIN = r'[^"\\\x00-\x1F\x7F-\x9F]'
_CHARACTER = rf'(?:{_PLAIN}|\\["\\/bfnrt])'
_INTEGER = "-?(?:0|[1-9][0-9]*)"
_STRING = f'"{_CHARACTER}*"'
_SCALARS = {
    "null": "null",
    "boolean": "(?:true|false)",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
# Months of 31, 30 and 28 days, then the 29th of February in leap years.
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|[2468][048]|[3579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){2}(?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
# ECMA-262's classes are of ASCII, those of the crate regex of Unicode.
_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}


def schema_to_regex(schema: str | Mapping[str, Any], whitespace: str | None = None) -> str:
    """Returns a regular expression of JSON texts that follow a schema.

    Args:
        schema: The schema, as JSON text or as a mapping.
        whitespace: A regular expression for the space between two JSON tokens. Default: ``[ ]?``.

    Raises:
        ValueError: The schema is not JSON, or a part of it has none of the supported forms; the
            message names the keyword and the place.
    """
    try:
        root = parse_json(
            schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        )
        return _Translator(root, _space(whitespace)).value(root, "#", ())
    except RecursionError:
        raise ValueError("the JSON schema is not supported: it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON schema is not supported: {first_line(error)}") from None


def _space(whitespace: str | None) -> str:
    if whitespace is None:
        return "[ ]?"
    pattern = "".join(
        r"[ \t\n\r]" if piece == r"\s" else piece for piece, _ in pieces_of(whitespace)
    )
    if wrong := bytes_of(pattern) - set(b" \t\n\r"):
        raise ValueError(
            f"whitespace is {shown(whitespace)}, which matches {chr(min(wrong))!r}; expected ["
            " \\t\\n\\r]"
        )
    return f"(?:{pattern})"


@dataclasses.dataclass(frozen=True)
class _Translator:
    """Translates the parts of one schema."""

    root: Any  #: The whole schema.
    space: str  #: A regular expression of the space between two JSON tokens.

    def value(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        """Returns the expression of the values that follow a part of the schema.

        Args:
            schema: The part.
            pointer: Its JSON pointer, for error messages.
            opened: The references that contain it.

        Raises:
            ValueError: The part has no supported form, or no value follows it.
        """
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError(f"{shown(pointer)} is {shown(schema)}; expected an object or true")

        kinds = _kinds(schema)
        are_known = kinds and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)
        if "type" in schema and not are_known:
            raise ValueError(
                f"{shown(pointer)} has the type {shown(schema['type'])}; expected one or more of"
                f" {', '.join(_TYPES)}"
            )
        for keyword, (kind, expected) in _VALUES.items():
            if not isinstance(schema.get(keyword, kind()), kind):
                raise ValueError(
                    f"{shown(pointer)} has the {keyword} {shown(schema[keyword])}; expected"
                    f" {expected}"
                )

        noted = _NOTES | (_NOTES_OF_ROOT if pointer == "#" else set())
        keywords = [keyword for keyword in schema if keyword not in noted]
        if isinstance(schema.get("type"), list) and not {"enum", "const"} & set(keywords):
            parts = [_restrict_to_type(schema, kind, kinds) for kind in kinds]
            return _either([self.value(part, pointer, opened) for part in parts])

        form = _form(keywords, kinds, pointer) if keywords else "any"
        text = getattr(self, f"_{form}", self._scalar)(schema, pointer, opened)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(
                f"{shown(pointer)} needs a regular expression of {len(text)} characters, more than"
                f" {_MOST_CHARACTERS}; simplify it"
            )
        return text

    def _any(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        text = _either([*_SCALARS.values(), _STRING])
        for _ in range(_ANY_DEPTH):
            entry = f"{_STRING}{self.space}:{self.space}{text}"
            array = self._enclosed("[]", self._repeat(text, 0, None))
            mapping = self._enclosed("{}", self._repeat(entry, 0, None))
            text = _either([text, array, mapping])
        return text

    def _scalar(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        return _SCALARS[schema["type"]]

    def _string(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        if "pattern" in schema:
            return f'"{_pattern(schema["pattern"], pointer)}"'
        if "format" in schema:
            if not isinstance(schema["format"], str) or schema["format"] not in _FORMATS:
                raise ValueError(
                    f"{shown(pointer)} has the format {shown(schema['format'])}; expected one of"
                    f" {', '.join(_FORMATS)}"
                )
            return f'"{_FORMATS[schema["format"]]}"'

        least, most = _limits(schema, "minLength", "maxLength", pointer)
        return f'"{_CHARACTER}{_times(least, most)}"'

    def _array(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        prefix = schema.get("prefixItems", [])
        least, most = _limits(schema, "minItems", "maxItems", pointer)
        parts = [
            self.value(part, f"{pointer}/prefixItems/{index}", opened)
            for index, part in enumerate(prefix)
        ]
        parts = parts[:most]
        count = len(parts)

        # The items after those of prefixItems. They are left out if the schema does not name them.
        items = schema.get("items", not prefix)
        text = ""
        if items is False:
            if least > count:
                raise ValueError(
                    f"{shown(pointer)} has {count} items at most and minItems {least}; no list"
                    " follows it"
                )
        elif most is None or most > count:
            item = self.value(items, f"{pointer}/items", opened)
            most = None if most is None else most - count
            needed = max(least - count, 0)
            if parts:
                text = f"(?:{self._comma}{item}){_times(needed, most)}"
            else:
                text = self._repeat(item, needed, most)

        # From the last to the first: an item that is not needed may end the list before it.
        for index in reversed(range(count)):
            comma = self._comma if index else ""
            text = f"{comma}{parts[index]}{text}"
            text = text if index < least else f"(?:{text})?"
        return self._enclosed("[]", text)

    def _object(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if missing := [name for name in required if name not in list(properties)]:
            raise ValueError(
                f"{shown(pointer)}: the property {shown(missing[0])} is required and not described"
            )
        more = schema.get("additionalProperties", "properties" not in schema)
        if properties and not isinstance(more, bool):
            raise ValueError(
                f"{shown(pointer)}: 'additionalProperties' is a schema, which 'properties' does not"
                " go with"
            )

        entry = f"{self.space}:{self.space}"
        if not properties:
            if more is False:
                return self._enclosed("{}", "")
            text = self.value(more, f"{pointer}/additionalProperties", opened)
            return self._enclosed("{}", self._repeat(f"{_STRING}{entry}{text}", 0, None))

        texts = []
        for name, part in properties.items():
            escaped = name.replace("~", "~0").replace("/", "~1")
            text = self.value(part, f"{pointer}/properties/{escaped}", opened)
            texts.append(f"{_literal(name)}{entry}{text}")
        needed = [name in required for name in properties]
        return self._enclosed("{}", self._members(texts, needed))

    def _members(self, texts: list[str], needed: list[bool]) -> str:
        """Returns the expression of an object's properties, in order.

        All that are needed are there, and any of the others.
        """
        # Without a needed property, each may be the first one, which has no comma before it.
        if True not in needed:
            alternatives = [
                self._joined(texts[first:], needed[first:]) for first in range(len(texts))
            ]
            return f"{_either(alternatives)}?"
        first = needed.index(True)
        earlier = "".join(f"(?:{text}{self._comma})?" for text in texts[:first])
        return earlier + self._joined(texts[first:], needed[first:])

    def _joined(self, texts: list[str], needed: list[bool]) -> str:
        """Returns the expression of the first property, and of the others after commas."""
        joined = texts[0]
        for text, is_needed in zip(texts[1:], needed[1:], strict=True):
            joined += f"{self._comma}{text}" if is_needed else f"(?:{self._comma}{text})?"
        return joined

    def _values(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if "type" in schema:
            values = [
                value for value in values if any(_has_type(value, kind) for kind in _kinds(schema))
            ]
        if not values:
            raise ValueError(f"{shown(pointer)} allows no value; give one of its type")
        return _either([_literal(value) for value in values])

    def _alternatives(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        parts = schema["anyOf"]
        if not parts:
            raise ValueError(f"{shown(pointer)} has an empty anyOf; give a schema")
        return _either(
            [
                self.value(part, f"{pointer}/anyOf/{index}", opened)
                for index, part in enumerate(parts)
            ]
        )

    def _reference(self, schema: Any, pointer: str, opened: tuple[str, ...]) -> str:
        target = schema["$ref"]
        part = self.root
        if not isinstance(target, str) or not f"{target}/".startswith("#/"):
            raise ValueError(
                f"{shown(pointer)} has the $ref {shown(target)}; expected '#/' and a place in this"
                " schema"
            )
        if target in opened:
            raise ValueError(
                f"{shown(pointer)}: {shown(target)} contains itself; write out as many levels as"
                " you need"
            )

        for name in unquote(target).split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list):
                children = {str(index): child for index, child in enumerate(part)}
            else:
                children = part if isinstance(part, dict) else {}
            if name not in children:
                raise ValueError(
                    f"{shown(pointer)} has the $ref {shown(target)}, and there is no such place"
                )
            part = children[name]
        return self.value(part, target, (*opened, target))

    @property
    def _comma(self) -> str:
        return f"{self.space},{self.space}"

    def _enclosed(self, brackets: str, text: str) -> str:
        return rf"\{brackets[0]}{self.space}{text}{self.space}\{brackets[1]}"

    def _repeat(self, text: str, least: int, most: int | None) -> str:
        """Returns the expression of ``least`` to ``most`` texts with commas between them."""
        if most == 0:
            return ""
        times = _times(max(least - 1, 0), None if most is None else most - 1)
        text += f"(?:{self._comma}{text}){times}"
        return text if least else f"(?:{text})?"


def _form(keywords: Sequence[str], kinds: Sequence[str], pointer: str) -> str:
    """Returns the form that has all keywords.

    Raises:
        ValueError: There is none. The message names the first keyword that does not fit.
    """
    form = ""
    keywords = sorted(keywords, key=lambda keyword: keyword != "type")
    for index, keyword in enumerate(keywords):
        form = _first_form({*keywords[: index + 1]}, kinds)
        if not form:
            names = [
                f"'type' {', '.join(kinds)}" if name == "type" else repr(name)
                for name in keywords[:index]
            ]
            together = f" together with {' and '.join(names)}" if names else ""
            advice = "write anyOf" if keyword == "oneOf" else "leave it out and check the output"
            raise ValueError(
                f"{shown(pointer)}: {shown(keyword)} is not supported{together}; {advice}"
            )
    return form


def _first_form(keywords: set[str], kinds: Sequence[str]) -> str:
    """Returns the first form of these types with all keywords; an empty text if there is none."""
    names = [name for name in _FORMS if not kinds or name in (*kinds, "values")]
    fits = (
        name for name in names if any(keywords <= {*allowed.split()} for allowed in _FORMS[name])
    )
    return next(fits, "")


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the types that a schema names."""
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _restrict_to_type(schema: Mapping[str, Any], kind: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the schema for one of its types, without the keywords of its other types."""
    keywords = {name: " ".join(_FORMS[name]).split() for name in kinds}
    foreign = {keyword for name in kinds for keyword in keywords[name]} - {*keywords[kind]}
    restricted = {name: value for name, value in schema.items() if name not in foreign}
    return restricted | {"type": kind}


def _has_type(value: Any, kind: str) -> bool:
    """Returns whether a JSON value has a type of JSON schema."""
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _limits(
    schema: Mapping[str, Any], least: str, most: str, pointer: str
) -> tuple[int, int | None]:
    """Returns the values of two keywords, such as ``minItems`` and ``maxItems``.

    The second is ``None`` if there is no upper limit.
    """
    for name in (least, most):
        value = schema.get(name, 0)
        if type(value) is not int or not 0 <= value <= _MOST_ITEMS:
            raise ValueError(
                f"{shown(pointer)} has {name} {shown(value)}; expected a whole number from 0 to"
                f" {_MOST_ITEMS}"
            )
    low = schema.get(least, 0)
    high = schema.get(most)
    if high is not None and low > high:
        raise ValueError(
            f"{shown(pointer)} has {least} {low} and {most} {high}; no value follows it"
        )
    return low, high


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _either(texts: Sequence[str]) -> str:
    return f"(?:{'|'.join(texts)})"


def _literal(value: Any) -> str:
    """Returns the expression of one JSON text of a value."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # No token spells surrogates and private characters.
    if re.search("[\ud800-\udfff\U00100000-\U0010ffff]", text):
        text = json.dumps(value)
    return re.escape(text)


def _pattern(pattern: str, pointer: str) -> str:
    """Returns the expression of the strings that a pattern matches, without their quotes.

    A pattern matches all of a string here; in a schema it may match a part.

    Raises:
        ValueError: The pattern matches a character that JSON writes with a backslash, or it is read
            differently by ECMA-262 and by the crate regex.
    """
    text = ""
    for piece, depth in pieces_of(pattern):
        is_group = piece[:2] == "(?" and piece != "(?:"
        is_class = piece[0] == "[" and (depth > 1 or piece[-1] == "]")
        is_twice = not depth and len(piece) == 2 and piece[0] in "*+?}"
        if is_group or is_class or is_twice or piece in ("&&", "--", "~~", "{,"):
            raise ValueError(
                f"{shown(pointer)}: {shown(piece)} in the pattern {shown(pattern)} is not supported"
            )
        text += _PLAIN if (piece, depth) == (".", 0) else _CLASSES.get(piece, piece)

    try:
        escaped = bytes_of(f"^{text}$") & {*b'"\\', *range(32)}
    except ValueError as error:
        raise ValueError(f"{shown(pointer)}: {error}") from None
    if escaped:
        raise ValueError(
            f"{shown(pointer)}: the pattern {shown(pattern)} matches {chr(min(escaped))!r}, which"
            " JSON writes with a "
            r"backslash; exclude it, as in [^\"\\\x00-\x1f]"
        )
    return f"(?:{text})"
