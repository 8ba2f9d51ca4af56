"""One decoder layer: attention and MLP, as the configuration describes them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer

from grpojax.core.losses.load_balancing import ExpertLoad
from grpojax.core.meshes import constrain, free_axes
from grpojax.models import cache, gated_delta, quantization
from grpojax.models.attention import Visibility, rms_norm, two_part_attention
from grpojax.models.block_attention import RowAttention
from grpojax.models.cache import KeysValues, PromptKeysValues, Slots
from grpojax.models.config import TransformerConfig
from grpojax.models.cpu import matmul
from grpojax.models.gated_delta import State, Stored
from grpojax.models.moe import expert_load, mixture
from grpojax.models.rope import RotaryTable, rotate

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

# Checkpoint names: rematerialisation "selective" saves SAVED values, and
# "attention" saves PRODUCTS as well.
SAVED = "saved"
PRODUCTS = "products"

Layer = dict[str, Array]  # a layer's parameters, by name
Local = bool | Bool[Array, ""]
"""True for a local layer; traced if the layers of a scan differ."""


class Routing(NamedTuple):
  """Options for routing tokens [B, G, S] to experts."""

  # Weight of each token in the experts' load; None: no load is computed.
  load_weights: Float[Array, "B G S"] | None = None
  # Each token's experts in this layer; None: the router chooses.
  replayed: Integer[Array, "B G S count"] | None = None


class Routed(NamedTuple):
  """Results of a layer's router."""

  load: ExpertLoad | None  # None without `load_weights`
  experts: Int[Array, "B G S count"] | None  # None without a router


class TokenContext(NamedTuple):
  """Positions and masks of tokens [B, G, S], which all layers share."""

  tables: tuple[RotaryTable, ...]  # for each of the configuration's `ropes`
  # True if query i sees key j, broadcastable to [B, G, K, R, S, S]; None for
  # long rows (`block_attention`).
  mask: Bool[Array, "..."] | None
  positions: Int[Array, "B G S"]  # in the whole sequence
  # True on real prompt tokens; None if the tokens are a prompt.
  prompt_mask: Bool[Array, "B P"] | None
  slot_mask: Bool[Array, "B G 1 1 1 C"] | None = None  # True on filled slots
  slot_positions: Int[Array, "B 1 C"] | None = None  # of their tokens
  segments: Int[Array, "B G S"] | None = None  # `Visibility.segments`
  routing: Routing = Routing()
  rows: gated_delta.Rows = gated_delta.Rows()


def _project(
  x: Float[Array, "B G S in"], layer: Layer, name: str
) -> Float[Array, "B G S out"]:
  """Returns x W + (x A) B + bias; adapter and bias are optional."""
  y = quantization.matmul(x, layer, name)
  if f"{name}_lora_a" in layer:
    low_rank = matmul(x, layer[f"{name}_lora_a"])
    y = y + matmul(low_rank, layer[f"{name}_lora_b"])
  # Add the bias in float32, because its gradient is a sum over all tokens.
  if f"{name}_bias" in layer:
    y = y + jnp.broadcast_to(layer[f"{name}_bias"], y.shape)
  return y


class Heads(NamedTuple):
  """Rotated queries, rotated keys, and values of tokens."""

  q: Float[Array, "B G S H E"]
  k: Float[Array, "B G S K E"]
  v: Float[Array, "B G S K E"]


def is_linear(layer: Layer) -> bool:
  """Returns True for a gated delta network in place of attention."""
  return "linear_o" in layer


def masks(
  local: Local, window: int, context: TokenContext
) -> tuple[Array, Array | None, Array | None]:
  """Returns masks of row, cache and prompt keys, with a window if `local`."""
  row = context.mask
  slots = context.slot_mask
  prompt = context.prompt_mask
  if local is False:
    return row, slots, prompt

  def in_window(key_positions):  # [B, G, keys] -> [B, G, 1, 1, S, keys]
    distance = context.positions[..., None] - key_positions[..., None, :]
    near = distance < window
    # A traced `local` may be False: then all keys are in the window.
    near = near if local is True else near | ~local
    return near[:, :, None, None]

  # Row: [S, S] or [B, G, 1, 1, S, S]. Positions are consecutive in a segment,
  # so the window counts tokens.
  near = in_window(context.positions)
  row = jnp.broadcast_to(row, near.shape) & near
  if slots is not None:
    # Slots: [C] or [B, G, 1, 1, 1, C] -> [B, G, 1, 1, S, C].
    near = in_window(context.slot_positions)
    slots = jnp.broadcast_to(slots, near.shape) & near
  if prompt is not None:
    # Prompts are padded on the right, so a token's position is its slot.
    slot = jnp.arange(prompt.shape[-1])[None, None]
    near = in_window(slot)[:, :, 0, 0]
    # [B, P] -> [B, G, S, P]: each query has its own window.
    prompt = prompt[:, None, None] & near
  return row, slots, prompt


