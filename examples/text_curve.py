"""How much text a draft head needs: heads learn from more and more of it.

A line is fitted to their acceptance. Every head makes the same number of passes over its text, and
its learning rate falls to zero. The measure is the share of rounds on held-out texts that accept
their first draft token, at the best evaluation of a run. It was run for 15,000 tokens on a CPU: six
minutes of one core, after those for the features. More text needs a GPU::

    python examples/text_curve.py smollm2 examples/data/smollm2 --features features \\
        --tokens 250000 500000 1000000 2000000 --passes 10 --unroll 5 --batch 43
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eagle3_jax as e3
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record
from eagle3_jax.training.batches import text_batches
from eagle3_jax.training.evaluation import Evaluation
from eagle3_jax.training.features import Features, stored_features
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.methods import RECIPES, official_head
from eagle3_jax.training.texts import Text, Texts, token_counts
from eagle3_jax.training.ttt import TTTConfig, ttt_loss
from eagle3_jax.training.vocab import select_draft_vocabulary

# Share of the documents, by hash, as `eagle3 train head` holds out of examples/data/smollm2.
HELD_OUT = 0.01
EVALUATIONS = 5  # of a run


def main() -> None:
    """Trains a head for every amount of text, prints the curve and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="directory, GGUF file or name of the target")
    parser.add_argument("data", type=Path, help="directory that `eagle3 train data` wrote")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        required=True,
        help="answer tokens that the heads learn from",
    )
    parser.add_argument(
        "--features", type=Path, required=True, help="directory for the target's features"
    )
    parser.add_argument(
        "--head", help="a finished head to evaluate on the same texts, such as smollm2"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    parser.add_argument("--passes", type=int, default=5, help="passes over the text")
    parser.add_argument("--unroll", type=int, default=1, help="draft positions that a head learns")
    parser.add_argument("--draft-vocab-size", type=int, default=16_384)
    parser.add_argument("--batch", type=int, default=6, help="rows of a step for the longest texts")
    options = parser.parse_args()

    target = e3.load_target(options.target, dtype="float32")
    texts, held_out = read_texts(options.data)
    sizes = sorted(options.tokens)
    largest = first_texts(texts, sizes[-1])
    drafter = Eagle3Drafter(
        official_head(target.model.config, options.draft_vocab_size),
        precision=target.model.precision,
    )
    features = features_of(target, largest, drafter.aux_layers, options.features / "texts")
    features_held_out = features_of(
        target, held_out, drafter.aux_layers, options.features / "held-out"
    )
    # One vocabulary for all heads, so that the curve is about what they learn.
    vocabulary = select_draft_vocabulary(
        token_counts(texts, target.vocab_size), options.draft_vocab_size
    )
    frozen: Any = {
        "target_params": target.params,
        "embedding": target.model.tables(target.params).embedding,
        "draft_to_target": jnp.asarray(vocabulary),
    }
    evaluation = Evaluation(target, drafter, frozen, held_out, features_held_out, 1)

    rows: list[dict[str, Any]] = []
    if options.head is not None:
        rows.append(
            {"head": options.head, "best": measured(*finished_head(options.head, evaluation))}
        )
        print(rows[-1], flush=True)
    for size in sizes:
        rows.append(trained(evaluation, first_texts(largest, size), features, options))
        print(rows[-1], flush=True)
        if options.output:  # after every head, so that nothing is lost
            settings = {
                name: getattr(options, name)
                for name in ("passes", "unroll", "draft_vocab_size", "batch")
            }
            write_record(
                options.output,
                {"about": environment(target=options.target), **settings, "rows": rows},
            )
    if len(sizes) > 2:
        print(fit_line(rows))


def read_texts(directory: Path) -> tuple[Texts, Texts]:
    """Returns the texts to learn from and those held out, in a random order, a prompt once."""
    paths = sorted(directory.glob("texts-*.npz"))
    if not paths:
        sys.exit(
            f"{directory} holds no texts-*.npz; give a directory that `eagle3 train data` wrote"
        )

    texts = Texts.joined(Texts.load(path) for path in paths)

    seen: set[tuple[int, bytes]] = set()
    rows = []
    for index, prompt in enumerate(texts.prompts()):
        if prompt not in seen:
            seen.add(prompt)
            span = texts.span(index)
            rows.append(
                Text(
                    texts.tokens[span].tolist(),
                    texts.learn[span].tolist(),
                    int(texts.document[index]),
                )
            )

    order = np.random.default_rng(0).permutation(len(rows))
    shuffled = Texts.of(rows[index] for index in order)
    is_held_out = shuffled.held_out(HELD_OUT)
    return shuffled.chosen(~is_held_out), shuffled.chosen(is_held_out)


def first_texts(texts: Texts, tokens: int) -> Texts:
    """Returns the texts from the first one on, until they hold ``tokens`` tokens to learn."""
    learnt = np.cumsum(texts.learn)[texts.start + texts.length - 1]
    count = int(np.searchsorted(learnt, tokens)) + 1
    return texts.chosen(np.arange(len(texts)) < count)


def features_of(
    target: e3.LoadedTarget, texts: Texts, layers: tuple[int, ...], directory: Path
) -> Features:
    """Returns the target's features at each token, computed if they are not in the directory."""
    *_, features = stored_features(target, texts, layers, directory)
    assert features is not None
    return features


def finished_head(source: str, evaluation: Evaluation) -> tuple[Evaluation, Any]:
    """Returns the evaluation of a finished head, with its own vocabulary, and its parameters."""
    loaded = e3.load_drafter(source, target=evaluation.target)
    params: Any = loaded.params
    frozen: Any = {**evaluation.frozen, "draft_to_target": params["draft_to_target"]}
    return dataclasses.replace(evaluation, drafter=loaded.drafter, frozen=frozen), params["head"]


def measured(evaluation: Evaluation, params: Any) -> dict[str, float]:
    """Reads the acceptance of a head off all held-out texts."""
    return evaluation.in_one_pass(params, most=len(evaluation.texts)) or {}


def trained(
    evaluation: Evaluation, texts: Texts, features: Features, options: argparse.Namespace
) -> dict[str, Any]:
    """Trains a head on texts, and returns their size and its best evaluation."""
    target = evaluation.target
    drafter = evaluation.drafter
    frozen = evaluation.frozen
    start = RECIPES["eagle3"].start(
        drafter, target, np.asarray(frozen["draft_to_target"]), jax.random.key(0)
    )
    output = {"head": start.pop("head")}  # the target's output matrix stays as it is
    objective = TTTConfig(num_steps=options.unroll, denominator="supervised", noise=0.1)
    batch_at, steps_of_a_pass = text_batches(texts, options.batch, 0, features)
    num_steps = options.passes * steps_of_a_pass
    optimizer = OptimizerConfig(
        method="muon",
        learning_rate=3e-3,
        embedding_learning_rate=1.5e-3,
        num_steps=num_steps,
        warmup_steps=min(20, num_steps // 4),
    )

    def loss(params: Any, inputs: Any) -> Any:
        batch, frozen, output = inputs
        return ttt_loss(drafter, target.model, {**params, **output}, frozen, batch, objective)  # type: ignore[arg-type]

    def inputs_at(step: int) -> Any:
        return batch_at(step), frozen, output

    every = max(1, num_steps // EVALUATIONS)
    trainer = Trainer(loss, optimizer)
    evaluations = []
    for state, _ in trainer.run(trainer.start(start), inputs_at, num_steps):
        step = int(state.step)
        if step % every == 0:
            evaluations.append({"step": step, **measured(evaluation, {**state.params, **output})})
    best = max(evaluations, key=lambda values: values["tau"])

    size = {"tokens": int(texts.learn.sum()), "texts": len(texts), "steps": num_steps}
    return {**size, "best": best, "evaluations": evaluations}


def fit_line(rows: list[dict[str, Any]]) -> str:
    """Returns the line through acceptance over the logarithm of text, in words."""
    points = [
        (np.log2(row["tokens"]), row["best"]["accepted_0"]) for row in rows if "tokens" in row
    ]
    slope, constant = np.polyfit(*zip(*points, strict=True), 1)
    residual = max(abs(slope * x + constant - y) for x, y in points)
    return (
        f"acceptance rises by {slope:.3f} a doubling of the text; largest distance from the line"
        f" {residual:.3f}"
    )


if __name__ == "__main__":
    main()
