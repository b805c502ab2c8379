"""What drafters with a network of their own have in common: a configuration, a shape of draft, and parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.drafters._grow import Level, RunLevel, draft
from eagle3_jax.models.functional import Params, bind, init_params, param_axes, param_shapes
from eagle3_jax.models.layers import FLOAT32, Precision, product
from eagle3_jax.schedule import default_length
from eagle3_jax.sharding import VOCAB, Axis
from eagle3_jax.tree import Chain, DynamicTree, StaticTree, Topology
from eagle3_jax.types import Draft, DraftSampling, SamplingParams, Tables


class ShapedDrafter:
    """What a shape of draft and a way of drawing say: sizes, checks, and how a draft is grown with a network.

    A dataclass that derives from it has the fields ``topology`` and ``draft_sampling``. Without a topology the shape is
    a chain of the default length. It is looked up when it is used: what only reads files starts no device.
    """

    topology: Topology | None
    draft_sampling: DraftSampling

    @property
    def shape(self) -> Topology:
        """The topology; by default a chain as ``eagle3_jax.schedule.default_length`` says for one row."""
        return self.topology or Chain(default_length())

    def check_shape(self, *, vocab_size: int, max_positions: int) -> None:
        """Refuse a draft that the network cannot give.

        Args:
            vocab_size: How many tokens it chooses from.
            max_positions: Longest sequence that it was built for.

        Raises:
            ValueError: The draft is too wide or too deep, or a dynamic tree whose tokens are drawn, or
                ``draft_sampling`` is no :class:`DraftSampling` and not the word of one.
        """
        object.__setattr__(self, "draft_sampling", DraftSampling(self.draft_sampling))
        topology = self.topology
        if topology is None:
            return
        width = topology.top_k if isinstance(topology, DynamicTree) else 1
        if isinstance(topology, StaticTree):
            width = 1 + max(rank for path in topology.paths for rank in path)
        if width > vocab_size:
            raise ValueError(f"the tree draws {width} children from a draft vocabulary of {vocab_size}; lower top_k")
        if topology.max_depth >= max_positions:
            raise ValueError(
                f"a draft of {topology.max_depth} levels is above the limit of the head, which has {max_positions} "
                f"positions; lower num_speculative_tokens or max_depth to at most {max_positions - 1}"
            )
        if self.draft_sampling is DraftSampling.PROBABILISTIC and isinstance(topology, DynamicTree):
            raise ValueError(
                "draft_sampling is probabilistic and the draft a dynamic tree, whose tokens are the likeliest ones; "
                "draft a chain (num_speculative_tokens=K) or a static tree, or leave draft_sampling greedy"
            )

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return self.shape.num_nodes

    @property
    def max_depth(self) -> int:
        """``G``."""
        return self.shape.max_depth

    @property
    def is_chain(self) -> bool:
        """Whether the shape is one."""
        return isinstance(self.shape, Chain)

    def drafting(self, topology: Topology | None, draft_sampling: DraftSampling | str | None) -> ShapedDrafter:
        """With another topology or another way of drawing; ``None`` leaves that as it is.

        Raises:
            ValueError: A dynamic tree was asked for whose tokens are drawn, or a tree wider than the draft vocabulary.
        """
        sampling = self.draft_sampling if draft_sampling is None else draft_sampling
        return dataclasses.replace(self, topology=topology or self.topology, draft_sampling=sampling)  # type: ignore[type-var]

    def grown(
        self,
        first: Level,
        run: RunLevel,
        *,
        root: Int[Array, " B"],
        draft_to_target: Int[Array, " W"] | None,
        vocab_size: int,
        keys: Key[Array, " B"],
        sampling: SamplingParams,
    ) -> tuple[Draft, Any]:
        """The draft of this shape, and what the network remembers of it: the likeliest tokens, or drawn ones."""
        return draft(
            self.shape,
            self.draft_sampling,
            root=root,
            first=first,
            run=run,
            draft_to_target=draft_to_target,
            vocab_size=vocab_size,
            keys=keys,
            sampling=sampling,
        )


@dataclasses.dataclass(frozen=True)
class NetworkDrafter(ShapedDrafter):
    """A :class:`~eagle3_jax.types.Drafter` but for ``init``, ``observe`` and ``propose``.

    Parameters are a dictionary, see :meth:`assemble`.

    Attributes:
        config: Of the network. It has at least ``vocab_size`` and ``draft_vocab_size``, ``target_width`` and
            ``aux_layers``, and ``max_positions``.
        topology: The shape of a draft; a chain of the default length when left out.
        precision: Of the network's products and activations.
        draft_sampling: Whether the tokens of a chain or a static tree are the likeliest or drawn.
    """

    network: ClassVar[type[nnx.Module]]
    borrows_output: ClassVar[bool] = False

    config: Any
    topology: Topology | None = None
    precision: Precision = FLOAT32
    draft_sampling: DraftSampling = DraftSampling.GREEDY

    def __post_init__(self) -> None:
        self.check_shape(vocab_size=self.config.draft_vocab_size, max_positions=self.config.max_positions)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose features it reads."""
        return self.config.aux_layers

    def param_shapes(self) -> Params:
        """Shapes of the network's parameters."""
        return param_shapes(self.network, self.config, self.precision)

    def param_axes(self) -> Params:
        """The :data:`~eagle3_jax.sharding.Axes` of all parameters; tables that are looked up are on every device."""
        axes = {"head": param_axes(self.network, self.config, self.precision), "embedding": (), "draft_to_target": ()}
        return axes | ({"output": (None, Axis(VOCAB, self.config.vocab_size))} if self.borrows_output else {})

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters of the network, for tests and training."""
        return init_params(self.network, self.config, self.precision, key)

    def assemble(
        self,
        head: Params,
        tables: Tables,
        *,
        embedding: Float[Array, "V D"] | None = None,
        draft_to_target: Int[Array, " W"] | None = None,
    ) -> Params:
        """The parameters: the network's own and what it borrows, which stays the target's array.

        Args:
            head: Of the network.
            tables: The target's.
            embedding: The head's own; the target's when left out.
            draft_to_target: Target id of each draft id; left out where these are the same.

        Returns:
            ``head``, ``embedding [V D]``, ``draft_to_target [W]`` (unless left out), and ``output [D V]`` where the
            drafter reads logits off the target's output matrix and that is not the transposed embedding.
        """
        params = {"head": head, "embedding": tables.embedding if embedding is None else embedding}
        if draft_to_target is not None:
            params["draft_to_target"] = draft_to_target
        if self.borrows_output and (tables.output is not None or embedding is not None):
            params["output"] = tables.unembedding
        return params

    def target_logits(self, params: Params, x: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits in float32 by the target's output matrix."""
        kernel = params["output"] if "output" in params else params["embedding"].T
        return product(x, kernel, self.precision).astype(jnp.float32)

    def bound(self, params: Params) -> Any:
        """The network with its parameters."""
        return bind(self.network, self.config, self.precision, params["head"])
