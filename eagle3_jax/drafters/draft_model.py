"""A draft model: a smaller language model of the same vocabulary writes ahead, token by token.

Leviathan et al. (2023, arXiv 2211.17192) and Chen et al. (2023, arXiv 2302.01318). Row ``i`` of its input is the token
``x_i`` at position ``i``, not shifted as for the heads that read features, and it reads nothing of the target:

    ``q_k = softmax(draft(x_0 .. x_n, d_1 .. d_(k-1)) / T)``

of which a draft takes the likeliest token, or draws (``draft_sampling``), or the likeliest few as a tree. Every ``q_k``
depends on the tokens drafted before it, so drafts are not parallel: ``K`` tokens are ``K`` runs of the model, the first
of them over what the last round committed.

Layer skip (self-speculation) is the same drafter with parameters that *are* the target's: its first ``E`` layers, its
final norm and its output matrix. The prefix only, as LayerSkip exits early (Elhoushi et al., 2024, arXiv 2404.16710);
Draft & Verify (Zhang et al., 2023, arXiv 2309.08168) leaves out a searched set of sub-layers instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.cache import Cache, KeyValues
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
    """What the draft model has read for certain.

    Attributes:
        cache: Its own keys and values of every known token, the root included: nothing is owed after a round, however
            much of a draft was accepted.
        final: ``[B D]``, its final state at the root, from which the first draft token follows.
        root: ``[B]``, the last token chosen by the target.
    """

    cache: Cache
    final: Float[Array, "B D"]
    root: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class DraftModel(ShapedDrafter):
    """Drafts a chain or a tree with a language model of its own. Its parameters are that model's.

    Attributes:
        model: The draft model, of any family and size with the target's vocabulary.
        topology: The shape of a draft; a chain of the default length when left out.
        draft_sampling: Whether the tokens of a chain or a static tree are the likeliest or drawn.
    """

    model: DecoderTarget
    topology: Topology | None = None
    draft_sampling: DraftSampling = DraftSampling.GREEDY
    aux_layers = ()

    def __post_init__(self) -> None:
        if any(isinstance(layer.mixer, GatedDelta) for layer in self.model.config.layers):
            raise ValueError(
                "a draft model takes back what was refused by moving the length of its cache, and the state of a "
                "recurrent layer has none; give one of attention alone"
            )
        self.settle_shape(vocab_size=self.model.vocab_size, max_positions=self.max_positions)

    @property
    def max_positions(self) -> int:
        """Longest sequence that the draft model was built for; longer ones are refused."""
        return self.model.config.max_positions

    def param_shapes(self) -> Params:
        """Those of the model."""
        return self.model.param_shapes()

    def param_axes(self) -> Params:
        """Those of the model, which a mesh divides as it divides the target."""
        return self.model.param_axes()

    def init(self, params: Params, batch: int, capacity: int) -> DraftModelState:
        """See :class:`eagle3_jax.types.Drafter`.

        Raises:
            ValueError: The model keeps something that cannot be rolled back by moving a length.
        """
        del params
        # There is room for as many nodes as are verified; a tree may run more of them than that.
        cache = self.model.init_cache(batch, capacity + max(0, self.shape.num_expanded - self.num_nodes))
        other = [type(layer).__name__ for layer in cache.layers if not isinstance(layer, KeyValues | LatentKeys)]
        if other:
            raise ValueError(
                f"a draft model takes back what was refused by moving the length of its cache; {other[0]} of "
                f"{type(self.model).__name__} cannot be taken back so"
            )
        return DraftModelState(
            cache=cache,
            final=jnp.zeros((batch, self.model.config.width), self.model.precision.activations),
            root=jnp.zeros((batch,), jnp.int32),
        )

    def observe(self, params: Params, state: DraftModelState, seen: Observation) -> DraftModelState:
        """Read the committed tokens and the one after them.

        All of them, the accepted drafts too: those were fed while drafting, except the last, which was only drawn.
        The root is the last token read before and the first one committed: it is read again in its own slot.
        """
        observed = seen.length > 0
        fed = seen.tokens.shape[1] + 1
        index = jnp.arange(fed, dtype=jnp.int32)[None, :]
        following = seen.next_token[:, None]
        tokens = jnp.where(index == seen.length[:, None], following, jnp.concatenate([seen.tokens, following], axis=1))
        length = state.cache.length
        before = Cache(layers=state.cache.layers, length=jnp.where(observed, jnp.maximum(length - 1, 0), length))
        output = self.model(params, tokens, before.length[:, None] + index, causal_mask(fed), before)
        newest = jnp.take_along_axis(output.final, seen.length[:, None, None], axis=1)[:, 0]
        return DraftModelState(
            cache=before.commit(output.written, jnp.where(observed, seen.length + 1, 0)),
            final=jnp.where(observed[:, None], newest, state.final),
            root=jnp.where(observed, seen.next_token, state.root),
        )

    def propose(
        self, params: Params, state: DraftModelState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Grow the tree, or draw the chain; verification makes the output exact whatever is proposed."""
        length = state.cache.length

        def run(tokens, carry, depth, mask, memory):
            cache, earlier = memory
            positions = jnp.concatenate([earlier, jnp.broadcast_to(length[:, None] + depth, tokens.shape)], axis=1)
            output = self.model(params, tokens, positions, mask, cache)
            cache = cache.commit(output.written, jnp.zeros_like(length))  # guesses: they lie behind, and none counts
            return Level(self.model.unembed(params, output.final), carry, (cache, positions))

        nothing = jnp.zeros((*length.shape, 0), jnp.int32)
        first = Level(self.model.unembed(params, state.final[:, None]), (), (state.cache, nothing))
        inputs = DraftInputs(state.root, first, run, None, self.model.vocab_size, keys, sampling)
        draft, (cache, _) = self.grow(inputs)
        # To hand the guesses on spares a copy.
        return dataclasses.replace(draft, state=dataclasses.replace(state, cache=cache))


