"""The contract of a target, :func:`check_target`: the logits of a text do not depend on how the text is fed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.cache import Cache, LayerCache
from eagle3_jax.checks import require_part, require_returned, require_rows, require_same
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.testing.report import (
    PROTOCOL,
    Broken,
    ContractReport,
    NotRun,
    Skipped,
    class_name,
    examine,
    has_low_precision,
    require_stable_hash,
)
from eagle3_jax.testing.scripted import FixedTree, RootState
from eagle3_jax.tree import ancestor_mask, causal_mask, depths
from eagle3_jax.types import Draft, EmbeddingTables, SamplingParams, TargetOutput

# rows, and tokens of a block
ROWS = 3
SIZE = 6
LENGTHS = np.array([5, 1, 3])  # ragged prompts, fed as SIZE tokens
WIDTH = 20  # tokens of a text: a prompt, a block and one after it, or a prompt and what is generated
CAPACITY = 128
# of the check of long texts
LONG_ROWS = 9
LONG_BLOCK = 16
LONG_WIDTH = 96
NEW = 12  # tokens that are generated

# A tree for each row: paths that cross in the block's order, one node that is padding, and a path so deep and so late
# in the block that a window of up to three positions shows whether it goes by positions or by slots.
PARENTS = np.array([[-1, 0, 0, 2, 1, 3], [-1, 0, 1, 0, -1, 3], [-1, 0, 0, 2, 3, 4]], np.int32)
PATHS = np.array([[0, 2, 3, 5, 0, 0], [0, 3, 5, 0, 0, 0], [0, 2, 3, 4, 5, 0]], np.int32)  # the committed nodes
COUNTS = ((4, 2, 5), (0, 2, 0), (3, 0, 1))  # how many of them; a row may keep none


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
    compare its logits with another implementation first. It compiles about twenty programs; random weights at a
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
    subject = TargetSubject(target, tolerance, seed)
    return examine(f"{class_name(target.model)}, {target.name}", subject, TARGET_CHECKS, checks)


class Round(NamedTuple):
    """Prompts, a block after them, and a chain after the committed nodes of the block."""

    text: Int[np.ndarray, "B W"]  # the prompts are its first tokens
    length: Int[np.ndarray, " B"]  # of the prompts
    padding: Int[np.ndarray, "B P"]  # fed in place of what lies past a prompt
    draft: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    nodes: Int[np.ndarray, "B N"] | None  # the committed nodes of a tree; None: a chain, committed in its order
    count: Int[np.ndarray, " B"]  # how many tokens are committed
    more: Int[np.ndarray, "B N"]

    @property
    def is_real(self) -> Bool[np.ndarray, "B P"]:
        """The tokens of the prompts that are not padding."""
        return np.arange(self.padding.shape[1]) < self.length[:, None]

    @property
    def is_node(self) -> Bool[np.ndarray, "B N"]:
        """The nodes of the block that are not padding."""
        return (self.parents >= 0) | (np.arange(self.parents.shape[1]) == 0)


class RoundLogits(NamedTuple):
    """Logits of a :class:`Round`."""

    prompts: Float[np.ndarray, "B P V"]
    block: Float[np.ndarray, "B N V"]
    more: Float[np.ndarray, "B N V"]


@dataclasses.dataclass(frozen=True, eq=False)
class TargetSubject:
    """A target, and the programs that call it."""

    target: LoadedTarget  #: The target with its parameters.
    given: float | None = None  #: The tolerance; ``None`` chooses it by the types of the target.
    seed: int = 0  #: Random seed.

    def text(self, which: int = 0, size: int = WIDTH) -> Int[np.ndarray, "B T"]:
        """The first ``size`` of ``WIDTH`` random tokens, ``[ROWS size]``."""
        rng = np.random.default_rng([self.seed, which])
        return rng.integers(0, self.target.model.vocab_size, (ROWS, WIDTH)).astype(np.int32)[:, :size]

    def rounds(self, *, tree: bool) -> Iterator[Round]:
        """Rounds with a tree or a chain as block, that commit :data:`COUNTS`."""
        parents, nodes = (PARENTS, PATHS) if tree else (np.broadcast_to(np.arange(SIZE) - 1, (ROWS, SIZE)), None)
        for index, count in enumerate(COUNTS):
            padding, draft, more = (self.text(1 + 3 * index + part, SIZE) for part in range(3))
            yield Round(self.text(), LENGTHS, padding, draft, parents, nodes, np.array(count), more)

    def empty(self, batch: int = ROWS) -> Cache:
        """An empty cache."""
        return self.target.model.init_cache(batch, CAPACITY)

    @functools.cached_property
    def num_layers(self) -> int:
        """The number of layers; the cache has a part for each."""
        return len(self.empty(1).layers)

    @functools.cached_property
    def rounds_off(self) -> bool:
        """Whether it computes in less than 32 bits."""
        return has_low_precision(self.target.params, self.empty(1).layers)

    @property
    def tolerance(self) -> float:
        """Largest deviation of a logit that rounding explains, as a share of the largest logit."""
        return self.given if self.given is not None else 3e-2 if self.rounds_off else 1e-4

    @functools.cached_property
    def scale(self) -> float:
        """The largest logit."""
        return max(float(np.abs(self.prefill(self.text(size=SIZE))[1]).max()), 1e-9)

    def forward(self, tokens: Any, positions: Any, mask: Any, cache: Any, length: Any, layers: Any) -> Any:
        """The output of a block and its logits, which are on the host."""
        arrays = (self.target.params, jnp.asarray(tokens), jnp.asarray(positions), mask, cache, length)
        output, logits = _forward(self.target.model, *arrays, layers)
        if not isinstance(output.written, tuple) or len(output.written) != self.num_layers:
            raise Broken(f"`written` is no tuple with one part for each of the {self.num_layers} layers of the cache")
        return output, np.asarray(logits, np.float64)

    def prefill(
        self, tokens: Int[np.ndarray, "B T"], length: Any = LENGTHS, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[TargetOutput, Float[np.ndarray, "B T V"], Cache]:
        """The output and the logits of prompts with ``length`` real tokens each, and the cache after them."""
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        real = jnp.asarray(length, jnp.int32)
        output, logits = self.forward(tokens, positions, causal_mask(tokens.shape[1]), None, real, aux_layers)
        return output, logits, _fill(self.empty(len(tokens)), output.written, real)

    def block(
        self, cache: Cache, tokens: Int[np.ndarray, "B T"], parents: Any = None, *, aux_layers: tuple[int, ...] = ()
    ) -> tuple[TargetOutput, Float[np.ndarray, "B T V"]]:
        """The output and the logits of a block after a cache: a tree, or a chain without parents."""
        mask = causal_mask(tokens.shape[1]) if parents is None else ancestor_mask(jnp.asarray(parents), tokens.shape[1])
        return self.forward(tokens, cache.length[:, None] + depths(mask), mask, cache, None, aux_layers)

    def run(self, one: Round) -> RoundLogits:
        """The logits of a round."""
        prompts = np.where(one.is_real, one.text[:, : one.padding.shape[1]], one.padding)
        _, of_prompts, cache = self.prefill(prompts, one.length)
        _require_length(cache, one.length, "a prefill")
        output, of_block = self.block(cache, one.draft, None if one.nodes is None else one.parents)
        cache = _commit(cache, output.written, jnp.asarray(one.count, jnp.int32), one.nodes)
        _require_length(cache, one.length + one.count, f"committing {one.count.tolist()} tokens")
        return RoundLogits(of_prompts, of_block, self.block(cache, one.more)[1])

    def plain(self, text: Int[np.ndarray, "B W"]) -> Float[np.ndarray, "B W V"]:
        """Logits of texts that are fed token by token: the reference of all checks. ``ROWS`` rows at a time."""
        parts = [jnp.asarray(text[at : at + ROWS]) for at in range(0, len(text), ROWS)]
        logits = [_feed_one_by_one(self.target.model, self.target.params, part) for part in parts]
        return np.concatenate([np.asarray(part, np.float64) for part in logits])

    def compare(self, one: Round, block: str) -> float:
        """The largest deviation of a round from its texts, fed token by token.

        Raises:
            Broken: It is more than the tolerance.
        """
        found = self.run(one)
        expected = np.zeros_like(found.block)
        known = ~one.is_node
        for node in reversed(range(known.shape[1])):  # the text of a path is that of all nodes on it
            if not known[:, node].all():
                paths = [_path(parents, node) for parents in one.parents]
                truth = self.plain(_with(one.text, one.length, _take(one.draft, paths)))
                for row, path in enumerate(paths):
                    expected[row, path] = truth[row, one.length[row] + np.arange(len(path))]
                    known[row, path] = True
        nodes = np.broadcast_to(np.arange(known.shape[1]), known.shape) if one.nodes is None else one.nodes
        paths = [path[:count] for path, count in zip(nodes, one.count, strict=True)]
        text = _with(one.text, one.length, _take(one.draft, paths))
        length = one.length + one.count
        truth = self.plain(_with(text, length, one.more))
        after = np.stack([row[start : start + one.more.shape[1]] for row, start in zip(truth, length, strict=True)])
        return max(
            self.agree(found.prompts, truth[:, : one.padding.shape[1]], "of a prompt is not its text's", one.is_real),
            self.agree(found.block, expected, f"of {block} is not the end of its path", one.is_node),
            self.agree(found.more, after, f"after a commit of {block} is not its text's"),
        )

    def agree(
        self,
        found: Float[np.ndarray, "B T V"],
        expected: Float[np.ndarray, "B T V"],
        what: str,
        among: Bool[np.ndarray, "B T"] | None = None,
    ) -> float:
        """The largest deviation of logits ``among`` some tokens, as a share of the largest logit.

        Raises:
            Broken: It is more than the tolerance; the message is "token 2 of row 1", then ``what``.
        """
        gap = np.abs(found - expected).max(-1) / self.scale
        gap = np.where(np.isfinite(gap), gap, np.inf)
        gap = gap if among is None else np.where(among, gap, 0.0)
        row, token = np.unravel_index(gap.argmax(), gap.shape)
        if gap[row, token] > self.tolerance:
            raise Broken(
                f"token {token} of row {row} {what}: logits off by {gap[row, token]:.1g} of the largest one; expected "
                f"at most {self.tolerance:g}"
            )
        return float(gap[row, token])

    def require_likeliest(self, prompts: list[list[int]], outputs: list[list[int]], how: str) -> None:
        """Check that every token of greedy outputs is, up to rounding, the likeliest one after the tokens before it."""
        texts = np.zeros((len(prompts), max(map(len, prompts)) + max(map(len, outputs))), np.int32)
        for row, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            texts[row, : len(prompt) + len(tokens)] = prompt + tokens
        logits = self.plain(texts)
        for row, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
            for index, token in enumerate(tokens):
                after = logits[row, len(prompt) + index - 1]
                gap = (after.max() - after[token]) / self.scale
                if gap > self.tolerance:
                    raise Broken(
                        f"{how}, row {row} writes id {token} as its token {index}; its likeliest is {after.argmax()}, "
                        f"by {gap:.1g} of the largest logit"
                    )


_fill = jax.jit(Cache.fill)
_commit = jax.jit(Cache.commit)


@functools.partial(jax.jit, static_argnums=(0, 7))
def _forward(
    model: Any, params: Any, tokens: Array, positions: Array, mask: Array, cache: Any, length: Any, layers: tuple
) -> tuple[TargetOutput, Array]:
    """Output and logits of a block, with checks of their shapes and types."""
    batch, size = tokens.shape
    output = model(params, tokens, positions, mask, cache, aux_layers=layers, length=length)
    require_returned("a forward", output, TargetOutput, B=batch, T=size, A=len(layers))
    logits = model.unembed(params, output.final)
    if logits.shape != (batch, size, model.vocab_size) or logits.dtype != np.float32:
        raise Broken(
            f"unembed gave {logits.dtype.name}{list(logits.shape)} for {list(output.final.shape)}; expected "
            f"float32{[batch, size, model.vocab_size]}"
        )
    return output, logits


@functools.partial(jax.jit, static_argnums=0)
def _feed_one_by_one(model: Any, params: Any, text: Array) -> Array:
    one = jnp.ones((text.shape[0],), jnp.int32)

    def feed(cache: Cache, token: Array) -> tuple[Cache, Array]:
        output = model(params, token[:, None], cache.length[:, None], causal_mask(1), cache)
        return cache.commit(output.written, one), model.unembed(params, output.final)[:, 0]

    _, logits = jax.lax.scan(feed, model.init_cache(text.shape[0], CAPACITY), text.T)
    return jnp.moveaxis(logits, 0, 1)


def keeps_the_protocol(subject: TargetSubject) -> str:
    """It is an instance with every member, a stable hash, and the vocabulary that it was loaded with."""
    model = subject.target.model
    require_part(model, "target")
    require_stable_hash(model)
    if model.vocab_size != subject.target.vocab_size:
        raise Broken(f"it has {model.vocab_size} tokens, and was loaded as one of {subject.target.vocab_size}")
    return f"a vocabulary of {model.vocab_size}"


def keeps_shapes(subject: TargetSubject) -> str:
    """Caches, forwards and logits have the shapes of the protocol, and a commit keeps those of the cache."""
    for batch in (1, ROWS):
        empty = subject.empty(batch)
        if not isinstance(empty, Cache):
            raise Broken(f"init_cache returned {type(empty).__name__}; expected an eagle3_jax.Cache")
        for index, layer in enumerate(empty.layers):
            if not isinstance(layer, LayerCache):
                raise Broken(f"layer {index} of the cache is {type(layer).__name__}; expected `fill` and `commit`")
        require_rows(subject.target.model, empty, batch, origin="init_cache gave cache")
        _require_length(empty, np.zeros(batch, int), "init_cache")
    text = subject.text(size=SIZE)
    output, _, cache = subject.prefill(text)
    require_same(empty, cache, "init_cache gave cache", "and a prefill made it")
    for how, parents, nodes in (("a path", PARENTS, PATHS), ("in order", None, None)):
        block, _ = subject.block(cache, text, parents)
        after = _commit(cache, block.written, jnp.array(COUNTS[0], jnp.int32), nodes)
        require_same(empty, after, "init_cache gave cache", f"and committing {how} made it")
    kinds = ", ".join(type(layer).__name__ for layer in empty.layers)
    return f"width {output.final.shape[-1]}, layer caches: {kinds}"


def _require_length(cache: Cache, length: np.ndarray, how: str) -> None:
    if cache.length.dtype != np.int32 or (np.asarray(cache.length) != length).any():
        raise Broken(f"after {how} the cache has lengths {cache.length}; expected int32 {length}")


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


def text_equals_tokens(subject: TargetSubject) -> str:
    """Ragged prompts with different padding, a chain after them, and a chain after the committed tokens."""
    return _seen(max(subject.compare(one, "a chain") for one in subject.rounds(tree=False)))


def node_equals_path(subject: TargetSubject) -> str:
    """A tree after prompts, and a chain after a committed path."""
    return _seen(max(subject.compare(one, "a tree") for one in subject.rounds(tree=True)))


def is_alone_in_its_row(subject: TargetSubject) -> str:
    """A row is the same in a batch of one, and whatever its neighbours hold."""
    own, other = itertools.islice(subject.rounds(tree=True), 2)
    other = other._replace(text=subject.text(10), length=SIZE - 1 - np.arange(ROWS))
    truth = subject.run(own)
    deviation = 0.0
    for row in range(ROWS):
        mine = (np.arange(ROWS) == row)[:, None]
        mix = lambda one, another, mine=mine: np.where(mine if one.ndim > 1 else mine[:, 0], one, another)
        mixed = subject.run(jax.tree.map(mix, own, other))
        alone = subject.run(jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], own))
        for found, place, how in ((mixed, row, "when its neighbours hold other tokens"), (alone, 0, "without them")):
            for logits, whole, among in zip(found, truth, (own.is_real, own.is_node, None), strict=True):
                here = whole.copy()
                here[row] = logits[place]
                deviation = max(deviation, subject.agree(here, whole, f"is another {how}", among))
    return _seen(deviation)


def long_text_equals_tokens(subject: TargetSubject) -> str:
    """Long prompts in many rows, a block of two branches after them, and a chain after one of the branches.

    Below 32 bits the tolerance is doubled: recurrent states round off more over a long text (Qwen3-Next in bfloat16:
    4 % of the largest logit).
    """
    if subject.given is None and subject.rounds_off:
        subject = dataclasses.replace(subject, given=2 * subject.tolerance)
    width = min(LONG_WIDTH, subject.target.max_positions)
    size = min(LONG_BLOCK, width // 4)
    rng = np.random.default_rng([subject.seed, 7])
    prompt = width - 2 * size
    node = np.arange(size)
    text, other = rng.integers(0, subject.target.model.vocab_size, (2, LONG_ROWS, width)).astype(np.int32)
    branch = np.flatnonzero(node % 2 == 0)  # the other one is the root and the odd nodes
    wide = lambda values: np.broadcast_to(values, (LONG_ROWS, size)).astype(np.int32)
    one = Round(
        text=text,
        length=np.linspace(prompt, 1, LONG_ROWS).astype(int),
        padding=text[:, :prompt],
        draft=other[:, :size],
        parents=wide(np.maximum(node - 2, 0) - (node == 0)),
        nodes=wide(np.resize(branch, size)),
        count=np.resize([len(branch), 0, 3, 1], LONG_ROWS),
        more=other[:, size : 2 * size],
    )
    return (
        f"{LONG_ROWS} rows, prompts of 1 to {prompt} tokens, blocks of {size}, texts of {width}; "
        f"{_seen(subject.compare(one, f'a tree of {size}'))}"
    )


def gives_features(subject: TargetSubject) -> str:
    """Features are ``[B T A D]``, in the order asked for, of a block as of a prefill, and end in the final state."""
    layers = (0, subject.num_layers, subject.num_layers + 1)
    text = subject.text(size=SIZE)
    features = _features(subject, layers)
    final, *_ = subject.prefill(text, (SIZE,) * ROWS)
    if features.shape[3] != final.final.shape[2]:
        raise Broken(f"features have {features.shape[3]} numbers; expected {final.final.shape[2]}, as final states")
    block, _ = subject.block(subject.empty(), text, aux_layers=layers)
    ending = np.concatenate([features[:, :, :-1], np.asarray(final.final, np.float64)[:, :, None]], axis=2)
    worst = 0.0
    for other, how in (
        (_features(subject, layers[::-1])[:, :, ::-1], "when the layers are asked for in another order"),
        (np.asarray(block.features, np.float64), "in a block with a cache"),
        (ending, "from the final state, which it should be,"),
    ):
        for index, layer in enumerate(layers):
            here = features[:, :, index]
            off = float(np.abs(other[:, :, index] - here).max() / max(np.abs(here).max(), 1e-9))
            worst = max(worst, off)
            if not off <= subject.tolerance:
                raise Broken(f"features of layer {layer} differ {how}: by {off:.1g} of the largest value")
    return f"layers {', '.join(map(str, layers))}; off by {worst:.0e} at most"


def _features(subject: TargetSubject, layers: tuple[int, ...]) -> Float[np.ndarray, "B T A D"]:
    """The features of a prefill, which a target may refuse to give."""
    try:
        output, *_ = subject.prefill(subject.text(size=SIZE), (SIZE,) * ROWS, aux_layers=layers)
    except ValueError as refusal:
        raise Skipped(f"refused: {(str(refusal).splitlines() or [''])[0]}") from None
    return np.asarray(output.features, np.float64)


def lends_tables(subject: TargetSubject) -> str:
    """Its tables have the sizes of the vocabulary, and do what the target does with them, up to a factor."""
    model = subject.target.model
    params = subject.target.params
    lend = getattr(model, "tables", None)
    if lend is None:
        raise Skipped("it has no `tables`; draft heads must bring their own")
    tables = lend(params)
    text = subject.text(size=SIZE)
    output, logits, _ = subject.prefill(text, (SIZE,) * ROWS)
    final = np.asarray(output.final, np.float64)
    width = output.final.shape[-1]
    if not isinstance(tables, EmbeddingTables):
        raise Broken(f"`tables` returned {type(tables).__name__}; expected eagle3_jax.EmbeddingTables")
    for name, shape in (("embedding", (model.vocab_size, width)), ("unembedding", (width, model.vocab_size))):
        if np.shape(getattr(tables, name)) != shape:
            raise Broken(f"its {name} has shape {list(np.shape(getattr(tables, name)))}; expected {list(shape)}")
    product = final @ np.asarray(tables.unembedding, np.float64)
    factor, off = _fitted(product, logits)
    if off > subject.tolerance:
        # A cap on the logits keeps their order, which greedy drafts use.
        ranked = np.take_along_axis(logits, product.argsort(-1), axis=-1)
        if (np.diff(ranked, axis=-1) < -subject.tolerance * subject.scale).any():
            raise Broken(f"logits are off by {off:.1g} of the largest from the final state times its unembedding")
    said = f"logits are {factor:.4g} times the product, off by {off:.0e}"
    try:
        entering = _features(subject, (0, subject.num_layers, subject.num_layers + 1))[:, :, 0]
    except Skipped:
        return f"{said}; the embedding is not compared"
    factor, off = _fitted(np.asarray(tables.embedding, np.float64)[text], entering)
    if off > subject.tolerance:
        raise Broken(f"what enters layer 0 is off by {off:.1g} of its largest value from its embedding's rows")
    return f"{said}; layer 0 is entered by {factor:.4g} times the embedding, off by {off:.0e}"


def _fitted(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The factor that brings ``one`` nearest to ``other``, and the deviation then, as a share of the largest value."""
    factor = float((one * other).sum() / max((one * one).sum(), 1e-30))
    return factor, float(np.abs(factor * one - other).max() / max(np.abs(other).max(), 1e-9))


