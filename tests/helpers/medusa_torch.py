"""Medusa heads written again in PyTorch, with tensor names of FasterDecoding's modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


class ResBlock(nn.Module):
    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


def random_heads(
    width: int,
    vocab: int,
    *,
    heads: int = 3,
    layers: int = 1,
    bias: bool = True,
    repeated: bool = False,
    seed: int = 0,
) -> nn.ModuleList:
    """Heads as the authors' code builds them.

    Of distinct blocks, or of one block that is run several times (``repeated``).
    """
    torch.manual_seed(seed)
    modules = []
    for _ in range(heads):
        blocks = (
            [ResBlock(width, bias)] * layers
            if repeated
            else [ResBlock(width, bias) for _ in range(layers)]
        )
        modules.append(nn.Sequential(*blocks, nn.Linear(width, vocab, bias=False)))
    return nn.ModuleList(modules)


def logits_of(heads: nn.ModuleList, state: Any) -> np.ndarray:
    """Returns the logits ``[*rows K V]`` of all heads."""
    with torch.no_grad():
        x = torch.tensor(np.asarray(state, np.float32))
        return torch.stack([head(x) for head in heads], dim=-2).numpy()


def tensors_of(heads: nn.ModuleList) -> dict[str, np.ndarray]:
    """Returns tensors by name: ``{head}.{layer}.linear.weight`` and ``{head}.{layers}.weight``."""
    return {name: value.detach().numpy() for name, value in heads.state_dict().items()}


def write_official(
    directory: Path, heads: nn.ModuleList, *, suffix: str = "safetensors", **config: Any
) -> Path:
    """Writes a directory as FasterDecoding's training does."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    values = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": len(heads[0]) - 1,  # type: ignore[arg-type]
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "transformers_version": "4.34.1",
    }
    (directory / "config.json").write_text(
        json.dumps({k: v for k, v in {**values, **config}.items() if v is not None})
    )
    state = {name: value.clone().contiguous() for name, value in heads.state_dict().items()}
    if suffix == "safetensors":
        save_file(state, directory / "medusa_lm_head.safetensors")
    else:
        torch.save(state, directory / f"medusa_lm_head.{suffix}")
    return directory
