"""What the numbers of a head's auxiliary layers count: layers that the residual stream enters, or leaves.

vLLM and this library mean the stream that enters layer ``i``. SGLang and SpecForge mean the one that leaves it, which
enters ``i + 1``. Files do not say which of the two they mean. A list that starts with 1 and becomes the usual choice of
its target when 1 is added was most likely written by the second convention, though NVIDIA's gpt-oss heads look the same
and follow the first. So the user is asked.
"""

from __future__ import annotations

from typing import NamedTuple

from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.models.config import default_aux_layers

ENTERING = "entering"
LEAVING = "leaving"
# Layouts that vLLM defines, which never adds anything.
_ENTERING_LAYOUTS = ("vllm", "speculators")


class LayerIds(NamedTuple):
    """Auxiliary layers as this library counts them."""

    entered: tuple[int, ...] | None  #: Layers that the stream enters, ascending; ``None`` where the file names none.
    note: str = ""  #: The decision; empty where there was nothing to decide.


def resolve(
    named: tuple[int, ...] | None, said: str | None, *, dialect: str, num_target_layers: int | None, where: str
) -> LayerIds:
    """The layers that a head's numbers mean.

    Args:
        named: The numbers of the file, ascending; ``None`` where it names none.
        said: ``entering`` or ``leaving``; ``None`` when the user does not say.
        dialect: The layout of the head.
        num_target_layers: ``L``, where the target is known.
        where: The file, for messages.
    """
    if said not in (None, ENTERING, LEAVING):
        raise CheckpointError(f"layer ids {said!r} are not known; expected {ENTERING!r} or {LEAVING!r}")
    if named is None:
        if said is None:
            return LayerIds(None)
        raise CheckpointError(f"{where} names no auxiliary layers, so there is nothing to count; leave --layer-ids out")
    left = entered_after(named)
    if said is not None:
        if said == LEAVING and num_target_layers is not None and left[-1] > num_target_layers:
            raise CheckpointError(
                f"{where} names auxiliary layer {named[-1]}, which a target of {num_target_layers} layers does not "
                "have to leave; say --layer-ids entering"
            )
        counted = "left" if said == LEAVING else "entered"
        return LayerIds(
            left if said == LEAVING else named, f"layers {list(named)} are read as those {counted}, as was said"
        )
    if named[0] != 1 or dialect in _ENTERING_LAYOUTS:
        return LayerIds(named)
    if left == usual_layers(num_target_layers):
        raise CheckpointError(
            f"{where} names the auxiliary layers {list(named)}: one more of each is {list(left)}, the usual choice for "
            f"{num_target_layers} layers, so they may count layers left (SGLang, SpecForge) or entered (vLLM, NVIDIA's "
            "gpt-oss heads); say which with --layer-ids leaving or --layer-ids entering, where `eagle3 convert` keeps "
            "the answer"
        )
    return LayerIds(named, f"layers {list(named)} are read as those entered, as vLLM does; --layer-ids says otherwise")


def entered_after(left: tuple[int, ...]) -> tuple[int, ...]:
    """Layers that the stream enters when it leaves these."""
    return tuple(layer + 1 for layer in left)


def usual_layers(num_target_layers: int | None) -> tuple[int, ...] | None:
    """The default for a target of that depth; ``None`` where it is unknown, or too shallow to have one."""
    try:
        return default_aux_layers(num_target_layers or 0)
    except ValueError:
        return None
