"""Logits processors: token bans, biases, penalties, min-p and token automata, as part of a target.

:func:`with_processors` wraps a target. Each processor changes the logits after every token, as a
function of a small state that advances with the tokens of a row. The wrapped target is a target
like any other, so drafts of every shape are verified exactly against the changed distribution:

* The states of a row are one more :class:`~eagle3_jax.cache.LayerCache`. A block does not change
  them; it returns the state after each of its nodes, and a commit selects the state at the end of
  the accepted path.
* ``final`` has the state of each token in extra columns, so ``unembed`` can change the logits of
  any token.

The host takes no part in decoding. If all tokens are forbidden, the row ends with
``FinishReason.NOT_FINITE``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import Cache
from eagle3_jax.files.jsonl import shown
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.models.context import parents_of
from eagle3_jax.processors.grammar import compile_regex, merge_columns
from eagle3_jax.processors.schema import schema_to_regex
from eagle3_jax.types import TargetModel, TargetOutput


class LogitsProcessor:
    """A change of logits, here none.

    A subclass is a frozen dataclass whose numbers are in ``params``.
    """

    #: Whether the state advances over the tokens of the prompt.
    prompt: bool = False

    def arrays(self, vocab_size: int) -> Any:
        """Returns ``params``, a pytree of arrays.

        Raises:
            ValueError: They do not fit the vocabulary.
        """
        del vocab_size
        return ()

    def init(self, batch: int, vocab_size: int) -> Any:
        """Returns the state before the first token.

        It is a pytree of ``[B ...]`` in bool, uint8 or int32.
        """
        del batch, vocab_size
        return ()

    def advance(self, params: Any, state: Any, tokens: Int[Array, " B"]) -> Any:
        """Returns the state after one more token in each row, of the same shapes and types."""
        del params, tokens
        return state

    def __call__(self, params: Any, state: Any, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns the changed logits; minus infinity forbids a token."""
        del params, state
        return logits


def _float32(name: str, value: Any) -> float:
    """Returns a number, rounded to float32.

    Raises:
        ValueError: The value is not a number, or it is finite but infinite in float32. The message
            begins with ``name``.
    """
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {shown(value)}; expected a number")
    with np.errstate(over="ignore"):
        rounded = float(number.astype(np.float32))
    if math.isinf(rounded) and np.isfinite(number):
        raise ValueError(
            f"{name} is {shown(value)}; expected a number of float32, at most 3.4e38 in size"
        )
    return rounded


def _value(default: Any = dataclasses.MISSING) -> Any:
    """Returns a field whose value is an argument of the compiled program.

    So a new value does not recompile it.
    """
    return dataclasses.field(default=default, compare=False)


