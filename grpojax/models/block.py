"""One decoder layer: attention and MLP, as the configuration describes them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.load_balancing import ExpertLoad
from grpojax.core.mesh import constrain
from grpojax.models import cache
from grpojax.models.attention import (
  cached_attention,
  rms_norm,
  two_part_attention,
)
from grpojax.models.block_attention import block_attention
from grpojax.models.block_masks import Sight
from grpojax.models.cache import KeysValues, PromptKeysValues, Slots
from grpojax.models.config import TransformerConfig
from grpojax.models.moe import expert_load, mixture
from grpojax.models.products import matmul
from grpojax.models.rope import RotaryTable, rotate

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

SAVED = "kept"
"""Name of what `transformer.REMAT`'s "partial" keeps of a layer."""
Layer = dict[str, Array]  # a layer's parameters, by name
Local = bool | Bool[Array, ""]
"""Whether a layer is local: traced where the layers of a scan differ in it, and
a Python value elsewhere, so that nothing is computed that is not used."""


class TokenContext(NamedTuple):
  """What all layers know of the tokens [B, G, S] that pass through them.

  They attend to each other, to earlier tokens of their rows in the slots of a
  cache, and to their prompt.

  Attributes:
    tables: rotary tables, for each of the configuration's `ropes`.
    mask: of the tokens among themselves, broadcastable to [B, G, K, R, S, S];
      None for whole rows that are attended to in blocks, see `block_attention`.
    positions: of the tokens in the whole sequence.
    prompt_mask: True on real prompt tokens, or None where the tokens are the
      prompt.
    slot_mask: True on the slots that hold a token, or None without a cache.
    slot_positions: of what is in the slots, or None.
    segments: see `LM.extend`; read where there is no mask.
    load_weights: how often each token counts in what is said of the routers;
      None where nothing is.
  """

  tables: tuple[RotaryTable, ...]
  mask: Bool[Array, "..."] | None
  positions: Int[Array, "B G S"]
  prompt_mask: Bool[Array, "B P"] | None
  slot_mask: Bool[Array, "C"] | None = None
  slot_positions: Int[Array, "B G C"] | None = None
  segments: Int[Array, "B G S"] | None = None
  load_weights: Float[Array, "B G S"] | None = None


def _project(
  x: Float[Array, "B G S in"], layer: Layer, name: str
) -> Float[Array, "B G S out"]:
  """X W + bias, and (x A) B where the layer has an adapter (Hu et al. 2021).

  Not rounded to x's dtype where there is a bias; the caller does, where needed.
  """
  y = matmul(x, layer[name])
  a, b = layer.get(f"{name}_lora_a"), layer.get(f"{name}_lora_b")
  if a is not None:
    y = y + matmul(matmul(x, a), b)
  bias = layer.get(f"{name}_bias")
  if bias is None:
    return y
  # Added in the bias's float32, and so is its gradient, a sum over all tokens.
  return y + bias


class Heads(NamedTuple):
  """Queries, keys and values of tokens, rotated."""

  q: Float[Array, "B G S H E"]
  k: Float[Array, "B G S K E"]
  v: Float[Array, "B G S K E"]


class Masks(NamedTuple):
  """Which keys the tokens attend to in a layer.

  Attributes:
    row: of each other's, broadcastable to [B, G, K, R, S, S].
    slots: of the cache's, broadcastable to [B, G, K, R, S, C], or None.
    prompt: of the prompt's, [B, P] or [B, G, S, P], or None.
  """

  row: Bool[Array, "..."]
  slots: Bool[Array, "..."] | None
  prompt: Bool[Array, "..."] | None


