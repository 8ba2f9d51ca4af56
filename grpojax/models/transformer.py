"""One group-native decoder for all families of models.

The group is an axis of the computation: a prompt's keys and values are computed
and stored once, and its whole group of completions attends to them.

Parameters are nested dicts; those of the layers are stacked on a leading axis,
as one stack or, where some of them are held apart (`last_layers`), as a tuple
of stacks that follow each other.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from grpojax.core.decoding.sampling import NEGATIVE, Parts
from grpojax.core.mesh import activation_spec
from grpojax.core.types import LM, Params
from grpojax.models import (
  block_attention,
  layer_stacks,
  passes,
  quantization,
  sharding,
)
from grpojax.models import cache as cache_lib
from grpojax.models.attention import soft_cap
from grpojax.models.block_attention import RowAttention
from grpojax.models.config import TransformerConfig as TransformerConfig
from grpojax.models.config import check, init
from grpojax.models.config import parameter_shapes as parameter_shapes
from grpojax.models.cpu import matmul
from grpojax.models.layer_stacks import last_layers as last_layers

LARGE = 4096
"""Tokens of a vocabulary whose logits a TPU does not write while decoding."""


def _gap_mask(config: TransformerConfig) -> Bool[Array, "V"] | None:
  """Returns True for ids without a token (`gaps`); None if there are none."""
  ids = jnp.arange(config.vocab_size)
  masks = [(start <= ids) & (ids < stop) for start, stop in config.gaps]
  return functools.reduce(jnp.logical_or, masks) if masks else None


def _unembed(
  config: TransformerConfig,
  params: Params,
  hidden: Float[Array, "*tokens D"],
  dtype: Any,
) -> Float[Array, "*tokens V"]:
  """Returns logits in float32, whatever the dtype of computation.

  Ids without a token have `NEGATIVE`, so their probability is 0.
  """
  if config.labels:
    return matmul(hidden, params["score"].astype(dtype), jnp.float32)
  head = params["head"] if "head" in params else params["embed"].T
  head, rows = head.astype(dtype), None
  if head.ndim == 3:  # a copy for each device's rows
    rows = sharding.row_shards(*hidden.shape[:2])
    if rows is None:  # rows that devices share read the same copy
      head = head[0]
  if rows is None:
    logits = matmul(hidden, head, jnp.float32)
  else:
    multiply = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    logits = rows.join(jax.vmap(multiply)(rows.split(hidden), head))
  if "head_scale" in params:
    logits = logits * params["head_scale"]
  logits, mask = soft_cap(logits, config.logits_cap), _gap_mask(config)
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
  """Draws tokens by the TPU's kernel, on each device its rows and columns."""
  from grpojax.models import head_kernel  # Pallas takes long to import

  mesh, shape = jax.sharding.get_abstract_mesh(), hidden.shape[:2]
  names = "batch", "group", "vocabulary"
  spec = activation_spec(mesh, (*shape, config.vocab_size), names)

  def logits_of(x):
    return soft_cap(x, config.logits_cap) * (1 / temperature)

  def draw(hidden, head, scale, mask, uniform):
    rows = [x.reshape(-1, x.shape[-1]) for x in (hidden, uniform)]
    draw_parts = head_kernel.draw_parts
    parts = draw_parts(rows[0], head, rows[1], logits_of, scale, mask)
    if spec[2]:
      first = jax.lax.axis_index(spec[2]) * head.shape[1]
      parts = parts._replace(ids=parts.ids + first)
    return jax.tree.map(lambda x: x.reshape(*hidden.shape[:2], -1), parts)

  if not mesh.empty:
    rows, columns, column = P(*spec[:2]), P(None, spec[2]), P(spec[2])
    draw = jax.shard_map(
      draw,
      in_specs=(rows, columns, column, column, rows),
      out_specs=spec,
      check_vma=False,
    )
  scale, mask = params.get("head_scale"), _gap_mask(config)
  return draw(hidden, params["head"], scale, mask, uniform)


def _decoding_stacks(
  config: TransformerConfig, platform: str
) -> tuple[int, ...]:
  """Returns the number of layers of each stack while decoding.

  A few layers are taken out of their stack before the loop over tokens, where
  XLA might copy each of them for every token (it does on CPUs). On GPUs it
  copies weights and caches of any number, half of what a token moves: there all
  are taken out, and compiling takes several times as long.
  """
  apart = config.layers <= layer_stacks.SHALLOW or platform == "gpu"
  return (1,) * config.layers if apart else (config.layers,)


def _for_decoding(
  config: TransformerConfig,
  params: Params,
  dtype: Any,
  longest: int,
  stacks: tuple[int, ...],
  in_8_bits: bool,
) -> Params:
  """Returns parameters as the token loop reads them: cast and laid out once.

  Whole along fsdp, so that no token waits for them; the output head apart from
  a tied embedding, whose rows stay float32. The rotary tables are with them, or
  XLA would compute them for every token, in all that reads them. Matrices
  become integers before they are gathered, so that half the bytes are sent.
  """

  def formatted(arrays):
    if in_8_bits:
      arrays = quantization.quantize_matrices(arrays, dtype)
    return arrays

  params = formatted(params) | {"layers": formatted(params["layers"])}
  params = sharding.gather(sharding.as_stored(passes.cast(params, dtype)))
  positions = jnp.arange(longest)
  params |= {passes.ROPE: passes.rope_of_kinds(config, positions)}
  if config.labels:
    return params
  if config.tied:
    params |= passes.cast(formatted({"head": params["embed"].T}), dtype)
  return params | {"layers": layer_stacks.split(params["layers"], stacks)}


