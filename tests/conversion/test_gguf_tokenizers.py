"""Tokenizers of GGUF files are compared with their sources, and with llama.cpp's algorithm."""

from __future__ import annotations

import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("gguf")
import gguf
from checkpoints import edit_config, write_llama
from gguf_files import everywhere, write
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from eagle3_jax import conversion
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.sidecars import tokenizer_config_of, tokenizer_of

pytestmark = pytest.mark.torch

Normal = gguf.TokenType.NORMAL
Unknown = gguf.TokenType.UNKNOWN
Control = gguf.TokenType.CONTROL
User = gguf.TokenType.USER_DEFINED
Unused = gguf.TokenType.UNUSED
Byte = gguf.TokenType.BYTE
TEXTS = [
    "a    12", "It's 2024, isn't it? I'LL PAY 1234567.89 for it!", "  two\n\n\tlines  \r\n and   blanks ",
    "HTTPServer parseJSONDocument camelCase XMLHttpRequest", "naïve café, e\u0301tude, Ångström ½ ² ①",
    "我想在apple工作1314151天～ これはテスト 한국어", "🚀 (normal) 😶\u200d🌫️ ✅ 🦙🦙", "x=1;y=22;z=333",
    "def f(x):\n    return {'a': x[0]/2}\n", "<s>system\nhello<think> and </s><s>",
    "нещо на Български ------======",
]  # fmt: skip
SPECIAL = ["<s>", "</s>"]


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


class _Published(NamedTuple):
    """The parts of a published tokenizer."""

    normalizer: Any
    steps: list[Any]  # before the bytes
    by_words: bool  # whether GPT-2's pattern splits too


def _published() -> dict[str, _Published]:
    """Returns the published tokenizers; the patterns are those of transformers."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS as splits,
    )

    digits = [pre_tokenizers.Digits(individual_digits=True)]
    words = (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    )
    deepseek = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", words)
    same = ("llama-bpe", "dbrx", "tekken", "gpt-4o")
    return {
        "gpt-2": _Published(None, [], True),
        "smollm": _Published(None, digits, True),
        "refact": _Published(None, digits, True),
        "command-r": _Published(normalizers.NFC(), digits, True),
        "qwen2": _Published(normalizers.NFC(), [_split(splits["qwen2"])], False),
        "deepseek-v3": _Published(None, [_split(pattern) for pattern in deepseek], False),
        **{name: _Published(None, [_split(splits[name])], False) for name in same},
    }


def _splitter(published: _Published) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=published.by_words)
    return pre_tokenizers.Sequence([*published.steps, byte_level])


@functools.cache
def _trained(name: str) -> Tokenizer:
    published = _published()[name]
    tokenizer = Tokenizer(models.BPE())
    if published.normalizer is not None:
        tokenizer.normalizer = published.normalizer
    tokenizer.pre_tokenizer = _splitter(published)
    tokenizer.decoder = decoders.ByteLevel()

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    source = Path(conversion.__file__).parent / "rules.py"
    tokenizer.train_from_iterator([*TEXTS * 20, source.read_text()[:6000]], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return tokenizer


def _fields(tokenizer: Tokenizer, pre: str, padded: int = 0) -> dict[str, Any]:
    """Returns a byte-level tokenizer as llama.cpp's converter writes it.

    ``padded`` is the number of rows of the embedding.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [
        Control if token in SPECIAL else User if token == "<think>" else Normal for token in tokens
    ]

    spare = [f"[PAD{index}]" for index in range(len(tokens), padded)]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": [*tokens, *spare],
        "token_types": [*kinds, *[Unused] * len(spare)],
        "token_merges": [" ".join(merge) for merge in merges],
    }


def _write(directory: Path, path: Path, change: Any = lambda writer: None, **fields: Any) -> Path:
    """Writes a GGUF file with these fields, by the names of GGUFWriter's methods."""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in fields.items():
            getattr(writer, f"add_{name}")(value)
        change(writer)

    return write(directory, path, everywhere(gguf.GGMLQuantizationType.F32), add)


