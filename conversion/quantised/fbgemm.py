"""``quant_method: fbgemm_fp8``, as Meta publishes: E4M3 with a scale for every output, stacked experts too."""

from __future__ import annotations

import functools

from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised.arrays import E4M3
from eagle3_jax.conversion.quantised.decoding import Scheme, fused_experts, scaled
from eagle3_jax.conversion.quantised.format import Format, Layout


def read(fields: Fields) -> Format:
    """The format, from its ``quantization_config``."""
    linear = functools.partial(scaled, scheme=Scheme("channel"), dtype=E4M3)
    stacked = functools.partial(fused_experts, scheme=Scheme("channel"))
    return Format(
        words="fp8 of fbgemm, a scale for every output",
        layouts=(
            Layout(".weight_scale", ".weight", ".weight", linear),
            Layout("_proj_scale", "_proj", "_proj", stacked),
        ),
        dense=fields.words("modules_to_not_convert"),
        dense_field="modules_to_not_convert",
        beside=(r".*\.(input_scale_ub|input_scale)",),
    )
