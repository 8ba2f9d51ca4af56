"""A GRPO step as pure functions.

A step is `rollout` -> rewards -> `make_batch` -> the update of `make_update`.
With a jittable reward, `make_grpo_step` makes it a single jittable function.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from grpojax.core import arguments
from grpojax.core.arguments import Ids
from grpojax.core.batch import make_batch
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.environment import Environment
from grpojax.core.losses.truncation import TRUNCATED
from grpojax.core.objective import Objective
from grpojax.core.options import near_names
from grpojax.core.random_keys import random_key
from grpojax.core.rollout import rollout, rollout_metrics
from grpojax.core.turns import check_credit
from grpojax.core.types import LM, Params, Prompts, Rollout, TrainState
from grpojax.core.update import Metrics, UpdateOptions, make_update


def init_state(
  params: Params, tx: optax.GradientTransformation, key: Array
) -> TrainState:
  """State before the first step; ValueError for unusable params, tx or key."""
  arguments.check_params(params)
  opt_state = arguments.init_optimizer(tx, params)
  # Donating the state needs a separate buffer per counter.
  counters = [jnp.zeros((), jnp.int32) for _ in range(3)]
  return TrainState(params, opt_state, random_key(key), *counters)


def diagnosis_key(state: TrainState) -> Key[Array, ""]:
  """Random key for a step's diagnosis, different from all sampling keys."""
  # Sampling folds in the step, which is not negative.
  return jax.random.fold_in(state.key, -1 - state.step)


@near_names
def make_grpo_step(
  lm: LM,
  tx: optax.GradientTransformation,
  reward_fn: Callable[[Rollout, Any], Array],
  *,
  group_size: int,
  max_new_tokens: int,
  eos_ids: Ids,
  pad_id: int = 0,
  objective: Objective = Objective(),
  update: UpdateOptions = UpdateOptions(),
  sampling: Sampling = Sampling(),
  diagnose: Callable[..., Metrics] | None = None,
  environment: Environment | None = None,
  credit: str = "trajectory",
  ref_lm: LM | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
  """Makes a whole GRPO step as a pure function: sample, reward, update.

  Jit it (donating the state), scan it over prompts, vmap it over states, or
  compile it ahead of time. It does not pack completions (`core.packing`).

  `reward_fn` is jittable: `(rollout, targets of the prompts) -> rewards [B, G]`
  or, with an environment, per turn [B, G, K] (`environment.returns`).
  `group_size` is G; completions have at most `max_new_tokens`, the EOS
  included. `eos_ids` is an id or several. `diagnose` is `(params, rollout,
  rewards, key) -> metrics` (see `statistics.diagnostics`): it gets the
  parameters that sampled and the rewards of whole trajectories. For
  `environment` see `rollout`, for `credit` see `make_batch`; `ref_lm` is the
  reference's model, if it is not `lm`.

  Returns `step(state, prompts, ref_params=None) -> (state, metrics)`.
  ValueError if the objective does not support the credit and, when the step is
  called, for `eos_ids` outside the vocabulary.
  """
  check_credit(credit, objective, environment is not None)
  update_policy = make_update(lm, tx, objective, update, sampling, ref_lm)
  sampled_lm = lm.recording() if objective.router_replay else lm

  def step(state: TrainState, prompts: Prompts, ref_params=None):
    if objective.needs_reference and ref_params is None:
      raise ValueError(
        f"objective.beta = {objective.beta} needs a reference policy: call "
        "step(state, prompts, ref_params)"
      )
    samples = rollout(
      sampled_lm,
      state.params,
      prompts,
      jax.random.fold_in(state.key, state.step),
      group_size=group_size,
      max_new_tokens=max_new_tokens,
      eos_ids=eos_ids,
      pad_id=pad_id,
      sampling=sampling,
      environment=environment,
    )
    arguments.check_end_ids(lm, state.params, prompts, eos_ids)
    rewards = arguments.call_reward(reward_fn, samples, prompts.targets)
    shape = samples.finished.shape
    if environment and jnp.ndim(rewards) == 3:
      shape = *shape, environment.max_turns
    rewards = arguments.read_rewards(rewards, shape, "reward_fn")
    batch = make_batch(
      lm,
      samples,
      rewards,
      objective,
      options=update,
      sampling=sampling,
      policy_params=state.params,
      ref_params=ref_params,
      ref_lm=ref_lm,
      prompt_weights=prompts.weights,
      credit=credit,
    )
    if rewards.ndim == 3:
      rewards = jnp.sum(rewards, axis=-1)
    in_baseline, _ = TRUNCATED[objective.truncated](rewards, samples.finished)
    metrics = rollout_metrics(samples, rewards, in_baseline)
    if diagnose is not None:
      metrics |= diagnose(state.params, samples, rewards, diagnosis_key(state))
    if credit != "trajectory":  # equal sums may hide unequal turns
      real = jnp.any(prompts.prompt_mask, axis=-1)
      learned = jnp.any(batch.advantages != 0, axis=(1, 2))
      equal = jnp.sum(real & ~learned) / jnp.maximum(jnp.sum(real), 1)
      metrics["zero_variance_groups"] = equal
    state, update_metrics = update_policy(state, batch, ref_params)
    return state, metrics | update_metrics

  return step
