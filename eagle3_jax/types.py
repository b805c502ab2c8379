"""The vocabulary of the library: what travels between target, drafter, verifier and loop.

Letters in shapes: ``B`` rows, ``S`` cache slots, ``T`` tokens fed, ``N`` draft nodes including the root,
``G`` longest path below the root, ``V`` target vocabulary, ``W`` draft vocabulary, ``D`` width,
``A`` auxiliary layers, ``C`` key/value heads, ``H`` head size, ``L`` layers.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.cache import Cache

State = TypeVar("State")


class FinishReason(enum.IntEnum):
    """Why a row stopped; ``RUNNING`` while it has not.

    ``STOP``: a stop token. ``LENGTH``: the limit of new tokens. ``CAPACITY``: the target has no more positions.
    ``NOT_FINITE``: the target's logits hold NaN, or minus infinity for every token, so there is no next token; what was
    written before is kept.
    """

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CAPACITY = 3
    NOT_FINITE = 4


@struct.dataclass(kw_only=True)
class TargetOutput:
    """What one target forward gives for each token fed.

    Attributes:
        final: ``[B T D]``, the residual stream after the final norm; ``unembed`` turns it into logits.
        features: ``[B T A D]``, the residual stream entering each auxiliary layer.
        written: Per layer, what its cache takes: for ``Cache.commit``, or for ``Cache.fill`` where there was no cache.
    """

    final: Float[Array, "B T D"]
    features: Float[Array, "B T A D"]
    written: tuple[Any, ...]


class Tables(NamedTuple):
    """The two matrices of a target that drafters borrow.

    Attributes:
        embedding: ``[V D]``, a row for each token.
        output: ``[D V]``; ``None`` where it is the transposed embedding, which nobody has to hold twice.
    """

    embedding: Float[Array, "V D"]
    output: Float[Array, "D V"] | None = None

    @property
    def unembedding(self) -> Float[Array, "D V"]:
        """``[D V]``, from a final state to logits."""
        return self.embedding.T if self.output is None else self.output


@runtime_checkable
class TargetModel(Protocol):
    """The model whose distribution is preserved. It never hears of a drafter.

    It is a static argument of the compiled loop: hashable, its arrays in ``params``. A target with
    ``tables(params) -> Tables`` can lend its embedding to draft heads without one of their own.
    ``docs/extending.md`` writes one; ``check_target`` runs the contract.
    """

    @property
    def vocab_size(self) -> int:
        """``V``."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache with room for ``capacity`` tokens of each row."""
        ...

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
        """Run a block behind the committed tokens. What is committed does not change; ``Cache.commit`` decides later.

        Args:
            params: The model's parameters.
            tokens: ``[B T]``.
            positions: ``[B T]``, absolute; nodes of one tree level share a position.
            mask: ``[B T T]``, which tokens of the block each token sees, itself among them; committed ones are always
                seen. The last other token that a node sees is its parent.
            cache: What is committed so far; ``None`` when nothing is (a prefill, or training).
            aux_layers: Layers ``i`` whose entering residual stream is returned as features; ``L`` is what leaves the
                last layer, before the final norm, and ``L + 1`` what leaves the norm.
            length: ``[B]``, how many tokens of each row are real, where that is known before: those of a prompt. A
                state that is not addressed by position needs to keep only the one after them then, where of a draft it
                keeps one for every node.
        """
        ...

    def unembed(self, params: Any, final: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits in float32. Apart from the forward, so that a prefill pays for one row and not for the prompt."""
        ...


class Warping(enum.Enum):
    """How much work the rows of a batch need; static, so that a greedy batch never builds a distribution."""

    GREEDY = "greedy"
    TEMPERATURE = "temperature"
    TRUNCATED = "truncated"


class DraftSampling(enum.Enum):
    """How a drafter turns its own logits into draft tokens, in vLLM's words; the output is exact either way.

    Where one is expected its word is taken too: ``"greedy"`` or ``"probabilistic"``.

    ``GREEDY`` proposes the likeliest token, a point mass. ``PROBABILISTIC`` draws from ``q = softmax(logits / T)``,
    which a flat target accepts more often: with probability ``Σ min(p, q)``, not ``p`` of one token.
    """

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"

    @classmethod
    def _missing_(cls, value: object) -> DraftSampling:
        raise ValueError(f"draft_sampling is {value!r}; expected {' or '.join(repr(one.value) for one in cls)}")


@struct.dataclass(kw_only=True)
class SamplingParams:
    """How each row turns logits into a distribution; temperature 0 is greedy.

    Attributes:
        temperature: ``[B]``, at least 0.
        top_k: ``[B]``, keep the k most likely tokens; 0 keeps all.
        top_p: ``[B]`` in (0, 1], keep the smallest set of most likely tokens with this mass.
    """

    temperature: Float[Array | np.ndarray, " B"] | float | int = 0.0
    top_k: Int[Array | np.ndarray, " B"] | int = 0
    top_p: Float[Array | np.ndarray, " B"] | float | int = 1.0


@struct.dataclass(kw_only=True)
class Draft:
    """A proposed tree, one per row; its size is static, its topology is data.

    Attributes:
        tokens: ``[B N]``; node 0 is the root, the last committed token.
        parents: ``[B N]``; -1 at the root, and every parent stands before its children.
        valid: ``[B N]``; False marks padding that must not be accepted.
        probs: ``[B N V]``, the distribution that each node was actually drawn from, or ``None`` for a
            deterministic proposal (a point mass on the token). The root's is ignored. It must be what the token was
            drawn from, given all that was drawn before it: the one thing that the loop cannot check.
        state: The drafter's state as proposing left it, for a drafter that writes its guesses behind what it knows for
            certain (as a cache does, whose length has not moved); the next ``observe`` is given it in place of the
            state that was proposed from. ``None`` where proposing wrote nothing.
    """

    tokens: Int[Array, "*B N"]
    parents: Int[Array, "*B N"]
    valid: Bool[Array, "*B N"]
    probs: Float[Array, "*B N V"] | None = None
    state: Any = None


@struct.dataclass(kw_only=True)
class Verdict:
    """What verification decided.

    Attributes:
        path: ``[B G]``, accepted nodes below the root in order, -1 padded.
        num_accepted: ``[B]``, draft tokens accepted; the round emits one token more.
        next_token: ``[B]``, the bonus when the whole path was accepted, the correction otherwise: one rule.
    """

    path: Int[Array, "*B G"]
    num_accepted: Int[Array, "*B"]
    next_token: Int[Array, "*B"]


@struct.dataclass(kw_only=True)
class Observation:
    """Truth, as a drafter gets to see it; a prefill is a long observation.

    Attributes:
        tokens: ``[B T]``, newly committed tokens.
        features: ``[B T A D]``, the target's features at these tokens.
        length: ``[B]``, how many of the ``T`` are real; 0 must leave the drafter's row as it is.
        next_token: ``[B]``, the token after them: chosen, not yet run through the target.
    """

    tokens: Int[Array, "B T"]
    features: Float[Array, "B T A D"]
    length: Int[Array, " B"]
    next_token: Int[Array, " B"]


@runtime_checkable
class Verifier(Protocol):
    """The acceptance rule: which of a draft's tokens stay, and which token follows them.

    :class:`eagle3_jax.Exact` is the rule that preserves the target's distribution. Another one is a static argument of
    the compiled loop like a drafter: hashable. A rule that is defined along one path only says ``chains_only = True``,
    a member that is looked for and may be left out. ``docs/extending.md`` writes one.
    """

    @property
    def lossless(self) -> bool:
        """Whether the output follows the target's distribution exactly. Results, reports and ``bench`` repeat it."""
        ...

    def __call__(
        self,
        draft: Draft,
        logits: Float[Array, "B N V"],
        sampling: SamplingParams,
        keys: Key[Array, " B"],
        *,
        warping: Warping,
        max_depth: int,
    ) -> Verdict:
        """Decide.

        Args:
            draft: The proposal; nodes in topological order, the root's token the last one committed.
            logits: The target's, after each node.
            sampling: One value per row.
            keys: One per row, for this round alone: functions of the row and its length.
            warping: How much of ``sampling`` is asked for; static. ``GREEDY`` is a batch without randomness.
            max_depth: ``G``, longest path below the root: the size of the verdict's path.
        """
        ...


@runtime_checkable
class Drafter(Protocol[State]):
    """Proposes draft tokens.

    Its state holds what is committed, and ``observe`` moves it on. ``propose`` may write guesses behind what is
    committed, where the next ``observe`` overwrites them, and hands that state on as ``Draft.state``: a cache does so,
    whose length has not moved. A guess must never change what a later draft is made from.

    A drafter is a static argument of the compiled loop: hashable, its arrays in ``params``. It may have two more
    members. ``is_chain: bool`` declares that every draft is a chain, each node's parent the one before; the loop never
    infers that, and without it verifies trees. ``drafting(topology, draft_sampling)`` returns the same drafter with
    another draft, or raises ``ValueError`` (:class:`eagle3_jax.boundary.Drafting`). ``docs/drafters.md`` says what an
    author must know; ``check_drafter`` runs the contract.
    """

    @property
    def num_nodes(self) -> int:
        """``N``, nodes of a draft, root included."""
        ...

    @property
    def max_depth(self) -> int:
        """``G``, longest path below the root."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose features it reads."""
        ...

    def init(self, params: Any, batch: int, capacity: int) -> State:
        """An empty state; every leaf leads with ``B``. ``capacity`` is the most tokens of a row."""
        ...

    def observe(self, params: Any, state: State, seen: Observation) -> State:
        """Take in committed tokens with the target's features; shapes and types of the state stay."""
        ...

    def propose(self, params: Any, state: State, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """Draft a tree below the last ``next_token`` observed, which commits nothing: see :class:`Draft`."""
        ...


def per_row(sampling: SamplingParams, batch: int) -> SamplingParams:
    """Broadcast scalars to one value for each of ``batch`` rows.

    Raises:
        ValueError: It is no :class:`SamplingParams`, or a parameter is neither one number nor one for each row.
    """
    if not isinstance(sampling, SamplingParams):
        raise ValueError(
            f"sampling is {sampling!r:.40}; expected SamplingParams(temperature=..., top_k=..., top_p=...), or None "
            "for greedy decoding"
        )

    def rows(name: str, dtype: type) -> Array:
        value = np.asarray(getattr(sampling, name))
        if value.shape not in ((), (batch,)):
            raise ValueError(f"{name} has shape {value.shape} for {batch} rows; give one number, or one for each row")
        if dtype is np.int32:  # beyond any vocabulary, and within 32 bits
            value = np.clip(value, -1, np.iinfo(np.int32).max)
        # Broadcast on the host: on the device each would be a program to compile.
        return jnp.asarray(np.broadcast_to(value.astype(dtype), (batch,)))

    return SamplingParams(
        temperature=rows("temperature", np.float32),
        top_k=rows("top_k", np.int32),
        top_p=rows("top_p", np.float32),
    )
