"""Records distributions of the chat model and of its head.

    python docs/recorded/drafting.py RECORD mt_bench.jsonl humaneval.jsonl gsm8k.jsonl

Takes half an hour on two cores. An interrupted run continues where it stopped. The page drafting.md
computes with the record.

The target writes one text for every prompt and temperature, of tokens ``y_0 y_1 ...``. For each
position ``t`` from 1 on, the record has two kinds of distributions, at the temperature of the text:

* ``p``, the target's distribution after ``y_0 .. y_{t-1}``;
* ``q_k`` for ``k = 1 .. 5``, the head's distribution in draft step ``k`` of a round whose root is
  ``y_{t-k}``. The head reads the target's features up to that root. For the ``k - 1`` tokens of the
  text since then it reads its own output.

They have the probabilities of a few listed tokens: those of at least 0.5 % among the 24 likeliest
of ``p`` and among the 24 likeliest of ``q_1``, the likeliest of every ``q_k``, and ``y_t``. For all
other tokens together there are the sum of ``p``, the sum of each ``q_k``, and the sum of each
``min(p, q_k)``. At temperature 0 every distribution is a point mass.

A probability ``a`` is one byte, ``255 √(-ln a / 14)`` rounded; 255 is less than a millionth. The
bytes of a position are the number of listed tokens; the lower and the upper bytes of their ids, the
likeliest of ``p`` first; ``p`` of each and its sum over the others; for every ``k``, ``q_k`` of
each, its sum over the others and the sum of the minima. The positions of a text are compressed
together by gzip.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eagle3_jax as e3
from eagle3_jax.devices.compilation import keep_compiled_programs
from eagle3_jax.measure.environment import environment
from eagle3_jax.prompts.benchmark import Prompt, read_prompts
from eagle3_jax.training.batches import TTTBatch
from eagle3_jax.training.ttt import unroll_head

LENGTHS = {0.0: 48, 0.25: 24, 0.5: 24, 0.75: 24, 1.0: 24}  # new tokens at each temperature
PROMPTS = 100
STEPS = 5
LIKELIEST = 24
LEAST = 0.005  # of a listed token
LONGEST = 256  # tokens of a prompt with its text
SMALLEST_LOG = -14.0  # of a probability that is not zero


def main() -> None:
    """Adds the prompts that the record does not have yet."""
    keep_compiled_programs(None)
    path = Path(sys.argv[1])
    files = sys.argv[2:]
    target = e3.load_target("smollm2", weights="int8")
    head = e3.load_drafter("smollm2", target=target)
    decode = target.tokenizer.decode  # type: ignore[union-attr]
    record: dict[str, Any] = {
        "about": environment(target="smollm2", drafter="smollm2", prompt_files=files),
        "temperatures": list(LENGTHS),
        "steps": STEPS,
        "compared": min(LENGTHS.values()),  # tokens of a text that averages are over
        "pieces": {},
        "prompts": [],
    }
    if path.exists():
        record = json.loads(path.read_text(encoding="utf-8"))

    for prompt in chosen(files, target)[len(record["prompts"]) :]:
        texts = written(target, prompt)
        logits = logits_of(target, head, prompt, texts)
        entries = []
        for row, temperature in enumerate(LENGTHS):
            tokens, data = packed(texts[row], logits, row, temperature)
            record["pieces"] |= {str(token): decode([token]) for token in tokens}
            entries.append({"tokens": texts[row], "data": data})
        task = Path(files[len(record["prompts"]) % len(files)]).stem
        entry = {"task": task, "name": prompt.name, "question": prompt.text, "texts": entries}
        record["prompts"].append(entry)
        path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
        print(len(record["prompts"]), prompt.name, flush=True)


def chosen(files: list[str], target: e3.LoadedTarget) -> list[Prompt]:
    """Returns prompts of all files in turn, from every part of each file."""
    share = -(-PROMPTS // len(files))
    columns = []
    for file in files:
        prompts = [
            prompt
            for prompt in read_prompts(Path(file), target, max_new_tokens=1)
            if len(prompt.tokens) + max(LENGTHS.values()) <= LONGEST
        ]
        columns.append([prompts[len(prompts) * index // share] for index in range(share)])
    return [prompt for row in zip(*columns, strict=True) for prompt in row][:PROMPTS]


def written(target: e3.LoadedTarget, prompt: Prompt) -> list[list[int]]:
    """Returns the text that the target writes at each temperature."""
    return (
        e3.SpeculativeDecoder(target)
        .generate(
            [prompt.tokens] * len(LENGTHS),
            max_new_tokens=[*LENGTHS.values()],
            sampling=e3.SamplingParams(temperature=np.array([*LENGTHS])),
            seed=1,
        )
        .tokens
    )


def logits_of(
    target: e3.LoadedTarget, head: e3.LoadedDrafter, prompt: Prompt, texts: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the target's logits and the head's.

    Returns:
        ``[B N V]`` and ``[K B N V]``. Entry ``n`` is the target's after ``y_n``, and the head's in
        draft step ``k`` of the round with root ``y_n``.
    """
    tokens = np.zeros((len(texts), LONGEST), np.int32)
    for row, text in enumerate(texts):
        ids = [*prompt.tokens, *text]
        tokens[row, : len(ids)] = ids
    start = len(prompt.tokens)
    p, q = forward(target.model, head.drafter, target.params, head.params, tokens, start)
    over_target = np.full((*q.shape[:-1], p.shape[-1]), -np.inf, np.float32)
    over_target[..., np.asarray(head.params["draft_to_target"])] = q
    return np.asarray(p), over_target


