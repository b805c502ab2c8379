"""Tokenizers of GGUF files, against those that they were made from and against llama.cpp's algorithm, written again."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
import gguf
from checkpoints import edit_config, write_llama
from gguf_files import everywhere, write
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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


def _published() -> dict[str, tuple[Any, list[Any], bool]]:
    """The published tokenizers: normalizer, steps before the bytes, and whether those split by GPT-2's pattern.

    The patterns are those that transformers keeps.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as splits

    digits = [pre_tokenizers.Digits(individual_digits=True)]
    words = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
    deepseek = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", words + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    return {
        "gpt-2": (None, [], True),
        "smollm": (None, digits, True),
        "refact": (None, digits, True),
        "command-r": (normalizers.NFC(), digits, True),
        "qwen2": (normalizers.NFC(), [_split(splits["qwen2"])], False),
        "deepseek-v3": (None, [_split(pattern) for pattern in deepseek], False),
        **{name: (None, [_split(splits[name])], False) for name in ("llama-bpe", "dbrx", "tekken", "gpt-4o")},
    }


def _trained(rule: tuple[Any, list[Any], bool]) -> Tokenizer:
    normalizer, steps, by_words = rule
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    source = Path(conversion.__file__).parent / "rules.py"
    tokenizer.train_from_iterator([*TEXTS * 20, source.read_text()[:6000]], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return tokenizer


def _add(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str, padded: int) -> None:
    """What llama.cpp's converter writes of a byte-level tokenizer, for an embedding of more rows than it has tokens."""
    vocab = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    kinds = [Control if token in SPECIAL else User if token == "<think>" else Normal for token in tokens]
    spare = [f"[PAD{index}]" for index in range(len(tokens), padded)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *spare])
    writer.add_token_types([*kinds, *[Unused] * len(spare)])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GGUF file of a random Llama, with what a function adds to it."""
    directory = write_llama(tmp_path_factory.mktemp("model"))
    edit_config(directory, bos_token_id=0, eos_token_id=1)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))

    def of(add: Any, where: Path | None = None) -> Path:
        path = (where or tmp_path_factory.mktemp("file")) / "m.gguf"
        return write(directory, path, everywhere(gguf.GGMLQuantizationType.F32), add)

    return of


NAMES = ("gpt-2", "smollm", "refact", "command-r", "qwen2", "deepseek-v3", "llama-bpe", "dbrx", "tekken", "gpt-4o")


@pytest.mark.parametrize("name", NAMES)
def test_a_byte_level_tokenizer_is_the_one_that_the_file_was_made_from(written: Any, name: str) -> None:
    truth = _trained(_published()[name])

    def add(writer: gguf.GGUFWriter) -> None:
        _add(writer, truth, name, padded=1000)
        writer.add_add_bos_token(False)

    ours = tokenizer_of(written(add))
    assert ours is not None
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


def test_no_two_rules_split_these_texts_alike() -> None:
    """Two names of one rule aside; otherwise the test above could not tell them apart."""
    found = {}
    for name, (_, steps, by_words) in _published().items():
        if name in ("refact", "command-r", "dbrx"):
            continue
        splitter = pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)]
        )
        found[name] = str([[piece for piece, _ in splitter.pre_tokenize_str(text)] for text in TEXTS])
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize(
    ("pre", "said", "adds"), [("llama-bpe", None, True), ("qwen2", None, False), ("qwen2", True, True)]
)
def test_texts_begin_with_the_token_that_the_file_or_its_rule_says(
    written: Any, pre: str, said: bool | None, adds: bool
) -> None:
    truth = _trained(_published()[pre])

    def add(writer: gguf.GGUFWriter) -> None:
        _add(writer, truth, pre, padded=0)
        if said is not None:
            writer.add_add_bos_token(said)

    ours = tokenizer_of(written(add))
    assert ours is not None
    assert ours.encode("a b").ids == [*([0] if adds else []), *truth.encode("a b").ids]
    assert ours.encode("a b", add_special_tokens=False).ids == truth.encode("a b").ids


def _pieces(texts: list[str]) -> tuple[list[str], list[float], list[Any]]:
    """A SentencePiece vocabulary: unknown, ends, bytes, some substrings by a random score, most letters."""
    draw = random.Random(0)
    joined = "▁".join(text for text in texts if "<" not in text).replace(" ", "▁").replace("\n", "")
    letters = sorted(set(joined) - {"🚀", "한"})
    words = {joined[at : at + size] for size in (2, 3, 4, 5) for at in draw.sample(range(len(joined) - 5), 150)}
    words = sorted(word for word in words if set(word) <= set(letters))
    draw.shuffle(words)
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters, "<think>"]
    kinds = [Unknown, Control, Control, *[Byte] * 256, *[Normal] * (len(words) + len(letters)), User]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))] + [-1000.0]
    return tokens, scores, kinds


def _sentencepiece(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """llama.cpp's algorithm: of all neighbours that make a token, those with the highest score are merged."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[ids[left + right]], at)
            for at, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_merges_by_score(written: Any, prefix: bool) -> None:
    """With a blank before a text, as Llama's has, and without, as Gemma's has."""
    tokens, scores, kinds = _pieces(TEXTS)
    ids = {token: index for index, token in enumerate(tokens)}

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        writer.add_add_space_prefix(prefix)
        writer.add_unk_token_id(0)

    ours = tokenizer_of(written(add))
    assert ours is not None
    for text in TEXTS:
        if "<" in text:
            continue
        encoded = ours.encode(text)
        spelt = ("▁" if prefix else "") + text.replace(" ", "▁")
        assert encoded.ids == [0, *_sentencepiece(spelt, ids, scores)]
        assert ours.decode(encoded.ids) == text
    inner = _sentencepiece("▁and▁" if prefix else "▁and▁".removeprefix("▁"), ids, scores)
    around = ours.encode("<s>and <think>", add_special_tokens=False).ids
    assert around == [1, *inner, ids["<think>"]]


