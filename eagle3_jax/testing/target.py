"""The contract of a target, :func:`check_target`: the logits of a text do not depend on how it is fed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.cache import Cache, LayerCache
from eagle3_jax.checks import require_returned, require_rows, require_same, require_target
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.testing.report import (
    PROTOCOL,
    Broken,
    ContractReport,
    NotRun,
    Skipped,
    class_name,
    examine,
    require_stable_hash,
)
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, EmbeddingTables, Observation, SamplingParams, TargetOutput

ROWS, SIZE = 3, 6  # rows, and tokens of a block
LENGTHS = (5, 1, 3)  # ragged prompts, fed as SIZE tokens
WIDTH = 20  # tokens of a text: a prompt, a block and one after it, or a prompt and what is generated
CAPACITY = 128
LONG_ROWS, LONG_BLOCK, LONG_WIDTH = 9, 16, 96  # of the check of long texts
NEW = 12  # tokens that are generated

# A tree for each row: paths that cross in the block's order, one node that is padding, and a path so deep and so late
# in the block that a window of up to three positions shows whether it goes by positions or by slots.
PARENTS = np.array([[-1, 0, 0, 2, 1, 3], [-1, 0, 1, 0, -1, 3], [-1, 0, 0, 2, 3, 4]], np.int32)
PATHS = np.array([[0, 2, 3, 5, 0, 0], [0, 3, 5, 0, 0, 0], [0, 2, 3, 4, 5, 0]], np.int32)  # the committed nodes
COUNTS = (4, 2, 5)  # how many of them
REAL = np.array(LENGTHS)[:, None] > np.arange(SIZE)  # [ROWS SIZE], tokens of the prompts that are no padding
IS_NODE = np.array([[True] * 6, [True, True, True, True, False, True], [True] * 6])


def check_target(
    target: LoadedTarget,
    *,
    checks: Collection[str] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> ContractReport:
    """Run a target of your own through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_target(target))`` shows the report. Everything is compared with the target's
    own logits for texts that are fed token by token, so a model that is wrong in the same way everywhere passes:
    compare its logits with another implementation first. It compiles about twenty-five programs; random weights at a
    small size are the place to start, as long as the output depends on the text.

    **Limits.** Most checks use 3 rows, texts of up to 20 tokens and blocks of 6. One check uses 9 rows, texts of 96
    tokens (fewer if ``max_positions`` is smaller), prompts of up to 64 and blocks of 16. A fault that starts beyond
    these sizes is not detected, nor is one that moves logits by less than ``tolerance``, nor one that is the same token
    by token (such as a wrong angle at position 24, whatever the block).

    Args:
        target: The target with its parameters.
        checks: Names of :data:`TARGET_CHECKS`; all of them by default.
        tolerance: Largest deviation of a logit, as a share of the largest logit. Default: 1e-4, and 3e-2 for a
            target with parameters or a cache of less than 32 bits (6e-2 for long texts).
        seed: Random seed.

    Raises:
        ValueError: ``checks`` names one that does not exist.
    """
    findings = examine(TargetSubject(target, tolerance, seed), TARGET_CHECKS, checks)
    return ContractReport(f"{class_name(target.model)}, {target.name}", findings)


class Answer(NamedTuple):
    """The output of a target for a block, on the host except for what its cache takes."""

    logits: Float[np.ndarray, "B T V"]
    final: Float[np.ndarray, "B T D"]
    features: Float[np.ndarray, "B T A D"]
    written: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TargetSubject:
    """A target, and the programs that call it.

    Attributes:
        target: The target with its parameters.
        given: The tolerance; ``None`` chooses it by the types of the target.
        seed: Random seed.
    """

    target: LoadedTarget
    given: float | None = None
    seed: int = 0

    def text(self, which: int = 0, size: int = WIDTH) -> Int[np.ndarray, "B T"]:
        """The first ``size`` of ``WIDTH`` random tokens, ``[ROWS size]``."""
        rng = np.random.default_rng([self.seed, which])
        return rng.integers(0, self.target.model.vocab_size, (ROWS, WIDTH)).astype(np.int32)[:, :size]

    def empty(self, batch: int = ROWS) -> Cache:
        """An empty cache."""
        return self.target.model.init_cache(batch, CAPACITY)

    @functools.cached_property
    def layers(self) -> int:
        """``L``: the cache has a part for each."""
        return len(self.empty(1).layers)

    @functools.cached_property
    def rounds_off(self) -> bool:
        """Whether it computes in less than 32 bits."""
        leaves = jax.tree.leaves((self.target.params, self.empty(1).layers))
        return any(jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4 for leaf in leaves)

    @property
    def tolerance(self) -> float:
        """Largest deviation of a logit that rounding explains, as a share of the largest logit."""
        return self.given if self.given is not None else 3e-2 if self.rounds_off else 1e-4

    @functools.cached_property
    def scale(self) -> float:
        """The largest logit."""
        return max(float(np.abs(self.prefill(self.text(size=SIZE))[0].logits).max()), 1e-9)

    def prefill(
        self, tokens: Int[np.ndarray, "B T"], length: Sequence[int] = LENGTHS, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Answer, Cache]:
        """The answer to prompts with ``length`` real tokens each, and the cache after them."""
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        real = jnp.asarray(length, jnp.int32)
        answer = self._ask(tokens, positions, causal_mask(tokens.shape[1]), None, real, aux_layers)
        return answer, self._fill(answer.written, real)

    def block(
        self,
        cache: Cache,
        tokens: Int[np.ndarray, "B T"],
        parents: Int[np.ndarray, "B T"] | None = None,
        *,
        aux_layers: tuple[int, ...] = (),
    ) -> Answer:
        """The answer to a block after a cache: a tree, or a chain without parents."""
        if parents is None:
            mask, depth = causal_mask(tokens.shape[1]), jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        else:
            mask = ancestor_mask(jnp.asarray(parents), tokens.shape[1])
            depth = depths(mask)
        return self._ask(tokens, cache.length[:, None] + depth, mask, cache, None, aux_layers)

    def commit(
        self, cache: Cache, answer: Answer, count: Sequence[int], nodes: Int[np.ndarray, "B T"] | None = None
    ) -> Cache:
        """The cache with ``count`` tokens of a block: the first ones, or the given nodes."""
        return self._commit(cache, answer.written, jnp.asarray(count, jnp.int32), nodes)

    def plain(self, text: Int[np.ndarray, "B W"]) -> Float[np.ndarray, "B W V"]:
        """Logits of texts that are fed token by token: the reference of all checks. ``ROWS`` rows at a time."""
        parts = [self._plain(self.target.params, jnp.asarray(text[at : at + ROWS])) for at in range(0, len(text), ROWS)]
        return np.concatenate([np.asarray(part, np.float64) for part in parts])

    def agree(
        self,
        found: Float[np.ndarray, "B T V"],
        expected: Float[np.ndarray, "B T V"],
        what: str,
        *,
        among: Bool[np.ndarray, "B T"] | None = None,
    ) -> float:
        """The largest deviation of logits, as a share of the largest logit.

        Args:
            found: Logits.
            expected: Other logits.
            what: Completes "token 2 of row 1 ...".
            among: Which tokens count; all by default.

        Raises:
            Broken: It is more than the tolerance.
        """
        gap = np.abs(np.asarray(found, np.float64) - expected).max(-1) / self.scale
        gap = np.where(np.isfinite(gap), gap, np.inf)
        gap = gap if among is None else np.where(among, gap, 0.0)
        row, token = np.unravel_index(gap.argmax(), gap.shape)
        if gap[row, token] > self.tolerance:
            raise Broken(
                f"token {token} of row {row} {what}: logits off by {gap[row, token]:.1g} of the largest one; expected "
                f"at most {self.tolerance:g}"
            )
        return float(gap[row, token])

    def _ask(
        self, tokens: Any, positions: Any, mask: Any, cache: Cache | None, length: Any, aux_layers: tuple[int, ...]
    ) -> Answer:
        params = self.target.params
        output, logits = self._forward(
            params, jnp.asarray(tokens), jnp.asarray(positions), mask, cache, length, aux_layers
        )
        wide = lambda array: np.asarray(array, np.float64)
        return Answer(wide(logits), wide(output.final), wide(output.features), output.written)

    @functools.cached_property
    def _forward(self) -> Any:
        model = self.target.model

        @functools.partial(jax.jit, static_argnums=6)
        def forward(
            params: Any, tokens: Array, positions: Array, mask: Array, cache: Any, length: Any, aux_layers: tuple
        ) -> tuple[TargetOutput, Array]:
            output = model(params, tokens, positions, mask, cache, aux_layers=aux_layers, length=length)
            return output, model.unembed(params, output.final)

        return forward

    @functools.cached_property
    def _fill(self) -> Any:
        return jax.jit(lambda written, count: self.empty(count.shape[0]).fill(written, count))

    @functools.cached_property
    def _commit(self) -> Any:
        return jax.jit(lambda cache, written, count, nodes: cache.commit(written, count, nodes))

    @functools.cached_property
    def _plain(self) -> Any:
        model = self.target.model

        @jax.jit
        def plain(params: Any, text: Array) -> Array:
            one = jnp.ones((text.shape[0],), jnp.int32)

            def feed(cache: Cache, token: Array) -> tuple[Cache, Array]:
                output = model(params, token[:, None], cache.length[:, None], causal_mask(1), cache)
                return cache.commit(output.written, one), model.unembed(params, output.final)[:, 0]

            _, logits = jax.lax.scan(feed, self.empty(text.shape[0]), text.T)
            return jnp.moveaxis(logits, 0, 1)

        return plain


def keeps_the_protocol(subject: TargetSubject) -> str:
    """It is an instance with every member, a stable hash, and the vocabulary that it was loaded with."""
    model = subject.target.model
    require_target(model)
    require_stable_hash(model)
    if model.vocab_size != subject.target.vocab_size:
        raise Broken(f"it has {model.vocab_size} tokens, and was loaded as one of {subject.target.vocab_size}")
    return f"a vocabulary of {model.vocab_size}"


def cache_leads_with_the_batch(subject: TargetSubject) -> str:
    """An empty cache has a part for each layer, whose leaves lead with the batch, and lengths of 0."""
    for batch in (1, ROWS):
        cache = subject.empty(batch)
        if not isinstance(cache, Cache):
            raise Broken(f"init_cache returned {type(cache).__name__}; expected an eagle3_jax.Cache")
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, LayerCache):
                raise Broken(f"layer {index} of the cache is {type(layer).__name__}; expected `fill` and `commit`")
        require_rows(subject.target.model, cache, batch, what="init_cache gave cache")
        if cache.length.dtype != np.int32 or np.asarray(cache.length).any():
            raise Broken(f"an empty cache has length {cache.length}; expected zeros of int32")
    return f"parts: {', '.join(type(layer).__name__ for layer in cache.layers)}"


def keeps_shapes(subject: TargetSubject) -> str:
    """Forwards give the shapes of the protocol, with a cache and without."""
    plain, _ = (_traced_final(subject, cache) for cache in (None, subject.empty()))
    return f"width {plain.shape[-1]}"


def _traced_final(subject: TargetSubject, cache: Cache | None) -> jax.ShapeDtypeStruct:
    """Final states of a forward of SIZE tokens in every row and no auxiliary layers; traced, checked and not run."""
    model, tokens = subject.target.model, jnp.zeros((ROWS, SIZE), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(SIZE, dtype=jnp.int32), (ROWS, SIZE))
    length = jnp.full((ROWS,), SIZE, jnp.int32) if cache is None else None

    def run(params: Any, cache: Any) -> jax.Array:
        output = model(params, tokens, positions, causal_mask(SIZE), cache, length=length)
        width, of_features = (
            (output.final.shape[-1], output.features.shape[-1]) if isinstance(output, TargetOutput) else (0, 0)
        )
        require_returned("a forward", output, TargetOutput, B=ROWS, T=SIZE, A=0, D=of_features, E=width)
        if not isinstance(output.written, tuple) or len(output.written) != subject.layers:
            raise Broken(f"`written` is no tuple with one part for each of the {subject.layers} layers of the cache")
        return output.final

    return jax.eval_shape(run, subject.target.params, cache)


def gives_float32(subject: TargetSubject) -> str:
    """Logits are float32 ``[... V]`` for any leading shape."""
    model, final = subject.target.model, _traced_final(subject, None)
    for leading in ((), (ROWS,), (ROWS, SIZE)):
        rows = jax.ShapeDtypeStruct((*leading, final.shape[-1]), final.dtype)
        logits = jax.eval_shape(model.unembed, subject.target.params, rows)
        if logits.shape != (*leading, model.vocab_size) or logits.dtype != np.float32:
            raise Broken(
                f"unembed gave {logits.dtype.name}{list(logits.shape)} for {list(rows.shape)}; expected "
                f"float32{[*leading, model.vocab_size]}"
            )
    return ""


def commit_keeps_shapes(subject: TargetSubject) -> str:
    """A cache keeps its structure, shapes and types in a prefill and in every commit: one program for all rounds."""
    text, empty = subject.text(size=SIZE), subject.empty()

    def checked(cache: Cache, how: str, length: np.ndarray) -> Cache:
        require_same(empty, cache, "init_cache gave cache", f"and {how} made it")
        if (np.asarray(cache.length) != length).any():
            raise Broken(f"after {how} the cache has lengths {np.asarray(cache.length).tolist()}; expected {[*length]}")
        return cache

    cache, counts = checked(subject.prefill(text)[1], "a prefill", np.array(LENGTHS)), np.array(COUNTS)
    cache = subject.commit(cache, subject.block(cache, text, PARENTS), COUNTS, PATHS)
    checked(cache, "committing a path", LENGTHS + counts)
    cache = subject.commit(cache, subject.block(cache, text), COUNTS)
    checked(cache, "committing in order", LENGTHS + 2 * counts)
    return f"{len(jax.tree.leaves(empty))} arrays"


def depends_on_the_text(subject: TargetSubject) -> str:
    """Another token changes the logits after the next one; without that no other check detects anything."""
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
    """Logits of ragged prompts, fed at once and without a cache, whatever pads them."""
    text = subject.text()
    truth, deviation = subject.plain(text)[:, :SIZE], 0.0
    for garbage in (1, 2):
        answer, cache = subject.prefill(np.where(REAL, text[:, :SIZE], subject.text(garbage, SIZE)))
        off = subject.agree(answer.logits, truth, "of a prompt is not what it is one by one", among=REAL)
        deviation = max(deviation, off)
        if np.asarray(cache.length).tolist() != list(LENGTHS):
            raise Broken(f"after prompts of {list(LENGTHS)} tokens the cache has {np.asarray(cache.length).tolist()}")
    return _seen(deviation, 2 * REAL.sum())


def prefill_leaves_its_tokens(subject: TargetSubject) -> str:
    """A block after ragged prompts sees the prompts, and nothing of their padding."""
    what = "behind a prompt padded with text {} is not what it is one by one"
    deviation = max(_chain(subject, LENGTHS, what.format(garbage), garbage=garbage) for garbage in (1, 2))
    return _seen(deviation, 2 * ROWS * SIZE)


def block_equals_tokens(subject: TargetSubject) -> str:
    """A chain after prompts of one length, without padding."""
    return _seen(_chain(subject, (SIZE,) * ROWS, "of a block is not what it is one by one"), ROWS * SIZE)


def committed_block_equals_text(subject: TargetSubject) -> str:
    """After some tokens of a chain are committed, the logits that follow are those of the text."""
    return _seen(_chain(subject, LENGTHS, "behind a chain is another", commit=COUNTS), ROWS * SIZE)


def _chain(
    subject: TargetSubject,
    length: Sequence[int],
    what: str,
    *,
    garbage: int | None = None,
    commit: Sequence[int] | None = None,
) -> float:
    """Deviation of a chain of the text's own tokens after prompts, or after a part of such a chain is committed."""
    text, start = subject.text(), np.array(length)
    padding = text if garbage is None else subject.text(garbage)
    _, cache = subject.prefill(np.where(np.arange(SIZE) < start[:, None], text[:, :SIZE], padding[:, :SIZE]), length)
    if commit is not None:
        cache = subject.commit(cache, subject.block(cache, _after(text, start)), commit)
        start = start + commit
    return subject.agree(subject.block(cache, _after(text, start)).logits, _after(subject.plain(text), start), what)


