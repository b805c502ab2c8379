"""Exercises of the notebooks: each check accepts its answer and rejects wrong functions."""

from __future__ import annotations

import ast
import re
import textwrap
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
USED = re.compile(r"^\w+ = checked\(\s*(\w+), (\w+), (\w+),?\s*\)$", re.MULTILINE)

# The exercises by notebook, and wrong functions that a reader may write: a body, or a part of the
# answer and its replacement.
WRONG: dict[str, dict[str, list[str | tuple[str, str]]]] = {
    "00": {
        "mean_acceptance_length": [
            "return sum(accepted) / len(accepted)",
            "return sum(accepted) + 1",
            "return sum(accepted) / (len(accepted) + 1)",
        ],
    },
    "01": {
        "step_bound": [
            "return num_bytes / bandwidth",
            "return num_bytes / bandwidth + operations / peak",
            "return min(num_bytes / bandwidth, operations / peak)",
        ],
        "best_length": [
            "return len(taus) - 1",
            "return max(range(len(taus)), key=lambda k: taus[k])",
            "return max(range(len(taus)), key=lambda k: taus[k] / verify_costs[k])",
            (
                "return max(range(1, len(taus)), key=lambda k: taus[k] / (verify_costs[k] + k *"
                " draft_cost))"
            ),
            "return max(range(len(taus)), key=lambda k: taus[k] / (verify_costs[k] + draft_cost))",
        ],
    },
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
            ("draw(np.maximum(p[k] - q[k], 0), choose)", "draw(p[k], choose)"),
            ("draw(p[len(tokens)], choose)", "draw(q[-1], choose)"),
            ("[*tokens, draw(p[len(tokens)], choose)]", "list(tokens)"),
            ("accept[k] * q[k, x] < p[k, x]", "accept[k] * p[k, x] < q[k, x]"),
        ],
    },
    "03": {
        "head_tokens": [
            "return ids",
            "return [root, *ids[:-1]]",
            "return [*ids[1:]]",
        ],
        "head_input": [
            ("jnp.concatenate([of_token, of_feature], axis=-1)", "of_token + of_feature"),
            ("[of_token, of_feature]", "[of_feature, of_token]"),
            ("[of_token, of_feature]", "[of_token, stream]"),
            """
            of_token = norm(embedded, w["midlayer.hidden_norm.weight"])
            of_feature = norm(stream, w["midlayer.input_layernorm.weight"])
            return jnp.concatenate([of_token, of_feature], axis=-1)
            """,
        ],
        "to_target": [
            "return d2t[draft_ids]",
            "return draft_ids",
            "return np.cumsum(d2t)[draft_ids]",
        ],
        "draft_chain": [
            ("best + int(d2t[best])", "best"),
            ("output, logits = run", "_, logits = run"),
            ("run(drafted[-1], output, depth)", "run(drafted[-1], output, 0)"),
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
    "04": {
        "cache_mask": [
            ("mask[:, :length] = True", "pass"),
            ("length : length + len(block)", ": len(block)"),
            ("length + len(block)] = block", "length + len(block)] = True"),
            "return np.tril(np.ones((len(block), capacity), bool))",
        ],
        "commit": [
            "return keys, length + len(path)",
            "return keys, length + len(path) - 1",
            ("keys[length + np.array(path)]", "keys[path]"),
            ("after[length : length + len(path)]", "after[: len(path)]"),
        ],
    },
    "05": {
        "keep_best": [
            (
                'np.sort(np.argsort(-np.asarray(scores), kind="stable")[:count])',
                "np.argsort(-scores)[:count]",
            ),
            ("np.array([number[int(parents[entry])] for entry in chosen])", "parents[chosen]"),
            """
            chosen = np.sort(np.argsort(scores, kind="stable")[:count])
            return chosen, parents[chosen] + 1
            """,
            """
            chosen = np.sort(len(scores) - 1 - np.argsort(-scores[::-1], kind="stable")[:count])
            number = {-1: 0} | {int(entry): node for node, entry in enumerate(chosen, start=1)}
            return chosen, np.array([number.get(int(parents[entry]), 0) for entry in chosen])
            """,
        ],
        "ancestors": [
            "return np.tril(np.ones((len(parents), len(parents)), bool))",
            ("mask[node] |= mask[parent]", "mask[node, parent] = True"),
            """
            mask = np.zeros((len(parents), len(parents)), bool)
            for node, parent in enumerate(parents):
                if parent >= 0:
                    mask[node] = mask[parent]
                    mask[node, parent] = True
            return mask
            """,
        ],
        "accepted_path": [
            (
                "return [node for node in range(1, len(tokens)) if tokens[node] =="
                " choice[parents[node]]]"
            ),
            ("current = node", "break"),
            (" and tokens[node] == choice[current]", ""),
        ],
        "generate": [
            (
                "[*(int(tokens[node]) for node in path), int(choice[end])]",
                "[int(tokens[node]) for node in path]",
            ),
            ("pair.commit([0, *path])", "pair.commit(path)"),
            (
                "pair.commit([0, *path])\n        pair.observe(added)",
                "pair.observe(added)\n        pair.commit([0, *path])",
            ),
            ("ancestors(parents)", "np.tril(np.ones((len(tokens), len(tokens)), bool))"),
            ("new[:max_new_tokens]", "new"),
        ],
    },
    "06": {
        "unit_in_last_place": [
            "return values * 2.0**-8",
            "return 2.0 ** (np.floor(np.log2(values)) - 8)",
            "return 2.0 ** (np.round(np.log2(values)) - 7)",
        ],
        "z_score": [
            "return scores[np.arange(len(tokens)), tokens].sum() / np.sqrt(len(tokens))",
            """
            observed = scores[np.arange(len(tokens)), tokens]
            mean = scores.mean(axis=1)
            return (observed - mean).sum() / np.sqrt(scores.var(axis=1).sum())
            """,
            (" - mean**2", ""),
            ("(observed - mean).sum()", "(observed - mean).mean()"),
        ],
    },
    "07": {
        "rates": [
            (
                "return sum(counts) / rounds, sum(counts) / (rounds * len(counts)), [count / rounds"
                " for count in counts]"
            ),
            ("[rounds, *counts[:-1]]", "[rounds] * len(counts)"),
            ("accepted / (rounds * len(counts))", "accepted / rounds"),
        ],
    },
}
EXERCISES = [(notebook, name) for notebook, exercises in WRONG.items() for name in exercises]


class Exercise:
    """The cells of one exercise and the definitions that they use, and no more of the notebook."""

    def __init__(self, notebook: str, name: str) -> None:
        (path,) = FOLDER.glob(f"{notebook}_*.py")
        self.source = path.read_text(encoding="utf-8")
        self.name = name
        self.uses = {use[0]: use for use in USED.findall(self.source)}

        nodes = ast.parse(self.source).body
        self.definitions = {
            node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        assignments = [node for node in nodes if isinstance(node, ast.Assign)]
        names = [ast.unparse(node.targets[0]) for node in assignments]
        self.constants = {
            name: node for name, node in zip(names, assignments, strict=True) if name.isupper()
        }

        self.scope: dict[str, Any] = {}
        self.run(*(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)))

        _, answer, check = self.uses[name]
        for function in (name, answer, check):
            self.define(function)
        self.answer = self.scope[answer]
        self.check = self.scope[check]

    def define(self, name: str) -> None:
        """Executes a definition of the notebook, after the definitions that it uses."""
        if name in self.scope:
            return
        # Of an earlier exercise the answer.
        if name in self.uses and name != self.name:
            answer = self.uses[name][1]
            self.define(answer)
            self.scope[name] = self.scope[answer]
            return

        node = self.definitions.get(name) or self.constants.get(name)
        if node is None:
            return
        # A function may call itself.
        self.scope[name] = None
        for used in sorted(names_of_notebook(node)):
            self.define(used)
        self.run(node)

    def run(self, *nodes: ast.stmt) -> None:
        exec(compile(ast.Module([*nodes], []), f"exercise {self.name}", "exec"), self.scope)

    def written(self, body: str | tuple[str, str]) -> Any:
        """Returns the function with another body, or the answer with a part replaced."""
        name = self.name
        if isinstance(body, tuple):
            answer_name = self.uses[name][1]
            answer = ast.get_source_segment(self.source, self.definitions[answer_name]) or ""
            assert answer.count(body[0]) == 1, f"{body[0]!r} is not (once) in {answer_name}"
            source = answer.replace(*body).replace(f"def {answer_name}(", f"def {name}(")
        else:
            arguments = ast.unparse(self.definitions[name].args)
            source = f"def {name}({arguments}):\n" + textwrap.indent(textwrap.dedent(body), "    ")
        self.run(*ast.parse(source).body)
        return self.scope[name]


def names_of_notebook(definition: ast.stmt) -> set[str]:
    """Returns the names that a definition reads and does not bind itself."""
    parts = list(ast.walk(definition))
    names = [part for part in parts if isinstance(part, ast.Name)]
    bound = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    bound |= {part.arg for part in parts if isinstance(part, ast.arg)}
    bound |= {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.ClassDef)}
    return {name.id for name in names} - bound


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


