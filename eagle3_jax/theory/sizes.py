"""How large models are, from their descriptions alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

from eagle3_jax.models.config import DecoderConfig, Eagle3Config, LayerConfig
from eagle3_jax.theory.layer_sizes import LayerSizes, layer_sizes, share_of_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters by what happens to them: which are quantised, divided between GPUs, or read in every step.

    Attributes:
        query_output: Query and output projections of attention, and those of recurrences.
        key_value: Key and value projections, or those that lead to latents.
        mlp: Gate, up and down projections that every token goes through.
        fusion: The projection that fuses target features, in a draft head.
        vectors: Norms and biases, and whatever else is small.
        embedding: The table that tokens are looked up in; 0 where it is the output projection, or another model's.
        output: The projection to logits.
        experts: Those of all experts together, of which a token goes through a few.
        routers: What chooses them.
    """

    query_output: int
    key_value: int
    mlp: int
    fusion: int
    vectors: int
    embedding: int
    output: int
    experts: int = 0
    routers: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


class LayerRun(NamedTuple):
    """Equal layers that follow each other.

    Attributes:
        layer: Each of them.
        count: How many there are.
        sizes: Of all of them together. A layer with a window counts like any other, since its buffers are as long.
    """

    layer: LayerConfig
    count: int
    sizes: LayerSizes

    def experts_read(self, tokens: int | None) -> float:
        """Parameters of the experts that so many tokens go through; of all for ``None``."""
        return self.sizes.experts * (1.0 if tokens is None else share_of_experts(self.layer.mlp, tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterSizes:
    """A drafter of any other method, as far as plans ask; EAGLE-3's follow from its description alone.

    Attributes:
        method: What people call it.
        runs: Its layers; those that keep keys and values.
        read: What a pass reads, borrowed parameters included; ``fusion`` in every pass.
        owned: What it adds to the target's memory.
        num_features: ``A``, features that it is fed.
        target_width: Of the target that it drafts for.
        max_positions: Longest sequence that it was built for.
        is_parallel: Whether one pass gives the whole draft.
        longest: The most tokens of a draft; ``None`` for any number.
    """

    method: str
    runs: tuple[LayerRun, ...]
    read: Parameters
    owned: Parameters
    num_features: int
    target_width: int
    max_positions: int
    is_parallel: bool
    longest: int | None = None


Model = DecoderConfig | Eagle3Config | DrafterSizes
NOTHING = Parameters(query_output=0, key_value=0, mlp=0, fusion=0, vectors=0, embedding=0, output=0)


@functools.lru_cache(maxsize=64)
def layer_runs(model: Model) -> tuple[LayerRun, ...]:
    """The layers of a target or a drafter, equal neighbours together; plans ask thousands of times."""
    return tuple(model.runs if isinstance(model, DrafterSizes) else runs_of(model))


def runs_of(model: Any) -> list[LayerRun]:
    """The same of any description with ``layers`` and a ``width``.

    The first layer of an EAGLE-3 head reads the embedding beside the fused features, so that its query, key and value
    projections are ``2·D`` wide and two norms stand before them (Li et al., 2025, arXiv 2503.01840, section 3).
    """
    runs, layers = [], model.layers
    if isinstance(model, Eagle3Config):
        runs.append(_run(layers[0], 1, inputs=2 * model.width, width=model.width))
        layers = layers[1:]
    for layer, equal in itertools.groupby(layers):
        runs.append(_run(layer, len(list(equal)), inputs=model.width, width=model.width))
    return runs


def _run(layer: LayerConfig, count: int, *, inputs: int, width: int) -> LayerRun:
    return LayerRun(layer, count, layer_sizes(layer, inputs=inputs, width=width).times(count))


def added(model: Model) -> Parameters:
    """What a drafter has beside its target: all but what it borrows."""
    return model.owned if isinstance(model, DrafterSizes) else parameters(model)


def method_of(head: Eagle3Config | DrafterSizes) -> str:
    """What drafts, in words."""
    return head.method if isinstance(head, DrafterSizes) else "EAGLE-3 head"


def num_features(model: Model) -> int:
    """Target features that a drafter is fed."""
    if isinstance(model, DrafterSizes):
        return model.num_features
    return len(model.aux_layers) if isinstance(model, Eagle3Config) else 0


@functools.lru_cache(maxsize=64)
def parameters(model: Model) -> Parameters:
    """Parameters of a target, or of a head without the embedding that it shares with its target.

    Of ``L`` equal layers without biases: ``L·(2·D·heads·H + 2·D·C·H + 3·D·mlp)`` in the layers' matrices, ``2·V·D`` in
    the tables (``V·D`` if tied), and the norms; a head has ``A·D_target·D`` for the fusion and ``W·D`` for the output.
    """
    if isinstance(model, DrafterSizes):
        return model.read
    runs, width = layer_runs(model), model.width
    layers = sum((run.sizes for run in runs), LayerSizes())
    vectors = layers.vectors + width
    if isinstance(model, Eagle3Config):
        features = len(model.aux_layers) * model.target_width
        if model.fc_norm or model.norm_before_fc:
            vectors += features
        fusion, embedding, output = features * width, 0, model.draft_vocab_size * width
    else:
        output = model.vocab_size * width
        fusion, embedding = 0, 0 if model.tie_embeddings else output
    return Parameters(
        query_output=layers.query_output,
        key_value=layers.key_value,
        mlp=layers.mlp,
        experts=layers.experts,
        routers=layers.routers,
        fusion=fusion,
        vectors=vectors,
        embedding=embedding,
        output=output,
    )


def active_parameters(model: Model) -> int:
    """Parameters that one token is multiplied with: ``k`` experts of ``E``, and not the table it is looked up in.

    Publishers differ in what they count; some add the embedding.
    """
    of = parameters(model)
    unused = sum(run.sizes.experts - run.experts_read(1) for run in layer_runs(model))
    return of.total - of.embedding - round(unused)


def has_experts(model: Model) -> bool:
    """Whether any of its layers chooses between experts."""
    return any(run.sizes.experts for run in layer_runs(model))


def cache_values_per_token(model: Model) -> int:
    """Numbers that one token adds to the caches of all layers, ``Σ 2·C·H``; ``Σ (r + dr)`` where they hold latents."""
    return sum(run.sizes.cache_values_per_token for run in layer_runs(model))
