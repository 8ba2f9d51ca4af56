"""The batch of an update: completions compared with their groups."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from grpojax.core import losses, packed_logprobs
from grpojax.core import micro_batches as parts_lib
from grpojax.core import packing as packing_lib
from grpojax.core.advantages import leave_one_out
from grpojax.core.arguments import check_prompts, read_rewards
from grpojax.core.binding import bind
from grpojax.core.group_axis import present
from grpojax.core.mesh import constrain
from grpojax.core.packing import Packing
from grpojax.core.sampling import Sampling
from grpojax.core.truncation import TRUNCATED
from grpojax.core.types import LM, Batch, Params, Rollout
from grpojax.core.weighted_baselines import (
  ScoreNorms,
  bind_norms,
  sample_weights,
)


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
      `micro_batches.cuts`; fewer where it is packed.
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
  advantages, learned = _compare(
    rollout, rewards, advantage, truncated, advantage_clip, score_norms
  )
  weights = prompt_weights
  if weights is not None:
    weights = jnp.broadcast_to(weights[:, None], rewards.shape)
  return Batch(
    prompt_ids=rollout.prompt_ids,
    prompt_mask=rollout.prompt_mask,
    completion_ids=rollout.completion_ids,
    completion_mask=rollout.completion_mask & learned[..., None],
    advantages=advantages,
    old_logprobs=None if on_policy else own,
    ref_logprobs=ref_logprobs,
    rollout_logprobs=rollout.logprobs,
    packing=packing,
    sample_weights=weights,
  )


def _compare(
  rollout: Rollout,
  rewards: Real[Array, "B G"],
  advantage: Callable[..., Array],
  truncated: str,
  advantage_clip: float | None,
  score_norms: ScoreNorms | None,
) -> tuple[Float[Array, "B G"], Bool[Array, "B G"]]:
  """Advantages, and which completions are learned from; see `make_batch`."""
  real = jnp.any(rollout.prompt_mask, axis=-1, keepdims=True)
  rewards = jnp.where(real, rewards, jnp.nan)
  rewards, learned = TRUNCATED[truncated](rewards, rollout.finished)
  asked_for = sample_weights(advantage, rollout)
  advantages = bind_norms(bind(advantage, **asked_for), score_norms)(rewards)
  if advantage_clip is not None:
    advantages = jnp.clip(advantages, -advantage_clip, advantage_clip)
  return advantages, learned & present(rewards)


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
    return packed_logprobs.completion_logprobs(
      lm, params, *prompts, ids, layout, **options
    )[0]

  check_prompts(lm, params, rollout.prompt_ids, rollout.prompt_mask)
  prompts = rollout.prompt_ids, rollout.prompt_mask
  ids = rollout.completion_ids
  if packing is not None:
    sizes = ids.shape, rollout.prompt_ids.shape[-1]
    packing_lib.check_parts(packing, *sizes, micro_batches)
    prompts, ids, _, rows = packing_lib.split(prompts, ids, packing)
    logprobs = jax.lax.map(of_part, (prompts, (ids, rows)))
    return packing_lib.join(logprobs, packing)
  cut = parts_lib.cuts(*ids.shape[:2], micro_batches)
  prompts = parts_lib.split_prompts(prompts, cut)
  samples = parts_lib.split_samples((ids, None), cut)
  logprobs = jax.lax.map(of_part, (prompts, samples))
  return parts_lib.join_samples(logprobs, cut)
