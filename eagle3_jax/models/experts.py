"""A mixture of experts as a layer: a router, many small gated MLPs, and an MLP for every token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from eagle3_jax.devices.sharding import EXPERTS, MODEL, Axis, on_a_mesh, rows_spec
from eagle3_jax.models.config import Experts, GatedMLP
from eagle3_jax.models.layers import Linear, Precision, SwiGLU, normal_param
from eagle3_jax.models.mixture import Stack, mixture
from eagle3_jax.models.quantised import LAYER, GroupedKernel, Int8Kernel
from eagle3_jax.models.routers import Routing, route, router_logits


class ExpertMLP(nnx.Module):
    """``Σ w_e · expert_e(x)`` over the chosen experts, plus ``shared(x)`` if there is such an MLP.

    With a ``shared_gate``, the output of ``shared`` is scaled by ``sigmoid(shared_gate(x))``.
    """

    def __init__(self, width: int, config: Experts, *, precision: Precision, rngs: nnx.Rngs):
        count = config.num_experts
        inner = config.width
        options: dict[str, Any] = {"precision": precision, "rngs": rngs}
        axis = Axis(EXPERTS, count)
        kernel: dict[str, Any] = {"axes": (axis, None, None), "product": LAYER}

        self.router = Linear(width, count, bias=config.bias, product="", **options)
        if config.routing.has_correction:
            self.correction = nnx.Param(jnp.zeros((count,), jnp.float32))

        self.gate_up = normal_param(rngs, (count, width, 2 * inner), width**-0.5, **kernel)
        self.down = normal_param(rngs, (count, inner, width), inner**-0.5, **kernel)
        if config.bias:
            self.gate_up_bias = nnx.Param(
                jnp.zeros((count, 2 * inner), jnp.float32), axes=(axis, None)
            )
            self.down_bias = nnx.Param(jnp.zeros((count, width), jnp.float32), axes=(axis, None))

        if config.shared_width:
            self.shared = SwiGLU(width, GatedMLP(width=config.shared_width), **options)
        if config.shared_gate:
            self.shared_gate = Linear(width, 1, product="", **options)

        self.config = config
        self.precision = precision

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if not on_a_mesh():
            return self._run_local(x)

        # XLA's partitioner would gather the weights of all experts for a loop over them, and the
        # tokens of all devices for a choice of experts. So every device runs its own experts here,
        # and the results are added.
        graph, state = nnx.split(self)

        def run_share(x: Array, state: Any) -> Array:
            first = lax.axis_index(MODEL) * (self.config.num_experts // lax.axis_size(MODEL))
            return lax.psum(nnx.merge(graph, state)._run_local(x, first), MODEL)

        rows = rows_spec(len(x))
        parts = jax.tree.map(_spec, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
        run = jax.shard_map(run_share, in_specs=(rows, parts), out_specs=rows, check_vma=False)
        return run(x, state)

    def _run_local(
        self, x: Float[Array, "B T D"], first: Int[Array, ""] | int = 0
    ) -> Float[Array, "B T D"]:
        """Runs the experts and the columns of the shared MLP on this device.

        The first expert here has the id ``first``.
        """
        config = self.config
        tokens = x.reshape(-1, x.shape[-1])
        bias = None if self.router.bias is None else self.router.bias[...]
        correction = self.correction[...] if config.routing.has_correction else None
        logits = router_logits(tokens, self.router.kernel[...], bias, config, self.precision)
        routing = route(logits, correction, config)

        biases = (self.gate_up_bias[...], self.down_bias[...]) if config.bias else (None, None)
        stack = Stack(self.gate_up[...], self.down[...], *biases)
        local = Routing(routing.chosen - first, routing.weights)
        out = mixture(tokens, local, stack, config, self.precision).reshape(x.shape)

        if not config.shared_width:
            return out
        shared = self.shared(x)
        if config.shared_gate:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return out + shared


def _spec(variable: nnx.Variable) -> Any:
    """Returns the ``PartitionSpec`` of a parameter, or of each leaf of a quantised kernel."""
    axes = variable.get_metadata().get("axes", ())
    value = variable[...]
    spec = PartitionSpec(*(None if axis is None else MODEL for axis in axes))
    if not isinstance(value, GroupedKernel | Int8Kernel):
        return spec
    shardings = value.divided(NamedSharding(jax.sharding.get_abstract_mesh(), spec))
    return jax.tree.map(lambda sharding: sharding.spec, shardings)
