"""Computes the verdicts of every case again, from the definitions of README.md, by numpy alone.

python check.py FOLDER                        # the folder agrees with the definitions
python check.py FOLDER --verdicts MINE.npz    # arrays of your engine, such as block.next_token, do
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np

TOLERANCE = 1e-4  # of distributions and log-probabilities; whole numbers must be equal
RESULTS = ("p", "path", "num_accepted", "next_token", "text", "length", "cache_length", "logprobs")


def changed(case: dict, logits: np.ndarray, output: list, prompt: np.ndarray) -> np.ndarray:
    """Logits after grammar mask, biases, penalties and min-p; minus infinity where forbidden."""
    size = len(logits)
    automaton = np.vstack([case["automaton"], np.full(size, -1)])  # the state -1 allows nothing
    state = functools.reduce(lambda state, token: automaton[state, token], output, 0)
    z = np.where(automaton[state] >= 0, logits + case["bias"], -np.inf)

    counts = np.bincount(output, minlength=size)
    occurred = counts + np.bincount(prompt, minlength=size) > 0
    z = np.where(occurred, np.where(z > 0, z / case["repetition"], z * case["repetition"]), z)
    z = z - case["presence"] * (counts > 0) - case["frequency"] * counts
    return np.where(z >= z.max() + np.log(case["min_p"]), z, -np.inf)


def warped(z: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution after temperature, then top-k, then top-p; zero if nothing is allowed."""
    if z.max() == -np.inf or temperature == 0:
        return np.eye(len(z))[z.argmax()] * (z.max() > -np.inf)
    weights = np.exp((z - z.max()) / temperature)
    if 0 < top_k < len(z):
        weights[weights < np.sort(weights)[-top_k]] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= top_p * weights.sum()]] = 0
    return weights / weights.sum()


def token_rule(row: dict, about: dict) -> tuple[list, np.ndarray]:
    """Leviathan et al. (2023), algorithm 1; siblings as in SpecInfer (Miao et al., 2023)."""
    path = [0]
    target = row["p"][0]
    for node, token in enumerate(row["tokens"]):
        if node > 0 and row["valid"][node] and row["parents"][node] == path[-1]:
            # u · q(x) < p(x) accepts; a rejection leaves the normalized max(p - q, 0).
            if row["accept"][node] * row["q"][node][token] < target[token]:
                path.append(node)
                target = row["p"][node]
            else:
                target = np.maximum(target - row["q"][node], 0)
                target = target / target.sum()
    return path[1:], target


def block_rule(row: dict, about: dict) -> tuple[list, np.ndarray]:
    """Block verification of a chain (Sun et al., 2024): the last token to pass ends the path."""
    survival = np.ones(len(row["tokens"]))
    for node, token in enumerate(row["tokens"][1:], 1):
        ratio = row["p"][node - 1][token] / row["q"][node][token]
        survival[node] = min(1.0, survival[node - 1] * ratio)

    following = np.vstack([row["q"][1:], 0 * row["q"][:1]])
    masses = np.maximum(survival[:, None] * row["p"] - following, 0)
    total = masses.sum(axis=1)
    passes = row["accept"] < total / (total + 1 - survival)
    last = max([0, *np.flatnonzero(passes)])
    return list(range(1, last + 1)), masses[last]


def typical_rule(row: dict, about: dict) -> tuple[list, np.ndarray]:
    """Typical acceptance (Cai et al., 2024): the longest path of typical tokens, the likeliest."""
    paths = {0: (0, 0.0, [0])}
    for node, token in enumerate(row["tokens"]):
        parent = row["parents"][node]
        p = row["p"][parent]
        entropy = -np.sum(p[p > 0] * np.log(p[p > 0]))
        is_typical = p[token] > min(about["epsilon"], about["delta"] * np.exp(-entropy))
        if parent in paths and row["valid"][node] and is_typical:
            length, score, path = paths[parent]
            paths[node] = (length + 1, score + np.log(p[token]), [*path, node])

    path = max(paths.values(), key=lambda entry: entry[:2])[2]
    return path[1:], row["p"][path[-1]] == row["p"][path[-1]].max()  # the likeliest token follows


