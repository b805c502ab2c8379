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
USED = re.compile(r"^\w+ = checked\(\s*(\w+), (\w+), (\w+),?\s*\)$", re.MULTILINE)

# The exercises by notebook, and wrong functions that a reader may write.
WRONG: dict[str, dict[str, list[str]]] = {
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
            "return max(range(1, len(taus)), key=lambda k: taus[k] / (verify_costs[k] + k * draft_cost))",
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
    "04": {
        "cache_mask": [
            """
            mask = np.zeros((len(block), capacity), bool)
            mask[:, length : length + len(block)] = block
            return mask
            """,
            """
            mask = np.zeros((len(block), capacity), bool)
            mask[:, : len(block)] = block
            return mask
            """,
            """
            mask = np.zeros((len(block), capacity), bool)
            mask[:, : length + len(block)] = True
            return mask
            """,
            "return np.tril(np.ones((len(block), capacity), bool))",
        ],
        "commit": [
            "return keys, length + len(path)",
            "return keys, length + len(path) - 1",
            """
            keys[length : length + len(path)] = keys[path]
            return keys, length + len(path)
            """,
            """
            keys[: len(path)] = keys[length + np.array(path)]
            return keys, length + len(path)
            """,
        ],
    },
    "05": {
        "keep_best": [
            """
            chosen = np.argsort(-scores, kind="stable")[:count]
            number = {-1: 0} | {int(entry): node for node, entry in enumerate(chosen, start=1)}
            return chosen, np.array([number[int(parents[entry])] for entry in chosen])
            """,
            """
            chosen = np.sort(np.argsort(-scores, kind="stable")[:count])
            return chosen, parents[chosen]
            """,
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
            """
            mask = np.eye(len(parents), dtype=bool)
            for node, parent in enumerate(parents):
                if parent >= 0:
                    mask[node, parent] = True
            return mask
            """,
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
            "return [node for node in range(1, len(tokens)) if tokens[node] == choice[parents[node]]]",
            """
            for node in range(1, len(tokens)):
                if parents[node] == 0 and tokens[node] == choice[0]:
                    return [node]
            return []
            """,
            """
            path = []
            for node in range(1, len(tokens)):
                if parents[node] == (path[-1] if path else 0):
                    path.append(node)
            return path
            """,
        ],
        "generate": [
            """
            new = [pair.start(prompt)]
            rounds = 0
            while len(new) < max_new_tokens:
                tokens, parents = pair.propose()
                choice = pair.verify(tokens, parents, ancestors(parents))
                path = accepted_path(tokens, parents, choice)
                added = [int(tokens[node]) for node in path]
                pair.commit([0, *path])
                pair.observe(added)
                new += added
                rounds += 1
            return new[:max_new_tokens], rounds
            """,
            """
            new = [pair.start(prompt)]
            rounds = 0
            while len(new) < max_new_tokens:
                tokens, parents = pair.propose()
                choice = pair.verify(tokens, parents, ancestors(parents))
                path = accepted_path(tokens, parents, choice)
                end = path[-1] if path else 0
                added = [*(int(tokens[node]) for node in path), int(choice[end])]
                pair.commit(path)
                pair.observe(added)
                new += added
                rounds += 1
            return new[:max_new_tokens], rounds
            """,
            """
            new = [pair.start(prompt)]
            rounds = 0
            while len(new) < max_new_tokens:
                tokens, parents = pair.propose()
                choice = pair.verify(tokens, parents, ancestors(parents))
                path = accepted_path(tokens, parents, choice)
                end = path[-1] if path else 0
                added = [*(int(tokens[node]) for node in path), int(choice[end])]
                pair.observe(added)
                pair.commit([0, *path])
                new += added
                rounds += 1
            return new[:max_new_tokens], rounds
            """,
            """
            new = [pair.start(prompt)]
            rounds = 0
            while len(new) < max_new_tokens:
                tokens, parents = pair.propose()
                choice = pair.verify(tokens, parents, np.tril(np.ones((len(tokens), len(tokens)), bool)))
                path = accepted_path(tokens, parents, choice)
                end = path[-1] if path else 0
                added = [*(int(tokens[node]) for node in path), int(choice[end])]
                pair.commit([0, *path])
                pair.observe(added)
                new += added
                rounds += 1
            return new[:max_new_tokens], rounds
            """,
            """
            new = [pair.start(prompt)]
            rounds = 0
            while len(new) < max_new_tokens:
                tokens, parents = pair.propose()
                choice = pair.verify(tokens, parents, ancestors(parents))
                path = accepted_path(tokens, parents, choice)
                end = path[-1] if path else 0
                added = [*(int(tokens[node]) for node in path), int(choice[end])]
                pair.commit([0, *path])
                pair.observe(added)
                new += added
                rounds += 1
            return new, rounds
            """,
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
            """
            observed = scores[np.arange(len(tokens)), tokens]
            mean = (p * scores).sum(axis=1)
            variance = (p * scores**2).sum(axis=1)
            return (observed - mean).sum() / np.sqrt(variance.sum())
            """,
            """
            observed = scores[np.arange(len(tokens)), tokens]
            mean = (p * scores).sum(axis=1)
            variance = (p * scores**2).sum(axis=1) - mean**2
            return (observed - mean).mean() / np.sqrt(variance.sum())
            """,
        ],
    },
    "07": {
        "rates": [
            "return sum(counts) / rounds, sum(counts) / (rounds * len(counts)), [count / rounds for count in counts]",
            """
            accepted = sum(counts)
            return 1 + accepted / rounds, accepted / (rounds * len(counts)), [count / rounds for count in counts]
            """,
            """
            accepted = sum(counts)
            conditional = [count / before for count, before in zip(counts, [rounds, *counts[:-1]], strict=True)]
            return 1 + accepted / rounds, accepted / rounds, conditional
            """,
        ],
    },
}
EXERCISES = [(notebook, name) for notebook, exercises in WRONG.items() for name in exercises]


