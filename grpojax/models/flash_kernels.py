"""Attention kernels in Pallas, for a TPU (Mosaic) or GPU (Triton).

FlashAttention (Dao 2023, arXiv 2307.08691) with a softmax over several sets of
keys: all logits stay on the chip.

A query sees a run of keys in each set. The first and last slots of the runs
determine the masks and the blocks without visible keys, which are left out. For
example, a row of two segments, in blocks of two (on the right: queries x keys):

    keys       a a | a b | b b         m: computed, with a mask; -: left out
    queries    a a | a b | b b           m - -
    first      0 0 | 0 3 | 3 3           m m -
    last       0 1 | 2 3 | 4 5           - m m

Logits are [keys, queries], so that numbers per query (runs, log-sum-exps) fill
the lanes of a TPU without padding.

Axes: N rows, H query heads, K key heads, S queries and C keys of a row, E
channels; M rows of keys; N / M rows of queries share each.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jaxtyping import Array, DTypeLike, Float, Int

from grpojax.core.decoding.sampling import NEGATIVE
from grpojax.models.attention import soft_cap

_VMEM = 56 * 2**20  # bytes of on-chip memory for a TPU's kernel
_VMEM_V4 = 15 * 2**20  # for a TPU v4


class Settings(NamedTuple):
  """Static settings of attention."""

  scale: float
  cap: float | None
  platform: str
  blocks: tuple[int, ...]  # tokens per key block by part, [0] for queries too


class Part(NamedTuple):
  """A set of keys and the runs that queries see; part 0 is the queries' row."""

  keys: Float[Array, "M K C E"]
  values: Float[Array, "M K C E"]
  first: Int[Array, "N 1 S"]  # slot of the first key
  last: Int[Array, "N 1 S"]  # slot of the last key; empty if before `first`


class _Run(NamedTuple):
  """Runs of blocks to compute, begin <= i < end; in a kernel, references."""

  begin: Int[Array, "N 1 blocks"]
  end: Int[Array, "N 1 blocks"]


