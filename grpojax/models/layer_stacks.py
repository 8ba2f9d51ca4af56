"""The decoder's layers, run one after another, and recomputed for gradients.

A stack is a pytree whose leaves have a leading axis of layers. Parameters hold
one stack or, if some layers are held apart (`last_layers`), several.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.core.types import Params
from grpojax.models import sharding
from grpojax.models.block import PRODUCTS, SAVED
from grpojax.models.config import TransformerConfig
from grpojax.models.moe import LAYER

REMAT = {
  "none": sharding.all_but_gathered,
  "attention": jax.checkpoint_policies.save_only_these_names(SAVED, PRODUCTS),
  "selective": jax.checkpoint_policies.save_only_these_names(SAVED),
  "full": jax.checkpoint_policies.nothing_saveable,
}
"""Values of a layer to save besides its input, as policies of `jax.checkpoint`.
"none" recomputes nothing, "attention" softmax weights (Korthikanti et al. 2022,
"Reducing activation recomputation in large transformer models") and
activations, "selective" an MLP's products as well, "full" all values. In layers
of experts, "attention" is "selective"."""

SHALLOW = 8
"""Models of at most this many layers are written out instead of scanned: a scan
fills its stacks of saved values with zeros first, and copies each layer's."""


def run_layer(
  remat: str | None,
  function: Callable[..., Any],
  config: TransformerConfig,
  x: Any,
  layer: Params,
  local: Any,
  *args: Any,
) -> Any:
  """Returns `function(config, x, layer, local, *args)` of one layer.

  Its parameters are gathered while it runs; if `remat` is None, they are
  gathered already, and there is no backward pass.
  """
  if remat is None or (remat == "none" and sharding.fsdp_shards() == 1):
    return function(config, x, layer, local, *args)

  def gathered(x, layer, local, *args):
    layer = sharding.gather(layer, "layer/")
    return function(config, x, layer, local, *args)

  run = jax.checkpoint(
    gathered,
    # Where no two layers differ, `local` is a Python value.
    static_argnums=(2,) if isinstance(local, bool) else (),
    policy=REMAT[remat],
    prevent_cse=False,  # under a scan nothing can be merged with it
  )
  return run(x, layer, local, *args)


def stacks(params: Params) -> tuple[Params, ...]:
  """Returns the stacks of layers, in their order."""
  layers = params["layers"]
  return layers if isinstance(layers, tuple) else (layers,)


def layer_count(stack: Params) -> int:
  """Returns the number of layers of a stack."""
  return len(jax.tree.leaves(stack)[0])


def split(layers: Params, sizes: Sequence[int]) -> tuple[Params, ...]:
  """Splits a stack into several that follow each other, of these sizes."""
  ends = list(itertools.accumulate(sizes))
  return tuple(
    jax.tree.map(lambda x, a=end - size, b=end: x[a:b], layers)
    for size, end in zip(sizes, ends, strict=True)
  )


def last_layers(
  params: Params, count: int
) -> tuple[Params, Callable[[Params], Params]]:
  """Holds `count` last layers, the final norm and an untied head apart.

  Nothing below them is differentiated then
  (`statistics.projections.score_projections`). Returns these parameters and
  `merge`: `merge(moving)` gives the parameters of the same model.
  """
  total = layer_count(params["layers"])
  if not 1 <= count <= total:
    raise ValueError(f"last_layers={count} must be in 1..{total}, the layers")
  first, last = split(params["layers"], (total - count, count))
  names = ("final_norm", "head", "score")
  moving = {name: params[name] for name in names if name in params}
  moving["layers"] = last

  def merge(moving):
    return params | moving | {"layers": (first, moving["layers"])}

  return moving, merge


def _scan_stack(
  body: Callable[..., tuple[Any, Any]],
  carry: Any,
  locality: tuple[bool, ...],
  scanned: tuple[Any, ...],
) -> tuple[Any, Any]:
  """Scans `body(carry, local, *of_layer)` over the layers of one stack."""
  if len(locality) == 1:
    only = jax.tree.map(lambda x: x[0], scanned)
    carry, outputs = body(carry, locality[0], *only)
    return carry, jax.tree.map(lambda x: x[None], outputs)
  if len(set(locality)) < 2:  # then it needs no choice at run time
    local = any(locality)  # of a stack without layers too
    return jax.lax.scan(lambda carry, s: body(carry, local, *s), carry, scanned)
  return jax.lax.scan(
    lambda carry, s: body(carry, *s), carry, (jnp.asarray(locality), *scanned)
  )


def _write_out(
  body: Callable[..., tuple[Any, Any]],
  carry: Any,
  locality: tuple[bool, ...],
  scanned: tuple[Any, ...],
) -> tuple[Any, Any]:
  """Does the work of `_scan_stack`, with each layer in the program."""
  # Split, and not indexed: the gradients are then joined, and not added up.
  leaves, tree = jax.tree.flatten(scanned)
  leaves = [jax.lax.split(x, (1,) * len(locality)) for x in leaves]
  outputs = []
  for i, local in enumerate(locality):
    of_layer = jax.tree.unflatten(tree, [x[i][0] for x in leaves])
    carry, output = body(carry, local, *of_layer)
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
) -> tuple[Any, tuple[Any, ...]]:
  """Scans `body(x, local, layer, *more)` over the layers, stack by stack.

  `body` returns the new x, any pytree, and an output of the layer; `scanned`
  has for each stack a pytree with its layers on the leading axis. Parameters
  named `whole` are in `layer` as those of the whole stack, with the layer's
  number `LAYER`, so that no layer is copied out. Returns x and each stack's
  outputs.
  """
  start, outputs = 0, []
  # Layers are written out only if nothing is recomputed (XLA would keep it) and
  # parameters are whole (several layers could be gathered at once).
  shallow = config.layers <= SHALLOW
  unroll = shallow and remat == "none" and sharding.fsdp_shards() == 1
  for stack, *more in zip(stacks(params), *scanned, strict=True):
    locality = config.locality[start : start + layer_count(stack)]
    start += len(locality)
    run = _write_out if unroll and locality else _scan_stack
    unsliced = {name: stack[name] for name in whole if len(locality) > 1}
    if unsliced:
      stack = {k: x for k, x in stack.items() if k not in unsliced}
      stack[LAYER] = jnp.arange(len(locality))
    of_layer = lambda x, local, layer, *more, unsliced=unsliced: body(
      x, local, layer | unsliced, *more
    )
    x, of_stack = run(of_layer, x, locality, (stack, *more))
    outputs.append(of_stack)
  return x, tuple(outputs)
