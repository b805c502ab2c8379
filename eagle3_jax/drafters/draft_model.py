"""A draft model: a smaller language model with the same vocabulary drafts token by token.

Leviathan et al. (2023, arXiv 2211.17192) and Chen et al. (2023, arXiv 2302.01318). Row ``i`` of its
input is the token ``x_i`` at position ``i``, without the shift of heads that read features. It does
not use the target's features:

    ``q_k = softmax(draft(x_0 .. x_n, d_1 .. d_(k-1)) / T)``

A draft takes the most likely token of ``q_k``, a sample (``draft_sampling``), or the most likely
few as a tree. Every ``q_k`` depends on the tokens drafted before it, so drafts are not parallel:
``K`` tokens need ``K`` runs of the model. The first of them also reads the tokens that the last
round committed.

Layer skip (self-speculation) is the same drafter with the target's own parameters: its first ``E``
layers, its final norm and its output matrix. Only a prefix of the layers can be used, as in
LayerSkip (Elhoushi et al., 2024, arXiv 2404.16710). Draft & Verify (Zhang et al., 2023, arXiv
2309.08168) searches for a set of sub-layers instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.cache import Cache, KeyValues, NoKeys
from eagle3_jax.drafters.base import ShapedDrafter
from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
from eagle3_jax.models.config import GatedDelta
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.models.latent_keys import LatentKeys
from eagle3_jax.topology import Topology
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, DraftSampling, Observation, SamplingParams


class DraftModelState(struct.PyTreeNode, kw_only=True):
    """The draft model's state after the committed tokens.

    Attributes:
        cache: The draft model's keys and values for every committed token and the root. It is
            complete after a round, whatever part of a draft was accepted.
        final: ``[B D]``, the draft model's final state at the root, from which the first draft
            token follows.
        root: ``[B]``, the last token chosen by the target.
    """

    cache: Cache
    final: Float[Array, "B D"]
    root: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class DraftModel(ShapedDrafter):
    """Drafts a chain or a tree with a second language model.

    The parameters are those of that model.

    Attributes:
        model: The draft model, of any family and size with the target's vocabulary.
        topology: The shape of a draft. Default: a chain of the default length.
        draft_sampling: Whether the tokens of a chain or a static tree are the most likely ones or
            sampled.
    """

    model: DecoderTarget
    topology: Topology | None = None
    draft_sampling: DraftSampling = DraftSampling.GREEDY
    aux_layers = ()

    def __post_init__(self) -> None:
        if any(isinstance(layer.mixer, GatedDelta) for layer in self.model.config.layers):
            raise ValueError(
                "a draft model removes rejected tokens by lowering the length of its cache, and the"
                " state of a recurrent layer has no length; give a model with attention in every"
                " layer"
            )
        self.settle_shape(vocab_size=self.model.vocab_size, max_positions=self.max_positions)

    @property
    def max_positions(self) -> int:
        """Longest sequence that the draft model was built for; longer sequences are refused."""
        return self.model.config.max_positions

    def param_shapes(self) -> Params:
        """Returns the shapes of the model's parameters."""
        return self.model.param_shapes()

    def param_axes(self) -> Params:
        """Returns the axes of the model's parameters; a mesh divides them like the target's."""
        return self.model.param_axes()

    def init(self, params: Params, batch: int, capacity: int) -> DraftModelState:
        """See :class:`eagle3_jax.types.Drafter`.

        Raises:
            ValueError: The model has a cache from which tokens cannot be removed by lowering its
                length.
        """
        del params
        # `capacity` covers the nodes that are verified. The model may run on more nodes of a tree
        # than that.
        more = max(0, self.shape.num_expanded - self.num_nodes)
        cache = self.model.init_cache(batch, capacity + more)
        for layer in cache.layers:
            if not isinstance(layer, KeyValues | LatentKeys | NoKeys):
                raise ValueError(
                    "a draft model removes rejected tokens by lowering the length of its cache,"
                    f" and {type(layer).__name__} of {type(self.model).__name__} has no length"
                )

        final = jnp.zeros((batch, self.model.config.width), self.model.precision.activations)
        root = jnp.zeros((batch,), jnp.int32)
        return DraftModelState(cache=cache, final=final, root=root)

    def observe(self, params: Params, state: DraftModelState, seen: Observation) -> DraftModelState:
        """Runs the model on the committed tokens and ``next_token``.

        Accepted draft tokens run again, because the last one was sampled and never ran. The root of
        the last round is the first committed token; it runs again in its own slot.
        """
        observed = seen.length > 0
        fed = seen.tokens.shape[1] + 1

        # The committed tokens, then `next_token` right after a row's last one.
        index = jnp.arange(fed, dtype=jnp.int32)[None, :]
        following = seen.next_token[:, None]
        is_next = index == seen.length[:, None]
        tokens = jnp.where(is_next, following, jnp.concatenate([seen.tokens, following], axis=1))

        # From the slot of the last round's root on. A row without new tokens does not change.
        length = state.cache.length
        length_before_root = jnp.where(observed, jnp.maximum(length - 1, 0), length)
        before = Cache(layers=state.cache.layers, length=length_before_root)
        output = self.model(
            params, tokens, before.length[:, None] + index, causal_mask(fed), before
        )

        newest = jnp.take_along_axis(output.final, seen.length[:, None, None], axis=1)[:, 0]
        cache = before.commit(output.written, jnp.where(observed, seen.length + 1, 0))
        final = jnp.where(observed[:, None], newest, state.final)
        root = jnp.where(observed, seen.next_token, state.root)
        return DraftModelState(cache=cache, final=final, root=root)

    def propose(
        self,
        params: Params,
        state: DraftModelState,
        keys: Key[Array, " B"],
        sampling: SamplingParams,
    ) -> Draft:
        """Drafts a tree or a chain, level by level."""
        length = state.cache.length

        def run(tokens, carry, depth, mask, memory):
            cache, earlier = memory
            new_positions = jnp.broadcast_to(length[:, None] + depth, tokens.shape)
            positions = jnp.concatenate([earlier, new_positions], axis=1)
            output = self.model(params, tokens, positions, mask, cache)
            # Guesses are written after the committed slots, and the length does not change.
            cache = cache.commit(output.written, jnp.zeros_like(length))
            return Level(self.model.unembed(params, output.final), carry, (cache, positions))

        no_positions = jnp.zeros((*length.shape, 0), jnp.int32)
        first = Level(
            self.model.unembed(params, state.final[:, None]), (), (state.cache, no_positions)
        )
        inputs = DraftInputs(state.root, first, run, None, self.model.vocab_size, keys, sampling)
        draft, (cache, _) = self.grow(inputs)
        # Returning the cache with the guesses avoids a copy of it.
        return dataclasses.replace(draft, state=dataclasses.replace(state, cache=cache))


