"""Inputs and resources of a run, which its steps and evaluations share."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from grpojax.core.types import Params, TrainState
from grpojax.training.data import splits
from grpojax.training.files.sources import ModelFiles
from grpojax.training.policies import Policy
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import scoring


class Run(NamedTuple):
  """Inputs and resources of a run, the same in all steps."""

  settings: TrainSettings  # completed with the facts of the start
  directory: pathlib.Path
  policy: Policy  # with weights only between `check` and `start`
  mesh: jax.sharding.Mesh
  train: splits.Split
  held_out: splits.Split
  reward_model: ModelFiles | None = None
  reward_pool: scoring.RewardPool | None = None  # set by `check`
  shardings: TrainState | None = None  # of the state; set by `start`
  ref_params: Params | None = None  # fixed reference, if any
  greedy: Any = None  # sampler for evaluations, see `make_sampler`
  track: Callable[[int, Any], None] = lambda step, row: None  # logs to trackers
  check_directory: Callable[[], None] = lambda: None  # from `run_lock.hold`

  def file(self, name: str) -> pathlib.Path:
    """Returns a path inside the run directory."""
    return self.directory / name
