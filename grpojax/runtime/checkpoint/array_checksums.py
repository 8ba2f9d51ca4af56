"""Checksums of arrays, the same on any machine and in any layout.

Orbax writes an array's chunks without a checksum: a bit that flips on the disk
comes back as another weight.

An array is read as 32-bit words w_i (smaller elements make a word each). Its
checksum is the sum of mix(w_i) c_i mod 2^32 over odd numbers c_i, where mix is
one-to-one. A sum does not depend on how it is split over devices. Any change of
one word is found (c_i has an inverse mod 2^32); other damage goes unnoticed
with a probability of about 2^-32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, UInt32


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
  """Spreads every bit over a word, one-to-one (MurmurHash3's finalizer)."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  return x ^ (x >> 13)


@jax.jit
def checksum(x: Array) -> UInt32[Array, ""]:
  """Returns the checksum of one array of numbers, of any shape and dtype."""
  if x.dtype != jnp.bool_:
    bits = 8 * min(x.dtype.itemsize, 4)
    x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
  words = x.astype(jnp.uint32)
  position = jnp.uint32(0)  # i of w_i, made of iotas that shard as `words` do
  for axis in range(words.ndim):
    stride = math.prod(words.shape[axis + 1 :]) % 2**32
    index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    position += index * jnp.uint32(stride)
  return jnp.sum(_mix(words) * (_mix(position) | 1), dtype=jnp.uint32)


@jax.jit
def _checksums(arrays: list[Array]) -> list[UInt32[Array, ""]]:
  # One program: dozens at once, each waiting for other devices, are more than
  # the threads of XLA's CPU backend, which then all wait for each other.
  return [checksum(x) for x in arrays]


def leaves(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by path, such as "layers/q"."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def by_path(tree: PyTree) -> dict[str, str]:
  """Returns each array's checksum by its path in a tree, in hexadecimal."""
  arrays = leaves(tree)
  sums = jax.device_get(_checksums([*arrays.values()]))
  return {
    path: f"{int(value):08x}" for path, value in zip(arrays, sums, strict=True)
  }
