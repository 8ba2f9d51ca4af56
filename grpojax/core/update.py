"""The policy update: what the optimizer does with the loss's gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from grpojax.core import entropy as entropy_lib
from grpojax.core import losses
from grpojax.core import micro_batches as parts_lib
from grpojax.core.entropy import EntropyBonus
from grpojax.core.gradients import Metrics, in_float32, make_gradient
from grpojax.core.minibatches import draw_orders, reorder_rows
from grpojax.core.rollout_correction import Correct
from grpojax.core.sampling import Sampling
from grpojax.core.types import LM, Batch, TrainState

OVER_UPDATES = {
  "mean": jnp.mean,
  "min": jnp.min,
  "max": jnp.max,
  "sum": jnp.sum,
  "first": lambda of_updates: of_updates[0],
}
"""How a metric of every optimizer update becomes one of the whole step.

Whoever makes a metric puts it below one of these names."""


def _apply(tx, state: TrainState, grads, max_grad_norm):
  """One optimizer update; skipped as a whole if a gradient is not finite.

  The gradients are float32 or better, clipped as such; the optimizer gets them
  in the parameters' own dtypes, as optax has it.
  """
  norm = optax.tree.norm(grads)
  finite = jnp.isfinite(norm)
  if max_grad_norm is not None:
    shrink = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-30))
    grads = jax.tree.map(lambda g: (g * shrink).astype(g.dtype), grads)
  grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  new = optax.apply_updates(state.params, updates), opt_state
  old = state.params, state.opt_state
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


def make_update(
  lm: LM,
  tx: optax.GradientTransformation,
  *,
  loss: Callable[..., Any] = losses.grpo_loss,
  weighting: Callable[[Array], Array] = losses.token_mean,
  correction: Correct | None = None,
  epochs: int = 1,
  minibatches: int = 1,
  micro_batches: int = 1,
  max_grad_norm: float | None = None,
  entropy_bonus: EntropyBonus | None = None,
  top_entropy_quantile: float | int = 1.0,
  router_aux_coef: float = 0.0,
  sampling: Sampling = Sampling(),
  chunk_size: int = 256,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The policy update of one rollout: epochs x minibatches optimizer updates.

  Token weights are computed over a whole minibatch before it is cut into
  micro-batches, so how the work is split changes nothing but memory.

  Args:
    lm: the model.
    tx: the optimizer.
    loss: `losses.grpo_loss`, with its settings bound by `functools.partial`;
      what it returns to be logged becomes metrics by the same names.
    weighting: mask [B, G, T] -> weights, see `core.losses`.
    correction: from `rollout_correction.make_correction`, for a sampler that is
      not the policy being trained; None corrects nothing. The loss gets what
      it makes as `is_weights`.
    epochs: passes over the rollout; each but the first draws its minibatches
      anew, from the state's key and step (see `draw_orders`).
    minibatches: optimizer updates a pass; divides B (groups stay whole).
    micro_batches: parts of a minibatch whose gradients are added up by a scan;
      they cut prompts, and groups where these are too few (see
      `micro_batches.cuts`); packed rows are cut into fewer (see
      `packing_layout.plan`).
    max_grad_norm: clips the gradient's global norm; None does not.
    entropy_bonus: see `core.entropy`; with a target the state has its control.
    top_entropy_quantile: the share of a minibatch's tokens, those of highest
      entropy under the policy before the update, that the surrogate (and a
      bonus) is of; see `entropy.highest_entropy`. They are found among all its
      tokens, on all devices; where these are cut into micro-batches, that takes
      one more forward pass. The loss takes them as `kept`.
    router_aux_coef: of the loss that balances a mixture's experts over all
      tokens of a minibatch, prompts' included (see `load_balancing`); where it
      is cut into micro-batches, that takes the same forward pass. 0 is off; the
      model must have `LM.forward_with_load` else.
    sampling: what the rollout was sampled with.
    chunk_size: see `token_logprobs`.

  Returns:
    A pure `update(state, batch) -> (state, metrics)`. Metrics are means over
    the updates (`ratio_min` and `ratio_max` extremes, `skipped_updates` a
    count): `loss`, `kl` (k3, nats a token), `entropy` (nats a token),
    `grad_norm` before clipping, `update_norm`, `entropy_coefficient` with a
    bonus, `router_aux_loss` with that (not times its coefficient), and what the
    loss monitors (`clip_fraction_low`, `_high`). Of the
    first update alone, whose policy is the one that sampled:
    `rollout_mismatch_mean` and `_max`, how far its log-probabilities are from
    the sampler's (nats a token), `rollout_kl` (k3 of KL(rollout || trainer),
    nats a token), `rollout_effective_samples` (share of the samples that are
    left when each weighs pi / pi_rollout), and what the loss would have
    logged with the sampler's as the old ones (`rollout_clip_fraction_low`,
    `_high`). The update raises ValueError where B does not divide, or where a
    batch without old log-probabilities meets several updates; `make_update`
    does so where router_aux_coef asks for what the model does not have.
  """
  gradient = make_gradient(
    lm,
    loss=loss,
    weighting=weighting,
    correction=correction,
    micro_batches=micro_batches,
    entropy_bonus=entropy_bonus,
    top_entropy_quantile=top_entropy_quantile,
    router_aux_coef=router_aux_coef,
    sampling=sampling,
    chunk_size=chunk_size,
  )

  def one_update(state: TrainState, batch: Batch):
    factor = entropy_lib.coefficient(entropy_bonus, state.entropy)
    found = gradient(state.params, batch, factor)
    value, grads, of_tokens, mean_entropy = found
    state, of_update = _apply(tx, state, grads, max_grad_norm)
    made = [{"mean": {"loss": value}}, of_tokens, of_update]
    if entropy_bonus is not None:
      made.append({"mean": {"entropy_coefficient": jnp.asarray(factor)}})
      nothing = of_update["sum"]["skipped_updates"]
      nothing |= ~jnp.any(batch.completion_mask)  # which has no entropy
      state = state.replace(
        entropy=entropy_lib.adapt(
          entropy_bonus, state.entropy, jnp.sum(mean_entropy), nothing
        )
      )
    return state, {
      kind: {k: v for part in made for k, v in part.get(kind, {}).items()}
      for kind in OVER_UPDATES
    }

  def update(state: TrainState, batch: Batch):
    _check_batch(batch, epochs, minibatches, micro_batches)

    def one_epoch(state: TrainState, order):
      rows = batch if order is None else reorder_rows(batch, order)
      rows = parts_lib.split_rows(rows, minibatches)
      return jax.lax.scan(one_update, state, rows)

    if epochs == 1:
      state, metrics = one_epoch(state, None)
    else:
      orders = None  # the only one, where a minibatch is all there is
      if minibatches > 1:
        key = jax.random.fold_in(state.key, state.step)
        prompts = batch.prompt_ids.shape[0]
        orders = draw_orders(key, prompts, minibatches, epochs)
      state, metrics = jax.lax.scan(one_epoch, state, orders, length=epochs)
      metrics = jax.tree.map(jnp.ravel, metrics)
    metrics = {
      name: OVER_UPDATES[kind](values)
      for kind, group in metrics.items()
      for name, values in group.items()
    }
    state = state.replace(
      step=state.step + 1,
      prompts_consumed=state.prompts_consumed + batch.prompt_ids.shape[0],
    )
    return state, metrics

  return update


def _check_batch(batch: Batch, epochs, minibatches, micro_batches):
  b, g = batch.completion_ids.shape[:2]
  if b % minibatches:
    raise ValueError(
      f"{b} prompts cannot be cut into minibatches={minibatches}; groups stay "
      "whole"
    )
  parts_lib.cuts(b // minibatches, g, micro_batches)
  if epochs * minibatches > 1 and batch.old_logprobs is None:
    raise ValueError(
      "several updates a rollout need the log-probabilities of the policy that "
      "sampled: make_batch(..., on_policy=False)"
    )