def rotary_table(local: Local, tables: tuple[RotaryTable, ...]) -> RotaryTable:
  """Returns the rotary table of a layer, which may be global or local."""
  if len(tables) == 1 or local is False:
    return tables[0]
  if local is True:
    return tables[1]
  choose = lambda if_global, if_local: jnp.where(local, if_local, if_global)
  return jax.tree.map(choose, *tables)


def _heads(
  config: TransformerConfig,
  y: Float[Array, "B G S D"],
  layer: Layer,
  table: RotaryTable,
) -> tuple[Heads, Float[Array, "B G S HE"] | None]:
  """Projects tokens to queries, keys and values, and rotates the first two.

  Also returns logits of the output's gate, if any.
  """
  c = config
  b, g, s, _ = y.shape
  norm = functools.partial(rms_norm, eps=c.norm_eps, offset=c.norm_offset)
  q, k, v = (_project(y, layer, name) for name in "qkv")
  gate = None
  if c.attention_gate:
    q, gate = jnp.split(q.reshape(b, g, s, c.heads, -1), 2, axis=-1)
    q, gate = (x.reshape(b, g, s, -1) for x in (q, gate))
  if c.wide_qk_norm:
    q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
  q, k, v = (x.reshape(b, g, s, -1, c.head_dim) for x in (q, k, v))
  if c.qk_norm:
    q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
  # Rotate in float32, then round to the dtype of products.
  q, k = (rotate(x, table) for x in (q, k))
  if table.query_scale is not None:
    q = q * table.query_scale[..., None, None]
  return Heads(*(x.astype(y.dtype) for x in (q, k, v))), gate


def _linear_inputs(
  y: Float[Array, "B G S D"], layer: Layer
) -> gated_delta.Inputs:
  names = ("linear_qkv", "linear_b", "linear_a")
  inputs = gated_delta.Inputs(*(_project(y, layer, name) for name in names))
  return checkpoint_name(inputs, PRODUCTS)


def _gated_output(
  config: TransformerConfig,
  y: Float[Array, "B G S D"],
  layer: Layer,
  out: Float[Array, "B G S HE"],
) -> Float[Array, "B G S HE"]:
  """Normalises each head of a linear layer's output, and applies its gate."""
  heads = out.reshape(*out.shape[:-1], -1, config.linear.value_dim)
  heads = rms_norm(heads, layer["linear_norm"], config.norm_eps)
  z = checkpoint_name(_project(y, layer, "linear_z"), PRODUCTS)
  return heads.reshape(out.shape) * jax.nn.silu(z.astype(jnp.float32))


def attend(
  config: TransformerConfig,
  local: Local,
  context: TokenContext,
  prompt: PromptKeysValues | None,
  slots: Slots | None,
  row_attention: RowAttention | None,
  heads: Heads,
) -> tuple[Float[Array, "B G S HE"], KeysValues]:
  """Returns the output of attention, and the tokens' keys and values."""
  c = config
  local = local if c.window else False
  q, k, v = heads
  b, g, s, *_ = q.shape
  # H is split into [K, R], and [B, G, S, K, R, E] becomes [B, G, K, R, S, E].
  q = q.reshape(b, g, s, c.kv_heads, -1, c.head_dim).transpose(0, 1, 3, 4, 2, 5)
  q = constrain(q, "batch", "group", "kv_heads", "query_heads")
  row = cache.from_heads(k, v)
  q, row = checkpoint_name((q, row), SAVED)
  scaling = dict(scale=c.attention_scale, cap=c.attention_cap)
  if context.mask is None:  # long rows
    visibility = Visibility(
      context.positions, context.segments, context.prompt_mask, local
    )
    out = row_attention(q, row, prompt, visibility, window=c.window, **scaling)
  else:
    row_mask, slot_mask, prompt_mask = masks(local, c.window, context)
    cached = dict(slots=slots, slot_mask=slot_mask)  # in decoding
    out = two_part_attention(
      q, row, row_mask, prompt, prompt_mask, **cached, **scaling
    )
  out = constrain(out, "batch", "group", "kv_heads", "query_heads")
  # Join the heads again: [B, G, S, K R E].
  return out.transpose(0, 1, 4, 2, 3, 5).reshape(b, g, s, -1), row


def _mlp(
  config: TransformerConfig, y: Float[Array, "B G S D"], layer: Layer
) -> Float[Array, "B G S D"]:
  """Applies a gated MLP (Shazeer 2020)."""
  activation: Callable[[Array], Array] = ACTIVATIONS[config.activation]
  y = y.astype(quantization.dtype_of(layer, "gate"))
  gate = _project(y, layer, "gate").astype(y.dtype)
  up = _project(y, layer, "up").astype(y.dtype)
  gate, up = checkpoint_name((gate, up), PRODUCTS)
  y = activation(gate) * up
  y = constrain(y, "batch", "group", None, "mlp")
  return constrain(_project(y, layer, "down"), "batch", "group")


