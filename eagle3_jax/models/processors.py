"""Logits processors: token bans, biases, penalties, min-p and token automata, as part of a target.

:func:`with_processors` wraps a target. Each processor changes the logits after every token, as a function of a small
state that advances with the tokens of a row. The wrapped target is a target like any other, so drafts of every shape
are verified exactly against the changed distribution:

* the states of a row are one more :class:`~eagle3_jax.cache.LayerCache`: a block leaves them alone, keeps the state
  after each of its nodes, and a commit selects the state at the end of the accepted path;
* ``final`` has the state of each token in extra columns, so ``unembed`` changes the logits of any of them.

The host takes no part in decoding. If no token is left, the row ends with ``FinishReason.NOT_FINITE``.
"""

from __future__ import annotations

import dataclasses
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
from eagle3_jax.models.grammar import compile_regex, merge_columns
from eagle3_jax.models.memory import parents_of
from eagle3_jax.models.schema import schema_to_regex
from eagle3_jax.types import TargetModel, TargetOutput


class LogitsProcessor:
    """A change of logits, here none. A subclass is a frozen dataclass whose numbers are in ``params``."""

    #: Whether the state advances over the tokens of the prompt.
    prompt: bool = False

    def arrays(self, vocab_size: int) -> Any:
        """Returns ``params``, a pytree of arrays; raises ``ValueError`` if they do not fit the vocabulary."""
        del vocab_size
        return ()

    def init(self, batch: int, vocab_size: int) -> Any:
        """Returns the state before the first token: a pytree of ``[B ...]`` in bool, uint8 or int32."""
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
    """A number as float32.

    Raises:
        ValueError: The value is no number, or it is finite and infinite in float32; the message begins with ``name``.
    """
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {shown(value)}; expected a number")
    with np.errstate(over="ignore"):
        rounded = float(number.astype(np.float32))
    if math.isinf(rounded) and np.isfinite(number):
        raise ValueError(f"{name} is {shown(value)}; expected a number of float32, at most 3.4e38 in size")
    return rounded


def _value(default: Any = dataclasses.MISSING) -> Any:
    """A field that reaches the compiled program as an array, so another value needs no other program."""
    return dataclasses.field(default=default, compare=False)


