"""The contract of a target: the logits of a text do not depend on how the text is fed."""

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
from eagle3_jax.checks import check_returned, check_rows, check_same
from eagle3_jax.decode import LoadedDrafter, LoadedTarget, SpeculativeDecoder
from eagle3_jax.models.quantised import GroupedKernel, Int8Kernel
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.testing.report import (
    PROTOCOL,
    Broken,
    ContractReport,
    NotRun,
    Skipped,
    class_name,
    examine,
)
from eagle3_jax.testing.scripted import FixedTree, RootState
from eagle3_jax.testing.subject import (
    Subject,
    has_low_precision,
    mix_rows,
    repeat_row,
    require_protocol,
)
from eagle3_jax.tree import ancestor_mask, causal_mask, depths
from eagle3_jax.types import Draft, EmbeddingTables, SamplingParams, TargetOutput

ROWS = 3
# Tokens of a block.
SIZE = 6
# Ragged prompts, fed as SIZE tokens.
LENGTHS = np.array([5, 1, 3])
# Tokens of a text: a prompt, a block and one after it, or a prompt and what is generated.
WIDTH = 20
CAPACITY = 128
# Sizes of the check of long texts.
LONG_ROWS = 9
LONG_BLOCK = 16
LONG_WIDTH = 96
# Tokens that are generated.
NEW = 12

# A tree for each row: paths that cross in the block's order, one node that is padding, and a path
# so deep and so late in the block that a window of up to three positions shows whether it goes by
# positions or by slots.
PARENTS = np.array([[-1, 0, 0, 2, 1, 3], [-1, 0, 1, 0, -1, 3], [-1, 0, 0, 2, 3, 4]], np.int32)
# The committed nodes, and how many of them are committed in each round.
PATHS = np.array([[0, 2, 3, 5, 0, 0], [0, 3, 5, 0, 0, 0], [0, 2, 3, 4, 5, 0]], np.int32)
COUNTS = ((4, 2, 5), (0, 2, 0), (3, 0, 1))


