"""What the loop relies on in a target: in blocks, in trees or one token at a time, a text is the same text."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from eagle3_jax.contract.report import Broken, NotRun
from eagle3_jax.contract.texts import (
    COUNTS,
    LENGTHS,
    LONG_BLOCK,
    LONG_ROWS,
    LONG_WIDTH,
    PADDING,
    PARENTS,
    PATHS,
    ROWS,
    SIZE,
    WIDTH,
    TargetSubject,
)

IN_PLACE = np.arange(SIZE)[None, :]
REAL = np.array(LENGTHS)[:, None] > IN_PLACE  # [ROWS SIZE], tokens of the prompts that are no padding
IS_NODE = np.ones((ROWS, SIZE), bool)
IS_NODE[PADDING] = False


def depends_on_the_text(subject: TargetSubject) -> str:
    """Another token changes the logits after the next one: what every other check goes by."""
    text = subject.text()
    other = text.copy()
    other[:, ::2] = (other[:, ::2] + 1) % subject.target.model.vocab_size
    moved = np.abs(subject.plain(text) - subject.plain(other)).max(-1)[:, 1::2] / subject.scale
    least = float(np.median(moved))
    if least < 5 * subject.tolerance:
        raise NotRun(
            f"logits after a token move by {least:.1g} of the largest one when the token before it is another; at "
            f"{subject.tolerance:g} no check here would see a token in the wrong place. Give it larger weights"
        )
    return f"the token before moves logits by {least:.1%} of the largest one"


def prefill_equals_tokens(subject: TargetSubject) -> str:
    """Logits of ragged prompts, fed at once and without a cache, whatever lies behind them."""
    text = subject.text()
    truth = subject.plain(text)[:, :SIZE]
    deviation = 0.0
    for garbage in (1, 2):
        answer, cache = subject.prefill(_padded(text, subject.text(garbage)))
        deviation = max(
            deviation, subject.agree(answer.logits, truth, "of a prompt is not what it is one by one", among=REAL)
        )
        if np.asarray(cache.length).tolist() != list(LENGTHS):
            raise Broken(f"after prompts of {list(LENGTHS)} tokens the cache has {np.asarray(cache.length).tolist()}")
    return _seen(deviation, 2 * REAL.sum())


def prefill_leaves_its_tokens(subject: TargetSubject) -> str:
    """A block behind ragged prompts sees the prompts, and nothing of what padded them."""
    text, deviation = subject.text(), 0.0
    truth = _behind(subject.plain(text), LENGTHS)
    for garbage in (1, 2):
        _, cache = subject.prefill(_padded(text, subject.text(garbage)))
        answer = subject.block(cache, _behind(text, LENGTHS))
        what = f"behind a prompt padded with text {garbage} is not what it is one by one"
        deviation = max(deviation, subject.agree(answer.logits, truth, what))
    return _seen(deviation, 2 * ROWS * SIZE)


def block_equals_tokens(subject: TargetSubject) -> str:
    """A chain behind prompts of one length, without padding."""
    text = subject.text()
    _, cache = subject.prefill(text[:, :SIZE], (SIZE,) * ROWS)
    answer = subject.block(cache, text[:, SIZE : 2 * SIZE])
    truth = subject.plain(text)[:, SIZE : 2 * SIZE]
    return _seen(subject.agree(answer.logits, truth, "of a block is not what it is one by one"), ROWS * SIZE)


def committed_block_equals_text(subject: TargetSubject) -> str:
    """After so many tokens of a chain, in order, those that follow are those of the text."""
    text = subject.text()
    _, cache = subject.prefill(text[:, :SIZE])
    answer = subject.block(cache, _behind(text, LENGTHS))
    cache = subject.commit(cache, answer, COUNTS)
    now = np.add(LENGTHS, COUNTS)
    found = subject.block(cache, _behind(text, now)).logits
    return _seen(subject.agree(found, _behind(subject.plain(text), now), "behind a chain is another"), ROWS * SIZE)


def node_equals_path(subject: TargetSubject) -> str:
    """Every node's logits are those of its own path, run as a chain."""
    text, draft = subject.text(), subject.text(3)[:, :SIZE]
    _, cache = subject.prefill(text[:, :SIZE])
    found = subject.block(cache, draft, PARENTS).logits
    expected = np.zeros_like(found)
    for node in range(SIZE):
        paths = [_path(row, node) for row in range(ROWS)]
        truth = subject.plain(_with(text, LENGTHS, [draft[row, path] for row, path in enumerate(paths)]))
        for row, path in enumerate(paths):
            expected[row, node] = truth[row, LENGTHS[row] + len(path) - 1]
    return _seen(subject.agree(found, expected, "of a tree is not the end of its path", among=IS_NODE), IS_NODE.sum())


