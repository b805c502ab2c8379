"""Conversations of a chat model: tokens, masks, numbers, and dropped and refused ones."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import pytest
import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import eagle3_jax as e3
from eagle3_jax.text.template import ChatTemplate
from eagle3_jax.training.own_text import Conversations, OwnTextConfig, answers, around_user
from eagle3_jax.training.texts import Text, document_hash

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = [*string.ascii_lowercase, "Ġ", "Ċ"]  # the last two are the space and the line feed
SPECIAL = ["<|im_start|>", "<|im_end|>"]
END = len(LETTERS) + 1
SHORT = {"length": 120, "user_length": 40, "slots": 3, "user_temperature": 1.0}


def chat_model(
    template: str = CHATML, *, stop_tokens: tuple[int, ...] = (END, 0, 1)
) -> e3.LoadedTarget:
    """Returns a random target whose tokens are letters.

    It stops at `a` and `b`, because random text rarely ends.
    """
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    target = tiny.target(len(LETTERS) + len(SPECIAL))
    return dataclasses.replace(
        target, tokenizer=tokenizer, chat_template=ChatTemplate(template), stop_tokens=stop_tokens
    )


TARGET = chat_model()
DECODER = e3.SpeculativeDecoder(TARGET)


def text_of(tokens: list[int]) -> str:
    return TARGET.tokenizer.decode(tokens, skip_special_tokens=False)  # type: ignore[union-attr]


def user_turn(text: Text) -> str:
    """Returns the user's text of a conversation."""
    return (
        text_of(text.tokens)
        .removeprefix("<|im_start|>user\n")
        .partition("<|im_end|>\n<|im_start|>assistant\n")[0]
    )


def repeats(tokens: list[int]) -> bool:
    last = tokens[-64:]
    return len(last) == 64 and len(set(zip(last, last[1:], last[2:], last[3:], strict=False))) < 26


def test_a_text_is_the_prompt_that_serving_encodes_and_the_answer_of_the_target() -> None:
    texts = Conversations(TARGET, OwnTextConfig(greedy_share=1.0, **SHORT), 24)
    conversations = list(texts)
    assert len(conversations) >= 8 and len(conversations) + texts.dropped.total() == 24

    for text in conversations:
        turn = user_turn(text)
        prompt = TARGET.apply_chat_template([{"role": "user", "content": turn}])
        answer = DECODER.generate(prompt, max_new_tokens=120 - len(prompt)).tokens[0]
        assert text.tokens == prompt + answer and not repeats(answer)
        assert text.learn == [False] * len(prompt) + [True] * len(answer)
        assert text.document == document_hash(turn)
        assert turn == turn.strip() and 1 <= len(turn) <= 40

    assert len({text.document for text in conversations}) == len(conversations)


def test_a_conversation_depends_on_its_number_and_the_seed_greedy() -> None:
    config = OwnTextConfig(**SHORT)
    together = sorted(Conversations(TARGET, config, 16, first=3))
    parts = [Conversations(TARGET, dataclasses.replace(config, slots=5), 6, first=13)]
    parts += [Conversations(TARGET, config, 10, first=3)]
    assert sorted(text for part in parts for text in part) == together
    assert (
        sorted(Conversations(TARGET, dataclasses.replace(config, seed=1), 16, first=3)) != together
    )


def test_a_turn_is_what_the_target_writes_after_the_prefix_and_is_kept_once() -> None:
    prefix, _ = around_user(TARGET)
    assert text_of(prefix) == "<|im_start|>user\n"
    endless = e3.SpeculativeDecoder(TARGET, stop_tokens=())
    greedy = endless.generate(prefix, max_new_tokens=40).tokens[0]

    length = next(index for index in range(6, 40) if greedy[index] not in greedy[:index])
    target = chat_model(stop_tokens=(greedy[length],))
    almost_greedy = SHORT | {"user_temperature": 1e-6, "user_length": length}
    texts = Conversations(
        target, OwnTextConfig(greedy_share=0.0, temperature=2.0, **almost_greedy), 5
    )
    (text,) = texts
    assert user_turn(text) == text_of(greedy[:length]).strip()
    assert texts.dropped == {"duplicate": 4}

    for limit, reason in ((length - 1, "too long"), (length, None)):
        config = OwnTextConfig(**almost_greedy | {"user_length": limit})
        conversation = Conversations(target, config, 1)
        assert (len(list(conversation)), conversation.dropped["too long"]) == (
            (0, 1) if reason else (1, 0)
        )

    at_once = Conversations(chat_model(stop_tokens=(greedy[0],)), OwnTextConfig(**almost_greedy), 2)
    assert (list(at_once), at_once.dropped) == ([], {"too short": 2})


def test_half_of_the_turns_begin_with_an_opening() -> None:
    openings = ("tell me ", "how do ")
    config = OwnTextConfig(openings=openings, greedy_share=0.0, **SHORT | {"user_temperature": 3.0})
    turns = [user_turn(text) for text in Conversations(TARGET, config, 64)]
    begun = [sum(turn.startswith(opening) for turn in turns) for opening in openings]
    assert len(turns) >= 32 and min(begun) >= 5
    assert 0.3 < sum(begun) / len(turns) < 0.7


def test_prompts_of_others_are_answered_and_what_repeats_is_left_out() -> None:
    target = dataclasses.replace(TARGET, stop_tokens=())
    prompts = [*tiny.random_prompts(6, len(LETTERS), seed=1), [1] * 120]
    config = OwnTextConfig(greedy_share=1.0, **SHORT)
    results = dict(answers(target, iter(prompts), config))

    decoder = e3.SpeculativeDecoder(target)
    expected = [
        decoder.generate(prompt, max_new_tokens=120 - len(prompt)).tokens[0]
        for prompt in prompts[:6]
    ]
    assert results == {
        index: [] if repeats(answer) else answer for index, answer in enumerate([*expected, []])
    }
    assert any(map(repeats, expected)), "a greedy random model repeats itself"

    sampled = OwnTextConfig(greedy_share=0.0, temperature=3.0, **SHORT)
    first, second = (dict(answers(target, [prompts[0]] * 2, sampled)) for _ in range(2))
    assert first == second and first[0] != first[1]
    assert len(first[0]) == 120 - len(prompts[0])


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (dataclasses.replace(TARGET, tokenizer=None), {}, "has no tokenizer"),
        (dataclasses.replace(TARGET, chat_template=None), {}, "has no chat template"),
        (
            chat_model(CHATML.replace("message.content", "message.content | upper")),
            {},
            "does not write a user's text",
        ),
        (chat_model("{{ messages[0].content }}<|im_end|>"), {}, "does not write a user's text"),
        (
            chat_model("user {{ messages[0].content }}\nassistant "),
            {},
            "ends a user's text by 'Ċ', which is no",
        ),
        (TARGET, {"length": 45}, "length is 45; expected at least 47"),
        (TARGET, {"length": 600}, "length is 600, and target holds 512 positions"),
        (
            TARGET,
            {"openings": ("a" * 40,)},
            "has 40 tokens; expected fewer than the 40 of user_length",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(
    target: e3.LoadedTarget, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        list(Conversations(target, OwnTextConfig(**SHORT | options), 1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user_length", 3),
        ("user_temperature", 0.0),
        ("temperature", -1.0),
        ("greedy_share", 1.5),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; expected"):
        OwnTextConfig(**{name: value})