def _masks(local: Local, window: int, context: TokenContext) -> Masks:
  """The context's masks, within the window where the layer is local."""
  masks = Masks(context.mask, context.slot_mask, context.prompt_mask)
  if local is False:
    return masks

  def in_window(key_positions):  # [B, G, keys] -> [B, G, 1, 1, S, keys]
    distance = context.positions[..., None] - key_positions[..., None, :]
    near = distance < window
    # Traced, the layer may be a global one: then all keys are in its window.
    near = near if local is True else near | ~local
    return near[:, :, None, None]

  row = masks.row & in_window(context.positions)
  slots = prompt = None
  if masks.slots is not None:
    slots = masks.slots & in_window(context.slot_positions)
  if masks.prompt is not None:
    # A prompt token's position is its slot: prompts are padded on the right.
    places = jnp.arange(masks.prompt.shape[-1])[None, None]
    near = in_window(places)[:, :, 0, 0]
    prompt = masks.prompt[:, None, None] & near
  return Masks(row, slots, prompt)


def rotary_table(local: Local, tables: tuple[RotaryTable, ...]) -> RotaryTable:
  """The rotary table of a layer, out of those of global and local layers."""
  if len(tables) == 1 or local is False:
    return tables[0]
  if local is True:
    return tables[1]
  return jax.tree.map(
    lambda of_global, of_local: jnp.where(local, of_local, of_global), *tables
  )


def _heads(
  config: TransformerConfig,
  y: Float[Array, "B G S D"],
  layer: Layer,
  table: RotaryTable,
) -> Heads:
  """Queries, keys and values of tokens; heads are not transposed yet."""
  c = config
  b, g, s, _ = y.shape
  norm = functools.partial(rms_norm, eps=c.norm_eps, offset=c.norm_offset)
  q = _project(y, layer, "q").reshape(b, g, s, c.heads, c.head_dim)
  k = _project(y, layer, "k").reshape(b, g, s, c.kv_heads, c.head_dim)
  v = _project(y, layer, "v").reshape(b, g, s, c.kv_heads, c.head_dim)
  if c.qk_norm:  # before the rotation, which keeps norms as they are
    q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
  q, k = (rotate(x, table).astype(y.dtype) for x in (q, k))
  return Heads(q, k, v.astype(y.dtype))


def attend(
  config: TransformerConfig,
  local: Local,
  context: TokenContext,
  prompt: PromptKeysValues | None,
  slots: tuple[Slots, ...] | None,
  heads: Heads,
) -> tuple[Float[Array, "B G S HE"], KeysValues]:
  """Attention of a layer, between its projections.

  Args:
    config: see `block`.
    local: see `block`.
    context: see `block`.
    prompt: see `block`.
    slots: see `block`.
    heads: of the tokens.

  Returns:
    What each token takes from those that it attends to, heads last, and the
    tokens' keys and values.
  """
  c = config
  q, k, v = heads
  b, g, s, *_ = q.shape
  # Query head h attends with key head h // R: H is split into [K, R], and
  # [B, G, S, K, R, E] becomes [B, G, K, R, S, E].
  q = q.reshape(b, g, s, c.kv_heads, -1, c.head_dim).transpose(0, 1, 3, 4, 2, 5)
  q = constrain(q, "batch", "group", "kv_heads", "query_heads")
  # Cached keys are rotated already, for their positions never change.
  row = cache.constrain_row(cache.from_heads(k, v))
  q, row = checkpoint_name((q, row), SAVED)
  options = dict(scale=c.attention_scale, cap=c.attention_cap)
  if context.mask is None:
    sight = Sight(
      context.positions, context.segments, context.prompt_mask, local
    )
    options |= dict(window=c.window)
    out = block_attention(q, row, prompt, sight, **options)
  else:
    masks = _masks(local, c.window, context)
    if slots is None:
      args = masks.row, prompt, masks.prompt
      out = two_part_attention(q, row, *args, **options)
    else:
      out = cached_attention(q, row, slots, prompt, masks, **options)
  out = constrain(out, "batch", "group", "kv_heads", "query_heads")
  return out.transpose(0, 1, 4, 2, 3, 5).reshape(b, g, s, -1), row


def _mlp(
  config: TransformerConfig, y: Float[Array, "B G S D"], layer: Layer
) -> Float[Array, "B G S D"]:
  """A gated MLP (Shazeer 2020), or a mixture of them."""
  activation: Callable[[Array], Array] = ACTIVATIONS[config.activation]
  if config.experts:
    return mixture(config, y, layer, activation)
  y = y.astype(layer["gate"].dtype)
  gate, up = (_project(y, layer, x).astype(y.dtype) for x in ("gate", "up"))
  y = activation(gate) * up
  y = constrain(y, "batch", "group", None, "mlp")
  return constrain(_project(y, layer, "down"), "batch", "group")


