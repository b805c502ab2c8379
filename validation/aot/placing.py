"""Where the arguments of a program lie: on one device, or divided over a mesh."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, SingleDeviceSharding

from eagle3_jax.loop import LoopParams, SpeculativeLoop
from eagle3_jax.sharding import make_mesh, param_shardings, parse_mesh, row_shardings
from validation.aot.platforms import Platform


class Placing:
    """Shapes with shardings, and what a program is traced under.

    Attributes:
        mesh: Of all devices; ``None`` for one device.
    """

    def __init__(self, platform: Platform, axes: str):
        """See the class.

        Args:
            platform: Whose devices.
            axes: As ``model=4,data=2``; empty for one device.
        """
        count = math.prod(parse_mesh(axes).values()) if axes else 1
        devices = platform.devices(count)
        self._device = devices[0]
        self._one = SingleDeviceSharding(devices[0])
        self.mesh: Mesh | None = make_mesh(axes, devices=devices[:count]) if axes else None

    def params(self, loop: SpeculativeLoop, params: LoopParams) -> LoopParams:
        """Parameters of target and head, divided as their layers say."""
        if self.mesh is None:
            return self._everything(params)
        parts = ((loop.target, params.target), (loop.drafter, params.drafter))
        return LoopParams(*(_with(leaves, param_shardings(self.mesh, part, leaves)) for part, leaves in parts))

    def rows(self, tree: Any) -> Any:
        """Prompts or a state, divided by rows and key heads."""
        return self._everything(tree) if self.mesh is None else _with(tree, row_shardings(self.mesh, tree))

    def traced(self) -> contextlib.AbstractContextManager[Any]:
        """What programs are traced under: a mesh, as the decoder does, or no axes and the name of the device.

        By that name Pallas of jax 0.12 knows what to compile a kernel for.
        """
        if self.mesh is not None:
            return jax.set_mesh(self.mesh)
        device = AbstractDevice(self._device.device_kind, None, self._device.platform)
        return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))

    def _everything(self, tree: Any) -> Any:
        return _with(tree, jax.tree.map(lambda leaf: self._one, tree))


def _with(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda leaf, one: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), tree, shardings)