def node_equals_path(subject: TargetSubject) -> str:
    """Every node's logits are those of its own path, run as a chain."""
    text, draft = subject.text(), subject.text(3, SIZE)
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
    """After a path of a tree is committed, the logits that follow are those of its text."""
    text, more = subject.text(), subject.text(4, SIZE)
    round_ = _tree_round(subject, text[:, :SIZE], LENGTHS, subject.text(3, SIZE), more)
    path = [subject.text(3)[row, PATHS[row, :count]] for row, count in enumerate(COUNTS)]
    now = np.add(LENGTHS, COUNTS)
    truth = subject.plain(_with(_with(text, LENGTHS, path), now, list(more)))
    what = "behind a path of a tree is not what it is behind its text"
    return _seen(subject.agree(round_.then, _after(truth, now), what), ROWS * SIZE)


def nothing_changes_nothing(subject: TargetSubject) -> str:
    """A row of which no token is committed goes on as before the block."""
    draft, more = subject.text(3, SIZE), subject.text(4, SIZE)
    _, before = subject.prefill(subject.text(size=SIZE))
    truth, deviation = subject.block(before, more).logits, 0.0
    for count in ((0, 0, 0), (0, 2, 0), (3, 0, 1)):
        idle = np.array(count)[:, None] == np.zeros(SIZE)
        for parents, nodes in ((None, None), (PARENTS, PATHS)):
            after = subject.commit(before, subject.block(before, draft, parents), count, nodes)
            lengths = np.asarray(after.length).tolist()
            if lengths != np.add(LENGTHS, count).tolist():
                raise Broken(f"committing {list(count)} tokens took lengths from {list(LENGTHS)} to {lengths}")
            found = subject.block(after, more).logits
            deviation = max(deviation, subject.agree(found, truth, "differs after 0 tokens were kept", among=idle))
    return _seen(deviation, 2 * 6 * SIZE)


