"""TPU kernel for attention in decoding: one new token per row.

The cache stays in HBM. The kernel reads the blocks of slots that a row sees,
writes the new token's slot in place, and skips finished rows. While a block is
used, the next one is read. A group of rows shares a step, to hide latencies.
The online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) starts from
the new token.

Axes: N rows; k rows of slots, of n heads side by side; W = n E channels; H =
n R queries per row of slots; others as in `cache`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from grpojax.core.decoding.sampling import NEGATIVE
from grpojax.models.attention import soft_cap
from grpojax.models.cache import LANES, KeysValues, Slots

_ROWS = 16  # maximum rows per group
_BYTES = 2**20  # of VMEM for the keys of a step; there are four such buffers


class _Step(NamedTuple):
  rows: int
  block: int  # slots
  heads: int  # side by side
  scale: float
  cap: float | None


class _Refs(NamedTuple):
  layer: Any  # [1], in SMEM like all scalars
  positions: Any  # [N]
  first: Any  # [N]
  begin: Any  # [N], a row's first block
  last: Any  # [N], its last block, with the new slot; -1: it has no blocks
  group_begin: Any  # [N / rows]
  group_last: Any  # [N / rows]
  q: Any  # [rows, k, H, W]
  new: Any  # keys and values, [rows, k, 1, W]
  stored: Any  # the new tokens for each array of the cache
  inputs: Any  # the caches, whose memory the outputs share
  out: Any
  lse: Any
  caches: Any  # in HBM
  buffers: Any  # [2, rows, k, block, W], for each array of the cache
  semaphores: Any  # of each buffer, and of writes
  current: Any  # [1], the buffer with the group's first blocks


def serves(keys: Array | jax.ShapeDtypeStruct) -> bool:
  """Returns True if the kernel can read a cache with these `Slots.keys`.

  Rows must fill lanes. Slots must be a multiple of a block's (64 in float32,
  128 in 16 bits, 256 in 8), or fewer and a multiple of a tile's (8, 16, 32).
  """
  *_, k, slots, width = keys.shape
  block = min(slots, 256 // keys.dtype.itemsize)
  tiled = slots % block == 0 and block * keys.dtype.itemsize % 32 == 0
  fits = k * block * width * keys.dtype.itemsize <= 2 * _BYTES
  return tiled and width % LANES == 0 and fits


def _dot(x: Array, y: Array, axis: int) -> Array:
  """Multiplies matrices [N k, H, :] by [N k, :, :], summing over y's axis."""
  # 16-bit floats have no other precision than the default.
  precision = None if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
  axes = ((2,), (axis,)), ((0,), (0,))
  return jax.lax.dot_general(x, y, axes, precision, jnp.float32)


def _scaled(step: _Step, x: Array, scales: Array) -> Array:
  """Multiplies [rows k, H, block] by the scales [rows, K, block] of keys."""
  shape = step.rows, x.shape[1] // step.heads, step.block
  scales = scales.astype(jnp.float32)
  count = scales.shape[1]
  heads = [jnp.broadcast_to(scales[:, i : i + 1], shape) for i in range(count)]
  rows = [heads[i : i + step.heads] for i in range(0, count, step.heads)]
  scales = jnp.stack([jnp.concatenate(row, axis=1) for row in rows], axis=1)
  return x * scales.reshape(x.shape)


def _read(step, refs, group, i, buffer, action):
  """Starts or awaits reads of blocks i ("start" or "wait")."""
  slots = pl.ds(pl.multiple_of(i * step.block, step.block), step.block)
  for row in range(step.rows):
    n = group * step.rows + row
    live = (refs.begin[n] <= i) & (i <= refs.last[n])
    for x, blocks in zip(refs.caches, refs.buffers, strict=True):
      tile = x.at[refs.layer[0], n, :, slots]
      block = blocks.at[buffer, row]
      copy = pltpu.make_async_copy(tile, block, refs.semaphores.at[buffer])
      pl.when(live)(getattr(copy, action))
    if action == "start":

      @pl.when(jnp.logical_not(live))
      def _(row=row):  # masked weights are 0, but 0 * NaN would be NaN
        for x in refs.buffers:
          x[buffer, row] = jnp.zeros(x.shape[2:], x.dtype)