@pytest.fixture
def written(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Any:
    """Writes GGUF files of a random Llama."""
    return functools.partial(_write, model, tmp_path_factory.mktemp("file") / "m.gguf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_llama(tmp_path_factory.mktemp("model"))
    edit_config(directory, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    return directory


NAMES = (
    "gpt-2",
    "smollm",
    "refact",
    "command-r",
    "qwen2",
    "deepseek-v3",
    "llama-bpe",
    "dbrx",
    "tekken",
    "gpt-4o",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_byte_level_tokenizer_is_the_one_that_the_file_was_made_from(
    written: Any, name: str
) -> None:
    truth = _trained(name)
    ours: Any = tokenizer_of(written(**_fields(truth, name, padded=1000), add_bos_token=False))
    for text in TEXTS:
        expected = truth.encode(text)
        encoded = ours.encode(text)
        assert encoded.tokens == expected.tokens
        assert encoded.ids == expected.ids
        assert ours.decode(encoded.ids, skip_special_tokens=False) == truth.decode(
            expected.ids, skip_special_tokens=False
        )
        assert ours.decode(encoded.ids) == truth.decode(expected.ids)
    assert ours.get_vocab(with_added_tokens=True) == truth.get_vocab(with_added_tokens=True)


def test_different_rules_split_these_texts_differently() -> None:
    """Otherwise the test above could not distinguish the rules. Three names are synonyms."""
    splits = {}
    for name, published in _published().items():
        if name in ("refact", "command-r", "dbrx"):
            continue
        pieces = map(_splitter(published).pre_tokenize_str, TEXTS)
        splits[name] = str([[word for word, _ in words] for words in pieces])
    assert len(set(splits.values())) == len(splits)


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("llama-bpe", None, True), ("qwen2", None, False), ("qwen2", True, True)],
)
def test_the_flag_of_the_file_or_its_rule_adds_the_first_token(
    written: Any, pre: str, flag: bool | None, adds: bool
) -> None:
    truth = _trained(pre)
    flags = {} if flag is None else {"add_bos_token": flag}
    ours: Any = tokenizer_of(written(**_fields(truth, pre), **flags))
    ids = truth.encode("a b").ids
    assert ours.encode("a b").ids == ([0, *ids] if adds else ids)
    assert ours.encode("a b", add_special_tokens=False).ids == ids


class _Pieces(NamedTuple):
    """A SentencePiece vocabulary."""

    tokens: list[str]
    scores: list[float]
    kinds: list[Any]


def _pieces(texts: list[str]) -> _Pieces:
    """Returns a SentencePiece vocabulary: special tokens, bytes, substrings, most letters."""
    draw = random.Random(0)
    joined = "▁".join(text for text in texts if "<" not in text)
    joined = joined.replace(" ", "▁").replace("\n", "")
    letters = sorted(set(joined) - {"🚀", "한"})

    substrings = set()
    for size in (2, 3, 4, 5):
        starts = draw.sample(range(len(joined) - 5), 150)
        substrings |= {joined[start : start + size] for start in starts}
    words = sorted(word for word in substrings if set(word) <= set(letters))
    draw.shuffle(words)

    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*words, *letters]
    tokens = ["<unk>", *SPECIAL, *bytes_of, *pieces, "<think>"]
    kinds = [Unknown, Control, Control, *[Byte] * 256, *[Normal] * len(pieces), User]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-1000.0]
    return _Pieces(tokens, scores, kinds)