def test_stop_tokens_and_the_chat_template_come_from_the_file(written: Any) -> None:
    truth = _trained(_published()["qwen2"])
    template = "{{ bos_token }}{{ messages[0]['content'] }}"

    def add(writer: gguf.GGUFWriter) -> None:
        _add(writer, truth, "qwen2", padded=0)
        writer.add_eot_token_id(7)
        writer.add_chat_template(template)

    path = written(add)
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
def test_the_end_of_a_turn_stops_an_answer_where_no_number_says_so(
    written: Any, tokens: list[str], stops: tuple[int, ...]
) -> None:
    path = written(lambda writer: writer.add_token_list(["a", "b", *tokens]))
    assert conversion.read_target(path).stop_tokens == stops


def _without(name: str) -> Any:
    return lambda writer: writer.kv_data[0].pop(f"tokenizer.ggml.{name}")


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown rule": (
        lambda writer: writer.kv_data[0].update({"tokenizer.ggml.pre": gguf.gguf_writer.GGUFValue("poro", 8)}),
        r"tokenizer\.ggml\.pre is 'poro'; the rules that are known for splitting a text are gpt-2, smollm, ",
    ),
    "no rule": (_without("pre"), r"tokenizer\.ggml\.pre is None; the rules that are known"),
    "no merges": (_without("merges"), r"has no tokenizer\.ggml\.merges; fetch the file again"),
    "no tokens": (_without("tokens"), r"has no tokenizer\.ggml\.tokens; fetch the file again"),
    "another kind": (
        lambda writer: writer.kv_data[0].update({"tokenizer.ggml.model": gguf.gguf_writer.GGUFValue("t5", 8)}),
        r"tokenizer\.ggml\.model is 't5'; tokenizers that are read are gpt2 and llama\. Give the safetensors",
    ),
    "another separator": (lambda writer: writer.add_add_sep_token(True), r"add_sep_token is True; only false is supp"),
    "a beginning that is none": (
        lambda writer: (_without("bos_token_id")(writer), writer.add_add_bos_token(True)),
        r"says that texts have the token 'bos', and tokenizer\.ggml\.bos_token_id is None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_is_not_known_is_refused(written: Any, name: str) -> None:
    change, says = REFUSED[name]
    truth = _trained(_published()["qwen2"])

    def add(writer: gguf.GGUFWriter) -> None:
        _add(writer, truth, "qwen2", padded=0)
        change(writer)

    path = written(add)
    with pytest.raises(CheckpointError, match=says):
        tokenizer_of(path)
    description = conversion.describe(path)
    assert not description.loadable and description.has_tokenizer
    assert conversion.read_target(path).config.vocab_size == 61  # the weights are none the worse


def test_a_file_without_a_tokenizer_has_none(written: Any) -> None:
    path = written(lambda writer: None)
    assert tokenizer_of(path) is None and tokenizer_config_of(path) == {}
    assert not conversion.describe(path).has_tokenizer


def test_scores_decide_by_their_order(written: Any) -> None:
    tokens = ["<unk>", "a", "b", "c", "ab", "bc"]

    def ids(scores: list[float], text: str) -> list[int]:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model("llama")
            writer.add_token_list(tokens)
            writer.add_token_scores(scores)
            writer.add_add_bos_token(False)
            writer.add_add_space_prefix(False)

        tokenizer = tokenizer_of(written(add))
        assert tokenizer is not None
        return tokenizer.encode(text).ids

    assert ids([0.0, 0.0, 0.0, 0.0, 1e-3, 2e-3], "abc") == [1, 5]
    assert ids([0.0, 0.0, 0.0, 0.0, -1.0, -7.0], "abc") == [4, 3]
    assert ids([0.0, 0.0, 0.0, 0.0, -1.0, -7.0], "bcab") == [5, 4]