class _Round(NamedTuple):
    """Logits of a tree after prompts, and of a chain after one of its paths."""

    tree: np.ndarray
    then: np.ndarray


def _tree_round(
    subject: TargetSubject,
    prompts: np.ndarray,
    length: Sequence[int],
    draft: np.ndarray,
    more: np.ndarray,
    rows: slice = slice(None),
) -> _Round:
    """Prefill, run a tree, commit one of its paths, and run a chain."""
    _, cache = subject.prefill(prompts, length)
    tree = subject.block(cache, draft, PARENTS[rows])
    cache = subject.commit(cache, tree, COUNTS[rows], PATHS[rows])
    return _Round(tree.logits, subject.block(cache, more).logits)


def is_alone_in_its_row(subject: TargetSubject) -> str:
    """A row is the same in a batch of one, and whatever its neighbours hold."""
    own = [subject.text(which, SIZE) for which in (0, 3, 4)]  # prompts, drafts, and the chains after them
    others = [subject.text(5, SIZE), subject.text(5)[:, -SIZE:], subject.text(6, SIZE)]
    run = lambda texts, length, rows=slice(None): _tree_round(
        subject, prompts=texts[0], length=length, draft=texts[1], more=texts[2], rows=rows
    )
    truth, deviation = run(own, LENGTHS), 0.0
    for row in range(ROWS):
        mine, only = (np.arange(ROWS) == row)[:, None], slice(row, row + 1)
        length = [LENGTHS[row] if index == row else SIZE - 1 - index for index in range(ROWS)]
        mixed = run([np.where(mine, one, other) for one, other in zip(own, others, strict=True)], length)
        alone = run([one[only] for one in own], LENGTHS[only], only)
        for found, place, how in ((mixed, row, "when its neighbours hold other tokens"), (alone, 0, "without them")):
            for one, whole, nodes in zip(found, truth, (IS_NODE, None), strict=True):
                here = whole.copy()
                here[row] = one[place]
                deviation = max(deviation, subject.agree(here, whole, f"is another {how}", among=nodes))
    return _seen(deviation, 4 * ROWS * SIZE)


