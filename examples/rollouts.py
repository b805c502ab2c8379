"""Speculative rollouts of a policy in training: what happens to acceptance as the policy moves.

The bundled model learns to write Python that parses, by groups of answers as in GRPO (Shao et al.,
2024), on two cores::

    python examples/rollouts.py train work --output rollouts.json   # an hour, resumable
    python examples/rollouts.py time work --output rollouts.json    # the policies that it saved

``train`` runs every seed twice, with plain and with drafted rollouts, and measures in the drafted run
how many tokens of each drafter its policy accepts. ``time`` measures the seconds of rollouts at the
saved policies, one after the other in turn, and the log-probabilities of rollouts in other types; with
``google-tunix`` installed also the seconds of Tunix's own sampler.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eagle3_jax as e3
from eagle3_jax.drafters import NGram, Siblings
from eagle3_jax.engine.refill import complete
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record
from eagle3_jax.prompts.request import Request
from eagle3_jax.results import Generation
from eagle3_jax.training.refresh import HeadRefresh, RefreshConfig
from eagle3_jax.tree import causal_mask

# The task: bodies of functions. A policy step has four of the prompts, with a group of answers each.
VERBS = ("read", "write", "find", "parse", "check", "make", "split", "join", "format", "count")
NOUNS = ("line", "name", "path", "header", "value", "item", "file", "key")
OPTIONS = ("default=None", "strict=False", "encoding='utf-8'", "*args")
PROMPTS = tuple(
    f"def {verb}_{noun}({noun}, {OPTIONS[(i + j) % len(OPTIONS)]}):"
    for i, verb in enumerate(VERBS)
    for j, noun in enumerate(NOUNS)
)
GROUPS, SAMPLES, NEW_TOKENS = 4, 8, 48
FEWEST_LINES = 3

DRAFT = {"num_speculative_tokens": 3}
SAMPLED = {**DRAFT, "draft_sampling": e3.DraftSampling.PROBABILISTIC}
REFRESH = RefreshConfig(rows=8, length=64, depth=3, learning_rate=3e-4)


def reward(prompt: str, answer: str) -> float:
    """Returns the share of the answer's complete lines after which the text still parses as Python.

    Blank lines do not count, and an answer of fewer than three lines counts as one of three.
    """
    lines = answer.split("\n")[:-1]
    parsed = 0
    for count in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join([prompt + lines[0], *lines[1:count], ""]))
        except (SyntaxError, ValueError):
            continue
        parsed = count
        break

    good, written = (sum(bool(line.strip()) for line in lines[:n]) for n in (parsed, len(lines)))
    return good / max(written, FEWEST_LINES)


# The loop: rollouts, log-probabilities, update


class Batch(NamedTuple):
    """Answers to learn from, ``[R T]``."""

    tokens: jax.Array
    #: True at tokens of an answer.
    learn: jax.Array
    #: ``[R]``.
    advantage: jax.Array


def requests_of(step: int, seed: int) -> list[Request]:
    """Returns the requests of a policy step, groups of the same prompt."""
    random = np.random.default_rng((seed, step))
    prompts = random.choice(len(PROMPTS), GROUPS, replace=False)
    seeds = random.integers(2**32, size=(GROUPS, SAMPLES))
    return [
        Request(PROMPTS[prompt], NEW_TOKENS, temperature=1.0, seed=int(seeds[group, sample]))
        for group, prompt in enumerate(prompts)
        for sample in range(SAMPLES)
    ]


def rollouts(decoder: e3.SpeculativeDecoder, requests: Sequence[Request]) -> list[Generation]:
    """Returns the answers of a policy, in the order of the requests."""
    capacity = 64 + decoder.loop.drafter.num_nodes
    answers = dict(
        complete(
            decoder,
            requests,
            slots=len(requests),
            logprobs=0,
            sampling_logprobs=True,
            share_prompts=True,
            capacity=capacity,
        )
    )
    return [answers[number] for number in range(len(requests))]


def rewards_of(requests: Sequence[Request], answers: Sequence[Generation]) -> np.ndarray:
    """Returns the rewards, ``[GROUPS SAMPLES]``."""
    pairs = zip(requests, answers, strict=True)
    values = [reward(str(request.prompt), answer.text or "") for request, answer in pairs]
    return np.array(values).reshape(GROUPS, SAMPLES)


def batch_of(answers: Sequence[Generation], rewards: np.ndarray) -> Batch:
    """Returns the answers, with rewards in units of their group's standard deviation."""
    centred = rewards - rewards.mean(1, keepdims=True)
    advantage = centred / (rewards.std(1, keepdims=True) + 1e-4)
    tokens = np.zeros((len(answers), 64), np.int32)
    learn = np.zeros(tokens.shape, bool)
    for row, answer in enumerate(answers):
        start = len(answer.prompt_tokens)
        end = start + len(answer.tokens)
        tokens[row, :end] = answer.prompt_tokens + answer.tokens
        learn[row, start:end] = True
    return Batch(jnp.asarray(tokens), jnp.asarray(learn), jnp.asarray(advantage.ravel()))