RULES = {"token": token_rule, "block": block_rule, "typical": typical_rule}


def expected(case: dict) -> dict:
    """Returns the arrays of RESULTS, from logits, settings, drafts and uniforms."""
    about = json.loads(str(case["about"]))
    out = {name: np.full(case[name].shape, -1.0 if name == "path" else 0.0) for name in RESULTS}
    out["text"] = case["text"].copy()
    out["length"][0] = case["prompt_length"] + 1  # the forward pass of the prompt gave a token

    for r, b in np.ndindex(case["num_accepted"].shape):
        drafts = ("tokens", "parents", "valid", "accept", "choose")
        row = {name: case[name][r, b] for name in drafts}
        known = case["length"][r, b]
        prompt, output = np.split(case["text"][b, :known], [case["prompt_length"][b]])
        texts = [[*output]]
        for node, token in enumerate(row["tokens"][1:], 1):
            texts.append([*texts[row["parents"][node]], token])

        # The target's distribution after each node, and what the node was sampled from.
        logits = case["logits"][r, b].astype(float)
        settings = [case[name][b] for name in ("temperature", "top_k", "top_p")]
        after_node = [changed(case, z, texts[n], prompt) for n, z in enumerate(logits)]
        row["p"] = np.array([warped(z, *settings) for z in after_node])
        points = np.eye(logits.shape[1])[row["tokens"]]
        row["q"] = case["q"][r, b].astype(float) if "q" in case else points

        path, masses = RULES[about["rule"]](row, about)
        next_token = np.argmax(np.cumsum(masses) > row["choose"] * masses.sum())
        emitted = [*row["tokens"][path], next_token]
        out["p"][r, b] = row["p"]
        out["path"][r, b, : len(path)] = path
        out["num_accepted"][r, b] = len(path)
        out["next_token"][r, b] = next_token
        out["text"][b, known : known + len(emitted)] = emitted
        out["length"][r + 1, b] = known + len(emitted)
        scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        out["logprobs"][r, b, : len(emitted)] = scores[[0, *path], emitted]

    out["cache_length"] = out["length"] - 1  # the last token has not run through the target
    return out


def fault(array: np.ndarray, truth: np.ndarray | None) -> str:
    """Returns where an array differs first, in words; empty if it agrees."""
    if truth is None or array.shape != truth.shape:
        return "has another name or shape than in README.md"
    is_wrong = ~np.isclose(array, truth, rtol=0, atol=TOLERANCE)
    for index in map(tuple, np.argwhere(is_wrong).tolist()):
        return f"{list(index)} is {array[index]:.6g}, expected {truth[index]:.6g}"
    return ""


def main() -> int:
    """Prints a line for each case. Returns 0 if all of it agrees, 2 on misuse, else 1."""
    is_usage = (len(sys.argv), *sys.argv[2:3]) in ((2,), (4, "--verdicts"))
    if not is_usage or not Path(sys.argv[-1]).exists():
        return print(__doc__, file=sys.stderr) or 2

    engine = dict(np.load(sys.argv[3])) if sys.argv[3:] else {}
    lines = []
    for path in sorted(Path(sys.argv[1], "cases").glob("*.npz")):
        case = dict(np.load(path))
        verdicts = {name: engine.pop(name) for name in [*engine] if name.split(".")[0] == path.stem}
        arrays = verdicts if sys.argv[3:] else {name: case[name] for name in RESULTS}
        if arrays:
            truth = expected(case)
            pairs = {
                name: (array, truth.get(name.split(".")[-1])) for name, array in arrays.items()
            }
            faults = [f"{name} {text}" for name, pair in pairs.items() if (text := fault(*pair))]
            lines.append(f"{path.stem}: {'; '.join(faults) or 'agrees'}")

    lines += [f"{name}: no such case" for name in engine]
    print("\n".join(lines or ["nothing to compare"]))
    return int(not lines or any(not line.endswith(": agrees") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