def block_size(platform: str, size: int, width: int) -> int:
  """Returns the tokens per block; rows are padded to a multiple of it."""
  if platform == "cpu":  # small, for tests with several blocks
    return 16
  if platform == "gpu":  # fits in an H100 multiprocessor's 228 KB
    return 64 if width <= 128 else 32
  # A multiple of a TPU's lanes, as large as possible without much padding.
  return next((n for n in (512, 256) if -size % n <= size // 8), 128)


def _vmem() -> int:
  """Returns the bytes of on-chip memory that a TPU kernel may use."""
  mesh = jax.sharding.get_abstract_mesh()
  device = getattr(mesh, "abstract_device", None) or jax.devices()[0]
  return _VMEM_V4 if "v4" in device.device_kind else _VMEM


def fits(tokens: int, width: int, dtype: DTypeLike) -> bool:
  """Returns True if a TPU kernel can hold the keys and values of a head.

  For 128 channels in 16 bits the limit is 76k tokens; on v4 it is 20k.
  """
  held = 2 * tokens * -(-width // 128) * 128 * jnp.dtype(dtype).itemsize
  return held <= _vmem() * 2 // 3


def _visible(part: Part, block: int, key_block: int) -> Array:
  """Returns [N, i, j], True if query block i may see keys of block j."""
  # A block's earliest `first` and latest `last` slot bound all its runs.
  split = lambda x: x.reshape(len(x), -1, block)
  first = jnp.min(split(part.first), axis=-1)[..., None]
  last = jnp.max(split(part.last), axis=-1)[..., None]
  start = jnp.arange(0, part.keys.shape[2], key_block)
  return (first < start + key_block) & (start <= last)


def _run(visible: Array) -> _Run:
  """Returns the shortest run of blocks that holds all visible blocks."""
  count = visible.shape[-1]
  any_visible = jnp.any(visible, axis=-1)
  # `argmax` finds the first visible block and, in reverse, the last one.
  begin = jnp.argmax(visible, axis=-1)
  end = count - jnp.argmax(visible[..., ::-1], axis=-1)
  end = jnp.where(any_visible, end, begin)
  return _Run(*(x.astype(jnp.int32)[:, None] for x in (begin, end)))


_div = jax.lax.div  # for indices: `//` would add code for signs


def _dot(x: Array, y: Array, over: tuple[int, int]) -> Array:
  axes = (over[:1], over[1:]), ((), ())
  options = {"preferred_element_type": jnp.float32}
  if x.dtype != jnp.float32:  # 16-bit floats have no other precision
    options["precision"] = jax.lax.Precision.DEFAULT
  return jax.lax.dot_general(x, y, axes, **options)


def _logits(settings, keys, q, slots, first, last) -> tuple[Array, Array]:
  """Returns the logits [keys, queries] of two blocks, and their mask."""
  logits = soft_cap(_dot(keys, q, (1, 1)) * settings.scale, settings.cap)
  # Slots of the keys, along axis 0
  slots += jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
  return logits, (first <= slots) & (slots <= last)


def _dlogits(settings, logits, mask, lse, values, dout, di):
  """Returns weights, and the gradient of the products q k."""
  weights = jnp.where(mask, jnp.exp(logits - lse), 0)
  slope = settings.scale
  # The derivative of the soft cap is 1 - tanh^2.
  if settings.cap is not None:
    slope = slope * (1 - (logits / settings.cap) ** 2)
  # Gradient of softmax: w (dw - sum of w dw), and dw = v . dout.
  return weights, weights * (_dot(values, dout, (1, 1)) - di) * slope


def _over_keys(settings, q, parts, add, carry):
  """Folds `add(carry, logits, mask, keys, values)` over all key blocks."""
  i = pl.program_id(2)
  for key_block, (run, part) in zip(settings.blocks, parts, strict=True):
    # Defaults bind the loop's variables to this part.
    def step(j, carry, part=part, key_block=key_block):
      start = pl.multiple_of(j * key_block, key_block)
      block = pl.ds(start, key_block)
      keys, values = part.keys[block, :], part.values[block, :]
      first, last = part.first[...], part.last[...]
      logits, mask = _logits(settings, keys, q, start, first, last)
      return add(carry, logits, mask, keys, values)

    carry = jax.lax.fori_loop(run.begin[0, i], run.end[0, i], step, carry)
  return carry


def _forward_kernel(settings, q_ref, parts, out_ref, lse_ref):
  """Computes an online softmax (explained in `block_attention._forward`)."""
  # All arrays are [.., queries], because the logits are [keys, queries].
  q = q_ref[...]
  block, width = q.shape
  carry = (
    jnp.full((1, block), NEGATIVE, jnp.float32),
    jnp.zeros((1, block), jnp.float32),
    jnp.zeros((width, block), jnp.float32),
  )

  def add(carry, logits, mask, keys, values):
    top, total, out = carry
    logits = jnp.where(mask, logits, NEGATIVE)
    new_top = jnp.maximum(top, jnp.max(logits, axis=0, keepdims=True))
    weights = jnp.where(mask, jnp.exp(logits - new_top), 0)
    rescale = jnp.exp(top - new_top)
    # Rounded weights are summed, to make an average of equal values exact.
    weights = weights.astype(q.dtype)
    added = jnp.sum(weights.astype(jnp.float32), axis=0, keepdims=True)
    total = total * rescale + added
    out = out * rescale + _dot(values, weights, (0, 0))
    return new_top, total, out

  top, total, out = _over_keys(settings, q, parts, add, carry)
  out_ref[...] = (out / total).T.astype(out_ref.dtype)
  lse_ref[...] = top + jnp.log(total)


def _queries_kernel(settings, q_ref, dout_ref, lse_ref, di_ref, parts, dq_ref):
  q, dout, lse, di = (x[...] for x in (q_ref, dout_ref, lse_ref, di_ref))

  def add(dq, logits, mask, keys, values):
    _, dlogits = _dlogits(settings, logits, mask, lse, values, dout, di)
    return dq + _dot(keys, dlogits.astype(q.dtype), (0, 0))

  # The gradient is summed as [E, queries], like the output.
  dq = jnp.zeros(q.shape[::-1], jnp.float32)
  dq = _over_keys(settings, q, parts, add, dq)
  dq_ref[...] = dq.T.astype(dq_ref.dtype)


def _keys_kernel(
  settings, q_ref, dout_ref, lse_ref, di_ref, run, part, dkeys_ref, dvalues_ref
):
  """Computes the gradients of a block of keys and values, for one row.

  It sums over the query heads in `q_ref` and along the last axis of the grid.
  """
  j, head = pl.program_id(2), pl.program_id(3)
  keys, values = part.keys[...], part.values[...]
  block = settings.blocks[0]
  heads = len(q_ref)

  # Add the gradients of query block i of head r.
  def step(i, carry, r):
    dkeys, dvalues = carry
    at = pl.ds(pl.multiple_of(i * block, block), block)
    q, dout = q_ref[r, at, :], dout_ref[r, at, :]
    first, last = part.first[:, at], part.last[:, at]
    logits, mask = _logits(settings, keys, q, j * len(keys), first, last)
    lse, di = lse_ref[r, :, at], di_ref[r, :, at]
    weights, dlogits = _dlogits(settings, logits, mask, lse, values, dout, di)
    dkeys += _dot(dlogits.astype(q.dtype), q, (1, 0))
    dvalues += _dot(weights.astype(q.dtype), dout, (1, 0))
    return dkeys, dvalues

  carry = (jnp.zeros(keys.shape, jnp.float32),) * 2
  # The gradients of all query heads that read these keys are added up.
  for r in range(heads):
    head_step = functools.partial(step, r=r)
    carry = jax.lax.fori_loop(run.begin[0, j], run.end[0, j], head_step, carry)
  for ref, x in zip((dkeys_ref, dvalues_ref), carry, strict=True):
    if settings.platform == "gpu":
      ref[...] = x
    else:  # the last axis of the grid adds to the same block
      ref[...] = x + jnp.where(head == 0, 0, ref[...])


def _call(settings, kernel, grid, inputs, outputs, flops, again):
  """Calls a kernel; inputs and outputs are pairs of trees (specs, arrays).

  `flops` counts the operations of matrix products, and `again` the bytes of
  repeated fetches, for XLA's scheduler and `aot`.
  """
  in_specs, inputs = inputs
  out_specs, outputs = outputs
  if settings.platform == "gpu":
    params = triton.CompilerParams(num_warps=4, num_stages=2)
  else:
    # The last axis is summed over; the other axes may run in any order.
    order = "parallel", "parallel", "parallel", "arbitrary"
    params = pltpu.CompilerParams(
      dimension_semantics=order[: len(grid)], vmem_limit_bytes=_vmem()
    )
  name = kernel.__name__.strip("_")
  if settings.platform == "gpu":  # no cost estimate; `aot` reads the name
    name += f"_flops_{flops}"
  arrays = jax.tree.leaves((inputs, outputs))
  traffic = again + sum(x.size * x.dtype.itemsize for x in arrays)
  return pl.pallas_call(
    functools.partial(kernel, settings),
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=outputs,
    compiler_params=params,
    interpret=settings.platform == "cpu",
    name=name,
    cost_estimate=pl.CostEstimate(
      flops=flops, transcendentals=0, bytes_accessed=traffic
    ),
  )(*inputs)


def _run_specs(settings: Settings, run: _Run) -> _Run:
  """Returns the specs of a row's runs, in scalar memory on a TPU."""
  space = {} if settings.platform == "gpu" else {"memory_space": pltpu.SMEM}
  shape = None, 1, run.begin.shape[2]
  spec = pl.BlockSpec(shape, lambda n, *_: (n, 0, 0), **space)
  return _Run(spec, spec)


def _buffers(settings: Settings, x: Array) -> dict[str, Any]:
  """Returns `BlockSpec` options: a long row gets one buffer, to save memory."""
  head = x.shape[-2] * x.shape[-1] * x.dtype.itemsize
  if settings.platform == "gpu" or head < 2**21:
    return {}
  return {"pipeline_mode": pl.Buffered(1)}


def _flops(products: int, q: Array, parts: Sequence[Part], index: int) -> int:
  """Returns operations of products with a part, assuming a single segment."""
  keys = parts[index].keys.shape[2]
  # A query sees half of its row on average, and all of its prompt.
  return 2 * products * q.size * (keys if index else (keys + 1) // 2)


def _over_queries(settings, kernel, products, queries, parts, out):
  """Calls a kernel for each query block; it has `products` matrix products.

  Arrays of `queries` and of `out` (abstract) are [N, H, S, E] or [N, H, 1, S].
  """
  q = queries[0]
  block = settings.blocks[0]
  n, heads, size, width = q.shape

  def query_spec(x):
    if x.shape[2] == 1:
      return pl.BlockSpec((None, None, 1, block), lambda n, h, i: (n, h, 0, i))
    index = lambda n, h, i: (n, h, i, 0)
    return pl.BlockSpec((None, None, block, width), index)

  def part_specs(part):
    # Rows per set of keys, and query heads per key head
    share = n // len(part.keys)
    ratio = heads // part.keys.shape[1]
    index = lambda n, h, i: (_div(n, share), _div(h, ratio), 0, 0)
    # A program holds all keys of its head, and loops over their blocks.
    shape = None, None, *part.keys.shape[2:]
    keys = pl.BlockSpec(shape, index, **_buffers(settings, part.keys))
    run = pl.BlockSpec((None, 1, block), lambda n, h, i: (n, 0, i))
    return Part(keys, keys, run, run)

  runs = [
    _run(_visible(part, block, key_block))
    for part, key_block in zip(parts, settings.blocks, strict=True)
  ]
  run_specs = [_run_specs(settings, run) for run in runs]
  specs = [*zip(run_specs, map(part_specs, parts), strict=True)]
  arrays = [*zip(runs, parts, strict=True)]
  return _call(
    settings,
    kernel,
    # Axes: rows, query heads, query blocks
    (n, heads, size // block),
    ([*map(query_spec, queries), specs], [*queries, arrays]),
    (jax.tree.map(query_spec, out), out),
    sum(_flops(products, q, parts, index) for index in range(len(parts))),
    # With several key heads, each row fetches the keys of its set again.
    again=sum(
      (n // len(x.keys) - 1) * 2 * x.keys.nbytes
      for x in parts
      if x.keys.shape[1] > 1
    ),
  )


def forward(
  settings: Settings, q: Float[Array, "N H S E"], parts: Sequence[Part]
) -> tuple[Float[Array, "N H S E"], Float[Array, "N H 1 S"]]:
  """Returns the float32 output and log-sum-exps. Each query must see a key."""
  n, heads, size, _ = q.shape
  lse = jax.ShapeDtypeStruct((n, heads, 1, size), jnp.float32)
  out = jax.ShapeDtypeStruct(q.shape, jnp.float32), lse
  return _over_queries(settings, _forward_kernel, 2, [q], parts, out)


def query_gradient(
  settings: Settings, queries: Sequence[Array], parts: Sequence[Part]
) -> Float[Array, "N H S E"]:
  """Returns the gradient of the queries.

  `queries` are q and the output's gradient [N, H, S, E], the log-sum-exps, and
  the sums of output times gradient [N, H, 1, S].
  """
  dq = jax.ShapeDtypeStruct(queries[0].shape, queries[0].dtype)
  return _over_queries(settings, _queries_kernel, 3, queries, parts, dq)


def key_gradients(
  settings: Settings,
  queries: Sequence[Array],
  parts: Sequence[Part],
  index: int,
) -> tuple[Float[Array, "N K C E"], Float[Array, "N K C E"]]:
  """Returns the gradients of a part's keys and values for each row, float32.

  `queries` are as in `query_gradient`.
  """
  q = queries[0]
  part = parts[index]
  block = settings.blocks[0]
  key_block = settings.blocks[index]
  n, heads, size, width = q.shape
  _, kv_heads, slots, _ = part.keys.shape
  share = n // len(part.keys)
  # A GPU's programs run in parallel, so they cannot add up in place.
  per_turn = heads // kv_heads if settings.platform == "gpu" else 1
  turns = heads // kv_heads // per_turn

  # A key head has `turns` blocks of `per_turn` query heads, in order.
  def query_spec(x):
    index = lambda n, k, j, r: (n, k * turns + r, 0, 0)
    shape = None, per_turn, *x.shape[2:]
    return pl.BlockSpec(shape, index, **_buffers(settings, x))

  shape = None, None, key_block, width
  # Keys are read from the row's set, but gradients are written per row.
  keys = pl.BlockSpec(shape, lambda n, k, j, r: (_div(n, share), k, j, 0))
  run = pl.BlockSpec((None, 1, size), lambda n, k, j, r: (n, 0, 0))
  gradient = pl.BlockSpec(shape, lambda n, k, j, r: (n, k, j, 0))
  out = jax.ShapeDtypeStruct((n, kv_heads, slots, width), jnp.float32)
  # Runs of query blocks that may see each key block
  blocks = _run(_visible(part, block, key_block).swapaxes(1, 2))
  scalars = _run_specs(settings, blocks)
  specs = *map(query_spec, queries), scalars, Part(keys, keys, run, run)
  return _call(
    settings,
    _keys_kernel,
    # Axes: rows, key heads, key blocks, and blocks of query heads
    (n, kv_heads, slots // key_block, turns),
    (specs, (*queries, blocks, part)),
    ((gradient, gradient), (out, out)),
    _flops(4, q, parts, index),
    # With several blocks of query heads, each key block fetches queries again.
    again=(slots // key_block - 1) * 2 * q.nbytes if turns > 1 else 0,
  )
