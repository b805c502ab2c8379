"""N-grams against suffixes: how many tokens a round emits when the text drafts itself, and what a draft costs.

The texts are fixed (what the shipped target writes after its held-out prompts, and Python modules that are written
again with a name changed, as an agent edits a file), so nothing but the drafter runs and counts repeat exactly::

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
from eagle3_jax.load import bundled

LENGTH = 5
DRAFTERS = {
    "n-gram, up to 4": NGram(LENGTH),
    "n-gram, up to 24": NGram(LENGTH, max_ngram=24),
    "suffix": Suffix(LENGTH),
    "suffix, drafts end below 0.3": Suffix(LENGTH, min_probability=0.3),
}
MODULES = {"textwrap": "text", "bisect": "lo", "heapq": "heap", "sched": "event", "shlex": "state", "glob": "pathname"}


@functools.partial(jax.jit, static_argnames="drafter")
def replay(drafter: Any, text: jax.Array, start: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
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
    """Prompts and what follows them, by kind."""
    target = e3.load_target(dtype="mixed")
    decoder = e3.SpeculativeDecoder(target, stop_tokens=())
    rows = [json.loads(line) for line in bundled("prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {}
    for kind in ("code", "prose"):
        prompts = [ids for row in rows if row["kind"] == kind and len(ids := decoder.encode(row["prompt"])) < 300][:8]
        written = decoder.generate(prompts, max_new_tokens=192).tokens
        found[f"the shipped target, {kind}"] = list(zip(prompts, written, strict=True))
    found["a file again, one name changed"] = []
    for module, name in MODULES.items():
        source = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text(encoding="utf-8")[:6000]
        assert target.tokenizer is not None
        before, after = (
            target.tokenizer.encode(one).ids for one in (source, re.sub(rf"\b{name}\b", "renamed", source))
        )
        found["a file again, one name changed"].append((before, after))
    return found


def main() -> None:
    """Print a row for each kind of text and drafter."""
    for kind, pairs in texts().items():
        size = max(len(prompt) + len(rest) for prompt, rest in pairs) + LENGTH + 1
        text = np.zeros((len(pairs), size), np.int32)
        for row, (prompt, rest) in enumerate(pairs):
            text[row, : len(prompt) + len(rest)] = prompt + rest
        start = np.array([len(prompt) + 1 for prompt, _ in pairs], np.int32)
        end = np.array([len(prompt) + len(rest) for prompt, rest in pairs], np.int32)
        for name, drafter in DRAFTERS.items():
            rounds, drafted = replay(drafter, text, start, end)
            alone = (text[:1], start[:1], end[:1])
            count = int(replay(drafter, *alone)[0][0])  # and compiled
            begun = time.perf_counter()
            jax.block_until_ready(replay(drafter, *alone))
            took = 1e3 * (time.perf_counter() - begun) / count
            emitted = int((end - start).sum()) / int(rounds.sum())
            share = int(drafted.sum()) / int(rounds.sum())
            print(f"{kind:32} {name:30} {emitted:.3f} tokens and {share:.2f} drafted a round, {took:.2f} ms a draft")


if __name__ == "__main__":
    main()
