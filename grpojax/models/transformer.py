"""One group-native decoder for the llama and qwen2 families.

The group is an axis of the computation: a prompt's keys and values are computed
and stored once, and its whole group of completions attends to them. Attention
therefore has two parts, prompt and own completion, merged by their
log-sum-exps; training and decoding use the same block.

Parameters are nested dicts; those of the layers are stacked on a leading axis,
as one stack or, where some of them are held apart (see `last_layers`), as a
tuple of stacks that follow each other.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from grpojax.core.types import LM, Params, Prefix
from grpojax.models.attention import (
  rms_norm,
  rope_tables,
  rotate,
  two_part_attention,
)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Shape of a decoder; hashable, so it can key a compilation.

  Attributes:
    vocab_size: V.
    width: D.
    layers: L.
    heads: H.
    kv_heads: K, a divisor of H.
    head_dim: E, even.
    mlp: F.
    rope_theta: base of the rotary frequencies.
    norm_eps: added to the mean square in RMSNorm.
    qkv_bias: query, key and value projections have biases.
    o_bias: the attention's output projection has a bias.
    mlp_bias: the MLP's three projections have biases.
    tied: the output head is the transposed embedding.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  tied: bool = True


def parameter_shapes(config: TransformerConfig) -> dict[str, Any]:
  """Shapes of all parameters, as the nested dict that `init` fills."""
  c = config
  q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
  layer = {
    "attn_norm": (c.width,),
    "q": (c.width, q),
    "k": (c.width, kv),
    "v": (c.width, kv),
    "o": (q, c.width),
    "mlp_norm": (c.width,),
    "gate": (c.width, c.mlp),
    "up": (c.width, c.mlp),
    "down": (c.mlp, c.width),
  }
  if c.qkv_bias:
    layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
  if c.o_bias:
    layer |= {"o_bias": (c.width,)}
  if c.mlp_bias:
    layer |= {"gate_bias": (c.mlp,), "up_bias": (c.mlp,)}
    layer |= {"down_bias": (c.width,)}
  shapes = {
    "embed": (c.vocab_size, c.width),
    "layers": {name: (c.layers, *shape) for name, shape in layer.items()},
    "final_norm": (c.width,),
  }
  return shapes if c.tied else shapes | {"head": (c.width, c.vocab_size)}


def _initial(key: Key[Array, ""], name: str, shape: tuple[int, ...], layers):
  """Normal(0, 0.02) weights, output projections scaled down as in GPT-2."""
  if "norm" in name:
    return jnp.ones(shape)
  if "bias" in name:
    return jnp.zeros(shape)
  scale = 0.02 / (2 * layers) ** 0.5 if name in ("o", "down") else 0.02
  return scale * jax.random.normal(key, shape)


def init(config: TransformerConfig, key: Key[Array, ""]) -> Params:
  """Draws float32 parameters of a fresh model."""
  shapes = parameter_shapes(config)
  leaves, tree = jax.tree.flatten_with_path(
    shapes, is_leaf=lambda x: isinstance(x, tuple)
  )
  keys = jax.random.split(key, len(leaves))
  return jax.tree.unflatten(
    tree,
    [
      _initial(k, path[-1].key, shape, config.layers)
      for k, (path, shape) in zip(keys, leaves, strict=True)
    ],
  )


def _project(x, layer, name):
  y = x @ layer[name]
  bias = layer.get(f"{name}_bias")
  return y if bias is None else y + bias


def _block(config, x, layer, rope, mask, prompt, prompt_mask, cache, index):
  """One decoder layer on x [B, G, S, D]; returns x and its keys, values."""
  c = config
  b, g, s, _ = x.shape
  y = rms_norm(x, layer["attn_norm"], c.norm_eps)
  q = _project(y, layer, "q").reshape(b, g, s, c.heads, c.head_dim)
  k = _project(y, layer, "k").reshape(b, g, s, c.kv_heads, c.head_dim)
  v = _project(y, layer, "v").reshape(b, g, s, c.kv_heads, c.head_dim)
  q, k = rotate(q, rope), rotate(k, rope)
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
  out = two_part_attention(q, own, mask, prompt, prompt_mask)
  out = out.transpose(0, 1, 4, 2, 3, 5).reshape(b, g, s, -1)
  x = x + _project(out, layer, "o")
  y = rms_norm(x, layer["mlp_norm"], c.norm_eps)
  y = jax.nn.silu(_project(y, layer, "gate")) * _project(y, layer, "up")
  return x + _project(y, layer, "down"), own


def _stacks(params: Params) -> tuple[Any, ...]:
  """The stacks of layers, in their order."""
  layers = params["layers"]
  return layers if isinstance(layers, tuple) else (layers,)


def _unstack(stack):
  """The layers of a stack one by one."""
  count = len(jax.tree.leaves(stack)[0])
  return [jax.tree.map(lambda x, i=i: x[i], stack) for i in range(count)]


def last_layers(params: Params, count: int):
  """Holds the last layers, the final norm and the output head apart.

  Nothing below them is differentiated then (see
  `core.diagnostics.score_projections`). A tied head is part of the embedding,
  and stays with what is below.

  Args:
    params: of a `transformer`, with its layers in one stack.
    count: layers to hold apart.

  Returns:
    `(moving, merge)`: the parameters held apart, and `merge(moving)`, the
    parameters of the same model.

  Raises:
    ValueError: there are not so many layers.
  """
  total = len(jax.tree.leaves(params["layers"])[0])
  if not 1 <= count <= total:
    raise ValueError(f"last_layers={count} must be in 1..{total}, the layers")
  first, last = (
    jax.tree.map(lambda x, part=part: x[part], params["layers"])
    for part in (slice(total - count), slice(total - count, None))
  )
  names = ("final_norm", "head")
  moving = {name: params[name] for name in names if name in params}
  moving["layers"] = last

  def merge(moving):
    return params | moving | {"layers": (first, moving["layers"])}

  return moving, merge


def _prefill(config, block, params, prompt_ids, prompt_mask):
  b, p = prompt_ids.shape
  positions = jnp.broadcast_to(jnp.arange(p), (b, 1, p))
  rope = rope_tables(positions, config.head_dim, config.rope_theta)
  mask = jnp.tril(jnp.ones((p, p), bool)) & prompt_mask[:, None, :]
  mask = mask[:, None, None, None]

  def body(x, layer):
    x, (k, v) = block(config, x, layer, rope, mask, None, None, None, None)
    return x, (k[:, 0], v[:, 0])

  x = params["embed"][prompt_ids][:, None]
  keys_values = []
  for stack in _stacks(params):
    x, prompt = jax.lax.scan(body, x, stack)
    keys_values.append(prompt)
  length = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)
  last = jnp.take_along_axis(x[:, 0], (length - 1)[:, None, None], axis=1)
  return Prefix(
    last_hidden=rms_norm(last[:, 0], params["final_norm"], config.norm_eps),
    length=length,
    state=(tuple(keys_values), prompt_mask),
  )


def _own_mask(s, segments: Int[Array, "B G S"] | None) -> Bool[Array, "..."]:
  """Causal along the row, and within a segment where there are several."""
  mask = jnp.tril(jnp.ones((s, s), bool))
  if segments is not None:
    mask = mask & (segments[..., :, None] == segments[..., None, :])
    mask = mask[:, :, None, None]
  return mask


def _extend(config, block, params, prefix, ids, cache, positions, segments):
  s = ids.shape[-1]
  start = 0 if cache is None else cache["index"]
  if positions is None:
    positions = jnp.broadcast_to(start + jnp.arange(s), ids.shape)
  positions = prefix.length[:, None, None] + positions
  rope = rope_tables(positions, config.head_dim, config.rope_theta)
  keys_values, prompt_mask = prefix.state
  x = params["embed"][ids]
  if cache is None:
    mask = _own_mask(s, segments)

    def body(x, scanned):
      layer, prompt = scanned
      args = (rope, mask, prompt, prompt_mask, None, None)
      return block(config, x, layer, *args)[0], None

    for stack in zip(_stacks(params), keys_values, strict=True):
      x, _ = jax.lax.scan(body, x, stack)
  else:
    # Unrolled: each layer's cache is then updated in place by the decode loop.
    if segments is not None:
      raise ValueError("segments are for training rows; decode without them")
    size = cache["layers"][0][0].shape[3]
    mask = jnp.arange(size) <= start + jnp.arange(s)[:, None]
    layers = []
    stacks = zip(_stacks(params), keys_values, strict=True)
    each = itertools.chain.from_iterable(map(_unstack, stacks))
    for (layer, prompt), own in zip(each, cache["layers"], strict=True):
      args = (rope, mask, prompt, prompt_mask, own, start)
      x, own = block(config, x, layer, *args)
      layers.append(own)
    cache = {"index": start + s, "layers": tuple(layers)}
  return rms_norm(x, params["final_norm"], config.norm_eps), cache


def transformer(
  config: TransformerConfig, *, dtype=jnp.float32, remat: bool = False
) -> LM:
  """The decoder as an `LM`.

  Args:
    config: shape of the model.
    dtype: of computation and cache; norms, softmax and logits are float32.
      Parameters may be float32 beside it (an optimizer needs that: a small
      update of a bfloat16 weight rounds to nothing) and are cast where used.
    remat: recompute each layer in the backward pass instead of storing its
      activations (less memory, about a third more work).

  Raises:
    ValueError: heads that do not divide, or an odd head_dim.
  """
  if config.heads % config.kv_heads:
    raise ValueError(
      f"heads={config.heads} is no multiple of kv_heads={config.kv_heads}"
    )
  if config.head_dim % 2:
    raise ValueError(f"head_dim={config.head_dim} must be even for RoPE")
  block = _block
  if remat:  # under a scan nothing else can be merged with the recomputation
    block = jax.checkpoint(_block, static_argnums=0, prevent_cse=False)

  def cast(params):
    return jax.tree.map(lambda x: x.astype(dtype), params)

  def prefill(params, prompt_ids, prompt_mask):
    return _prefill(config, block, cast(params), prompt_ids, prompt_mask)

  def extend(params, prefix, ids, cache=None, positions=None, segments=None):
    args = (prefix, ids, cache, positions, segments)
    return _extend(config, block, cast(params), *args)

  def unembed(params, hidden):
    head = params["embed"].T if config.tied else params["head"]
    return jnp.matmul(
      hidden, head.astype(dtype), preferred_element_type=jnp.float32
    )

  def init_cache(b, g, t):
    shape = (b, g, config.kv_heads, t, config.head_dim)
    layers = tuple(
      (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
      for _ in range(config.layers)
    )
    return {"index": jnp.zeros((), jnp.int32), "layers": layers}

  return LM(
    init=functools.partial(init, config),
    prefill=prefill,
    extend=extend,
    unembed=unembed,
    init_cache=init_cache,
  )
