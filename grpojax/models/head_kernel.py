"""TPU kernel that draws tokens from the output head, without logits in memory.

The logits of a part of the vocabulary are multiplied, and a token is drawn of
them, before the next part's (`core.decoding.sampling.sample_parts` draws one of
the parts). In a part, columns 128 apart share a lane: first a lane is drawn by
the inverse CDF, then a token in it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from grpojax.core.decoding.sampling import Parts, share_below
from grpojax.models.cache import LANES

_ROWS = 256  # in one step; more only repeat it, so that no part depends on them
_BYTES = 2**23  # of VMEM for weights and logits of a part
_NEGATIVE = -1e30  # logits behind the vocabulary's end


def _width(depth: int, columns: int) -> int:
  """Returns the tokens of a part: whole lanes, whatever the number of rows."""
  most = _BYTES // (4 * depth + 8 * _ROWS)
  return min(most, columns) // LANES * LANES


def _kernel(columns, logits_of, hidden, head, uniform, out):
  """Draws a token of one part for each row of a block; see `draw_parts`.

  out [4, rows, parts] are the largest logit, the sum of exp(logit - largest),
  the drawn column and its logit.
  """
  part, block = pl.program_id(0), pl.program_id(1)
  rows, width = hidden.shape[0], head.shape[1]
  x = jnp.dot(hidden[...], head[...], preferred_element_type=jnp.float32)
  column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  x = jnp.where(column < columns - part * width, logits_of(x), _NEGATIVE)
  top = jnp.max(x, axis=-1, keepdims=True)
  slices = [x[:, i : i + LANES] for i in range(0, width, LANES)]
  weights = [jnp.exp(x - top) for x in slices]
  of_lane = functools.reduce(jnp.add, weights)
  # A lane: the first whose cumulative sum is above the uniform number's share.
  lane = jax.lax.broadcasted_iota(jnp.int32, of_lane.shape, 1)
  sums = of_lane
  for shift in (1, 2, 4, 8, 16, 32, 64):
    before = pltpu.roll(sums, shift, 1)
    sums += jnp.where(lane >= shift, before, 0)
  sums = jnp.where(of_lane > 0, sums, 0)
  total = jnp.max(sums, axis=-1, keepdims=True)
  above = sums > share_below(total, uniform[:, :1])
  drawn_lane = jnp.min(jnp.where(above, lane, LANES), axis=-1, keepdims=True)
  # A token of each lane, and of those the one in the lane that was drawn.
  threshold = share_below(of_lane, uniform[:, 1:])
  sums, drawn, logit = jnp.zeros_like(sums), jnp.full_like(lane, width), sums
  for i, (weight, x) in enumerate(zip(weights, slices, strict=True)):
    sums += weight
    first = (drawn == width) & (sums > threshold) & (weight > 0)
    drawn = jnp.where(first, i * LANES + lane, drawn)
    logit = jnp.where(first, x, logit)
  of_row = lambda x: jnp.sum(
    jnp.where(lane == drawn_lane, x, 0.0), axis=-1, keepdims=True
  )
  results = top, total, of_row(drawn.astype(jnp.float32)), of_row(logit)
  for i, result in enumerate(results):
    at = (
      i,
      pl.ds(pl.multiple_of(block * rows, 8), rows),
      pl.ds(pl.multiple_of(jax.lax.div(part, LANES) * LANES, LANES), LANES),
    )
    mine = lane == jax.lax.rem(part, LANES)
    out[at] = jnp.where(mine, result, out[at])


def draw_parts(
  hidden: Float[Array, "N D"],
  head: Float[Array, "D V"],
  uniform: Float[Array, "N 2"],
  logits_of: Callable[[Array], Array],
) -> Parts:
  """Draws a token of each part of the vocabulary for each row.

  Args:
    hidden: final hidden states.
    head: output head.
    uniform: two numbers of each row from `sampling.uniform`.
    logits_of: maps the product, float32, to the logits.
  """
  (count, depth), columns = hidden.shape, head.shape[1]
  width, rows = _width(depth, columns), min(count, _ROWS)
  parts, blocks = pl.cdiv(columns, width), pl.cdiv(count, rows)
  shape = 4, blocks * rows, pl.cdiv(parts, LANES) * LANES
  of_rows = lambda width: pl.BlockSpec((rows, width), lambda part, i: (i, 0))
  out = pl.pallas_call(
    functools.partial(_kernel, columns, logits_of),
    out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
    grid=(parts, blocks),
    in_specs=[
      of_rows(depth),
      pl.BlockSpec((depth, width), lambda part, i: (0, part)),
      of_rows(2),
    ],
    out_specs=pl.BlockSpec(shape, lambda part, i: (0, 0, 0)),
    cost_estimate=pl.CostEstimate(
      flops=2 * count * head.size,
      transcendentals=count * columns,
      bytes_accessed=(head.size + hidden.size) * head.dtype.itemsize,
    ),
    name="draw_parts",
  )(hidden, head, uniform)
  top, total, drawn, logit = out[:, :count, :parts]
  ids = jnp.arange(parts) * width + drawn.astype(jnp.int32)
  return Parts(ids=ids, logits=logit, tops=top, sums=total)
