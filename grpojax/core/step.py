"""One GRPO step as pure functions.

`rollout` -> rewards -> `make_batch` -> `make_update`'s update; or the whole of
it as one jittable function where the reward is one too: `make_grpo_step`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key

from grpojax.core import losses
from grpojax.core.advantages import leave_one_out
from grpojax.core.logprobs import token_logprobs
from grpojax.core.rollout import rollout
from grpojax.core.sampling import Sampling
from grpojax.core.types import (
  LM,
  Batch,
  Params,
  Prompts,
  Rollout,
  TrainState,
)

Metrics = dict[str, Array]
_EXTREMES = {"ratio_min": jnp.min, "ratio_max": jnp.max}
_TOTALS = {"skipped_updates": jnp.sum}


def init_state(
  params: Params, tx: optax.GradientTransformation, key: Key[Array, ""]
) -> TrainState:
  """State before the first step; `key` decides the whole run."""
  zero = jnp.zeros((), jnp.int32)
  return TrainState(
    params=params,
    opt_state=tx.init(params),
    key=key,
    step=zero,
    prompts_consumed=zero,
    skipped=zero,
  )


def make_batch(
  lm: LM,
  rollout: Rollout,
  rewards: Float[Array, "B G"],
  advantage: Callable[[Array], Array] = leave_one_out,
  ref_params: Params | None = None,
  *,
  on_policy: bool = True,
  kl_in_reward: float = 0.0,
  sampling: Sampling = Sampling(),
  chunk_size: int = 32,
) -> Batch:
  """Compares each completion with its group, and scores it by the reference.

  Args:
    lm: the model.
    rollout: the completions.
    rewards: one a completion.
    advantage: rewards [..., G] -> advantages [..., G], see `core.advantages`.
    ref_params: the reference policy, or None for no reference pass.
    on_policy: a single optimizer update follows, so the policy that is trained
      is exactly the one that sampled, and no old log-probabilities are kept.
    kl_in_reward: beta of a penalty beta * log(pi / ref) of each completion,
      taken from its reward before the comparison.
    sampling: what the rollout was sampled with.
    chunk_size: see `token_logprobs`.

  Returns:
    A `Batch` for the update.

  Raises:
    ValueError: a penalty without a reference.
  """
  ref_logprobs = None
  if ref_params is not None:
    ref_logprobs, _ = token_logprobs(
      lm,
      ref_params,
      rollout.prompt_ids,
      rollout.prompt_mask,
      rollout.completion_ids,
      sampling=sampling,
      chunk_size=chunk_size,
    )
  if kl_in_reward:
    if ref_logprobs is None:
      raise ValueError("kl_in_reward needs ref_params, the reference policy")
    rewards = rewards - kl_in_reward * losses.kl_penalty(
      rollout.logprobs, ref_logprobs, rollout.completion_mask
    )
  return Batch(
    prompt_ids=rollout.prompt_ids,
    prompt_mask=rollout.prompt_mask,
    completion_ids=rollout.completion_ids,
    completion_mask=rollout.completion_mask,
    advantages=advantage(rewards),
    old_logprobs=None if on_policy else rollout.logprobs,
    ref_logprobs=ref_logprobs,
  )


def rollout_metrics(rollout: Rollout, rewards: Float[Array, "B G"]) -> Metrics:
  """What the completions and their rewards look like.

  Rows that only pad the batch (no prompt token) are left out.

  Returns:
    Scalars: `reward_mean`, `reward_std` (over all samples),
    `zero_variance_groups` (share of groups whose rewards are all equal: they
    teach nothing), `completion_length_mean` and `_max` (tokens), `truncated`
    (share cut off at the budget).
  """
  real = jnp.any(rollout.prompt_mask, axis=-1)
  each = jnp.broadcast_to(real[:, None], rewards.shape)
  rewards = jnp.where(each, rewards.astype(jnp.float32), 0.0)
  length = jnp.sum(rollout.completion_mask, axis=-1)
  count = jnp.maximum(jnp.sum(each), 1)

  def mean(x):
    return jnp.sum(jnp.where(each, x, 0)) / count

  reward = mean(rewards)
  same = jnp.max(rewards, axis=-1) == jnp.min(rewards, axis=-1)
  return {
    "reward_mean": reward,
    "reward_std": jnp.sqrt(mean((rewards - reward) ** 2)),
    "zero_variance_groups": jnp.sum(same & real)
    / jnp.maximum(jnp.sum(real), 1),
    "completion_length_mean": mean(length),
    "completion_length_max": jnp.max(length),
    "truncated": mean(~rollout.finished),
  }


def _split(tree, parts: int):
  """Splits axis 0 into `parts`, row r to part r mod parts.

  Strided, so that a batch sharded over devices stays spread over all of them.
  """
  return jax.tree.map(
    lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), tree
  )


def _token_metrics(tokens: dict[str, Array], mask: Array) -> Metrics:
  """Means over real tokens, and the extreme ratios."""
  count = jnp.maximum(jnp.sum(mask), 1)

  def mean(name):
    return jnp.sum(jnp.where(mask, tokens[name], 0)) / count

  # The mask may lack any token; ratios are 1 on padding, so extremes are safe.
  return {
    "kl": mean("kl"),
    "entropy": mean("entropy"),
    "clip_fraction_low": mean("clipped_low"),
    "clip_fraction_high": mean("clipped_high"),
    "ratio_min": jnp.min(tokens["ratio"]),
    "ratio_max": jnp.max(tokens["ratio"]),
  }


def _apply(tx, state: TrainState, grads, max_grad_norm):
  """One optimizer update; skipped as a whole if a gradient is not finite."""
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm)
  if max_grad_norm is not None:
    shrink = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-30))
    grads = jax.tree.map(lambda g: (g * shrink).astype(g.dtype), grads)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  new = optax.apply_updates(state.params, updates), opt_state
  old = state.params, state.opt_state
  params, opt_state = jax.tree.map(
    lambda a, b: jnp.where(finite, a, b), new, old
  )
  state = state.replace(
    params=params, opt_state=opt_state, skipped=state.skipped + ~finite
  )
  return state, {
    "grad_norm": norm,
    "update_norm": jnp.where(finite, optax.tree.norm(updates), 0.0),
    "skipped_updates": ~finite,
  }


def make_update(
  lm: LM,
  tx: optax.GradientTransformation,
  *,
  loss: Callable[..., Any] = losses.grpo_loss,
  weighting: Callable[[Array], Array] = losses.token_mean,
  epochs: int = 1,
  minibatches: int = 1,
  micro_batches: int = 1,
  max_grad_norm: float | None = None,
  sampling: Sampling = Sampling(),
  chunk_size: int = 32,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The policy update of one rollout: epochs x minibatches optimizer updates.

  Token weights are computed over a whole minibatch before it is cut into
  micro-batches, so how the work is split changes nothing but memory.

  Args:
    lm: the model.
    tx: the optimizer.
    loss: `losses.grpo_loss`, with its settings bound by `functools.partial`.
    weighting: mask [B, G, T] -> weights, see `core.losses`.
    epochs: passes over the rollout.
    minibatches: optimizer updates a pass; divides B (groups stay whole).
    micro_batches: parts of a minibatch whose gradients are added up by a scan;
      divides B / minibatches.
    max_grad_norm: clips the gradient's global norm; None does not.
    sampling: what the rollout was sampled with.
    chunk_size: see `token_logprobs`.

  Returns:
    A pure `update(state, batch) -> (state, metrics)`. Metrics are means over
    the updates (`ratio_min` and `ratio_max` extremes, `skipped_updates` a
    count): `loss`, `kl` (k3, nats a token), `entropy` (nats a token),
    `clip_fraction_low`, `clip_fraction_high`, `grad_norm` before clipping,
    `update_norm`. The update raises ValueError where B does not divide, or
    where a batch without old log-probabilities meets several updates.
  """

  def micro_loss(params, batch: Batch, weights):
    logprobs, entropy = token_logprobs(
      lm,
      params,
      batch.prompt_ids,
      batch.prompt_mask,
      batch.completion_ids,
      sampling=sampling,
      chunk_size=chunk_size,
    )
    value, tokens = loss(
      logprobs,
      batch.advantages,
      weights,
      batch.completion_mask,
      batch.old_logprobs,
      batch.ref_logprobs,
    )
    return value, tokens | {"entropy": entropy}

  def accumulate(params, batch: Batch):
    """Loss and gradient over a minibatch, micro-batch by micro-batch."""

    def add(total, part):
      out = jax.value_and_grad(micro_loss, has_aux=True)(params, *part)
      (value, tokens), grads = out
      return jax.tree.map(jnp.add, total, (value, grads)), tokens

    parts = _split((batch, weighting(batch.completion_mask)), micro_batches)
    zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (value, grads), tokens = jax.lax.scan(add, zero, parts)
    return value, grads, _token_metrics(tokens, parts[0].completion_mask)

  def one_update(state: TrainState, batch: Batch):
    value, grads, metrics = accumulate(state.params, batch)
    state, applied = _apply(tx, state, grads, max_grad_norm)
    return state, {"loss": value} | metrics | applied

  def update(state: TrainState, batch: Batch):
    _check_batch(batch, epochs, minibatches, micro_batches)
    parts = _split(batch, minibatches)
    if epochs > 1:
      parts = jax.tree.map(
        lambda x: jnp.tile(x, (epochs,) + (1,) * (x.ndim - 1)), parts
      )
    state, metrics = jax.lax.scan(one_update, state, parts)
    reduce = {k: jnp.mean for k in metrics} | _EXTREMES | _TOTALS
    metrics = {k: reduce[k](v) for k, v in metrics.items()}
    state = state.replace(
      step=state.step + 1,
      prompts_consumed=state.prompts_consumed + batch.prompt_ids.shape[0],
    )
    return state, metrics

  return update


