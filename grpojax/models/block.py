"""One decoder layer: attention and MLP, as the configuration describes them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpojax.models.attention import rms_norm, two_part_attention
from grpojax.models.moe import mixture
from grpojax.models.rope import rotate

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Rows(NamedTuple):
  """What all layers know of the tokens [B, G, S] that pass through them.

  Attributes:
    tables: rotary tables, for each of the configuration's `ropes`.
    mask: of the own keys, broadcastable to [B, G, K, R, S, C].
    positions: of the tokens in the whole sequence.
    key_positions: of the own keys, likewise.
    prompt_mask: [B, P], or None where the tokens are the prompt.
  """

  tables: tuple[Any, ...]
  mask: Bool[Array, "..."]
  positions: Int[Array, "B G S"]
  key_positions: Int[Array, "B G C"]
  prompt_mask: Bool[Array, "B P"] | None


def _project(x, layer, name):
  """X W + bias, and (x A) B where the layer has an adapter (Hu et al. 2021)."""
  y = x @ layer[name]
  a, b = layer.get(f"{name}_lora_a"), layer.get(f"{name}_lora_b")
  if a is not None:
    y = y + (x @ a) @ b
  bias = layer.get(f"{name}_bias")
  return y if bias is None else y + bias


def _masks(config, local, rows: Rows, prompt_length: int):
  """Masks of own and prompt keys, within the window where the layer is local.

  Args:
    config: of the model.
    local: True, False, or a traced boolean of a layer in a scan.
    rows: see there.
    prompt_length: P.
  """
  if local is False:
    return rows.mask, rows.prompt_mask

  def near(keys):
    within = rows.positions[..., None] - keys < config.window
    return within if local is True else within | ~local

  own = rows.mask & near(rows.key_positions[..., None, :])[:, :, None, None]
  if rows.prompt_mask is None:
    return own, None
  prompt = near(jnp.arange(prompt_length))
  return own, rows.prompt_mask[:, None, None] & prompt


def _tables(local, tables):
  """The rotary table of a layer."""
  if len(tables) == 1 or local is False:
    return tables[0]
  if local is True:
    return tables[1]
  return jax.tree.map(lambda all_, near: jnp.where(local, near, all_), *tables)


def _attention(config, y, layer, local, rows, prompt, cache, index):
  c = config
  b, g, s, _ = y.shape
  norm = functools.partial(rms_norm, eps=c.norm_eps, offset=c.norm_offset)
  q = _project(y, layer, "q").reshape(b, g, s, c.heads, c.head_dim)
  k = _project(y, layer, "k").reshape(b, g, s, c.kv_heads, c.head_dim)
  v = _project(y, layer, "v").reshape(b, g, s, c.kv_heads, c.head_dim)
  if c.qk_norm:
    q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
  tables = _tables(local, rows.tables)
  q, k = rotate(q, tables), rotate(k, tables)
  q = q.reshape(b, g, s, c.kv_heads, -1, c.head_dim).transpose(0, 1, 3, 4, 2, 5)
  own = k.transpose(0, 1, 3, 2, 4), v.transpose(0, 1, 3, 2, 4)
  if cache is not None:
    own = jax.tree.map(
      lambda all_, new: jax.lax.dynamic_update_slice_in_dim(
        all_, new.astype(all_.dtype), index, axis=3
      ),
      cache,
      own,
    )
  length = 0 if prompt is None else prompt[0].shape[2]
  mask, prompt_mask = _masks(c, local, rows, length)
  out = two_part_attention(
    q,
    own,
    mask,
    prompt,
    prompt_mask,
    scale=c.attention_scale,
    cap=c.attention_cap,
  )
  out = out.transpose(0, 1, 4, 2, 3, 5).reshape(b, g, s, -1)
  return _project(out, layer, "o"), own


def _mlp(config, y, layer):
  activation = ACTIVATIONS[config.activation]
  if config.experts:
    tokens = y.reshape(-1, y.shape[-1])
    return mixture(config, tokens, layer, activation).reshape(y.shape)
  y = activation(_project(y, layer, "gate")) * _project(y, layer, "up")
  return _project(y, layer, "down")


def block(config, x, layer, local, rows: Rows, prompt, cache, index):
  """One decoder layer.

  Args:
    config: of the model.
    x: hidden states [B, G, S, D].
    layer: the layer's parameters.
    local: whether the layer is local; a traced boolean where layers that are
      and are not share a scan.
    rows: see there.
    prompt: the prompt's keys and values in this layer, or None.
    cache: keys and values of the completion so far, or None.
    index: where in the cache those of `x` go.

  Returns:
    The new hidden states, and the own keys and values, each [B, G, K, C, E].
  """
  c = config
  norm = functools.partial(rms_norm, eps=c.norm_eps, offset=c.norm_offset)
  y = norm(x, layer["attn_norm"])
  y, own = _attention(c, y, layer, local, rows, prompt, cache, index)
  x = x + (norm(y, layer["attn_post_norm"]) if c.post_norms else y)
  y = _mlp(c, norm(x, layer["mlp_norm"]), layer)
  return x + (norm(y, layer["mlp_post_norm"]) if c.post_norms else y), own
