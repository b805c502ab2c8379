"""Chat templates render as in transformers; each turn generates from the rendered tokens."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from chat_templates import SPECIAL, TEMPLATES, with_bos
from models_on_disk import write_bytes_target

import eagle3_jax as e3
from eagle3_jax import Chat, ChatTemplate, load_target
from eagle3_jax.conversion import CheckpointError
from eagle3_jax.conversion.sidecars import tokenizer_config_of
from eagle3_jax.files.sources import bundled
from eagle3_jax.text.template import check_messages

# ---------------------------------------------------------------- templates

QUESTION = {"role": "user", "content": " Why is <b>2 > 1</b>?\n"}
CONVERSATIONS = {
    "a question": [QUESTION],
    "with a system message": [{"role": "system", "content": "Be “brief”."}, QUESTION],
    "of two turns": [
        QUESTION,
        {"role": "assistant", "content": " Because. "},
        {"role": "user", "content": "Really?"},
    ],
    "of two questions": [QUESTION, {"role": "user", "content": "Really?"}],
    "of the assistant": [{"role": "assistant", "content": "Hello."}],
}


@pytest.mark.torch
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str, shipped: e3.LoadedTarget) -> None:
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    tokenizer = with_bos()
    ours = ChatTemplate.from_config(SPECIAL | {"chat_template": TEMPLATES[name]})
    assert ours is not None
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATES[name], bos_token="<s>", eos_token="</s>"
    )
    target = dataclasses.replace(shipped, tokenizer=tokenizer, chat_template=ours)
    refused = 0
    for messages in CONVERSATIONS.values():
        for prompt in (True, False):
            try:
                text = theirs.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt
                )
            except TemplateError as error:
                refused += 1
                with pytest.raises(
                    ValueError,
                    match=f"the chat template does not take .*: {re.escape(str(error))}$",
                ):
                    ours.render(messages, add_generation_prompt=prompt)
                continue
            assert ours.render(messages, add_generation_prompt=prompt) == text
            if prompt:
                ids = theirs.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False
                )
                assert target.apply_chat_template(messages) == ids
                assert ids[:2] != tokenizer.encode("").ids * 2
    assert refused == {"Mistral": 4, "Gemma": 6}.get(name, 0)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("files", "rendered"),
    [
        (
            {"tokenizer_config.json": {"chat_template": "one {{ bos_token }}", "bos_token": "<a>"}},
            "one <a>",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}
                    ]
                }
            },
            "d",
        ),
        (
            {"tokenizer_config.json": {"chat_template": "one",
                                       "bos_token": {"content": "<a>", "__type": "AddedToken"}},
             "chat_template.jinja": "two\r\n{{ bos_token }}\n"},
            "two\n<a>",
        ),
        (
            {"tokenizer_config.json": {"chat_template": "{{ bos_token }}{{ unk_token }}",
                                       "unk_token": "<a>"},
             "special_tokens_map.json": {"bos_token": {"content": "<b>", "lstrip": False},
                                         "unk_token": "<c>"}},
            "<b><c>",
        ),
        (
            {"tokenizer_config.json": {"chat_template": "{{ bos_token }}", "bos_token": "<a>",
                                       "added_tokens_decoder": {}},
             "special_tokens_map.json": {"bos_token": "<b>"}},
            "<a>",
        ),
        ({"chat_template.jinja": "alone"}, "alone"),
    ],
    ids=[
        "a field", "a list", "a file", "a map of tokens", "a map that is not read", "nothing else",
    ],
)  # fmt: skip
def test_a_directory_has_the_template_that_transformers_finds(
    tmp_path: Path, files: dict[str, Any], rendered: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    shutil.copy(bundled("target") / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(
            (content if isinstance(content, str) else json.dumps(content)).encode()
        )
    ours = ChatTemplate.from_config(tokenizer_config_of(tmp_path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours is not None
    assert ours.render([QUESTION]) == rendered
    assert theirs.apply_chat_template([QUESTION], tokenize=False) == rendered


def test_a_file_of_processors_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    assert tokenizer_config_of(tmp_path) == {}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "field", "bos_token": "<s>"}'
    )
    assert tokenizer_config_of(tmp_path) == {"chat_template": "json", "bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(
        CheckpointError, match=r"chat_template\.jinja is not a text file in UTF-8 \(byte 0\)"
    ):
        tokenizer_config_of(tmp_path)


def test_a_target_is_loaded_with_its_template(tmp_path: Path, shipped: e3.LoadedTarget) -> None:
    assert shipped.chat_template is None
    folder = write_bytes_target(tmp_path / "target")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert load_target(folder).chat_template == ChatTemplate("{{ messages[0].content }}")


@pytest.mark.parametrize(
    "absent", [{}, {"chat_template": None}, {"chat_template": ""}, {"chat_template": []}]
)
def test_a_configuration_without_a_template_gives_none(absent: dict[str, Any]) -> None:
    assert ChatTemplate.from_config(absent | {"bos_token": "<s>"}) is None


@pytest.mark.parametrize(
    "wrong", [5, {"default": "x"}, [{"name": "rag", "template": "x"}], ["default"]]
)
def test_a_template_of_another_form_is_refused(wrong: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"^chat_template is .*; expected a text, or a list with a template 'default'$",
    ):
        ChatTemplate.from_config({"chat_template": wrong})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a\n{% if %}", "the chat template is not valid: line 2: Expected an expression"),
        ("{{ 1 | nothing }}", "the chat template is not valid: line 1: No filter named 'nothing'"),
        (
            "{{ messages.first.content }}",
            r"does not take \[\{'role'.*'.*list object' has no attribute 'first'",
        ),
        ("{{ absent.content }}", ": 'absent' is undefined"),
        ("{{ raise_exception('no\nmore') }}", ": no"),
        ("{{ messages[0].content + 1 }}", ": can only concatenate str"),
        (
            "{{ ().__class__.__base__.__subclasses__() }}",
            ": access to attribute '__class__' of 'tuple' object is",
        ),
        ("{{ messages.append(1) }}", "is not safely callable|is unsafe"),
        ("{% for a in range(10**9) %}{% endfor %}", ": Range too big"),
        ("{% include 'file' %}", ": no loader for this environment specified"),
    ],
)  # fmt: skip
def test_a_template_that_fails_is_one_line(source: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        ChatTemplate(source).render([QUESTION])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], r"messages are \[\]; expected a list of turns such as"),
        ("Why?", "messages are 'Why\\?'; expected a list"),
        (QUESTION, "messages are {'role'.*; expected a list"),
        ([QUESTION, "Why?"], "message 2 is 'Why\\?'; expected a list"),
        ([{"role": "user"}], "message 1 is {'role': 'user'}; expected"),
        ([QUESTION | {"name": "Ann"}], "message 1 is .*'name'.*; expected"),
        (
            [QUESTION | {"role": "tool"}],
            "message 1 has the role 'tool'; expected system, user, assistant",
        ),
        ([QUESTION | {"role": ["user"]}], r"message 1 has the role \['user'\]; expected"),
        (
            [QUESTION | {"content": [{"type": "text", "text": "a"}]}],
            r"message 1 has the content \[.*expected a text",
        ),
    ],
)
def test_messages_of_another_form_are_refused(messages: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        check_messages(messages)
    assert "\n" not in str(caught.value)


def test_a_target_without_a_template_or_a_tokenizer_is_refused(shipped: e3.LoadedTarget) -> None:
    with pytest.raises(
        ValueError, match="the bundled target has no chat template; give the prompt as text"
    ):
        shipped.apply_chat_template([QUESTION])
    with pytest.raises(ValueError, match="the bundled target has no chat template"):
        Chat(e3.SpeculativeDecoder(shipped))
    bare = dataclasses.replace(shipped, chat_template=ChatTemplate("x"), tokenizer=None)
    with pytest.raises(
        ValueError, match="the bundled target has no tokenizer; give the prompt as token ids"
    ):
        bare.apply_chat_template([QUESTION])


# ---------------------------------------------------------------- conversations


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> e3.SpeculativeDecoder:
    """Returns a decoder of bytes, so answers are also cut inside characters.

    A token of its first answer ends them.
    """
    folder = write_bytes_target(tmp_path_factory.mktemp("chat") / "target")
    (folder / "chat_template.jinja").write_text(TEMPLATES["SmolLM2"])
    target = load_target(folder)
    prompt = target.apply_chat_template(asked("Why?", system="Be kind."))
    stop = e3.SpeculativeDecoder(target).generate(prompt, max_new_tokens=12).tokens[0][8]
    return e3.SpeculativeDecoder(target, e3.drafters.NGram(2), stop_tokens=[stop])


def asked(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_turn_is_a_generation_of_the_rendered_tokens(
    decoder: e3.SpeculativeDecoder, streamed: bool, temperature: float
) -> None:
    sampling = e3.SamplingParams(temperature=temperature)
    chat = Chat(decoder, system="Be kind.", max_new_tokens=12, sampling=sampling, seed=5)
    messages = asked(system="Be kind.")
    for question in ("Why?", "And then?"):
        seed = 5 + len(messages)
        messages += asked(question)
        prompt = decoder.target.apply_chat_template(messages)
        expected = decoder.generate(prompt, max_new_tokens=12, sampling=sampling, seed=seed).rows[0]

        if streamed:
            chunks = list(chat.stream(question))
            assert [token for chunk in chunks for token in chunk.tokens] == expected.tokens
            assert chunks[-1].finish_reason is expected.finish_reason
        else:
            assert chat.send(question) == expected

        if not temperature and question == "Why?":
            assert expected.finish_reason is e3.FinishReason.STOP
        messages += [{"role": "assistant", "content": expected.text or ""}]
        assert chat.messages == messages


def test_an_answer_that_is_cut_stays_as_far_as_it_was_written(
    decoder: e3.SpeculativeDecoder,
) -> None:
    chat = Chat(decoder, max_new_tokens=12)
    interrupted = chat.stream("Why?")
    written = "".join(next(interrupted).text for _ in range(3))
    with pytest.raises(KeyboardInterrupt):
        interrupted.throw(KeyboardInterrupt)
    assert chat.messages == asked("Why?", written)

    cut = chat.stream("And then?")
    next(cut)
    cut.close()
    first = decoder.generate(
        decoder.target.apply_chat_template(asked("Why?", written, "And then?")), max_new_tokens=1
    )
    assert chat.messages == asked("Why?", written, "And then?", first.texts[0] or "")

    chat.stream("Never read")
    assert len(chat.messages) == 4

    # The conversation goes on from there.
    prompt = decoder.target.apply_chat_template([*chat.messages, *asked("So?")])
    assert chat.send("So?").tokens == decoder.generate(prompt, max_new_tokens=12).tokens[0]


def test_a_turn_that_does_not_fit_is_refused_and_not_kept(decoder: e3.SpeculativeDecoder) -> None:
    chat = Chat(decoder, max_new_tokens=3)
    most = decoder.target.max_positions
    chat.send("Why?")
    before = list(chat.messages)

    for send in (chat.send, chat.stream):
        with pytest.raises(
            ValueError,
            match=rf"the conversation has \d+ tokens with this question, .*{most} positions",
        ):
            send("x" * (most - 100))
        with pytest.raises(ValueError, match="far more tokens than"):
            send("x" * (100 * most))
        with (
            tiny.unchecked(),
            pytest.raises(ValueError, match=r"message 3 has the content 5; expected a text"),
        ):
            send(5)  # type: ignore[arg-type]

    assert chat.messages == before
    assert chat.send("So?").tokens


def test_a_template_that_takes_no_system_message_refuses_it_at_once(
    decoder: e3.SpeculativeDecoder,
) -> None:
    target = dataclasses.replace(decoder.target, chat_template=ChatTemplate(TEMPLATES["Gemma"]))
    with pytest.raises(ValueError, match=r"does not take .*: System role not supported"):
        Chat(e3.SpeculativeDecoder(target), system="Be kind.")
