"""Copies of host arrays on devices, in the dtype of the device.

Files store matrices ``[out, in]``, our parameters are ``[in, out]``. Numpy copies such a view at a few hundred
MB a second. JAX's own copy to a CPU works in blocks. An accelerator gets the memory as it is and transposes it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


def put_shards(leaf: Any, dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Copies a host array to devices in another dtype; only the shard of a device is converted for it.

    Args:
        leaf: A numpy array. Only those parts of a mapped file are read that a device of this process gets.
        dtype: Dtype on the devices.
        sharding: The devices and their shards.
    """
    indices = sharding.addressable_devices_indices_map(leaf.shape)
    shards = [put_array(np.asarray(leaf[index]), dtype, device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def put_array(leaf: np.ndarray, dtype: Any, device: jax.Device | None = None) -> jax.Array:
    """Copies a host array to a device in another dtype.

    Args:
        leaf: A numpy array.
        dtype: Dtype on the device.
        device: Default: the default device of JAX.
    """
    if jax.default_backend() == "cpu":
        # JAX would not copy an array in order at all, and its memory may be that of a file.
        return jax.device_put(leaf.astype(dtype, copy=leaf.flags.c_contiguous), device)
    if jnp.dtype(dtype).itemsize < leaf.dtype.itemsize:
        leaf = leaf.astype(dtype)  # fewer bytes to copy
    order = np.argsort(np.negative(leaf.strides), kind="stable")
    stored = jax.device_put(leaf.transpose(order), device)
    back = tuple(np.argsort(order).tolist())
    done = back == tuple(range(leaf.ndim)) and stored.dtype == dtype
    return stored if done else _in_order(stored, back, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _in_order(stored: jax.Array, order: tuple[int, ...], dtype: Any) -> jax.Array:
    return stored.transpose(order).astype(dtype)
