"""Block drafters on one backbone: DFlash, DSpark and JetSpec.

A small network of Qwen3 layers reads a block ``[x_n, mask, mask, ...]`` behind the committed tokens ``x_0 .. x_{n-1}``
and predicts all of its positions in one pass. Of the committed tokens it sees the target's features alone: at every
position ``c_i = norm(fc(f_i))``, from which each layer takes its keys and values. The block's own are never kept.

========  =======================================================================================================
DFlash    Mask row ``k`` predicts its own position: ``q_k = softmax(logits_k)``, independent of each other
          (arXiv 2602.06036). Every row sees the whole block, so that a block of another length is another network.
JetSpec   The same with rows that see those before them (``causal``; arXiv 2606.18394): any ``K`` is a prefix.
DSpark    ``q_k = softmax(logits_k + W2 W1[d_{k-1}])``: a bias by the token before, first order (arXiv 2607.05147);
          mostly read from the anchor row on (``from_anchor``: row ``k`` predicts the next position, ``K`` rows). A
          confidence ``sigmoid(w [h_k; W1[d_{k-1}]] + b)`` estimates that the token will be accepted.
========  =======================================================================================================

A tree needs no further pass: children are scored by the law of their level (DDTree, arXiv 2604.12989), under DSpark
with the bias of their parent's token. With ``top_k = num_nodes - 1`` a dynamic tree is the likeliest prefixes of all.

What weakens it: laws that do not hear of each other propose tokens that do not fit together, the more the flatter they
are (DSpark's bias is the answer); a head drafts well for blocks of the length it was trained on only; and it sees no
committed token but through the target's features, whose layers it must be told right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.cache import Cache, KeyValue, KeyValues
from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.base import NetworkDrafter
from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.models.attention import Segment
from eagle3_jax.models.config import LayerConfig, check_drafting, check_sizes, check_stack, grouped
from eagle3_jax.models.decoder import Block
from eagle3_jax.models.functional import Params, call_cached
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, embed
from eagle3_jax.models.memory import BlockMemory, Memory, empty_cache
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, Observation, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Markov:
    """DSpark's bias by the token before.

    Attributes:
        rank: ``R`` of the two factors.
        type: ``vanilla``: ``W2 m`` with ``m = W1[u]``. ``gated``: ``W2 (sigmoid(G [h; m] + g) * m)``. ``rnn``: a state
            that runs through the block, ``s' = sigmoid(a) s + (1 - sigmoid(a)) tanh(b)`` and ``W2 tanh(c)`` with
            ``[a; b; c] = J [s; m; h] + j``.
    """

    rank: int
    type: Literal["vanilla", "gated", "rnn"] = "vanilla"

    def __post_init__(self) -> None:
        check_sizes(self, "rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """A block drafter.

    Attributes:
        vocab_size: ``V``, the target's.
        width: ``D``, of the network and of the target's embedding.
        layers: The network's; all alike.
        draft_vocab_size: ``W``, how many target tokens it can propose.
        target_width: Width of the target's features.
        aux_layers: ``A`` target layers whose entering residual stream is fused, ascending.
        block_size: ``B``, rows of a block as trained.
        mask_token: What stands for a token that is not known; its row of the embedding is an input like any other.
        causal: Rows see those before them (JetSpec); otherwise the whole block.
        from_anchor: The row of ``x_n`` predicts too, and each row the position after its own (DSpark).
        markov: The bias by the token before; ``None`` for none.
        confidence: What the confidence reads: the row's ``hidden`` state, or that and the ``markov`` embedding of the
            token before; ``None`` where there is no such head.
        own_output: It has an output projection of its own; otherwise it reads logits off the target's.
        max_positions: Longest sequence that it was built for.
        norm_eps: Added to the mean square in RMSNorm.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    draft_vocab_size: int
    target_width: int
    aux_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    causal: bool = False
    from_anchor: bool = False
    markov: Markov | None = None
    confidence: Literal["hidden", "markov"] | None = None
    own_output: bool = False
    max_positions: int = 2048
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_stack(self)
        check_drafting(self)
        if self.draft_vocab_size < self.vocab_size and not self.own_output:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} of {self.vocab_size} without own_output; a reduced "
                "vocabulary needs an output projection of its own"
            )
        if len(set(self.layers)) > 1 or grouped(self.layers[0]).window is not None:
            raise ValueError(
                "the layers differ or have a sliding window; a block drafter's are alike and see everything"
            )
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(f"mask_token is {self.mask_token}; expected a token id from 0 to {self.vocab_size - 1}")
        if self.block_size < 2 - self.from_anchor:
            raise ValueError(f"block_size is {self.block_size}; expected room for a token to predict")
        if self.confidence == "markov" and self.markov is None:
            raise ValueError("the confidence reads the markov embedding, but there is none; set markov")

    @property
    def num_layers(self) -> int:
        """The network's own layers."""
        return len(self.layers)

    @property
    def num_predicted(self) -> int:
        """Tokens that a whole block predicts."""
        return self.block_size if self.from_anchor else self.block_size - 1


