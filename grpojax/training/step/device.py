"""Training step in one compiled program, with the reward on the device."""

import functools
from collections.abc import Callable
from typing import Any

import optax

from grpojax.core import meshes
from grpojax.core.step import make_grpo_step
from grpojax.core.types import Params, Prompts, TrainState
from grpojax.training import policies
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import reference
from grpojax.training.step.diagnosis import make_diagnose
from grpojax.training.step.host import StepResult


def make_device_program(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  shardings: TrainState,
  diagnose: Callable[..., Any] | None = None,
):
  """Compiles a step, `(state, prompts, ref_params) -> (state, metrics)`.

  The state is donated. `diagnose` is a function of `make_diagnose`, or None.
  """
  _, reward = prompts_lib.device_reward(settings, policy)

  def step(lm, state, prompts, ref_params):
    run = make_grpo_step(
      lm,
      tx,
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

  return policies.jit(
    policy, step, donate_argnums=1, out_shardings=(shardings, None)
  )


def make_device_step(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  ref_params: Params | None,
  shardings: TrainState,
) -> Callable[..., StepResult]:
  """Returns a training step in one XLA program, to be called like `HostStep`.

  Completions stay on the device, so rows are not packed, and the result has
  neither samples nor failures.
  """
  args = settings, policy, group_size, tx, shardings
  shards = meshes.row_shards(meshes.mesh_of(shardings))
  diagnose = make_diagnose(settings, shards, policy.vmappable)
  plain = make_device_program(*args)
  with_diagnosis = make_device_program(*args, diagnose)

  def step(
    state: TrainState, prompts: Prompts, _=None, diagnosed: bool = False, *__
  ) -> StepResult:
    program = with_diagnosis if diagnosed else plain
    # The program donates the state, so the reference is passed separately.
    moving = state.reference
    state = state.replace(reference=None)
    ref = reference.to_device(ref_params if moving is None else moving)
    state, metrics = program(state, prompts, ref)
    state = state.replace(reference=moving)
    return StepResult(state, meshes.fetch(metrics), [], [])

  return step
