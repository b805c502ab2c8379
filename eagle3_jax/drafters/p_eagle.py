"""P-EAGLE: an EAGLE-3 head that drafts all its tokens in one forward (AWS, 2026, arXiv 2602.01469).

The head is EAGLE-3's with several layers. It reads the target's features ``f_t`` with the *next*
token ``x_{t+1}``, as EAGLE-3 does. For further tokens EAGLE-3 reads the token just drafted and its
own output. P-EAGLE reads a mask token ``m`` and a learned state ``h`` instead. With ``n`` positions
known and ``x_n`` just chosen, one forward over the rows

=========  ==============  ==================  =============
row        token           features            position
=========  ==============  ==================  =============
true pair  ``x_n``         ``fc(f_{n-1})``     ``n - 1``
mask 1     ``m``           ``fc(h)``           ``n``
...        ...             ...                 ...
mask K-1   ``m``           ``fc(h)``           ``n + K - 2``
=========  ==============  ==================  =============

gives the distributions of the ``K`` next tokens, row by row. Each row attends to the committed
pairs, the true pair and the mask rows before it. The true pair runs when it is observed, with all
other new pairs, and its output is kept in the state. The mask rows run when a draft is proposed,
and find the true pair in the cache.

No distribution depends on a token of the same draft. So sampling each token alone is sampling from
their product, and a tree costs no more forwards than a chain. For the same reason the tokens of a
draft can be inconsistent: acceptance falls faster with depth and with temperature than EAGLE-3's. A
draft may be longer than the head was trained for, but the further tokens are rarely accepted.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from eagle3_jax.devices.kernels import indices
from eagle3_jax.drafters.eagle3 import Eagle3Drafter, Eagle3Head, FeedbackState
from eagle3_jax.drafters.parallel import parallel_inputs
from eagle3_jax.models.config import Eagle3Config
from eagle3_jax.models.context import attention_contexts
from eagle3_jax.models.functional import Params
from eagle3_jax.models.layers import Precision
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """A P-EAGLE head.

    Attributes:
        mask_token_id: ``m``, a token that no text contains; its embedding replaces that of the
            unknown token.
    """

    mask_token_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}; expected a token of the vocabulary, 0 to"
                f" {self.vocab_size - 1}"
            )


class PEagleHead(Eagle3Head):
    """The network: EAGLE-3's, and the learned state of a position whose features are not known."""

    def __init__(self, config: PEagleConfig, *, precision: Precision, rngs: nnx.Rngs):
        super().__init__(config, precision=precision, rngs=rngs)
        size = len(config.aux_layers) * config.target_width
        self.mask_hidden = nnx.Param(jax.random.normal(rngs.params(), (size,), jnp.float32))

    def fused_mask(self) -> Float[Array, "1 1 D"]:
        """Returns ``fc(h)``: the learned state is fused as features are."""
        layers = len(self.config.aux_layers)
        features = self.mask_hidden[...].reshape(1, 1, layers, -1)
        return self.fuse(features)


@dataclasses.dataclass(frozen=True)
class PEagleDrafter(Eagle3Drafter):
    """Drafts a chain or a tree with a P-EAGLE head.

    It observes as EAGLE-3 does and feeds nothing back. Parameters are a dictionary: ``head`` (the
    network), ``embedding [V D]`` (mostly the head's own) and ``draft_to_target [W]`` (absolute
    ids).
    """

    network: ClassVar[type[nnx.Module]] = PEagleHead

    config: PEagleConfig

    def propose(
        self, params: Params, state: FeedbackState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Runs the mask rows after the committed pairs, and drafts from all distributions."""
        head = self.bind(params)
        cache = state.cache

        # The true pair gives the first token, each mask row one more.
        masks = self.max_depth - 1
        outputs = state.output[:, None]
        if masks:
            shape = (state.root.shape[0], masks)
            positions = cache.length[:, None] + indices(masks)[None, :]
            tokens = jnp.full(shape, self.config.mask_token_id, jnp.int32)
            stream = jnp.broadcast_to(head.fused_mask(), (*shape, self.config.width))
            past = attention_contexts(self.config.layers, causal_mask(masks), positions, cache)

            embedded = self.embed(params, tokens, positions)
            output, written = head(embedded, stream, positions, past)
            outputs = jnp.concatenate([outputs, output], axis=1)

            cache = cache.keep(written)

        logits = head.logits(outputs)
        draft_to_target = params.get("draft_to_target")
        inputs = parallel_inputs(
            state.root, logits, draft_to_target, self.config.vocab_size, keys, sampling
        )
        draft, _ = self.grow(inputs)
        return draft.replace(state=state.replace(cache=cache))
