"""Builds ``tokenizer.json`` and ``tokenizer_config.json`` from the metadata of a GGUF file.

Metadata has tokens, merges or scores, and the name of the pre-tokenizer. llama.cpp's source
(``llama-vocab.cpp``) defines the names. The rules below are those of the published tokenizers.
Unknown names raise an error.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.gguf.header import Header

_PREFIX = "tokenizer.ggml."
_BYTE_BPE = "gpt2"
_SENTENCEPIECE = "llama"
_NONE = ("none", "no_vocab")
# llama.cpp's numbers for types of tokens.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_SPACE = "▁"
# Tokens that end a turn. Like llama.cpp, this finds them by their text if metadata has no
# eot_token_id. In gpt-oss <|end|> ends a message inside the answer, so it does not end the text
# there.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
_END = "<|end|>"
_RETURN = "<|return|>"

# Special tokens of Phi-3 that do not strip what follows.
_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_words(digits: str) -> str:
    """Returns the pattern of GPT-4; ``digits`` is the pattern of numbers."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        + _BREAKS
    )


def _by_case(ending: str, digits: str) -> str:
    """Returns the pattern of GPT-4o, which also splits before capitals.

    ``ending`` is the pattern of contractions, ``digits`` that of numbers.
    """
    first = r"[^\r\n\p{L}\p{N}]?"
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    small = f"{first}{upper}*{lower}+{ending}"
    capital = f"{first}{upper}+{lower}*{ending}"
    return rf"{small}|{capital}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _BREAKS


class _Rule(NamedTuple):
    """The pre-tokenizer of a byte-level tokenizer."""

    #: Patterns that split the text, applied in order. Default: GPT-2's pattern.
    patterns: tuple[str, ...] = ()
    single_digits: bool = False  #: Whether digits are split off first, each on its own.
    nfc: bool = False  #: Whether the text is normalised to NFC first.
    #: Whether a word that is in the vocabulary becomes one token without merges.
    ignore_merges: bool = False
    #: Whether the BOS token is added if metadata does not have ``add_bos_token``.
    add_bos: bool = False


class _Parts(NamedTuple):
    """What differs between the kinds of tokenizers."""

    fields: dict[str, Any]  #: Fields of ``tokenizer.json``.
    add_bos: bool  #: Whether the BOS token is added if metadata does not have ``add_bos_token``.


