"""One GRPO step as pure functions.

`rollout` -> rewards -> `make_batch` -> `make_update`'s update; or the whole of
it as one jittable function where the reward is one too: `make_grpo_step`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from grpojax.core import losses
from grpojax.core import micro_batches as parts_lib
from grpojax.core import packing as packing_lib
from grpojax.core.advantages import leave_one_out
from grpojax.core.arguments import Ids, check_prompts, random_key, read_rewards
from grpojax.core.binding import bind
from grpojax.core.decoding import Decoding
from grpojax.core.group_axis import present
from grpojax.core.mesh import constrain
from grpojax.core.packing import Packing
from grpojax.core.rollout import rollout, rollout_metrics
from grpojax.core.sampling import Sampling
from grpojax.core.truncation import TRUNCATED
from grpojax.core.types import LM, Batch, Params, Prompts, Rollout, TrainState
from grpojax.core.update import Metrics, make_update
from grpojax.core.weighted_baselines import (
  ScoreNorms,
  bind_norms,
  sample_weights,
)


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


def make_batch(
  lm: LM,
  rollout: Rollout,
  rewards: Any,
  advantage: Callable[..., Array] = leave_one_out,
  ref_params: Params | None = None,
  *,
  on_policy: bool = True,
  policy_params: Params | None = None,
  kl_in_reward: float = 0.0,
  truncated: str = "keep",
  advantage_clip: float | None = None,
  micro_batches: int = 1,
  sampling: Sampling = Sampling(),
  chunk_size: int = 256,
  packing: Packing | None = None,
  score_norms: ScoreNorms | None = None,
  prompt_weights: Array | None = None,
) -> Batch:
  """Compares each completion with its group, and scores it by the reference.

  Args:
    lm: the model.
    rollout: the completions.
    rewards: [B, G], one a completion; one that is not finite (nan, inf or -inf)
      is none: such a completion takes no part, in its group's comparison or in
      the loss. Nor does a row without any prompt token, which only pads the
      batch.
    advantage: rewards [..., G] -> advantages [..., G], see `core.advantages`.
      If it has a parameter `lengths` that is not bound yet (`length_weighted`),
      it gets the completions' lengths [B, G], in tokens; `logit_score_sq`
      (`score_weighted`) what the rollout says of their scores; `score_norms`
      (`norm_ratio`) those given here.
    ref_params: the reference policy, or None for no reference pass. It is
      scored at the temperature of `sampling` (and with its repetition penalty)
      without its cuts, see `core.kl`.
    on_policy: a single optimizer update follows, so the policy that is trained
      is exactly the one that sampled, and no old log-probabilities are kept.
    policy_params: the policy that sampled, to compute its log-probabilities
      anew: one more forward pass, by the program that training scores with, so
      that the first update's ratios are 1 whatever the sampler rounded. None
      takes the sampler's.
    kl_in_reward: beta of a penalty beta * log(pi / ref) of each completion,
      taken from its reward before the comparison.
    truncated: what completions without an end count for, see `core.truncation`.
    advantage_clip: advantages are held within [-this, this], which biases the
      gradient towards what such advantages are of; None is off.
    micro_batches: parts in which the batch is scored, one after the other, see
      `micro_batches.cuts`.
    sampling: what the rollout was sampled with.
    chunk_size: see `token_logprobs`.
    packing: of the completions (`packing_layout.plan`), which are then scored,
      and in the update learned from, as packed rows; None as they are.
    score_norms: of earlier steps (`TrainState.score_norms`).
    prompt_weights: see `Prompts.weights`; of a prompt the KL term counts as
      much as the rewards do.

  Returns:
    A `Batch` for the update.

  Raises:
    ValueError: a penalty without a reference, policy_params on-policy, a bound
      that is none, an advantage that asks for what is not there, or arrays that
      do not fit (see `core.arguments`).
  """
  if advantage_clip is not None and not advantage_clip > 0:
    raise ValueError(
      f"advantage_clip bounds |A| and must be > 0, not {advantage_clip}; None "
      "turns it off"
    )
  rewards = read_rewards(rewards, rollout.finished.shape, "make_batch")
  if on_policy and policy_params is not None:
    raise ValueError(
      "policy_params are there to compute old log-probabilities, and "
      "on_policy=True keeps none: leave one of the two out"
    )
  score = functools.partial(
    _score,
    lm,
    rollout,
    micro_batches=micro_batches,
    chunk_size=chunk_size,
    packing=packing,
  )
  own, ref_logprobs = rollout.logprobs, None
  if policy_params is not None:
    own = score(policy_params, sampling)
  if ref_params is not None:
    penalty = sampling.repetition_penalty
    uncut = Sampling(sampling.temperature, repetition_penalty=penalty)
    ref_logprobs = score(ref_params, uncut)
  if kl_in_reward:
    if ref_logprobs is None:
      raise ValueError("kl_in_reward needs ref_params, the reference policy")
    rewards = rewards - kl_in_reward * losses.kl_penalty(
      own, ref_logprobs, rollout.completion_mask
    )
  asked_for = sample_weights(advantage, rollout)
  advantage = bind_norms(bind(advantage, **asked_for), score_norms)
  real = jnp.any(rollout.prompt_mask, axis=-1, keepdims=True)
  rewards = jnp.where(real, rewards, jnp.nan)
  rewards, learned = TRUNCATED[truncated](rewards, rollout.finished)
  learned = (learned & present(rewards))[..., None]
  advantages, weights = advantage(rewards), prompt_weights
  if advantage_clip is not None:
    advantages = jnp.clip(advantages, -advantage_clip, advantage_clip)
  if weights is not None:
    weights = jnp.broadcast_to(weights[:, None], rewards.shape)
  return Batch(
    prompt_ids=rollout.prompt_ids,
    prompt_mask=rollout.prompt_mask,
    completion_ids=rollout.completion_ids,
    completion_mask=rollout.completion_mask & learned,
    advantages=advantages,
    old_logprobs=None if on_policy else own,
    ref_logprobs=ref_logprobs,
    sampler_logprobs=rollout.logprobs,
    packing=packing,
    sample_weights=weights,
  )


def _score(
  lm: LM,
  rollout: Rollout,
  params: Params,
  sampling: Sampling,
  *,
  micro_batches: int,
  chunk_size: int,
  packing: Packing | None,
) -> Float[Array, "B G T"]:
  """Log-probabilities of a rollout's tokens, micro-batch by micro-batch."""

  def of_part(part):
    prompts, samples = part
    ids, layout = jax.tree.map(
      lambda x: constrain(x, "batch", "group"), samples
    )
    prompts = [constrain(x, "batch") for x in prompts]
    options = {"sampling": sampling, "chunk_size": chunk_size}
    return packing_lib.completion_logprobs(
      lm, params, *prompts, ids, layout, **options
    )[0]

  check_prompts(lm, params, rollout.prompt_ids, rollout.prompt_mask)
  prompts = rollout.prompt_ids, rollout.prompt_mask
  ids, rows = rollout.completion_ids, None
  if packing is not None:
    prompts, ids = packing_lib.regroup((prompts, ids), packing)
    rows = packing_lib.merged_rows(packing)
  cut = parts_lib.cuts(*ids.shape[:2], micro_batches)
  packing_lib.check_cut(rows, cut)
  prompts = parts_lib.split_prompts(prompts, cut)
  samples = parts_lib.split_samples((ids, rows), cut)
  logprobs = jax.lax.map(of_part, (prompts, samples))
  logprobs = parts_lib.join_samples(logprobs, cut)
  if packing is None:
    return logprobs
  return packing_lib.ungroup(logprobs, packing)


OLD_LOGPROBS = {"sampler": False, "scorer": True}
"""Who computes the old log-probabilities, the denominators of the importance
ratios, and whether that is to `rescore` (see `make_grpo_step`)."""


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
  rescore: bool = False,
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
    rescore: where there are several updates, compute the old log-probabilities
      anew before the first of them (`make_batch`'s policy_params); False takes
      the sampler's. A single update is exactly on-policy and needs neither.
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
      policy_params=state.params if rescore and not on_policy else None,
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
