"""Group size "auto": chosen from the diagnosis (`statistics.group_size`)."""

import dataclasses

from grpojax.core import meshes
from grpojax.core.binding import bind
from grpojax.core.types import TrainState
from grpojax.statistics import group_size
from grpojax.training.settings.run import AUTO, TrainSettings
from grpojax.training.step.extension import Extension, Inputs, extended

NAME = "group_size"


def current(settings: TrainSettings, state: TrainState) -> int:
  """Returns the group size of the state's next step."""
  if NAME not in state.extras:
    return settings.group_size
  return int(state.extras[NAME].group_size)


def extension(inputs: Inputs) -> Extension | None:
  """Adapts the group size to each diagnosis; None for a fixed group size."""
  settings = inputs.settings
  if settings.group_size != AUTO:
    return None
  options = dataclasses.asdict(settings.auto_group_size)
  observe = bind(group_size.observe, **options)

  def after_update(state, drawn, metrics):
    del drawn
    if "c1" not in metrics:  # no diagnosis
      return state
    constants = (metrics[name] for name in ("c1", "c1_se", "c3", "c3_se"))
    old = state.extras[NAME]
    new = meshes.run_like(observe, old, *constants)
    before, after = int(old.group_size), int(new.group_size)
    if before != after:
      print(f"group size {before} -> {after}", flush=True)
    return extended(state, **{NAME: new})

  start = settings.auto_group_size.start
  return Extension(
    init=lambda: group_size.init_choice(start), after_update=after_update
  )