def _sentencepiece(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """Encodes a text as llama.cpp does: the neighbours with the highest score merge, repeatedly."""
    symbols = list(text)
    while True:
        candidates = []
        for index, (first, second) in enumerate(itertools.pairwise(symbols)):
            if first + second in ids:
                candidates.append((-scores[ids[first + second]], index))
        if not candidates:
            break
        _, index = min(candidates)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]

    encoded = []
    for symbol in symbols:
        encoded += (
            [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        )
    return encoded


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_score(written: Any, prefix: bool) -> None:
    """A blank precedes a text for Llama, but not for Gemma."""
    tokens, scores, kinds = _pieces(TEXTS)
    ids = {token: index for index, token in enumerate(tokens)}
    model = {"tokenizer_model": "llama", "tokenizer_pre": "default", "unk_token_id": 0}
    vocab = {"token_list": tokens, "token_scores": scores, "token_types": kinds}
    ours: Any = tokenizer_of(written(**model, **vocab, add_space_prefix=prefix))

    for text in TEXTS:
        if "<" in text:
            continue
        encoded = ours.encode(text)
        prefixed = ("▁" if prefix else "") + text.replace(" ", "▁")
        assert encoded.ids == [0, *_sentencepiece(prefixed, ids, scores)]
        assert ours.decode(encoded.ids) == text

    inner = _sentencepiece("▁and▁" if prefix else "▁and▁".removeprefix("▁"), ids, scores)
    encoded = ours.encode("<s>and <think>", add_special_tokens=False)
    assert encoded.ids == [1, *inner, ids["<think>"]]


def test_stop_tokens_and_the_chat_template_come_from_the_file(written: Any) -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    fields = _fields(_trained("qwen2"), "qwen2")
    path = written(**fields, eot_token_id=7, chat_template=template)
    assert conversion.read_target(path).stop_tokens == (1, 7)
    config = tokenizer_config_of(path)
    assert config["chat_template"] == template
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("tokens", "stops"),
    [
        (["<|im_end|>"], (1, 2)),
        (["<|end|>", "<end_of_turn>"], (1, 3, 2)),
        (["<|end|>", "<|return|>"], (1,)),
    ],
)
def test_the_end_of_a_turn_is_found_by_its_text_without_an_id(
    written: Any, tokens: list[str], stops: tuple[int, ...]
) -> None:
    path = written(token_list=["a", "b", *tokens])
    assert conversion.read_target(path).stop_tokens == stops


def _without(name: str) -> Any:
    return lambda writer: writer.kv_data[0].pop(f"tokenizer.ggml.{name}")


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown rule": (
        lambda writer: writer.kv_data[0].update(
            {"tokenizer.ggml.pre": gguf.gguf_writer.GGUFValue("poro", 8)}
        ),
        (
            r"tokenizer\.ggml\.pre is 'poro'; the rules that are known for splitting a text are"
            r" gpt-2, smollm, "
        ),
    ),
    "no rule": (_without("pre"), r"tokenizer\.ggml\.pre is None; the rules that are known"),
    "no merges": (_without("merges"), r"has no tokenizer\.ggml\.merges; fetch the file again"),
    "no tokens": (_without("tokens"), r"has no tokenizer\.ggml\.tokens; fetch the file again"),
    "another kind": (
        lambda writer: writer.kv_data[0].update(
            {"tokenizer.ggml.model": gguf.gguf_writer.GGUFValue("t5", 8)}
        ),
        (
            r"tokenizer\.ggml\.model is 't5'; tokenizers that are read are gpt2 and llama\. Give"
            r" the safetensors"
        ),
    ),
    "another separator": (
        lambda writer: writer.add_add_sep_token(True),
        r"add_sep_token is True; only false is supp",
    ),
    "a beginning that is none": (
        lambda writer: (_without("bos_token_id")(writer), writer.add_add_bos_token(True)),
        r"says that texts have the token 'bos', and tokenizer\.ggml\.bos_token_id is None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_tokenizer_is_refused(written: Any, name: str) -> None:
    change, message = REFUSED[name]
    path = written(change, **_fields(_trained("qwen2"), "qwen2"))
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(path)
    description = conversion.describe(path)
    assert not description.loadable
    assert description.has_tokenizer
    assert conversion.read_target(path).config.vocab_size == 61  # the weights can be read


def test_a_file_without_a_tokenizer_has_none(written: Any) -> None:
    path = written()
    assert tokenizer_of(path) is None
    assert tokenizer_config_of(path) == {}
    assert not conversion.describe(path).has_tokenizer


def test_only_the_order_of_scores_matters(written: Any) -> None:
    fields = {"tokenizer_model": "llama", "add_bos_token": False, "add_space_prefix": False}
    fields["token_list"] = ["<unk>", "a", "b", "c", "ab", "bc"]
    for last, text, ids in (
        ([1e-3, 2e-3], "abc", [1, 5]),
        ([-1.0, -7.0], "abc", [4, 3]),
        ([-1.0, -7.0], "bcab", [5, 4]),
    ):
        tokenizer: Any = tokenizer_of(written(**fields, token_scores=[0.0, 0.0, 0.0, 0.0, *last]))
        assert tokenizer.encode(text).ids == ids