def writes_its_own_text(subject: TargetSubject) -> str:
    """Greedy output with right and wrong drafts, chain and tree, is the likeliest token after every token."""
    target = subject.target
    start = subject.text()
    rows = np.arange(ROWS)
    script = start.copy()
    for place in range(NEW):
        script[rows, LENGTHS + place] = subject.plain(script)[rows, LENGTHS + place - 1].argmax(-1)
    prompts = [start[row, : LENGTHS[row]].tolist() for row in range(ROWS)]
    said = []
    for shape, parents, shifts in (
        ("a chain", (-1, 0, 1, 2), (0, 0, 0, 0)),
        ("a tree", (-1, 0, 0, 1, 2, 4), (0, 1, 0, 0, 0, 0)),
    ):
        drafter = LoadedDrafter(_Scripted(parents, shifts, target.vocab_size), jnp.asarray(script))
        result = SpeculativeDecoder(target, drafter, stop_tokens=()).generate(prompts, max_new_tokens=NEW)
        subject.require_likeliest(prompts, result.tokens, f"with {shape} drafted")
        accepted = int(result.stats.num_accepted_tokens)
        drafted = int(result.stats.num_draft_tokens)
        said.append(f"{accepted} of {drafted} tokens of {shape} accepted")
        if not 0 < accepted < drafted:
            raise NotRun(f"the text is its own, but {said[-1]}")
    return ", ".join(said)