@dataclasses.dataclass(frozen=True)
class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens. ``-math.inf`` bans a token.

    Attributes:
        bias: The number for each token id.
    """

    bias: Mapping[int, float] = _value()

    def arrays(self, vocab_size: int) -> Array:
        """Returns the bias of every token, ``[V]``."""
        bias = np.zeros((vocab_size,), np.float32)
        if not isinstance(self.bias, Mapping):
            raise ValueError(
                f"LogitBias has {shown(self.bias)}; expected a number for each token id, as in {{7:"
                " 1.5}"
            )
        for token, number in self.bias.items():
            is_integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not (is_integer and 0 <= token < vocab_size):
                raise ValueError(
                    f"LogitBias names the token {shown(token)}; expected ids from 0 to"
                    f" {vocab_size - 1}"
                )
            value = _float32(f"LogitBias of the token {token}", number)
            if math.isnan(value) or value == math.inf:
                raise ValueError(
                    f"LogitBias of the token {token} is {value}; expected a number, or -math.inf to"
                    " ban it"
                )
            bias[token] = value
        return jnp.asarray(bias)

    def __call__(
        self, params: Array, state: Any, logits: Float[Array, "B V"]
    ) -> Float[Array, "B V"]:
        """See :class:`LogitsProcessor`."""
        return logits + params[None]


@dataclasses.dataclass(frozen=True)
class MinP(LogitsProcessor):
    """Forbids tokens that are less than ``min_p`` times as likely as the most likely token.

    Probabilities are at temperature 1. It is applied before temperature, top-k and top-p, as in
    llama.cpp. Hugging Face and vLLM apply it after temperature ``T``: ``min_p ** T`` has their
    effect.

    Attributes:
        min_p: Above 0 and at most 1.
    """

    min_p: float = _value()

    def arrays(self, vocab_size: int) -> Array:
        """Returns the logarithm of ``min_p``."""
        min_p = _float32("min_p", self.min_p)
        if not 0 < min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; expected above 0 and at most 1")
        return jnp.float32(math.log(min_p))

    def __call__(
        self, params: Array, state: Any, logits: Float[Array, "B V"]
    ) -> Float[Array, "B V"]:
        """See :class:`LogitsProcessor`."""
        least = jnp.max(logits, axis=-1, keepdims=True) + params
        return jnp.where(logits >= least, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Penalty(LogitsProcessor):
    """Lowers the logits of tokens that occurred. The state counts each token, up to 255 times.

    Hugging Face and vLLM count the prompt for ``repetition``, and vLLM only the output for the
    others: use two.

    Attributes:
        repetition: Divides positive logits and multiplies negative ones (Keskar, 2019); 1 changes
            nothing.
        presence: Subtracted once.
        frequency: Subtracted for each occurrence.
        prompt: Whether tokens of the prompt count.
    """

    repetition: float = _value(1.0)
    presence: float = _value(0.0)
    frequency: float = _value(0.0)
    prompt: bool = False

    def arrays(self, vocab_size: int) -> Array:
        """Returns repetition, presence and frequency, ``[3]``."""
        names = ("repetition", "presence", "frequency")
        numbers = tuple(_float32(f"Penalty: {name}", getattr(self, name)) for name in names)
        if not (all(map(math.isfinite, numbers)) and numbers[0] > 0):
            raise ValueError(
                f"Penalty{numbers}: expected repetition above 0, presence and frequency finite"
            )
        return jnp.asarray(numbers, jnp.float32)

    def init(self, batch: int, vocab_size: int) -> Array:
        """Returns counts of zero."""
        return jnp.zeros((batch, vocab_size), jnp.uint8)

    def advance(self, params: Array, state: Array, tokens: Int[Array, " B"]) -> Array:
        """See :class:`LogitsProcessor`."""

        def increment(counts: Array, token: Array) -> Array:
            return counts.at[token].add((counts[token] < 255).astype(jnp.uint8))

        return jax.vmap(increment)(state, tokens)

    def __call__(
        self, params: Array, state: Array, logits: Float[Array, "B V"]
    ) -> Float[Array, "B V"]:
        """See :class:`LogitsProcessor`."""
        repetition, presence, frequency = params
        divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
        occurred = state > 0
        lowered = divided - presence - frequency * state.astype(jnp.float32)
        return jnp.where(occurred, lowered, logits)


@dataclasses.dataclass(frozen=True)
class TokenAutomaton(LogitsProcessor):
    """Allows the tokens that an automaton allows.

    A state in which a text may end allows a stop token. Tokens that lead to the same state from
    every state share a column of the compiled table, four bytes for each state.

    Attributes:
        table: ``[S V]``, the state after each token, -1 for a token that is forbidden; with
            ``columns``, ``[S C]``.
        start: The state before the first token.
        prompt: Whether the automaton reads the prompt too.
        columns: ``[V]``, the column of each token. Default: a column for each token.
    """

    table: np.ndarray = _value()
    start: int = _value(0)
    prompt: bool = False
    columns: np.ndarray | None = _value(None)

    @classmethod
    def from_regex(cls, pattern: str, target: LoadedTarget) -> TokenAutomaton:
        """Compiles a regular expression that the output matches; needs ``eagle3-jax[grammar]``.

        All of the output matches it. The syntax is that of the Rust crate ``regex``: no
        look-around, no back references, anchors only around the pattern. Private characters from
        U+100000 are never written. The output ends with a stop token of the target, or at its
        length limit.

        Args:
            pattern: The regular expression.
            target: The target, for its tokenizer and stop tokens.

        Raises:
            ValueError: The pattern is not supported, the vocabulary lacks a character of it, the
                table has more than 2^28 entries, the target has no tokenizer or no stop token, or
                outlines-core is not installed.
        """
        table, columns = compile_regex(pattern, target)
        return cls(table, columns=columns)

    @classmethod
    def from_json_schema(
        cls, schema: str | Mapping[str, Any], target: LoadedTarget, *, whitespace: str | None = None
    ) -> TokenAutomaton:
        """Compiles a JSON schema that all of the output follows; needs ``eagle3-jax[grammar]``.

        Args:
            schema: The schema, as JSON text or as a mapping. Properties are written in its order.
            target: The target, for its tokenizer and stop tokens.
            whitespace: A regular expression for the space between two JSON tokens. Default: at most
                one space.

        Raises:
            ValueError: A part of the schema has a keyword, or a combination of keywords, that is
                not supported, such as ``maximum``; and as :meth:`from_regex`.
        """
        return cls.from_regex(schema_to_regex(schema, whitespace), target)

    def arrays(self, vocab_size: int) -> tuple[Array, Array]:
        """Returns the table ``[S C]``, and the column ``[V]`` of each token.

        States are numbered from the first.
        """
        table = np.asarray(self.table)
        if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer) or not len(table):
            raise ValueError(
                f"the automaton's table is {table.dtype}{list(table.shape)}; expected integers"
                " [S V]"
            )

        states = len(table)
        columns = None if self.columns is None else np.asarray(self.columns)
        if columns is not None and (
            columns.ndim != 1 or not np.issubdtype(columns.dtype, np.integer)
        ):
            raise ValueError(
                f"the automaton's columns are {columns.dtype}{list(columns.shape)}; expected"
                " integers [V]"
            )
        if isinstance(self.start, bool) or not isinstance(self.start, int | np.integer):
            raise ValueError(
                f"the automaton starts in the state {shown(self.start)}; expected a whole number"
            )

        known = table.shape[1] if columns is None else len(columns)
        if known != vocab_size:
            raise ValueError(
                f"the automaton has a vocabulary of {known} tokens and the target one of"
                f" {vocab_size}; build it with the target's tokenizer"
            )
        if not (table.min() >= -1 and table.max() < states and 0 <= self.start < states):
            raise ValueError(
                f"the automaton starts in the state {self.start} and its table names the states"
                f" {table.min()} to {table.max()}; expected 0 to {states - 1}, and -1 in the table"
            )

        # Smaller or unsigned types would overflow below.
        table = table.astype(np.int32)
        start = int(self.start)
        if columns is None:
            table, columns = merge_columns(lambda: table)
        elif not (np.min(columns) >= 0 and np.max(columns) < table.shape[1]):
            raise ValueError(
                f"the automaton's columns are not all from 0 to {table.shape[1] - 1}, those of its"
                " table"
            )

        # The first state becomes number 0.
        rotated = np.roll(table, -start, 0)
        rotated = np.where(rotated < 0, -1, (rotated - start) % states)
        return jnp.asarray(rotated, jnp.int32), jnp.asarray(columns, jnp.int32)

    def init(self, batch: int, vocab_size: int) -> Array:
        """Returns the first state, 0. After a forbidden token the state is -1."""
        del vocab_size
        return jnp.zeros((batch,), jnp.int32)

    def advance(self, params: tuple[Array, Array], state: Array, tokens: Int[Array, " B"]) -> Array:
        """See :class:`LogitsProcessor`."""
        table, columns = params
        return jnp.where(state < 0, -1, table[jnp.maximum(state, 0), columns[tokens]])

    def __call__(
        self, params: tuple[Array, Array], state: Array, logits: Float[Array, "B V"]
    ) -> Float[Array, "B V"]:
        """See :class:`LogitsProcessor`."""
        table, columns = params
        allowed = (table[jnp.maximum(state, 0)] >= 0) & (state >= 0)[:, None]
        return jnp.where(allowed[:, columns], logits, -jnp.inf)


class States(struct.PyTreeNode):
    """The :class:`~eagle3_jax.cache.LayerCache` of all processors' states."""

    value: Any  #: The states after the committed tokens, ``[B ...]`` each.

    def fill(self, written: Any, count: Int[Array, " B"]) -> States:
        """See :class:`~eagle3_jax.cache.LayerCache`.

        ``written`` is ``[B T ...]``, the state after each token.
        """

        def read_last(leaf: Array) -> Array:
            return _read(leaf, jnp.clip(count - 1, 0, leaf.shape[1] - 1))

        return States(jax.tree.map(read_last, written))

    def commit(
        self,
        written: Any,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None,
    ) -> States:
        """See :class:`~eagle3_jax.cache.LayerCache`.

        ``written`` is ``[B T ...]``, the state after each node.
        """
        del length
        last = jnp.maximum(count - 1, 0)
        node = last if nodes is None else _read(nodes, last)

        def update(old: Array, leaf: Array) -> Array:
            return _where_rows(count > 0, _read(leaf, node), old)

        return States(jax.tree.map(update, self.value, written))


