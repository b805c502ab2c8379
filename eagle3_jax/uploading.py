"""Arrays of the host, copied to devices in the type that they have there.

A file has matrices ``[out, in]`` and we have them ``[in, out]``: of such a view numpy makes a copy at some hundred
megabytes a second. JAX's own copy to a CPU takes it in blocks, and an accelerator gets it as it lies in memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


def put_shards(leaf: Any, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """An array of the host in another type, of which each device gets its shard and nothing more is converted.

    Args:
        leaf: Of numpy; of a mapped file those parts are read that some device of this process gets.
        dtype: On the devices.
        sharding: Where.
    """
    indices = sharding.addressable_devices_indices_map(leaf.shape)
    shards = [put_array(np.asarray(leaf[index]), dtype, device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def put_array(leaf: np.ndarray, dtype: Any, device: jax.Device | None = None) -> jax.Array:
    """An array of the host in another type, on a device.

    Args:
        leaf: Of numpy.
        dtype: On the device.
        device: The default one when left out.
    """
    if jax.default_backend() == "cpu":
        # What is in order already JAX would not copy at all, and it may be a file's.
        return jax.device_put(leaf.astype(dtype, copy=leaf.flags.c_contiguous), device)
    if jnp.dtype(dtype).itemsize < leaf.dtype.itemsize:
        leaf = leaf.astype(dtype)  # the fewer bytes travel
    order = np.argsort(np.negative(leaf.strides), kind="stable")
    stored, back = jax.device_put(leaf.transpose(order), device), tuple(np.argsort(order).tolist())
    done = back == tuple(range(leaf.ndim)) and stored.dtype == dtype
    return stored if done else _in_order(stored, back, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_order(stored: jax.Array, order: tuple[int, ...], dtype: Any) -> jax.Array:
    return stored.transpose(order).astype(dtype)