@dataclasses.dataclass(frozen=True)
class _Scripted(FixedTree):
    """Proposes the tokens of its parameters ``[B S]``, ``shifts`` ids off, and a wrong one at every fourth place."""

    shifts: tuple[int, ...]
    vocab_size: int

    def propose(self, params: Any, state: RootState, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        wrong = jnp.array(self.shifts, jnp.int32)[None] + (self.places(state) % 4 == 3).astype(jnp.int32)
        return self.draft(state, (self.scripted(params, state) + wrong) % self.vocab_size)


def _path(parents: Int[np.ndarray, " N"], node: int) -> list[int]:
    """The nodes from the root to a node."""
    parent = int(parents[node])
    return [*(_path(parents, parent) if parent >= 0 else []), node]


def _take(draft: np.ndarray, paths: Sequence[Any]) -> list[np.ndarray]:
    """The tokens of a path of each row."""
    return [tokens[path] for tokens, path in zip(draft, paths, strict=True)]


def _with(text: np.ndarray, length: np.ndarray, more: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    """Texts that continue with other tokens after ``length`` tokens of each row."""
    text = text.copy()
    for row, (start, tokens) in enumerate(zip(length, more, strict=True)):
        text[row, start : start + len(tokens)] = tokens
    return text


def _seen(deviation: float) -> str:
    return f"logits off by {deviation:.0e} of the largest one at most"


TARGET_CHECKS: dict[str, Callable[[TargetSubject], str]] = {
    PROTOCOL: keeps_the_protocol,
    "keeps shapes and types": keeps_shapes,
    "a token depends on those before it": depends_on_the_text,
    "a text equals its tokens one by one": text_equals_tokens,
    "a node of a tree equals its own path": node_equals_path,
    "rows are independent of their neighbours": is_alone_in_its_row,
    "a long text equals its tokens one by one": long_text_equals_tokens,
    "features are those of the layers asked for": gives_features,
    "lends its tables": lends_tables,
    "greedy output is its own": writes_its_own_text,
}
