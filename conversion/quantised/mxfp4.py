"""``quant_method: mxfp4``, as gpt-oss is published: experts in four bits, with an exponent for 32 inputs."""

from __future__ import annotations

import functools

from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised.decoding import Scheme, mxfp4
from eagle3_jax.conversion.quantised.format import Format, Layout


def read(fields: Fields) -> Format:
    """The format, from its ``quantization_config``."""
    return Format(
        words="mxfp4, an exponent for 32 inputs of an output",
        layouts=(Layout("_scales", "_blocks", "", functools.partial(mxfp4, scheme=Scheme("block"))),),
        dense=fields.words("modules_to_not_convert"),
        dense_field="modules_to_not_convert",
    )
