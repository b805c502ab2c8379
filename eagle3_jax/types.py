"""The protocols of target, drafter and verifier, and the values that they exchange.

Letters in shapes: ``B`` rows of the batch, ``S`` cache slots, ``T`` tokens of a block, ``N`` draft
nodes including the root, ``G`` longest path below the root, ``V`` target vocabulary, ``W`` draft
vocabulary, ``D`` width, ``A`` auxiliary layers, ``C`` key/value heads, ``H`` head size, ``L``
layers.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.cache import Cache

State = TypeVar("State")


class FinishReason(enum.IntEnum):
    """Why a row stopped; ``RUNNING`` until then.

    ``STOP``: a stop token. ``LENGTH``: the limit of new tokens. ``CAPACITY``: the target has no
    more positions. ``NOT_FINITE``: the target's logits contain NaN, or minus infinity for every
    token, so there is no next token. The tokens before it are kept.
    """

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CAPACITY = 3
    NOT_FINITE = 4


class TargetOutput(struct.PyTreeNode, kw_only=True):
    """The output of one target forward.

    Attributes:
        final: ``[B T E]``, the residual stream after the final norm, and whatever else ``unembed``
            needs for logits.
        features: ``[B T A D]``, the residual stream entering each auxiliary layer.
        written: For each layer, the value for ``Cache.commit``, or for ``Cache.fill`` if the
            forward had no cache.
    """

    final: Float[Array, "B T E"]
    features: Float[Array, "B T A D"]
    written: tuple[Any, ...]


class EmbeddingTables(NamedTuple):
    """The two matrices of a target that drafters borrow: arrays, or quantised kernels.

    Attributes:
        embedding: ``[V D]``, one row per token.
        output: ``[D V]``; ``None`` if it is the transposed embedding.
    """

    embedding: Any
    output: Any = None

    @property
    def unembedding(self) -> Any:
        """``[D V]``, the matrix from a final state to logits."""
        return self.embedding.T if self.output is None else self.output


@runtime_checkable
class TargetModel(Protocol):
    """The model whose output distribution is preserved. It knows nothing about drafters.

    It is a static argument of the compiled loop, so it must be hashable; its arrays are in
    ``params``. A target with ``tables(params) -> EmbeddingTables`` can lend its embedding to draft
    heads that have none. A target whose ``__call__`` takes ``is_chain: bool`` is told when the
    block is a chain, so that its attention need not read the mask. ``docs/extending.md`` writes a
    target; ``check_target`` tests one.
    """

    @property
    def vocab_size(self) -> int:
        """``V``."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache with room for ``capacity`` tokens per row."""
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
        """Runs a block after the committed tokens.

        The cache does not change; ``Cache.commit`` is called later.

        Args:
            params: The model's parameters.
            tokens: ``[B T]`` token ids.
            positions: ``[B T]``, absolute; nodes of one tree level share a position.
            mask: ``mask[b, t, s]``: token ``t`` may attend to token ``s`` of the block, itself
                included. It always sees the committed tokens. In a tree, the last such ``s < t`` is
                the parent of ``t``.
            cache: The committed tokens; ``None`` for a prefill and in training.
            aux_layers: Layers ``i`` whose entering residual stream is returned as features. ``L``
                is the output of the last layer before the final norm, ``L + 1`` the output of the
                norm.
            length: ``[B]``, number of real tokens per row of a prompt, if known. A recurrent layer
                then keeps only the state after the last of them, not one per token.
        """
        ...

    def unembed(self, params: Any, final: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Returns logits in float32.

        Separate from the forward, so a prefill computes them for one token per row.
        """
        ...


class SamplingMode(enum.Enum):
    """The work that the rows of a batch need.

    It is static, so a greedy batch never builds a distribution.
    """

    GREEDY = "greedy"
    TEMPERATURE = "temperature"
    TRUNCATED = "truncated"


class DraftSampling(enum.Enum):
    """How a drafter chooses draft tokens from its logits, in vLLM's words.

    The output is exact either way. ``GREEDY`` proposes the most likely token, a point mass.
    ``PROBABILISTIC`` samples from ``q = softmax(logits / T)``, which is accepted with probability
    ``Σ min(p, q)``. Functions also take the names, ``"greedy"`` and ``"probabilistic"``.
    """

    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"

    @classmethod
    def _missing_(cls, value: object) -> DraftSampling:
        raise ValueError(
            f"draft_sampling is {value!r}; expected"
            f" {' or '.join(repr(member.value) for member in cls)}"
        )


class SamplingParams(struct.PyTreeNode, kw_only=True):
    """How each row turns logits into a distribution. Temperature 0 is greedy.

    Attributes:
        temperature: ``[B]``, at least 0.
        top_k: ``[B]``, number of most likely tokens to keep; 0 keeps all.
        top_p: ``[B]`` in (0, 1], mass of the smallest set of most likely tokens to keep.
    """

    temperature: Float[Array | np.ndarray, " B"] | float | int = 0.0
    top_k: Int[Array | np.ndarray, " B"] | int = 0
    top_p: Float[Array | np.ndarray, " B"] | float | int = 1.0


class Draft(struct.PyTreeNode, kw_only=True):
    """A proposed tree for each row. Its size is static, its shape is data.

    Attributes:
        tokens: ``[B N]``; node 0 is the root, the last committed token.
        parents: ``[B N]``; -1 at the root; every parent has a lower number than its children.
        valid: ``[B N]``; False for padding, which must not be accepted.
        probs: ``[B N V]``, the distribution that each node was sampled from, given everything
            sampled before it, or ``None`` for a deterministic proposal (a point mass on the token).
            The root's entry is ignored. This is the only property of a draft that the loop cannot
            check.
        state: The drafter's state after proposing, if proposing wrote guesses into it (as into a
            cache whose length has not moved). The next ``observe`` receives it. ``None`` if
            proposing wrote nothing.
    """

    tokens: Int[Array, "*B N"]
    parents: Int[Array, "*B N"]
    valid: Bool[Array, "*B N"]
    probs: Float[Array, "*B N V"] | None = None
    state: Any = None


class Verdict(struct.PyTreeNode, kw_only=True):
    """The decision of a verifier.

    Attributes:
        path: ``[B G]``, accepted nodes below the root in order, -1 padded.
        num_accepted: ``[B]``, number of accepted draft tokens; the round emits one token more.
        next_token: ``[B]``, the token after them: a bonus token if the whole path was accepted,
            else the correction.
    """

    path: Int[Array, "*B G"]
    num_accepted: Int[Array, "*B"]
    next_token: Int[Array, "*B"]


class Observation(struct.PyTreeNode, kw_only=True):
    """Newly committed tokens with the target's features. The prefill is the first, long one.

    Attributes:
        tokens: ``[B T]``, the committed tokens.
        features: ``[B T A D]``, the target's features at these tokens.
        length: ``[B]``, how many of the ``T`` are real; 0 must leave the drafter's row unchanged.
        next_token: ``[B]``, the token after them: chosen by the target, not yet run through it.
        drafted: ``[B N]``, tokens of all verified nodes, -1 for invalid ones and finished rows.
        likeliest: ``[B N L]``, the target's most likely tokens after each of them, for ``L =
            Drafter.num_likeliest``. Both are ``None`` in a prefill, and for drafters without
            ``num_likeliest``.
    """

    tokens: Int[Array, "B T"]
    features: Float[Array, "B T A D"]
    length: Int[Array, " B"]
    next_token: Int[Array, " B"]
    drafted: Int[Array, "B N"] | None = None
    likeliest: Int[Array, "B N L"] | None = None


@runtime_checkable
class Verifier(Protocol):
    """The acceptance rule: decides which draft tokens are accepted and which token follows them.

    :class:`eagle3_jax.Exact` preserves the target's distribution. A verifier is a static argument
    of the compiled loop, so it must be hashable. A rule that only works along one path has
    ``chains_only = True``. ``docs/extending.md`` writes one.
    """

    @property
    def lossless(self) -> bool:
        """Whether the output follows the target's distribution exactly.

        Results and reports include it.
        """
        ...

    def __call__(
        self,
        draft: Draft,
        logits: Float[Array, "B N V"],
        sampling: SamplingParams,
        keys: Key[Array, " B"],
        *,
        sampling_mode: SamplingMode,
        max_depth: int,
    ) -> Verdict:
        """Decides for every row.

        Args:
            draft: The proposal; nodes in topological order.
            logits: The target's logits after each node.
            sampling: One value per row.
            keys: One key per row, for this round only.
            sampling_mode: The work that ``sampling`` needs; static. ``GREEDY`` is a batch without
                randomness.
            max_depth: ``G``, longest path below the root: the size of the verdict's path.
        """
        ...


@runtime_checkable
class Drafter(Protocol[State]):
    """Proposes draft tokens.

    ``observe`` brings the state forward by committed tokens. ``propose`` must not change what a
    later draft depends on; it may write guesses after the committed slots of a cache, where the
    next ``observe`` overwrites them, and then returns that state as ``Draft.state``.

    A drafter is a static argument of the compiled loop, so it must be hashable; its arrays are in
    ``params``. Four members are optional. ``is_chain: bool`` declares that every draft is a chain;
    without it the loop verifies trees. ``num_likeliest: int`` asks for the target's most likely
    tokens at every verified node, rejected ones included. ``reads_cache: bool`` asks for the
    target's cache of the committed tokens, as the argument ``cache`` of ``propose``.
    ``with_topology(topology, draft_sampling)`` returns the same drafter with another draft, or
    raises ``ValueError`` (:class:`eagle3_jax.checks.Drafting`). ``docs/drafters.md`` tells authors
    more; ``check_drafter`` tests a drafter.
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
        """Returns an empty state of rows of at most ``capacity`` tokens.

        ``B`` is the first axis of every leaf.
        """
        ...

    def observe(self, params: Any, state: State, seen: Observation) -> State:
        """Takes in committed tokens with the target's features.

        Shapes and types of the state stay the same.
        """
        ...

    def propose(
        self, params: Any, state: State, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Drafts a tree below the last observed ``next_token``."""
        ...
