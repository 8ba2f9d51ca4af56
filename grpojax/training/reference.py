"""The reference policy: where it is, and whether it follows the policy.

A fixed one is the starting policy, kept beside the run. One that follows
(TR-DPO, arXiv 2404.09656) is a part of the state, and so of its checkpoints:
every `model.reference_every` steps it becomes

    mix * policy + (1 - mix) * reference,    mix = model.reference_mix

of the parameters: a copy of the policy where mix is 1, and with a small one at
every step an exponential average. Of adapters, both factors are mixed, and the
base stays as it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from grpojax.core.types import Params, TrainState
from grpojax.runtime.config import config_error

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
    remedy = f"{device.platform} has no memory of the kind {kind}: use device"
    raise ValueError(config_error("model.reference", where, remedy))


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


def to_device(params: Params | None) -> PyTree:
  """The reference on the devices, for a pass; None and {} as they are."""

  def back(x):
    (kind,) = {d.default_memory().kind for d in x.sharding.addressable_devices}
    return jax.device_put(x, x.sharding.with_memory_kind(kind))

  return jax.tree.map(back, params)


def follows(config: ConfigDict) -> bool:
  """Whether the reference changes while training."""
  return config.loss.beta > 0 and config.model.reference_every > 0


def mixed(reference: Params, params: Params, mix: float | int) -> Params:
  """The sum mix * params + (1 - mix) * reference, in its dtypes."""
  return jax.tree.map(
    lambda r, p: (mix * p + (1 - mix) * r).astype(r.dtype), reference, params
  )


def first(params: Params, shardings: PyTree) -> Params:
  """A reference that follows, before the first step: a copy of the policy."""
  copy = jax.jit(lambda p: jax.tree.map(jnp.copy, p), out_shardings=shardings)
  return copy(params)


def make_update_reference(
  config: ConfigDict, shardings: TrainState
) -> Callable[[TrainState], TrainState]:
  """What a step ends with: the state, with the reference that the next one has.

  Args:
    config: the run's.
    shardings: shardings of the state.
  """
  every, mix = config.model.reference_every, config.model.reference_mix
  where = config.model.reference
  if not follows(config):
    return lambda state: state
  move = jax.jit(
    lambda old, params: mixed(old, params, mix),
    donate_argnums=0,
    out_shardings=shardings.params,
  )

  def follow(state):
    if int(state.step) % every:
      return state
    new = move(to_device(state.reference), state.params)
    return state.replace(reference=stored(new, where))

  return follow


def on_devices(state: TrainState) -> TrainState:
  """The state as it is saved and loaded, wherever its reference is kept."""
  return state.replace(reference=to_device(state.reference))


def to_host(state: TrainState, config: ConfigDict) -> TrainState:
  """The state as a run holds it: `on_devices`'s, the reference in its place."""
  kept = stored(state.reference, config.model.reference)
  return state.replace(reference=kept)


def config_errors(flat_config: dict[str, Any]) -> list[str]:
  """What is wrong with the settings of a reference, a line each.

  Args:
    flat_config: all settings by dotted path, each in its own range.
  """
  where, errors = flat_config["model.reference"], []
  if where != "device" and flat_config["reward.on_device"]:
    remedy = (
      "reward.on_device is one program, which holds it all along: use device"
    )
    errors.append(config_error("model.reference", where, remedy))
  every, mix = (
    flat_config["model.reference_every"],
    flat_config["model.reference_mix"],
  )
  if every and not flat_config["loss.beta"]:
    remedy = "there is no reference without a KL term: use 0, or loss.beta > 0"
    errors.append(config_error("model.reference_every", every, remedy))
  if mix != 1 and not every:
    remedy = (
      "a fixed reference is not mixed: use 1, or model.reference_every > 0"
    )
    errors.append(config_error("model.reference_mix", mix, remedy))
  return errors
