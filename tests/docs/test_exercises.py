"""Exercises of the notebooks: each check accepts its answer and rejects wrong functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext", reason="the extra `notebooks` is not installed")
# ruff: noqa: E402

import first_cell
import jax
from exercises import checked

pytestmark = pytest.mark.torch

FOLDER = Path(first_cell.__file__).parent
USED = re.compile(r"^(?:\w+) = checked\((\w+), (\w+), (\w+)\)$", re.MULTILINE)

# The exercises by notebook, and wrong functions that a reader may write.
WRONG: dict[str, dict[str, list[str]]] = {
    "02": {
        "acceptance": [
            "return p / q",
            "return np.minimum(1, q / p)",
            "return p",
        ],
        "residual": [
            "return p",
            "return np.maximum(p - q, 0)",
            "return np.abs(p - q) / np.abs(p - q).sum()",
            "return np.exp(np.maximum(p - q, 0)) / np.exp(np.maximum(p - q, 0)).sum()",
        ],
        "verify_chain": [
            """
            for k, x in enumerate(tokens):
                if not accept[k] * q[k, x] < p[k, x]:
                    return [*tokens[:k], draw(p[k], choose)]
            return [*tokens, draw(p[len(tokens)], choose)]
            """,
            """
            for k, x in enumerate(tokens):
                if not accept[k] * q[k, x] < p[k, x]:
                    return [*tokens[:k], draw(np.maximum(p[k] - q[k], 0), choose)]
            return [*tokens, draw(q[-1], choose)]
            """,
            """
            for k, x in enumerate(tokens):
                if not accept[k] * q[k, x] < p[k, x]:
                    return [*tokens[:k], draw(np.maximum(p[k] - q[k], 0), choose)]
            return list(tokens)
            """,
            """
            for k, x in enumerate(tokens):
                if not accept[k] * p[k, x] < q[k, x]:
                    return [*tokens[:k], draw(np.maximum(p[k] - q[k], 0), choose)]
            return [*tokens, draw(p[len(tokens)], choose)]
            """,
        ],
    },
    "03": {
        "head_tokens": [
            "return ids",
            "return [root, *ids[:-1]]",
            "return [*ids[1:]]",
        ],
        "head_input": [
            """
            of_token = norm(embedded, w["midlayer.input_layernorm.weight"])
            of_feature = norm(stream, w["midlayer.hidden_norm.weight"])
            return of_token + of_feature
            """,
            """
            of_token = norm(embedded, w["midlayer.input_layernorm.weight"])
            of_feature = norm(stream, w["midlayer.hidden_norm.weight"])
            return jnp.concatenate([of_feature, of_token], axis=-1)
            """,
            """
            of_token = norm(embedded, w["midlayer.hidden_norm.weight"])
            of_feature = norm(stream, w["midlayer.input_layernorm.weight"])
            return jnp.concatenate([of_token, of_feature], axis=-1)
            """,
            """
            of_token = norm(embedded, w["midlayer.input_layernorm.weight"])
            return jnp.concatenate([of_token, stream], axis=-1)
            """,
        ],
        "to_target": [
            "return d2t[draft_ids]",
            "return draft_ids",
            "return np.cumsum(d2t)[draft_ids]",
        ],
        "draft_chain": [
            """
            drafted = []
            for depth in range(length):
                best = int(jnp.argmax(logits))
                drafted.append(best)
                output, logits = run(drafted[-1], output, depth)
            return drafted
            """,
            """
            drafted = []
            for depth in range(length):
                best = int(jnp.argmax(logits))
                drafted.append(best + int(d2t[best]))
                _, logits = run(drafted[-1], output, depth)
            return drafted
            """,
            """
            drafted = []
            for depth in range(length):
                best = int(jnp.argmax(logits))
                drafted.append(best + int(d2t[best]))
                output, logits = run(drafted[-1], output, 0)
            return drafted
            """,
            """
            drafted = []
            for depth in range(length):
                output, logits = run(drafted[-1] if drafted else 0, output, depth)
                best = int(jnp.argmax(logits))
                drafted.append(best + int(d2t[best]))
            return drafted
            """,
        ],
    },
}
EXERCISES = [(notebook, name) for notebook, exercises in WRONG.items() for name in exercises]


class Exercise:
    """The cells of one exercise, executed without the cells of the notebook around them."""

    def __init__(self, notebook: str, name: str) -> None:
        (path,) = FOLDER.glob(f"{notebook}_*.py")
        self.name = name
        self.source = path.read_text(encoding="utf-8")
        functions = {node.name: node for node in ast.parse(self.source).body if isinstance(node, ast.FunctionDef)}
        uses = {use[0]: use for use in USED.findall(self.source)}
        _, answer, check = uses[name]
        self.stub = functions[name]
        self.scope: dict[str, Any] = {}
        nodes = ast.parse(self.source).body
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        constants = {
            node.targets[0].id: node
            for node in nodes
            if isinstance(node, ast.Assign)
            if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
        }
        helpers = [(constants | functions)[helper] for helper in HELPERS.get(name, ())]
        self.run(*imports, *helpers, self.stub, functions[answer], functions[check])
        self.answer = self.scope[answer]
        self.check = self.scope[check]

    def run(self, *nodes: ast.stmt) -> None:
        exec(compile(ast.Module([*nodes], []), f"exercise {self.name}", "exec"), self.scope)

    def written(self, body: str) -> Any:
        """Returns the function with another body."""
        arguments = ast.unparse(self.stub.args)
        lines = [line for line in body.splitlines() if line.strip()]
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        source = f"def {self.name}({arguments}):\n" + "\n".join(f"    {line[indent:]}" for line in lines)
        self.run(*ast.parse(source).body)
        return self.scope[self.name]


# Definitions of the notebook that an exercise uses.
HELPERS = {"verify_chain": ["draw"], "head_input": ["EPS", "norm"]}


@pytest.fixture(autouse=True)
def promotion_of_notebooks() -> Iterator[None]:
    """The tests of the library forbid implicit promotion, and a reader's code may use it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize(("notebook", "name"), EXERCISES)
def test_a_check_accepts_the_answer_and_rejects_wrong_functions(
    notebook: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exercise = Exercise(notebook, name)
    empty = exercise.scope[name]
    assert checked(empty, exercise.answer, exercise.check) is exercise.answer
    assert "not filled in yet" in capsys.readouterr().out
    assert checked(exercise.answer, empty, exercise.check) is exercise.answer
    assert "correct" in capsys.readouterr().out
    for body in WRONG[notebook][name]:
        with pytest.raises(AssertionError) as refused:
            checked(exercise.written(body), exercise.answer, exercise.check)
        assert str(refused.value), f"no reason for the reader: {body}"


def test_every_exercise_has_wrong_functions() -> None:
    exercises = [
        (path.name[:2], use[0]) for path in sorted(FOLDER.glob("[0-9]*.py")) for use in USED.findall(path.read_text())
    ]
    assert sorted(exercises) == sorted(EXERCISES)
