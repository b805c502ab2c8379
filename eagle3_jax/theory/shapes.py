"""How large models are, from the numbers in their ``config.json`` alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense Llama-style decoder: grouped-query attention and a gated MLP in every layer.

    Attributes:
        name: For tables and messages.
        vocab_size: ``V``.
        width: ``D``, the residual stream.
        mlp_width: Inner width of the gated MLP.
        num_layers: ``L``.
        num_heads: Query heads.
        num_kv_heads: ``C``, key and value heads.
        head_dim: ``H``.
        tie_embeddings: Whether the output projection is the embedding table.
        qk_norm: Whether queries and keys are normalised per head (Qwen3): two vectors of ``H`` a layer.
        biases_per_layer: Bias parameters of one layer.
        max_positions: Longest sequence that the model was built for.
    """

    name: str
    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool = False
    qk_norm: bool = False
    biases_per_layer: int = 0
    max_positions: int = 131_072

    @property
    def parameters(self) -> Parameters:
        """Matrices ``L·(2·D·heads·H + 2·D·C·H + 3·D·mlp)``, tables ``2·V·D`` (``V·D`` if tied), and vectors."""
        norms = 2 * self.width + (2 * self.head_dim if self.qk_norm else 0) + self.biases_per_layer
        return Parameters(
            query_output=self.num_layers * 2 * self.width * self.num_heads * self.head_dim,
            key_value=self.num_layers * 2 * self.width * self.num_kv_heads * self.head_dim,
            mlp=self.num_layers * 3 * self.width * self.mlp_width,
            fusion=0,
            vectors=self.num_layers * norms + self.width,
            embedding=0 if self.tie_embeddings else self.vocab_size * self.width,
            output=self.vocab_size * self.width,
        )

    @property
    def cache_values_per_token(self) -> int:
        """Numbers that one token adds to the cache: a key and a value, ``2·L·C·H``."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadShape:
    """An EAGLE-3 draft head (Li et al., 2025, arXiv 2503.01840, section 3).

    Its first layer reads the token embedding beside the fused features, so that query, key and value projections are
    ``2·D`` wide; any further layer is an ordinary one. The embedding is the target's.

    Attributes:
        name: For tables and messages.
        width: ``D``.
        mlp_width: Inner width of the gated MLP.
        num_layers: The head's own layers; 1 in almost every published head.
        num_heads: Query heads.
        num_kv_heads: ``C``.
        head_dim: ``H``.
        draft_vocab_size: ``W``, rows of its output projection.
        target_width: Width of the target's features.
        num_aux_layers: ``A``, features fused into one.
        max_positions: Positions that the head was built for.
    """

    name: str
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    target_width: int
    num_layers: int = 1
    num_aux_layers: int = 3
    max_positions: int = 2048

    @property
    def max_draft_tokens(self) -> int:
        """Largest ``K``: the root and its chain need a position each."""
        return self.max_positions - 1

    @property
    def parameters(self) -> Parameters:
        """``A·D_target·D`` for the fusion, one layer with inputs of ``2·D``, and ``W·D`` for the output."""
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        inputs = self.width * (self.num_layers + 1)  # the first layer's are twice as wide
        return Parameters(
            query_output=inputs * heads + self.num_layers * heads * self.width,
            key_value=2 * inputs * kv,
            mlp=self.num_layers * 3 * self.width * self.mlp_width,
            fusion=self.num_aux_layers * self.target_width * self.width,
            vectors=(2 * self.num_layers + 2) * self.width,
            embedding=0,
            output=self.draft_vocab_size * self.width,
        )

    @property
    def cache_values_per_token(self) -> int:
        """Numbers that one token adds to the head's own cache: ``2·layers·C·H``."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters by what happens to them: which are quantised, divided between GPUs, or read in every step.

    Attributes:
        query_output: Query and output projections of attention.
        key_value: Key and value projections.
        mlp: Gate, up and down projections.
        fusion: The projection that fuses target features, in a draft head.
        vectors: Norms and biases.
        embedding: The table that tokens are looked up in; 0 where it is the output projection, or another model's.
        output: The projection to logits.
    """

    query_output: int
    key_value: int
    mlp: int
    fusion: int
    vectors: int
    embedding: int
    output: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))


def usual_head(target: ModelShape) -> HeadShape:
    """The head that most published ones are: one layer of the target's geometry and a draft vocabulary of 32,000."""
    return HeadShape(
        name=f"usual head for {target.name}",
        width=target.width,
        mlp_width=target.mlp_width,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        draft_vocab_size=min(32_000, target.vocab_size),
        target_width=target.width,
    )


def _llama(
    name: str,
    width: int,
    mlp_width: int,
    num_layers: int,
    num_heads: int,
    *,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    vocab_size: int = 128_256,
    tied: bool = False,
    max_positions: int = 131_072,
) -> ModelShape:
    return ModelShape(
        name=name,
        vocab_size=vocab_size,
        width=width,
        mlp_width=mlp_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tie_embeddings=tied,
        max_positions=max_positions,
    )


def _qwen3(name: str, width: int, mlp_width: int, num_layers: int, num_heads: int, *, tied: bool) -> ModelShape:
    return ModelShape(
        name=name,
        vocab_size=151_936,
        width=width,
        mlp_width=mlp_width,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        tie_embeddings=tied,
        qk_norm=True,
        max_positions=40_960,
    )


def _by_name(shapes: Iterable[ModelShape]) -> dict[str, ModelShape]:
    return {shape.name.lower(): shape for shape in shapes}


# From the published config.json of each; the counts that follow are checked against the published checkpoints.
KNOWN_MODELS = _by_name(
    [
        _llama("Llama-3.2-1B", 2048, 8192, 16, 32, head_dim=64, tied=True),
        _llama("Llama-3.2-3B", 3072, 8192, 28, 24, tied=True),
        _llama("Llama-3.1-8B", 4096, 14_336, 32, 32),
        _llama("Llama-3.3-70B", 8192, 28_672, 80, 64),
        _llama("Llama-3.1-405B", 16_384, 53_248, 126, 128),
        _llama("Vicuna-13B", 5120, 13_824, 40, 40, num_kv_heads=40, vocab_size=32_000, max_positions=4096),
        _qwen3("Qwen3-0.6B", 1024, 3072, 28, 16, tied=True),
        _qwen3("Qwen3-1.7B", 2048, 6144, 28, 16, tied=True),
        _qwen3("Qwen3-4B", 2560, 9728, 36, 32, tied=True),
        _qwen3("Qwen3-8B", 4096, 12_288, 36, 32, tied=False),
        _qwen3("Qwen3-14B", 5120, 17_408, 40, 40, tied=False),
        _qwen3("Qwen3-32B", 5120, 25_600, 64, 64, tied=False),
    ]
)
