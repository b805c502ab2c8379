"""Speculative rollouts of a policy in training: what happens to acceptance as the policy moves.

The bundled model learns to write Python that parses, by groups of answers as in GRPO (Shao et al.,
2024), on two cores::

    python examples/rollouts.py train work --output rollouts.json   # an hour, resumable
    python examples/rollouts.py time work --output rollouts.json    # the policies that it saved

``train`` runs every seed twice, with plain and with drafted rollouts. In the drafted run it
measures how many tokens of each drafter the policy accepts. ``time`` measures the seconds of
rollouts of the saved policies, one after the other in turn, and log-probabilities of rollouts in
other types; where ``google-tunix`` is installed also the seconds of Tunix's own sampler.
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
from eagle3_jax.bench.step_costs import step_costs
from eagle3_jax.drafters import NGram
from eagle3_jax.drafters.text import TextDrafter, TextState
from eagle3_jax.engine.refill import complete
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import spread_of, write_record
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, cast
from eagle3_jax.models.quantised import quantised
from eagle3_jax.prompts.request import Request
from eagle3_jax.results import Generation
from eagle3_jax.schedule import StagedLoop
from eagle3_jax.training.refresh import HeadRefresh, RefreshConfig
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft

# The task: bodies of functions. A policy step has four prompts, with a group of answers each.
VERBS = ("read", "write", "find", "parse", "check", "make", "split", "join", "format", "count")
NOUNS = ("line", "name", "path", "header", "value", "item", "file", "key")
OPTIONS = ("default=None", "strict=False", "encoding='utf-8'", "*args")
PROMPTS = tuple(
    f"def {verb}_{noun}({noun}, {OPTIONS[(i + j) % len(OPTIONS)]}):"
    for i, verb in enumerate(VERBS)
    for j, noun in enumerate(NOUNS)
)
GROUPS = 4
SAMPLES = 8
NEW_TOKENS = 48
LONGEST_PROMPT = 16
FEWEST_LINES = 3

DRAFT = {"num_speculative_tokens": 3}
SAMPLED = {**DRAFT, "draft_sampling": e3.DraftSampling.PROBABILISTIC}
# Draft lengths of a CPU by the number of running rows.
SCHEDULE = e3.SpeculationSchedule(((1, 2, 3), (3, 4, 2), (5, 32, 1)))
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


@dataclasses.dataclass(frozen=True)
class Siblings(TextDrafter):
    """Prompt lookup in all rows of a batch: continues the longest suffix found in any of them.

    Answers to one prompt share its phrases. Of equally long matches a row takes one of its own,
    else one of the nearest row after it. A row's draft, and with it the random numbers that choose
    its tokens, depends on the other rows: its distribution is the target's whatever they say, but
    a seed has another sample in another batch. So it is not among the library's drafters.

    Attributes:
        num_speculative_tokens: ``K``, tokens of a draft. Default: the default length for one row.
        max_ngram: Longest suffix tried, in tokens.
        min_ngram: Shortest suffix tried, in tokens.
    """

    max_ngram: int = 6
    min_ngram: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"n-grams of {self.min_ngram} to {self.max_ngram} tokens; expected 1 <= min <= max"
            )

    def propose(self, params: Any, state: TextState, keys: Any, sampling: Any) -> Draft:
        """Continues the best match. Nodes after the last known token are invalid."""
        del params, keys, sampling
        batch, capacity = state.tokens.shape
        row = jnp.arange(batch, dtype=jnp.int32)
        slot = jnp.arange(capacity, dtype=jnp.int32)

        # run[b, r, s]: tokens up to slot s of row r that equal the last ones of row b. The last
        # token of a row has nothing after it.
        end_of_text = state.length[:, None, None]
        last_of_row = state.length[None, :, None] - 1
        unbroken = slot < last_of_row
        run = jnp.zeros((batch, batch, capacity), jnp.int32)
        for back in range(self.max_ngram):
            last = jnp.take_along_axis(
                state.tokens, jnp.maximum(state.length[:, None] - 1 - back, 0), axis=1
            )
            shifted = jnp.roll(state.tokens, back, axis=1)
            is_same = shifted[None] == last[:, :, None]
            unbroken = unbroken & is_same & (slot >= back) & (end_of_text - 1 >= back)
            run += unbroken.astype(jnp.int32)

        # The longest match wins; of equally long ones the nearest row, and its latest slot.
        distance = (row[None, :] - row[:, None]) % batch
        order = (batch - 1 - distance)[:, :, None] * capacity + slot
        score = jnp.where(run >= self.min_ngram, run * (batch * capacity) + order, -1)
        best = jnp.argmax(score.reshape(batch, -1), axis=1)
        has_match = jnp.max(score.reshape(batch, -1), axis=1) >= 0
        source = best // capacity
        start = best % capacity

        following = start[:, None] + 1 + jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)
        known = has_match[:, None] & (following < state.length[source][:, None])
        proposed = state.tokens[source[:, None], jnp.minimum(following, capacity - 1)]

        node = jnp.broadcast_to(
            jnp.arange(self.num_nodes, dtype=jnp.int32), (batch, self.num_nodes)
        )
        tokens = jnp.concatenate([state.root, proposed], axis=1)
        valid = jnp.concatenate([jnp.ones_like(known[:, :1]), known], axis=1)
        return Draft(tokens=tokens, parents=node - 1, valid=valid)


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


def with_seeds(requests: Sequence[Request], shift: int) -> list[Request]:
    """Returns the requests with other seeds."""
    return [
        dataclasses.replace(request, seed=(request.seed + shift) % 2**32) for request in requests
    ]


def rollouts(decoder: e3.SpeculativeDecoder, requests: Sequence[Request]) -> list[Generation]:
    """Returns the answers of a policy, in the order of the requests."""
    longest = max(request.max_new_tokens for request in requests)
    capacity = LONGEST_PROMPT + longest + decoder.loop.drafter.num_nodes
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
    """Returns the log-probability of each token, ``[R T]``; 0 of the first."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    output = model(params, tokens, positions, causal_mask(tokens.shape[1]))
    scores = jax.nn.log_softmax(model.unembed(params, output.final)[:, :-1])
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


