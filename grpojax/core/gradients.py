"""Gradient of the loss over a minibatch, micro-batch by micro-batch.

    minibatch [B, G, T] --split--> micro-batches [n, b, g, T] --scan--> gradient

Weights of tokens and `MinibatchTotals` are computed over the whole minibatch
before the scan, so the number of micro-batches affects only memory.
"""

import copy
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from grpojax.core import packing, rows
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import Reference, TokenLogprobs
from grpojax.core.losses import entropy, load_balancing, rollout_mismatch
from grpojax.core.losses.rollout_correction import make_correction
from grpojax.core.objective import Objective, loss_fn
from grpojax.core.packing.packed_logprobs import completion_logprobs
from grpojax.core.types import LM, Batch, Params

Metrics = dict[str, Array]


class LossTerms:
  """Functions and coefficients of an objective's loss."""

  def __init__(
    self, lm: LM, objective: Objective, sampling: Sampling, chunk_size: int
  ):
    if objective.router_aux_coef and not lm.has_experts:
      raise ValueError(
        f"router_aux_coef={objective.router_aux_coef} balances experts, and "
        "this model has none (LM.has_experts): use 0"
      )
    self.lm = lm
    self.objective = objective
    self.loss = loss_fn(objective)
    self.correction = make_correction(
      objective.correction,
      objective.correction_low,
      objective.correction_high or math.inf,
      objective.off_policy_threshold or None,
    )
    self.has_bonus = objective.has_entropy_bonus
    self.entropy_share = objective.top_entropy_quantile
    self.selects_tokens = self.entropy_share < 1  # of highest entropy
    self.router_aux_coef = objective.router_aux_coef
    self.reference: tuple[LM, Params] | None = None  # of an exact KL term
    self.scoring = {"sampling": sampling, "chunk_size": chunk_size}
    self.scoring["entropy_gradient"] = self.has_bonus

  def with_reference(
    self, lm: LM, params: Params, hidden: Float[Array, "B G T R"]
  ) -> "LossTerms":
    """Returns a copy with the reference policy of an exact KL term.

    ValueError if its head cannot read the states of the batch.
    """
    terms = copy.copy(self)
    try:
      terms.reference = ref_lm, ref_params = lm.prepared(params, longest=None)
      # Tracing the head detects parameters of another model.
      jax.eval_shape(ref_lm.unembed, ref_params, hidden)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise ValueError(
        "the reference's head does not read the batch's hidden states "
        f"({error}): use make_batch's ref_params in the update, and its ref_lm "
        "in make_update"
      ) from error
    return terms

  def logprobs(self, params: Params, batch: Batch) -> TokenLogprobs:
    """Computes log-probabilities, entropies, expert load and KL divergences."""
    tokens = batch.tokens
    if self.router_aux_coef:
      tokens = load_balancing.with_load_weights(tokens, batch.completion_mask)
    reference = None
    if self.reference is not None:
      reference = Reference(*self.reference, batch.ref_hidden)
    return completion_logprobs(
      self.lm,
      params,
      tokens,
      batch.packing,
      reference=reference,
      **self.scoring,
    )


class MinibatchTotals(NamedTuple):
  """Totals of a whole minibatch, which its micro-batches do not know."""

  token_mask: Bool[Array, "n b g T"] | None = None  # in surrogate; None: all
  token_count: Int[Array, ""] | None = None  # divisor of the mean entropy
  expert_load: PyTree | None = None  # summed over the minibatch


class MicroBatchValues(NamedTuple):
  """Metrics of a micro-batch, and terms of its loss."""

  token_metrics: Metrics  # arrays [b, g, T], logged as means over tokens
  mismatch: Metrics  # differences from the rollout's log-probabilities
  mean_entropy: Float[Array, ""] | None  # share of the minibatch's mean
  balance: Float[Array, ""] | None  # loss that balances experts


class Gradient(NamedTuple):
  """Loss of a minibatch and its gradient (`update.make_gradients`)."""

  loss: Float[Array, ""]
  grads: Params  # gradient, float32 or better
  metrics: dict[str, Metrics]  # by reduction (`update.OVER_UPDATES`)
  mean_entropy: Float[Array, "n"] | None  # each micro-batch's share
  no_tokens: Bool[Array, ""]  # the loss has no tokens


def in_float32(tree: PyTree) -> PyTree:
  """Returns the arrays in float32 or better."""
  return jax.tree.map(
    lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree
  )


def split_minibatch(batch: Batch, count: int) -> Batch:
  """Splits a minibatch into `count` micro-batches, or fewer if packed."""
  packed = batch.packing
  batch, in_rows, packed_rows = packing.split(
    batch.replace(packing=None), packed, count
  )
  mask = batch.completion_mask
  if in_rows is not None:  # packed: keep samples in these rows
    mask &= in_rows[..., None]
  return batch.replace(completion_mask=mask, packing=packed_rows)


