"""Draft methods at equal text: every head learns from the same texts, then drafts for it.

All heads make the same number of passes over the same answers of the shipped target, with one
optimizer, whose learning rate rises and then falls to zero along a cosine. Each method learns with
every learning rate of ``--learning-rates``; the head with more tokens a round on held-out texts is
kept. It then takes turns with plain decoding on the prompts of the package. The heads of the table
took 36 minutes of one core in their steps, and about an hour with compilation::

    python examples/corpus.py corpus --docs cpython/Doc
    eagle3 train data eagle3_jax/assets/target data corpus/train.jsonl --rewrite --length 256 \\
        --most 1024 --greedy-share 0.6 --temperature 0.8 --held-out 0.05
    python examples/methods_table.py data

The record is written after every row, and the same command continues an interrupted run.
``--tokens 5000 --passes 1 --max-prompts 1`` tries it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from text_curve import features_of, first_texts

import eagle3_jax as e3
from eagle3_jax.bench.contenders import DecoderContender
from eagle3_jax.bench.results import Measured, Row, row_of
from eagle3_jax.bench.step_costs import StepCosts, step_costs
from eagle3_jax.cli.train.files import read_texts, write_draft_model, write_head
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.files.sources import bundled
from eagle3_jax.measure.environment import environment, sha256_of_prompts
from eagle3_jax.measure.records import read_record, write_record
from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.prompts.benchmark import Prompt, in_turn, read_prompts
from eagle3_jax.training.batches import text_batches
from eagle3_jax.training.evaluation import Evaluation
from eagle3_jax.training.features import Features
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.methods import RECIPES, HeadOptions
from eagle3_jax.training.texts import Texts, token_counts
from eagle3_jax.training.vocab import coverage, select_draft_vocabulary

# Draft positions that a head learns: the longest draft that is measured. EAGLE-1 learns one, as in
# its paper.
DEPTH = 5
DEPTHS = collections.defaultdict(lambda: DEPTH, eagle1=1)
# Layers of the heads that run once a draft. Published ones have four or five, for targets three
# times as deep.
LAYERS = dict.fromkeys(("p-eagle", "dflash", "dflash2", "dspark", "jetspec"), 2)
HELD_OUT_TEXTS = 48  # that choose between learning rates
COSTS_EVERY = 9  # prompts between two timings of the parts of a round
TRAINING = ("tokens", "passes", "batch", "learning_rates", "dtype")  # options of the heads
SPEEDS = ("chains", "dtype", "weights", "max_prompts", "max_new_tokens", "repeats")
# Figures of a row that the tables show or that judge it.
FIGURES = (
    "lossless",
    "same_texts",
    "num_draft_steps",
    "verify_cost",
    "draft_cost",
    "predicted_ratio",
    "ratio",
)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, help="directory that `eagle3 train data` wrote")
    add(
        "--output",
        type=Path,
        default=Path("methods"),
        help="directory of methods.json, and of features, checkpoints and heads",
    )
    add("--methods", nargs="+", choices=RECIPES, default=list(RECIPES))
    add("--tokens", type=int, default=70_000, help="answer tokens that the heads learn from")
    add("--passes", type=int, default=1, help="passes over the text")
    add("--batch", type=int, default=4, help="rows of a step for the longest texts")
    add("--learning-rates", type=float, nargs="+", default=[4e-3, 1e-2])
    add("--chains", type=int, nargs="+", default=[3, 5], help="lengths of the drafts")
    add("--dtype", default="float32", help="precision of target and heads")
    add("--weights", default="int8", help="weights of target and heads while they decode")
    add("--max-prompts", type=int, default=63, help="prompts that are decoded")
    add("--max-new-tokens", type=int, default=32, help="new tokens of each prompt")
    add("--repeats", type=int, default=3, help="of every speed, in turns")
    add("--train-only", action="store_true", help="leave the speeds to a later run")
    return parser.parse_args()


def main() -> None:
    """Trains every head that the record lacks, then measures the best one of each method."""
    options = parsed()
    keep_compiled_programs(None)
    target = e3.load_target(dtype=options.dtype)
    texts, held_out = read_texts(options.data)
    study = Study(target, first_texts(texts, options.tokens), held_out, options)
    path = options.output / "methods.json"
    record = study.record(path)
    write_record(path, record)

    trained = {(row["method"], row["learning_rate"]) for row in record["trained"]}
    for method, rate in itertools.product(options.methods, options.learning_rates):
        if (method, rate) not in trained:
            record["trained"].append(study.train(method, rate))
            print(record["trained"][-1], flush=True)
            write_record(path, record)
            jax.clear_caches()  # the programs of all methods are more than a process may map

    if options.train_only:
        return
    speeds = study.speeds(record)
    if "plain" not in speeds:
        speeds["plain"] = study.plain()
    measured = {row["method"] for row in speeds["rows"]}
    for method in options.methods:
        if method not in measured:
            speeds["rows"] += study.measure(method, best(record, method))
            write_record(path, record)
            jax.clear_caches()


def figures(row: Row) -> dict[str, Any]:
    """Returns :data:`FIGURES` and the speed of a row, and its figures by task."""
    values = dataclasses.asdict(row)
    tasks = {task.pop("task"): task for task in values["tasks"]}
    for task in tasks.values():
        counters = task.pop("acceptance")
        task["mean_acceptance_length"] = counters and counters["mean_acceptance_length"]
    return {
        **{name: values[name] for name in FIGURES},
        "tokens_per_second": values["decode_tokens_per_second"],
        "tasks": tasks,
    }


def best(record: dict[str, Any], method: str) -> dict[str, Any]:
    """Returns the run of a method with most tokens a round on held-out texts."""
    runs = [row for row in record["trained"] if row["method"] == method]
    return max(runs, key=lambda row: row["held_out_tau"])


@dataclasses.dataclass(frozen=True)
class Study:
    """The target, the texts and the options that all methods share."""

    target: e3.LoadedTarget
    texts: Texts
    held_out: Texts
    options: argparse.Namespace

    def record(self, path: Path) -> dict[str, Any]:
        """Reads what an earlier run of the same texts and options wrote; else a new record."""
        conditions = {
            "texts": {
                "sha256": sha256_of_prompts([self.texts.tokens, self.held_out.tokens]),
                "texts": len(self.texts),
                "supervised_tokens": int(self.texts.learn.sum()),
                "held_out_texts": len(self.held_out),
            },
            "options": {name: getattr(self.options, name) for name in TRAINING},
        }
        earlier = read_record(path, conditions)
        return earlier or {"about": environment(), **conditions, "trained": []}

    def speeds(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns the speeds in a record; new ones if it has none with these options."""
        prompts = self.prompts()
        conditions = {
            "options": {name: getattr(self.options, name) for name in SPEEDS},
            "cores": len(os.sched_getaffinity(0)),
            "prompts": {
                "sha256": sha256_of_prompts([prompt.tokens for prompt in prompts]),
                **collections.Counter(prompt.category for prompt in prompts),
            },
        }
        speeds = record.get("speeds", {})
        if any(speeds.get(name) != value for name, value in conditions.items()):
            record["speeds"] = {"about": environment(), **conditions, "rows": []}
        return record["speeds"]

    def prompts(self) -> list[Prompt]:
        """Reads the prompts of the package, grouped by task."""
        limit = self.options.max_new_tokens
        shipped = read_prompts(bundled("prompts.jsonl"), self.target, max_new_tokens=limit)
        return in_turn(shipped, self.options.max_prompts)

    def train(self, method: str, rate: float) -> dict[str, Any]:
        """Trains a head, writes it, and returns how it was trained and how it does.

        The seconds are those of the processor in the optimizer's steps: other programs on the
        machine do not add to them. Compiling and the target's features are not part of them.
        """
        recipe = RECIPES[method]
        model: Any = self.target.model
        size = recipe.draft_vocab_size(self.target.vocab_size)
        head = HeadOptions(
            depth=DEPTHS[method], num_layers=LAYERS.get(method), draft_vocab_size=size
        )
        config = recipe.config(model.config, head)
        drafter = recipe.drafter(config, precision=model.precision)
        counts = token_counts(self.texts, self.target.vocab_size)
        vocabulary = None if size is None else select_draft_vocabulary(counts, size)
        frozen: Any = {
            "target_params": self.target.params,
            "embedding": model.tables(self.target.params).embedding,
            "draft_to_target": None if vocabulary is None else jnp.asarray(vocabulary),
        }

        features = self._features(drafter.aux_layers)
        batch_at, steps_of_a_pass = text_batches(self.texts, self.options.batch, 0, features)
        num_steps = self.options.passes * steps_of_a_pass
        optimizer = OptimizerConfig(
            method="muon",
            learning_rate=rate,
            embedding_learning_rate=rate / 2,
            num_steps=num_steps,
            warmup_steps=min(20, num_steps // 4),
            weight_decay=0.01,
        )

        def loss(params: Any, inputs: Any) -> Any:
            batch, frozen = inputs
            return recipe.loss(drafter, model, params, frozen, batch, head)

        name = f"{method}-{rate:g}"
        trainer = Trainer(loss, optimizer, self.options.output / "checkpoints" / name)
        start = recipe.start(drafter, self.target, vocabulary, jax.random.key(0))
        state = trainer.start(start)
        seconds = []
        begin = time.process_time()
        for latest, metrics in trainer.run(state, lambda step: (batch_at(step), frozen), num_steps):
            state = latest
            seconds.append(time.process_time() - begin)
            if len(seconds) % 20 == 0:
                print(f"{name}: step {int(state.step)} of {num_steps}, {metrics}", flush=True)
            begin = time.process_time()

        out = self.options.output / "heads" / name
        if isinstance(config, DecoderConfig):
            write_draft_model(out, bundled("target"), config, state.params, dtype="bfloat16")
        else:
            depth = model.config.num_layers
            write_head(
                out, config, state.params, vocabulary, dtype="bfloat16", num_target_layers=depth
            )
        evaluation = Evaluation(self.target, drafter, frozen, self.held_out, None, DEPTH)
        return {
            "method": method,
            "learning_rate": rate,
            "depth": head.depth,
            "steps": num_steps,
            # None if the run was interrupted after its last step.
            "seconds": statistics.median(seconds) * num_steps if seconds else None,
            "trained_parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            "vocabulary_coverage": None if vocabulary is None else coverage(counts, vocabulary),
            "held_out_tau": evaluation.by_decoding(state.params, HELD_OUT_TEXTS),
        }

    def _features(self, layers: tuple[int, ...]) -> Features:
        """Returns the target's features of some layers, computed once for all methods."""
        name = f"{self.options.tokens}-{'-'.join(map(str, layers))}"
        return features_of(self.target, self.texts, layers, self.options.output / "features" / name)

    def plain(self) -> dict[str, Any]:
        """Compares plain decoding with dense weights to that with the weights of the speeds."""
        dense = e3.load_target(dtype=self.options.dtype)
        rows, _ = self._rows([self._plain(), self._contender("dense", dense)])
        return {
            "tokens_per_second": vars(rows[0].decode_tokens_per_second),
            "dense": vars(rows[1].ratio),
        }

    def measure(self, method: str, run: dict[str, Any]) -> list[dict[str, Any]]:
        """Decodes the prompts with drafts of a head and without, in turns."""
        plain = self._plain()
        target = plain.decoder.target
        head = self.options.output / "heads" / f"{method}-{run['learning_rate']:g}"
        drafter = e3.load_drafter(head, target=target)
        drafts = [
            self._contender(f"K={length}", target, drafter, num_speculative_tokens=length)
            for length in self.options.chains
        ]
        rows, programs = self._rows([plain, *drafts])
        return [
            {
                "method": method,
                "draft": row.name,
                "acceptance": vars(row.acceptance),
                "programs_after_warm_up": programs,
                **figures(row),
            }
            for row in rows[1:]
        ]

    def _plain(self) -> DecoderContender:
        options = self.options
        target = e3.load_target(dtype=options.dtype, weights=options.weights)
        return self._contender("plain", target)

    def _contender(self, name: str, *arguments: Any, **draft: int) -> DecoderContender:
        decoder = e3.SpeculativeDecoder(*arguments, stop_tokens=(), **draft)
        return DecoderContender(name, self.options.dtype, decoder)

    def _rows(self, contenders: list[DecoderContender]) -> tuple[list[Row], int]:
        """Lets contenders take turns on every prompt; the others are compared with the first.

        A turn takes less than a second, so that another program slows all contenders alike.

        Returns:
            A row for each contender, and the programs that were compiled after the warm-up.
        """
        prompts = self.prompts()
        by_length = sorted((prompt.tokens for prompt in prompts), key=len)
        for contender in contenders:
            # Shorter and longer prompts have programs of their own.
            for tokens in (by_length[0], by_length[-1]):
                contender.run([tokens], self.options.max_new_tokens)
            self._costs(contender, by_length[0])

        results = [Measured(contender, 0.0) for contender in contenders]
        with CompileClock() as clock:
            for _ in range(self.options.repeats):
                for measured in results:
                    measured.runs.append([])
                for number, prompt in enumerate(prompts):
                    for measured, contender in zip(results, contenders, strict=True):
                        run = contender.run([prompt.tokens], self.options.max_new_tokens)
                        measured.runs[-1].append(run)
                        if number % COSTS_EVERY == 0:
                            measured.costs.append(self._costs(contender, by_length[0]))

        rows = [
            row_of(
                measured,
                results[0],
                same_precision=results[0],
                tasks=[[prompt.category] for prompt in prompts],
                most_bytes_per_second=0.0,
                target=None,
            )
            for measured in results
        ]
        return rows, clock.programs

    def _costs(self, contender: DecoderContender, tokens: list[int]) -> StepCosts:
        limit = self.options.max_new_tokens
        return step_costs(contender.decoder, [tokens], max_new_tokens=limit)


if __name__ == "__main__":
    sys.exit(main())