def layer_of(
  config: TransformerConfig,
  x: Float[Array, "B G S D"],
  layer: Layer,
  table: RotaryTable,
  load_weights: Float[Array, "B G S"] | None,
  attention: Callable[[Heads], tuple[Float[Array, "B G S HE"], Any]],
) -> tuple[Float[Array, "B G S D"], Any, ExpertLoad | None]:
  """One decoder layer, whatever the tokens attend to.

  Matrices are multiplied in their own dtype, the dtype of computation; what
  lies between them is float32. Above all the hidden states: rounded to bfloat16
  in each layer, those of a sampled and of a scored token drift apart.

  Args:
    config: of the model.
    x: hidden states, float32.
    layer: the layer's parameters.
    table: rotary, of the tokens.
    load_weights: see `TokenContext`.
    attention: `(heads) -> (out, kept)`, as `attend`.

  Returns:
    The new hidden states, what attention kept, and what the router did with
    the tokens, if there are weights.
  """
  c = config
  norm = functools.partial(rms_norm, eps=c.norm_eps, offset=c.norm_offset)
  y = norm(x, layer["attn_norm"]).astype(layer["q"].dtype)
  out, kept = attention(_heads(c, y, layer, table))
  y = _project(checkpoint_name(out, SAVED), layer, "o")
  y = constrain(y, "batch", "group")
  x = x + (norm(y, layer["attn_post_norm"]) if c.post_norms else y)
  x = checkpoint_name(x, SAVED)
  y, load = norm(x, layer["mlp_norm"]), None
  if load_weights is not None:
    per_token = c.experts_per_token
    load = expert_load(y, layer["router"], per_token, load_weights)
  y = _mlp(c, y, layer)
  x = x + (norm(y, layer["mlp_post_norm"]) if c.post_norms else y)
  return x, kept, load


def block(
  config: TransformerConfig,
  x: Float[Array, "B G S D"],
  layer: Layer,
  local: Local,
  context: TokenContext,
  prompt: PromptKeysValues | None,
  slots: tuple[Slots, ...] | None,
) -> tuple[Float[Array, "B G S D"], KeysValues, ExpertLoad | None]:
  """One decoder layer.

  Args:
    config: of the model.
    x: hidden states [B, G, S, D], float32.
    layer: the layer's parameters.
    local: whether the layer is local.
    context: what the layer needs to know of the tokens.
    prompt: the prompt's keys and values in this layer, or None.
    slots: the blocks of this layer's cache, or None.

  Returns:
    The new hidden states, the keys and values of the tokens, and what the
    router did with them, if the context asks for it.
  """
  attention = functools.partial(attend, config, local, context, prompt, slots)
  table = rotary_table(local, context.tables)
  return layer_of(config, x, layer, table, context.load_weights, attention)


def block_of_both(
  config: TransformerConfig,
  x: tuple[Float[Array, "B 1 P D"], Float[Array, "B G S D"]],
  layer: Layer,
  local: Local,
  contexts: tuple[TokenContext, TokenContext],
) -> tuple[
  tuple[Float[Array, "B 1 P D"], Float[Array, "B G S D"]], ExpertLoad | None
]:
  """One decoder layer of prompts and of their whole completions.

  Args:
    config: of the model.
    x: hidden states of the prompts, rows of a group of one, and of completions.
    layer: see `block`.
    local: see `block`.
    contexts: of the prompts and of the completions.

  Returns:
    As x; what the router did with both, if the contexts ask for it.
  """
  run = functools.partial(block, config)
  prompts, row, load = run(x[0], layer, local, contexts[0], None, None)
  prompt = cache.of_prompt(row)
  x, _, more = run(x[1], layer, local, contexts[1], prompt, None)
  return (prompts, x), jax.tree.map(jnp.add, load, more)