def _check_batch(batch: Batch, epochs, minibatches, micro_batches):
  b = batch.prompt_ids.shape[0]
  if b % (minibatches * micro_batches):
    raise ValueError(
      f"{b} prompts cannot be cut into minibatches={minibatches} times "
      f"micro_batches={micro_batches}; groups stay whole"
    )
  if epochs * minibatches > 1 and batch.old_logprobs is None:
    raise ValueError(
      "several updates a rollout need the log-probabilities of the policy that "
      "sampled: make_batch(..., on_policy=False)"
    )


def make_grpo_step(
  lm: LM,
  tx: optax.GradientTransformation,
  reward_fn: Callable[[Rollout, Any], Array],
  *,
  group_size: int,
  max_new_tokens: int,
  eos_ids: tuple[int, ...],
  pad_id: int = 0,
  advantage: Callable[[Array], Array] = leave_one_out,
  kl_in_reward: float = 0.0,
  sampling: Sampling = Sampling(),
  epochs: int = 1,
  minibatches: int = 1,
  chunk_size: int = 32,
  **update_options: Any,
) -> Callable[..., tuple[TrainState, Metrics]]:
  """A whole GRPO step as one pure function: sample, score, compare, update.

  Jit it (donating the state), scan it over prompts, vmap it over states with
  different keys, or compile it ahead of time.

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
    sampling: the distribution to sample and to score with.
    epochs: see `make_update`.
    minibatches: see `make_update`.
    chunk_size: see `token_logprobs`.
    **update_options: `loss`, `weighting`, `micro_batches` and `max_grad_norm`
      of `make_update`.

  Returns:
    `step(state, prompts, ref_params=None) -> (state, metrics)`.
  """
  update = make_update(
    lm,
    tx,
    epochs=epochs,
    minibatches=minibatches,
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
    )
    rewards = reward_fn(samples, prompts.targets)
    batch = make_batch(
      lm,
      samples,
      rewards,
      advantage,
      ref_params,
      on_policy=epochs * minibatches == 1,
      kl_in_reward=kl_in_reward,
      sampling=sampling,
      chunk_size=chunk_size,
    )
    state, metrics = update(state, batch)
    return state, rollout_metrics(samples, rewards) | metrics

  return step
