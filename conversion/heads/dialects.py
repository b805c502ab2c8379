"""In which layout a head of the EAGLE line is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def dialect_of(values: Mapping[str, Any], names: Iterable[str]) -> str:
    """Which project's conventions a head follows."""
    if "speculators_model_type" in values or "transformer_layer_config" in values:
        return "speculators"
    if any("layers.0." in name for name in names) and isinstance(values.get("eagle_config"), dict):
        return "modelopt"
    architecture = " ".join(map(str, values.get("architectures") or ()))
    if "Eagle3" not in architecture:
        return "eagle"
    # Only vLLM reads all of them; files for SGLang name those that are set.
    flags = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    return "vllm" if all(flag in values for flag in flags) else "sglang"