@functools.partial(jax.jit, static_argnames=("model", "optimizer"), donate_argnums=(3,))
def update(model: Any, optimizer: Any, params: Any, state: Any, batch: Batch) -> Any:
    """Returns policy and optimiser's state after a step, and the log-probabilities before it."""

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
                again = with_seeds(requests, 1)
                line[name] = acceptance(rollouts(decoder.with_params(params), again))

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


# Seconds, and other types


class Contender(NamedTuple):
    """A way to roll out, and what it accepted."""

    name: str
    run: Callable[[list[Request]], list[Generation] | None]


def contenders(decoders: dict[str, e3.SpeculativeDecoder], vanilla: Any) -> list[Contender]:
    """Returns the ways to roll out a policy; ``vanilla`` is Tunix's sampler, if it is there."""

    def by(decoder: e3.SpeculativeDecoder) -> Callable[[list[Request]], list[Generation] | None]:
        return lambda requests: rollouts(decoder, requests)

    ways = [Contender(name, by(decoder)) for name, decoder in decoders.items()]
    if vanilla is not None:
        ways.append(Contender("Tunix's vanilla sampler", vanilla))
    return ways


def vanilla_sampler(target: e3.LoadedTarget, params: Any) -> Any:
    """Returns Tunix's vanilla engine with a policy of ours; ``None`` where it is not installed.

    Its Qwen 2 with biases of zero computes what the bundled Llama does.
    """
    try:
        from flax import nnx
        from tunix.models.qwen2 import model as qwen2
        from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
        from tunix.rl.rollout.vanilla_rollout import VanillaRollout
    except ModuleNotFoundError:
        return None
    from eagle3_jax.tunix.policies import table_of

    config = target.model.config  # type: ignore[attr-defined]
    mixer = config.layers[0].mixer
    mlp = config.layers[0].mlp
    model = qwen2.Qwen2(
        qwen2.ModelConfig(
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            embed_dim=config.width,
            hidden_dim=mlp.width,
            num_heads=mixer.num_heads,
            head_dim=mixer.head_dim,
            num_kv_heads=mixer.num_kv_heads,
            rope_theta=int(mixer.rope.theta),
            norm_eps=config.norm_eps,
        ),
        rngs=nnx.Rngs(0),
    )
    biases = mixer.num_heads + 2 * mixer.num_kv_heads
    blocks = [
        {
            **block,
            "attention": {
                **block["attention"],
                "qkv": {**block["attention"]["qkv"], "bias": jnp.zeros(biases * mixer.head_dim)},
            },
        }
        for block in (params["blocks"][index] for index in range(config.num_layers))
    ]
    table = table_of(model)
    theirs = table.to_theirs({**params, "blocks": dict(enumerate(blocks))})
    state = nnx.state(model, nnx.Param)
    names = table_paths(state)
    nnx.update(
        model, jax.tree.unflatten(jax.tree.structure(state), [theirs[name] for name in names])
    )
    sizes = CacheConfig(64, config.num_layers, mixer.num_kv_heads, mixer.head_dim)
    engine = VanillaRollout(model, _Tokenizer(target), sizes)
    rollout_config = RolloutConfig(
        max_tokens_to_generate=NEW_TOKENS,
        max_prompt_length=16,
        temperature=1.0,
        return_logprobs=True,
    )

    def run(requests: list[Request]) -> None:
        engine.generate([str(request.prompt) for request in requests], rollout_config)

    return run


