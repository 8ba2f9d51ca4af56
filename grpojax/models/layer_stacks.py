"""The decoder's layers as stacks, taken apart and run one after another.

A stack is a pytree whose leaves have a leading axis of layers. Parameters hold
one or, where some layers are held apart (`last_layers`), several.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.core.types import Params
from grpojax.models.config import TransformerConfig


def stacks(params: Params) -> tuple[Params, ...]:
  """The stacks of layers, in their order."""
  layers = params["layers"]
  return layers if isinstance(layers, tuple) else (layers,)


def layer_count(stack: Params) -> int:
  """How many layers a stack has."""
  return len(jax.tree.leaves(stack)[0])


def split(layers: Params, sizes: Sequence[int]) -> tuple[Params, ...]:
  """One stack as several that follow each other, of so many layers each."""
  ends = list(itertools.accumulate(sizes))
  return tuple(
    jax.tree.map(lambda x, a=end - size, b=end: x[a:b], layers)
    for size, end in zip(sizes, ends, strict=True)
  )


def last_layers(
  params: Params, count: int
) -> tuple[Params, Callable[[Params], Params]]:
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
    carry, kept = body(carry, locality[0], *only)
    return carry, jax.tree.map(lambda x: x[None], kept)
  if len(set(locality)) < 2:  # then it needs no choice at run time
    local = any(locality)  # of a stack without layers too
    return jax.lax.scan(lambda carry, s: body(carry, local, *s), carry, scanned)
  return jax.lax.scan(
    lambda carry, s: body(carry, *s), carry, (jnp.asarray(locality), *scanned)
  )


def _unrolled(
  body: Callable[..., tuple[Any, Any]],
  carry: Any,
  locality: tuple[bool, ...],
  scanned: tuple[Any, ...],
) -> tuple[Any, Any]:
  """As `_scan_stack`, with the layers one by one in the program."""
  # Split, and not indexed: the gradients are then joined, and not added up.
  leaves, tree = jax.tree.flatten(scanned)
  leaves = [jax.lax.split(x, (1,) * len(locality)) for x in leaves]
  kept = []
  for i, local in enumerate(locality):
    of_layer = jax.tree.unflatten(tree, [x[i][0] for x in leaves])
    carry, of_layer = body(carry, local, *of_layer)
    kept.append(of_layer)
  return carry, jax.tree.map(lambda *x: jnp.stack(x), *kept)


def scan(
  config: TransformerConfig,
  body: Callable[..., tuple[Any, Any]],
  x: Any,
  params: Params,
  *scanned: tuple[Any, ...],
  unroll: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
  """Scans `body(x, local, layer, *more)` over the layers, stack by stack.

  Args:
    config: of the model.
    body: returns the new x and what to keep of the layer.
    x: hidden states; any pytree.
    params: of the model.
    *scanned: for each stack a pytree with its layers on the leading axis.
    unroll: the layers are written out instead: the program grows with their
      number, and `local` is a Python value.

  Returns:
    The hidden states, and what was kept of each stack.
  """
  start, kept = 0, []
  for stack, *more in zip(stacks(params), *scanned, strict=True):
    locality = config.locality[start : start + layer_count(stack)]
    start += len(locality)
    run = _unrolled if unroll and locality else _scan_stack
    x, of_stack = run(body, x, locality, (stack, *more))
    kept.append(of_stack)
  return x, tuple(kept)
