"""Policy update: optimizer steps on the gradients of a rollout's loss.

batch --draw_orders--> epochs x minibatches --gradient, optimizer--> state
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from grpojax.core.advantages import OF_SUBSETS
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.gradients import (
  Gradient,
  LossTerms,
  Metrics,
  in_float32,
  minibatch_gradient,
)
from grpojax.core.losses import entropy, rollout_correction, surrogates
from grpojax.core.objective import Objective, weighting_fn
from grpojax.core.options import frozen_options, one_or_more, option, refuse
from grpojax.core.packing import micro_batches
from grpojax.core.types import LM, Batch, Params, TrainState

OVER_UPDATES = {
  "mean": jnp.mean,
  "min": jnp.min,
  "max": jnp.max,
  "sum": jnp.sum,
  "first": lambda values: values[0],
}
"""Reductions of metrics over optimizer updates, by name."""


@frozen_options
class UpdateOptions:
  """Options of an update: its epochs, minibatches, micro-batches and limits."""

  epochs: int = option(
    1, "passes over a step's completions", within="[1, 2**31)"
  )
  minibatches: int = one_or_more(1, "optimizer updates per pass")
  micro_batches: int = one_or_more(
    1,
    "parts of a minibatch, whose gradients are summed to save memory; packing "
    "can need fewer, none of them larger",
  )
  max_grad_norm: float = option(
    math.inf,
    "largest norm, to which gradients are scaled down; a large number = off",
    within="(0, inf]",
  )
  chunk_size: int = option(
    0,
    "tokens whose logits exist at once; 0 = set by a GPU's or TPU's memory, "
    "256 on CPUs",
    within="[0, 2**31)",
  )

  @property
  def on_policy(self) -> bool:
    """True if a step has a single update, so that all ratios are 1."""
    return self.epochs * self.minibatches == 1


def off_policy_conflicts(
  objective: Objective,
  options: UpdateOptions,
  sampling: Sampling,
  ahead: int = 0,
  engine: Sequence[str] = (),
) -> dict[str, str]:
  """Reasons why a rollout of another policy would bias the gradient.

  Keys name the options of the objective to change. A rollout in int8, by an
  `engine` or, if `ahead`, with the parameters before the last update needs
  importance weights:
  a correction or, with several updates, ratios to the rollout's
  log-probabilities (not with `dro`). Advantages of subsets of a group
  (`advantages.OF_SUBSETS`) do not take weights of single samples.
  """
  # Differences between the rollout's policy and the update's
  to_rollout = objective.old_logprobs == "rollout"
  reasons = {}
  samples = []
  if sampling.formats:
    samples.append(f"in int8 ({', '.join(sampling.formats)})")
  if ahead:
    samples.append("drawn before the last update (sampling.ahead)")
  if engine:
    samples.append("of another program (sampling.engine)")
  weighs = objective.correction not in rollout_correction.UNWEIGHTED
  # Advantages by name or function; partials bind options such as k.
  subsets = (*OF_SUBSETS, *OF_SUBSETS.values())
  advantage = objective.advantage
  while isinstance(advantage, functools.partial):
    advantage = advantage.func
  if (samples or weighs) and advantage in subsets:
    correction = f"correction = {objective.correction!r}"
    sources = [f"corrected by {correction}"] * weighs + samples
    reasons["advantage"] = (
      f"compares subsets of a group, but samples {' and '.join(sources)} are "
      "weighted one by one, not by the product over a subset, which biases "
      "the gradient: use leave_one_out, or correction = 'none' without int8, "
      "sampling.ahead and sampling.engine"
    )
  # Samples of another policy need weights: of a correction, or the ratios.
  origin = " and ".join(samples) or "that are corrected"
  ratios = to_rollout and not options.on_policy
  ratios = ratios and objective.surrogate not in ("dro", surrogates.dro)
  if samples and not weighs and not ratios:
    reasons["correction"] = (
      f"samples {origin} are not the policy's own: use token_truncate or "
      "another correction, or sample without int8, sampling.ahead and "
      "sampling.engine"
    )
  # True if the KL penalty is computed from the rollout's log-probabilities.
  penalty_of_rollout = options.on_policy or to_rollout
  if (samples or weighs) and objective.kl_in_reward and penalty_of_rollout:
    reasons["kl_placement"] = (
      "the penalty uses the rollout's log-probabilities, which for samples "
      f"{origin} are not the policy's: use loss or ratio"
    )
  return reasons


def _gradients(
  terms: LossTerms, options: UpdateOptions, state: TrainState, batch: Batch
) -> Gradient:
  """Returns the gradient of a minibatch's loss at the state's parameters."""
  objective = terms.objective
  control = state.extras.get(entropy.NAME)
  coefficient = entropy.coefficient(objective, control)
  weighting = weighting_fn(objective, batch.completion_ids.shape[-1])
  weights = weighting(batch.completion_mask)
  return minibatch_gradient(
    state.params, terms, batch, weights, options.micro_batches, coefficient
  )


def _step_optimizer(tx, state: TrainState, grads, max_grad_norm: float):
  """Applies an optimizer update, or skips it if a gradient is not finite.

  Clips gradients in float32 or better, then casts them to the weights' dtypes.
  """
  norm = optax.tree.norm(grads)
  # A single nan or inf makes the norm nonfinite.
  finite = jnp.isfinite(norm)
  if max_grad_norm < math.inf:
    # The floor avoids a division by 0.
    shrink = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-30))
    grads = jax.tree.map(lambda g: (g * shrink).astype(g.dtype), grads)
  grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  new = optax.apply_updates(state.params, updates), opt_state
  old = state.params, state.opt_state
  # A skipped update keeps the parameters and the optimizer's state.
  params, opt_state = jax.tree.map(
    lambda a, b: jnp.where(finite, a, b), new, old
  )
  state = state.replace(
    params=params, opt_state=opt_state, skipped=state.skipped + ~finite
  )
  update_norm = jnp.where(finite, optax.tree.norm(in_float32(updates)), 0.0)
  return state, {
    "mean": {"grad_norm": norm, "update_norm": update_norm},
    "sum": {"skipped_updates": ~finite},
  }


def read_by_update(state: TrainState) -> TrainState:
  """Returns the part of a state that an update reads and changes."""
  extras = {k: x for k, x in state.extras.items() if k == entropy.NAME}
  return state.replace(extras=extras, pending=None)


def apply_gradients(
  tx: optax.GradientTransformation,
  objective: Objective,
  options: UpdateOptions,
  state: TrainState,
  gradient: Gradient,
) -> tuple[TrainState, dict[str, Metrics]]:
  """Applies one optimizer update, and adapts the entropy bonus if it is set to.

  Returns the state, and metrics grouped by their reduction over updates, a name
  in `OVER_UPDATES`. The state's counters of steps and prompts stay the same.
  """
  control = state.extras.get(entropy.NAME)
  coefficient = entropy.coefficient(objective, control)
  grads = gradient.grads
  state, applied = _step_optimizer(tx, state, grads, options.max_grad_norm)
  metrics = [{"mean": {"loss": gradient.loss}}, gradient.metrics, applied]
  if objective.has_entropy_bonus:
    logged = {"entropy_coefficient": jnp.asarray(coefficient)}
    metrics.append({"mean": logged})
    # Without tokens there is no entropy.
    skip = applied["sum"]["skipped_updates"] | gradient.no_tokens
    if control is not None:
      mean = jnp.sum(gradient.mean_entropy)
      control = entropy.adapt(objective, control, mean, skip)
      extras = {**state.extras, entropy.NAME: control}
      state = state.replace(extras=extras)
  return state, {
    reduction: {
      k: v for part in metrics for k, v in part.get(reduction, {}).items()
    }
    for reduction in OVER_UPDATES
  }


def make_gradients(
  lm: LM,
  objective: Objective = Objective(),
  options: UpdateOptions = UpdateOptions(),
  sampling: Sampling = Sampling(),
  ref_lm: LM | None = None,
) -> Callable[..., Gradient]:
  """Makes the gradient of a batch's loss, without the optimizer.

  Arguments, errors and metrics are those of `make_update`; the batch is one
  minibatch. Change `Gradient.grads`, say by adding another loss's gradient, and
  give it to `apply_gradients`.

  Returns a pure `gradients(state, batch, ref_params=None) -> Gradient`.
  """
  terms_for = _make_terms(lm, objective, options, sampling, ref_lm)

  def gradients(state: TrainState, batch: Batch, ref_params=None) -> Gradient:
    _check_batch(batch, dataclasses.replace(options, minibatches=1))
    return _gradients(terms_for(batch, ref_params), options, state, batch)

  return gradients


def _make_terms(
  lm: LM,
  objective: Objective,
  options: UpdateOptions,
  sampling: Sampling,
  ref_lm: LM | None,
) -> Callable[..., LossTerms]:
  """Checks the options, and makes `(batch, ref_params) -> LossTerms`."""
  conflicts = off_policy_conflicts(objective, options, sampling).items()
  refuse([f"{k} = {getattr(objective, k)!r}: {why}" for k, why in conflicts])
  plain = LossTerms(lm, objective, sampling, options.chunk_size)

  def terms_for(batch: Batch, ref_params: Params | None) -> LossTerms:
    # Without the reference there is no KL, and the loss raises an error.
    missing = ref_params is None or batch.ref_hidden is None
    if missing or not objective.has_exact_kl:
      return plain
    return plain.with_reference(ref_lm or lm, ref_params, batch.ref_hidden)

  return terms_for


def make_update(
  lm: LM,
  tx: optax.GradientTransformation,
  objective: Objective = Objective(),
  options: UpdateOptions = UpdateOptions(),
  sampling: Sampling = Sampling(),
  ref_lm: LM | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
  """Makes the policy update: epochs x minibatches optimizer updates.

  Groups stay whole in a minibatch. Each epoch except the first draws new
  minibatches from the state's key and step (`draw_orders`). Token weights, the
  selection of tokens by entropy and the balance of experts are computed over a
  whole minibatch, so micro-batches (`packing`) affect only memory; with several
  of them, selection and balance take an additional forward pass. `sampling` is
  the distribution of the rollout. An adaptive entropy bonus keeps its
  `EntropyControl` in the state's extras. For an exact KL term pass the
  `ref_params` and `ref_lm` of `make_batch`; only `LM.unembed` reads them.

  Returns a pure `update(state, batch, ref_params=None) -> (state, metrics)`.
  Metrics are means over the updates: `loss`, `kl` (k3 or the exact KL) and
  `entropy` in nats per token, `grad_norm` before clipping, `update_norm`,
  `entropy_coefficient` and `router_aux_loss` (without its coefficient) if in
  use, and the surrogate's (`clip_fraction_low`, `_high`); also the extremes
  `ratio_min` and `ratio_max`, and the count `skipped_updates`. For the first
  update, of the policy that sampled, `losses.rollout_mismatch` logs in nats per
  token `rollout_mismatch_mean` and `_max` and `rollout_kl` (k3 of KL(rollout ||
  trainer)), and the shares `rollout_effective_samples`,
  `rollout_clip_fraction_low` and `_high`.

  ValueError for `off_policy_conflicts` and for `router_aux_coef` without
  experts; when called, if minibatches do not divide B, and for several updates
  without old log-probabilities.
  """
  terms_for = _make_terms(lm, objective, options, sampling, ref_lm)

  def update(state: TrainState, batch: Batch, ref_params: Params | None = None):
    _check_batch(batch, options)
    terms = terms_for(batch, ref_params)

    def step_minibatch(state: TrainState, batch: Batch):
      gradient = _gradients(terms, options, state, batch)
      return apply_gradients(tx, objective, options, state, gradient)

    epochs = options.epochs
    minibatches = options.minibatches

    def update_epoch(state: TrainState, order):
      # [minibatches, B / minibatches, ...]: row i of each block to minibatch i.
      rows = batch
      if order is not None:
        rows = micro_batches.reorder_rows(batch, order)
      rows = micro_batches.split_rows(rows, minibatches)
      return jax.lax.scan(step_minibatch, state, rows)

    if epochs == 1:
      # The first epoch keeps the order of the rows.
      state, metrics = update_epoch(state, None)
    else:
      orders = None  # for a single minibatch
      if minibatches > 1:
        key = jax.random.fold_in(state.key, state.step)
        prompts = batch.prompt_ids.shape[0]
        orders = micro_batches.draw_orders(key, prompts, minibatches, epochs)
      state, metrics = jax.lax.scan(update_epoch, state, orders, length=epochs)
      # [epochs, minibatches] becomes one axis of updates, in their order.
      metrics = jax.tree.map(jnp.ravel, metrics)
    # A number per metric: reduce over the updates, by the metric's rule.
    metrics = {
      name: OVER_UPDATES[reduction](values)
      for reduction, group in metrics.items()
      for name, values in group.items()
    }
    state = state.replace(
      step=state.step + 1,
      prompts_consumed=state.prompts_consumed + batch.prompt_ids.shape[0],
    )
    return state, metrics

  return update


def _check_batch(batch: Batch, options: UpdateOptions) -> None:
  b, g = batch.completion_ids.shape[:2]
  if b % options.minibatches:
    raise ValueError(
      f"{b} prompts cannot be split into minibatches={options.minibatches}: "
      "use a divisor of the number of prompts, because groups stay whole"
    )
  micro_batches.cuts(b // options.minibatches, g, options.micro_batches)
  if not options.on_policy and batch.old_logprobs is None:
    raise ValueError(
      "several updates per rollout need the log-probabilities of the policy "
      "that sampled: give make_batch the same UpdateOptions"
    )
