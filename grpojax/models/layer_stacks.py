"""Runs the decoder's layers in sequence, with rematerialisation.

A stack is a pytree whose leaves have a leading axis of layers. Parameters hold
a single stack or, if some layers are separate (`last_layers`), several.

A model with linear layers repeats a period of layers of both kinds, and the
scan goes over the periods. A parameter that only one kind has is stacked over
the layers of this kind:

    layers     linear linear linear full   linear linear linear full
    gate       0      1      2      3      4      5      6      7
    linear_o   0      1      2             3      4      5
    o                               0                           1
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.core.types import Params
from grpojax.models import sharding
from grpojax.models.block import PRODUCTS, SAVED
from grpojax.models.cache import ByKind
from grpojax.models.config import TransformerConfig
from grpojax.models.moe import LAYER

REMAT = {
  "none": sharding.all_but_gathered,
  "attention": jax.checkpoint_policies.save_only_these_names(SAVED, PRODUCTS),
  "selective": jax.checkpoint_policies.save_only_these_names(SAVED),
  "full": jax.checkpoint_policies.nothing_saveable,
}
"""`jax.checkpoint` policies for values to save in addition to a layer's input.
"attention" recomputes softmax weights and activations (Korthikanti et al. 2022,
arXiv 2205.05198), "selective" also an MLP's products, "full" everything. In
layers with experts, "attention" has the same effect as "selective"."""

SHALLOW = 8
"""Models of at most this many layers are unrolled, because a scan zeroes its
stacks of saved values, and then copies each layer's values into them."""


def run_layer(
  remat: str | None,
  function: Callable[..., Any],
  config: TransformerConfig,
  x: Any,
  layer: Params,
  local: Any,
  *args: Any,
) -> Any:
  """Runs a layer with rematerialisation; gathers split parameters for it."""
  if remat is None or (remat == "none" and sharding.fsdp_shards() == 1):
    return function(config, x, layer, local, *args)

  def gathered(x, layer, local, *args):
    layer = sharding.gather(layer, "layer/")
    return function(config, x, layer, local, *args)

  run = jax.checkpoint(
    gathered,
    # A Python value must be static; `local` is traced if the layers differ.
    static_argnums=(2,) if isinstance(local, bool) else (),
    policy=REMAT[remat],
    prevent_cse=False,  # not needed in a scan
  )
  return run(x, layer, local, *args)


def stacks(params: Params) -> tuple[Params, ...]:
  """Returns a model's stacks of layers, in order."""
  layers = params["layers"]
  return layers if isinstance(layers, tuple) else (layers,)


def layer_count(stack: Params) -> int:
  """Returns the number of layers of a stack, which all have its first leaf."""
  return len(jax.tree.leaves(stack)[0])