def _read(leaf: Array, index: Int[Array, " B"]) -> Array:
    """Returns ``leaf[b, index[b]]`` for every row ``b``."""
    return jax.vmap(lambda row, index: row[index])(leaf, index)


def _where_rows(condition: Bool[Array, " B"], if_true: Array, if_false: Array) -> Array:
    """Selects whole rows ``[B ...]``."""
    return jnp.where(condition.reshape(-1, *[1] * (if_true.ndim - 1)), if_true, if_false)


@dataclasses.dataclass(frozen=True)
class ProcessedTarget:
    """A :class:`~eagle3_jax.types.TargetModel` with changed logits; see :func:`with_processors`.

    Parameters are a dictionary: ``target`` has those of the model, and ``processors`` an entry for
    each processor.
    """

    model: TargetModel  #: The model.
    processors: tuple[Any, ...]  #: Applied in order.

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.model.vocab_size

    def _init_states(self, batch: int) -> tuple[Any, ...]:
        return tuple(processor.init(batch, self.vocab_size) for processor in self.processors)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns the model's empty cache with one more layer for the states."""
        layers = self.model.init_cache(batch, capacity).layers
        states = States(self._init_states(batch))
        return Cache.of((*layers, states), batch=batch)

    def __call__(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "#B T T"],
        cache: Cache | None = None,
        aux_layers: tuple[int, ...] = (),
        length: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        """Runs a block; see :class:`~eagle3_jax.types.TargetModel`.

        With ``length`` the tokens are a prompt. With neither ``cache`` nor ``length`` all
        processors read all tokens, including processors that do not read prompts.
        """
        inner = None if cache is None else Cache(layers=cache.layers[:-1], length=cache.length)
        output = self.model(
            params["target"], tokens, positions, mask, inner, aux_layers=aux_layers, length=length
        )
        if cache is None:
            before = self._init_states(tokens.shape[0])
        else:
            before = cache.layers[-1].value  # type: ignore[attr-defined]

        if cache is None and length is not None:
            states = self._after_prompt(params, before, tokens, length)
        else:
            states = self._after_nodes(params, before, tokens, parents_of(mask))

        columns = [_to_digits(leaf, output.final.dtype) for leaf in jax.tree.leaves(states)]
        final = jnp.concatenate([output.final, *columns], axis=-1)
        return TargetOutput(
            final=final, features=output.features, written=(*output.written, states)
        )

    def unembed(self, params: Any, final: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Returns the model's logits, changed by every processor in order."""
        templates, tree = jax.tree.flatten(self._init_states(1))
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in templates]
        width = final.shape[-1] - sum(sizes)
        logits = self.model.unembed(params["target"], final[..., :width])

        # The extra columns have the bytes of the states.
        flat = final.reshape(-1, final.shape[-1])
        leaves = []
        for template, size in zip(templates, sizes, strict=True):
            leaves.append(_from_digits(flat[:, width : width + size], template))
            width += size
        states = jax.tree.unflatten(tree, leaves)

        changed = logits.reshape(-1, logits.shape[-1])
        for processor, arrays, state in zip(
            self.processors, params["processors"], states, strict=True
        ):
            changed = processor(arrays, state, changed)
        return changed.reshape(logits.shape)

    def _advance(
        self, params: Any, states: Any, tokens: Int[Array, " B"], *, prompt: bool = False
    ) -> tuple[Any, ...]:
        """Returns the states after one more token in each row, which may be one of the prompt."""
        advanced = []
        for processor, arrays, state in zip(
            self.processors, params["processors"], states, strict=True
        ):
            reads = processor.prompt or not prompt
            advanced.append(processor.advance(arrays, state, tokens) if reads else state)
        return tuple(advanced)

    def _after_prompt(
        self, params: Any, before: Any, tokens: Int[Array, "B T"], length: Int[Array, " B"]
    ) -> Any:
        """Returns the states after each token of a prompt, ``[B T ...]``.

        Padding does not advance them.
        """
        read_token = functools.partial(self._read_token, params, length)
        _, states = lax.scan(
            read_token, before, (tokens.T, jnp.arange(tokens.shape[1], dtype=jnp.int32))
        )
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), states)

    def _read_token(
        self, params: Any, length: Int[Array, " B"], states: Any, token: tuple[Array, Array]
    ) -> tuple[Any, Any]:
        """Returns the states after a token of a prompt, twice; the step of a scan."""
        ids, index = token
        after = self._advance(params, states, ids, prompt=True)
        new = jax.tree.map(lambda new, old: _where_rows(index < length, new, old), after, states)
        return new, new

    def _after_nodes(
        self, params: Any, before: Any, tokens: Int[Array, "B T"], parents: Int[Array, "#B T"]
    ) -> Any:
        """Returns the states after each node, ``[B T ...]``."""
        parents = jnp.broadcast_to(parents, tokens.shape)
        size = tokens.shape[1]
        # Slot 0 has the state before the block, slot 1 + node the state after a node.
        slots = jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], size + 1, axis=1), before)
        read_node = functools.partial(self._read_node, params, tokens, parents)
        slots, _ = lax.scan(read_node, slots, jnp.arange(size, dtype=jnp.int32))
        return jax.tree.map(lambda leaf: leaf[:, 1:], slots)

    def _read_node(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        parents: Int[Array, "B T"],
        slots: Any,
        node: Int[Array, ""],
    ) -> tuple[Any, None]:
        """Writes the states after a node into its slot; the step of a scan."""
        of_parents = jax.tree.map(lambda leaf: _read(leaf, parents[:, node] + 1), slots)
        after = self._advance(params, of_parents, tokens[:, node])

        def write(leaf: Array, new: Array) -> Array:
            return leaf.at[:, node + 1].set(new)

        return jax.tree.map(write, slots, after), None


