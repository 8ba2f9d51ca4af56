"""Reference policy: its memory, and its updates where it follows the policy.

A fixed one is the starting policy, kept beside the run. One that follows
(TR-DPO, arXiv 2404.09656) is a part of the state, and so of its checkpoints:
every `model.reference_every` steps it becomes

    mix * policy + (1 - mix) * reference,    mix = model.reference_mix

of the parameters: a copy of the policy where mix is 1, and with a small one at
every step an exponential average. Of adapters, both factors are mixed, and the
base stays as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from grpojax.core.types import Params, TrainState
from grpojax.runtime.cli.config import config_error
from grpojax.training.settings.inputs import REFERENCE_MEMORY
from grpojax.training.settings.run import TrainSettings


def check_memory(memory: str, mesh: Mesh) -> None:
  """Raises ValueError where the devices lack a kind of `REFERENCE_MEMORY`."""
  device, kind = mesh.local_devices[0], REFERENCE_MEMORY[memory]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if kind is not None and kind not in kinds:
    remedy = f"{device.platform} has no memory of the kind {kind}: use device"
    raise ValueError(config_error("model.reference", memory, remedy))


def follows_policy(settings: TrainSettings) -> bool:
  """Returns True where the reference changes while training."""
  return settings.loss.beta > 0 and settings.model.reference_every > 0


def to_memory(params: Params | None, memory: str) -> Any:
  """Moves a reference to where it is kept; {} of adapters, and None, stay."""
  kind = REFERENCE_MEMORY[memory]
  if kind is None:
    return params
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), params
  )


def to_device(params: Params | None) -> PyTree:
  """Moves a reference to the devices, for a pass; None and {} stay."""

  def move(x):
    (kind,) = {d.default_memory().kind for d in x.sharding.addressable_devices}
    return jax.device_put(x, x.sharding.with_memory_kind(kind))

  return jax.tree.map(move, params)


def state_to_device(state: TrainState) -> TrainState:
  """Returns the state as it is saved: its reference on the devices."""
  return state.replace(reference=to_device(state.reference))


def state_to_memory(state: TrainState, settings: TrainSettings) -> TrainState:
  """Returns the state as a run holds it: its reference in its memory."""
  reference = to_memory(state.reference, settings.model.reference)
  return state.replace(reference=reference)


def copy_policy(params: Params, shardings: PyTree) -> Params:
  """Returns a reference that follows, before the first step."""
  copy = jax.jit(lambda p: jax.tree.map(jnp.copy, p), out_shardings=shardings)
  return copy(params)


def make_update_reference(
  settings: TrainSettings, shardings: TrainState
) -> Callable[[TrainState], TrainState]:
  """Makes `state -> state` with the reference of the next step."""
  every, mix = settings.model.reference_every, settings.model.reference_mix

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings.params)
  def move(reference: Params, params: Params) -> Params:
    return jax.tree.map(
      lambda r, p: (mix * p + (1 - mix) * r).astype(r.dtype), reference, params
    )

  def update_reference(state: TrainState) -> TrainState:
    if int(state.step) % every:
      return state
    new = move(to_device(state.reference), state.params)
    new = to_memory(new, settings.model.reference)
    return state.replace(reference=new)

  return update_reference
