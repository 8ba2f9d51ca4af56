"""Kernels for a token of a gated delta network, on GPUs and TPUs.

They read and write each head's memory once, in place: XLA reads it twice, and
on GPUs up to four times. With M the old memory, as in `gated_delta.step`:

    u = beta (v - exp(g) M^T k)
    out = exp(g) M^T q + (q . k) u
    new M = exp(g) M + k u^T

Axes are named as in `gated_delta`, with L layers of a stack.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.meshes import activation_spec, runs_kernels
from grpojax.models.cache import LANES

_HEADS = 16  # most heads of a step on a TPU, whose memories take 1 MiB
_COLUMNS = 64  # of a memory that a GPU's program updates


def serves(platform: str | None, memory: Array | jax.ShapeDtypeStruct) -> bool:
  """Returns True if a platform has a kernel for memories [L, B, G, H, k, v]."""
  *_, k, v = memory.shape
  fits = platform == "gpu" or (k % LANES == 0 and v % LANES == 0)
  return platform in ("gpu", "tpu") and fits and runs_kernels()


def _flops(memory: Array) -> int:
  """Returns the operations on a layer's memories, seven per number."""
  return 7 * memory.size // len(memory)


def _moved(memory: Array) -> int:
  """Returns the bytes of a layer's memories that are read and written."""
  return 2 * memory.nbytes // len(memory)


def _tpu_kernel(*refs):
  """Updates the memories of a row's heads."""
  _, begins, decay, beta, overlap, q, k, v, prompt, memory, out, after = refs
  begin = begins[pl.program_id(0), pl.program_id(2)] > 0
  decay, beta, overlap, q, k, v = (
    x[0, 0] for x in (decay, beta, overlap, q, k, v)
  )
  # Columns [k, H], because a memory's rows are keys
  queries, keys = q.T, k.T
  for head in range(len(q)):
    one = slice(head, head + 1)
    old = jnp.where(begin, prompt[0, head], memory[0, 0, 0, head])
    old = decay[one] * old
    stored = jnp.sum(keys[:, one] * old, axis=0, keepdims=True)
    recalled = jnp.sum(queries[:, one] * old, axis=0, keepdims=True)
    update = beta[one] * (v[one] - stored)
    out[0, 0, one] = recalled + overlap[one] * update
    after[0, 0, 0, head] = old + keys[:, one] * update


def _on_tpu(layer, begins, scalars, q, k, v, prompt, memory):
  b, g, heads, width = q.shape
  size = next(n for n in range(min(heads, _HEADS), 0, -1) if heads % n == 0)
  scalars = [x[..., None] for x in scalars]

  def of_row(x):
    index = lambda i, h, j, *_: (i, j, h, 0)
    return pl.BlockSpec((1, 1, size, x.shape[-1]), index)

  tile = size, width, v.shape[-1]
  # A group's rows follow each other, so that its prompt is read once.
  of_prompt = pl.BlockSpec((1, *tile), lambda i, h, j, *_: (i, h, 0, 0))
  of_memory = pl.BlockSpec(
    (1, 1, 1, *tile), lambda i, h, j, layer, *_: (layer[0], i, j, h, 0, 0)
  )
  rows = *scalars, q, k, v
  return pl.pallas_call(
    _tpu_kernel,
    out_shape=[
      jax.ShapeDtypeStruct(v.shape, v.dtype),
      pltpu.HBM(memory.shape, memory.dtype),
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(b, heads // size, g),
      in_specs=[*map(of_row, rows), of_prompt, of_memory],
      out_specs=[of_row(v), of_memory],
    ),
    input_output_aliases={3 + len(rows): 1},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary", "arbitrary")
    ),
    cost_estimate=pl.CostEstimate(
      _flops(memory), 0, _moved(memory) + prompt.nbytes + 4 * q.nbytes
    ),
    name="delta_step",
  )(layer[None], begins.astype(jnp.int32), *rows, prompt, memory)


def _gpu_kernel(*refs):
  """Updates some columns of a head's memory."""
  layer, begins, scalars, q, k, v, prompt, _, out, memory = refs
  number, head, i = (pl.program_id(axis) for axis in range(3))
  blocks = pl.cdiv(v.shape[-1], _COLUMNS)  # programs of a head
  j = jax.lax.div(number, blocks)
  first = jax.lax.rem(number, blocks) * _COLUMNS
  columns = first + jnp.arange(_COLUMNS)
  size = pl.next_power_of_2(k.shape[-1])
  in_key = jnp.arange(size) < k.shape[-1]
  in_value = columns < v.shape[-1]
  mask = in_key[:, None] & in_value[None]
  load = lambda x, at, mask: triton.load(x.at[at], mask=mask, other=0)

  keys, values = pl.ds(0, size), pl.ds(first, _COLUMNS)
  decay, beta, overlap = (x[i, j, head] for x in scalars)
  q, k = (load(x, (i, j, head, keys), in_key)[:, None] for x in (q, k))
  v = load(v, (i, j, head, values), in_value)
  begin = begins[i, j]
  at = layer[0], i, j, head, keys, values
  old = load(memory, at, mask & ~begin)
  old += load(prompt, (i, head, keys, values), mask & begin)
  old = decay * old
  update = beta * (v - jnp.sum(k * old, axis=0))
  recalled = jnp.sum(q * old, axis=0) + overlap * update
  triton.store(out.at[i, j, head, values], recalled, mask=in_value)
  triton.store(memory.at[at], old + k * update[None], mask=mask)


def _on_gpu(layer, begins, scalars, q, k, v, prompt, memory):
  b, g, heads, _ = q.shape
  flops, moved = _flops(memory), _moved(memory) + prompt.nbytes
  inputs = layer[None], begins, scalars, q, k, v, prompt
  return pl.pallas_call(
    _gpu_kernel,
    grid=(g * pl.cdiv(v.shape[-1], _COLUMNS), heads, b),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v, memory)],
    input_output_aliases={len(jax.tree.leaves(inputs)): 1},
    compiler_params=triton.CompilerParams(num_warps=4),
    name=f"delta_step_flops_{flops}_bytes_{moved}",
  )(*inputs, memory)


def step(
  platform: str,
  tokens: tuple[Float[Array, "B G H *_"], ...],
  begins: Bool[Array, "B G"],
  prompt: Float[Array, "B H k v"],
  memory: Float[Array, "L B G H k v"],
  layer: Int[Array, ""],
) -> tuple[Float[Array, "B G H v"], Float[Array, "L B G H k v"]]:
  """Returns the outputs of one token per row, and the updated memories.

  `tokens` are q, k, v, g and beta. Rows that begin start from the memory of
  their prompt.
  """
  q, k, v, g, beta = tokens
  scalars = jnp.exp(g), beta, jnp.sum(q * k, axis=-1)
  kernel = {"gpu": _on_gpu, "tpu": _on_tpu}[platform]
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:
    spec = lambda x, *names: activation_spec(mesh, x.shape, names)
    head = spec(k, "batch", "group", "kv_heads")
    row = P(*head[:2])
    cached = spec(memory, None, "batch", "group", "kv_heads")
    in_specs = P(), row, head, head, head, head, P(head[0], head[2]), cached
    kernel = jax.shard_map(
      kernel, in_specs=in_specs, out_specs=(head, cached), check_vma=False
    )
  return kernel(layer, begins, scalars, q, k, v, prompt, memory)
