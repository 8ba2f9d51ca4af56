"""Group sampling: one forward pass per prompt, then G completions of it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpojax.core import decoding as loops
from grpojax.core import ends as ends_lib
from grpojax.core import environment as environment_lib
from grpojax.core.arguments import (
  Ids,
  check_read_prompts,
  read_ends,
  read_rewards,
)
from grpojax.core.decoding import compaction, experts
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.environment import Environment
from grpojax.core.group_axis import present, varies
from grpojax.core.types import LM, Params, Prompts, Rollout


def completion_mask(
  ids: Int[Array, "*n T"], eos_ids: Ids
) -> Bool[Array, "*n T"]:
  """Returns the mask of completions sampled by another engine.

  It is True up to and including the first EOS or stop string, if any.
  """
  ends = ends_lib.on_device(read_ends(eos_ids))
  ids = jnp.moveaxis(ids, -1, 0)

  def read(state, ids):
    ended, state = ends_lib.advance(ends, state, ids)
    return ends_lib.within(state, True, ended), ended

  _, is_end = jax.lax.scan(read, ends_lib.first_state(ends, ids[0]), ids)
  is_end = jnp.moveaxis(is_end, 0, -1)
  # A token is part of the completion if the number of ends before it is 0.
  return jnp.cumsum(is_end, axis=-1) - is_end == 0


def rollout(
  lm: LM,
  params: Params,
  prompts: Prompts,
  key: Array,
  *,
  group_size: int,
  max_new_tokens: int,
  eos_ids: Ids,
  pad_id: int = 0,
  sampling: Sampling = Sampling(),
  budgets: Int[Array, "B G"] | None = None,
  first_prompt: Int[Array, ""] | int = 0,
  environment: Environment | None = None,
) -> Rollout:
  """Samples a group of completions for each prompt.

  Each sample has its own random key, so it does not depend on the rest of the
  batch. Decoding stops as soon as every sample is done.

  Args:
    lm: Model; `lm.recording()` also records the experts of each token, for an
      objective with `router_replay`.
    params: Its parameters.
    prompts: B prompts; a row without real tokens gets empty completions.
    key: Random key; the same key gives the same completions.
    group_size: G, completions per prompt.
    max_new_tokens: T, the longest completion, EOS and observations included.
    eos_ids: Ids that end a completion or a turn, as its last token; or `Ends`.
    pad_id: Id that fills a row after its end; may equal an EOS.
    sampling: Distribution of the tokens.
    budgets: Maximum tokens of each sample, up to T; None means T for all.
    first_prompt: Index of the first prompt in the whole batch, if `prompts` are
      a part of it: all parts together give the samples of the whole batch.
    environment: Environment that answers after each turn.

  Raises:
    ValueError: an argument is invalid (`arguments.check_read_prompts`,
      `environment.checked`).
  """
  if not isinstance(prompts, Prompts):
    raise TypeError(
      f"prompts is a {type(prompts).__name__}: give "
      "grpojax.Prompts(prompt_ids, prompt_mask)"
    )
  ends = ends_lib.on_device(read_ends(eos_ids))
  check_read_prompts(lm, params, prompts.prompt_ids, prompts.prompt_mask)
  b = prompts.prompt_ids.shape[0]
  g = group_size
  t_max = max_new_tokens
  if g < 1 or t_max < 1:
    raise ValueError(
      f"group_size={g} and max_new_tokens={t_max} must be at least 1"
    )
  if budgets is not None and budgets.shape != (b, g):
    raise ValueError(f"budgets has shape {budgets.shape}, not {(b, g)} (B, G)")
  # Prepare the model for decoding, then run the prompts.
  keys = loops.sample_keys(key, (b, g), first_prompt)
  limit = jnp.full((b, g), t_max) if budgets is None else budgets
  limit = loops.token_limits(prompts, jnp.minimum(limit, t_max))
  longest = prompts.prompt_ids.shape[1] + t_max
  lm, params = lm.prepared(params, longest=longest, **sampling.formats)
  prefix = lm.prefill(params, prompts.prompt_ids, prompts.prompt_mask)
  setup = loops.Setup(lm, params, prefix, keys, limit, ends, sampling)
  samples = loops.no_samples(limit, t_max, pad_id, ends, prefix)
  if environment:
    targets = prompts.targets
    # Trace the head to learn V: the environment's ids must be below it.
    logits = jax.eval_shape(lm.unembed, params, prefix.last_hidden)
    environment = environment_lib.checked(
      environment, targets, b, t_max, logits.shape[-1]
    )
    setup = setup._replace(environment=environment)
    episodes = environment_lib.begin(environment, targets, keys, t_max)
    samples = samples._replace(episodes=episodes)
  samples = compaction.decode(setup, loops.constrain_samples(samples))
  episodes = samples.episodes
  return Rollout(
    prompt_ids=prompts.prompt_ids,
    prompt_mask=prompts.prompt_mask,
    completion_ids=samples.ids,
    completion_mask=jnp.arange(t_max)[None, None] < samples.length[..., None],
    logprobs=samples.logprobs,
    finished=samples.finished,
    experts=experts.unpack(samples.experts, prefix),
    prompt_experts=prefix.experts,
    # None without an environment.
    turns=episodes and episodes.turns,
    turn_rewards=episodes and episodes.rewards,
  )


def rollout_metrics(
  rollout: Rollout, rewards: Any, compared: Any = None
) -> dict[str, Array]:
  """Returns metrics of completions and their rewards.

  `rewards` [B, G] are before any KL penalty; `compared` are the rewards in the
  group's baseline, if different. Rows without prompt tokens, which pad the
  batch, are left out. All metrics are scalars: `reward_mean` and `reward_std`
  (over finite rewards), `rewards_missing` (share of rewards that are not
  finite), `zero_variance_groups` (share of groups of two or more whose compared
  rewards are equal), `completion_length_mean` and `_max` (tokens, observations
  included), `truncated` (share cut off at the budget), and with turns
  `turns_mean` and `sampled_tokens_mean` per completion.
  """
  shape = rollout.finished.shape
  rewards = read_rewards(rewards, shape, "rollout_metrics")
  real = jnp.any(rollout.prompt_mask, axis=-1)
  counted = jnp.broadcast_to(real[:, None], rewards.shape)
  varied = varies(rewards if compared is None else compared)
  # Groups of one cannot vary; they do not count as equal.
  varied |= rewards.shape[-1] == 1
  rewarded = counted & present(rewards)
  rewards = jnp.where(rewarded, rewards.astype(jnp.float32), 0.0)
  length = jnp.sum(rollout.completion_mask, axis=-1)

  def mean(x, over=counted):
    return jnp.sum(jnp.where(over, x, 0)) / jnp.maximum(jnp.sum(over), 1)

  reward = mean(rewards, rewarded)
  turn_metrics = {}
  if rollout.turns is not None:
    turn_metrics["turns_mean"] = mean(jnp.max(rollout.turns, axis=-1) + 1)
    tokens = jnp.sum(rollout.sampled, axis=-1)
    turn_metrics["sampled_tokens_mean"] = mean(tokens)
  return {
    "reward_mean": reward,
    "reward_std": jnp.sqrt(mean((rewards - reward) ** 2, rewarded)),
    "rewards_missing": mean(~rewarded),
    "zero_variance_groups": mean(~varied, real),
    "completion_length_mean": mean(length),
    "completion_length_max": jnp.max(length),
    "truncated": mean(~rollout.finished),
    **turn_metrics,
  }