def _for_training(
  config: TransformerConfig, params: Params, dtype: Any
) -> Params:
  """Returns parameters as `forward` reads them: all but layers gathered."""
  params = sharding.as_stored(passes.cast(params, dtype))
  outer = {name: x for name, x in params.items() if name != "layers"}
  params |= sharding.gather(outer)
  if config.tied:  # apart, so that each gradient is sharded by itself
    head = {"embed": outer["embed"].astype(dtype)}
    params["head"] = sharding.gather(head)["embed"].T
  if "head" in params:
    params["head"] = sharding.copy_for_rows(params["head"])
  return params


def _of_experts(model: passes.Passes) -> dict[str, Any]:
  """Returns the functions that only a model with experts has, of an `LM`."""
  return {
    "prefill_with_experts": model.prefill_with_experts,
    "extend_with_experts": model.extend_with_experts,
    "forward_with_load": model.forward_with_load if model.remat else None,
  }


def _lm(
  config: TransformerConfig,
  dtype: Any,
  remat: str | None,
  stacks: tuple[int, ...],
  row_attention: RowAttention | None,
  in_8_bits: bool = False,
  platform: str | None = None,
) -> LM:
  """Returns the model's functions; without `remat`, those of decoding alone.

  A cache has its layers in stacks of the sizes `stacks`, maybe `in_8_bits`, as
  `platform` writes them fastest.
  """
  model = passes.Passes(config, dtype, remat, row_attention, platform)
  init_cache = functools.partial(
    cache_lib.create,
    layers=stacks,
    kv_heads=config.kv_heads,
    head_dim=config.head_dim,
    dtype=dtype,
    in_8_bits=in_8_bits,
    platform=platform,
  )
  draws = platform == "tpu" and config.vocab_size >= LARGE and not config.labels
  return LM(
    init=functools.partial(init, config),
    prefill=model.prefill,
    extend=model.extend,
    unembed=lambda params, hidden: _unembed(config, params, hidden, dtype),
    init_cache=init_cache,
    grow_cache=cache_lib.grow,
    map_cache_rows=cache_lib.map_rows,
    align_cache_rows=cache_lib.align,
    map_prefix_rows=passes.map_prefix_rows,
    forward=model.forward if remat else None,
    **(_of_experts(model) if config.experts else {}),
    draw_parts=functools.partial(_draw_parts, config) if draws else None,
  )


def transformer(
  config: TransformerConfig,
  *,
  dtype=jnp.float32,
  remat: str = "none",
  attention: str = "auto",
  platform: str | None = None,
) -> LM:
  """Returns the decoder as an `LM`.

  Args:
    config: shape of the model.
    dtype: type of matrix products and cache; hidden states between the layers,
      norms, rotations, softmax and logits are float32. Parameters are cast
      where they are used, and float32 for an optimizer: a small update of a
      bfloat16 weight rounds to nothing.
    remat: values that the backward pass computes again instead of storing them,
      a name in `layer_stacks.REMAT`: "full" (of each layer all but its input:
      least memory, about a third more work), "selective", "attention" or
      "none".
    attention: how rows of more than `block_attention.WHOLE` tokens attend, a
      name in `block_attention.ATTENTION`.
    platform: where it runs, "cpu", "gpu" or "tpu"; None is JAX's own backend.
      Programs are others there, and results the same but for rounding.

  Raises:
    ValueError: a configuration whose parts do not fit; no such name.
  """
  check(config)
  choices = {"remat": (remat, layer_stacks.REMAT)}
  choices["attention"] = attention, block_attention.ATTENTION
  for name, (value, names) in choices.items():
    if value not in names:
      raise ValueError(f"{name}={value!r}: use one of {', '.join(names)}")
  # What they need of the platform is decided when they run: to ask for JAX's
  # backend starts it.
  row_attention = block_attention.choose(attention, platform)

  @functools.cache
  def decoder(cache_dtype):
    runs_on = platform or jax.default_backend()
    stacks = _decoding_stacks(config, runs_on)
    in_8_bits = cache_dtype == "int8"
    lm = _lm(config, dtype, None, stacks, row_attention, in_8_bits, runs_on)
    return lm, stacks

  def prepare(params, longest, weights_dtype="model", cache_dtype="model"):
    if longest is None:
      return model, _for_training(config, params, dtype)
    decoding_lm, stacks = decoder(cache_dtype)
    params = _for_decoding(
      config, params, dtype, longest, stacks, weights_dtype == "int8"
    )
    return decoding_lm, params

  model = _lm(config, dtype, remat, (config.layers,), row_attention)
  lm = model._replace(prepare=prepare)
  if attention not in ("auto", "kernel"):
    return lm
  options = dict(dtype=dtype, remat=remat, platform=platform)
  by_blocks = transformer(config, attention="blocks", **options)
  return lm._replace(forward_mode=by_blocks)
