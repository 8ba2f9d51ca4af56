"""Training step in one compiled program, with the reward on the device."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from grpojax.core import meshes
from grpojax.core.step import make_grpo_step
from grpojax.core.types import Prompts, TrainState
from grpojax.core.update import read_by_update
from grpojax.training import policies
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.step.extension import (
  Extension,
  Inputs,
  StepResult,
  after_update,
  updated,
)
from grpojax.training.step.extensions import diagnosis, moving_reference


def step_program(
  inputs: Inputs, group_size: int, diagnose: Callable[..., Any] | None = None
):
  """Compiles a step, `(state, prompts, ref_params) -> (state, metrics)`.

  The state is donated. `diagnose` is a function of `make_diagnose`, or None.
  """
  settings = inputs.settings
  policy = inputs.policy
  _, reward = prompts_lib.device_reward(settings, policy)

  def step(lm, state, prompts, ref_params):
    run = make_grpo_step(
      lm,
      inputs.tx,
      reward,
      group_size=group_size,
      max_new_tokens=settings.sampling.max_new_tokens,
      eos_ids=policy.ends,
      pad_id=policy.pad_id,
      objective=settings.loss,
      update=settings.optim.update,
      sampling=settings.sampling.distribution,
      diagnose=diagnose and functools.partial(diagnose, lm),
      ref_lm=policy.teacher and policy.teacher.lm,
    )
    return run(state, prompts, ref_params)

  shardings = read_by_update(inputs.shardings)
  return policies.jit(
    policy, step, donate_argnums=1, out_shardings=(shardings, None)
  )


def make_device_step(
  inputs: Inputs, extensions: Mapping[str, Extension], group_size: int
) -> Callable[..., StepResult]:
  """Returns a training step in one XLA program, called like `host.take_step`.

  Completions stay on the device, so rows are not packed, and the result has
  neither samples nor failures.
  """
  settings = inputs.settings
  shards = meshes.row_shards(inputs.mesh)
  diagnose = diagnosis.make_diagnose(settings, shards, inputs.policy.vmappable)
  plain = step_program(inputs, group_size)
  with_diagnosis = step_program(inputs, group_size, diagnose)

  def step(state: TrainState, prompts: Prompts, *_: Any) -> StepResult:
    number = int(meshes.fetch(state.step)) + 1
    program = with_diagnosis if diagnosis.is_due(settings, number) else plain
    ref_params = moving_reference.params(inputs, state)
    state, metrics = updated(program, state, prompts, ref_params)
    metrics = meshes.fetch(metrics)
    state = after_update(extensions, state, None, metrics)
    return StepResult(state, metrics)

  return step
