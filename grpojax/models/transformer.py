"""One group-native decoder for all families of models.

The group is an axis of the computation: a prompt's keys and values are computed
and stored once, and its whole group of completions attends to them. Attention
therefore has two parts, prompt and own completion, merged by their
log-sum-exps; training and decoding use the same block.

Parameters are nested dicts; those of the layers are stacked on a leading axis,
as one stack or, where some of them are held apart (see `last_layers`), as a
tuple of stacks that follow each other.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpojax.core.types import LM, Params, Prefix
from grpojax.models.attention import rms_norm, soft_cap
from grpojax.models.block import Rows, block
from grpojax.models.config import TransformerConfig as TransformerConfig
from grpojax.models.config import check, init
from grpojax.models.config import parameter_shapes as parameter_shapes
from grpojax.models.rope import rope_tables


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
  `statistics.projections.score_projections`). A tied head is part of the
  embedding, and stays with what is below.

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
  names = ("final_norm", "head", "score")
  moving = {name: params[name] for name in names if name in params}
  moving["layers"] = last

  def merge(moving):
    return params | moving | {"layers": (first, moving["layers"])}

  return moving, merge


def _scan(config, body, x, params, *scanned):
  """Scans `body(x, layer, local, *more)` over the layers, stack by stack.

  Args:
    config: of the model.
    body: returns the new x and what to keep of the layer.
    x: hidden states.
    params: of the model.
    *scanned: for each stack a pytree with its layers on the leading axis.

  Returns:
    The hidden states, and what was kept of each stack.
  """
  start, kept, uniform = 0, [], len(set(config.locality)) == 1
  for stack, *more in zip(_stacks(params), *scanned, strict=True):
    count = len(jax.tree.leaves(stack)[0])
    kinds = config.locality[start : start + count]
    start += count
    if uniform:  # then it needs no choice at run time
      step = lambda x, s: body(x, s[0], config.locality[0], *s[1:])
      x, keep = jax.lax.scan(step, x, (stack, *more))
    else:
      step = lambda x, s: body(x, *s)
      x, keep = jax.lax.scan(step, x, (stack, jnp.asarray(kinds), *more))
    kept.append(keep)
  return x, tuple(kept)


def _embed(config, params, ids):
  x = params["embed"][ids]
  if config.scaled_embedding:
    x = x * jnp.asarray(config.width**0.5, x.dtype)
  return x


def _final_norm(config, params, x):
  scale = params["final_norm"]
  return rms_norm(x, scale, config.norm_eps, offset=config.norm_offset)


def _rows(config, mask, positions, key_positions, prompt_mask) -> Rows:
  tables = tuple(
    rope_tables(positions, config.head_dim, rope) for rope in config.ropes
  )
  return Rows(tables, mask, positions, key_positions, prompt_mask)


def _prefill(config, step, params, prompt_ids, prompt_mask):
  b, p = prompt_ids.shape
  positions = jnp.broadcast_to(jnp.arange(p), (b, 1, p))
  mask = jnp.tril(jnp.ones((p, p), bool)) & prompt_mask[:, None, :]
  rows = _rows(config, mask[:, None, None, None], positions, positions, None)

  def body(x, layer, local):
    x, (k, v) = step(config, x, layer, local, rows, None, None, None)
    return x, (k[:, 0], v[:, 0])

  x = _embed(config, params, prompt_ids)[:, None]
  x, keys_values = _scan(config, body, x, params)
  length = jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32)
  last = jnp.take_along_axis(x[:, 0], (length - 1)[:, None, None], axis=1)
  return Prefix(
    last_hidden=_final_norm(config, params, last[:, 0]),
    length=length,
    state=(keys_values, prompt_mask),
  )


def _own_mask(s, segments: Int[Array, "B G S"] | None) -> Bool[Array, "..."]:
  """Causal along the row, and within a segment where there are several."""
  mask = jnp.tril(jnp.ones((s, s), bool))
  if segments is not None:
    mask = mask & (segments[..., :, None] == segments[..., None, :])
    mask = mask[:, :, None, None]
  return mask


def _extend(config, step, params, prefix, ids, cache, positions, segments):
  s = ids.shape[-1]
  start = 0 if cache is None else cache["index"]
  if positions is None:
    positions = jnp.broadcast_to(start + jnp.arange(s), ids.shape)
  positions = prefix.length[:, None, None] + positions
  keys_values, prompt_mask = prefix.state
  x = _embed(config, params, ids)
  if cache is None:
    mask = _own_mask(s, segments)
    rows = _rows(config, mask, positions, positions, prompt_mask)

    def body(x, layer, local, prompt):
      return step(config, x, layer, local, rows, prompt, None, None)[0], None

    x, _ = _scan(config, body, x, params, keys_values)
  else:
    # Unrolled: each layer's cache is then updated in place by the decode loop.
    if segments is not None:
      raise ValueError("segments are for training rows; decode without them")
    size = cache["layers"][0][0].shape[3]
    mask = jnp.arange(size) <= start + jnp.arange(s)[:, None]
    slots = positions[..., :1] - start + jnp.arange(size)
    rows = _rows(config, mask, positions, slots, prompt_mask)
    layers = []
    stacks = zip(_stacks(params), keys_values, strict=True)
    each = itertools.chain.from_iterable(map(_unstack, stacks))
    every = zip(each, config.locality, cache["layers"], strict=True)
    for (layer, prompt), local, own in every:
      x, own = block(config, x, layer, local, rows, prompt, own, start)
      layers.append(own)
    cache = {"index": start + s, "layers": tuple(layers)}
  return _final_norm(config, params, x), cache


def _unembed(config, params, hidden, dtype):
  if config.labels:
    head = params["score"]
  else:
    head = params["embed"].T if config.tied else params["head"]
  logits = jnp.matmul(
    hidden, head.astype(dtype), preferred_element_type=jnp.float32
  )
  return logits if config.labels else soft_cap(logits, config.logits_cap)


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
    ValueError: a configuration whose parts do not fit, see `config.check`.
  """
  check(config)
  step = block
  if remat:  # under a scan nothing else can be merged with the recomputation
    # Where no two layers differ, `local` is a Python value.
    static = (0, 3) if len(set(config.locality)) == 1 else (0,)
    step = jax.checkpoint(block, static_argnums=static, prevent_cse=False)

  def cast(params):
    """The router stays float32: which experts it chooses hangs on little."""
    return jax.tree_util.tree_map_with_path(
      lambda path, x: x if path[-1].key == "router" else x.astype(dtype), params
    )

  def prefill(params, prompt_ids, prompt_mask):
    return _prefill(config, step, cast(params), prompt_ids, prompt_mask)

  def extend(params, prefix, ids, cache=None, positions=None, segments=None):
    args = (prefix, ids, cache, positions, segments)
    return _extend(config, step, cast(params), *args)

  def unembed(params, hidden):
    return _unembed(config, params, hidden, dtype)

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