@dataclasses.dataclass(frozen=True)
class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens. ``-math.inf`` bans a token.

    Attributes:
        bias: The number for each token id.
    """

    bias: Mapping[int, float] = _value()

    def arrays(self, vocab_size: int) -> Array:
        """``[V]``, the bias of every token."""
        bias = np.zeros((vocab_size,), np.float32)
        if not isinstance(self.bias, Mapping):
            raise ValueError(f"LogitBias has {shown(self.bias)}; expected a number for each token id, as in {{7: 1.5}}")
        for token, number in self.bias.items():
            whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not (whole and 0 <= token < vocab_size):
                raise ValueError(f"LogitBias names the token {shown(token)}; expected ids from 0 to {vocab_size - 1}")
            value = _float32(f"LogitBias of the token {token}", number)
            if math.isnan(value) or value == math.inf:
                raise ValueError(
                    f"LogitBias of the token {token} is {value}; expected a number, or -math.inf to ban it"
                )
            bias[token] = value
        return jnp.asarray(bias)

    def __call__(self, params: Array, state: Any, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """See :class:`LogitsProcessor`."""
        return logits + params


@dataclasses.dataclass(frozen=True)
class MinP(LogitsProcessor):
    """Forbids tokens whose probability at temperature 1 is below ``min_p`` times that of the likeliest token.

    It is applied before temperature, top-k and top-p, as in llama.cpp. Hugging Face and vLLM apply it after
    temperature ``T``: ``min_p ** T`` has their effect.

    Attributes:
        min_p: Above 0 and at most 1.
    """

    min_p: float = _value()

    def arrays(self, vocab_size: int) -> Array:
        """The logarithm of ``min_p``."""
        min_p = _float32("min_p", self.min_p)
        if not 0 < min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; expected above 0 and at most 1")
        return jnp.float32(math.log(min_p))

    def __call__(self, params: Array, state: Any, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """See :class:`LogitsProcessor`."""
        return jnp.where(logits >= jnp.max(logits, axis=-1, keepdims=True) + params, logits, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Penalty(LogitsProcessor):
    """Lowers the logits of tokens that occurred. The state is how often each did, at most 255 times.

    Hugging Face and vLLM count the prompt for ``repetition``, and vLLM only the output for the others: use two.

    Attributes:
        repetition: Divides positive logits and multiplies negative ones (Keskar, 2019); 1 changes nothing.
        presence: Subtracted once.
        frequency: Subtracted for each occurrence.
        prompt: Whether tokens of the prompt count.
    """

    repetition: float = _value(1.0)
    presence: float = _value(0.0)
    frequency: float = _value(0.0)
    prompt: bool = False

    def arrays(self, vocab_size: int) -> Array:
        """The three numbers."""
        names = ("repetition", "presence", "frequency")
        numbers = tuple(_float32(f"Penalty: {name}", getattr(self, name)) for name in names)
        if not (all(map(math.isfinite, numbers)) and numbers[0] > 0):
            raise ValueError(f"Penalty{numbers}: expected repetition above 0, presence and frequency finite")
        return jnp.asarray(numbers, jnp.float32)

    def init(self, batch: int, vocab_size: int) -> Array:
        """No token occurred."""
        return jnp.zeros((batch, vocab_size), jnp.uint8)

    def advance(self, params: Array, state: Array, tokens: Int[Array, " B"]) -> Array:
        """See :class:`LogitsProcessor`."""
        return jax.vmap(lambda count, token: count.at[token].add((count[token] < 255).astype(jnp.uint8)))(state, tokens)

    def __call__(self, params: Array, state: Array, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """See :class:`LogitsProcessor`."""
        repetition, presence, frequency = params
        lowered = jnp.where(logits > 0, logits / repetition, logits * repetition)
        return jnp.where(state > 0, lowered - presence - frequency * state.astype(jnp.float32), logits)


@dataclasses.dataclass(frozen=True)
class TokenAutomaton(LogitsProcessor):
    """Allows the tokens that an automaton allows. A state in which a text may end allows a stop token.

    Tokens that lead to the same state from every state share a column of the compiled table, four bytes for each state.

    Attributes:
        table: ``[S V]``, the state after each token, -1 for a token that is forbidden; with ``columns``, ``[S C]``.
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
        """Compiles a regular expression that the whole output matches; needs ``eagle3-jax[grammar]``.

        The syntax is that of the Rust crate ``regex``: no look-around, no back references, anchors only around the
        pattern. Private characters from U+100000 are never written. The output ends with a stop token of the target, or
        at its length limit.

        Args:
            pattern: The regular expression.
            target: The target, for its tokenizer and stop tokens.

        Raises:
            ValueError: The pattern is not supported, the vocabulary lacks a character of it, the table has more than
                2^28 entries, the target has no tokenizer or no stop token, or outlines-core is not installed.
        """
        table, columns = compile_regex(pattern, target)
        return cls(table, columns=columns)

    @classmethod
    def from_json_schema(
        cls, schema: str | Mapping[str, Any], target: LoadedTarget, *, whitespace: str | None = None
    ) -> TokenAutomaton:
        """Compiles a JSON schema that the whole output follows; needs ``eagle3-jax[grammar]``.

        Args:
            schema: The schema, as JSON text or as a mapping. Properties are written in its order.
            target: The target, for its tokenizer and stop tokens.
            whitespace: A regular expression for the space between two JSON tokens. Default: ``[ ]?``.

        Raises:
            ValueError: A part of the schema has a keyword, or a combination of keywords, that is not supported, such as
                ``maximum``; and as :meth:`from_regex`.
        """
        return cls.from_regex(schema_to_regex(schema, whitespace), target)

    def arrays(self, vocab_size: int) -> tuple[Array, Array]:
        """The table ``[S C]``, its states numbered so that 0 is the first, and the column of each token ``[V]``."""
        table = np.asarray(self.table)
        if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer) or not len(table):
            raise ValueError(f"the automaton's table is {table.dtype}{list(table.shape)}; expected integers [S V]")
        states = len(table)
        columns = None if self.columns is None else np.asarray(self.columns)
        if columns is not None and (columns.ndim != 1 or not np.issubdtype(columns.dtype, np.integer)):
            raise ValueError(f"the automaton's columns are {columns.dtype}{list(columns.shape)}; expected integers [V]")
        if isinstance(self.start, bool) or not isinstance(self.start, int | np.integer):
            raise ValueError(f"the automaton starts in the state {shown(self.start)}; expected a whole number")
        known = table.shape[1] if columns is None else len(columns)
        if known != vocab_size:
            raise ValueError(
                f"the automaton has a vocabulary of {known} tokens and the target one of {vocab_size}; build "
                "it with the target's tokenizer"
            )
        if not (table.min() >= -1 and table.max() < states and 0 <= self.start < states):
            raise ValueError(
                f"the automaton starts in the state {self.start} and its table names the states {table.min()} to "
                f"{table.max()}; expected 0 to {states - 1}, and -1 in the table"
            )
        # smaller or unsigned types overflow below
        table = table.astype(np.int32)
        start = int(self.start)
        if columns is None:
            table, columns = merge_columns(lambda: table)
        elif not (np.min(columns) >= 0 and np.max(columns) < table.shape[1]):
            raise ValueError(f"the automaton's columns are not all from 0 to {table.shape[1] - 1}, those of its table")
        rotated = np.roll(table, -start, 0)
        rotated = np.where(rotated < 0, -1, (rotated - start) % states)
        return jnp.asarray(rotated, jnp.int32), jnp.asarray(columns, jnp.int32)

    def init(self, batch: int, vocab_size: int) -> Array:
        """The first state; -1 once a forbidden token was read."""
        del vocab_size
        return jnp.zeros((batch,), jnp.int32)

    def advance(self, params: tuple[Array, Array], state: Array, tokens: Int[Array, " B"]) -> Array:
        """See :class:`LogitsProcessor`."""
        table, columns = params
        return jnp.where(state < 0, -1, table[jnp.maximum(state, 0), columns[tokens]])

    def __call__(self, params: tuple[Array, Array], state: Array, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """See :class:`LogitsProcessor`."""
        table, columns = params
        allowed = (table[jnp.maximum(state, 0)] >= 0) & (state >= 0)[:, None]
        return jnp.where(allowed[:, columns], logits, -jnp.inf)


class States(struct.PyTreeNode):
    """The :class:`~eagle3_jax.cache.LayerCache` of all processors' states."""

    value: Any  #: The states after the committed tokens, ``[B ...]`` each.

    def fill(self, written: Any, count: Int[Array, " B"]) -> States:
        """See :class:`~eagle3_jax.cache.LayerCache`; ``written`` is ``[B T ...]``, the state after each token."""
        return States(jax.tree.map(lambda leaf: _at(leaf, jnp.clip(count - 1, 0, leaf.shape[1] - 1)), written))

    def commit(
        self, written: Any, length: Int[Array, " B"], count: Int[Array, " B"], nodes: Int[Array, "B T"] | None
    ) -> States:
        """See :class:`~eagle3_jax.cache.LayerCache`; ``written`` is ``[B T ...]``, the state after each node."""
        del length
        last = jnp.maximum(count - 1, 0)
        node = last if nodes is None else _at(nodes, last)
        return States(jax.tree.map(lambda old, leaf: _where(count > 0, _at(leaf, node), old), self.value, written))


def _at(leaf: Array, index: Int[Array, " B"]) -> Array:
    """One entry of every row, along axis 1."""
    return jax.vmap(lambda row, at: row[at])(leaf, index)


def _where(choice: Bool[Array, " B"], one: Array, other: Array) -> Array:
    return jnp.where(choice.reshape(-1, *[1] * (one.ndim - 1)), one, other)


@dataclasses.dataclass(frozen=True)
class ProcessedTarget:
    """A :class:`~eagle3_jax.types.TargetModel` whose logits are changed; see :func:`with_processors`.

    Parameters are a dictionary: ``target``, those of the model, and ``processors``, one entry for each.
    """

    model: TargetModel  #: The model.
    processors: tuple[Any, ...]  #: Applied in order.

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.model.vocab_size

    def _start(self, batch: int) -> tuple[Any, ...]:
        return tuple(one.init(batch, self.vocab_size) for one in self.processors)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """The model's cache, and one layer more for the states."""
        layers = self.model.init_cache(batch, capacity).layers
        return Cache.of((*layers, States(self._start(batch))), batch=batch)

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
        """See :class:`~eagle3_jax.types.TargetModel`.

        With ``length`` the tokens are a prompt. With neither ``cache`` nor ``length`` all tokens are read, also by
        processors that do not read prompts.
        """
        inner = None if cache is None else Cache(layers=cache.layers[:-1], length=cache.length)
        output = self.model(params["target"], tokens, positions, mask, inner, aux_layers=aux_layers, length=length)
        before = self._start(tokens.shape[0]) if cache is None else cache.layers[-1].value  # type: ignore[attr-defined]
        if cache is None and length is not None:
            states = self._after_prompt(params, before, tokens, length)
        else:
            states = self._after_nodes(params, before, tokens, parents_of(mask))
        columns = [_digits(leaf, output.final.dtype) for leaf in jax.tree.leaves(states)]
        final = jnp.concatenate([output.final, *columns], axis=-1)
        return TargetOutput(final=final, features=output.features, written=(*output.written, states))

    def unembed(self, params: Any, final: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """The model's logits, changed by every processor in order."""
        like, tree = jax.tree.flatten(self._start(1))
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in like]
        width = final.shape[-1] - sum(sizes)
        logits = self.model.unembed(params["target"], final[..., :width])
        flat = final.reshape(-1, final.shape[-1])
        leaves = []
        for leaf, size in zip(like, sizes, strict=True):
            leaves.append(_from_digits(flat[:, width : width + size], leaf))
            width += size
        changed = logits.reshape(-1, logits.shape[-1])
        for one, own, state in zip(
            self.processors, params["processors"], jax.tree.unflatten(tree, leaves), strict=True
        ):
            changed = one(own, state, changed)
        return changed.reshape(logits.shape)

    def _advance(self, params: Any, states: Any, tokens: Int[Array, " B"], *, prompt: bool = False) -> tuple[Any, ...]:
        return tuple(
            state if prompt and not one.prompt else one.advance(own, state, tokens)
            for one, own, state in zip(self.processors, params["processors"], states, strict=True)
        )

    def _after_prompt(self, params: Any, before: Any, tokens: Int[Array, "B T"], length: Int[Array, " B"]) -> Any:
        def step(states: Any, at: tuple[Array, Array]) -> tuple[Any, Any]:
            after = self._advance(params, states, at[0], prompt=True)
            kept = jax.tree.map(lambda new, old: _where(at[1] < length, new, old), after, states)
            return kept, kept

        _, states = lax.scan(step, before, (tokens.T, jnp.arange(tokens.shape[1], dtype=jnp.int32)))
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), states)

    def _after_nodes(self, params: Any, before: Any, tokens: Int[Array, "B T"], parents: Int[Array, "#B T"]) -> Any:
        """``[B T ...]``, the state after each node. Slot 0 is the state before the block."""
        parents = jnp.broadcast_to(parents, tokens.shape)
        size = tokens.shape[1]
        slots = jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], size + 1, axis=1), before)

        def step(slots: Any, node: Int[Array, ""]) -> tuple[Any, None]:
            above = jax.tree.map(lambda leaf: _at(leaf, parents[:, node] + 1), slots)
            after = self._advance(params, above, tokens[:, node])
            return jax.tree.map(lambda leaf, one: leaf.at[:, node + 1].set(one), slots, after), None

        slots, _ = lax.scan(step, slots, jnp.arange(size, dtype=jnp.int32))
        return jax.tree.map(lambda leaf: leaf[:, 1:], slots)


