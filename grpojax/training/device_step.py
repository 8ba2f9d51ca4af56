"""A training step in one program, with the reward on the device."""

import functools
from collections.abc import Callable
from typing import Any

import optax
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.grpo_step import make_grpo_step
from grpojax.core.types import Params, Prompts, TrainState
from grpojax.training import diagnosis, from_config, reference
from grpojax.training import policy as policy_lib
from grpojax.training import prompts as prompts_lib
from grpojax.training.policy import Policy


def make_device_program(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  shardings: TrainState,
  diagnose: Callable[..., Any] | None = None,
):
  """`(state, prompts, ref_params) -> (state, metrics)`, a step in one program.

  Args:
    config: the run's.
    policy: the model.
    group_size: G.
    tx: the optimizer.
    shardings: shardings of the state, which is donated.
    diagnose: from `diagnosis.make_diagnose`, or None.
  """
  _, reward = prompts_lib.device_reward(config, policy)

  def step(lm, state, prompts, ref_params):
    run = make_grpo_step(
      lm,
      tx,
      reward,
      group_size=group_size,
      max_new_tokens=config.sampling.max_new_tokens,
      eos_ids=policy.eos_ids,
      pad_id=policy.pad_id,
      advantage=from_config.advantage(config),
      kl_in_reward=from_config.kl_in_reward(config),
      truncated=config.loss.truncated,
      advantage_clip=config.loss.advantage_clip or None,
      recompute_logprobs=from_config.recompute_logprobs(config),
      diagnose=diagnose and functools.partial(diagnose, lm),
      decoding=from_config.decoding(config),
      **from_config.update_options(config),
    )
    return run(state, prompts, ref_params)

  return policy_lib.jit(
    policy, step, donate_argnums=1, out_shardings=(shardings, None)
  )


def make_device_step(
  config: ConfigDict,
  policy: Policy,
  group_size: int,
  tx: optax.GradientTransformation,
  ref_params: Params | None,
  shardings: TrainState,
):
  """The same step as one XLA program, with the reward on ids.

  It returns neither samples nor failures: completions never reach the host,
  which could pack them for the reference and the update.
  """
  args = config, policy, group_size, tx, shardings
  plain = make_device_program(*args)
  shards = mesh_lib.row_shards(mesh_lib.mesh_of(shardings))
  with_diagnosis = make_device_program(
    *args, diagnosis.make_diagnose(config, shards, policy.vmappable)
  )

  def step(
    state: TrainState, prompts: Prompts, examples, diagnosed: bool, take=None
  ):
    del examples, take
    run = with_diagnosis if diagnosed else plain
    held, state = state.reference, state.replace(reference=None)
    ref = reference.to_device(ref_params if held is None else held)
    state, row = run(state, prompts, ref)
    state = state.replace(reference=held)
    return state, mesh_lib.fetch(row), [], []

  return step
