"""Block drafters on one backbone: DFlash, DSpark and JetSpec.

A small network of Qwen3 layers reads a block ``[x_n, mask, mask, ...]`` after the committed tokens
``x_0 .. x_{n-1}`` and predicts all of its positions in one pass. It reads committed tokens only
through the target's features: at every position ``c_i = norm(fc(f_i))``, from which each layer
computes keys and values. Those of the block itself are dropped.

DFlash (arXiv 2602.06036)
    Mask row ``k`` predicts its own position: ``q_k = softmax(logits_k)``, independently of the
    other rows. Every row attends to the whole block, so another block length changes all
    predictions.

JetSpec (arXiv 2606.18394)
    The same, but a row attends only to the rows before it (``causal``). So a shorter block is a
    prefix of a longer one.

DSpark (arXiv 2607.05147)
    ``q_k = softmax(logits_k + W2 W1[d_{k-1}])``: a first-order bias by the token before. Mostly the
    anchor row predicts as well (``from_anchor``: row ``k`` predicts the next position, ``K`` rows).
    A confidence ``sigmoid(w [h_k; W1[d_{k-1}]] + b)`` estimates the probability of acceptance.

A layer may have a window of ``w`` positions, its row's own included: a row attends to committed
tokens and rows of the block that are less than ``w`` positions away, behind it and ahead of it. In
causal layers it attends to nothing ahead.

A tree needs no further pass: the score of a child is its probability at its level (DDTree, arXiv
2604.12989). With DSpark it includes the bias by the parent's token. With ``top_k = num_nodes - 1``
a dynamic tree has the most likely prefixes of all.

Weaknesses: independent distributions propose tokens that do not fit together, more so the flatter
they are; DSpark's bias is a remedy. A head drafts well only for the block length that it was
trained on. It depends on the right target layers, because features are its only view of committed
tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.cache import Cache, KeyValue, KeyValues
from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.base import NetworkDrafter
from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.models.attention import Segment
from eagle3_jax.models.config import LayerConfig, check_drafting, check_sizes, check_stack, grouped
from eagle3_jax.models.context import AttentionContext, BlockContext, empty_cache
from eagle3_jax.models.decoder import Block
from eagle3_jax.models.functional import Params, call_cached
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, embed
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, Observation, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Markov:
    """The configuration of DSpark's bias by the token before, ``u``.

    Attributes:
        rank: ``R``, rank of the two factors ``W1`` and ``W2``.
        type: ``vanilla``: the bias is ``W2 m`` with ``m = W1[u]``. ``gated``: ``W2 (sigmoid(G [h;
            m] + g) * m)``. ``rnn``: ``W2 tanh(c)``, with a state along the block, ``s' = sigmoid(a)
            s + (1 - sigmoid(a)) tanh(b)`` and ``[a; b; c] = J [s; m; h] + j``.
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
        width: ``D``, width of the network and of the target's embedding.
        layers: Layers of the network, equal but for their windows. The ``window`` of a layer counts
            the positions on either side of a row, its own included: a row attends to keys at a
            distance below it.
        draft_vocab_size: ``W``, number of target tokens that it can propose.
        target_width: Width of the target's features.
        aux_layers: ``A`` target layers whose entering residual stream is fused, ascending.
        normed_last: Whether the last of them is ``L + 1``, the output of the target's final norm.
        block_size: ``B``, rows of a block in training.
        mask_token: Id of the mask token. Its row of the embedding is an input like any other.
        causal: Whether a row attends only to the rows before it (JetSpec), instead of the whole
            block.
        causal_windows: Whether a row attends only to the rows before it in layers with a window,
            and to the whole block in the others (z-lab's default).
        from_anchor: Whether the row of ``x_n`` predicts too, and each row predicts the position
            after its own (DSpark).
        markov: The bias by the token before; ``None`` for none.
        confidence: Input of the confidence: the row's ``hidden`` state, or that and the ``markov``
            embedding of the token before; ``None`` for a network without confidence.
        own_output: Whether the network has an output projection; otherwise it uses that of the
            target.
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
    normed_last: bool = False
    causal: bool = False
    causal_windows: bool = False
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
                f"draft_vocab_size is {self.draft_vocab_size} of {self.vocab_size} without"
                " own_output; a reduced vocabulary needs an output projection of its own"
            )
        if len({_without_window(layer) for layer in self.layers}) > 1:
            raise ValueError(
                "the layers differ in more than their windows; the layers of a block drafter are"
                " equal otherwise"
            )
        if grouped(self.layers[0]).chunk is not None:
            raise ValueError("the layers attend to chunks; a block drafter has windows, no chunks")
        is_mixed = any(self.windows) and not all(self.windows)
        if self.causal_windows and (self.causal or not is_mixed):
            raise ValueError(
                "causal_windows is for layers with and without a window in a block that is not"
                " causal; set causal alone"
            )

        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token is {self.mask_token}; expected a token id from 0 to"
                f" {self.vocab_size - 1}"
            )
        if self.block_size < 2 - self.from_anchor:
            raise ValueError(
                f"block_size is {self.block_size}; expected room for a token to predict"
            )

        if self.confidence == "markov" and self.markov is None:
            raise ValueError(
                "the confidence reads the markov embedding, but there is none; set markov"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers of the network."""
        return len(self.layers)

    @property
    def num_predicted(self) -> int:
        """Number of tokens that a whole block predicts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer; ``None`` for full attention."""
        return tuple(grouped(layer).window for layer in self.layers)

    def is_causal(self, window: int | None) -> bool:
        """Whether a row attends only to the rows before it in layers with this window."""
        return self.causal or (self.causal_windows and window is not None)


def _without_window(layer: LayerConfig) -> LayerConfig:
    return dataclasses.replace(layer, mixer=dataclasses.replace(grouped(layer), window=None))


def is_near(
    queries: Int[Array, "#B T"], keys: Int[Array, "#B S"], window: int
) -> Bool[Array, "#B T S"]:
    """Returns which keys a row attends to in a layer with a window, by their positions."""
    return jnp.abs(queries[:, :, None] - keys[:, None]) < window


class MarkovBias(nnx.Module):
    """The bias of the logits by the token before; see :class:`Markov`."""

    def __init__(self, config: DFlashConfig, *, precision: Precision, rngs: nnx.Rngs):
        assert config.markov is not None
        rank = config.markov.rank
        options = {"precision": precision, "rngs": rngs}
        self.type = config.markov.type
        self.before = nnx.Param(
            jax.random.normal(rngs.params(), (config.vocab_size, rank), jnp.float32) * 0.01
        )

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
        """Returns the bias after each token, in float32, and the new state of the ``rnn``.

        Args:
            tokens: ``[B k]``, the tokens before.
            hidden: ``[B k D]``, outputs of the rows that predict the next tokens.
            state: ``[B k R]``, states before; other types than ``rnn`` return it unchanged.
        """
        factor = self.embed(tokens)
        if self.type == "gated":
            factor = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, factor], axis=-1))) * factor
        elif self.type == "rnn":
            joint = self.joint(jnp.concatenate([state, factor, hidden], axis=-1))
            gate, candidate, out = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
            factor = jnp.tanh(out)
        return self.after(factor).astype(jnp.float32), state

    def embed(self, tokens: Int[Array, "B k"]) -> Float[Array, "B k R"]:
        """Returns ``W1[u]`` for tokens ``u``."""
        return embed(self.before[...], tokens, self.precision)


class DFlashHead(nnx.Module):
    """The network. Its input are embedded tokens, because the embedding belongs to the target."""

    def __init__(self, config: DFlashConfig, *, precision: Precision, rngs: nnx.Rngs):
        width = config.width
        eps = config.norm_eps
        options = {"precision": precision, "rngs": rngs}
        self.fc = Linear(len(config.aux_layers) * config.target_width, width, **options)
        self.feature_norm = RMSNorm(width, eps)
        self.blocks = nnx.List([self.block_of(layer, config, **options) for layer in config.layers])
        self.norm = RMSNorm(width, eps)

        if config.own_output:
            vocab = Axis(VOCAB, config.draft_vocab_size)
            self.head = Linear(width, config.draft_vocab_size, axes=(None, vocab), **options)
        if config.markov is not None:
            self.markov = MarkovBias(config, **options)
        if config.confidence is not None:
            rank = 0
            if config.confidence == "markov" and config.markov is not None:
                rank = config.markov.rank
            self.confidence = Linear(width + rank, 1, bias=True, **options)
        self.config = config

    @staticmethod
    def block_of(layer: LayerConfig, config: DFlashConfig, **options: Any) -> Block:
        """Returns a layer of the network."""
        return Block(layer, width=config.width, norm_eps=config.norm_eps, **options)

    def context(
        self, features: Float[Array, "B T A Dt"], positions: Int[Array, "B T"]
    ) -> tuple[KeyValue, ...]:
        """Returns keys and values of committed tokens for every layer, from the fused features."""
        fused = self.feature_norm(self.fc(features.reshape(*features.shape[:2], -1)))
        attentions: list[Any] = [block.attention for block in self.blocks]
        return tuple(attention.project(fused, positions)[1] for attention in attentions)

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        contexts: Sequence[AttentionContext],
    ) -> Float[Array, "B T D"]:
        """Returns the block's rows after the last norm: the input of logits, bias, confidence."""
        x = embedded
        for block, context in zip(self.blocks, contexts, strict=True):
            x, _ = call_cached(block, x, positions, context)
        return self.norm(x)

    def survival(
        self, hidden: Float[Array, "B k D"], before: Int[Array, "B k"]
    ) -> Float[Array, "B k"]:
        """Returns the logit of the probability that a row's prediction is accepted.

        Args:
            hidden: ``[B k D]``, outputs of the rows.
            before: ``[B k]``, the tokens before the predicted ones.
        """
        inputs = [hidden]
        if self.config.confidence == "markov":
            inputs.append(self.markov.embed(before))
        logits = self.confidence(jnp.concatenate(inputs, axis=-1))
        return logits[..., 0].astype(jnp.float32)


class DFlashState(struct.PyTreeNode, kw_only=True):
    """The state after the committed tokens.

    Attributes:
        cache: Keys and values of the committed tokens' features.
        root: ``[B]``, the last token chosen by the target.
    """

    cache: Cache
    root: Int[Array, " B"]


def block_contexts(
    config: DFlashConfig, cache: Cache, positions: Int[Array, "B T"]
) -> list[BlockContext]:
    """Returns what each layer of a block attends to after the committed tokens.

    A layer reads the committed keys and values within its window, and writes none.

    Args:
        config: The network.
        cache: Keys and values of the committed tokens.
        positions: ``[B T]``, positions of the rows of the block.
    """
    blocks = {
        window: block_mask(config, window, positions.shape[1])
        for window in dict.fromkeys(config.windows)
    }
    layers: Any = cache.layers
    slot = jnp.arange(layers[0].capacity, dtype=jnp.int32)[None, :]
    committed = (slot < cache.length[:, None])[:, None]
    seen = {
        window: committed if window is None else committed & is_near(positions, slot, window)
        for window in blocks
    }
    return [
        BlockContext((Segment(KeyValue(layer.keys, layer.values), seen[window]),), blocks[window])
        for layer, window in zip(layers, config.windows, strict=True)
    ]


def block_mask(config: DFlashConfig, window: int | None, rows: int) -> Bool[Array, "1 T T"]:
    """Returns which rows of a block each row attends to in layers with this window."""
    is_causal = config.is_causal(window)
    mask = causal_mask(rows) if is_causal else jnp.ones((1, rows, rows), jnp.bool_)
    if window is None or window >= rows:
        return mask
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    return mask & is_near(row, row, window)


@dataclasses.dataclass(frozen=True)
class DFlashDrafter(NetworkDrafter):
    """Drafts with a block drafter of any kind: DFlash, JetSpec or DSpark.

    Attributes:
        config: Configuration of the network.
        topology: The shape of a draft. Default: a chain of the whole block.
        precision: Types of the network's products and activations.
        draft_sampling: Whether the tokens of a chain or a static tree are the most likely ones or
            sampled.
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
                f"the draft has {self.max_depth} levels, but a block of {self.config.block_size}"
                f" predicts {most} tokens; lower num_speculative_tokens or max_depth to at most"
                f" {most}"
            )

    @property
    def longest(self) -> int:
        """The largest number of tokens in a draft: those that a whole block predicts."""
        return self.config.num_predicted

    def init(self, params: Params, batch: int, capacity: int) -> DFlashState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params
        dtype = self.precision.activations
        cache = empty_cache(self.config.layers, batch=batch, capacity=capacity, dtype=dtype)
        return DFlashState(cache=cache, root=jnp.zeros((batch,), jnp.int32))

    def observe(self, params: Params, state: DFlashState, seen: Observation) -> DFlashState:
        """Writes keys and values from the committed tokens' features to the cache.

        No draft token runs again.
        """
        cache = state.cache
        fed = seen.tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(fed, dtype=jnp.int32)[None, :]
        context = self.bind(params).context(seen.features, positions)
        layers: tuple[KeyValues, ...] = cache.layers  # type: ignore[assignment]
        written = tuple(
            layer.write(kv, cache.length) for layer, kv in zip(layers, context, strict=True)
        )
        committed = cache.commit(written, seen.length)
        root = jnp.where(seen.length > 0, seen.next_token, state.root)
        return DFlashState(cache=committed, root=root)

    def propose(
        self, params: Params, state: DFlashState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Runs the block once, then chooses tokens level by level from its logits."""
        head = self.bind(params)
        hidden = self.read_block(params, head, state)
        level = self.level(head, hidden, self.logits(params, head, hidden))

        def run(tokens: Any, carry: Any, depth: int, mask: Any, memory: Any) -> Level:
            # These tokens were drafted from the row before; the next row gives their children.
            del mask, memory
            return level(depth + 1, tokens, carry)

        # The carry is the recurrent state of the bias.
        rank = 0 if self.config.markov is None else self.config.markov.rank
        start = jnp.zeros((state.root.shape[0], 1, rank), self.precision.activations)
        first = level(0, state.root[:, None], start)
        inputs = DraftInputs(
            root=state.root,
            first=first,
            run=run,
            draft_to_target=params.get("draft_to_target"),
            vocab_size=self.config.vocab_size,
            keys=keys,
            sampling=sampling,
        )
        draft, _ = self.grow(inputs)
        return draft

    def level(
        self, head: Any, hidden: Float[Array, "B K D"], base: Float[Array, "B K W"]
    ) -> Callable[[int, Any, Any], Level]:
        """Returns a function that gives a level of the draft.

        Its arguments are the index of the row that predicts the level, the tokens ``[B k]`` before
        it, and their carry.

        Args:
            head: The network.
            hidden: ``[B K D]``, the rows of the block that predict.
            base: ``[B K W]``, their logits.
        """

        def level(depth: int, tokens: Any, carry: Any) -> Level:
            if self.config.markov is None:
                return Level(base[:, depth, None], carry, memory=())
            row = jnp.broadcast_to(hidden[:, depth, None], (*tokens.shape, hidden.shape[-1]))
            bias, carry = head.markov(tokens, row, carry)
            return Level(base[:, depth, None] + bias, carry, memory=())

        return level

    def read_block(
        self, params: Params, head: DFlashHead, state: DFlashState
    ) -> Float[Array, "B K D"]:
        """Runs a block after the committed tokens.

        Returns:
            The rows that predict the ``K`` tokens after the root.
        """
        config = self.config
        cache = state.cache

        # The block: the root, then mask tokens.
        rows = self.max_depth + (0 if config.from_anchor else 1)
        masks = jnp.full((state.root.shape[0], rows), config.mask_token, jnp.int32)
        tokens = masks.at[:, 0].set(state.root)
        positions = cache.length[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
        contexts = block_contexts(config, cache, positions)
        embedded = self.embedded(params, tokens)
        return head(embedded, positions, contexts)[:, -self.max_depth :]

    def embedded(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns the input of the block."""
        return embed(params["embedding"], tokens, self.precision)

    def logits(
        self, params: Params, head: DFlashHead, hidden: Float[Array, "B T D"]
    ) -> Float[Array, "B T W"]:
        """Returns the logits of the block's rows in float32, without the bias."""
        if self.config.own_output:
            return head.head(hidden).astype(jnp.float32)
        return self.target_logits(params, hidden)
