"""Training of Medusa heads before a frozen target (Cai et al., 2024, section 2.2.1: Medusa-1).

Head ``k`` (from 0) learns the token ``x_{t+2+k}`` of the text from the target's final state ``h_t``::

    loss = Σ_k decay^k · mean_t CE(logits_k(h_t), x_{t+2+k})

with a decay of 0.8. The paper counts heads from 1, which scales the whole loss. Labels are the tokens of the text, so
the heads learn the target best from text that it wrote itself. The heads start as the target's own output layer: their
residual blocks are zero and their output projections copies of its output matrix.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.drafters.medusa import MedusaConfig, MedusaDrafter
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.models.decoder import DecoderTarget, causal_mask
from eagle3_jax.models.functional import Params
from eagle3_jax.training.ttt import Frozen, TTTBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """What heads are trained, and how they are weighted.

    Attributes:
        num_heads: ``K``.
        num_layers: Residual blocks of each.
        shared_output: Whether all share one output projection, which makes them small.
        decay: Head ``k`` weighs ``decay^k``; the authors' code weighs all alike.
    """

    num_heads: int = 5
    num_layers: int = 1
    shared_output: bool = False
    decay: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is {self.decay}; expected a weight in (0, 1]")


def heads_of(target: DecoderConfig, draft_vocab_size: int, options: MedusaOptions = MedusaOptions()) -> MedusaConfig:
    """Heads for a target, with biases as the authors' have."""
    return MedusaConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_width=target.width,
        num_target_layers=target.num_layers,
        num_heads=options.num_heads,
        num_layers=options.num_layers,
        bias=True,
        shared_output=options.shared_output,
    )


def initial_heads(
    drafter: MedusaDrafter, unembedding: Float[Array, "D V"], draft_to_target: Int[Array, " W"] | None
) -> Params:
    """Heads that all say what the target's output layer says: zero blocks and copies of its output matrix."""
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), drafter.param_shapes())
    kernel = jnp.asarray(unembedding if draft_to_target is None else unembedding[:, draft_to_target], jnp.float32)
    return {"blocks": zero["blocks"], "outputs": {head: {"kernel": kernel} for head in zero["outputs"]}}


def medusa_loss(
    drafter: MedusaDrafter,
    target: DecoderTarget,
    head_params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    options: MedusaOptions = MedusaOptions(),
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss, differentiable in ``head_params`` alone.

    Args:
        drafter: The heads' configuration and precision.
        target: The target, whose states are read.
        head_params: What is trained.
        frozen: What is not.
        batch: Sequences; positions are counted from the first column.
        options: Weights of the heads.

    Returns:
        The loss, and for every head ``k`` ``loss_k``, its unweighted term, and ``accuracy_k``, the share of rows where
        its likeliest token is that of the text; and ``simulated_tau``, tokens per target forward of a greedy chain on
        this text: 1 plus, for every head, the share of rows where it and all before it hit. A token outside the draft
        vocabulary has no loss and is a miss.
    """
    frozen = lax.stop_gradient(frozen)
    size = batch.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), batch.tokens.shape)
    seen = causal_mask(size) & batch.attention_mask[:, None, :]
    states = lax.stop_gradient(target(frozen["target_params"], batch.tokens, positions, seen).final)
    to_draft = _draft_ids(frozen, drafter.config)
    heads = drafter.bound({"head": head_params})

    metrics: dict[str, Float[Array, ""]] = {}
    loss, tau = jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32)
    alive = chain = jnp.ones(batch.tokens.shape, jnp.bool_)
    for head in range(drafter.config.num_heads):
        label = to_draft[_later(batch.tokens, head + 2)]
        labelled = _later(batch.loss_mask, head) & _later(batch.attention_mask, head + 2)
        scores = heads.logits(states, head)
        cross_entropy = jax.nn.logsumexp(scores, axis=-1) - _at(scores, jnp.maximum(label, 0))
        term = _share(cross_entropy, labelled & (label >= 0))
        loss = loss + options.decay**head * term

        hit = jnp.argmax(lax.stop_gradient(scores), axis=-1) == label
        chain, alive = chain & labelled, alive & hit
        tau = tau + _share(alive, chain)
        metrics |= {f"loss_{head}": term, f"accuracy_{head}": _share(hit, labelled)}
    return loss, {**metrics, "simulated_tau": tau}


def _draft_ids(frozen: Frozen, config: MedusaConfig) -> Int[Array, " V"]:
    """Draft id of every target id, -1 where the heads have none."""
    ids = frozen["draft_to_target"]
    return jnp.full((config.vocab_size,), -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))


def _later(x: Array, shift: int) -> Array:
    """``x`` at ``t + shift`` in column ``t``; zero and False behind the end."""
    return jnp.pad(x, ((0, 0), (0, shift)))[:, shift:]


def _at(scores: Float[Array, "B T W"], index: Int[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.take_along_axis(scores, index[..., None], axis=-1)[..., 0]


def _share(values: Array, mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Mean over the masked rows; 0 when there are none."""
    total = jnp.sum(jnp.where(mask, values.astype(jnp.float32), 0.0))
    return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