_LLAMA3 = _Rule((_by_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_DIGITS = _Rule(single_digits=True)
_RULES = {
    "gpt-2": _Rule(),
    "smollm": _DIGITS,
    "refact": _DIGITS,
    "starcoder": _DIGITS,
    "command-r": _Rule(single_digits=True, nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _Rule((_by_words(r"\p{N}{1,3}"),)),
    "qwen2": _Rule((_by_words(r"\p{N}"),), nfc=True),
    "tekken": _Rule((_by_case("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o": _Rule((_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),)),
    "deepseek-v3": _Rule(
        (
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"""| ?[\p{P}\p{S}]+[\r\n]*""" + _BREAKS,
        )
    ),
}


def token_fields(header: Header) -> dict[str, Any]:
    """Returns the token ids of ``config.json``: all tokens that end an answer are in its EOS."""
    ids = {name: _id(header, name) for name in ("bos", "eos", "eot", "eom", "padding")}
    stops = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    tokens = header.metadata.get(f"{_PREFIX}tokens")
    if ids["eot"] is None and isinstance(tokens, list):
        texts = _ENDS if _RETURN in tokens else (*_ENDS, _END)
        stops += [tokens.index(text) for text in texts if text in tokens]

    stops = list(dict.fromkeys(stops))
    stop = stops[0] if len(stops) == 1 else (stops or None)
    return {"bos_token_id": ids["bos"], "eos_token_id": stop, "pad_token_id": ids["padding"]}


def read_tokenizer_config(header: Header) -> dict[str, Any] | None:
    """Builds the object in ``tokenizer_config.json``; ``None`` for a file without a tokenizer."""
    if _kind(header) is None:
        return None

    tokens = _tokens(header)
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise header.fields.wrong("tokenizer.chat_template", "expected a text")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }

    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in names.items():
        token = _id(header, key)
        if token is not None and 0 <= token < len(tokens):
            config[name] = tokens[token]
    config["chat_template"] = template
    return config


def read_tokenizer_json(header: Header) -> dict[str, Any] | None:
    """Builds the object in ``tokenizer.json``; ``None`` for a file without a tokenizer.

    Raises:
        CheckpointError: The kind of tokenizer or the pre-tokenizer is unsupported, or metadata is
            incomplete.
    """
    kind = _kind(header)
    if kind is None:
        return None

    tokens = _tokens(header)
    types = header.metadata.get(f"{_PREFIX}token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(
            f"{header.path} has no {_PREFIX}token_type for all of its tokens; fetch the file again"
        )

    vocab: dict[str, int] = {}
    for index, (token, type) in enumerate(zip(tokens, types, strict=True)):
        if type == _UNUSED and re.fullmatch(r"\[PAD\d+\]", token):
            continue  # padding up to the number of rows of the embedding
        if vocab.setdefault(token, index) != index:
            raise CheckpointError(
                f"{header.path} has the token {short(token)} twice; fetch the file again"
            )

    # Special tokens of Phi-3 strip the whitespace after them. Metadata has no field for that.
    is_phi3 = kind == _SENTENCEPIECE and header.metadata.get("general.architecture") == "phi3"
    added = []
    added = []
    for index, (token, type) in enumerate(zip(tokens, types, strict=True)):
        if type in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token:
            entry = {
                "id": index,
                "content": token,
                "special": type != _USER_DEFINED,
                "rstrip": is_phi3 and token not in _KEEPS_SPACES,
            }
            added.append({**entry, "single_word": False, "lstrip": False, "normalized": False})

    parts = _byte_bpe(header, vocab) if kind == _BYTE_BPE else _sentencepiece(header, vocab, tokens)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts.fields,
        "post_processor": _post_processor(header, tokens, parts.add_bos),
    }


def _kind(header: Header) -> str | None:
    kind = header.metadata.get(f"{_PREFIX}model", _NONE[0])
    if isinstance(kind, str) and kind in _NONE:
        return None
    if not isinstance(kind, str) or kind not in (_BYTE_BPE, _SENTENCEPIECE):
        raise CheckpointError(
            f"{header.path}: {_PREFIX}model is {short(kind)}; tokenizers that are read are"
            f" {_BYTE_BPE} and {_SENTENCEPIECE}. Give the safetensors checkpoint that the file was"
            " made from"
        )
    return kind


def _tokens(header: Header) -> list[str]:
    tokens = header.metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{header.path} has no {_PREFIX}tokens; fetch the file again")
    return tokens


def _id(header: Header, name: str) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    return None if header.fields.get(key) is None else header.fields.integer(key)


def _byte_bpe(header: Header, vocab: dict[str, int]) -> _Parts:
    name = header.metadata.get(f"{_PREFIX}pre")
    if not isinstance(name, str) or name not in _RULES:
        raise CheckpointError(
            f"{header.path}: {_PREFIX}pre is {short(name)}; the rules that are known for splitting"
            f" a text are {', '.join(_RULES)}. Give the safetensors checkpoint that the file was"
            " made from"
        )
    rule = _RULES[name]

    merges = header.metadata.get(f"{_PREFIX}merges")
    if not isinstance(merges, list) or not all(
        isinstance(merge, str) and " " in merge[1:] for merge in merges
    ):
        raise CheckpointError(f"{header.path} has no {_PREFIX}merges; fetch the file again")
    pairs = []
    for merge in merges:
        # A token may begin with a space, so the space that separates is searched after it.
        inner, _, second = merge[1:].partition(" ")
        pairs.append([merge[0] + inner, second])

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits: list[dict[str, Any]] = (
        [{"type": "Digits", "individual_digits": True}] if rule.single_digits else []
    )
    for pattern in rule.patterns:
        splits.append(
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    splits.append({**byte_level, "use_regex": not rule.patterns})

    fields = {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": {**byte_level, "use_regex": True},
        "model": _model(vocab, pairs, ignore_merges=rule.ignore_merges),
    }
    return _Parts(fields, rule.add_bos)


def _sentencepiece(header: Header, vocab: dict[str, int], tokens: list[str]) -> _Parts:
    scores = header.metadata.get(f"{_PREFIX}scores", [])
    are_numbers = isinstance(scores, list) and all(isinstance(score, float) for score in scores)
    if not are_numbers or len(scores) != len(tokens):
        raise CheckpointError(
            f"{header.path} has no {_PREFIX}scores for all of its tokens; fetch the file again"
        )

    normalizers: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    ]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if header.fields.flag(f"{_PREFIX}add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})

    unknown = _id(header, "unknown") or 0
    unknown_token = tokens[unknown] if 0 <= unknown < len(tokens) else None
    merges = _merges_by_score(vocab, scores)

    fields = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(
            vocab, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback="<0x00>" in vocab
        ),
    }
    return _Parts(fields, add_bos=True)


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Lists all pairs of tokens whose concatenation is a token, by its score, highest first."""
    pairs = []
    for token, index in vocab.items():
        for length in range(1, len(token)):
            prefix = token[:length]
            suffix = token[length:]
            if prefix in vocab and suffix in vocab:
                pairs.append((scores[index], prefix, suffix))
    pairs.sort(key=lambda pair: -pair[0])
    return [[prefix, suffix] for _, prefix, suffix in pairs]


def _model(vocab: dict[str, int], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    usual = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False,
    }  # fmt: skip
    return {**usual, **more, "vocab": vocab, "merges": merges}


def _post_processor(header: Header, tokens: list[str], add_bos: bool) -> dict[str, Any] | None:
    """Returns the template with the BOS and EOS tokens of metadata; ``None`` without them."""
    if header.fields.flag(f"{_PREFIX}add_sep_token"):
        raise header.fields.wrong(f"{_PREFIX}add_sep_token", "only false is supported")

    pieces: dict[str, list[dict[str, Any]]] = {"bos": [], "eos": []}
    special: dict[str, Any] = {}
    for name, default in (("bos", add_bos), ("eos", False)):
        if not header.fields.flag(f"{_PREFIX}add_{name}_token", default):
            continue
        token = _id(header, name)
        if token is None or not 0 <= token < len(tokens):
            raise CheckpointError(
                f"{header.path} says that texts have the token {name!r}, and"
                f" {_PREFIX}{name}_token_id is {short(token)}"
            )
        text = tokens[token]
        pieces[name] = [{"SpecialToken": {"id": text, "type_id": 0}}]
        special[text] = {"id": text, "ids": [token], "tokens": [text]}

    if not special:
        return None

    first, second = (
        [*pieces["bos"], {"Sequence": {"id": name, "type_id": 0}}, *pieces["eos"]]
        for name in ("A", "B")
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *second],
        "special_tokens": special,
    }