def table_paths(state: Any) -> list[str]:
    """Returns the paths of the parameters of one of Tunix's models, in their order."""
    from flax import nnx

    from eagle3_jax.tunix.policies import flat

    return list(flat(nnx.to_pure_dict(state)))


class _Tokenizer:
    """The bundled tokenizer, as Tunix asks for it."""

    def __init__(self, target: e3.LoadedTarget):
        self.tokenizer = target.tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return 0

    def pad_id(self) -> int:
        return 0


def kept(directory: Path, name: str, step: int, decoder: e3.SpeculativeDecoder) -> Any:
    """Returns the parameters of a kept policy, and of its head."""
    with np.load(directory / f"{name}-policy-{step}.npz") as file:
        leaves = [jnp.asarray(file[f"{index}"]) for index in range(len(file.files))]
    like = (decoder.params.target, decoder.params.drafter)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def costs(decoders: dict[str, e3.SpeculativeDecoder], prompts: list[list[int]]) -> dict[str, Any]:
    """Returns what ``eagle3 plan`` predicts from: costs of verification and of a draft step."""
    measured = {}
    for name, decoder in decoders.items():
        if name == "plain" or isinstance(decoder.loop, StagedLoop):
            continue
        pairs = []
        for _ in range(3):
            plain = step_costs(decoders["plain"], prompts, max_new_tokens=NEW_TOKENS)
            cost = step_costs(decoder, prompts, max_new_tokens=NEW_TOKENS)
            seconds = (cost.verify_seconds, cost.draft_seconds)
            pairs.append([value / plain.verify_seconds for value in seconds])
        verify, draft = (statistics.median(values) for values in zip(*pairs, strict=True))
        measured[name] = {"v": verify, "c": draft, "K": decoder.loop.drafter.max_depth}
    return measured


