"""The formats of prompt files: benchmark questions with a chat template, texts, and token ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from eagle3_jax import LoadedTarget, load_target
from eagle3_jax.prompts import Prompt, Renderer, read_prompts

ROOT = Path(__file__).parent.parent.parent
PLAIN = Renderer("plain text")
QUESTION = {"question_id": 7, "category": "math", "turns": ["What is 1 + 1?", "And 2 + 2?"]}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target()


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_the_three_formats_are_read(tmp_path: Path, target: LoadedTarget) -> None:
    path = written(
        tmp_path,
        QUESTION | {"reference": ["2\n#### 2", "4"]},
        {"prompt": "def f(x):", "max_new_tokens": 5},
        "",
        {"prompt_ids": [1, 2, 3], "name": "three", "reference": "abc"},
    )
    question, text, ids = read_prompts(path, target, PLAIN, max_new_tokens=9)
    tokens = target.tokenizer.encode("What is 1 + 1?").ids  # type: ignore[union-attr]
    assert question == Prompt("7", "math", tokens, "What is 1 + 1?", "2\n#### 2", 9)
    assert (text.name, text.category, text.text, text.max_new_tokens) == (
        "questions.jsonl line 2",
        "questions",
        "def f(x):",
        5,
    )
    assert ids == Prompt("three", "questions", [1, 2, 3], None, "abc", 9)


def test_questions_go_through_the_chat_template_and_texts_do_not(tmp_path: Path, target: LoadedTarget) -> None:
    path = written(tmp_path, QUESTION, {"prompt": "def f(x):"})
    asked: list[str] = []

    def chat(question: str) -> list[int]:
        asked.append(question)
        return [5, 6]

    question, text = read_prompts(path, target, Renderer("template", chat), max_new_tokens=4)
    assert asked == ["What is 1 + 1?"]
    assert question.tokens == [5, 6] != text.tokens


def test_a_chat_template_is_found_and_applied(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "eagle3_jax/assets/target")
    assert Renderer.of(ROOT / "eagle3_jax/assets/target").chat is None
    tokenizer.chat_template = "Q: {{ messages[0]['content'] }} A:{% if add_generation_prompt %} yes{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    renderer = Renderer.of(tmp_path)
    assert renderer.chat is not None
    assert renderer.chat("why?") == tokenizer.encode("Q: why? A: yes")


def test_without_transformers_the_report_says_that_questions_are_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    renderer = Renderer.of(tmp_path)
    assert renderer.chat is None
    assert "transformers, which is not installed" in renderer.note


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not an object"),
        ({"text": "x"}, "line 2: expected an object with 'turns'"),
        ({"turns": "x", "question_id": 1, "category": "c"}, "line 2: 'turns' must be a list"),
        ({"turns": [], "question_id": 1, "category": "c"}, "line 2: 'turns' must be a list"),
        ({"turns": ["x"], "category": "c"}, "line 2: a question with 'turns' needs 'question_id'"),
        ({"turns": ["x"], "question_id": 1}, "line 2: a question with 'turns' needs 'category'"),
        (QUESTION | {"reference": 3}, "line 2: 'reference' must be"),
        ({"prompt": "x", "prompt_ids": [1]}, "line 2: .*either 'prompt' or 'prompt_ids'"),
        ({"prompt_ids": [4096]}, "line 2: prompt token 4096"),
        ({"prompt_ids": []}, "line 2: the prompt is empty"),
        ({"prompt": ""}, "line 2: the prompt is empty"),
        ({"prompt_ids": [1] * 510}, "line 2: the prompt has 510 tokens and is given 9 more"),
        ({"prompt_ids": [1] * 600}, "line 2: the prompt has 600 tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, target: LoadedTarget, row: object, message: str) -> None:
    path = written(tmp_path, {"prompt": "x"}, row)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path, target, PLAIN, max_new_tokens=9)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_refused(tmp_path: Path, target: LoadedTarget) -> None:
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(written(tmp_path), target, PLAIN, max_new_tokens=9)