def log_probabilities(model: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the log-probability of each token after those before it, ``[R T]``; 0 of the first."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    output = model(params, tokens, positions, causal_mask(tokens.shape[1]))
    scores = jax.nn.log_softmax(model.unembed(params, output.final)[:, :-1])
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


@functools.partial(jax.jit, static_argnames=("model", "optimizer"), donate_argnums=(3,))
def update(model: Any, optimizer: Any, params: Any, state: Any, batch: Batch) -> Any:
    """Returns the policy after a step, the optimiser's state and the log-probabilities before it."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        scores = log_probabilities(model, params, batch.tokens)
        gain = jnp.sum(jnp.where(batch.learn, scores, 0.0) * batch.advantage[:, None])
        return -gain / jnp.sum(batch.learn), scores

    (_, scores), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, scores


# The experiment


@dataclasses.dataclass
class Run:
    """A policy in training.

    Attributes:
        name: ``plain`` or ``drafted``, and the seed.
        decoder: The policy, with the drafter of its rollouts.
        state: The optimiser's state.
        refresh: The head in training; ``None`` without a head.
        step: Steps taken.
        lines: What was measured.
    """

    name: str
    decoder: e3.SpeculativeDecoder
    state: Any
    refresh: HeadRefresh | None
    step: int = 0
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def acceptance(answers: Sequence[Generation]) -> dict[str, Any]:
    """Returns τ and the acceptance by depth."""
    stats = e3.SpeculationStats.merge(answer.stats for answer in answers)
    return {
        "tau": stats.mean_acceptance_length,
        "by_depth": stats.conditional_acceptance_rate,
        "tokens_per_round": tokens_per_round(answers),
    }


def tokens_per_round(answers: Sequence[Generation]) -> float:
    """Returns new tokens per round and row, with rounds that had no draft, first tokens aside."""
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    stats = e3.SpeculationStats.merge(answer.stats for answer in answers)
    # A round without a draft gives one token; a round with one gives those accepted and one more.
    return tokens / max(1, tokens - int(stats.num_accepted_tokens))


def drift(answers: Sequence[Generation], scores: np.ndarray) -> dict[str, float]:
    """Returns how far the log-probabilities of rollouts are from those of the trainer."""
    differences = []
    for row, answer in enumerate(answers):
        start = len(answer.prompt_tokens)
        recorded = [token.logprob for token in answer.logprobs or []]
        differences.append(scores[row, start : start + len(recorded)] - recorded)
    flat = np.concatenate(differences)
    # The ratio of a whole answer's probabilities under the trainer and under the rollout.
    ratios = np.exp([part.sum() for part in differences])
    return {
        "mean": float(np.abs(flat).mean()),
        "largest": float(np.abs(flat).max()),
        "ratio_std": float(ratios.std()),
        "ratio_min": float(ratios.min()),
        "ratio_max": float(ratios.max()),
    }


def drafters_of(target: e3.LoadedTarget) -> dict[str, Callable[[], e3.SpeculativeDecoder]]:
    """Returns decoders with the drafters that are compared; the refreshed head is the run's own."""
    head = e3.load_drafter(target=target)
    return {
        "frozen head": lambda: e3.SpeculativeDecoder(target, head, **SAMPLED),
        "n-grams": lambda: e3.SpeculativeDecoder(target, NGram(), **DRAFT),
        "siblings": lambda: e3.SpeculativeDecoder(target, Siblings(), **DRAFT),
    }


def start(name: str, target: e3.LoadedTarget, optimizer: Any, directory: Path) -> Run:
    """Returns a run at its beginning, or where it was interrupted."""
    if name.startswith("drafted"):
        decoder = e3.SpeculativeDecoder(target, e3.load_drafter(target=target), **SAMPLED)
        refresh = HeadRefresh(decoder, REFRESH)
    else:
        decoder = e3.SpeculativeDecoder(target)
        refresh = None
    run = Run(name, decoder, optimizer.init(target.params), refresh)

    path = directory / f"{name}.npz"
    if path.exists():
        with np.load(path) as file:
            arrays = [file[f"{index}"] for index in range(len(file.files) - 1)]
            run.step = int(file["step"])
        restored = jax.tree.unflatten(jax.tree.structure(leaves_of(run)), map(jnp.asarray, arrays))
        params, drafter, run.state, head = restored
        run.decoder = decoder.with_params(params, drafter)
        if refresh is not None:
            refresh.state = head
        lines = path.with_suffix(".jsonl").read_text().splitlines()
        run.lines = [json.loads(line) for line in lines][: run.step]
    return run


def leaves_of(run: Run) -> Any:
    """Returns everything of a run that changes."""
    head = None if run.refresh is None else run.refresh.state
    return run.decoder.params.target, run.decoder.params.drafter, run.state, head


def save(run: Run, directory: Path) -> None:
    """Writes a run, so that it goes on from here."""
    path = directory / f"{run.name}.npz"
    arrays = {f"{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(leaves_of(run)))}
    with open(path.with_suffix(".part"), "wb") as file:
        np.savez(file, step=run.step, **arrays)
    path.with_suffix(".part").rename(path)
    path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.lines))