def split(layers: Params, sizes: Sequence[int]) -> tuple[Params, ...]:
  """Splits a stack into consecutive stacks of `sizes` layers.

  ValueError unless each has its share of the layers of each kind.
  """
  ends = list(itertools.accumulate(sizes))

  def cut(x, size, end):
    places = end * len(x), size * len(x)
    if any(place % ends[-1] for place in places):
      raise ValueError(f"{sizes} layers do not consist of whole periods")
    end, size = (place // ends[-1] for place in places)
    return x[end - size : end]

  return tuple(
    jax.tree.map(functools.partial(cut, size=size, end=end), layers)
    for size, end in zip(sizes, ends, strict=True)
  )


def _unstack(tree: Any, axis: int = 0) -> list[Any]:
  """Splits an axis of a stack, such as that of the layers.

  The gradient of a split is a concatenation, but that of indexing is a sum.
  """
  leaves, structure = jax.tree.flatten(tree)
  parts = [jax.lax.split(x, (1,) * x.shape[axis], axis) for x in leaves]
  squeeze = functools.partial(jnp.squeeze, axis=axis)
  return [
    jax.tree.unflatten(structure, map(squeeze, part))
    for part in zip(*parts, strict=True)
  ]


def by_place(config: TransformerConfig, tree: Any, count: int) -> list[Any]:
  """Splits what layers hold by their place in the `count` periods of a stack.

  `tree` is a stack of parameters, `ByKind`, or stacked over all layers. Split
  parameters can take a stack's place: in the token loop, XLA would split them
  for each token.
  """
  if isinstance(tree, list):
    return tree
  period = config.period

  def split(x):  # [layers, ...] -> [periods, ...] of each place
    # [count, layers per period, ...]
    each = lambda x: x.reshape(count, len(x) // count, *x.shape[1:])
    return _unstack(jax.tree.map(each, x), axis=1)

  if isinstance(tree, ByKind):
    attention, linear = (iter(split(x)) for x in tree)
    return [next(linear if is_linear else attention) for is_linear in period]
  if not isinstance(tree, dict):
    return split(tree)
  places = [{} for _ in period]
  for name, stack in tree.items():
    for place, x in zip(config.layers_with(name), split(stack), strict=False):
      places[place][name] = x
  return places


def last_layers(
  params: Params, count: int
) -> tuple[Params, Callable[[Params], Params]]:
  """Separates the last `count` layers, the final norm and an untied head.

  Gradients with respect to these skip the layers below. Returns these
  parameters and a function `merge` that maps them to the whole model's.
  """
  total = layer_count(params["layers"])
  if not 1 <= count <= total:
    raise ValueError(f"last_layers={count}: use 1 to {total} layers")
  first, last = split(params["layers"], (total - count, count))
  names = ("final_norm", "head", "score")
  trained = {name: params[name] for name in names if name in params}
  trained["layers"] = last

  def merge(trained):
    return params | trained | {"layers": (first, trained["layers"])}

  return trained, merge


def _scan_stack(
  body: Callable[..., tuple[Any, Any]],
  carry: Any,
  locality: tuple[bool, ...],
  scanned: tuple[Any, ...],
) -> tuple[Any, Any]:
  """Scans `body(carry, local, *scanned)` over the layers of a stack."""
  # A single layer needs no loop, and `local` stays a Python value.
  if len(locality) == 1:
    layer = jax.tree.map(lambda x: x[0], scanned)
    carry, outputs = body(carry, locality[0], *layer)
    return carry, jax.tree.map(lambda x: x[None], outputs)
  if len(set(locality)) < 2:  # all layers are equal, or the stack is empty
    local = any(locality)
    return jax.lax.scan(lambda carry, s: body(carry, local, *s), carry, scanned)
  # The stack has local and global layers, so `local` is traced.
  return jax.lax.scan(
    lambda carry, s: body(carry, *s), carry, (jnp.asarray(locality), *scanned)
  )


def _run_periods(
  config: TransformerConfig,
  run: Callable[..., Any],
  body: Callable[..., tuple[Any, Any]],
  carry: Any,
  scanned: tuple[Any, ...],
) -> tuple[Any, ByKind]:
  """Runs `body` over the layers of a stack, period by period."""
  period = config.period
  stack = scanned[0]
  count = layer_count(stack) // (1 if isinstance(stack, list) else len(period))

  def run_period(carry, local, *places):
    outputs = ([], [])
    for is_linear, place in zip(period, places, strict=True):
      carry, output = body(carry, local, *place)
      outputs[is_linear].append(output)
    stack = lambda outputs: jax.tree.map(lambda *x: jnp.stack(x), *outputs)
    return carry, ByKind(*map(stack, outputs))

  split = (by_place(config, x, count) for x in scanned)
  places = tuple(zip(*split, strict=True))
  carry, outputs = run(run_period, carry, (False,) * count, places)
  join = lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
  return carry, jax.tree.map(join, outputs)


def _run_unrolled(
  body: Callable[..., tuple[Any, Any]],
  carry: Any,
  locality: tuple[bool, ...],
  scanned: tuple[Any, ...],
) -> tuple[Any, Any]:
  """Runs `body(carry, local, *scanned)` over the layers without a loop."""
  outputs = []
  for local, layer in zip(locality, _unstack(scanned), strict=True):
    carry, output = body(carry, local, *layer)
    outputs.append(output)
  return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


def scan(
  config: TransformerConfig,
  body: Callable[..., tuple[Any, Any]],
  x: Any,
  params: Params,
  *scanned: tuple[Any, ...],
  remat: str | None = None,
  whole: Sequence[str] = (),
  carried: tuple[Any, ...] | None = None,
) -> tuple[Any, tuple[Any, ...]]:
  """Scans `body(x, local, layer, *more)` over the layers, stack by stack.

  `body` returns the new x (any pytree) and the layer's output. `scanned` hold a
  pytree per stack, with a leading axis of layers. Parameters named in `whole`
  are not sliced: `layer` has their whole stacks, and its index as `LAYER`.
  `carried`, a pytree per stack, makes x a pair: `body` gets and returns (x, the
  stack's pytree); the output of a stack is then (this pytree, output).

  With linear layers the output of a stack is `ByKind`, and so may be what is
  scanned.
  """
  start = 0
  outputs = []
  # Deep, split or rematerialised models need the loop: XLA would else keep
  # values to be recomputed, or gather the parameters of several layers at once.
  shallow = config.layers <= SHALLOW
  unroll = shallow and remat == "none" and sharding.fsdp_shards() == 1
  for stack, *more in zip(stacks(params), *scanned, strict=True):
    locality = config.locality[start : start + layer_count(stack)]
    start += len(locality)
    run = _run_unrolled if unroll and locality else _scan_stack
    # The loop's body reads these whole stacks at the layer's index.
    unsliced = {name: stack[name] for name in whole if len(locality) > 1}
    if unsliced:
      stack = {k: x for k, x in stack.items() if k not in unsliced}
      stack[LAYER] = jnp.arange(len(locality))
    run_body = lambda x, local, layer, *more, unsliced=unsliced: body(
      x, local, layer | unsliced, *more
    )
    if carried is not None:
      x = x, carried[len(outputs)]
    if config.period:
      x, output = _run_periods(config, run, run_body, x, (stack, *more))
    else:
      x, output = run(run_body, x, locality, (stack, *more))
    if carried is not None:
      x, store = x
      output = store, output
    outputs.append(output)
  return x, tuple(outputs)
