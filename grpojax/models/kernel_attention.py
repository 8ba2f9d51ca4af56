"""Attention of long rows on TPUs and GPUs, with the kernels `flash_kernels`.

A segment is a run of tokens with consecutive positions. So a query sees a run
of keys in its row, up to itself, and a run of keys in the prompt.

The kernels have no forward-mode derivative: `jax.jvp` needs `block_attention`.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from grpojax.core.meshes import activation_spec, runs_kernels
from grpojax.models import flash_kernels, sharding
from grpojax.models.attention import Visibility
from grpojax.models.cache import KeysValues, PromptKeysValues, pad
from grpojax.models.flash_kernels import Part

_UNLIMITED = 2**30  # window of a global layer, in tokens
_QUERY_AXES = "batch", "group", "kv_heads", "query_heads"


class _Seen(NamedTuple):
  """Runs of visible keys, which end at the query or at the prompt's end."""

  first: Int[Array, "B G S"]  # first slot in the row
  prompt_first: Int[Array, "B G S"]  # first slot in the prompt
  lengths: Int[Array, "B"]  # of the prompts


def _seen(visibility: Visibility, window: int, prompts: int) -> _Seen:
  positions, segments, prompt_mask, local = visibility
  slots = jnp.broadcast_to(jnp.arange(positions.shape[-1]), positions.shape)
  first = prompt_first = jnp.zeros_like(slots)
  if segments is not None:
    # `cummax` carries a segment's first slot to all its tokens. `roll` compares
    # slot 0 with the last slot, but the result is 0 in either case.
    begins = segments != jnp.roll(segments, 1, axis=-1)
    first = jax.lax.cummax(jnp.where(begins, slots, 0), axis=2)
  if local is not False:
    # A traced `local` may be False: then there is no limit.
    limit = jnp.where(local, window, _UNLIMITED)
    # The window includes the query itself.
    first = jnp.maximum(first, slots + 1 - limit)
    # In a prompt, slots equal positions; a row's positions follow the prompt's.
    prompt_first = jnp.maximum(positions + 1 - limit, 0)
  lengths = jnp.zeros(prompts, jnp.int32)
  if prompt_mask is not None:
    lengths = jnp.sum(prompt_mask, axis=-1)
  seen = _Seen(first, prompt_first, lengths)
  return jax.tree.map(lambda x: x.astype(jnp.int32), seen)


def _flat(x: Array) -> Array:
  """[B, G, K, R, S, E] -> [N, H, S, E], or [B, G, K, S, E] -> [N, K, S, E]."""
  return x.reshape(-1, math.prod(x.shape[2:-2]), *x.shape[-2:])


def _parts(row, prompt, seen: _Seen) -> list[Part]:
  b, g, s = seen.first.shape
  by_query = lambda x: jnp.broadcast_to(x, (b, g, s)).reshape(b * g, 1, s)
  # Causal: in the row, visible keys end at the query itself.
  last = by_query(jnp.arange(s, dtype=jnp.int32))
  parts = [Part(*map(_flat, row), by_query(seen.first), last)]
  if prompt is not None:
    # In the prompt, visible keys end at its last real token, before padding.
    last = by_query(seen.lengths[:, None, None] - 1)
    parts.append(Part(*prompt, by_query(seen.prompt_first), last))
  return parts


def _forward(settings, _, q, row, prompt, seen):
  """Returns the output, float32, and log-sum-exps [B, G, K, R, S]."""
  parts = _parts(row, prompt, seen)
  out, lse = flash_kernels.forward(settings, _flat(q), parts)
  return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _backward(settings, sums, q, row, prompt, seen, out, lse, dout):
  """Returns gradients of q, row and prompt, summed over mesh axes `sums`."""
  # sum_j w_j d w_j of each query (FlashAttention-2's D), from the output alone
  di = jnp.sum(out * dout.astype(jnp.float32), axis=-1)
  lse, di = (_flat(x[..., None, :]) for x in (lse, di))
  queries = [_flat(q), _flat(dout), lse, di]
  parts = _parts(row, prompt, seen)
  dq = flash_kernels.query_gradient(settings, queries, parts)

  def part_gradients(index, arrays, axes):
    # [N, ...] -> [M, N / M, ...]: consecutive rows belong to the same keys.
    def add_up(x, like):  # over the rows and devices that share keys
      x = x.reshape(len(parts[index].keys), -1, *x.shape[1:]).sum(axis=1)
      x = jax.lax.psum(x, axes) if axes else x
      return x.reshape(like.shape).astype(like.dtype)

    gradients = flash_kernels.key_gradients(settings, queries, parts, index)
    return type(arrays)(*map(add_up, gradients, arrays))

  arrays = [row] if prompt is None else [row, prompt]
  gradients = list(map(part_gradients, range(len(parts)), arrays, sums))
  # A missing prompt has the gradient None.
  return dq.reshape(q.shape), *gradients, *[None] * (2 - len(gradients))


