"""Makes the pictures of the pages, and the figures that pages quote, from a run and from records.

python docs/pictures/make.py        # half a minute on a CPU; writes into its own folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import eagle3_jax as e3
from eagle3_jax.measure.trace import record
from eagle3_jax.theory.speedup import tau_from_conditional_rate
from eagle3_jax.tree import ancestor_mask, causal_mask

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "notebooks"), str(HERE.parent / "recorded")]

import policy_runs  # noqa: E402
import speeds  # noqa: E402
from page_tables import record as record_of  # noqa: E402
from pictures import anatomy, bars, policies, strips, style, trees  # noqa: E402

# The target is small. Its text after this prompt does not repeat one phrase over and over.
PROMPT = 'def get_size(value):\n    """Return the'
NEW_TOKENS = 30
BLUE = style.SERIES[0]
ORANGE = style.SERIES[1]
GREY = "#9aa0a6"
INK = "#333333"


def main() -> None:
    """Runs the pair and writes every picture."""
    style.use()
    # Paths in place of fonts, and the same bytes for the same picture.
    matplotlib.rcParams.update({"svg.hashsalt": "eagle3-jax", "svg.fonttype": "path"})
    _write(_speed(), "speed")
    _write(_draft_length(), "draft_length")
    runs = record_of(policy_runs.RECORD)["train"]["runs"]
    _write(policies.acceptance_and_reward(runs), "rollouts")
    target = e3.load_target()
    head = e3.load_drafter(target=target)
    _write(anatomy.eagle3_head(head.drafter.config, target.model.config.num_layers), "head")
    figures = {**_chain(target, head), **_distributions(target, head), **_tree(target, head)}
    (HERE / "real_run.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _record(decoder: e3.SpeculativeDecoder) -> Any:
    return record(
        decoder, [PROMPT], max_new_tokens=[NEW_TOKENS], sampling=e3.SamplingParams(), seed=0
    )


def _chain(target: e3.LoadedTarget, head: e3.LoadedDrafter) -> dict[str, Any]:
    run = _record(e3.SpeculativeDecoder(target, head, num_speculative_tokens=5))
    plain = _record(e3.SpeculativeDecoder(target))
    strip = strips.TokenStrip(_tokens(run, target), "a chain of five, greedy")
    (HERE / "strip.svg").write_text(strips.svg([("", strip)]), encoding="utf-8")

    lanes = [
        (f"{name}: {len(trace.prompts[0]['rounds'])} passes through the target", trace)
        for name, trace in (("Plain decoding", plain), ("EAGLE-3", run))
    ]
    race = [
        (words, strips.TokenStrip(_tokens(trace, target), "the same text, pass by pass"))
        for words, trace in lanes
    ]
    (HERE / "race.svg").write_text(strips.svg(race, seconds_per_round=0.2), encoding="utf-8")

    rounds = run.prompts[0]["rounds"]
    return {
        "new_tokens": len(run.result.tokens[0]),
        "rounds": len(rounds),
        "drafted": 5 * len(rounds),
        "accepted": sum(round_["num_accepted"] for round_ in rounds),
        "mean_acceptance_length": float(run.result.stats.mean_acceptance_length),
        "plain_rounds": len(plain.prompts[0]["rounds"]),
        "same_as_plain": plain.result.tokens[0] == run.result.tokens[0],
    }


def _tokens(run: Any, target: e3.LoadedTarget) -> list[strips.Token]:
    """The prompt and the new tokens, without those that the last round accepted above the limit."""
    prompt = run.prompts[0]
    return strips.tokens_of(prompt, target.tokenizer)[: len(prompt["prompt_ids"]) + NEW_TOKENS]


def _distributions(target: e3.LoadedTarget, head: e3.LoadedDrafter) -> dict[str, Any]:
    """Both distributions of the first drafted token of a sampled chain, at temperature 1."""
    decoder = e3.SpeculativeDecoder(
        target, head, num_speculative_tokens=4, draft_sampling="probabilistic"
    )
    warm = e3.SamplingParams(temperature=1.0)
    played = decoder.step(
        decoder.prefill([PROMPT], max_new_tokens=NEW_TOKENS, sampling=warm, seed=0)
    )
    root = int(played.draft.tokens[0, 0])

    # The head drafted behind the root; the target's distribution there takes one more pass.
    text = jnp.asarray([[*decoder.target.encode(PROMPT), root]])
    places = jnp.arange(text.shape[1])[None]
    output = target.model(target.params, text, places, causal_mask(text.shape[1]))
    logits = np.asarray(target.model.unembed(target.params, output.final[0, -1]), np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    q = np.asarray(played.draft.probs[0, 1], np.float64)

    labels = [target.tokenizer.decode([token]) for token in range(p.size)]
    title = "Next token: distribution of the target and of the head"
    figure = bars.distributions(p, q, labels=labels, top=8, title=title)
    _write(figure, "distributions")

    # Speculative sampling accepts with the mass that both have in common.
    common = float(np.minimum(p, q).sum())
    return {"accepted_with_probability": common, "residual_mass": float(np.maximum(p - q, 0).sum())}


def _tree(target: e3.LoadedTarget, head: e3.LoadedDrafter) -> dict[str, Any]:
    """The round of a small tree with the most kinds of nodes: accepted, rejected, never visited."""
    shape = e3.DynamicTree(num_nodes=16, max_depth=4, top_k=4)
    run = _record(e3.SpeculativeDecoder(target, head, tree=shape))

    def variety(round_: dict[str, Any]) -> tuple[int, int]:
        """The number of kinds of nodes, then that of accepted ones."""
        kinds = {*trees.statuses(round_["parents"], round_["path"])}
        return len(kinds), round_["num_accepted"]

    round_ = max(run.prompts[0]["rounds"], key=variety)
    status = trees.statuses(round_["parents"], round_["path"])
    end = round_["path"][-1] if round_["path"] else 0
    added = style.CORRECTED if end in round_["parents"] else style.BONUS
    words = [
        target.tokenizer.decode([token]) for token in [*round_["tokens"], round_["next_token"]]
    ]
    title = "One round of a draft tree: sixteen nodes, one forward pass"
    _write(
        trees.tree(words, [*round_["parents"], end], status=[*status, added], title=title), "tree"
    )

    (above,) = ancestor_mask(jnp.array([round_["parents"]]), shape.max_depth)
    _write(trees.mask_map(above, words[:-1], title="Tree attention mask"), "mask")
    return {
        "tree_nodes": len(round_["tokens"]),
        "tree_accepted": round_["num_accepted"],
        "tree_added": added,
    }


def _speed() -> Figure:
    """Speed-up of every method of the canonical benchmark, with quartiles."""
    rows = list(speeds.CHAT.rows.values())[::-1]
    figure, axes = plt.subplots(figsize=(7.2, 6.0))
    colours = dict.fromkeys(("chain", "ngram+chain", "tree", "mixed"), BLUE)
    colours |= dict.fromkeys(("n-gram", "suffix"), ORANGE)
    axes.barh(
        range(len(rows)),
        [row["ratio"]["median"] for row in rows],
        xerr=_spread(rows),
        color=[colours.get(row["name"].split()[0], GREY) for row in rows],
        ecolor=INK,
        height=0.7,
    )

    for height, row in enumerate(rows):
        axes.text(
            row["ratio"]["high"] + 0.02,
            height,
            f"{row['ratio']['median']:.2f}",
            va="center",
            fontsize=8,
        )

    axes.set_yticks(
        range(len(rows)), [speeds.NAMES[row["name"]].replace("`", "") for row in rows], fontsize=8
    )
    axes.axvline(1, color=INK, linewidth=0.8, linestyle="--")
    furthest = max(row["ratio"]["high"] for row in rows)
    axes.set(xlim=(0, 1.1 * furthest), xlabel="speed-up over plain decoding, median and quartiles")
    return figure


def _draft_length() -> Figure:
    """Measured and predicted speed-up over K, and what a constant acceptance rate would give."""
    rows = speeds.CHAT.chains()
    lengths = [row["num_draft_steps"] for row in rows]
    figure, axes = plt.subplots(figsize=(7.2, 3.4))

    costs = rows[lengths.index(3)]
    for alpha in (0.5, 0.7, 0.9):
        curve = [
            tau_from_conditional_rate(alpha, k) / (costs["verify_cost"] + k * costs["draft_cost"])
            for k in range(1, 9)
        ]
        axes.plot(range(1, 9), curve, color=GREY, linewidth=1)
        axes.text(8.1, curve[-1], f"α = {alpha}", va="center", fontsize=8)

    medians = [row["ratio"]["median"] for row in rows]
    axes.errorbar(
        lengths, medians, yerr=_spread(rows), fmt="o", color=BLUE, label="measured, with quartiles"
    )
    axes.plot(
        lengths,
        [row["predicted_ratio"] for row in rows],
        "x",
        color=ORANGE,
        label="predicted: τ / (v + K·c)",
    )

    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--")
    axes.set(
        xlim=(0.7, 9),
        xlabel="draft length K (grey curves: v and c of K=3)",
        ylabel="speed-up S",
    )
    axes.legend(loc="upper left", fontsize=8)
    return figure


def _spread(rows: list[speeds.Row]) -> list[list[float]]:
    """Returns the distances of the quartiles below and above the median."""
    ratios = [row["ratio"] for row in rows]
    below = [ratio["median"] - ratio["low"] for ratio in ratios]
    above = [ratio["high"] - ratio["median"] for ratio in ratios]
    return [below, above]


def _write(figure: Figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Creator": None})
    text = (HERE / f"{name}.svg").read_text(encoding="utf-8")
    (HERE / f"{name}.svg").write_text(
        "\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