def advance(run: Run, optimizer: Any, seed: int, others: dict[str, Any], every: int) -> None:
    """Takes a step of the policy, and measures before it every ``every`` steps."""
    model: Any = run.decoder.target.model
    requests = requests_of(run.step, seed)
    begin = time.perf_counter()
    answers = rollouts(run.decoder, requests)
    seconds = time.perf_counter() - begin
    rewards = rewards_of(requests, answers)
    line: dict[str, Any] = {
        "step": run.step,
        "reward": float(rewards.mean()),
        "length": statistics.fmean(len(answer.tokens) for answer in answers),
        "entropy": -statistics.fmean(
            token.logprob for answer in answers for token in answer.logprobs or []
        ),
        "seconds": seconds,
    }

    params = run.decoder.params.target
    if run.refresh is not None:
        line["refreshed head"] = acceptance(answers)
        if run.step % every == 0:
            for name, decoder in others.items():
                other = [
                    dataclasses.replace(request, seed=(request.seed + 1) % 2**32)
                    for request in requests
                ]
                line[name] = acceptance(rollouts(decoder.with_params(params), other))

    after, run.state, scores = update(
        model, optimizer, params, run.state, batch_of(answers, rewards)
    )
    line["drift"] = drift(answers, np.asarray(scores))
    run.decoder = run.decoder.with_params(after)
    if run.refresh is not None:
        begin = time.perf_counter()
        run.decoder = run.refresh.step(run.decoder, answers)
        line["refresh_seconds"] = time.perf_counter() - begin
    run.lines.append(line)
    run.step += 1


def train(options: argparse.Namespace) -> Iterator[str]:
    """Runs all seeds with plain and with drafted rollouts, and yields a line per step."""
    target = e3.load_target(dtype="float32")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.learning_rate))
    options.directory.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for kind in options.kinds:
            run = start(f"{kind}-{seed}", target, optimizer, options.directory)
            others = {}
            if run.refresh is not None:
                others = {name: make() for name, make in drafters_of(target).items()}
            while run.step < options.steps:
                if run.step % options.keep == 0:
                    keep_policy(run, options.directory)
                advance(run, optimizer, seed, others, options.every)
                if run.step % 10 == 0 or run.step == options.steps:
                    save(run, options.directory)
                line = run.lines[-1]
                yield f"{run.name} step {run.step}: {json.dumps(line)}"
            keep_policy(run, options.directory)


def keep_policy(run: Run, directory: Path) -> None:
    """Writes the parameters of the policy and of the refreshed head, for ``time``."""
    path = directory / f"{run.name}-policy-{run.step}.npz"
    leaves = jax.tree.leaves((run.decoder.params.target, run.decoder.params.drafter))
    np.savez(path, **{f"{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)})


def main() -> None:
    """Runs a part of the experiment."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("train", help="train policies with plain and with drafted rollouts")
    part.add_argument("directory", type=Path, help="directory for what a resumed run needs")
    part.add_argument("--output", type=Path, help="JSON file for the record")
    part.add_argument("--steps", type=int, default=100, help="steps of a policy")
    part.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    part.add_argument("--kinds", nargs="+", default=["plain", "drafted"])
    part.add_argument("--every", type=int, default=5, help="steps between two measurements")
    part.add_argument("--keep", type=int, default=50, help="steps between two kept policies")
    part.add_argument("--learning-rate", type=float, default=1e-4)
    part.set_defaults(run=train)
    options = parser.parse_args()
    for line in options.run(options):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