def check_target(
    target: LoadedTarget,
    *,
    checks: Collection[str] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> ContractReport:
    """Runs your own target through the contract that the loop relies on.

    Nothing is printed: ``print(e3.check_target(target))`` shows the report. Everything is compared
    with the target's own logits for texts that are fed token by token, so a model that is wrong in
    the same way everywhere passes: compare its logits with another implementation first. It
    compiles about twenty programs; random weights at a small size are the place to start, as long
    as the output depends on the text.

    **Limits.** Most checks use 3 rows, texts of up to 20 tokens and blocks of 6. One check uses 9
    rows, texts of 96 tokens (fewer if ``max_positions`` is smaller), prompts of up to 64 and blocks
    of 16. A fault that starts beyond these sizes is not detected, nor is one that moves logits by
    less than ``tolerance``, nor one that is the same token by token (such as a wrong angle at
    position 24, whatever the block).

    Args:
        target: The target with its parameters.
        checks: Names of :data:`TARGET_CHECKS`; all of them by default.
        tolerance: Largest deviation of a logit, as a share of the largest logit. Default: 1e-4, and
            3e-2 for a target with parameters or a cache of less than 32 bits (6e-2 for long texts).
        seed: Random seed.

    Raises:
        ValueError: ``checks`` names a check that does not exist.
    """
    subject = Subject(target.model, target=target, tolerance=tolerance, seed=seed)
    return examine(f"{class_name(target.model)}, {target.name}", subject, TARGET_CHECKS, checks)


# Inputs


class Round(NamedTuple):
    """Prompts, a block after them, and a chain after the committed nodes of the block."""

    text: Int[np.ndarray, "B W"]  #: The prompts are its first tokens.
    length: Int[np.ndarray, " B"]  #: Tokens of each prompt.
    padding: Int[np.ndarray, "B P"]  #: Fed in place of the text after a prompt.
    draft: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    #: The committed nodes of a tree; ``None``: a chain, committed in its order.
    nodes: Int[np.ndarray, "B N"] | None
    count: Int[np.ndarray, " B"]  #: Number of committed tokens.
    more: Int[np.ndarray, "B N"]  #: The chain after the commit.

    @property
    def is_real(self) -> Bool[np.ndarray, "B P"]:
        """The tokens of the prompts that are not padding."""
        return np.arange(self.padding.shape[1]) < self.length[:, None]

    @property
    def is_node(self) -> Bool[np.ndarray, "B N"]:
        """The nodes of the block that are not padding."""
        return (self.parents >= 0) | (np.arange(self.parents.shape[1]) == 0)

    @property
    def paths(self) -> list[Int[np.ndarray, " n"]]:
        """The committed nodes of each row."""
        nodes = self.nodes
        if nodes is None:
            nodes = np.broadcast_to(np.arange(self.draft.shape[1]), self.draft.shape)
        return [path[:count] for path, count in zip(nodes, self.count, strict=True)]


def random_text(subject: Subject, stream: int = 0, size: int = WIDTH) -> Int[np.ndarray, "B T"]:
    """Returns the first ``size`` of ``WIDTH`` random tokens, ``[ROWS size]``."""
    return subject.random_tokens(stream, shape=(ROWS, WIDTH))[:, :size]


def random_rounds(subject: Subject, *, tree: bool) -> Iterator[Round]:
    """Yields rounds with a tree or a chain as block, which commit :data:`COUNTS`."""
    chain = np.broadcast_to(np.arange(SIZE) - 1, (ROWS, SIZE))
    for index, count in enumerate(COUNTS):
        padding, draft, more = (
            random_text(subject, 1 + 3 * index + part, SIZE) for part in range(3)
        )
        yield Round(
            text=random_text(subject),
            length=LENGTHS,
            padding=padding,
            draft=draft,
            parents=PARENTS if tree else chain,
            nodes=PATHS if tree else None,
            count=np.array(count),
            more=more,
        )


def long_round(subject: Subject) -> Round:
    """Returns long prompts in many rows, and a block of two branches, one of which is committed."""
    width = min(LONG_WIDTH, subject.target.max_positions)
    size = min(LONG_BLOCK, width // 4)
    prompt = width - 2 * size
    text, block = subject.random_tokens(7, shape=(2, LONG_ROWS, width))

    # The first branch is the root and the even nodes, the second one the root and the odd nodes.
    node = np.arange(size, dtype=np.int32)
    branch = node[::2]
    parents = np.maximum(node - 2, 0) - (node == 0)
    return Round(
        text=text,
        length=np.linspace(prompt, 1, LONG_ROWS).astype(int),
        padding=text[:, :prompt],
        draft=block[:, :size],
        parents=np.tile(parents, (LONG_ROWS, 1)),
        nodes=np.tile(np.resize(branch, size), (LONG_ROWS, 1)),
        count=np.resize([len(branch), 0, 3, 1], LONG_ROWS),
        more=block[:, size : 2 * size],
    )


# Calls of the target


@functools.partial(jax.jit, static_argnums=(0, 1))
def _update(model: Any, method: Any, cache: Cache, *arguments: Any) -> Cache:
    """Calls a method. `model` is static, because jit compares caches without their types."""
    del model
    return method(cache, *arguments)


def empty_cache(subject: Subject, batch: int = ROWS) -> Cache:
    """Returns a cache before any text."""
    return subject.target.model.init_cache(batch, CAPACITY)


def count_layers(subject: Subject) -> int:
    """Returns the number of layers; the cache has a part for each."""
    return len(empty_cache(subject, 1).layers)


def computes_in_low_precision(subject: Subject) -> bool:
    """Whether the target has parameters or a cache of less than 32 bits."""
    return has_low_precision(subject.target.params, empty_cache(subject, 1).layers)


def tolerance_of(subject: Subject) -> float:
    """Returns the deviation that rounding explains, as a share of the largest logit."""
    if subject.tolerance is not None:
        return subject.tolerance
    return 3e-2 if subject.once(computes_in_low_precision) else 1e-4


def largest_logit(subject: Subject) -> float:
    """Returns the largest logit of a text: the unit of all deviations."""
    _, logits, _ = prefill(subject, random_text(subject, size=SIZE))
    return max(float(np.abs(logits).max()), 1e-9)


def forward(
    subject: Subject,
    tokens: Any,
    positions: Any,
    mask: Any,
    cache: Cache | None = None,
    length: Any = None,
    aux_layers: tuple[int, ...] = (),
) -> tuple[TargetOutput, Float[np.ndarray, "B T V"]]:
    """Returns the output of a block, and its logits on the host."""
    target = subject.target
    arrays = (jnp.asarray(tokens), jnp.asarray(positions), mask, cache, length)
    output, logits = _forward(target.model, target.params, *arrays, aux_layers)

    layers = subject.once(count_layers)
    if not isinstance(output.written, tuple) or len(output.written) != layers:
        raise Broken(
            f"`written` is not a tuple with one part for each of the {layers} layers of the cache"
        )
    return output, np.asarray(logits, np.float64)


def prefill(
    subject: Subject,
    tokens: Int[np.ndarray, "B T"],
    length: Any = LENGTHS,
    *,
    aux_layers: tuple[int, ...] = (),
) -> tuple[TargetOutput, Float[np.ndarray, "B T V"], Cache]:
    """Returns the output and the logits of prompts, and the cache after them.

    ``length`` tokens of each prompt are real.
    """
    size = tokens.shape[1]
    positions = np.broadcast_to(np.arange(size, dtype=np.int32), tokens.shape)
    real = jnp.asarray(length, jnp.int32)
    output, logits = forward(subject, tokens, positions, causal_mask(size), None, real, aux_layers)
    empty = empty_cache(subject, len(tokens))
    return output, logits, _update(subject.part, Cache.fill, empty, output.written, real)


def feed_block(
    subject: Subject,
    cache: Cache,
    tokens: Int[np.ndarray, "B T"],
    parents: Any = None,
    *,
    aux_layers: tuple[int, ...] = (),
) -> tuple[TargetOutput, Float[np.ndarray, "B T V"]]:
    """Returns the output and the logits of a block after a cache; without parents it is a chain."""
    size = tokens.shape[1]
    mask = causal_mask(size) if parents is None else ancestor_mask(jnp.asarray(parents), size)
    positions = cache.length[:, None] + depths(mask)
    return forward(subject, tokens, positions, mask, cache, None, aux_layers)


class RoundLogits(NamedTuple):
    """Logits of a :class:`Round`."""

    prompts: Float[np.ndarray, "B P V"]
    block: Float[np.ndarray, "B N V"]
    more: Float[np.ndarray, "B N V"]


def run_round(subject: Subject, inputs: Round) -> RoundLogits:
    """Returns the logits of a round."""
    size = inputs.padding.shape[1]

    prompts = np.where(inputs.is_real, inputs.text[:, :size], inputs.padding)
    _, prompt_logits, cache = prefill(subject, prompts, inputs.length)
    _require_length(cache, inputs.length, "a prefill")

    parents = None if inputs.nodes is None else inputs.parents
    output, block_logits = feed_block(subject, cache, inputs.draft, parents)
    count = jnp.asarray(inputs.count, jnp.int32)
    cache = _update(subject.part, Cache.commit, cache, output.written, count, inputs.nodes)
    _require_length(
        cache, inputs.length + inputs.count, f"committing {inputs.count.tolist()} tokens"
    )

    _, more_logits = feed_block(subject, cache, inputs.more)
    return RoundLogits(prompt_logits, block_logits, more_logits)


def reference_logits(subject: Subject, text: Int[np.ndarray, "B W"]) -> Float[np.ndarray, "B W V"]:
    """Returns the logits of texts that are fed token by token: the reference of all checks.

    The rows are fed ``ROWS`` at a time, so that all checks share a program.
    """
    target = subject.target
    groups = [jnp.asarray(text[first : first + ROWS]) for first in range(0, len(text), ROWS)]
    logits = [_feed_tokens(target.model, target.params, group) for group in groups]
    return np.concatenate([np.asarray(group, np.float64) for group in logits])


@functools.partial(jax.jit, static_argnums=(0, 7))
def _forward(
    model: Any,
    params: Any,
    tokens: Array,
    positions: Array,
    mask: Array,
    cache: Any,
    length: Any,
    layers: tuple,
) -> tuple[TargetOutput, Array]:
    """Returns the output and the logits of a block, with checks of their shapes and types."""
    batch, size = tokens.shape
    output = model(params, tokens, positions, mask, cache, aux_layers=layers, length=length)
    check_returned("a forward", output, TargetOutput, B=batch, T=size, A=len(layers))

    logits = model.unembed(params, output.final)
    if logits.shape != (batch, size, model.vocab_size) or logits.dtype != np.float32:
        raise Broken(
            f"unembed gave {logits.dtype.name}{list(logits.shape)} for {list(output.final.shape)};"
            f" expected float32{[batch, size, model.vocab_size]}"
        )
    return output, logits


@functools.partial(jax.jit, static_argnums=0)
def _feed_tokens(model: Any, params: Any, text: Array) -> Array:
    count = jnp.ones((text.shape[0],), jnp.int32)

    def feed(cache: Cache, token: Array) -> tuple[Cache, Array]:
        output = model(params, token[:, None], cache.length[:, None], causal_mask(1), cache)
        return cache.commit(output.written, count), model.unembed(params, output.final)[:, 0]

    _, logits = jax.lax.scan(feed, model.init_cache(text.shape[0], CAPACITY), text.T)
    return jnp.moveaxis(logits, 0, 1)


# Comparisons


def require_equal_logits(
    subject: Subject,
    logits: Float[np.ndarray, "B T V"],
    expected: Float[np.ndarray, "B T V"],
    fault: str,
    compared: Bool[np.ndarray, "B T"] | None = None,
) -> float:
    """Returns the largest deviation of logits, as a share of the largest logit.

    Raises:
        Broken: It is more than the tolerance; the message is "token 2 of row 1", then the
            ``fault``.
    """
    gap = np.abs(logits - expected).max(-1) / subject.once(largest_logit)
    gap = np.where(np.isfinite(gap), gap, np.inf)
    if compared is not None:
        gap = np.where(compared, gap, 0.0)

    row, token = np.unravel_index(gap.argmax(), gap.shape)
    if gap[row, token] > tolerance_of(subject):
        raise Broken(
            f"token {token} of row {row} {fault}: logits off by {gap[row, token]:.1g} of the"
            f" largest one; expected at most {tolerance_of(subject):g}"
        )
    return float(gap[row, token])


def require_equal_round(
    subject: Subject,
    inputs: Round,
    logits: RoundLogits,
    expected: RoundLogits,
    faults: Sequence[str],
) -> float:
    """Returns the largest deviation of the logits of a round.

    Raises:
        Broken: It is more than the tolerance, in one of the three parts: its message has the
            fault of that part.
    """
    masks = (inputs.is_real, inputs.is_node, None)
    arrays = zip(logits, expected, faults, masks, strict=True)
    return max(require_equal_logits(subject, *array) for array in arrays)


def require_round(subject: Subject, inputs: Round, block: str) -> float:
    """Returns the largest deviation of a round from its texts, fed token by token.

    Raises:
        Broken: It is more than the tolerance; the message calls the block ``block``.
    """
    length = inputs.length + inputs.count
    committed = _append(inputs.text, inputs.length, _take(inputs.draft, inputs.paths))
    reference = reference_logits(subject, _append(committed, length, inputs.more))
    after_commit = length[:, None] + np.arange(inputs.more.shape[1])
    expected = RoundLogits(
        prompts=reference[:, : inputs.padding.shape[1]],
        block=_reference_of_paths(subject, inputs),
        more=np.take_along_axis(reference, after_commit[:, :, None], axis=1),
    )

    faults = (
        "of a prompt is not its text's",
        f"of {block} is not the end of its path",
        f"after a commit of {block} is not its text's",
    )
    return require_equal_round(subject, inputs, run_round(subject, inputs), expected, faults)


def _reference_of_paths(subject: Subject, inputs: Round) -> Float[np.ndarray, "B N V"]:
    """Returns for every node the logits of the text that ends with it."""
    expected = np.zeros((*inputs.draft.shape, subject.target.model.vocab_size))
    known = ~inputs.is_node
    # The text of a path is that of all nodes on it, so the last nodes come first.
    for node in reversed(range(known.shape[1])):
        if known[:, node].all():
            continue

        paths = [_path_to(parents, node) for parents in inputs.parents]
        reference = reference_logits(
            subject, _append(inputs.text, inputs.length, _take(inputs.draft, paths))
        )
        for row, path in enumerate(paths):
            expected[row, path] = reference[row, inputs.length[row] + np.arange(len(path))]
            known[row, path] = True
    return expected


def require_greedy_output(
    subject: Subject,
    drafter: LoadedDrafter,
    prompts: list[list[int]],
    max_new_tokens: Any,
    description: str,
) -> SpeculationStats:
    """Checks that every token of a greedy output is the likeliest one, up to rounding.

    Args:
        subject: The target, or a drafter of it.
        drafter: The drafter that speculates.
        prompts: Token ids.
        max_new_tokens: Number of new tokens, or one number for each prompt.
        description: Begins the message of a failure.

    Returns:
        How many tokens were drafted and accepted.
    """
    decoder = SpeculativeDecoder(subject.target, drafter, stop_tokens=())
    result = decoder.generate(prompts, max_new_tokens=max_new_tokens)

    texts = [prompt + tokens for prompt, tokens in zip(prompts, result.tokens, strict=True)]
    padded = np.zeros((len(texts), max(map(len, texts))), np.int32)
    logits = reference_logits(subject, _append(padded, np.zeros(len(texts), int), texts))
    for row, prompt in enumerate(prompts):
        for index, token in enumerate(result.tokens[row]):
            scores = logits[row, len(prompt) + index - 1]
            gap = (scores.max() - scores[token]) / subject.once(largest_logit)
            if gap > tolerance_of(subject):
                raise Broken(
                    f"{description}, row {row} writes id {token} as its token {index}; its"
                    f" likeliest is {scores.argmax()}, by {gap:.1g} of the largest logit"
                )
    return result.stats


def _require_length(cache: Cache, length: np.ndarray, event: str) -> None:
    if cache.length.dtype != np.int32 or (np.asarray(cache.length) != length).any():
        raise Broken(f"after {event} the cache has lengths {cache.length}; expected int32 {length}")


def _path_to(parents: Int[np.ndarray, " N"], node: int) -> list[int]:
    """Returns the nodes from the root to a node."""
    parent = int(parents[node])
    return [*(_path_to(parents, parent) if parent >= 0 else []), node]


def _take(draft: np.ndarray, paths: Sequence[Any]) -> list[np.ndarray]:
    """Returns the tokens of a path of each row."""
    return [tokens[path] for tokens, path in zip(draft, paths, strict=True)]


def _append(text: np.ndarray, length: np.ndarray, tokens: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Returns texts that continue with these tokens after ``length`` tokens of each row."""
    text = text.copy()
    for row, (start, more) in enumerate(zip(length, tokens, strict=True)):
        text[row, start : start + len(more)] = more
    return text


def _describe_deviation(deviation: float) -> str:
    return f"logits off by {deviation:.0e} of the largest one at most"


# Checks


def keeps_the_protocol(subject: Subject) -> str:
    """It is an instance with every member, a stable hash and the vocabulary of its loading."""
    require_protocol(subject, "target")
    size = subject.part.vocab_size
    if size != subject.target.vocab_size:
        raise Broken(f"it has {size} tokens, and was loaded as one of {subject.target.vocab_size}")
    return f"a vocabulary of {size}"


def keeps_shapes(subject: Subject) -> str:
    """Caches, forwards and logits have the shapes of the protocol, and a commit keeps them."""
    for batch in (1, ROWS):
        _require_empty_cache(subject, batch)

    empty = empty_cache(subject)
    text = random_text(subject, size=SIZE)
    output, _, cache = prefill(subject, text)
    check_same(empty, cache, "init_cache gave cache", "and a prefill made it")
    for nodes, parents, name in ((PATHS, PARENTS, "a path"), (None, None, "in order")):
        block, _ = feed_block(subject, cache, text, parents)
        count = jnp.array(COUNTS[0], jnp.int32)
        committed = _update(subject.part, Cache.commit, cache, block.written, count, nodes)
        check_same(empty, committed, "init_cache gave cache", f"and committing {name} made it")

    kinds = ", ".join(type(layer).__name__ for layer in empty.layers)
    return f"width {output.final.shape[-1]}, layer caches: {kinds}"


def _require_empty_cache(subject: Subject, batch: int) -> None:
    empty = empty_cache(subject, batch)
    if not isinstance(empty, Cache):
        raise Broken(f"init_cache returned {type(empty).__name__}; expected an eagle3_jax.Cache")
    for index, layer in enumerate(empty.layers):
        if not isinstance(layer, LayerCache):
            raise Broken(
                f"layer {index} of the cache is {type(layer).__name__}; expected `fill` and"
                " `commit`"
            )
    check_rows(subject.part, empty, batch, origin="init_cache gave cache")
    _require_length(empty, np.zeros(batch, int), "init_cache")


def depends_on_the_text(subject: Subject) -> str:
    """Another token changes the logits after the next one; else no other check detects anything."""
    text = random_text(subject)
    changed_text = text.copy()
    changed_text[:, ::2] = (changed_text[:, ::2] + 1) % subject.target.model.vocab_size

    difference = reference_logits(subject, text) - reference_logits(subject, changed_text)
    moved = np.abs(difference).max(-1)[:, 1::2] / subject.once(largest_logit)
    median = float(np.median(moved))
    if median < 5 * tolerance_of(subject):
        raise NotRun(
            f"logits after a token move by {median:.1g} of the largest one when the token before it"
            f" is another; at {tolerance_of(subject):g} no check here would see a token in the"
            " wrong place. Give it larger weights"
        )
    return f"the token before moves logits by {median:.1%} of the largest one"


def rounds_equal_tokens(subject: Subject, *, tree: bool) -> str:
    """Prompts, a block after them and a chain after its committed tokens are like their texts.

    The prompts are ragged and have different padding.
    """
    block = "a tree" if tree else "a chain"
    deviations = [
        require_round(subject, inputs, block) for inputs in random_rounds(subject, tree=tree)
    ]
    return _describe_deviation(max(deviations))


def has_independent_rows(subject: Subject) -> str:
    """A row is the same in a batch of one, and whatever its neighbours hold."""
    inputs, neighbours = itertools.islice(random_rounds(subject, tree=True), 2)
    neighbours = neighbours._replace(
        text=random_text(subject, 10), length=SIZE - 1 - np.arange(ROWS)
    )
    expected = run_round(subject, inputs)

    deviations = []
    for row in range(ROWS):
        inputs_of_row = repeat_row(inputs, row)
        mixed = run_round(subject, mix_rows(np.arange(ROWS) == row, inputs, neighbours))
        for logits, condition in (
            (repeat_row(mixed, row), "when its neighbours hold other tokens"),
            (run_round(subject, inputs_of_row), "without them"),
        ):
            faults = [f"(row {row} of the batch) is another {condition}"] * 3
            expected_of_row = repeat_row(expected, row)
            deviations.append(
                require_equal_round(subject, inputs_of_row, logits, expected_of_row, faults)
            )
    return _describe_deviation(max(deviations))


def long_text_equals_tokens(subject: Subject) -> str:
    """Long prompts in many rows, a block of two branches and a chain after one of them.

    Below 32 bits the default tolerance is doubled: recurrent states round off more over a long text
    (Qwen3-Next in bfloat16: 4 % of the largest logit).
    """
    if subject.tolerance is None and subject.once(computes_in_low_precision):
        subject = dataclasses.replace(subject, tolerance=2 * tolerance_of(subject))

    inputs = long_round(subject)
    size = inputs.draft.shape[1]
    deviation = require_round(subject, inputs, f"a tree of {size}")
    return (
        f"{LONG_ROWS} rows, prompts of 1 to {inputs.padding.shape[1]} tokens, blocks of {size},"
        f" texts of {inputs.text.shape[1]}; {_describe_deviation(deviation)}"
    )


def gives_features(subject: Subject) -> str:
    """Features follow the order of layers, are equal in a block, and end in the final state."""
    num_layers = subject.once(count_layers)
    layers = (0, num_layers, num_layers + 1)
    text = random_text(subject, size=SIZE)
    features = _features(subject, layers)
    prompt, *_ = prefill(subject, text, (SIZE,) * ROWS)
    final = np.asarray(prompt.final, np.float64)
    if features.shape[3] != final.shape[2]:
        raise Broken(
            f"features have {features.shape[3]} numbers; expected {final.shape[2]}, as final states"
        )

    block, _ = feed_block(subject, empty_cache(subject), text, aux_layers=layers)
    reordered = _features(subject, layers[::-1])[:, :, ::-1]
    with_final = np.concatenate([features[:, :, :-1], final[:, :, None]], axis=2)
    largest = 0.0
    for variant, condition in (
        (reordered, "when the layers are requested in another order"),
        (np.asarray(block.features, np.float64), "in a block with a cache"),
        (with_final, "from the final state, which it should be,"),
    ):
        for index, layer in enumerate(layers):
            deviation = _deviation(variant[:, :, index], features[:, :, index])
            largest = max(largest, deviation)
            if not deviation <= tolerance_of(subject):
                raise Broken(
                    f"features of layer {layer} differ {condition}: by {deviation:.1g} of the"
                    " largest value"
                )
    return f"layers {', '.join(map(str, layers))}; off by {largest:.0e} at most"


def _features(subject: Subject, layers: tuple[int, ...]) -> Float[np.ndarray, "B T A D"]:
    """Returns the features of a prefill, which a target may refuse to give."""
    try:
        output, *_ = prefill(
            subject, random_text(subject, size=SIZE), (SIZE,) * ROWS, aux_layers=layers
        )
    except ValueError as refusal:
        raise Skipped(f"refused: {(str(refusal).splitlines() or [''])[0]}") from None
    return np.asarray(output.features, np.float64)


def lends_tables(subject: Subject) -> str:
    """Its tables have the sizes of the vocabulary, and do what the target does, up to a factor."""
    model = subject.target.model
    if not hasattr(model, "tables"):
        raise Skipped("it has no `tables`; draft heads must bring their own")
    tables = model.tables(subject.target.params)
    if not isinstance(tables, EmbeddingTables):
        raise Broken(
            f"`tables` returned {type(tables).__name__}; expected eagle3_jax.EmbeddingTables"
        )

    text = random_text(subject, size=SIZE)
    output, logits, _ = prefill(subject, text, (SIZE,) * ROWS)
    shape = (model.vocab_size, output.final.shape[-1])
    _require_shape("embedding", tables.embedding, shape)
    _require_shape("unembedding", tables.unembedding, shape[::-1])

    product = np.asarray(output.final, np.float64) @ _numbers(tables.unembedding)
    factor, deviation = _scale_to(product, logits)
    tolerance = tolerance_of(subject)
    if deviation > tolerance:
        # A cap on the logits keeps their order, which greedy drafts use.
        ranked = np.take_along_axis(logits, product.argsort(-1), axis=-1)
        if (np.diff(ranked, axis=-1) < -tolerance * subject.once(largest_logit)).any():
            raise Broken(
                f"logits are off by {deviation:.1g} of the largest from the final state times its"
                " unembedding"
            )
    report = f"logits are {factor:.4g} times the product, off by {deviation:.0e}"

    num_layers = subject.once(count_layers)
    try:
        inputs = _features(subject, (0, num_layers, num_layers + 1))[:, :, 0]
    except Skipped:
        return f"{report}; the embedding is not compared"
    embedded = _numbers(tables.embedding)[text]
    factor, deviation = _scale_to(embedded, inputs)
    times = f"{factor:.4g} times the embedding"
    if deviation > tolerance:
        # A norm of the embedding has a factor for each token.
        times = "the embedding times a number for each token"
        rows = zip(embedded.reshape(-1, shape[1]), inputs.reshape(-1, shape[1]), strict=True)
        deviation = max(_scale_to(*row)[1] for row in rows)
    if deviation > tolerance:
        raise Broken(
            f"the input of layer 0 is off by {deviation:.1g} of its largest value from its"
            " embedding's rows"
        )
    return f"{report}; the input of layer 0 is {times}, off by {deviation:.0e}"


def _numbers(table: Any) -> np.ndarray:
    if isinstance(table, GroupedKernel | Int8Kernel):
        table = table.dense(jnp.float32)
    return np.asarray(table, np.float64)


def _require_shape(name: str, table: Any, shape: tuple[int, ...]) -> None:
    if np.shape(table) != shape:
        raise Broken(f"its {name} has shape {list(np.shape(table))}; expected {list(shape)}")


def _scale_to(values: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Returns the factor that brings values nearest to expected ones, and the deviation then."""
    factor = float((values * expected).sum() / max((values * values).sum(), 1e-30))
    return factor, _deviation(factor * values, expected)


def _deviation(values: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference, as a share of the largest expected value."""
    return float(np.abs(values - expected).max() / max(np.abs(expected).max(), 1e-9))


def keeps_greedy_output(subject: Subject) -> str:
    """Greedy output is the likeliest token after every token, with chains and trees drafted."""
    text = random_text(subject)
    rows = np.arange(ROWS)
    script = text.copy()
    for step in range(NEW):
        end = LENGTHS + step
        script[rows, end] = reference_logits(subject, script)[rows, end - 1].argmax(-1)

    # Drafts are this text with wrong tokens in between, so that some are accepted and some not.
    prompts = [text[row, : LENGTHS[row]].tolist() for row in range(ROWS)]
    reports = []
    for shape, parents, shifts in (
        ("a chain", (-1, 0, 1, 2), (0, 0, 0, 0)),
        ("a tree", (-1, 0, 0, 1, 2, 4), (0, 1, 0, 0, 0, 0)),
    ):
        drafter = LoadedDrafter(
            _Scripted(parents, shifts, subject.target.vocab_size), jnp.asarray(script)
        )
        stats = require_greedy_output(subject, drafter, prompts, NEW, f"with {shape} drafted")
        accepted = int(stats.num_accepted_tokens)
        drafted = int(stats.num_draft_tokens)
        reports.append(f"{accepted} of {drafted} tokens of {shape} accepted")
        if not 0 < accepted < drafted:
            raise NotRun(f"the text is its own, but {reports[-1]}")
    return ", ".join(reports)


@dataclasses.dataclass(frozen=True)
class _Scripted(FixedTree):
    """Proposes the tokens of its parameters ``[B S]``, and a wrong one every fourth position.

    ``shifts`` are added to the ids of the nodes.
    """

    shifts: tuple[int, ...]
    vocab_size: int

    def propose(
        self, params: Any, state: RootState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        is_wrong = self.positions(state) % 4 == 3
        shift = jnp.array(self.shifts, jnp.int32)[None] + is_wrong.astype(jnp.int32)
        return self.draft(state, (self.scripted(params, state) + shift) % self.vocab_size)


TARGET_CHECKS: dict[str, Callable[[Subject], str | None]] = {
    PROTOCOL: keeps_the_protocol,
    "keeps shapes and types": keeps_shapes,
    "a token depends on those before it": depends_on_the_text,
    "a text equals its tokens one by one": functools.partial(rounds_equal_tokens, tree=False),
    "a node of a tree equals its own path": functools.partial(rounds_equal_tokens, tree=True),
    "rows are independent of their neighbours": has_independent_rows,
    "a long text equals its tokens one by one": long_text_equals_tokens,
    "features are those of the layers asked for": gives_features,
    "lends its tables": lends_tables,
    "greedy output is its own": keeps_greedy_output,
}