class Exercise:
    """The cells of one exercise and the definitions that they use, without the rest of the notebook."""

    def __init__(self, notebook: str, name: str) -> None:
        (path,) = FOLDER.glob(f"{notebook}_*.py")
        source = path.read_text(encoding="utf-8")
        self.name = name
        self.uses = {use[0]: use for use in USED.findall(source)}
        nodes = ast.parse(source).body
        self.definitions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assignments = [node for node in nodes if isinstance(node, ast.Assign)]
        names = [ast.unparse(node.targets[0]) for node in assignments]
        self.constants = {name: node for name, node in zip(names, assignments, strict=True) if name.isupper()}
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
        if name in self.uses and name != self.name:  # an earlier exercise: its answer
            answer = self.uses[name][1]
            self.define(answer)
            self.scope[name] = self.scope[answer]
            return
        node = self.definitions.get(name) or self.constants.get(name)
        if node is None:
            return
        self.scope[name] = None  # a function that calls itself
        for used in sorted(names_of_notebook(node)):
            self.define(used)
        self.run(node)

    def run(self, *nodes: ast.stmt) -> None:
        exec(compile(ast.Module([*nodes], []), f"exercise {self.name}", "exec"), self.scope)

    def written(self, body: str) -> Any:
        """Returns the function with another body."""
        arguments = ast.unparse(self.definitions[self.name].args)
        lines = [line for line in body.splitlines() if line.strip()]
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        source = f"def {self.name}({arguments}):\n" + "\n".join(f"    {line[indent:]}" for line in lines)
        self.run(*ast.parse(source).body)
        return self.scope[self.name]


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


def test_every_exercise_has_wrong_functions() -> None:
    exercises = [
        (path.name[:2], use[0]) for path in sorted(FOLDER.glob("[0-9]*.py")) for use in USED.findall(path.read_text())
    ]
    assert sorted(exercises) == sorted(EXERCISES)
