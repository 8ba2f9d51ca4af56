"""TPU kernel for decoding: the output head.

`draw_parts` draws a token from each part of the vocabulary, without logits in
memory; `sampling.sample_parts` then draws a part. Columns 128 apart share a
lane: the kernel draws a lane by the inverse CDF, then a token from the lane.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Shaped

from grpojax.core.decoding.sampling import NEGATIVE, Parts, share_below
from grpojax.models.cache import LANES

_ROWS = 256  # maximum rows per step; draws do not depend on it
_BYTES = 2**23  # of VMEM for weights and logits of a part


def _width(head: Shaped[Array, "D V"]) -> int:
  """Returns the number of tokens per part, a multiple of LANES."""
  depth, columns = head.shape
  itemsize = max(head.dtype.itemsize, 2)  # integers are converted
  most = _BYTES // (2 * itemsize * depth + 8 * _ROWS)
  return max(min(most, columns) // LANES, 1) * LANES


def _draw_part(columns, logits_of, hidden, head, scales, masks, uniform, out):
  """Draws a token from a part for each row of a block.

  The first four rows of out [1, 8, rows] are the largest logit, the sum of
  exp(logit - largest), the drawn column and its logit.
  """
  width = head.shape[1]
  first_column = pl.program_id(0) * head.shape[1]
  matrix = head[...].astype(hidden.dtype)  # may be 8-bit integers
  x = jnp.dot(hidden[...], matrix, preferred_element_type=jnp.float32)
  for scale in scales:
    x *= scale[...]
  column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  x = jnp.where(column < columns - first_column, logits_of(x), NEGATIVE)
  for mask in masks:
    x = jnp.where(mask[...] > 0, NEGATIVE, x)
  top = jnp.max(x, axis=-1, keepdims=True)
  slices = [x[:, i : i + LANES] for i in range(0, width, LANES)]
  weights = [jnp.exp(x - top) for x in slices]
  mass = functools.reduce(jnp.add, weights)  # of each lane
  # Draw the first lane whose cumulative sum exceeds the uniform number's share.
  lane = jax.lax.broadcasted_iota(jnp.int32, mass.shape, 1)
  sums = mass
  for shift in (1, 2, 4, 8, 16, 32, 64):
    before = pltpu.roll(sums, shift, 1)
    sums += jnp.where(lane >= shift, before, 0)
  sums = jnp.where(mass > 0, sums, 0)
  total = jnp.max(sums, axis=-1, keepdims=True)
  above = sums > share_below(total, uniform[:, :1])
  drawn_lane = jnp.min(jnp.where(above, lane, LANES), axis=-1, keepdims=True)
  # Draw a token in every lane, then select the drawn lane.
  share = share_below(mass, uniform[:, 1:])
  sums, drawn, logit = jnp.zeros_like(sums), jnp.full_like(lane, width), sums
  for i, (weight, x) in enumerate(zip(weights, slices, strict=True)):
    sums += weight
    first = (drawn == width) & (sums > share) & (weight > 0)
    drawn = jnp.where(first, i * LANES + lane, drawn)
    logit = jnp.where(first, x, logit)
  select = lambda x: jnp.sum(
    jnp.where(lane == drawn_lane, x, 0.0), axis=-1, keepdims=True
  )
  total = jnp.sum(mass, axis=-1, keepdims=True)  # NaN if a logit is NaN
  results = top, total, select(drawn.astype(jnp.float32)), select(logit)
  table = sum(jnp.where(lane == i, x, 0.0) for i, x in enumerate(results))
  out[0] = table.T[:8]


def draw_parts(
  hidden: Float[Array, "N D"],
  head: Shaped[Array, "D V"],
  uniform: Float[Array, "N 2"],
  logits_of: Callable[[Array], Array],
  scale: Float[Array, "V"] | None = None,
  mask: Bool[Array, "V"] | None = None,
) -> Parts:
  """Draws a token from each part of the vocabulary for each row.

  `uniform` has two numbers per row (`sampling.uniform`); `logits_of` maps the
  float32 product to logits. `scale` holds factors of the head's columns
  (`quantization`). Columns with `mask` True are never drawn.
  """
  count, depth = hidden.shape
  columns = head.shape[1]
  width = _width(head)
  padding = (0, -count % LANES), (0, 0)
  hidden, uniform = jnp.pad(hidden, padding), jnp.pad(uniform, padding)
  rows = min(len(hidden), _ROWS)
  parts = pl.cdiv(columns, width)
  scales, masks = (
    () if x is None else (x.astype(jnp.float32)[None],) for x in (scale, mask)
  )
  column_spec = pl.BlockSpec((1, width), lambda part, i: (0, part))
  row_spec = lambda width: pl.BlockSpec((rows, width), lambda part, i: (i, 0))
  out = pl.pallas_call(
    functools.partial(_draw_part, columns, logits_of),
    out_shape=jax.ShapeDtypeStruct((parts, 8, len(hidden)), jnp.float32),
    grid=(parts, pl.cdiv(len(hidden), rows)),
    in_specs=[
      row_spec(depth),
      pl.BlockSpec((depth, width), lambda part, i: (0, part)),
      (column_spec,) * len(scales),
      (column_spec,) * len(masks),
      row_spec(2),
    ],
    out_specs=pl.BlockSpec((1, 8, rows), lambda part, i: (part, 0, i)),
    cost_estimate=pl.CostEstimate(
      flops=2 * hidden.size * columns,
      transcendentals=len(hidden) * columns,
      # If there are several row blocks, each part fetches them again.
      bytes_accessed=head.nbytes
      + hidden.nbytes * (parts if len(hidden) > rows else 1),
    ),
    name="draw_parts",
  )(hidden, head, scales, masks, uniform)
  top, total, drawn, logit = out[:, :4, :count].transpose(1, 2, 0)
  ids = jnp.arange(parts) * width + drawn.astype(jnp.int32)
  return Parts(ids=ids, logits=logit, tops=top, sums=total)
