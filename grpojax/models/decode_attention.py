"""Attention of one new token per row by kernels that read live slots only.

The kernels write the new token's keys and values in place, so the caches of a
stack pass through its layers as a carry. On TPUs XLA computes the attention to
prompts, once per group, and the two softmaxes are merged by their log-sum-exps;
on GPUs the kernel reads the prompts, too.
"""

from typing import Any

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

PLATFORMS = ("tpu",)

_HEADS = "batch", "group", "kv_heads", "query_heads"


def has_kernel(config: TransformerConfig, platform: str) -> bool:
  """Returns True if a platform has a kernel for the heads of a model."""
  width = config.head_dim * heads_per_row(config.kv_heads, config.head_dim)
  return platform in PLATFORMS and width % LANES == 0 and runs_kernels()


def serves(platform: str | None, slots: Slots) -> bool:
  """Returns True if a kernel of the platform can read a stack's cache."""
  if platform not in PLATFORMS or not runs_kernels():
    return False
  from grpojax.models import tpu_decode_attention  # importing Pallas is slow

  return tpu_decode_attention.serves(slots.keys)


def _stored(new: KeysValues, slots: Slots) -> Slots:
  """Returns new tokens as the cache holds them."""
  if slots.key_scales is None:
    return Slots(*(x.astype(slots.keys.dtype) for x in new))
  integers, scales = zip(*map(quantize, new), strict=True)
  return Slots(*integers, *scales)


def attend(
  config: TransformerConfig,
  local: Local,
  context: TokenContext,
  starts: Int[Array, "B G"],
  prompt: PromptKeysValues,
  slots: Slots,
  layer: Int[Array, ""],
  heads: Heads,
) -> tuple[Float[Array, "B G 1 HE"], Slots]:
  """Returns the output of attention and the stack's cache with the new tokens.

  `starts` are the numbers of earlier tokens of the rows, -1 for rows that are
  not decoded; `layer` is the layer's place in the stack.
  """
  from grpojax.models import tpu_decode_attention

  c = config
  b, g = starts.shape
  q, k, v = (x[:, :, 0] for x in heads)
  q = q.reshape(b, g, c.kv_heads, -1, c.head_dim)
  q = constrain(q, *_HEADS)
  new = KeysValues(*(constrain(x, *_HEADS[:3]) for x in (k, v)))
  scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
  first = jnp.zeros_like(starts)
  if local is not False:  # a traced `local` has windows in some layers
    window = jnp.maximum(starts - c.window + 1, 0)
    first = window if local is True else jnp.where(local, window, first)

  def kernel(q, new, stored, slots, layer, starts, first):
    return tpu_decode_attention.attend(
      q,
      new,
      stored,
      slots,
      layer,
      starts,
      first,
      scale=scale,
      cap=c.attention_cap,
    )

  args = q, new, _stored(new, slots), slots, layer, starts, first
  out, lse, slots = _on_devices(kernel, args)(*args)
  # Attention to the prompts, merged with the rows' own by their mass
  mask = block.masks(local, c.window, context)[2]
  q = q[:, :, :, :, None]
  prompts, prompt_lse = attention.attend_prompt(
    q, prompt, mask, scale, c.attention_cap, ""
  )
  share = jax.nn.sigmoid(prompt_lse[..., 0, :] - lse[..., None])
  out = (out + share * (prompts[..., 0, :] - out)).astype(q.dtype)
  return constrain(out, *_HEADS).reshape(b, g, 1, -1), slots


def _on_devices(kernel: Any, args: tuple[Any, ...]) -> Any:
  """Makes each device of the mesh in context, if any, run its own rows."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return kernel
  q, new, _, slots, *_ = args
  spec = lambda x, *names: activation_spec(mesh, x.shape, names)
  queries = spec(q, *_HEADS)
  token = spec(new.keys, *_HEADS[:3])
  cached = spec(slots.keys, None, *_HEADS[:3])
  row = P(*queries[:2])
  return jax.shard_map(
    kernel,
    in_specs=(queries, token, token, cached, P(), row, row),
    out_specs=(queries, queries, cached),
    check_vma=False,
  )
