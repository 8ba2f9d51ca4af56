"""Types of the extensions of a training step (`extensions`)."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool

from grpojax.core.types import Batch, Params, Prompts, TrainState
from grpojax.core.update import read_by_update
from grpojax.rewards.pool import GroupRewards
from grpojax.training.policies import Policy
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step.draws import Draw, Drawing, Examples, Source, Timer
from grpojax.training.step.scoring import RewardPool


class Inputs(NamedTuple):
  """Inputs of a run's steps, the same in all steps."""

  settings: TrainSettings
  policy: Policy
  tx: Any  # an optax transformation
  shardings: TrainState  # of the state
  mesh: jax.sharding.Mesh
  ref_params: Params | None = None  # a fixed reference
  reward_pool: RewardPool | None = None  # None with reward.on_device
  examples: Any = ()  # training examples
  directory: pathlib.Path | None = None  # of the run
  # May raise. It is called repeatedly until the update, and with
  # `together=True` in all processes between the parts of a step.
  check_signals: Callable[..., None] = lambda together=False: None


class Drawn(NamedTuple):
  """Completions of a step on their way to the update."""

  batch: Draw
  rewards: GroupRewards  # of all drawn groups, in order
  examples: Examples  # of the same groups
  prompts: Prompts  # of the first draw
  metrics: Mapping[str, Any] = {}
  used: Bool[np.ndarray, "B"] | None = None  # groups in the loss; None: all
  scale: np.float32 | None = None  # factor on all advantages; None: 1


class StepResult(NamedTuple):
  """The new state after a step, and the step's records."""

  state: TrainState
  metrics: dict[str, Any]
  drawn: Drawn | None = None  # None with reward.on_device
  batch: Batch | None = None


class Context(NamedTuple):
  """A step in progress."""

  number: int  # from 1
  key: Array  # of its samples
  timer: Timer
  source: Source  # of further draws
  take: Callable[[], tuple[Prompts, Examples]]  # the stream's next prompts
  upcoming: Drawing | None = None  # of the next step, if drawn ahead


class Extension(NamedTuple):
  """Functions called by each step; None if not needed."""

  # `() -> first value` of `TrainState.extras[NAME]`
  init: Callable[[], Any] | None = None
  # `(state, group_size) -> prompts and examples` of the state's step
  choose: Callable[[TrainState, int], tuple[Prompts, Examples]] | None = None
  # `(state, drawn, context) -> drawn`
  after_draw: Callable[[TrainState, Drawn, Context], Drawn] | None = None
  # `(state, drawn, metrics) -> state`; `drawn` is None with reward.on_device
  after_update: (
    Callable[[TrainState, Drawn | None, Mapping[str, Any]], TrainState] | None
  ) = None


def with_metrics(drawn: Drawn, metrics: Mapping[str, Any]) -> Drawn:
  """Adds metrics of a step's completions."""
  return drawn._replace(metrics={**drawn.metrics, **metrics})


def extended(state: TrainState, **extras: Any) -> TrainState:
  """Replaces parts of the state's extras."""
  return state.replace(extras={**state.extras, **extras})


def updated(
  program: Callable[..., Any], state: TrainState, *args: Any
) -> tuple[TrainState, Mapping[str, Any]]:
  """Runs an update, and keeps the extras that it does not read."""
  new, metrics = program(read_by_update(state), *args)
  return new.replace(extras={**state.extras, **new.extras}), metrics


def after_update(
  extensions: Mapping[str, Extension],
  state: TrainState,
  drawn: Drawn | None,
  metrics: Mapping[str, Any],
) -> TrainState:
  """Calls the `after_update` of all extensions."""
  for extension in extensions.values():
    if extension.after_update:
      state = extension.after_update(state, drawn, metrics)
  return state