def _to_digits(leaf: Array, dtype: Any) -> Float[Array, "B T n"]:
    """Returns the bytes of a state as numbers from 0 to 255.

    All floating types hold them exactly, even bfloat16.
    """
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    digits = lax.bitcast_convert_type(leaf, jnp.uint8)
    return digits.reshape(*leaf.shape[:2], -1).astype(dtype)


def _from_digits(digits: Float[Array, "n k"], template: Array) -> Array:
    """Returns the state ``[n ...]`` for digits from :func:`_to_digits`.

    It has the shape and type of ``template``.
    """
    shape = (len(digits), *template.shape[1:])
    dtype = template.dtype
    state_bytes = digits.astype(jnp.uint8)
    if dtype.itemsize == 1:
        return state_bytes.reshape(shape).astype(dtype)
    by_element = state_bytes.reshape(*shape, dtype.itemsize)
    return lax.bitcast_convert_type(by_element, dtype)


def with_processors(target: LoadedTarget, *processors: Any) -> LoadedTarget:
    """Returns the same target with changed logits.

    It shares its arrays. Decoding stays exact with drafts of any shape. Load draft heads with the
    unchanged target. Their drafts ignore the change, so a strong change lowers acceptance. During a
    prefill, ``final`` has the processors' states for every token: ``V`` more numbers per token for
    a penalty.

    Args:
        target: The target.
        processors: :class:`LogitBias`, :class:`MinP`, :class:`Penalty`, :class:`TokenAutomaton`, or
            your subclass of :class:`LogitsProcessor`. They are applied in order, before
            temperature, top-k and top-p.

    Raises:
        ValueError: There is no processor, a processor does not fit the vocabulary or has a state of
            another type, or the target is on a mesh.
    """
    if target.mesh is not None:
        raise ValueError("logits processors do not work on a mesh yet; load the target without one")
    for processor in processors or (None,):
        if not isinstance(processor, LogitsProcessor):
            raise ValueError(
                f"{processor!r:.40} is not a logits processor; expected a LogitsProcessor, such as"
                " LogitBias"
            )
    for processor in processors:
        state = jax.eval_shape(lambda processor=processor: processor.init(1, target.vocab_size))
        for leaf in jax.tree.leaves(state):
            if leaf.dtype not in (jnp.bool_, jnp.uint8, jnp.int32):
                name = type(processor).__name__
                raise ValueError(
                    f"{name} has a state of {leaf.dtype}; expected bool, uint8 or int32"
                )

    arrays = tuple(processor.arrays(target.vocab_size) for processor in processors)
    model = ProcessedTarget(target.model, processors)
    return dataclasses.replace(
        target, model=model, params={"target": target.params, "processors": arrays}
    )