class MarkovBias(nnx.Module):
    """What the token before adds to the logits of the next one, see :class:`Markov`."""

    def __init__(self, config: DFlashConfig, *, precision: Precision, rngs: nnx.Rngs):
        assert config.markov is not None
        rank = config.markov.rank
        options = {"precision": precision, "rngs": rngs}
        self.type = config.markov.type
        self.before = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, rank), jnp.float32) * 0.01)
        vocab = Axis(VOCAB, config.draft_vocab_size)
        self.after = Linear(rank, config.draft_vocab_size, axes=(None, vocab), **options)
        if self.type == "gated":
            self.gate = Linear(config.width + rank, rank, bias=True, **options)
        elif self.type == "rnn":
            self.joint = Linear(2 * rank + config.width, 3 * rank, bias=True, **options)
        self.precision = precision

    def __call__(
        self, tokens: Int[Array, "B k"], hidden: Float[Array, "B k D"], state: Float[Array, "B k R"]
    ) -> tuple[Float[Array, "B k W"], Float[Array, "B k R"]]:
        """The bias after each token in a row of this output, and the state of those that follow it."""
        read = self.embed(tokens)
        if self.type == "gated":
            read = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, read], axis=-1))) * read
        elif self.type == "rnn":
            joint = self.joint(jnp.concatenate([state, read, hidden], axis=-1))
            gate, candidate, out = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
            read = jnp.tanh(out)
        return self.after(read).astype(jnp.float32), state

    def embed(self, tokens: Int[Array, "B k"]) -> Float[Array, "B k R"]:
        """``W1[u]``."""
        return embed(self.before[...], tokens, self.precision)


class DFlashHead(nnx.Module):
    """The network; the embedding is an input, because it is the target's."""

    def __init__(self, config: DFlashConfig, *, precision: Precision, rngs: nnx.Rngs):
        width = config.width
        eps = config.norm_eps
        options = {"precision": precision, "rngs": rngs}
        self.fc = Linear(len(config.aux_layers) * config.target_width, width, **options)
        self.feature_norm = RMSNorm(width, eps)
        self.blocks = nnx.List([Block(layer, width=width, norm_eps=eps, **options) for layer in config.layers])
        self.norm = RMSNorm(width, eps)
        if config.own_output:
            vocab = Axis(VOCAB, config.draft_vocab_size)
            self.head = Linear(width, config.draft_vocab_size, axes=(None, vocab), **options)
        if config.markov is not None:
            self.markov = MarkovBias(config, **options)
        if config.confidence is not None:
            rank = config.markov.rank if config.confidence == "markov" and config.markov is not None else 0
            self.confidence = Linear(width + rank, 1, bias=True, **options)
        self.config = config

    def context(self, features: Float[Array, "B T A Dt"], positions: Int[Array, "B T"]) -> tuple[KeyValue, ...]:
        """Keys and values of committed tokens in every layer: all from the same fused features."""
        fused = self.feature_norm(self.fc(features.reshape(*features.shape[:2], -1)))
        attentions: list[Any] = [block.attention for block in self.blocks]
        return tuple(attention.project(fused, positions)[1] for attention in attentions)

    def __call__(
        self, embedded: Float[Array, "B T D"], positions: Int[Array, "B T"], memories: Sequence[Memory]
    ) -> Float[Array, "B T D"]:
        """The block's rows after the last norm: what logits, bias and confidence read."""
        x = embedded
        for block, memory in zip(self.blocks, memories, strict=True):
            x, _ = call_cached(block, x, positions, memory)
        return self.norm(x)

    def survival(self, hidden: Float[Array, "B k D"], before: Int[Array, "B k"]) -> Float[Array, "B k"]:
        """Logit of the chance that what a row predicts is accepted, given the token ``before``."""
        read = [hidden, self.markov.embed(before)] if self.config.confidence == "markov" else [hidden]
        return self.confidence(jnp.concatenate(read, axis=-1))[..., 0].astype(jnp.float32)


class DFlashState(struct.PyTreeNode, kw_only=True):
    """What is known for certain."""

    cache: Cache  #: Keys and values of the committed tokens' features.
    root: Int[Array, " B"]  #: ``[B]``, the last token chosen by the target.


