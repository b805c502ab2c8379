"""How likely a drafted token is to be accepted, learnt while decoding from how sure the drafter was.

A logistic model: a node at depth ``k`` in which the drafter has confidence ``x`` is accepted, once its parent was, with
probability ``c_k = sigmoid(w f + b_k)``, ``f = logit(x)``. One slope serves all depths, each has its own intercept.
Whether a node was accepted is seen for every node that was verified and whose parent was accepted. Sums over these are
kept, and every few rounds one damped Newton step on them improves the model (as vLLM's ``acceptance_estimator`` does).

Nothing here touches the output: all of it follows from what is known before the next token is drafted.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

# At first a drafter is believed: c is its confidence. Texts are short, so vLLM's 0.5 and -0.2 cost more than they save.
SLOPE, INTERCEPT = 1.0, 0.0
# A step counts in full only once many more outcomes than these were seen: the slope holds for any text (50, as in
# vLLM), intercepts follow the one that is being written.
RIDGE, DAMPING_SLOPE, DAMPING_INTERCEPT = 1e-3, 50.0, 10.0
_LARGEST = 16.0  # a logit; float32 knows no probability nearer to 1
_USUAL, _MEMORY = 0.7, 0.25  # of a depth never drafted, and the share of the latest round


@struct.dataclass(kw_only=True)
class Calibration:
    """The model and what it is learnt from; every leaf leads with ``B``, so that rows can be taken and put in.

    Rows that started together hold the same model. One that joins later takes over what the others know at the next
    step, at which models count by how much their rows have seen since the last.

    Attributes:
        slope: ``[B]``, ``w``.
        intercept: ``[B K]``, ``b_k``.
        usual: ``[B K]``, a running mean of ``c_k``: what a depth counts for in a round that did not draft it.
        survival: ``[B K]``, a running mean of ``S_k = c_1 ... c_k``; 1 before the first round.
        sums: ``[B K 6]``, over outcomes ``y`` predicted as ``c``: their number, and the sums of ``y - c``,
            ``(y - c) f``, ``v``, ``v f`` and ``v f²`` with ``v = c (1 - c)``.
        rounds: ``[B]``, since the last step.
    """

    slope: Float[Array, " B"]
    intercept: Float[Array, "B K"]
    usual: Float[Array, "B K"]
    survival: Float[Array, "B K"]
    sums: Float[Array, "B K 6"]
    rounds: Int[Array, " B"]

    @classmethod
    def start(cls, batch: int, length: int) -> Calibration:
        """Before anything was seen, of drafts of up to ``length`` tokens; every token is expected to survive."""
        full = lambda value: jnp.full((batch, length), value, jnp.float32)
        return cls(
            slope=jnp.full((batch,), SLOPE, jnp.float32),
            intercept=full(INTERCEPT),
            usual=full(_USUAL),
            survival=full(1.0),
            sums=jnp.zeros((batch, length, 6), jnp.float32),
            rounds=jnp.zeros((batch,), jnp.int32),
        )

    def predicted(self, feature: Float[Array, "B k"]) -> Float[Array, "B k"]:
        """``c`` of the first ``k`` depths."""
        logit = self.slope[:, None] * feature + self.intercept[:, : feature.shape[1]]
        return 1.0 / (1.0 + jnp.exp(-logit))

    def expected(self, accepted: Float[Array, "B k"]) -> Float[Array, "B K"]:
        """``S`` of all depths from ``c`` of the first ``k``, those behind them being as likely as usual."""
        return jnp.cumprod(jnp.concatenate([accepted, self.usual[:, accepted.shape[1] :]], axis=1), axis=1)

    def observed(
        self,
        feature: Float[Array, "B k"],
        predicted: Float[Array, "B k"],
        verified: Bool[Array, "B k"],
        num_accepted: Int[Array, " B"],
    ) -> Calibration:
        """After a round.

        Args:
            feature: ``f`` of every drafted token.
            predicted: ``c`` as it was predicted for them.
            verified: Which of them were verified; none in a row that has finished.
            num_accepted: How many of these were accepted.
        """
        depth = jnp.arange(1, feature.shape[1] + 1, dtype=jnp.int32)
        seen = (verified & (depth <= num_accepted[:, None] + 1)).astype(jnp.float32)
        off = (depth <= num_accepted[:, None]).astype(jnp.float32) - predicted
        spread = predicted * (1.0 - predicted)
        one = (jnp.ones_like(off), off, off * feature, spread, spread * feature, spread * feature**2)
        new = seen[:, :, None] * jnp.stack(one, axis=-1)
        usual = self.usual[:, : feature.shape[1]]
        usual = jnp.where(verified, usual + _MEMORY * (predicted - usual), usual)
        return self.replace(  # type: ignore[attr-defined]
            sums=self.sums.at[:, : feature.shape[1]].add(new),
            usual=self.usual.at[:, : feature.shape[1]].set(usual),
            rounds=self.rounds + jnp.any(verified, axis=1).astype(jnp.int32),
        )

    def remembering(self, survival: Float[Array, "B K"], running: Bool[Array, " B"]) -> Calibration:
        """With the survivals of one more round in the running mean; one round alone says little of the next."""
        new = self.survival + _MEMORY * (survival - self.survival)
        return self.replace(survival=jnp.where(running[:, None], new, self.survival))  # type: ignore[attr-defined]

    def improved(self) -> Calibration:
        """One damped Newton step on the outcomes of all rows, whose sums then start anew.

        The Hessian is an arrowhead, ``w`` against every ``b_k`` and these not against each other, so the step is a
        quotient: ``dw = (g_w - Σ h_k g_k / v_k) / (h_w - Σ h_k² / v_k)`` and ``db_k = (g_k - h_k dw) / v_k``.
        """
        count, off, off_f, spread, spread_f, spread_ff = jnp.moveaxis(jnp.sum(self.sums, axis=0), -1, 0)
        spread = spread + RIDGE
        corner = jnp.sum(spread_ff) + RIDGE - jnp.sum(spread_f**2 / spread)
        slope = (jnp.sum(off_f) - jnp.sum(spread_f * off / spread)) / corner
        intercept = (off - spread_f * slope) / spread
        total = jnp.sum(count)
        slope = slope * total / (total + DAMPING_SLOPE)
        intercept = intercept * count / (count + DAMPING_INTERCEPT)

        weight = jnp.sum(self.sums[:, :, 0], axis=1) / jnp.maximum(total, 1.0)
        mean = lambda leaf: jnp.tensordot(weight, leaf, axes=1)
        # A step that is no number, or of nothing seen, is none.
        sound = (total > 0) & jnp.isfinite(slope) & jnp.all(jnp.isfinite(intercept))
        return self.replace(  # type: ignore[attr-defined]
            slope=jnp.where(sound, jnp.maximum(mean(self.slope) + slope, 0.0), self.slope),
            intercept=jnp.where(sound, mean(self.intercept) + intercept, self.intercept),
            sums=jnp.zeros_like(self.sums),
            rounds=jnp.zeros_like(self.rounds),
        )


def feature_of(confidence: Float[Array, "B k"] | None, like: Bool[Array, "B k"]) -> Float[Array, "B k"]:
    """``f = logit(confidence)``; 0 for a drafter without an opinion, of which the intercepts alone are learnt."""
    if confidence is None:
        return jnp.zeros(like.shape, jnp.float32)
    logit = jnp.log(confidence) - jnp.log1p(-confidence)
    return jnp.clip(jnp.nan_to_num(logit, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST), -_LARGEST, _LARGEST)
