"""One GRPO step as pure functions.

`rollout` -> rewards -> `make_batch` -> `make_update`'s update; or the whole of
it as one jittable function where the reward is one too: `make_grpo_step`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from grpojax.core.advantages import leave_one_out
from grpojax.core.arguments import Ids, random_key, read_rewards
from grpojax.core.batch import make_batch
from grpojax.core.binding import bind
from grpojax.core.decoding import Decoding
from grpojax.core.rollout import rollout, rollout_metrics
from grpojax.core.sampling import Sampling
from grpojax.core.truncation import TRUNCATED
from grpojax.core.types import LM, Params, Prompts, Rollout, TrainState
from grpojax.core.update import Metrics, make_update


def init_state(
  params: Params, tx: optax.GradientTransformation, key: Array
) -> TrainState:
  """State before the first step; the random key decides the whole run."""

  def zero():  # each a buffer of its own, or the state could not be donated
    return jnp.zeros((), jnp.int32)

  return TrainState(
    params=params,
    opt_state=tx.init(params),
    key=random_key(key),
    step=zero(),
    prompts_consumed=zero(),
    skipped=zero(),
  )


def diagnosis_key(state: TrainState) -> Key[Array, ""]:
  """A key for the diagnosis of a step.

  Folds in a negative number; sampling folds in the step itself, which is not
  negative, so that the two never draw the same.
  """
  return jax.random.fold_in(state.key, -1 - state.step)


OLD_LOGPROBS = {"rollout": False, "trainer": True}
"""Who computes the old log-probabilities, the denominators of the importance
ratios, and whether that is to `recompute_logprobs` (see `make_grpo_step`)."""


def make_grpo_step(
  lm: LM,
  tx: optax.GradientTransformation,
  reward_fn: Callable[[Rollout, Any], Array],
  *,
  group_size: int,
  max_new_tokens: int,
  eos_ids: Ids,
  pad_id: int = 0,
  advantage: Callable[..., Array] = leave_one_out,
  kl_in_reward: float = 0.0,
  truncated: str = "keep",
  advantage_clip: float | None = None,
  recompute_logprobs: bool = False,
  sampling: Sampling = Sampling(),
  decoding: Decoding = Decoding(),
  epochs: int = 1,
  minibatches: int = 1,
  micro_batches: int = 1,
  chunk_size: int = 256,
  diagnose: Callable[..., Metrics] | None = None,
  **update_options: Any,
) -> Callable[..., tuple[TrainState, Metrics]]:
  """A whole GRPO step as one pure function: sample, score, compare, update.

  Jit it (donating the state), scan it over prompts, vmap it over states with
  different keys, or compile it ahead of time. Completions are scored and
  learned from at their full length: they could be packed only by who knows
  their lengths before compiling (see `core.packing`).

  Args:
    lm: the model.
    tx: the optimizer.
    reward_fn: jittable `(rollout, targets) -> rewards [B, G]`; the targets are
      those of the prompts.
    group_size: G.
    max_new_tokens: T, see `rollout`.
    eos_ids: see `rollout`.
    pad_id: see `rollout`.
    advantage: see `make_batch`.
    kl_in_reward: see `make_batch`.
    truncated: see `make_batch`.
    advantage_clip: see `make_batch`.
    recompute_logprobs: where there are several updates, compute the old
      log-probabilities anew before the first of them (`make_batch`'s
      policy_params); False takes the sampler's. A single update is exactly
      on-policy and needs neither.
    sampling: the distribution to sample and to score with.
    decoding: see `rollout`.
    epochs: see `make_update`.
    minibatches: see `make_update`.
    micro_batches: see `make_update`; the reference takes as many rows at once.
    chunk_size: see `token_logprobs`.
    diagnose: `(params, rollout, rewards, key) -> metrics` of the policy that
      sampled, to be returned with the others (see `statistics.diagnostics`);
      a parameter `score_norms` gets those of the state.
    **update_options: `loss`, `weighting`, `correction`, `max_grad_norm`,
      `entropy_bonus`, `top_entropy_quantile` and `router_aux_coef` of
      `make_update`.

  Returns:
    `step(state, prompts, ref_params=None) -> (state, metrics)`.
  """
  update = make_update(
    lm,
    tx,
    epochs=epochs,
    minibatches=minibatches,
    micro_batches=micro_batches,
    sampling=sampling,
    chunk_size=chunk_size,
    **update_options,
  )

  def step(state: TrainState, prompts: Prompts, ref_params=None):
    samples = rollout(
      lm,
      state.params,
      prompts,
      jax.random.fold_in(state.key, state.step),
      group_size=group_size,
      max_new_tokens=max_new_tokens,
      eos_ids=eos_ids,
      pad_id=pad_id,
      sampling=sampling,
      decoding=decoding,
    )
    rewards = reward_fn(samples, prompts.targets)
    rewards = read_rewards(rewards, samples.finished.shape, "reward_fn")
    on_policy = epochs * minibatches == 1
    batch = make_batch(
      lm,
      samples,
      rewards,
      advantage,
      ref_params,
      on_policy=on_policy,
      policy_params=state.params
      if recompute_logprobs and not on_policy
      else None,
      kl_in_reward=kl_in_reward,
      truncated=truncated,
      advantage_clip=advantage_clip,
      micro_batches=minibatches * micro_batches,
      sampling=sampling,
      chunk_size=chunk_size,
      score_norms=state.score_norms,
      prompt_weights=prompts.weights,
    )
    compared, _ = TRUNCATED[truncated](rewards, samples.finished)
    row = rollout_metrics(samples, rewards, compared)
    if diagnose is not None:
      diagnose_ = bind(diagnose, score_norms=state.score_norms)
      row |= diagnose_(state.params, samples, rewards, diagnosis_key(state))
    state, metrics = update(state, batch)
    return state, row | metrics

  return step