@pytest.mark.parametrize(
    ("notebook", "name", "body", "lines"),
    [
        (
            "02",
            "acceptance",
            "return p / q",
            (
                "  your function returned [3] float64: [2.5 0.5 1. ]",
                "  the answer returns     [3] float64: [1. 0.5 1. ]",
            ),
        ),
        # A value of another type is shown, too.
        (
            "02",
            "acceptance",
            "pass",
            (
                "  your function returned None",
                "  the answer returns     [3] float64: [1. 0.5 1. ]",
            ),
        ),
        # A large array is shown from the first wrong entry on.
        (
            "04",
            "commit",
            WRONG["04"]["commit"][0],
            ("([20 2] float64, from [7, 0] on: [ 7. ", "([20 2] float64, from [7, 0] on: [ 8. "),
        ),
    ],
)
def test_a_refusal_shows_what_the_function_returned_and_what_the_answer_returns(
    notebook: str, name: str, body: str | tuple[str, str], lines: tuple[str, str]
) -> None:
    exercise = Exercise(notebook, name)
    with pytest.raises(AssertionError) as refused:
        checked(exercise.written(body), exercise.answer, exercise.check)
    reason, *shown = str(refused.value).splitlines()
    assert reason.startswith(f"{name}: ")
    assert len(shown) == 2
    for line, part in zip(shown, lines, strict=True):
        assert part in line
    # IPython shows these lines in place of a traceback.
    assert refused.value._render_traceback_() == [reason, *shown]  # type: ignore[attr-defined]


def test_an_error_in_the_readers_function_keeps_its_traceback() -> None:
    exercise = Exercise("02", "acceptance")
    with pytest.raises(ZeroDivisionError):
        checked(exercise.written("return 1 / 0"), exercise.answer, exercise.check)


def test_every_exercise_has_wrong_functions() -> None:
    exercises = [
        (path.name[:2], use[0])
        for path in sorted(FOLDER.glob("[0-9]*.py"))
        for use in USED.findall(path.read_text())
    ]
    assert sorted(exercises) == sorted(EXERCISES)
