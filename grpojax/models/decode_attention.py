"""Attention of one new token per row by kernels that read live slots only.

The kernels write the new token's keys and values in place, so the caches of a
stack pass through its layers as a carry. On TPUs XLA computes the attention to
prompts, once per group, and the two softmaxes are merged by their log-sum-exps;
on GPUs the kernel reads the prompts, too.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from grpojax.core.meshes import activation_spec, constrain, runs_kernels
from grpojax.models import attention, block
from grpojax.models.block import Heads, Local, TokenContext
from grpojax.models.cache import (
  LANES,
  KeysValues,
  PromptKeysValues,
  Slots,
  heads_per_row,
)
from grpojax.models.config import TransformerConfig
from grpojax.models.quantization import quantize

PLATFORMS = ("gpu", "tpu")

_HEADS = "batch", "group", "kv_heads", "query_heads"


def has_kernel(config: TransformerConfig, platform: str) -> bool:
  """Returns True if a platform has a kernel for the heads of a model."""
  width = config.head_dim * heads_per_row(config.kv_heads, config.head_dim)
  fits = platform == "gpu" or width % LANES == 0  # a TPU reads whole lanes
  return platform in PLATFORMS and fits and runs_kernels()


def _kernels(platform: str) -> types.ModuleType:
  """Imports the kernel of a platform; late, because Pallas imports slowly."""
  from grpojax.models import gpu_decode_attention, tpu_decode_attention

  return {"gpu": gpu_decode_attention, "tpu": tpu_decode_attention}[platform]


def serves(platform: str | None, slots: Slots) -> bool:
  """Returns True if a kernel of the platform can read a stack's cache."""
  if platform not in PLATFORMS or not runs_kernels():
    return False
  return _kernels(platform).serves(slots.keys)


def _stored(new: KeysValues, slots: Slots) -> Slots:
  """Returns new tokens as the cache holds them."""
  if slots.key_scales is None:
    return Slots(*(x.astype(slots.keys.dtype) for x in new))
  integers, scales = zip(*map(quantize, new), strict=True)
  return Slots(*integers, *scales)


class Rows(NamedTuple):
  """Rows of which a layer decodes one token."""

  starts: Int[Array, "B G"]  # number of earlier tokens; -1: not decoded
  prompt_lengths: Int[Array, "B"]


def attend(
  config: TransformerConfig,
  platform: str,
  local: Local,
  context: TokenContext,
  rows: Rows,
  prompt: PromptKeysValues,
  slots: Slots,
  layer: Int[Array, ""],
  heads: Heads,
) -> tuple[Float[Array, "B G 1 HE"], Slots]:
  """Returns the output of attention and the stack's cache with the new tokens.

  `layer` is the layer's place in the stack.
  """
  c = config
  local = local if c.window else False
  b, g = rows.starts.shape
  q, k, v = (x[:, :, 0] for x in heads)
  q = q.reshape(b, g, c.kv_heads, -1, c.head_dim)
  q = constrain(q, *_HEADS)
  new = KeysValues(*(constrain(x, *_HEADS[:3]) for x in (k, v)))
  scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
  limits = dict(scale=scale, cap=c.attention_cap)
  first = prompt_first = jnp.zeros_like(rows.starts)
  if local is not False:  # a traced `local` has windows in some layers
    first = jnp.where(local, jnp.maximum(rows.starts - c.window + 1, 0), 0)
    position = rows.prompt_lengths[:, None] + rows.starts
    in_prompt = jnp.maximum(position - c.window + 1, 0)
    prompt_first = jnp.where(local, in_prompt, 0)
  args = q, new, _stored(new, slots), slots, layer, rows.starts, first
  kernel = functools.partial(_kernels(platform).attend, **limits)
  if platform == "gpu":
    args = *args, prompt, rows.prompt_lengths, prompt_first
    out, slots = _on_devices(kernel, args)(*args)
  else:
    out, lse, slots = _on_devices(kernel, args)(*args)
    mask = block.masks(local, c.window, context)[2]
    out = _with_prompt(q, prompt, mask, limits, out, lse)
  return constrain(out, *_HEADS).reshape(b, g, 1, -1), slots


def _with_prompt(q, prompt, mask, limits, out, lse):
  """Merges attention to the prompts with the rows' own, by their mass."""
  prompts, prompt_lse = attention.attend_prompt(
    q[:, :, :, :, None], prompt, mask, **limits, unit=""
  )
  share = jax.nn.sigmoid(prompt_lse[..., 0, :] - lse[..., None])
  return (out + share * (prompts[..., 0, :] - out)).astype(q.dtype)


def _on_devices(kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
  """Makes each device of the mesh in context, if any, run its own rows."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return kernel
  q, new, _, slots, _, _, _, *prompt = args
  spec = lambda x, *names: activation_spec(mesh, x.shape, names)
  queries = spec(q, *_HEADS)
  token = spec(new.keys, *_HEADS[:3])
  cached = spec(slots.keys, None, *_HEADS[:3])
  row = P(*queries[:2])
  in_specs = queries, token, token, cached, P(), row, row
  out_specs = queries, queries, cached
  if prompt:
    keys = spec(prompt[0].keys, "batch", "kv_heads")
    in_specs = *in_specs, keys, P(queries[0]), row
    out_specs = queries, cached
  return jax.shard_map(
    kernel, in_specs=in_specs, out_specs=out_specs, check_vma=False
  )