def hides_what_the_mask_hides(subject: TargetSubject) -> str:
    """Another token in a node changes only the nodes that see it."""
    draft = subject.text(3, SIZE)
    _, cache = subject.prefill(subject.text(size=SIZE))
    before, deviation = subject.block(cache, draft, PARENTS).logits, 0.0
    sees = np.array(
        [[[seen in _path(row, node) for seen in range(SIZE)] for node in range(SIZE)] for row in range(ROWS)]
    )
    for node in range(SIZE):
        changed = draft.copy()
        changed[:, node] = (changed[:, node] + 1) % subject.target.model.vocab_size
        after = subject.block(cache, changed, PARENTS).logits
        what = f"changes with node {node}, which it does not see"
        deviation = max(deviation, subject.agree(after, before, what, among=~sees[:, :, node] & IS_NODE))
    return _seen(deviation, (~sees & IS_NODE[:, :, None]).sum())


def long_text_equals_tokens(subject: TargetSubject) -> str:
    """Long prompts in many rows, a block of two branches after them, and a chain after one of the branches.

    Below 32 bits the tolerance is doubled: recurrent states round off more over a long text (Qwen3-Next in bfloat16:
    4 % of the largest logit).
    """
    if subject.given is None and subject.rounds_off:
        subject = dataclasses.replace(subject, given=2 * subject.tolerance)
    width = min(LONG_WIDTH, subject.target.max_positions)
    block = min(LONG_BLOCK, width // 4)
    rng, prompt, rows = np.random.default_rng([subject.seed, 7]), width - 2 * block, np.arange(LONG_ROWS)[:, None]
    text, other = rng.integers(0, subject.target.model.vocab_size, (2, LONG_ROWS, width)).astype(np.int32)
    length, node = np.linspace(prompt, 1, LONG_ROWS).astype(int), np.arange(block)
    branches = [np.flatnonzero((node == 0) | (node % 2 == odd)) for odd in (1, 0)]
    parents = np.broadcast_to(np.maximum(node - 2, 0) - (node == 0), text[:, :block].shape).astype(np.int32)
    draft, expected = other[:, :block], np.zeros((LONG_ROWS, block, subject.target.model.vocab_size))
    for branch in branches:  # the second one is committed below
        places, whole = length[:, None] + np.arange(len(branch)), text.copy()
        whole[rows, places] = draft[:, branch]
        truth = subject.plain(whole)
        expected[:, branch] = truth[rows, places]

    answer, cache = subject.prefill(text[:, :prompt], length.tolist())
    real, what = np.arange(prompt) < length[:, None], "of a long prompt is not what it is one by one"
    off = [subject.agree(answer.logits, truth[:, :prompt], what, among=real)]
    answer = subject.block(cache, draft, parents)
    off.append(subject.agree(answer.logits, expected, f"of a tree of {block} is not the end of its path"))
    count = np.resize([len(branches[1]), 0, 3, 1], LONG_ROWS)
    nodes = np.broadcast_to(np.resize(branches[1], block), draft.shape).astype(np.int32)
    cache, places = subject.commit(cache, answer, count.tolist(), nodes), (length + count)[:, None] + node
    what = f"of a block of {block} behind a path is not what it is behind its text"
    off.append(subject.agree(subject.block(cache, whole[rows, places]).logits, truth[rows, places], what))
    return (
        f"{LONG_ROWS} rows, prompts of 1 to {prompt} tokens, blocks of {block}, texts of {width}; logits off by "
        f"{max(off):.0e} of the largest one at most"
    )


def gives_features(subject: TargetSubject) -> str:
    """Features are ``[B T A D]``, in the order asked for, of a block as of a prefill, and end in the final state."""
    layers, text = (0, subject.layers, subject.layers + 1), subject.text(size=SIZE)
    answer = _with_features(subject, text, layers)
    wanted = (*answer.final.shape[:2], len(layers), answer.final.shape[2])
    if answer.features.shape != wanted:
        raise Broken(f"features of {len(layers)} layers have shape {list(answer.features.shape)}; expected {[*wanted]}")
    backward = _with_features(subject, text, layers[::-1]).features[:, :, ::-1]
    block = subject.block(subject.empty(), text, aux_layers=layers).features
    final = answer.features.copy()
    final[:, :, -1] = answer.final
    worst = 0.0
    for other, how in (
        (backward, "when the layers are asked for in another order"),
        (block, "in a block with a cache"),
        (final, "from the final state, which it should be,"),
    ):
        for index, layer in enumerate(layers):
            here = answer.features[:, :, index]
            off = float(np.abs(other[:, :, index] - here).max() / max(np.abs(here).max(), 1e-9))
            worst = max(worst, off)
            if not off <= subject.tolerance:
                raise Broken(f"features of layer {layer} differ {how}: by {off:.1g} of the largest value")
    return f"layers {', '.join(map(str, layers))}; off by {worst:.0e} at most"


def lends_tables(subject: TargetSubject) -> str:
    """Its tables have the sizes of the vocabulary, and do what the target does with them, up to a factor."""
    model, params = subject.target.model, subject.target.params
    lend = getattr(model, "tables", None)
    if lend is None:
        raise Skipped("it has no `tables`; draft heads must bring their own")
    tables, text = lend(params), subject.text(size=SIZE)
    answer, _ = subject.prefill(text, (SIZE,) * ROWS)
    width = answer.final.shape[-1]
    if not isinstance(tables, EmbeddingTables):
        raise Broken(f"`tables` returned {type(tables).__name__}; expected eagle3_jax.EmbeddingTables")
    for name, shape in (("embedding", (model.vocab_size, width)), ("unembedding", (width, model.vocab_size))):
        if np.shape(getattr(tables, name)) != shape:
            raise Broken(f"its {name} has shape {list(np.shape(getattr(tables, name)))}; expected {list(shape)}")
    product = answer.final @ np.asarray(tables.unembedding, np.float64)
    factor, off = _fitted(product, answer.logits)
    if off > subject.tolerance:
        # A cap on the logits keeps their order, which greedy drafts use.
        ranked = np.take_along_axis(answer.logits, product.argsort(-1), axis=-1)
        if (np.diff(ranked, axis=-1) < -subject.tolerance * subject.scale).any():
            raise Broken(f"logits are off by {off:.1g} of the largest from the final state times its unembedding")
    factors = [f"logits are {factor:.4g} times the product"] if abs(factor - 1) > 1e-2 else []
    try:
        entering = _with_features(subject, text, (0, subject.layers, subject.layers + 1)).features[:, :, 0]
    except Skipped:
        return "; ".join([f"off by {off:.0e}, the embedding not compared", *factors])
    factor, apart = _fitted(np.asarray(tables.embedding, np.float64)[text], entering)
    if apart > subject.tolerance:
        raise Broken(f"what enters layer 0 is off by {apart:.1g} of its largest value from its embedding's rows")
    factors += [f"layer 0 is entered by {factor:.4g} times the embedding"] if abs(factor - 1) > 1e-2 else []
    return "; ".join([f"off by {max(off, apart):.0e} at most", *factors])


def _with_features(subject: TargetSubject, text: np.ndarray, layers: tuple[int, ...]) -> Answer:
    """A prefill with features, which a target may refuse to give."""
    try:
        return subject.prefill(text, (SIZE,) * ROWS, aux_layers=layers)[0]
    except ValueError as refusal:
        raise Skipped(f"refused: {(str(refusal).splitlines() or [''])[0]}") from None


def _fitted(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The factor that brings ``one`` nearest to ``other``, and the deviation then, as a share of the largest value."""
    factor = float((one * other).sum() / max((one * one).sum(), 1e-30))
    return factor, float(np.abs(factor * one - other).max() / max(np.abs(other).max(), 1e-9))


def writes_its_own_text(subject: TargetSubject) -> str:
    """Greedy output with right and wrong drafts, chain and tree, is the likeliest token after every token."""
    target, start, rows, length = subject.target, subject.text(), np.arange(ROWS), np.array(LENGTHS)
    script = start.copy()
    for place in range(NEW):
        script[rows, length + place] = subject.plain(script)[rows, length + place - 1].argmax(-1)
    prompts = [start[row, : LENGTHS[row]].tolist() for row in range(ROWS)]
    said = []
    for shape, parents, shifts in (
        ("a chain", (-1, 0, 1, 2), (0, 0, 0, 0)),
        ("a tree", (-1, 0, 0, 1, 2, 4), (0, 1, 0, 0, 0, 0)),
    ):
        drafter = LoadedDrafter(_Scripted(parents, shifts, target.vocab_size), jnp.asarray(script))
        result = SpeculativeDecoder(target, drafter, stop_tokens=()).generate(prompts, max_new_tokens=NEW)
        logits = subject.plain(_with(start, LENGTHS, [np.array(tokens) for tokens in result.tokens]))
        for row, tokens in enumerate(result.tokens):
            for index, token in enumerate(tokens):
                after = logits[row, LENGTHS[row] + index - 1]
                gap = (after.max() - after[token]) / subject.scale
                if gap > subject.tolerance:
                    raise Broken(
                        f"with {shape} drafted, row {row} writes id {token} as its token {index}; its likeliest is "
                        f"{after.argmax()}, by {gap:.1g} of the largest logit"
                    )
        accepted, drafted = int(result.stats.num_accepted_tokens), int(result.stats.num_draft_tokens)
        if not 0 < accepted < drafted:
            raise NotRun(f"the text is its own, but {accepted} of {drafted} tokens of {shape} were accepted")
        said.append(f"{accepted} of {drafted} tokens of {shape} accepted")
    return ", ".join(said)


class _Place(struct.PyTreeNode, kw_only=True):
    """The root of each row, and the number of tokens before it."""

    root: Int[Array, " B"]
    length: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class _Scripted:
    """Proposes the tokens of its parameters ``[B S]``, ``shifts`` ids off, and a wrong one at every fourth place."""

    parents: tuple[int, ...]
    shifts: tuple[int, ...]
    vocab_size: int
    aux_layers: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def levels(self) -> tuple[int, ...]:
        levels = [0]
        for parent in self.parents[1:]:
            levels.append(levels[parent] + 1)
        return tuple(levels)

    @property
    def max_depth(self) -> int:
        return max(self.levels)

    @property
    def is_chain(self) -> bool:
        return self.max_depth == self.num_nodes - 1

    def init(self, params: Any, batch: int, capacity: int) -> _Place:
        zero = jnp.zeros((batch,), jnp.int32)
        return _Place(root=zero, length=zero)

    def observe(self, params: Any, state: _Place, seen: Observation) -> _Place:
        root = jnp.where(seen.length > 0, seen.next_token, state.root)
        return _Place(root=root, length=state.length + seen.length)

    def propose(self, params: Any, state: _Place, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        place = state.length[:, None] + jnp.array(self.levels, jnp.int32)[None, :]
        tokens = jnp.take_along_axis(params, jnp.minimum(place, params.shape[1] - 1), axis=1)
        wrong = jnp.array(self.shifts, jnp.int32)[None, :] + (place % 4 == 3).astype(jnp.int32)
        tokens = ((tokens + wrong) % self.vocab_size).at[:, 0].set(state.root)
        wide = lambda values: jnp.broadcast_to(jnp.asarray(values), tokens.shape)
        return Draft(tokens=tokens, parents=wide(np.array(self.parents, np.int32)), valid=wide(True))


def _path(row: int, node: int) -> list[int]:
    """The nodes from the root to a node."""
    parent = int(PARENTS[row, node])
    return [*(_path(row, parent) if parent >= 0 else []), node]


def _after(values: np.ndarray, length: Sequence[int] | np.ndarray) -> np.ndarray:
    """The next SIZE entries after ``length`` tokens of each row."""
    return np.stack([values[row, start : start + SIZE] for row, start in enumerate(length)])


def _with(text: np.ndarray, length: Sequence[int] | np.ndarray, more: list[np.ndarray]) -> np.ndarray:
    """Texts that continue with other tokens after ``length`` tokens of each row."""
    text = text.copy()
    for row, (start, tokens) in enumerate(zip(length, more, strict=True)):
        text[row, start : start + len(tokens)] = tokens[: WIDTH - start]
    return text


def _seen(deviation: float, tokens: int | np.integer) -> str:
    return f"{int(tokens)} tokens, logits off by {deviation:.0e} of the largest one at most"


TARGET_CHECKS: dict[str, Callable[[TargetSubject], str]] = {
    PROTOCOL: keeps_the_protocol,
    "its cache leads with the batch": cache_leads_with_the_batch,
    "keeps shapes and types": keeps_shapes,
    "gives logits in float32": gives_float32,
    "a commit keeps shapes and types": commit_keeps_shapes,
    "a token depends on those before it": depends_on_the_text,
    "a prefill equals its tokens one by one": prefill_equals_tokens,
    "a prefill leaves what its tokens leave": prefill_leaves_its_tokens,
    "a block equals its tokens one by one": block_equals_tokens,
    "a committed block equals its text afresh": committed_block_equals_text,
    "a node of a tree equals its own path": node_equals_path,
    "a committed path equals its text afresh": committed_path_equals_text,
    "committing nothing changes nothing": nothing_changes_nothing,
    "rows are independent of their neighbours": is_alone_in_its_row,
    "what the mask hides has no influence": hides_what_the_mask_hides,
    "a long text equals its tokens one by one": long_text_equals_tokens,
    "features are those of the layers asked for": gives_features,
    "lends its tables": lends_tables,
    "greedy output is its own": writes_its_own_text,
}
