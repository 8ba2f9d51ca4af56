"""TPU kernel that draws tokens from the output head, without logits in memory.

A token is drawn of one part of the vocabulary before the next part's logits are
multiplied; `core.decoding.sampling.sample_parts` draws one of the parts. In a
part, columns 128 apart share a lane: first a lane is drawn by the inverse CDF,
then a token in it.
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

_ROWS = 256  # at most in one step; no draw depends on how many there are
_BYTES = 2**23  # of VMEM for weights and logits of a part


def _width(head: Shaped[Array, "D V"]) -> int:
  """Returns the tokens of a part: whole lanes, whatever the number of rows."""
  depth, columns = head.shape
  itemsize = max(head.dtype.itemsize, 2)  # integers are converted
  most = _BYTES // (2 * itemsize * depth + 8 * _ROWS)
  return max(min(most, columns) // LANES, 1) * LANES


def _draw_part(columns, logits_of, hidden, head, scales, masks, uniform, out):
  """Draws a token of one part for each row of a block; see `draw_parts`.

  The first four rows of out [1, 8, rows] become the largest logit, the sum of
  exp(logit - largest), the drawn column and its logit.
  """
  width, first_column = head.shape[1], pl.program_id(0) * head.shape[1]
  matrix = head[...].astype(hidden.dtype)  # of integers in 8 bits
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
  share = share_below(of_lane, uniform[:, 1:])
  sums, drawn, logit = jnp.zeros_like(sums), jnp.full_like(lane, width), sums
  for i, (weight, x) in enumerate(zip(weights, slices, strict=True)):
    sums += weight
    first = (drawn == width) & (sums > share) & (weight > 0)
    drawn = jnp.where(first, i * LANES + lane, drawn)
    logit = jnp.where(first, x, logit)
  of_row = lambda x: jnp.sum(
    jnp.where(lane == drawn_lane, x, 0.0), axis=-1, keepdims=True
  )
  total = jnp.sum(of_lane, axis=-1, keepdims=True)  # NaN where a logit is
  results = top, total, of_row(drawn.astype(jnp.float32)), of_row(logit)
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
  """Draws a token of each part of the vocabulary for each row.

  `uniform` has two numbers of each row (`sampling.uniform`), and `logits_of`
  maps the product, float32, to the logits. `scale` are factors of the head's
  columns (`quantization`), if any. Columns with `mask` True are never drawn.
  """
  (count, depth), columns, width = hidden.shape, head.shape[1], _width(head)
  padding = (0, -count % LANES), (0, 0)
  hidden, uniform = jnp.pad(hidden, padding), jnp.pad(uniform, padding)
  rows = min(len(hidden), _ROWS)
  parts = pl.cdiv(columns, width)
  scales, masks = (
    () if x is None else (x.astype(jnp.float32)[None],) for x in (scale, mask)
  )
  of_columns = pl.BlockSpec((1, width), lambda part, i: (0, part))
  of_rows = lambda width: pl.BlockSpec((rows, width), lambda part, i: (i, 0))
  out = pl.pallas_call(
    functools.partial(_draw_part, columns, logits_of),
    out_shape=jax.ShapeDtypeStruct((parts, 8, len(hidden)), jnp.float32),
    grid=(parts, pl.cdiv(len(hidden), rows)),
    in_specs=[
      of_rows(depth),
      pl.BlockSpec((depth, width), lambda part, i: (0, part)),
      (of_columns,) * len(scales),
      (of_columns,) * len(masks),
      of_rows(2),
    ],
    out_specs=pl.BlockSpec((1, 8, rows), lambda part, i: (part, 0, i)),
    cost_estimate=pl.CostEstimate(
      flops=2 * hidden.size * columns,
      transcendentals=len(hidden) * columns,
      # Of several blocks of rows each is fetched for each part.
      bytes_accessed=head.nbytes
      + hidden.nbytes * (parts if len(hidden) > rows else 1),
    ),
    name="draw_parts",
  )(hidden, head, scales, masks, uniform)
  top, total, drawn, logit = out[:, :4, :count].transpose(1, 2, 0)
  ids = jnp.arange(parts) * width + drawn.astype(jnp.int32)
  return Parts(ids=ids, logits=logit, tops=top, sums=total)