@dataclasses.dataclass(frozen=True)
class DFlashDrafter(NetworkDrafter):
    """Drafts with a block drafter of any kind; see the module.

    Attributes:
        config: Of the network.
        topology: The shape of a draft; a chain of the whole block when left out.
        precision: Of the network's products and activations.
        draft_sampling: Whether the tokens of a chain or a static tree are the likeliest or drawn.
    """

    network: ClassVar[type[nnx.Module]] = DFlashHead
    borrows_output: ClassVar[bool] = True

    config: DFlashConfig
    topology: Topology | None = None

    def __post_init__(self) -> None:
        most = self.longest
        if self.topology is None:
            object.__setattr__(self, "topology", Chain(most))
        super().__post_init__()
        if self.max_depth > most:
            raise ValueError(
                f"a draft of {self.max_depth} levels was asked for, but a block of {self.config.block_size} predicts "
                f"{most} tokens; lower num_speculative_tokens or max_depth to at most {most}"
            )

    @property
    def longest(self) -> int:
        """The most tokens of a draft, which is what a whole block predicts."""
        return self.config.num_predicted

    def init(self, params: Params, batch: int, capacity: int) -> DFlashState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params
        dtype = self.precision.activations
        return DFlashState(
            cache=empty_cache(self.config.layers, batch=batch, capacity=capacity, dtype=dtype),
            root=jnp.zeros((batch,), jnp.int32),
        )

    def observe(self, params: Params, state: DFlashState, seen: Observation) -> DFlashState:
        """Keep keys and values of the committed tokens' features; a token of its own is never run again."""
        cache = state.cache
        fed = seen.tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(fed, dtype=jnp.int32)[None, :]
        context = self.bind(params).context(seen.features, positions)
        layers: tuple[KeyValues, ...] = cache.layers  # type: ignore[assignment]
        written = tuple(layer.write(kv, cache.length) for layer, kv in zip(layers, context, strict=True))
        return DFlashState(
            cache=cache.commit(written, seen.length),
            root=jnp.where(seen.length > 0, seen.next_token, state.root),
        )

    def propose(self, params: Params, state: DFlashState, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """Runs the block once, then chooses tokens level by level from its logits."""
        head = self.bind(params)
        hidden = self.read_block(params, head, state)
        base = self.logits(params, head, hidden)

        def level(depth: int, tokens: Any, carry: Any) -> Level:
            if self.config.markov is None:
                return Level(base[:, depth, None], carry, memory=())
            row = jnp.broadcast_to(hidden[:, depth, None], (*tokens.shape, hidden.shape[-1]))
            bias, carry = head.markov(tokens, row, carry)
            return Level(base[:, depth, None] + bias, carry, memory=())

        rank = 0 if self.config.markov is None else self.config.markov.rank
        start = jnp.zeros((state.root.shape[0], 1, rank), self.precision.activations)
        inputs = DraftInputs(
            root=state.root,
            first=level(0, state.root[:, None], start),
            run=lambda tokens, carry, depth, mask, memory: level(depth + 1, tokens, carry),
            draft_to_target=params.get("draft_to_target"),
            vocab_size=self.config.vocab_size,
            keys=keys,
            sampling=sampling,
        )
        return self.grow(inputs)[0]

    def read_block(self, params: Params, head: DFlashHead, state: DFlashState) -> Float[Array, "B K D"]:
        """The rows that predict the ``K`` tokens after the root, of a block that is run behind the context."""
        config = self.config
        cache = state.cache
        rows = self.max_depth + (0 if config.from_anchor else 1)
        tokens = jnp.full((state.root.shape[0], rows), config.mask_token, jnp.int32).at[:, 0].set(state.root)
        positions = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
        mask = causal_mask(rows) if config.causal else jnp.ones((1, rows, rows), jnp.bool_)
        layers: Any = cache.layers
        committed = (jnp.arange(layers[0].capacity, dtype=jnp.int32)[None, :] < cache.length[:, None])[:, None]
        past = [(Segment(KeyValue(layer.keys, layer.values), committed),) for layer in layers]
        embedded = embed(params["embedding"], tokens, self.precision)
        return head(embedded, positions, [BlockMemory(one, mask) for one in past])[:, -self.max_depth :]

    def logits(self, params: Params, head: DFlashHead, hidden: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Logits of the block's rows in float32, without a bias."""
        if self.config.own_output:
            return head.head(hidden).astype(jnp.float32)
        return self.target_logits(params, hidden)