def micro_batch_loss(
  params: Params,
  terms: LossTerms,
  batch: Batch,
  totals: MinibatchTotals,
  entropy_coefficient: Any,
) -> tuple[Float[Array, ""], MicroBatchValues]:
  """Returns the loss of a micro-batch, differentiable in `params`.

  The totals and the tokens' weights are those of the whole minibatch.
  """
  # Log-probabilities and entropies under `params`
  batch = rows.constrain(batch)
  weights = batch.weights
  scored = terms.logprobs(params, batch)
  logprobs = scored.logprobs
  entropies = scored.entropy
  mask = batch.completion_mask
  token_mask = totals.token_mask
  if terms.selects_tokens and token_mask is None:
    # This micro-batch is the whole minibatch.
    token_mask = entropy.highest_entropy(
      jax.lax.stop_gradient(entropies), mask, share=terms.entropy_share
    )
  # Surrogate and KL term
  counted = mask if token_mask is None else token_mask
  is_weights = left_out = None
  correction_aux = {}
  if terms.correction is not None:
    is_weights, left_out, correction_aux = terms.correction(logprobs, batch)
  loss, aux = terms.loss(
    logprobs,
    batch.advantages,
    weights,
    mask,
    batch.old_logprobs,
    batch.ref_logprobs,
    is_weights,
    scored.kl,
    # Off-policy sequences leave the surrogate, but not the entropy bonus.
    token_mask=token_mask if left_out is None else counted & ~left_out,
  )
  mean_entropy = balance = None
  if terms.has_bonus:
    count = totals.token_count
    mean_entropy = entropy.mean_entropy(entropies, counted, count)
    # Correction weights apply to the bonus in the loss, not to the logged mean.
    bonus = mean_entropy
    if is_weights is not None:
      bonus = entropy.mean_entropy(entropies * is_weights, counted, count)
    loss -= entropy_coefficient * bonus
  if terms.router_aux_coef:
    balance = load_balancing.load_balancing_loss(
      scored.load, totals.expert_load
    )
    loss += terms.router_aux_coef * balance
  return loss, MicroBatchValues(
    token_metrics=aux | correction_aux | {"entropy": entropies},
    mismatch=rollout_mismatch.token_mismatch(
      terms.loss, logprobs, batch, weights
    ),
    mean_entropy=mean_entropy,
    balance=balance,
  )


def minibatch_totals(
  terms: LossTerms, params: Params, batch: Batch
) -> MinibatchTotals:
  """Computes a minibatch's totals, with a forward pass over it if needed."""
  mask = batch.completion_mask
  # Selection and expert load need a forward pass; the bonus a token count.
  needs_pass = terms.selects_tokens or terms.router_aux_coef
  # A single micro-batch is the whole minibatch.
  if len(mask) == 1 or not (needs_pass or terms.has_bonus):
    return MinibatchTotals()
  if not needs_pass:
    return MinibatchTotals(token_count=jnp.sum(mask))

  def entropy_and_load(part):
    scored = terms.logprobs(params, rows.constrain(part))
    # XLA removes unused outputs.
    return scored.entropy if terms.selects_tokens else None, scored.load

  entropies, load = jax.lax.map(entropy_and_load, batch)
  load = jax.tree.map(lambda x: jnp.sum(x, axis=0), load)
  if not terms.selects_tokens:
    return MinibatchTotals(None, jnp.sum(mask), load)
  token_mask = entropy.highest_entropy(entropies, mask, terms.entropy_share)
  return MinibatchTotals(token_mask, jnp.sum(token_mask), load)


def _reduce_metrics(
  arrays: Metrics, mask: Bool[Array, "n b g T"]
) -> dict[str, Metrics]:
  """Returns means over real tokens, and the extremes of the ratios."""
  count = jnp.maximum(jnp.sum(mask), 1)

  def mean(values):
    return jnp.sum(jnp.where(mask, values, 0)) / count

  ratios = arrays["ratio"]  # 1 on padding, used if there are no tokens
  real = mask | ~jnp.any(mask)
  return {
    "mean": {k: mean(v) for k, v in arrays.items() if k != "ratio"},
    "min": {"ratio_min": jnp.min(ratios, initial=jnp.inf, where=real)},
    "max": {"ratio_max": jnp.max(ratios, initial=0.0, where=real)},
  }


def minibatch_gradient(
  params: Params,
  terms: LossTerms,
  batch: Batch,
  weights: Float[Array, "B G T"],
  micro_batches: int,
  entropy_coefficient: Any,
) -> Gradient:
  """Returns the loss of a minibatch and its gradient.

  `weights` are from `losses.WEIGHTINGS`. Packing may use fewer `micro_batches`.
  """
  if batch.weights is not None:
    weights = weights * batch.weights[..., None]
  # Split, then compute the totals that need all micro-batches.
  batches = split_minibatch(batch.replace(weights=weights), micro_batches)
  totals = minibatch_totals(terms, params, batches)

  def add_micro_batch(total, part):
    micro_batch, token_mask = part
    # The scan slices the mask; the other totals are whole.
    part_totals = totals._replace(token_mask=token_mask)
    gradient = jax.value_and_grad(micro_batch_loss, has_aux=True)
    (loss, values), grads = gradient(
      params, terms, micro_batch, part_totals, entropy_coefficient
    )
    # Sums in float32: bfloat16 would lose terms 256 times smaller than the sum.
    return jax.tree.map(jnp.add, total, (loss, in_float32(grads))), values

  zero = jnp.zeros(()), in_float32(jax.tree.map(jnp.zeros_like, params))
  (loss, grads), values = jax.lax.scan(
    add_micro_batch, zero, (batches, totals.token_mask)
  )
  # Metrics over all tokens of the minibatch, [n, b, g, T]
  mask = batches.completion_mask
  metrics = _reduce_metrics(values.token_metrics, mask)
  metrics["first"] = rollout_mismatch.metrics(values.mismatch, mask)
  if terms.router_aux_coef:
    metrics["mean"]["router_aux_loss"] = jnp.sum(values.balance)
  no_tokens = ~jnp.any(batch.completion_mask)
  return Gradient(loss, grads, metrics, values.mean_entropy, no_tokens)