def committed_path_equals_text(subject: TargetSubject) -> str:
    """After a path of a tree, what follows is what follows its text."""
    text, more = subject.text(), subject.text(4)[:, :SIZE]
    told = _told(subject, text[:, :SIZE], LENGTHS, more)
    whole = _with(text, LENGTHS, [told.draft[row, PATHS[row, :count]] for row, count in enumerate(COUNTS)])
    now = np.add(LENGTHS, COUNTS)
    truth = subject.plain(_with(whole, now, list(more)))
    return _seen(
        subject.agree(told.then, _behind(truth, now), "behind a path of a tree is not what it is behind its text"),
        ROWS * SIZE,
    )


def nothing_changes_nothing(subject: TargetSubject) -> str:
    """A row of which no token is kept goes on as if the block had not been."""
    text, draft, more = subject.text(), subject.text(3)[:, :SIZE], subject.text(4)[:, :SIZE]
    _, before = subject.prefill(text[:, :SIZE])
    truth = subject.block(before, more).logits
    deviation = 0.0
    for count in ((0, 0, 0), (0, 2, 0), (3, 0, 1)):
        idle = np.array(count)[:, None] == np.zeros(SIZE)
        for parents, nodes in ((None, None), (PARENTS, PATHS)):
            after = subject.commit(before, subject.block(before, draft, parents), count, nodes)
            if (np.asarray(after.length) != np.add(LENGTHS, count)).any():
                raise Broken(
                    f"committing {list(count)} tokens took lengths from {list(LENGTHS)} to "
                    f"{np.asarray(after.length).tolist()}"
                )
            found = subject.block(after, more).logits
            deviation = max(deviation, subject.agree(found, truth, "differs after 0 tokens were kept", among=idle))
    return _seen(deviation, 2 * 6 * SIZE)


def is_alone_in_its_row(subject: TargetSubject) -> str:
    """A row is the same in a batch of one, and whatever its neighbours hold."""
    text, more = subject.text(), subject.text(4)[:, :SIZE]
    truth, deviation = _told(subject, text[:, :SIZE], LENGTHS, more), 0.0
    other, other_more = subject.text(5), subject.text(6)[:, :SIZE]
    for row in range(ROWS):
        own = (np.arange(ROWS) == row)[:, None]
        length = tuple(LENGTHS[row] if index == row else SIZE - 1 - index for index in range(ROWS))
        mixed = _told(
            subject, np.where(own, text, other)[:, :SIZE], length, np.where(own, more, other_more),
            draft=np.where(own, truth.draft, other[:, -SIZE:]),
        )  # fmt: skip
        alone = _told(
            subject, text[row : row + 1, :SIZE], LENGTHS[row : row + 1], more[row : row + 1],
            draft=truth.draft[row : row + 1], rows=slice(row, row + 1),
        )  # fmt: skip
        for found, place, how in ((mixed, row, "when its neighbours hold other tokens"), (alone, 0, "without them")):
            for stage in ("tree", "then"):
                one, whole = getattr(found, stage), getattr(truth, stage)
                here = np.array(whole)
                here[row] = one[place]
                among = IS_NODE if stage == "tree" else None
                deviation = max(deviation, subject.agree(here, whole, f"is another {how}", among=among))
    return _seen(deviation, 4 * ROWS * SIZE)


def hides_what_the_mask_hides(subject: TargetSubject) -> str:
    """Another token in a node changes only those who see it."""
    text, draft = subject.text(), subject.text(3)[:, :SIZE]
    _, cache = subject.prefill(text[:, :SIZE])
    before = subject.block(cache, draft, PARENTS).logits
    sees = np.array(
        [[[seen in _path(row, node) for seen in range(SIZE)] for node in range(SIZE)] for row in range(ROWS)]
    )
    deviation = 0.0
    for node in range(SIZE):
        changed = draft.copy()
        changed[:, node] = (changed[:, node] + 1) % subject.target.model.vocab_size
        after = subject.block(cache, changed, PARENTS).logits
        what = f"changes with node {node}, which it does not see"
        deviation = max(deviation, subject.agree(after, before, what, among=~sees[:, :, node] & IS_NODE))
    return _seen(deviation, int((~sees & IS_NODE[:, :, None]).sum()))


