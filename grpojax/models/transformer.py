"""The decoder of all model families, with prompts shared by their groups.

A prompt's keys and values are computed and stored once, and its whole group of
completions attends to them. Parameters are nested dicts; layers are stacked on
a leading axis, in a single stack or a tuple of stacks (`last_layers`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from grpojax.core.decoding.sampling import NEGATIVE, Parts
from grpojax.core.meshes import activation_spec
from grpojax.core.types import LM, Params
from grpojax.models import (
  block_attention,
  cache,
  contexts,
  decode_attention,
  layer_stacks,
  passes,
  quantization,
  sharding,
)
from grpojax.models.attention import soft_cap
from grpojax.models.config import TransformerConfig as TransformerConfig
from grpojax.models.config import check, init
from grpojax.models.config import parameter_shapes as parameter_shapes
from grpojax.models.cpu import matmul
from grpojax.models.layer_stacks import last_layers as last_layers

LARGE = 4096  # minimum size for TPUs to draw without storing logits


def _gap_mask(config: TransformerConfig) -> Bool[Array, "V"] | None:
  """Returns a mask of unused ids; None if there are no `gaps`."""
  ids = jnp.arange(config.vocab_size)
  masks = [(start <= ids) & (ids < stop) for start, stop in config.gaps]
  return functools.reduce(jnp.logical_or, masks) if masks else None


@jax.custom_jvp
def _head_product(hidden: Array, head: Array) -> Array:
  """Returns hidden states times the head, summed in float32.

  Rounds the gradient of 16-bit factors' product, as in other layers, because in
  float32 it would make the products of the backward pass float32.
  """
  return matmul(hidden, head, jnp.float32)


@functools.partial(_head_product.defjvp, symbolic_zeros=True)
def _head_product_jvp(primals, tangents):
  hidden, head = primals
  pairs = (tangents[0], head), (hidden, tangents[1])
  # A factor without a tangent, such as a frozen head, needs no product.
  terms = [matmul(*x) for x in pairs if SymbolicZero not in map(type, x)]
  return _head_product(*primals), sum(terms).astype(jnp.float32)


def _scaled(
  config: TransformerConfig, logits: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
  """Divides and caps logits, as the configuration says."""
  divisor = config.logits_divisor
  logits = logits if divisor == 1 else logits / divisor
  return soft_cap(logits, config.logits_cap)


def _unembed(
  config: TransformerConfig,
  params: Params,
  hidden: Float[Array, "*tokens D"],
  dtype: Any,
) -> Float[Array, "*tokens V"]:
  """Returns float32 logits, with `NEGATIVE` for unused ids."""
  if config.labels:
    return matmul(hidden, params["score"].astype(dtype), jnp.float32)
  head = params["head"] if "head" in params else params["embed"].T
  head = head.astype(dtype)
  rows = None
  if head.ndim == 3:  # a copy per device (`copy_for_rows`)
    rows = sharding.row_shards(*hidden.shape[:2])
    if rows is None:  # rows cannot be split, so use a single copy
      head = head[0]
  if rows is None:
    logits = _head_product(hidden, head)
  else:
    # Each device multiplies its own rows with its own copy.
    logits = rows.join(jax.vmap(_head_product)(rows.split(hidden), head))
  if "head_scale" in params:
    logits = logits * params["head_scale"]
  logits = _scaled(config, logits)
  mask = _gap_mask(config)
  if mask is None:
    return logits
  return jnp.where(jnp.broadcast_to(mask, logits.shape), NEGATIVE, logits)


def _draw_parts(
  config: TransformerConfig,
  params: Params,
  hidden: Float[Array, "B G D"],
  uniform: Float[Array, "B G 2"],
  temperature: int | float,
) -> Parts:
  """Draws a token from each part of the vocabulary with the TPU kernel."""
  from grpojax.models.decoding_kernels import draw_parts  # slow import

  mesh = jax.sharding.get_abstract_mesh()
  shape = *hidden.shape[:2], config.vocab_size
  spec = activation_spec(mesh, shape, ("batch", "group", "vocabulary"))

  def logits_of(x):
    return _scaled(config, x) * (1 / temperature)

  def draw(hidden, head, scale, mask, uniform):
    rows = [x.reshape(-1, x.shape[-1]) for x in (hidden, uniform)]
    parts = draw_parts(rows[0], head, rows[1], logits_of, scale, mask)
    # The kernel's ids are relative to the device's first column.
    if spec[2]:
      first = jax.lax.axis_index(spec[2]) * head.shape[1]
      parts = parts._replace(ids=parts.ids + first)
    return jax.tree.map(lambda x: x.reshape(*hidden.shape[:2], -1), parts)

  if not mesh.empty:
    rows = P(*spec[:2])
    columns = P(None, spec[2])
    column = P(spec[2])
    draw = jax.shard_map(
      draw,
      in_specs=(rows, columns, column, column, rows),
      out_specs=spec,
      check_vma=False,
    )
  scale = params.get("head_scale")
  mask = _gap_mask(config)
  return draw(hidden, params["head"], scale, mask, uniform)


def _for_decoding(
  config: TransformerConfig,
  params: Params,
  dtype: Any,
  longest: int,
  stacks: tuple[int, ...],
  whole: Sequence[str],
  in_8_bits: bool,
) -> Params:
  """Casts, gathers and lays out parameters once for the token loop.

  A tied embedding stays float32, and the output head is a cast copy. Rotary
  tables are stored, because XLA would compute them for every token and layer.
  `in_8_bits` quantizes matrices before they are gathered, to halve the traffic.
  `whole` is as in `layer_stacks.by_place`.
  """

  def quantized(arrays):
    quantize = quantization.quantize_matrices
    return quantize(arrays, dtype) if in_8_bits else arrays

  params = quantized(params) | {"layers": quantized(params["layers"])}
  params = sharding.gather(
    sharding.constrain_as_stored(passes.cast(params, dtype))
  )
  if longest > config.rope.longest:
    raise ValueError(
      f"the rollout has {longest} positions, but without long_factor "
      f"(longrope) only {config.rope.longest} are supported: use shorter "
      "prompts or completions"
    )
  positions = jnp.arange(longest)
  params |= {contexts.ROPE: contexts.rotary_tables(config, positions)}
  if config.labels:
    return params
  if config.tied:
    params |= passes.cast(quantized({"head": params["embed"].T}), dtype)
  parts = layer_stacks.split(params["layers"], stacks)
  if size := len(config.period):
    parts = tuple(
      layer_stacks.by_place(config, part, count // size, whole)
      for part, count in zip(parts, stacks, strict=True)
    )
  return params | {"layers": parts}


def _for_training(
  config: TransformerConfig, params: Params, dtype: Any
) -> Params:
  """Casts parameters for `forward`, and gathers all except the layers."""
  params = sharding.constrain_as_stored(passes.cast(params, dtype))
  # `layer_stacks.run_layer` gathers the layers, one at a time.
  outer = {name: x for name, x in params.items() if name != "layers"}
  params |= sharding.gather(outer)
  if config.tied:  # a copy, so that its gradient is sharded separately
    head = {"embed": outer["embed"].astype(dtype)}
    params["head"] = sharding.gather(head)["embed"].T
  if "head" in params:
    params["head"] = sharding.copy_for_rows(params["head"])
  return params


def _lm(
  model: passes.Passes, stacks: tuple[int, ...], in_8_bits: bool = False
) -> LM:
  """Returns a model's `LM`; `stacks` are the sizes of its cache's stacks."""
  config = model.config
  dtype = model.dtype
  platform = model.platform
  lm = LM(
    init=functools.partial(init, config),
    prefill=model.prefill,
    extend=model.extend,
    unembed=lambda params, hidden: _unembed(config, params, hidden, dtype),
    init_cache=functools.partial(
      cache.create,
      layers=stacks,
      linear=config.linear,
      period=config.period,
      kv_heads=config.kv_heads,
      head_dim=config.head_dim,
      dtype=dtype,
      in_8_bits=in_8_bits,
      platform=platform,
    ),
    grow_cache=cache.grow,
    map_rows=passes.map_rows,
    forward=model.forward if model.remat else None,
    has_experts=bool(config.experts),
  )
  if platform == "tpu" and config.vocab_size >= LARGE and not config.labels:
    lm = lm._replace(draw_parts=functools.partial(_draw_parts, config))
  return lm


def transformer(
  config: TransformerConfig,
  *,
  dtype=jnp.float32,
  remat: str = "none",
  attention: str = "auto",
  platform: str | None = None,
) -> LM:
  """Returns the decoder as an `LM`; ValueError for an inconsistent `config`.

  Args:
    config: shape of the model.
    dtype: dtype of matrix products and cache; hidden states between the layers,
      norms, rotations, softmax and logits are float32. Parameters are cast for
      use; train them in float32, because bfloat16 drops small updates.
    remat: values that the backward pass recomputes (`layer_stacks.REMAT`):
      "full" (everything except each layer's input, about a third more work),
      "selective", "attention" or "none".
    attention: kind of attention in rows of more than `block_attention.WHOLE`
      tokens, a name in `block_attention.ATTENTION`.
    platform: "cpu", "gpu" or "tpu"; None means JAX's default backend. Results
      differ only by rounding.
  """
  check(config)
  for name, value, names in (
    ("remat", remat, layer_stacks.REMAT),
    ("attention", attention, block_attention.ATTENTION),
  ):
    if value not in names:
      raise ValueError(f"{name}={value!r}: use one of {', '.join(names)}")
  # The platform is looked up late, because `default_backend` starts JAX.
  attend = block_attention.choose(attention, platform)

  @functools.cache
  def decoder(cache_dtype):
    runs_on = platform or jax.default_backend()
    # In a loop over a stack, XLA:CPU may copy a layer for each token, and
    # XLA:GPU copies all weights and caches. A stack per period avoids this, but
    # takes several times as long to compile.
    separate = config.layers <= layer_stacks.SHALLOW or runs_on == "gpu"
    size = len(config.period) or 1
    stacks = (config.layers,)
    if separate:
      stacks = (size,) * (config.layers // size)
    decoding = passes.Passes(config, dtype, None, attend, runs_on)
    lm = _lm(decoding, stacks, in_8_bits=cache_dtype == "int8")
    return lm, stacks, decoding.whole_matrices

  def prepare(params, longest, weights_dtype="model", cache_dtype="model"):
    if longest is None:
      return model, _for_training(config, params, dtype)
    decoding_lm, stacks, whole_matrices = decoder(cache_dtype)
    if decode_attention.has_kernel(config, platform or jax.default_backend()):
      # The kernel reads live slots only, so the cache need not grow.
      decoding_lm = decoding_lm._replace(grow_cache=None)
    options = stacks, whole_matrices(params), weights_dtype == "int8"
    return decoding_lm, _for_decoding(config, params, dtype, longest, *options)

  model = _lm(passes.Passes(config, dtype, remat, attend), (config.layers,))
  lm = model._replace(prepare=prepare)
  # Kernels have no forward-mode derivative, so `jax.jvp` uses blocks.
  if attention not in ("auto", "kernel"):
    return lm
  options = dict(dtype=dtype, remat=remat, platform=platform)
  block_lm = transformer(config, attention="blocks", **options)
  return lm._replace(forward_mode=block_lm)