def layer_of(
  config: TransformerConfig,
  x: Float[Array, "B G S D"],
  layer: Layer,
  table: RotaryTable,
  routing: Routing,
  mixer: Callable[..., tuple[Float[Array, "B G S HE"], Any]],
) -> tuple[Float[Array, "B G S D"], Any, Routed]:
  """Applies a decoder layer, given its attention or linear mixer.

  Everything except matrix products is float32: if hidden states were rounded in
  each layer, rollout and training would drift apart. Returns the new hidden
  states, the second result of `mixer`, and the router's results.
  """
  c = config
  norm = functools.partial(rms_norm, eps=c.norm_eps, offset=c.norm_offset)
  output = "linear_o" if is_linear(layer) else "o"
  dtype = quantization.dtype_of(layer, output)

  def add(x, y, name):
    y = norm(y, layer[name]) if c.post_norms else y
    return x + (y if c.residual_scale == 1 else c.residual_scale * y)

  y = (norm(x, layer["attn_norm"]) if c.pre_norms else x).astype(dtype)
  if is_linear(layer):
    out, aux = mixer(_linear_inputs(y, layer))
    out = _gated_output(c, y, layer, checkpoint_name(out, SAVED))
  else:
    heads, gate = _heads(c, y, layer, table)
    out, aux = mixer(heads)
    out = checkpoint_name(out, SAVED)
    if gate is not None:
      out = out * jax.nn.sigmoid(gate.astype(jnp.float32))
  y = _project(out.astype(dtype), layer, output)
  y = constrain(y, "batch", "group")
  mesh = jax.sharding.get_abstract_mesh()
  if y.shape[2] == 1 and "tensor" in free_axes(mesh):
    # Without this, XLA:TPU would send y as float32 in decoding.
    y = jax.lax.optimization_barrier(y)
  y = checkpoint_name(y, PRODUCTS)
  x = add(x, y, "attn_post_norm")
  x = checkpoint_name(x, SAVED)
  y = norm(x, layer["mlp_norm"]) if c.pre_norms else x
  load = experts = None
  if c.experts:
    weights = routing.load_weights
    if weights is not None:
      load = expert_load(y, layer["router"], c.experts_per_token, weights)
    activation = ACTIVATIONS[c.activation]
    y, experts = mixture(c, y, layer, activation, routing.replayed)
  else:
    y = _mlp(c, y, layer)
  y = checkpoint_name(y, PRODUCTS)
  x = add(x, y, "mlp_post_norm")
  return x, aux, Routed(load, experts)


def mixer(
  config: TransformerConfig,
  layer: Layer,
  local: Local,
  context: TokenContext,
  prompt: PromptKeysValues | State | None,
  slots: Slots | Stored | None,
  row_attention: RowAttention | None,
) -> Callable[..., tuple[Float[Array, "B G S HE"], Any]]:
  """Returns the function that mixes a layer's projected tokens."""
  if is_linear(layer):
    sizes = config.linear
    return functools.partial(
      gated_delta.mix, sizes, layer, context.rows, prompt, slots
    )
  return functools.partial(
    attend, config, local, context, prompt, slots, row_attention
  )


def block(
  config: TransformerConfig,
  x: Float[Array, "B G S D"],
  layer: Layer,
  local: Local,
  context: TokenContext,
  prompt: PromptKeysValues | State | None,
  slots: Slots | Stored | None,
  row_attention: RowAttention | None,
) -> tuple[Float[Array, "B G S D"], KeysValues | State, Routed]:
  """Applies a decoder layer, with a window if it is `local`."""
  args = local, context, prompt, slots, row_attention
  mix = mixer(config, layer, *args)
  table = rotary_table(local, context.tables)
  return layer_of(config, x, layer, table, context.routing, mix)


def joint_block(
  config: TransformerConfig,
  x: tuple[Float[Array, "B 1 P D"], Float[Array, "B G S D"]],
  layer: Layer,
  local: Local,
  contexts: tuple[TokenContext, TokenContext],
  row_attention: RowAttention | None,
) -> tuple[
  tuple[Float[Array, "B 1 P D"], Float[Array, "B G S D"]], ExpertLoad | None
]:
  """Applies a decoder layer to prompts (groups of size 1) and completions."""
  run = functools.partial(block, config, row_attention=row_attention)
  # The completions read the prompts' keys and values of the same layer.
  prompts, row, routed = run(x[0], layer, local, contexts[0], None, None)
  prompt = cache.of_prompt(row)
  x, _, more = run(x[1], layer, local, contexts[1], prompt, None)
  # Add up prompts' and completions' loads; both None without `load_weights`.
  return (prompts, x), jax.tree.map(jnp.add, routed.load, more.load)
