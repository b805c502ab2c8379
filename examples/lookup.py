"""N-grams against suffixes: how many tokens a round emits when the text drafts itself, and what a draft costs.

The texts are fixed (what the shipped target writes after its held-out prompts, and Python modules
that are written again with a name changed, as an agent edits a file), so nothing but the drafter
runs and counts repeat exactly::

    python examples/lookup.py
"""

from __future__ import annotations

import functools
import json
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eagle3_jax as e3
from eagle3_jax.drafters import NGram, Suffix
from eagle3_jax.files.sources import bundled

LENGTH = 5
DRAFTERS = {
    "n-gram, up to 4": NGram(LENGTH),
    "n-gram, up to 24": NGram(LENGTH, max_ngram=24),
    "suffix": Suffix(LENGTH),
    "suffix, drafts end below 0.3": Suffix(LENGTH, min_probability=0.3),
}
MODULES = {
    "textwrap": "text",
    "bisect": "lo",
    "heapq": "heap",
    "sched": "event",
    "shlex": "state",
    "glob": "pathname",
}


@functools.partial(jax.jit, static_argnames="drafter")
def replay(
    drafter: Any, text: jax.Array, start: jax.Array, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rounds and drafted tokens of each row, if the target writes ``text[start:end]``."""

    def step(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        length, rounds, drafted = carry
        known = jnp.where(jnp.arange(text.shape[1]) < length[:, None], text, 0)
        state = drafter.init(None, *text.shape).replace(tokens=known, length=length)
        draft = drafter.propose(None, state, None, e3.SamplingParams())
        ahead = length[:, None] + jnp.arange(LENGTH)
        written = jnp.take_along_axis(text, jnp.minimum(ahead, text.shape[1] - 1), axis=1)
        right = (draft.tokens[:, 1:] == written) & draft.valid[:, 1:] & (ahead < end[:, None])
        accepted = jnp.cumprod(right.astype(jnp.int32), axis=1).sum(axis=1)
        running = length < end
        drafted = drafted + jnp.where(running, draft.valid[:, 1:].sum(axis=1), 0)
        return jnp.where(running, length + accepted + 1, length), rounds + running, drafted

    zero = jnp.zeros_like(start)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < end), step, (start, zero, zero))[1:]


def texts() -> dict[str, list[tuple[list[int], list[int]]]]:
    """Returns prompts and the texts that follow them, by kind."""
    target = e3.load_target(dtype="mixed")
    decoder = e3.SpeculativeDecoder(target, stop_tokens=())
    rows = [
        json.loads(line)
        for line in bundled("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    pairs: dict[str, list[tuple[list[int], list[int]]]] = {}
    for kind in ("code", "prose"):
        prompts = [
            ids
            for row in rows
            if row["kind"] == kind and len(ids := decoder.target.encode(row["prompt"])) < 300
        ][:8]
        written = decoder.generate(prompts, max_new_tokens=192).tokens
        pairs[f"the shipped target, {kind}"] = list(zip(prompts, written, strict=True))
    pairs["a file again, one name changed"] = []
    for module, name in MODULES.items():
        source = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text(encoding="utf-8")[
            :6000
        ]
        assert target.tokenizer is not None
        renamed = re.sub(rf"\b{name}\b", "renamed", source)
        before = target.tokenizer.encode(source).ids
        after = target.tokenizer.encode(renamed).ids
        pairs["a file again, one name changed"].append((before, after))
    return pairs


def main() -> None:
    """Prints a row for each kind of text and drafter."""
    for kind, pairs in texts().items():
        lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
        size = max(lengths) + LENGTH + 1
        text = np.zeros((len(pairs), size), np.int32)
        for row, (prompt, answer) in enumerate(pairs):
            text[row, : lengths[row]] = prompt + answer
        start = np.array([len(prompt) + 1 for prompt, _ in pairs], np.int32)
        end = np.array(lengths, np.int32)
        for name, drafter in DRAFTERS.items():
            rounds, drafted = replay(drafter, text, start, end)
            first_row = (text[:1], start[:1], end[:1])
            rounds_of_first, _ = replay(drafter, *first_row)  # and compiled
            begin = time.perf_counter()
            jax.block_until_ready(replay(drafter, *first_row))
            milliseconds = 1e3 * (time.perf_counter() - begin) / int(rounds_of_first[0])
            emitted = int((end - start).sum()) / int(rounds.sum())
            share = int(drafted.sum()) / int(rounds.sum())
            counts = f"{emitted:.3f} tokens and {share:.2f} drafted a round"
            print(f"{kind:32} {name:30} {counts}, {milliseconds:.2f} ms a draft")


if __name__ == "__main__":
    main()
