"""Where the reference policy is while it is not needed."""

import jax
from jaxtyping import PyTree

from grpojax.core.types import Params

REFERENCE_MEMORY = {"device": None, "host": "pinned_host"}
"""JAX's kind of memory, by the name in a config."""


def _to(params: Params, kind: str) -> Params:
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), params
  )


def stored(params: Params, where: str) -> Params:
  """The reference as it is kept between its passes.

  Args:
    params: on the devices; {} of adapters has nothing to keep.
    where: of `REFERENCE_MEMORY`.
  """
  kind = REFERENCE_MEMORY[where]
  return params if kind is None else _to(params, kind)


def at_hand(params: Params | None) -> PyTree:
  """The reference on the devices, for a pass; None and {} as they are."""
  return None if params is None else _to(params, "device")
