"""The training-time test of EAGLE-3: a head learns on the inputs that it will meet while drafting.

At inference the head reads the target's features only once and its own output afterwards. Training
therefore unrolls the head ``K`` times (Li et al., 2025, arXiv 2503.01840, section 3.2; HASS, Zhang
et al., 2024). At step ``k``, row ``t`` is the draft that follows the verified prefix ``x_0 .. x_t``
and is ``k`` tokens deep:

=================  =====================================================================
token              ``x_{t+1+k}``, from the data and not from the head
features           ``fc(f_t)`` at step 0, then the head's own output of step ``k - 1``
rotary position    ``t + k``
attention          keys of step 0 at ``j <= t``, keys of steps ``1 .. k`` at ``t`` only; within
                   the window, if any
label              ``y_{t+1+k}``, the target's distribution after ``x_{t+1+k}``
=================  =====================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import KeyValue
from eagle3_jax.drafters.base import NetworkDrafter
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.attention import Segment
from eagle3_jax.models.context import BlockContext, Span, spans_of
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import (
    Frozen,
    Loss,
    TTTBatch,
    draft_ids,
    extend,
    final_states,
    greedy_tau,
    later,
    share,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TTTConfig:
    """Weights of the steps, and which rows count. Defaults are those of the official training code.

    Rows whose most likely target token is outside the draft vocabulary have no loss.
    """

    num_steps: int = 7  #: ``K``; the official code unrolls 7 steps, the paper 5.
    decay: float = 0.8  #: Step ``k`` weighs ``decay^k``.
    #: Divisor of the sum over rows: ``all`` rows ``B·T``, masked or not, or the ``supervised``
    #: ones. ``all`` also keeps a flaw of the official code: supervised rows whose label is past the
    #: end of the sequence are pulled towards the uniform distribution. ``supervised`` leaves them
    #: out.
    denominator: Literal["all", "supervised"] = "all"
    #: Standard deviation of Gaussian noise on each feature, as a part of the feature's root mean
    #: square. Without it a head learns few texts by heart. It needs the key of the batch. (EAGLE-1,
    #: section 3.2, has uniform noise.)
    noise: float = 0.0


class Teacher(NamedTuple):
    """The target's distributions, restricted to the draft vocabulary.

    They have ``S = T + K`` positions: after the last token the target's logits count as zero, as in
    the official code.
    """

    probs: Float[Array, "B S W"]  #: Softmax over the draft vocabulary.
    mass: Float[Array, "B S"]  #: Probability of the draft vocabulary under the full softmax.
    #: Draft id of the most likely of all target tokens; -1 if the head cannot propose it.
    best: Int[Array, "B S"]

    @property
    def full_probs(self) -> Float[Array, "*rows W"]:
        """Probabilities of the draft tokens under the full softmax."""
        return self.probs * self.mass[..., None]


def ttt_loss(
    drafter: Eagle3Drafter,
    target: DecoderTarget,
    head_params: Params,
    frozen: Frozen,
    batch: TTTBatch,
    config: TTTConfig = TTTConfig(),
) -> Loss:
    """Returns ``Σ_k decay^k · Σ_rows CE(p, q_k) / denominator``.

    It is differentiable in ``head_params`` only.

    Args:
        drafter: The head's configuration and precision.
        target: The target, which the head learns to predict.
        head_params: Parameters of the head, which are trained.
        frozen: Arrays that are not trained.
        batch: Sequences to learn from; positions are counted from the first column.
        config: Number of steps, their weights and the denominator.

    Returns:
        The loss, and for every step ``k``

        - ``loss_k``: its unweighted term of the loss;
        - ``accuracy_k``: rows whose argmax is the target's, over supervised rows, as the official
          code counts;
        - ``acceptance_k``: expected probability ``Σ_v min(p_v, q_v)`` that a sampled draft token is
          accepted, over supervised rows that have a label (Leviathan et al., 2023);

        and ``simulated_tau``, tokens per target forward of a greedy chain of ``K`` drafts on this
        text. A target token that is outside the draft vocabulary is a miss.
    """
    frozen = lax.stop_gradient(frozen)
    num_steps = config.num_steps
    teacher, features = teacher_forward(drafter, target, frozen, batch, num_steps)

    if config.noise and batch.key is not None:
        size = jnp.sqrt(jnp.mean(jnp.square(features), axis=-1, keepdims=True))
        noise = jax.random.normal(batch.key, features.shape, features.dtype)
        features = features + config.noise * size * noise

    output = borrowed_output(drafter, target, frozen)
    logits = unroll(drafter, head_params, frozen["embedding"], features, batch, num_steps, output)
    return loss_and_metrics(teacher, logits, batch, config)


def loss_and_metrics(
    teacher: Teacher, logits: Sequence[Float[Array, "B T W"]], batch: TTTBatch, config: TTTConfig
) -> Loss:
    """Returns the loss and the metrics of :func:`ttt_loss`, from the draft logits of every step."""
    size = batch.tokens.shape[1]
    metrics: dict[str, Float[Array, ""]] = {}
    loss = jnp.zeros((), jnp.float32)
    chain = []
    for step, scores in enumerate(logits):
        label = Teacher(*(_from(leaf, step + 1, size) for leaf in teacher))
        labelled = labelled_rows(batch, step)
        counted = later(batch.loss_mask, step) if config.denominator == "all" else labelled
        trained = counted & (label.best >= 0)

        # CE(p, q) = log Σ exp(z) - Σ p z, of logits z.
        log_norm = jax.nn.logsumexp(scores, axis=-1)
        cross_entropy = log_norm - jnp.sum(label.probs * scores, axis=-1)
        divisor = _count(jnp.ones_like(counted) if config.denominator == "all" else counted)
        term = jnp.sum(jnp.where(trained, cross_entropy, 0.0)) / jnp.maximum(divisor, 1.0)
        loss = loss + config.decay**step * term

        scores, log_norm = lax.stop_gradient((scores, log_norm))
        hit = jnp.argmax(scores, axis=-1) == label.best
        q = jnp.exp(scores - log_norm[..., None])
        overlap = jnp.minimum(label.full_probs, q).sum(-1)
        chain.append((hit, labelled))
        metrics[f"loss_{step}"] = term
        metrics[f"accuracy_{step}"] = _count(hit & counted) / (_count(counted) + 1e-6)
        metrics[f"acceptance_{step}"] = share(overlap, labelled)
    return loss, {**metrics, "simulated_tau": greedy_tau(chain)}


def teacher_forward(
    drafter: NetworkDrafter, target: DecoderTarget, frozen: Frozen, batch: TTTBatch, num_steps: int
) -> tuple[Teacher, Float[Array, "B T A Dt"]]:
    """Returns the target's distributions over the draft vocabulary, and the head's features.

    The batch holds them (``known``); otherwise one forward of the target computes them.
    """
    params = frozen["target_params"]
    draft_to_target = frozen["draft_to_target"]
    to_draft = draft_ids(frozen, target.vocab_size)

    if batch.known is None:
        output = target(
            params, batch.tokens, batch.positions, batch.seen, aux_layers=drafter.aux_layers
        )
        features = output.features
        logits = target.unembed(params, output.final)
        drafted = logits if draft_to_target is None else logits[..., draft_to_target]
        likeliest = jnp.argmax(logits, axis=-1)
        log_norm_of_all = jax.nn.logsumexp(logits, axis=-1)
    else:
        features = jnp.asarray(batch.known.features, target.precision.activations)
        drafted = _unembed_some(
            target, params, final_states(target, params, batch), draft_to_target
        )
        likeliest = jnp.asarray(batch.known.likeliest)
        log_norm_of_all = jnp.asarray(batch.known.log_norm)

    log_norm = jax.nn.logsumexp(drafted, axis=-1)
    draft_size = drafted.shape[-1]
    probs = jnp.exp(drafted - log_norm[..., None])
    mass = jnp.exp(log_norm - log_norm_of_all)

    # Past the end the logits count as zero: distributions are uniform, and the first token is best.
    teacher = Teacher(
        probs=extend(probs, num_steps, 1.0 / draft_size),
        mass=extend(mass, num_steps, draft_size / target.vocab_size),
        best=extend(to_draft[likeliest], num_steps, to_draft[0]),
    )
    return teacher, features


def _unembed_some(
    target: DecoderTarget,
    params: Params,
    final: Float[Array, "B T D"],
    tokens: Int[Array, " W"] | None,
) -> Float[Array, "B T W"]:
    """Returns the target's logits of some tokens, as if it had no others; ``None``: of all."""
    if tokens is not None and target.config.tie_embeddings:
        params = {**params, "embedding": params["embedding"][tokens]}
    elif tokens is not None:
        head = {name: leaf[..., tokens] for name, leaf in params["head"].items()}
        params = {**params, "head": head}
    return target.unembed(params, final)


