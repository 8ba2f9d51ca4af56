"""Reference policy: follows the policy (TR-DPO, arXiv 2404.09656).

It is part of the state and its checkpoints. Every `model.reference_every` steps
its parameters become

    mix * policy + (1 - mix) * reference,    mix = model.reference_mix

With mix = 1 this copies the policy; a small mix at every step is an exponential
average. For LoRA both factors of the adapters are mixed.
"""

from collections.abc import Callable

import jax

from grpojax.core import meshes
from grpojax.core.types import Params, TrainState
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import reference
from grpojax.training.step.extension import Extension, Inputs, extended

NAME = "reference"


def follows_policy(settings: TrainSettings) -> bool:
  """Returns True if the reference changes while training."""
  return settings.loss.beta > 0 and settings.model.reference_every > 0


def moved(state: TrainState, move: Callable[[Params], Params]) -> TrainState:
  """Moves a state's reference, if any, to another memory."""
  if NAME not in state.extras:
    return state
  return extended(state, **{NAME: move(state.extras[NAME])})


def params(inputs: Inputs, state: TrainState) -> Params | None:
  """Returns the moving or fixed reference on the devices, if any."""
  return reference.to_device(state.extras.get(NAME, inputs.ref_params))


def extension(inputs: Inputs) -> Extension | None:
  """Updates a moving reference when it is due; None if it is fixed."""
  settings = inputs.settings
  if not follows_policy(settings):
    return None
  mix = settings.model.reference_mix
  memory = settings.model.reference

  def mixed(old: Params, params: Params) -> Params:
    return jax.tree.map(
      lambda r, p: (mix * p + (1 - mix) * r).astype(r.dtype), old, params
    )

  def after_update(state, drawn, metrics):
    del drawn, metrics
    if int(state.step) % settings.model.reference_every:
      return state
    old = reference.to_device(state.extras[NAME])
    new = meshes.run_like(mixed, old, state.params, donate_argnums=0)
    return extended(state, **{NAME: reference.to_memory(new, memory)})

  return Extension(after_update=after_update)