def long_text_equals_tokens(subject: TargetSubject) -> str:
    """Long prompts in many rows, a block of two branches after them, and a chain after one of the branches.

    What they are compared with is fed token by token, three rows at a time. Below 32 bits the tolerance is doubled:
    recurrent states round off more over a long text (Qwen3-Next in bfloat16: 4 % of the largest logit).
    """
    if subject.given is None and subject.rounds_off:
        subject = dataclasses.replace(subject, given=2 * subject.tolerance)
    width = min(LONG_WIDTH, subject.target.max_positions)
    block = min(LONG_BLOCK, width // 4)
    rng, prompt, rows = np.random.default_rng([subject.seed, 7]), width - 2 * block, np.arange(LONG_ROWS)[:, None]
    text, other = rng.integers(0, subject.target.model.vocab_size, (2, LONG_ROWS, width)).astype(np.int32)
    length = np.linspace(prompt, 1, LONG_ROWS).astype(int)
    node = np.arange(block)
    branches = [np.flatnonzero((node == 0) | (node % 2 == odd)) for odd in (1, 0)]
    parents = np.broadcast_to(np.maximum(node - 2, 0) - (node == 0), text[:, :block].shape).astype(np.int32)
    draft, texts, expected = other[:, :block], [], np.zeros((LONG_ROWS, block, subject.target.model.vocab_size))
    for branch in branches:
        places = length[:, None] + np.arange(len(branch))
        texts.append(text.copy())
        texts[-1][rows, places] = draft[:, branch]
        truth = subject.plain_by_threes(texts[-1])
        expected[:, branch] = truth[rows, places]

    answer, cache = subject.prefill(text[:, :prompt], tuple(length.tolist()))
    real = np.arange(prompt) < length[:, None]
    deviation = subject.agree(
        answer.logits, truth[:, :prompt], "of a long prompt is not what it is one by one", among=real
    )
    answer = subject.block(cache, draft, parents)
    deviation = max(
        deviation, subject.agree(answer.logits, expected, f"of a tree of {block} is not the end of its path")
    )
    count = np.resize([len(branches[1]), 0, 3, 1], LONG_ROWS)
    nodes = np.broadcast_to(np.resize(branches[1], block), draft.shape).astype(np.int32)
    cache = subject.commit(cache, answer, tuple(count.tolist()), nodes)
    places = (length + count)[:, None] + node
    found = subject.block(cache, texts[1][rows, places]).logits
    what = f"of a block of {block} behind a path is not what it is behind its text"
    deviation = max(deviation, subject.agree(found, truth[rows, places], what))
    return (
        f"{LONG_ROWS} rows, prompts of 1 to {prompt} tokens, blocks of {block}, texts of {width}; logits off by "
        f"{deviation:.0e} of the largest one at most"
    )


class _Told(NamedTuple):
    """Logits of a tree behind prompts, and of a chain behind one of its paths."""

    draft: np.ndarray
    tree: np.ndarray
    then: np.ndarray


def _told(
    subject: TargetSubject,
    prompts: np.ndarray,
    length: tuple[int, ...],
    more: np.ndarray,
    *,
    draft: np.ndarray | None = None,
    rows: slice = slice(None),
) -> _Told:
    """Prompts, a tree, one of its paths committed, a chain behind it."""
    draft = subject.text(3)[:, :SIZE] if draft is None else draft
    _, cache = subject.prefill(prompts, length)
    tree = subject.block(cache, draft, PARENTS[rows])
    cache = subject.commit(cache, tree, COUNTS[rows], PATHS[rows])
    return _Told(draft, tree.logits, subject.block(cache, more).logits)


def _path(row: int, node: int) -> list[int]:
    """From the root to a node."""
    path = [node]
    while PARENTS[row, path[0]] >= 0:
        path.insert(0, int(PARENTS[row, path[0]]))
    return path


def _padded(text: np.ndarray, garbage: np.ndarray) -> np.ndarray:
    """Prompts, and something behind them."""
    return np.where(REAL, text[:, :SIZE], garbage[:, :SIZE])


def _behind(values: np.ndarray, length: tuple[int, ...] | np.ndarray) -> np.ndarray:
    """A block's worth of what lies behind so many tokens of each row."""
    return np.stack([values[row, start : start + SIZE] for row, start in enumerate(length)])


def _with(text: np.ndarray, length: tuple[int, ...] | np.ndarray, more: list[np.ndarray]) -> np.ndarray:
    """Texts that go on otherwise after so many tokens."""
    text = text.copy()
    for row, (start, tokens) in enumerate(zip(length, more, strict=True)):
        text[row, start : start + len(tokens)] = tokens[: WIDTH - start]
    return text


def _seen(deviation: float, tokens: int | np.integer) -> str:
    return f"{int(tokens)} tokens, logits off by {deviation:.0e} of the largest one at most"
