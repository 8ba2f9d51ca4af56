"""TPU kernel that writes a slot of a cache in place.

XLA would copy the new rows to arrays padded to 128 lanes, then read and write
128 slots per row. This kernel only reads and writes the tile with the slot.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

_BLOCK = 2**15  # numbers of new rows per step: 1 MiB of bfloat16 tiles


def write_row(
  x: Shaped[Array, "L B G K C W"],
  new: Shaped[Array, "L B G K W"],
  slot: Int[Array, ""],
) -> Shaped[Array, "L B G K C W"]:
  """Returns x with `new` at index `slot` of C; W is a multiple of 128."""
  count, *_, slots, width = shape = x.shape
  x, new = x.reshape(count, -1, slots, width), new.reshape(count, -1, width)
  height = 32 // x.dtype.itemsize  # rows of a tile
  rows = min(x.shape[1], _BLOCK // width)

  def kernel(slot, new, x, out):
    row = jax.lax.broadcasted_iota(jnp.int32, out.shape[1:], 1)
    is_slot = row == jax.lax.rem(slot[0], height)
    out[0] = jnp.where(is_slot, new[0][:, None], x[0])

  tile = pl.BlockSpec(
    (1, rows, height, width),
    lambda layer, i, slot: (layer, i, jax.lax.div(slot[0], height), 0),
  )
  new_spec = pl.BlockSpec(
    (1, rows, width), lambda layer, i, slot: (layer, i, 0)
  )
  written = pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(count, pl.cdiv(x.shape[1], rows)),
      in_specs=[new_spec, tile],
      out_specs=tile,
    ),
    input_output_aliases={2: 0},
    cost_estimate=pl.CostEstimate(
      flops=0,
      transcendentals=0,
      bytes_accessed=(1 + 2 * height) * new.size * x.dtype.itemsize,
    ),
    name="write_row",
  )(slot[None], new, x)
  return written.reshape(shape)