def draft_model(draft: LoadedTarget, target: LoadedTarget) -> LoadedDrafter:
    """Returns a language model as the drafter of a target. Its arrays are shared, not copied.

    Args:
        draft: The draft model.
        target: The target.

    Raises:
        ValueError: Both have different vocabularies or tokenizers.
    """
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"{draft.name} has a vocabulary of {draft.vocab_size} tokens and {target.name} one of "
            f"{target.vocab_size}; a draft model needs the target's own"
        )

    if draft.tokenizer is not None and target.tokenizer is not None:
        draft_vocab = draft.tokenizer.get_vocab(with_added_tokens=True)
        target_vocab = target.tokenizer.get_vocab(with_added_tokens=True)
        difference = first_vocab_difference(draft_vocab, target_vocab)
        if difference is not None:
            raise ValueError(
                f"{draft.name} has another tokenizer than {target.name}: {difference}; a draft"
                " model needs the target's own"
            )

    return LoadedDrafter(DraftModel(draft.model), draft.params, draft.name, "draft model")  # type: ignore[arg-type]


def first_vocab_difference(
    draft_vocab: Mapping[str, int], target_vocab: Mapping[str, int]
) -> str | None:
    """Describes the first token by which two vocabularies differ.

    Args:
        draft_vocab: Id of each token in the draft model's tokenizer.
        target_vocab: Id of each token in the target's tokenizer.

    Returns:
        ``None`` if they are the same.
    """
    tokens = {**target_vocab, **draft_vocab}
    differing = [token for token in tokens if draft_vocab.get(token) != target_vocab.get(token)]
    if not differing:
        return None

    def order(token: str) -> tuple[int, str]:
        return target_vocab.get(token, len(target_vocab)), token

    first = min(differing, key=order)

    def describe(vocab: Mapping[str, int]) -> str:
        return f"id {vocab[first]}" if first in vocab else "none"

    return f"the token {first!r} is {describe(draft_vocab)} there and {describe(target_vocab)} here"


def layer_skip(target: LoadedTarget, num_layers: int) -> LoadedDrafter:
    """Returns the first layers of a target as its draft model. No weights are copied or added.

    The drafter has its own cache, although the target's first layers have the same keys and values.
    A drafted token costs ``num_layers / L`` of a target step, and a round ``K · num_layers / L +
    1`` target steps.

    Args:
        target: The target, a :class:`~eagle3_jax.models.decoder.DecoderTarget`.
        num_layers: ``E``, number of layers that run before the final norm; 1 to ``L - 1``.

    Raises:
        ValueError: ``num_layers`` is out of range, or the target is of another kind.
    """
    model = target.model
    if not isinstance(model, DecoderTarget):
        raise ValueError(
            f"{type(model).__name__} is not a target whose layers can be skipped; give a draft"
            " model"
        )
    if not 1 <= num_layers < model.config.num_layers:
        raise ValueError(
            f"layer skip of {num_layers} layers: {target.name} has {model.config.num_layers}, so"
            f" give 1 to {model.config.num_layers - 1}"
        )

    if model.config.input_width:
        raise ValueError(
            f"layer skip of {target.name}: its table of vectors for each layer belongs to all"
            " layers; give another drafter"
        )

    config = dataclasses.replace(model.config, layers=model.config.layers[:num_layers])
    blocks = {index: target.params["blocks"][index] for index in range(num_layers)}
    drafter = DraftModel(DecoderTarget(config, model.precision))
    params = {**target.params, "blocks": blocks}
    method = f"layer skip ({num_layers} of {model.config.num_layers} layers)"
    return LoadedDrafter(drafter, params, f"layer-skip={num_layers}", method)