def _write(step, refs, group, i, buffer, action):
  """Starts or awaits writes of the new slots in blocks i."""
  for row in range(step.rows):
    n = group * step.rows + row

    @pl.when(refs.last[n] == i)
    def _(row=row, n=n):
      slot = refs.positions[n] - i * step.block
      each = zip(refs.caches, refs.buffers, refs.stored, strict=True)
      for x, blocks, new in each:
        # Slots of scales are lanes, and their tile is a block.
        is_scale = x.ndim == 4
        size = step.block if is_scale else 32 // x.dtype.itemsize
        begin = pl.multiple_of(jax.lax.div(slot, size) * size, size)
        tile = blocks.at[buffer, row, :, pl.ds(begin, size)]
        if action == "start":
          index = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 1)
          # Mosaic cannot merge several lane tiles of 16-bit scales.
          wide = jnp.float32 if is_scale else x.dtype
          both = new[row].astype(wide), tile[...].astype(wide)
          merged = jnp.where(index == slot - begin, *both)
          tile[...] = merged.astype(x.dtype)
        slots = pl.ds(pl.multiple_of(i * step.block + begin, size), size)
        target = x.at[refs.layer[0], n, :, slots]
        copy = pltpu.make_async_copy(tile, target, refs.semaphores.at[2])
        getattr(copy, action)()


def _use(step, refs, group, i, buffer, state):
  """Adds blocks i to the softmax's maxima, sums and mixed values."""
  top, total, mixed = state
  q = refs.q[...].reshape(mixed.shape)
  shape = step.rows, -1, q.shape[1], step.block
  keys, values = (
    x[buffer].reshape(len(q), step.block, -1).astype(q.dtype)
    for x in refs.buffers[:2]
  )
  scales = [x[buffer] for x in refs.buffers[2:]]
  logits = _dot(q, keys, 2)
  if scales:
    logits = _scaled(step, logits, scales[0])
  logits = soft_cap(logits * step.scale, step.cap).reshape(shape)

  def of_rows(scalars):
    numbers = [scalars[group * step.rows + row] for row in range(step.rows)]
    return jnp.stack([jnp.full(logits.shape[1:], x) for x in numbers])

  slots = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 3) + i * step.block
  visible = (of_rows(refs.first) <= slots) & (slots < of_rows(refs.positions))
  logits = jnp.where(visible, logits, NEGATIVE).reshape(*q.shape[:2], -1)
  new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
  weights = jnp.exp(logits - new_top)
  fade = jnp.exp(top - new_top)
  total = total * fade + jnp.sum(weights, axis=-1, keepdims=True)
  if scales:
    weights = _scaled(step, weights, scales[1])
  mixed = mixed * fade + _dot(weights.astype(q.dtype), values, 1)
  return new_top, total, mixed


def _kernel(step, *refs):
  """Attends with the rows of a group, and writes their new slots."""
  refs = _Refs(*refs)
  inner = pl.program_id(1)
  has_next = inner + 1 < pl.num_programs(1)
  group = pl.program_id(0) * pl.num_programs(1) + inner
  begin, last = refs.group_begin[group], refs.group_last[group]

  @pl.when(inner == 0)
  def _():
    refs.current[0] = 0
    _read(step, refs, group, begin, 0, "start")

  def use_blocks(i, state):
    buffer = (refs.current[0] + i - begin) & 1

    @pl.when((i < last) | has_next)
    def _():  # read the next blocks, perhaps of the next group
      following = jnp.where(i < last, group, group + 1)
      start = jnp.where(i < last, i + 1, refs.group_begin[following])
      _read(step, refs, following, start, 1 - buffer, "start")

    _read(step, refs, group, i, buffer, "wait")
    _write(step, refs, group, i, buffer, "start")
    state = _use(step, refs, group, i, buffer, state)
    _write(step, refs, group, i, buffer, "wait")
    return state

  q = refs.q[...].reshape(-1, *refs.q.shape[2:]).astype(jnp.float32)
  key, value = (
    x[...].reshape(len(q), 1, -1).astype(jnp.float32) for x in refs.new
  )
  logits = jnp.sum(q * key, axis=-1, keepdims=True)
  top = soft_cap(logits * step.scale, step.cap)
  state = top, jnp.ones_like(top), jnp.broadcast_to(value, q.shape)
  top, total, mixed = jax.lax.fori_loop(begin, last + 1, use_blocks, state)
  refs.current[0] = (refs.current[0] + last + 1 - begin) & 1
  refs.out[...] = (mixed / total).reshape(refs.q.shape).astype(refs.out.dtype)
  refs.lse[...] = (top + jnp.log(total)).reshape(refs.lse.shape)