def borrowed_output(
    drafter: Eagle3Drafter, target: DecoderTarget, frozen: Frozen
) -> Float[Array, "D V"] | None:
    """Returns the target's output matrix for heads that use it; ``None`` for others."""
    return target.tables(frozen["target_params"]).unembedding if drafter.borrows_output else None


def unroll(
    drafter: Eagle3Drafter,
    head_params: Params,
    embedding: Float[Array, "V D"],
    features: Float[Array, "B T A Dt"],
    batch: TTTBatch,
    num_steps: int,
    output: Float[Array, "D V"] | None = None,
) -> list[Float[Array, "B T W"]]:
    """Returns the draft logits of every step; the table above says what each row attends to."""
    params = {"head": head_params, "embedding": embedding}
    if output is not None:
        params["output"] = output
    head = drafter.bind(params)
    streams = unroll_head(drafter, params, features, batch, num_steps)
    return [drafter.logits(params, head, stream) for stream in streams]


def unroll_head(
    drafter: Eagle3Drafter,
    params: Params,
    features: Float[Array, "B T A Dt"],
    batch: TTTBatch,
    num_steps: int,
) -> list[Float[Array, "B T D"]]:
    """Returns the head's output of every step, which is its input in the next step."""
    head = drafter.bind(params)
    seen = batch.seen
    positions = batch.positions

    stream = head.fuse(features)
    streams = []
    written: list[tuple[KeyValue, ...]] = []
    for step in range(num_steps):
        spans = enumerate(spans_of(drafter.config.layers))
        contexts = [
            _context([kv[layer] for kv in written], seen, positions, span) for layer, span in spans
        ]

        embedded = drafter.embed(params, later(batch.tokens, step + 1), positions + step)
        stream, cached = head(embedded, stream, positions + step, contexts)
        # Latents are keys and values at once.
        layers = (kv if isinstance(kv, KeyValue) else KeyValue(kv, kv) for kv in cached)
        written.append(tuple(layers))
        streams.append(stream)
    return streams


def labelled_rows(batch: TTTBatch, step: int) -> Bool[Array, "B T"]:
    """Returns the rows of a step that are worth learning and have a label.

    The last token that they read is text.
    """
    return later(batch.loss_mask, step) & later(batch.attention_mask, step + 1)


def _context(
    written: list[KeyValue], seen: Bool[Array, "B T T"], positions: Int[Array, "B T"], span: Span
) -> BlockContext:
    """Returns what a step attends to in a layer.

    Step 0 is verified text with a causal mask. The keys of each later step are guesses, which only
    their own row sees. Row ``t`` of step ``k`` has position ``t + k``, and so have its keys: a
    window moves with the steps.
    """
    step = len(written)
    seen = span.limit(seen, positions, positions + step)
    if not written:
        return BlockContext(mask=seen)
    first, *later = written
    if span.window is not None:
        later = later[max(step - span.window, 0) :]
    return BlockContext(past=(Segment(first, seen),), at_index=later)


def _from(x: Array, start: int, size: int) -> Array:
    """Returns columns ``start .. start + size - 1`` of ``x``."""
    return x[:, start : start + size]


def _count(mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    return jnp.sum(mask, dtype=jnp.float32)