def _over_mesh(function, q, row, prompt, seen, *outputs, gradients=False):
  """Calls `function(sums, q, ...)` on each device, with its rows and heads.

  `sums` is a pair: mesh axes that split q but not row, and q but not prompt.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.axis_names:
    return function(((), ()), q, row, prompt, seen, *outputs)
  b, g, k, _ = spec = activation_spec(mesh, q.shape, _QUERY_AXES)
  _, group_axes, _, head_axes = sharding.axes_of(spec)
  # Devices that split query heads share the row's keys; those that split a
  # group also share its prompt. Shared gradients are summed over these axes.
  sums = tuple(head_axes), (*group_axes, *head_axes)
  in_specs = spec, P(b, g, k), P(b, k), _Seen(P(b, g), P(b, g), P(b))
  return jax.shard_map(
    functools.partial(function, sums),
    in_specs=(*in_specs, *[spec] * len(outputs)),
    out_specs=in_specs[:3] if gradients else (spec, spec),
    check_vma=False,  # kernels do not support the check
  )(q, row, prompt, seen, *outputs)


def _without_derivative(function):
  """Wraps a function, so that its derivative raises an error with a remedy."""
  once = jax.custom_jvp(function, nondiff_argnums=(0,))

  @once.defjvp
  def jvp(*_):
    raise NotImplementedError(
      "kernel attention has no second derivative: set model.attention = blocks"
    )

  return once


@_without_derivative
def _outputs(settings, *arrays):
  return _over_mesh(functools.partial(_forward, settings), *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings, q, row, prompt, seen):
  return _attention_forward(settings, q, row, prompt, seen)[0]


def _attention_forward(settings, *arrays):
  out, lse = _outputs(settings, *arrays)
  # The residual `out` is not rounded, so that parts common to all keys or
  # values cancel in the gradient of the queries.
  return out.astype(arrays[0].dtype), (*arrays, out, lse)


@_without_derivative
def _gradients(settings, *arrays):
  backward = functools.partial(_backward, settings)
  return _over_mesh(backward, *arrays, gradients=True)


def _attention_backward(settings, residuals, dout):
  # Runs of keys are integers without a gradient.
  return *_gradients(settings, *residuals, dout), None


_attention.defvjp(_attention_forward, _attention_backward)


def _pad(x: Array, axis: int, multiple: int) -> Array:
  return pad(x, axis, -x.shape[axis] % multiple)


def kernel_attention(
  q: Float[Array, "B G K R S E"],
  row: KeysValues,
  prompt: PromptKeysValues | None,
  visibility: Visibility,
  *,
  platform: str,
  window: int = 0,
  scale: float | None = None,
  cap: float | None = None,
) -> Float[Array, "B G K R S E"]:
  """Computes `block_attention` with kernels (interpreted on "cpu").

  Segments must be runs of tokens, and prompts must be padded on the right.
  """
  *_, size, width = q.shape
  scale = width**-0.5 if scale is None else scale
  sizes = [size] if prompt is None else [size, prompt.keys.shape[2]]
  blocks = tuple(flash_kernels.block_size(platform, n, width) for n in sizes)
  settings = flash_kernels.Settings(scale, cap, platform, blocks)
  seen = _seen(visibility, window, len(q))
  # Padding queries see themselves, so that no sum is empty.
  first = jnp.arange(size, size + -size % blocks[0], dtype=jnp.int32)
  first = jnp.broadcast_to(first, (*seen.first.shape[:2], len(first)))
  seen = seen._replace(
    first=jnp.concatenate([seen.first, first], axis=2),
    prompt_first=_pad(seen.prompt_first, 2, blocks[0]),
  )
  # Pad all arrays to whole blocks.
  q = _pad(q, 4, blocks[0])
  row = jax.tree.map(lambda x: _pad(x, 3, blocks[0]), row)
  prompt = jax.tree.map(lambda x: _pad(x, 2, blocks[-1]), prompt)
  if platform == "gpu":  # Triton needs powers of two, at least 16
    channels = 1 << (max(width, 16) - 1).bit_length()
    pad = lambda x: _pad(x, x.ndim - 1, channels)
    q, row, prompt = jax.tree.map(pad, (q, row, prompt))
  out = _attention(settings, q, row, prompt, seen)
  return out[..., :size, :width]


def is_usable(platform: str, q: Array, prompt: PromptKeysValues | None) -> bool:
  """Returns True if the mesh lets kernels run (`meshes.runs_kernels`).

  TPUs also need rows that fit in memory, and a dtype other than float16.
  """
  if platform != "tpu":
    return runs_kernels()
  tokens = q.shape[-2] + (prompt.keys.shape[-2] if prompt else 0)
  fits = flash_kernels.fits(tokens, q.shape[-1], q.dtype)
  return runs_kernels() and fits and q.dtype != jnp.float16