def time_policies(options: argparse.Namespace) -> Iterator[str]:
    """Times rollouts of the kept policies in turn, and yields a line per policy and batch."""
    target = e3.load_target(dtype="float32")
    head = e3.load_drafter(target=target)
    drafted = e3.SpeculativeDecoder(target, head, **SAMPLED)
    lines = []
    for step in options.policies:
        params, new_head = kept(options.directory, f"drafted-{options.seed}", step, drafted)
        policy = dataclasses.replace(target, params=params)
        decoders = {
            "plain": e3.SpeculativeDecoder(policy),
            "refreshed head": drafted.with_params(params, new_head),
            "frozen head": drafted.with_params(params),
            "refreshed head by schedule": e3.SpeculativeDecoder(
                target, head, schedule=SCHEDULE, draft_sampling=e3.DraftSampling.PROBABILISTIC
            ).with_params(params, new_head),
            "n-grams": e3.SpeculativeDecoder(policy, NGram(), **DRAFT),
            "siblings": e3.SpeculativeDecoder(policy, Siblings(), **DRAFT),
        }
        vanilla = vanilla_sampler(target, params)
        requests = requests_of(10_000 + step, options.seed)
        for rows in options.rows:
            ways = contenders(decoders, vanilla)
            prompts = [target.encode(str(request.prompt)) for request in requests[:rows]]
            line = {
                "step": step,
                "rows": rows,
                "lengths": "equal",
                "ways": timed_in_turn(ways, requests[:rows], options.times),
                "costs": costs(decoders, prompts),
            }
            lines.append(line)
            yield json.dumps(line)

        # Most answers of a batch are short, and the last ones run alone.
        mixed = [
            dataclasses.replace(request, max_new_tokens=max(8, 96 // (1 + number)))
            for number, request in enumerate(requests)
        ]
        line = {
            "step": step,
            "rows": len(mixed),
            "lengths": "mixed",
            "ways": timed_in_turn(contenders(decoders, None), mixed, options.times),
            "costs": {},
        }
        lines.append(line)
        yield json.dumps(line)
        line = {"step": step, "drift": drifts(policy, requests)}
        lines.append(line)
        yield json.dumps(line)
    options.lines = lines


def timed_in_turn(
    ways: Sequence[Contender], requests: list[Request], times: int
) -> dict[str, dict[str, Any]]:
    """Returns seconds of each way and the ratio of the plain ones to them, pair by pair."""
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    accepted: dict[str, float] = {}
    for repeat in range(times + 1):
        fresh = with_seeds(requests, repeat)
        for way in ways:
            begin = time.perf_counter()
            answers = way.run(fresh)
            # The first time compiles.
            if repeat:
                seconds[way.name].append(time.perf_counter() - begin)
            if answers is not None:
                accepted[way.name] = tokens_per_round(answers)
    return {
        name: {
            "seconds": spread_of(values),
            "speedup": spread_of(
                plain / drafted for plain, drafted in zip(seconds["plain"], values, strict=True)
            ),
            "tokens_per_round": accepted.get(name),
        }
        for name, values in seconds.items()
    }


def drifts(policy: e3.LoadedTarget, requests: list[Request]) -> dict[str, Any]:
    """Returns how far rollouts in other types are from a trainer in float32."""
    model: Any = policy.model
    host = jax.tree.map(np.asarray, policy.params)
    int8 = cast(quantised(host, model.param_products(), "int8"), FLOAT32)
    small = DecoderTarget(model.config, BFLOAT16)
    policies = {
        "float32": policy,
        "bfloat16": dataclasses.replace(policy, model=small, params=cast(host, BFLOAT16)),
        "int8": dataclasses.replace(policy, params=int8, weights="int8"),
    }
    differences = {}
    for name, rolled_out in policies.items():
        answers = rollouts(e3.SpeculativeDecoder(rolled_out, NGram(), **DRAFT), requests)
        tokens = batch_of(answers, np.zeros((GROUPS, SAMPLES))).tokens
        scores = jax.jit(log_probabilities, static_argnums=0)(model, policy.params, tokens)
        differences[name] = drift(answers, np.asarray(scores))
    return differences


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

    part = parts.add_parser("time", help="time rollouts of the policies that train kept")
    part.add_argument("directory", type=Path, help="that of train")
    part.add_argument("--output", type=Path, help="JSON file for the record")
    part.add_argument("--policies", type=int, nargs="+", default=[0, 100], help="steps")
    part.add_argument("--seed", type=int, default=0, help="which run")
    part.add_argument("--rows", type=int, nargs="+", default=[32, 8, 1], help="answers at once")
    part.add_argument("--times", type=int, default=5, help="repetitions")
    part.set_defaults(run=time_policies)

    options = parser.parse_args()
    for line in options.run(options):
        print(line, flush=True)
    if options.output is not None:
        write(options)


def write(options: argparse.Namespace) -> None:
    """Adds what was measured to the record."""
    record: dict[str, Any] = {}
    if options.output.exists():
        record = json.loads(options.output.read_text())
    if options.run is time_policies:
        record["time"] = {"environment": environment(), "lines": options.lines}
    else:
        runs = sorted(options.directory.glob("*-?.jsonl"))
        record["train"] = {
            "environment": environment(),
            "learning_rate": options.learning_rate,
            "groups": GROUPS,
            "samples": SAMPLES,
            "new_tokens": NEW_TOKENS,
            "refresh": dataclasses.asdict(REFRESH),
            "runs": {
                path.stem: [json.loads(line) for line in path.read_text().splitlines()]
                for path in runs
            },
        }
    write_record(options.output, record)


if __name__ == "__main__":
    sys.exit(main())
