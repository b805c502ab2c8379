"""Tiny DFlash2 drafters on disk."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from block_heads import BlockHead
from checkpoints import drawing


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolvedHead(BlockHead):
    """The options of a random DFlash2 drafter, in the layout of z-lab."""

    taps: int = 2
    group: int = 8
    selector_rank: int = 6
    candidates: int = 5
    window: int = 4
    sliding: tuple[bool, ...] = ()
    scales: tuple[tuple[str, float], ...] = ()

    def tensors(self) -> dict[str, np.ndarray]:
        draw = drawing(np.random.default_rng(self.seed + 1), self.dtype)
        out = super().tensors()
        for layer in range(self.layers):
            for name in ("attention_conv", "mlp_conv"):
                kernels = 2 * self.taps * self.width // self.group
                out[f"layers.{layer}.{name}.base_kernel"] = draw(2, self.taps, self.width, around=1)
                out[f"layers.{layer}.{name}.kernel_projection.weight"] = draw(kernels, self.width)
        for name in ("predecessor", "successor"):
            out[f"candidate_selector.{name}_codebook"] = 3 * draw(self.vocab, self.selector_rank)
        out["candidate_selector.hidden_projection.weight"] = draw(self.selector_rank, self.width)
        return out

    def config(self, dialect: str = "vllm") -> dict[str, Any]:
        values = super().config(dialect)
        parts = {
            "conv_kernel_size": self.taps,
            "conv_group_size": self.group,
            "selector_rank": self.selector_rank,
            "selector_top_k": self.candidates,
        }
        slides = {}
        if any(self.sliding):
            kinds = [("full", "sliding")[slides] + "_attention" for slides in self.sliding]
            slides = {"layer_types": kinds, "sliding_window": self.window}
            slides["use_sliding_window"] = True

        if dialect == "speculators":
            values |= {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2"}
            values["transformer_layer_config"] |= slides
            return values | parts | {"sliding_window_non_causal": not self.causal}

        # The published files have the size of the block among these fields.
        parts |= {"block_size": values.pop("block_size"), **values["dflash_config"]}
        values |= {"architectures": ["DFlash2DraftModel"], "is_causal": parts.pop("causal", False)}
        return values | slides | {"dflash_config": parts | dict(self.scales)}
