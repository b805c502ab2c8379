"""Documents: they have the token ids of serving, and heads learn what the target writes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from chat_templates import SPECIAL, TEMPLATES, with_bos
from models_on_disk import bytes_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from eagle3_jax import ChatTemplate, LoadedTarget
from eagle3_jax.training.documents import read_documents, read_prompts_to_answer
from eagle3_jax.training.texts import Text

CHATML = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor"
    " %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# Like templates of reasoning models: only the last answer is shown.
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] == 'user' or loop.last %}<s>{{"
    " message['content'] | trim }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<s>{%"
    " endif %}"
)
NO_STOP = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Like that of DeepSeek R1: an answer begins with an opened thought, which is dropped later.
OPENS_THOUGHT = (
    "{% for message in messages %}<s>{{ message['content'] }}{% if message['role'] == 'assistant'"
    " %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<s><think>\n{% endif %}"
)
# Any stop token ends an answer.
TWO_STOPS = (
    "{{ messages[0].content }}{% if messages[1] %}{{ messages[1].content }}<e></s>{% endif %}"
)
TURNS = ("Why?", "Because.", "Really?", "Yes.")


def target(
    template: str | None = CHATML, tokenizer: Tokenizer | None = None, stops: int = 2
) -> LoadedTarget:
    """Returns a target of bytes, whose stop tokens are ``</s>`` and ``<e>``."""
    tokenizer = tokenizer or bytes_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>", "<e>"])
    variables = {"bos_token": "<s>", "eos_token": "</s>"}

    return dataclasses.replace(
        tiny.target(),
        tokenizer=tokenizer,
        chat_template=None if template is None else ChatTemplate(template, variables),
        stop_tokens=tuple(tokenizer.token_to_id(stop) for stop in ("</s>", "<e>")[:stops]),
    )


def conversation(*turns: str, system: str | None = None) -> dict[str, Any]:
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = itertools.cycle(("user", "assistant"))
    answers = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"messages": first + answers}


def written(folder: Path, *rows: dict[str, Any] | str) -> Path:
    path = folder / "own.jsonl"
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def read(
    folder: Path, target: LoadedTarget, *rows: dict[str, Any] | str, length: int = 500
) -> tuple[list[Text], dict[str, int]]:
    dropped: Counter[str] = Counter()
    texts = list(read_documents([written(folder, *rows)], target, length=length, dropped=dropped))
    return texts, dict(dropped)


def marked(text: Text, target: LoadedTarget) -> str:
    """Returns a text with brackets around its learnt tokens."""
    assert target.tokenizer is not None and len(text.tokens) == len(text.learn)
    runs = itertools.groupby(zip(text.tokens, text.learn, strict=True), key=lambda pair: pair[1])
    pieces = [
        (learnt, target.tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
        for learnt, run in runs
    ]
    return "".join(f"[{piece}]" if learnt else piece for learnt, piece in pieces)


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize(
    ("template", "document", "expected"),
    [
        (
            CHATML,
            conversation("Why?", "Because."),
            ["<s>user\nWhy?</s>\n<s>assistant\n[Because.</s>]"],
        ),
        (
            CHATML,
            conversation(*TURNS, system="Be brief."),
            [
                "<s>system\nBe brief.</s>\n<s>user\nWhy?</s>\n<s>assistant\n[Because.</s>]"
                "\n<s>user\nReally?</s>\n<s>assistant\n[Yes.</s>]"
            ],
        ),
        # A last question has no answer, and a greeting answers nothing.
        (CHATML, conversation("Why?", "", "Really?"), ["<s>user\nWhy?</s>\n<s>assistant\n[</s>]"]),
        (
            CHATML,
            {
                "messages": [
                    {"role": "assistant", "content": "Hi!"},
                    *conversation("Why?", "So.")["messages"],
                ]
            },
            ["<s>assistant\nHi!</s>\n<s>user\nWhy?</s>\n<s>assistant\n[So.</s>]"],
        ),
        # A stop token inside the content is not its end.
        (
            CHATML,
            conversation("Why?", "a</s>b \n"),
            ["<s>user\nWhy?</s>\n<s>assistant\n[a</s>b \n</s>]"],
        ),
        (FORGETFUL, conversation(*TURNS[:2]), ["<s>Why?</s><s>[Because.</s>]"]),
        (
            FORGETFUL,
            conversation("Why?", " Because.", "Really?", "Yes."),
            ["<s>Why?</s><s>[Because.</s>]", "<s>Why?</s><s>Really?</s><s>[Yes.</s>]"],
        ),
        # The template shows the system message before the last question only, until that is
        # answered.
        (
            TEMPLATES["Mistral"],
            conversation(*TURNS, system="Be brief."),
            [
                "<s>[INST] Be brief.\n\nWhy?[/INST][Because.</s>]",
                "<s>[INST] Why?[/INST] Because.</s>[INST] Be brief.\n\nReally?[/INST][Yes.</s>]",
            ],
        ),
        (
            TEMPLATES["Mistral"],
            conversation(*TURNS),
            ["<s>[INST] Why?[/INST][ Because.</s>][INST] Really?[/INST][ Yes.</s>]"],
        ),
        (
            NO_STOP,
            conversation(*TURNS),
            ["user: Why?\nassistant: [Because.]\nuser: Really?\nassistant: [Yes.]"],
        ),
        (TWO_STOPS, conversation("Why?", "So."), ["Why?[So.<e>]"]),
    ],
)
def test_answers_are_learnt_as_far_as_their_stop_token(
    tmp_path: Path, template: str, document: dict[str, Any], expected: list[str]
) -> None:
    model = target(template)
    texts, dropped = read(tmp_path, model, document)
    assert [marked(text, model) for text in texts] == expected
    assert dropped == {}
    assert len({text.document for text in texts}) == 1


def test_an_answer_that_the_template_leaves_out_is_not_learnt(tmp_path: Path) -> None:
    model = target(OPENS_THOUGHT)
    with pytest.raises(
        ValueError, match=r"no document is left to learn from: nothing to learn \(1\); give other"
    ):
        read(tmp_path, model, conversation("Why?", "Because."))
    texts, dropped = read(tmp_path, model, conversation("Why?", "Because."), {"text": "So."})
    assert [marked(text, model) for text in texts] == ["[So.</s>]"]
    assert dropped == {"nothing to learn": 1}


def test_an_answer_follows_the_token_ids_that_serving_sees(tmp_path: Path) -> None:
    """A token of two line breaks would span the border of the first answer.

    So the second answer begins another text.
    """
    model = target(tokenizer=bytes_tokenizer(("Ċ", "Ċ")))
    document = conversation("Why?", "\n\nBecause.", "Really?", "Yes.")
    texts, _ = read(tmp_path, model, document)
    for text, number in zip(texts, (1, 3), strict=True):
        prompt = model.apply_chat_template(document["messages"][:number])
        assert text.tokens[: len(prompt)] == prompt
        assert text.learn == [index >= len(prompt) for index in range(len(text.tokens))]
    assert marked(texts[0], model) == "<s>user\nWhy?</s>\n<s>assistant\n[\n\nBecause.</s>]"


def test_no_space_is_put_in_front_of_an_answer(tmp_path: Path) -> None:
    """Tokenizers of sentencepiece put a space in front of all that they encode."""
    words = ["?", "▁Why", "▁", "▁Because", "▁▁Because"]
    tokenizer = Tokenizer(
        models.Unigram([(word, -float(len(words) - rank)) for rank, word in enumerate(words)], 0)
    )

    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Metaspace()

    model = target(tokenizer=tokenizer, stops=0)
    texts, _ = read(tmp_path, model, {"prompt": "Why", "completion": " Because"})
    assert texts[0].tokens == [words.index("▁Why"), words.index("▁Because")]
    assert texts[0].learn == [False, True]


@pytest.mark.torch
def test_the_mask_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    template = (
        "{% for message in messages %}{% if message['role'] == 'assistant'"
        " %}<|im_start|>assistant\n{% generation %}{{ message['content'] }}<|im_end|>{%"
        " endgeneration %}{{ '\n' }}{% else %}<|im_start|>{{ message['role'] }}\n{{"
        " message['content'] }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt"
        " %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = with_bos()
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    model = dataclasses.replace(
        target(),
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_config(SPECIAL | {"chat_template": template}),
        stop_tokens=(tokenizer.token_to_id("<|im_end|>"),),
    )
    document = conversation(
        "Why is <b>2 > 1</b>?", "def f(x):\n    return x", " Really? ", "Yes, 1 < 2.", system="So"
    )
    expected: Any = theirs.apply_chat_template(
        document["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    texts, _ = read(tmp_path, model, document)
    count = len(texts[0].tokens)
    assert len(texts) == 1
    assert texts[0].tokens == expected["input_ids"][:count]
    assert texts[0].learn == [bool(mask) for mask in expected["assistant_masks"][:count]]
    assert theirs.decode(expected["input_ids"][count:]) == "\n"


# ---------------------------------------------------------------- other documents


def test_prompts_and_texts_are_encoded_as_they_are(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens(["<s>"])
    start = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[start]
    )
    model = target(tokenizer=tokenizer)

    documents = [
        {
            "prompt": "f(x) =",
            "completion": " x",
            "id": 7,
            "source": "own",
            "name": None,
            "category": ["a"],
        },
        {"prompt": "f(x) =", "completion": " y</s>"},
        {"text": "Once"},
    ]

    texts, _ = read(tmp_path, model, *documents)
    expected = ["<s>f(x) =[ x</s>]", "<s>f(x) =[ y</s>]", "[<s>Once</s>]"]
    assert [marked(text, model) for text in texts] == expected

    endless = dataclasses.replace(model, stop_tokens=())
    texts, dropped = read(tmp_path, endless, *documents, {"prompt": "f(x) =", "completion": ""})
    expected = ["<s>f(x) =[ x]", "<s>f(x) =[ y</s>]", "[<s>Once]"]
    assert [marked(text, endless) for text in texts] == expected
    assert dropped == {"nothing to learn": 1}


def test_the_hash_of_a_document_is_that_of_its_fields_without_labels(tmp_path: Path) -> None:
    rows = [
        '{"completion": "é", "prompt": "a", "id": 1}',
        '{"prompt": "a", "completion": "\\u00e9", "id": 2}',
        '{"messages": [{"content": "b", "role": "user"}, {"role": "assistant", "content": "c"}]}',
    ]

    texts, dropped = read(tmp_path, target(), *rows)
    canonical = [
        '{"completion":"é","prompt":"a"}',
        '{"messages":[{"content":"b","role":"user"},{"content":"c","role":"assistant"}]}',
    ]

    assert [text.document for text in texts] == [
        int(hashlib.sha256(line.encode()).hexdigest()[:16], 16) for line in canonical
    ]
    assert dropped == {"duplicate": 1}


def test_long_texts_are_cut_and_a_text_continues(tmp_path: Path) -> None:
    model = target()
    rows = [
        {"prompt": "abc", "completion": "defg"},
        {"prompt": "abcde", "completion": "f"},
        {"text": "abcdefghijk"},
        {"text": "abcdefghij"},
        {"text": "abcdefghi"},
        {"text": ""},
    ]

    texts, dropped = read(tmp_path, model, *rows, length=5)
    expected = [
        "abc[de]", "[abcde]", "[fghij]", "[k</s>]", "[abcde]", "[fghij]", "[abcde]", "[fghi</s>]"
    ]  # fmt: skip
    assert [marked(text, model) for text in texts] == expected
    assert dropped == {"no room": 1, "nothing to learn": 1}
    assert len({text.document for text in texts[1:4]}) == 1

    with pytest.raises(
        ValueError,
        match=r"^no document is left to learn from: duplicate \(1\), no room \(1\); give",
    ):
        read(tmp_path, model, rows[1], rows[1], length=5)


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    model = target()
    paths = []
    for name in ("b", "a"):
        path = tmp_path / name
        path.write_text(f'{{"text": "{name}"}}\n{{"text": "both"}}')
        paths.append(path)
    dropped: Counter[str] = Counter()
    texts = read_documents(paths, model, length=9, dropped=dropped)
    assert [marked(text, model) for text in texts] == ["[b</s>]", "[both</s>]", "[a</s>]"]
    assert dropped == {"duplicate": 1}


def test_the_conversations_of_the_examples_are_read() -> None:
    path = Path(__file__).parent.parent.parent / "examples" / "data" / "conversations.jsonl"
    model = dataclasses.replace(target(), max_positions=10_000)
    dropped: Counter[str] = Counter()
    assert len(list(read_documents([path], model, length=10_000, dropped=dropped))) == 200
    assert dropped == {}


# ---------------------------------------------------------------- prompts to answer


def test_the_target_answers_the_first_question(tmp_path: Path) -> None:
    model = target()
    greeting = {"role": "assistant", "content": "Hi!"}
    rows = [
        conversation(*TURNS, system="Be brief."),
        conversation("Why?"),
        conversation("Why?", "Because."),
        {"messages": [greeting, *conversation("Why?", "So.")["messages"]]},
        {"prompt": "f(x) ="},
        {"prompt": "f(x) =", "completion": " x"},
        {"prompt": ""},
        {"text": "Once upon"},
        {"text": "Once more"},
        {"prompt": "x" * 100},
    ]

    dropped: Counter[str] = Counter()
    path = written(tmp_path, *rows)
    prompts = read_prompts_to_answer([path], model, length=100, dropped=dropped, opening=4)
    assert model.tokenizer is not None
    assert [model.tokenizer.decode(tokens, skip_special_tokens=False) for tokens, _ in prompts] == [
        "<s>system\nBe brief.</s>\n<s>user\nWhy?</s>\n<s>assistant\n",
        "<s>user\nWhy?</s>\n<s>assistant\n",
        "<s>assistant\nHi!</s>\n<s>user\nWhy?</s>\n<s>assistant\n",
        "f(x) =",
        "Once",
    ]
    assert dropped == {"duplicate": 3, "nothing to learn": 1, "no room": 1}

    texts, _ = read(tmp_path, model, rows[0])
    assert prompts[0][1] == texts[0].document


# ---------------------------------------------------------------- what is refused

GOOD = '{"text": "Once"}'
SHOWN = (
    "expected an object with 'messages', with 'prompt' and 'completion', or with 'text'; it may"
    " have id, source, "
)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", rf"not JSON \(.*\); {SHOWN}"),
        ("[]", f"not an object; {SHOWN}"),
        ('{"id": 1}', rf"the fields are \[\]; {SHOWN}"),
        ('{"text": "a", "score": 5}', rf"the fields are \['text', 'score'\]; {SHOWN}"),
        ('{"completion": "a"}', rf"the fields are \['completion'\]; {SHOWN}"),
        ('{"text": "a", "prompt": "b"}', rf"the fields are \['text', 'prompt'\]; {SHOWN}"),
        ('{"text": 5}', "'text' is 5; expected a text"),
        ('{"prompt": "a", "completion": null}', "'completion' is None; expected a text"),
        (
            '{"text": "\\ud800"}',
            r"'\\ud800' is not a character of UTF-8 by itself; give text in UTF-8",
        ),
        ('{"messages": "a"}', "messages are 'a'; expected a list of turns such as"),
        (
            '{"messages": [{"role": "tool", "content": "a"}]}',
            "message 1 has the role 'tool'; expected system, user",
        ),
        (
            '{"messages": [{"role": "user", "content": ["a"]}]}',
            r"message 1 has the content \['a'\]; expected a text",
        ),
        (
            (
                '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content":'
                ' "a"}]}'
            ),
            "the assistant answers nothing; give an answer, or use --rewrite",
        ),
        ('{"prompt": "a"}', "the prompt has no 'completion'; give one, or use --rewrite"),
    ],
)
def test_a_line_of_another_form_is_refused(tmp_path: Path, line: str, says: str) -> None:
    path = written(tmp_path, GOOD, line)
    with pytest.raises(ValueError, match=f"^{path} line 2: {says}") as caught:
        read_documents([path], target(), length=9, dropped=Counter())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "target has no chat template; give 'prompt' and 'completion', or 'text'"),
        ("{{ raise_exception('never') }}", r"the chat template does not take \[.*: never"),
        ("{% if %}", "the chat template is not valid: line 1"),
    ],
)
def test_a_conversation_needs_a_template_that_takes_it(
    tmp_path: Path, template: str | None, says: str
) -> None:
    model = target(template)
    with pytest.raises(ValueError, match=f"own.jsonl line 2: {says}"):
        read(tmp_path, model, GOOD, conversation(*TURNS))
    path = written(tmp_path, GOOD, conversation("Why?"))
    with pytest.raises(ValueError, match=f"own.jsonl line 2: {says}"):
        read_prompts_to_answer([path], model, length=9, dropped=Counter())


def test_files_that_hold_no_lines_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(ValueError, match=f"own.jsonl holds no lines; {SHOWN}.* on every line"):
        read_documents([path], target(), length=9, dropped=Counter())
    np.savez(tmp_path / "own.npz", tokens=np.arange(1000))
    with pytest.raises(ValueError, match=r"own.npz is not a text file in UTF-8 \(byte \d+\)"):
        read_documents([tmp_path / "own.npz"], target(), length=9, dropped=Counter())
    with pytest.raises(IsADirectoryError):
        read_documents([tmp_path], target(), length=9, dropped=Counter())


def test_targets_and_lengths_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "Once"}, conversation("Why?"))
    model = target()
    for length in (1, 513):
        with pytest.raises(
            ValueError, match=f"length is {length}; expected 2 to the 512 positions of target"
        ):
            read_documents([path], model, length=length, dropped=Counter())

    for opening in (0, -1):
        with pytest.raises(ValueError, match=f"opening is {opening}; expected at least 1 token"):
            read_prompts_to_answer([path], model, length=9, dropped=Counter(), opening=opening)
    with pytest.raises(ValueError, match=r"no document is left to learn from: no room \(2\)"):
        read_prompts_to_answer([path], model, length=3, dropped=Counter())

    path = written(tmp_path, {"messages": [{"role": "system", "content": "Be brief."}]})
    with pytest.raises(
        ValueError, match=r"own\.jsonl line 1: the conversation has no turn of the user; give one"
    ):
        read_prompts_to_answer([path], model, length=9, dropped=Counter())

    bare = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(
        ValueError, match="target has no tokenizer, which documents need; give a target with one"
    ):
        read(tmp_path, bare, GOOD)
