"""The decoder's layers as stacks, taken apart and run one after another.

A stack is a pytree whose leaves have a leading axis of layers. Parameters hold
one or, where some layers are held apart (`last_layers`), several.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from grpojax.core.types import Params
from grpojax.models.config import TransformerConfig


def stacks(params: Params) -> tuple[Params, ...]:
  """The stacks of layers, in their order."""
  layers = params["layers"]
  return layers if isinstance(layers, tuple) else (layers,)


def layer_count(stack: Params) -> int:
  """How many layers a stack has."""
  return len(jax.tree.leaves(stack)[0])


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


def split(params: Params) -> Params:
  """Holds each layer apart, as a stack of its own."""
  layers = [
    jax.tree.map(lambda x, i=i: x[i : i + 1], stack)
    for stack in stacks(params)
    for i in range(layer_count(stack))
  ]
  return params | {"layers": tuple(layers)}


def _scan_stack(
  body: Callable[..., tuple[Any, Any]],
  carry: Any,
  locality: tuple[bool, ...],
  scanned: tuple[Any, ...],
) -> tuple[Any, Any]:
  """Scans `body(carry, local, *of_layer)` over the layers of one stack."""
  if len(locality) == 1:  # nothing to loop over, and nothing to slice
    carry, kept = body(carry, locality[0], *jax.tree.map(_only, scanned))
    return carry, jax.tree.map(lambda x: x[None], kept)
  if len(set(locality)) == 1:  # then it needs no choice at run time
    return jax.lax.scan(
      lambda carry, s: body(carry, locality[0], *s), carry, scanned
    )
  return jax.lax.scan(
    lambda carry, s: body(carry, *s), carry, (jnp.asarray(locality), *scanned)
  )


def _only(x: Array) -> Array:
  return x[0]


def scan(
  config: TransformerConfig,
  body: Callable[..., tuple[Any, Any]],
  x: Float[Array, "B G S D"],
  params: Params,
  *scanned: tuple[Any, ...],
  carried: tuple[Any, ...] | None = None,
) -> tuple[Float[Array, "B G S D"], tuple[Any, ...]]:
  """Scans `body(x, local, layer, *more)` over the layers, stack by stack.

  Args:
    config: of the model.
    body: returns the new x and what to keep of the layer.
    x: hidden states.
    params: of the model.
    *scanned: for each stack a pytree with its layers on the leading axis.
    carried: for each stack what its layers hand on beside x. Then the body is
      `body((x, of_stack), local, layer, *more, number)`, with the layer's
      number in the stack, and nothing is kept of single layers.

  Returns:
    The hidden states, and what was kept of each stack or carried through it.
  """
  start, kept = 0, []
  for i, (stack, *more) in enumerate(
    zip(stacks(params), *scanned, strict=True)
  ):
    count = layer_count(stack)
    locality = config.locality[start : start + count]
    start += count
    if carried is None:
      x, of_stack = _scan_stack(body, x, locality, (stack, *more))
    else:
      scanned_too = (stack, *more, jnp.arange(count))
      (x, of_stack), _ = _scan_stack(
        body, (x, carried[i]), locality, scanned_too
      )
    kept.append(of_stack)
  return x, tuple(kept)