def _digits(leaf: Array, dtype: Any) -> Float[Array, "B T n"]:
    """A state as numbers from 0 to 255, which every floating type holds exactly, bfloat16 included."""
    leaf = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    return lax.bitcast_convert_type(leaf, jnp.uint8).reshape(*leaf.shape[:2], -1).astype(dtype)


def _from_digits(digits: Float[Array, "n k"], like: Array) -> Array:
    """The state that :func:`_digits` was given."""
    count = digits.shape[0]
    shape = like.shape[1:]
    dtype = like.dtype
    whole = digits.astype(jnp.uint8)
    if dtype.itemsize == 1:
        return whole.reshape(count, *shape).astype(dtype)
    return lax.bitcast_convert_type(whole.reshape(count, *shape, dtype.itemsize), dtype)


def with_processors(target: LoadedTarget, *processors: Any) -> LoadedTarget:
    """The same target with changed logits; its arrays are shared. Drafts of every shape stay exact.

    Load draft heads with the unchanged target. They know nothing of the change, so a strong one lowers the acceptance.
    A prompt's final states hold the processors' states for every token: for a penalty ``V`` numbers more.

    Args:
        target: The target.
        processors: :class:`LogitBias`, :class:`MinP`, :class:`Penalty`, :class:`TokenAutomaton`, or a
            :class:`LogitsProcessor` of your own. They are applied in order, before temperature, top-k and top-p.

    Raises:
        ValueError: A processor does not fit the vocabulary, has no hash or a state of another type, or the target is on
            a mesh.
    """
    if target.mesh is not None:
        raise ValueError("logits processors do not work on a mesh yet; load the target without one")
    if other := [one for one in processors or (None,) if not isinstance(one, LogitsProcessor)]:
        raise ValueError(f"{other[0]!r:.40} is no logits processor; expected a LogitsProcessor, such as LogitBias")
    for one in processors:
        for leaf in jax.tree.leaves(jax.eval_shape(lambda one=one: one.init(1, target.vocab_size))):
            if leaf.dtype not in (jnp.bool_, jnp.uint8, jnp.int32):
                raise ValueError(f"{type(one).__name__} has a state of {leaf.dtype}; expected bool, uint8 or int32")
    arrays = tuple(one.arrays(target.vocab_size) for one in processors)
    model = ProcessedTarget(target.model, processors)
    return dataclasses.replace(target, model=model, params={"target": target.params, "processors": arrays})