def draft_model(draft: LoadedTarget, target: LoadedTarget) -> LoadedDrafter:
    """A language model as the drafter of another one.

    Args:
        draft: What drafts; its arrays are shared and not copied.
        target: What it drafts for.

    Raises:
        ValueError: It has another vocabulary or another tokenizer.
    """
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"{draft.name} has a vocabulary of {draft.vocab_size} tokens and {target.name} one of "
            f"{target.vocab_size}; a draft model needs the target's own"
        )
    if draft.tokenizer is not None and target.tokenizer is not None:
        own, wanted = (one.get_vocab(with_added_tokens=True) for one in (draft.tokenizer, target.tokenizer))
        if (difference := first_vocab_difference(own, wanted)) is not None:
            raise ValueError(
                f"{draft.name} has another tokenizer than {target.name}: {difference}; a draft model needs the "
                "target's own"
            )
    return LoadedDrafter(DraftModel(draft.model), draft.params, draft.name, "draft model")  # type: ignore[arg-type]


def first_vocab_difference(own: Mapping[str, int], wanted: Mapping[str, int]) -> str | None:
    """The first token by which two vocabularies differ, in words; ``None`` where they are the same.

    Args:
        own: Id of each token in the draft model's tokenizer.
        wanted: The same in the target's.
    """
    differing = [token for token in {**wanted, **own} if own.get(token) != wanted.get(token)]
    if not differing:
        return None
    token = min(differing, key=lambda token: (wanted.get(token, len(wanted)), token))
    told = [f"id {one[token]}" if token in one else "none" for one in (own, wanted)]
    return f"the token {token!r} is {told[0]} there and {told[1]} here"


def layer_skip(target: LoadedTarget, num_layers: int) -> LoadedDrafter:
    """The target's own first layers as its draft model; no weights are copied or added.

    It keeps keys and values of its own, although those of the target's first layers would be the same numbers: a draft
    costs ``num_layers / L`` of a target step a token, and a round ``K · num_layers / L + 1``.

    Args:
        target: What drafts for itself.
        num_layers: ``E``, how many layers are run before the final norm.

    Raises:
        ValueError: There are not that many, or nothing would be skipped; or it is a target of another kind.
    """
    model = target.model
    if not isinstance(model, DecoderTarget):
        raise ValueError(f"{type(model).__name__} is not a target whose layers can be skipped; give a draft model")
    if not 1 <= num_layers < model.config.num_layers:
        raise ValueError(
            f"layer skip of {num_layers} layers: {target.name} has {model.config.num_layers}, so give 1 to "
            f"{model.config.num_layers - 1}"
        )
    config = dataclasses.replace(model.config, layers=model.config.layers[:num_layers])
    blocks = {index: target.params["blocks"][index] for index in range(num_layers)}
    return LoadedDrafter(
        DraftModel(DecoderTarget(config, model.precision)),
        {**target.params, "blocks": blocks},
        f"layer-skip={num_layers}",
        f"layer skip ({num_layers} of {model.config.num_layers} layers)",
    )