def attend(
  q: Float[Array, "B G K R E"],
  new: KeysValues,
  stored: Slots,
  slots: Slots,
  layer: Int[Array, ""],
  positions: Int[Array, "B G"],
  first: Int[Array, "B G"],
  *,
  scale: float,
  cap: float | None = None,
) -> tuple[Float[Array, "B G K R E"], Float[Array, "B G K R"], Slots]:
  """Attends to each row's new token and its earlier ones, and stores the new.

  `new` are the new tokens' keys and values [B, G, K, E]; `stored` are the same
  as the cache holds them, with scales [B, G, K] for 8-bit integers. `slots` is
  the cache of a stack, `layer` an index into it. A row sees slots first <= i <
  position, and its new token goes to slot `position`. A row at -1 is skipped;
  its output is finite. Also returns log-sum-exps of the logits.
  """
  b, g, heads, r, e = q.shape
  layers, *_, k, capacity, width = slots.keys.shape
  n = b * g
  itemsize = slots.keys.dtype.itemsize
  block = min(capacity, 256 // itemsize)
  most = min(_BYTES // (k * block * width * itemsize), _ROWS)
  rows = next((x for x in range(most, 1, -1) if n % x == 0), 1)
  step = _Step(rows, block, heads // k, scale, cap)
  positions, first = positions.reshape(n), first.reshape(n)
  live = (0 <= positions) & (positions < capacity)
  last = jnp.where(live, positions // block, -1)
  begin = jnp.where(live, jnp.minimum(first, positions) // block, capacity)
  group_begin = jnp.min(begin.reshape(-1, rows), axis=1)
  # A group has at least one step, even if all of its rows are finished.
  group_last = jnp.maximum(jnp.max(last.reshape(-1, rows), 1), group_begin)
  scalars = layer[None], positions, first, begin, last, group_begin, group_last

  # Each query has zeros in the channels of other heads.
  own = jnp.eye(step.heads, dtype=q.dtype)[:, None, :, None]
  wide = (q.reshape(n, k, -1, r, 1, e) * own).reshape(n, k, -1, width)
  flat = lambda x: x.reshape(n, *((k, 1, width) if x.ndim == 4 else (heads, 1)))
  tokens = jax.tree.map(flat, (tuple(new), tuple(jax.tree.leaves(stored))))
  caches = [x.reshape(layers, n, *x.shape[3:]) for x in jax.tree.leaves(slots)]
  lse = jax.ShapeDtypeStruct((*wide.shape[:3], 1), jnp.float32)
  # Both TensorCores of a v4 or v5p take half the groups.
  cores = 2 if n // rows % 2 == 0 else 1
  grid = cores, n // rows // cores

  def spec(x):
    index = lambda core, i, *_: (core * grid[1] + i,) + (0,) * (x.ndim - 1)
    return pl.BlockSpec((rows, *x.shape[1:]), index)

  in_hbm = [pl.BlockSpec(memory_space=pl.ANY)] * len(caches)
  size = lambda x: (2, rows, x.shape[2], block, *x.shape[4:])
  inputs = len(scalars) + len(jax.tree.leaves((wide, tokens)))
  # If rows fill the cache, half of its slots and half a block are read.
  share = (1 + block / capacity) / 2
  read = int(sum(x.nbytes for x in caches) / layers * share)
  logits = int(wide.size // width * capacity * share)
  out, lse, caches = pl.pallas_call(
    functools.partial(_kernel, step),
    # XLA could move a small cache to VMEM and back for each call.
    out_shape=[wide, lse, [pltpu.HBM(x.shape, x.dtype) for x in caches]],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=grid,
      in_specs=[*jax.tree.map(spec, (wide, *tokens)), in_hbm],
      out_specs=[spec(wide), spec(lse), in_hbm],
      scratch_shapes=[
        [pltpu.VMEM(size(x), x.dtype) for x in caches],
        pltpu.SemaphoreType.DMA((3,)),
        pltpu.SMEM((1,), jnp.int32),
      ],
    ),
    input_output_aliases={inputs + i: 2 + i for i in range(len(caches))},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True
    ),
    cost_estimate=pl.CostEstimate(
      4 * logits * width, logits, read + 2 * wide.nbytes
    ),
    name="decode_attention",
  )(*scalars, wide, *tokens, caches)
  out = out.reshape(n, k, step.heads, r, step.heads, e)
  out = jnp.stack([out[:, :, i, :, i] for i in range(step.heads)], axis=2)
  written = [x.reshape(layers, b, g, *x.shape[2:]) for x in caches]
  return out.reshape(q.shape), lse.reshape(q.shape[:-1]), Slots(*written)
