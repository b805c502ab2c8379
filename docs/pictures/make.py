"""Makes the pictures of README.md and docs/algorithm.md from a run of the shipped pair, and the figures they quote.

python docs/pictures/make.py        # half a minute on a CPU; writes *.svg and real_run.json into its own folder
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib
import numpy as np

import eagle3_jax as e3
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.trace import record

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "notebooks"))

from pictures import anatomy, bars, strips, style, trees  # noqa: E402

# The target is small. Its text after this prompt does not repeat one phrase over and over.
PROMPT = 'def get_size(value):\n    """Return the'
NEW_TOKENS = 30


def main() -> None:
    """Runs the pair and writes every picture."""
    style.use()
    # Paths in place of fonts, and the same bytes for the same picture.
    matplotlib.rcParams.update({"svg.hashsalt": "eagle3-jax", "svg.fonttype": "path"})
    target = e3.load_target()
    head = e3.load_drafter(target=target)
    _write(anatomy.eagle3_head(head.drafter.config, target.model.config.num_layers), "head")
    figures = {**_chain(target), **_laws(target), **_tree(target)}
    (HERE / "real_run.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _chain(target: e3.LoadedTarget) -> dict[str, Any]:
    decoder = e3.SpeculativeDecoder(target, e3.load_drafter(target=target), num_speculative_tokens=5)
    run = record(decoder, [PROMPT], max_new_tokens=[NEW_TOKENS], sampling=e3.SamplingParams(), seed=0)
    strip = strips.TokenStrip(_tokens(run, target), "a chain of five, greedy")
    (HERE / "strip.svg").write_text(strip.svg(), encoding="utf-8")
    plain = record(
        e3.SpeculativeDecoder(target), [PROMPT], max_new_tokens=[NEW_TOKENS], sampling=e3.SamplingParams(), seed=0
    )
    rounds = run.prompts[0]["rounds"]
    lanes = [
        (f"{name}: {len(one.prompts[0]['rounds'])} passes through the target", one)
        for name, one in (("Plain decoding", plain), ("EAGLE-3", run))
    ]
    race = [(words, strips.TokenStrip(_tokens(one, target), "the same text, pass by pass")) for words, one in lanes]
    (HERE / "race.svg").write_text(strips.svg(race, seconds_per_round=0.2), encoding="utf-8")
    return {
        "new_tokens": len(run.result.tokens[0]),
        "rounds": len(rounds),
        "drafted": 5 * len(rounds),
        "accepted": sum(one["num_accepted"] for one in rounds),
        "mean_acceptance_length": float(run.result.stats.mean_acceptance_length),
        "plain_rounds": len(plain.prompts[0]["rounds"]),
        "same_as_plain": plain.result.tokens[0] == run.result.tokens[0],
    }


def _tokens(run: Any, target: e3.LoadedTarget) -> list[strips.Token]:
    """The prompt and the new tokens; the last round may have accepted more than the limit allows."""
    prompt = run.prompts[0]
    return strips.tokens_of(prompt, target.tokenizer)[: len(prompt["prompt_ids"]) + NEW_TOKENS]


def _laws(target: e3.LoadedTarget) -> dict[str, Any]:
    """Both distributions of the first drafted token of a sampled chain, at temperature 1."""
    decoder = e3.SpeculativeDecoder(
        target,
        e3.load_drafter(target=target),
        num_speculative_tokens=4,
        draft_sampling=e3.DraftSampling.PROBABILISTIC,
    )
    played = decoder.step(
        decoder.prefill([PROMPT], max_new_tokens=NEW_TOKENS, sampling=e3.SamplingParams(temperature=1.0), seed=0)
    )
    root = int(played.draft.tokens[0, 0])
    text = jnp.asarray([[*decoder.encode(PROMPT), root]])
    places = jnp.arange(text.shape[1])[None]
    output = target.model(target.params, text, places, causal_mask(text.shape[1]))
    logits = np.asarray(target.model.unembed(target.params, output.final[0, -1]), np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    q = np.asarray(played.draft.probs[0, 1], np.float64)
    labels = [target.tokenizer.decode([token]) for token in range(p.size)]
    figure = bars.laws(
        p, q, labels=labels, residual=True, top=8, title="Next token: distribution of the target and of the head"
    )
    _write(figure, "laws")
    common = float(np.minimum(p, q).sum())
    return {"accepted_with_probability": common, "residual_mass": float(np.maximum(p - q, 0).sum())}


def _tree(target: e3.LoadedTarget) -> dict[str, Any]:
    """The round of a small tree with the most kinds of nodes: accepted, rejected, never visited."""
    shape = e3.DynamicTree(num_nodes=16, max_depth=4, top_k=4)
    decoder = e3.SpeculativeDecoder(target, e3.load_drafter(target=target), tree=shape)
    run = record(decoder, [PROMPT], max_new_tokens=[NEW_TOKENS], sampling=e3.SamplingParams(), seed=0)
    kinds = lambda one: len(set(trees.statuses(one["parents"], one["path"])))
    one = max(run.prompts[0]["rounds"], key=lambda one: (kinds(one), one["num_accepted"]))
    status = trees.statuses(one["parents"], one["path"])
    end = one["path"][-1] if one["path"] else 0
    added = style.CORRECTED if end in one["parents"] else style.BONUS
    words = [target.tokenizer.decode([token]) for token in [*one["tokens"], one["next_token"]]]
    parents = [*one["parents"], end]
    _write(
        trees.tree(
            words, parents, status=[*status, added], title="One round of a draft tree: sixteen nodes, one forward pass"
        ),
        "tree",
    )
    nodes = np.asarray(one["parents"])
    above = np.eye(nodes.size, dtype=bool)
    for node, parent in enumerate(nodes):
        if parent >= 0:
            above[node] |= above[parent]
    _write(trees.mask_map(above, words[:-1], title="Tree attention mask"), "mask")
    return {"tree_nodes": len(one["tokens"]), "tree_accepted": one["num_accepted"], "tree_added": added}


def _write(figure: Any, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Creator": None})
    text = (HERE / f"{name}.svg").read_text(encoding="utf-8")
    (HERE / f"{name}.svg").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
