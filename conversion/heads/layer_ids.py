"""Interprets the numbers of a head's auxiliary layers: layers that the stream enters, or leaves.

In vLLM and this library, number ``i`` means the stream that enters layer ``i``. In SGLang and
SpecForge it means the stream that leaves layer ``i`` and enters ``i + 1``. Files do not name their
convention. If a list starts with 1 and adding 1 gives the usual choice for its target, then it most
likely follows the second convention. NVIDIA's gpt-oss heads look the same and follow the first. So
the user has to decide.
"""

from __future__ import annotations

from typing import NamedTuple

from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.models.config import default_aux_layers

ENTERING = "entering"
LEAVING = "leaving"
# Layouts of vLLM, which never adds 1.
_ENTERING_LAYOUTS = ("vllm", "speculators")


class LayerIds(NamedTuple):
    """Auxiliary layers by the numbers of this library."""

    #: Layers that the stream enters, ascending; ``None`` if the file names none.
    entered: tuple[int, ...] | None
    note: str = ""  #: The decision; empty if there was nothing to decide.


def resolve(
    named: tuple[int, ...] | None,
    convention: str | None,
    *,
    dialect: str,
    num_target_layers: int | None,
    where: str,
) -> LayerIds:
    """Interprets the numbers of a head's auxiliary layers.

    Args:
        named: The numbers of the file, ascending; ``None`` if it names none.
        convention: The user's choice: ``entering`` or ``leaving``; ``None`` without a choice.
        dialect: The layout of the head.
        num_target_layers: ``L``, the number of the target's layers; ``None`` if the target is
            unknown.
        where: The name of the file, for messages.

    Raises:
        CheckpointError: The numbers are ambiguous and there is no ``convention``, or the convention
            does not fit.
    """
    if convention not in (None, ENTERING, LEAVING):
        raise CheckpointError(
            f"layer ids {convention!r} are not known; expected {ENTERING!r} or {LEAVING!r}"
        )
    if named is None:
        if convention is None:
            return LayerIds(None)
        raise CheckpointError(
            f"{where} names no auxiliary layers, so there is nothing to count; leave"
            " --layer-ids out"
        )

    shifted = entered_after(named)
    if convention == ENTERING:
        return LayerIds(named, f"layers {list(named)} are read as those entered, as was said")
    if convention == LEAVING:
        if num_target_layers is not None and shifted[-1] > num_target_layers:
            raise CheckpointError(
                f"{where} names auxiliary layer {named[-1]}, which a target of {num_target_layers}"
                " layers does not have to leave; say --layer-ids entering"
            )
        return LayerIds(shifted, f"layers {list(named)} are read as those left, as was said")

    if named[0] != 1 or dialect in _ENTERING_LAYOUTS:
        return LayerIds(named)
    if shifted == usual_layers(num_target_layers):
        raise CheckpointError(
            f"{where} names the auxiliary layers {list(named)}: one more of each is"
            f" {list(shifted)}, the usual choice for {num_target_layers} layers, so they may count"
            " layers left (SGLang, SpecForge) or entered (vLLM, NVIDIA's gpt-oss heads); say which"
            " with --layer-ids leaving or --layer-ids entering, where `eagle3 convert` keeps the"
            " answer"
        )
    return LayerIds(
        named,
        f"layers {list(named)} are read as those entered, as vLLM does; --layer-ids says otherwise",
    )


def entered_after(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the layers that the stream enters when it leaves ``layers``."""
    return tuple(layer + 1 for layer in layers)


def usual_layers(num_target_layers: int | None) -> tuple[int, ...] | None:
    """Returns the default auxiliary layers for a target's depth; ``None`` if it is too small."""
    try:
        return default_aux_layers(num_target_layers or 0)
    except ValueError:
        return None
