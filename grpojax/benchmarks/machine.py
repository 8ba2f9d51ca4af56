"""What the devices can do at most: by the table of chips, or measured."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpojax.aot import chips

_SIZE = 2048  # rows and columns of the product that is measured
_COPIED = 2**26  # numbers that are read and written; more than any cache holds
_REPEATS = 7


class Machine(NamedTuple):
  """Peaks of one device.

  Attributes:
    kind: of the devices.
    count: of them.
    flops: matrix products, FLOP/s.
    bandwidth: main memory, bytes/s, reading and writing.
    source: where the two are from.
  """

  kind: str
  count: int
  flops: float
  bandwidth: float
  source: str


def _shortest(function: Callable[[Any], Any], x: Any) -> float:
  """Seconds of the fastest of several runs, each on the result before it.

  One run before them compiles.
  """
  x, seconds = jax.block_until_ready(function(x)), []
  for _ in range(_REPEATS):
    began = time.perf_counter()
    x = jax.block_until_ready(function(x))
    seconds.append(time.perf_counter() - began)
  return min(seconds)


def measured(
  dtype: Any, size: int = _SIZE, copied: int = _COPIED
) -> tuple[float, float]:
  """FLOP/s of a square matrix product, and bytes/s of a copy.

  Args:
    dtype: of the product.
    size: of the matrices.
    copied: float32 numbers that are read and written.
  """
  x = jnp.full((size, size), 1 / size, dtype)  # its own square
  product = _shortest(jax.jit(lambda x: x @ x), x)
  # In place: new memory would first have to be handed out by the system.
  add = jax.jit(lambda y: y + 1, donate_argnums=0)
  copy = _shortest(add, jnp.zeros(copied, jnp.float32))
  return 2 * size**3 / product, 2 * 4 * copied / copy


def find(kind: str, count: int, dtype: Any) -> Machine:
  """The peaks of devices, all of one kind.

  Args:
    kind: their `device_kind`.
    count: of them.
    dtype: of the products, where they have to be measured.
  """
  chip = chips.of_kind(kind)
  if chip:
    one = chips.device(chip)
    source = f"bfloat16, {chip.source}"
    return Machine(kind, count, one.flops, one.hbm_bandwidth, source)
  # One device of a CPU can have all its cores, which the others share.
  share = count if kind == "cpu" else 1
  flops, bandwidth = (peak / share for peak in measured(dtype))
  return Machine(kind, count, flops, bandwidth, f"measured, {dtype}")


def peak_memory(mesh: jax.sharding.Mesh) -> int | None:
  """Most bytes that a device of this process held; None if it does not say."""
  stats = [device.memory_stats() or {} for device in mesh.local_devices]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  return max(peaks, default=None)
