"""The parts of a drafter that are not its method: a draft's shape, a network's parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int

from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.grow import DraftInputs, grow_chain, grow_dynamic_tree, sample_chain
from eagle3_jax.drafters.static_tree import grow_static_tree, sample_static_tree
from eagle3_jax.models.config import LayerConfig, check_head
from eagle3_jax.models.functional import (
    Params,
    bind,
    init_params,
    param_axes,
    param_products,
    param_shapes,
)
from eagle3_jax.models.layers import FLOAT32, Precision, product, product_by_table
from eagle3_jax.topology import Chain, DynamicTree, StaticTree, Topology, default_draft_length
from eagle3_jax.types import Draft, DraftSampling, EmbeddingTables, Observation


def grow(
    topology: Topology, draft_sampling: DraftSampling, inputs: DraftInputs
) -> tuple[Draft, Any]:
    """Grows a draft of any shape.

    Returns:
        The draft, with ``probs`` if its tokens were sampled, and the network's memory after the
        last level run.
    """
    sampled = draft_sampling is DraftSampling.PROBABILISTIC
    if isinstance(topology, Chain):
        return sample_chain(topology, inputs) if sampled else grow_chain(topology, inputs)
    if isinstance(topology, StaticTree):
        grow_tree = sample_static_tree if sampled else grow_static_tree
        return grow_tree(topology, inputs)
    return grow_dynamic_tree(topology, inputs)


def width_of(topology: Topology) -> int:
    """Returns the number of tokens that the children of a node are chosen from."""
    if isinstance(topology, StaticTree):
        return 1 + max(rank for path in topology.paths for rank in path)
    return topology.top_k if isinstance(topology, DynamicTree) else 1


class ShapedDrafter:
    """A drafter whose draft has a topology: sizes and checks.

    A dataclass that derives from it has the fields ``topology`` and ``draft_sampling``. Without a
    topology the draft is a chain of the default length, which is looked up when it is used: reading
    a file starts no device.
    """

    topology: Topology | None
    draft_sampling: DraftSampling

    @property
    def shape(self) -> Topology:
        """The topology. Default: a chain of ``topology.default_draft_length()`` tokens."""
        return self.topology or Chain(default_draft_length())

    def settle_shape(self, *, vocab_size: int, max_positions: int) -> None:
        """Checks that the network can give a draft of this shape.

        For ``__post_init__``. It also converts ``draft_sampling`` from its name.

        Args:
            vocab_size: Number of tokens that it chooses from.
            max_positions: Longest sequence that it was built for.

        Raises:
            ValueError: The draft is too wide or too deep, or a dynamic tree with sampled tokens, or
                ``draft_sampling`` is neither a :class:`DraftSampling` nor the name of one.
        """
        object.__setattr__(self, "draft_sampling", DraftSampling(self.draft_sampling))
        topology = self.topology
        if topology is None:
            return

        width = width_of(topology)
        if width > vocab_size:
            raise ValueError(
                f"the tree draws {width} children from a draft vocabulary of {vocab_size}; lower"
                " top_k"
            )

        if topology.max_depth >= max_positions:
            raise ValueError(
                f"a draft of {topology.max_depth} levels is above the limit of the head, which has"
                f" {max_positions} positions; lower num_speculative_tokens or max_depth to at most"
                f" {max_positions - 1}"
            )

        if self.draft_sampling is DraftSampling.PROBABILISTIC and isinstance(topology, DynamicTree):
            raise ValueError(
                "draft_sampling is probabilistic and the draft a dynamic tree, whose tokens are the"
                " likeliest ones; draft a chain (num_speculative_tokens=K) or a static tree, or"
                " leave draft_sampling greedy"
            )

    @property
    def num_nodes(self) -> int:
        """``N``, nodes of a draft, root included."""
        return self.shape.num_nodes

    @property
    def max_depth(self) -> int:
        """``G``, longest path below the root."""
        return self.shape.max_depth

    @property
    def is_chain(self) -> bool:
        """Whether every draft is a chain."""
        return isinstance(self.shape, Chain)

    def with_topology(
        self, topology: Topology | None, draft_sampling: DraftSampling | str | None
    ) -> ShapedDrafter:
        """Returns the drafter with another topology or way of choosing tokens.

        ``None`` keeps the present one.

        Raises:
            ValueError: The draft would be a dynamic tree with sampled tokens, or wider than the
                draft vocabulary.
        """
        sampling = self.draft_sampling if draft_sampling is None else draft_sampling
        return dataclasses.replace(
            self,  # type: ignore[type-var]
            topology=topology or self.topology,
            draft_sampling=sampling,
        )

    def grow(self, inputs: DraftInputs) -> tuple[Draft, Any]:
        """Grows a draft of this shape; see :func:`grow`."""
        return grow(self.shape, self.draft_sampling, inputs)


@dataclasses.dataclass(frozen=True)
class NetworkDrafter(ShapedDrafter):
    """A drafter with a network of its own. A method adds ``init``, ``observe`` and ``propose``.

    Parameters are a dictionary, see :meth:`assemble`.
    """

    network: ClassVar[type[nnx.Module]]
    borrows_output: ClassVar[bool] = False

    #: Configuration of the network. It has at least ``vocab_size``, ``draft_vocab_size``,
    #: ``target_width``, ``aux_layers`` and ``max_positions``.
    config: Any
    #: The shape of a draft; by default a chain of the default length.
    topology: Topology | None = None
    #: Types of the network's products and activations.
    precision: Precision = FLOAT32
    #: Whether the tokens of a chain or a static tree are the most likely ones or sampled.
    draft_sampling: DraftSampling = DraftSampling.GREEDY

    def __post_init__(self) -> None:
        self.settle_shape(
            vocab_size=self.config.draft_vocab_size, max_positions=self.config.max_positions
        )

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose features the network reads."""
        return self.config.aux_layers

    def param_shapes(self) -> Params:
        """Returns the shapes of the network's parameters."""
        return param_shapes(self.network, self.config, self.precision)

    def param_axes(self) -> Params:
        """Returns the :data:`~eagle3_jax.devices.sharding.Axes` of all parameters.

        Every device holds the whole lookup tables.
        """
        head = param_axes(self.network, self.config, self.precision)
        axes = {"head": head, "embedding": (), "draft_to_target": ()}
        if self.borrows_output:
            axes["output"] = (None, Axis(VOCAB, self.config.vocab_size))
        return axes

    def param_products(self) -> Params:
        """Returns which parameters of the network are kernels that may be in eight bits."""
        return param_products(self.network, self.config, self.precision)

    def init_params(self, key: jax.Array) -> Params:
        """Returns random parameters of the network, for tests and training."""
        return init_params(self.network, self.config, self.precision, key)

    def assemble(
        self,
        head: Params,
        tables: EmbeddingTables,
        *,
        embedding: Float[Array, "V D"] | None = None,
        draft_to_target: Int[Array, " W"] | None = None,
    ) -> Params:
        """Puts the parameters together. Arrays borrowed from the target are shared, not copied.

        Args:
            head: Parameters of the network.
            tables: The target's embedding and output matrix.
            embedding: ``[V D]``, the head's embedding. Default: the target's.
            draft_to_target: ``[W]``, target id of each draft id; ``None`` if these are the same.

        Returns:
            ``head``, ``embedding [V D]``, ``draft_to_target [W]`` if given, and ``output [D V]`` if
            the drafter uses the target's output matrix and that is not the transposed embedding.
        """
        params = {"head": head, "embedding": tables.embedding if embedding is None else embedding}
        if draft_to_target is not None:
            params["draft_to_target"] = draft_to_target
        if self.borrows_output and (tables.output is not None or embedding is not None):
            params["output"] = tables.unembedding
        return params

    def target_logits(self, params: Params, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Returns logits in float32 from the target's output matrix."""
        if "output" in params:
            logits = product(x, params["output"], self.precision)
        else:
            logits = product_by_table(x, params["embedding"], self.precision)
        return logits.astype(jnp.float32)

    def bind(self, params: Params) -> Any:
        """Returns the network with its parameters."""
        return bind(self.network, self.config, self.precision, params["head"])


class LastState(struct.PyTreeNode, kw_only=True):
    """What a drafter without a cache drafts from.

    Attributes:
        hidden: ``[B D]``, the target's final state at the last committed token that it has run.
        root: ``[B]``, the token that the target chose after it.
    """

    hidden: Float[Array, "B D"]
    root: Int[Array, " B"]


class LastStateDrafter(NetworkDrafter):
    """A drafter of which only the newest token and the state before it are kept."""

    def init(self, params: Params, batch: int, capacity: int) -> LastState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params, capacity
        hidden = jnp.zeros((batch, self.config.target_width), self.precision.activations)
        return LastState(hidden=hidden, root=jnp.zeros((batch,), jnp.int32))

    def observe(self, params: Params, state: LastState, seen: Observation) -> LastState:
        """Stores the target's state at the last committed token; ``next_token`` follows from it."""
        del params
        index = jnp.maximum(seen.length - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(seen.features[:, :, 0], index, axis=1)[:, 0]
        observed = seen.length > 0
        hidden = jnp.where(observed[:, None], newest, state.hidden)
        root = jnp.where(observed, seen.next_token, state.root)
        return state.replace(hidden=hidden, root=root)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalStateConfig:
    """Configuration of a head that reads only the target's final state: EAGLE-1 and MTP.

    The head has the target's width and its whole vocabulary.

    Attributes:
        vocab_size: ``V``.
        width: ``D``.
        layers: The head's own layers.
        num_target_layers: ``L`` of the target, whose state after the final norm is feature ``L +
            1``.
        max_positions: Longest sequence that the head was built for.
        norm_eps: Added to the mean square in RMSNorm.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    num_target_layers: int
    max_positions: int = 2048
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_head(self)

    @property
    def num_layers(self) -> int:
        """Number of the head's layers."""
        return len(self.layers)

    @property
    def draft_vocab_size(self) -> int:
        """``W``, all of ``V``."""
        return self.vocab_size

    @property
    def target_width(self) -> int:
        """Width of the target's features."""
        return self.width

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The output of the target's final norm."""
        return (self.num_target_layers + 1,)