@jax.jit(static_argnames=("target", "drafter"))
def forward(target, drafter, target_params, head_params, tokens, start):
    """Runs the target once and the head for every draft step."""
    everywhere = jnp.ones_like(tokens, bool)
    batch = TTTBatch(tokens=tokens, attention_mask=everywhere, loss_mask=everywhere)
    layers = drafter.aux_layers
    output = target(target_params, tokens, batch.positions, batch.seen, aux_layers=layers)
    network = drafter.bind(head_params)
    streams = unroll_head(drafter, head_params, output.features, batch, STEPS)

    def of_text(x, first):
        return jax.lax.dynamic_slice_in_dim(x, first, max(LENGTHS.values()), axis=1)

    p = target.unembed(target_params, of_text(output.final, start))
    # The head reads a root next to the features of the token before it.
    q = [drafter.logits(head_params, network, of_text(x, start - 1)) for x in streams]
    return p, jnp.stack(q)


def packed(
    text: list[int], logits: tuple[np.ndarray, np.ndarray], row: int, temperature: float
) -> tuple[set[int], str]:
    """Returns the tokens of a text and its lists, and the distributions in base64."""
    target, head = logits
    data = b""
    used = set(text)
    for index, text_token in enumerate(text[1:]):
        p = distribution(target[row, index], temperature)
        if temperature == 0:
            # Of approximately tied logits the text decides.
            p = point_mass(p.size, text_token)
        steps = range(min(STEPS, index + 1))
        qs = [distribution(head[step, row, index - step], temperature) for step in steps]
        tokens = listed(p, qs, text_token)
        used |= {*tokens.tolist()}
        data += position(p, qs, tokens)
    return used, base64.b64encode(gzip.compress(data, mtime=0)).decode()


def distribution(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Returns the softmax at a temperature; at 0 a point mass."""
    if temperature == 0:
        return point_mass(logits.size, int(logits.argmax()))
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def point_mass(size: int, token: int) -> np.ndarray:
    """Returns the distribution that always gives one token."""
    probs = np.zeros(size)
    probs[token] = 1
    return probs


def listed(p: np.ndarray, qs: list[np.ndarray], text_token: int) -> np.ndarray:
    """Returns the listed tokens of a position, the likeliest of ``p`` first."""
    tokens = {text_token, int(p.argmax()), *(int(q.argmax()) for q in qs)}
    for probs in (p, qs[0]):
        likeliest = np.argpartition(-probs, LIKELIEST)[:LIKELIEST]
        tokens |= {*likeliest[probs[likeliest] >= LEAST].tolist()}
    ids = np.array(sorted(tokens))
    return ids[np.argsort(-p[ids], kind="stable")]


def position(p: np.ndarray, qs: list[np.ndarray], tokens: np.ndarray) -> bytes:
    """Returns the bytes of a position."""
    others = np.ones(p.size, bool)
    others[tokens] = False
    parts = [[tokens.size], tokens & 255, tokens >> 8, as_bytes(p[tokens]), [as_byte(p[others])]]
    for q in qs:
        sums = [as_byte(q[others]), as_byte(np.minimum(p, q)[others])]
        parts += [as_bytes(q[tokens]), sums]
    return b"".join(bytes(part) for part in map(list, parts))


def as_bytes(probabilities: np.ndarray) -> np.ndarray:
    """Returns probabilities as bytes. Only the likeliest has the smallest byte."""
    logs = np.log(np.maximum(probabilities, np.exp(SMALLEST_LOG)))
    codes = np.rint(255 * np.sqrt((logs / SMALLEST_LOG).clip(0, 1))).astype(int)
    likeliest = probabilities.argmax()
    is_tied = codes == codes[likeliest]
    is_tied[likeliest] = False
    return np.minimum(codes + is_tied, 255)


def as_byte(probabilities: np.ndarray) -> int:
    """Returns the sum of probabilities as a byte."""
    return int(as_bytes(probabilities.sum(keepdims=True))[0])


if __name__ == "__main__":
    main()
