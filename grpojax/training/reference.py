"""Where the reference policy is while it is not needed."""

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from grpojax.core.types import Params
from grpojax.runtime.config import problem

REFERENCE_MEMORY = {"device": None, "host": "pinned_host"}
"""JAX's kind of memory, by the name in a config."""


def check(where: str, mesh: Mesh) -> None:
  """Refuses a place that the devices do not have.

  Args:
    where: of `REFERENCE_MEMORY`.
    mesh: the run's.

  Raises:
    ValueError: there is none.
  """
  device, kind = mesh.local_devices[0], REFERENCE_MEMORY[where]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if kind is not None and kind not in kinds:
    todo = f"{device.platform} has no memory of the kind {kind}: use device"
    raise ValueError(problem("model.reference", where, todo))


def stored(params: Params, where: str) -> Params:
  """The reference as it is kept between its passes.

  Args:
    params: on the devices; {} of adapters has nothing to keep.
    where: of `REFERENCE_MEMORY`.
  """
  kind = REFERENCE_MEMORY[where]
  if kind is None:
    return params
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), params
  )


def at_hand(params: Params | None) -> PyTree:
  """The reference on the devices, for a pass; None and {} as they are."""

  def back(x):
    (kind,) = {d.default_memory().kind for d in x.sharding.addressable_devices}
    return jax.device_put(x, x.sharding.with_memory_kind(kind))

  return jax.tree.map(back, params)
