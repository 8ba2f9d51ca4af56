"""The gradient of the loss over a minibatch, micro-batch by micro-batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from grpojax.core import entropy as entropy_lib
from grpojax.core import load_balancing, packed_logprobs, rollout_mismatch
from grpojax.core import micro_batches as parts_lib
from grpojax.core import packing as packing_lib
from grpojax.core.entropy import EntropyBonus
from grpojax.core.mesh import constrain, map_rows
from grpojax.core.rollout_correction import Correct
from grpojax.core.sampling import Sampling
from grpojax.core.types import LM, OF_PROMPTS, Batch

Metrics = dict[str, Array]


def _split(batch: Batch, weights: Array, parts: int) -> tuple[Batch, Array]:
  """Micro-batches of a minibatch, a leading axis: `parts`, or fewer packed."""
  sizes = batch.completion_ids.shape, batch.prompt_ids.shape[-1]
  if batch.packing is not None:
    packing_lib.check_parts(batch.packing, *sizes, parts)
    return packing_lib.split_batch(batch, weights)
  cut = parts_lib.cuts(*batch.completion_ids.shape[:2], parts)
  samples = {f: x for f, x in vars(batch).items() if f not in OF_PROMPTS}
  prompts = {field: getattr(batch, field) for field in OF_PROMPTS}
  samples, weights = parts_lib.split_samples((samples, weights), cut)
  prompts = parts_lib.split_prompts(prompts, cut)
  return Batch(**samples, **prompts), weights


def _token_metrics(aux: dict[str, Array], mask: Array) -> dict[str, Metrics]:
  """Means over real tokens, and of the ratios the extremes."""
  count = jnp.maximum(jnp.sum(mask), 1)

  def mean(values):
    return jnp.sum(jnp.where(mask, values, 0)) / count

  ratios = aux["ratio"]  # 1 on padding, taken where there is no token
  shown = mask | ~jnp.any(mask)
  return {
    "mean": {k: mean(v) for k, v in aux.items() if k != "ratio"},
    "min": {"ratio_min": jnp.min(ratios, initial=jnp.inf, where=shown)},
    "max": {"ratio_max": jnp.max(ratios, initial=0.0, where=shown)},
  }


def in_float32(tree: PyTree) -> PyTree:
  """In float32 or better."""
  return jax.tree.map(
    lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree
  )


def make_gradient(
  lm: LM,
  *,
  loss: Callable[..., Any],
  weighting: Callable[[Array], Array],
  correction: Correct | None,
  micro_batches: int,
  entropy_bonus: EntropyBonus | None,
  top_entropy_quantile: float | int,
  router_aux_coef: float,
  sampling: Sampling,
  chunk_size: int,
) -> Callable[..., Any]:
  """The loss of a minibatch and its gradient; arguments as of `make_update`.

  Returns:
    `(params, batch, factor) -> (loss, gradient, metrics, mean entropies)`. The
    factor is the entropy bonus's coefficient; the gradient is float32 or
    better; the metrics are by `update.OVER_UPDATES`; the micro-batches' shares
    of the minibatch's mean entropy are None without a bonus.

  Raises:
    ValueError: a router's loss, and a model that tells nothing of its routers.
  """
  if router_aux_coef and lm.forward_with_load is None:
    raise ValueError(
      f"router_aux_coef={router_aux_coef} balances the experts of a model, and "
      "this one has none (no LM.forward_with_load): use 0"
    )
  some = top_entropy_quantile < 1
  keep = functools.partial(
    entropy_lib.highest_entropy, share=top_entropy_quantile
  )

  def score(params, batch: Batch):
    """Log-probabilities, entropies and, for its loss, the routers' load."""
    weights = load_balancing.load_weights(batch) if router_aux_coef else None
    return packed_logprobs.completion_logprobs(
      lm,
      params,
      batch.prompt_ids,
      batch.prompt_mask,
      batch.completion_ids,
      batch.packing,
      sampling=sampling,
      chunk_size=chunk_size,
      entropy_gradient=entropy_bonus is not None,
      load_weights=weights,
    )

  def micro_loss(params, factor, batch: Batch, weights, kept, tokens, all_load):
    batch = map_rows(constrain, batch)
    weights = constrain(weights, "batch", "group")
    logprobs, entropy, *load = score(params, batch)
    mask = batch.completion_mask
    if some and kept is None:  # there is no other part
      kept = keep(jax.lax.stop_gradient(entropy), mask)
    given, of_correction = {"token_mask": kept} if some else {}, {}
    if correction is not None:
      given["is_weights"], of_correction = correction(logprobs, batch)
    value, aux = loss(
      logprobs,
      batch.advantages,
      weights,
      mask,
      batch.old_logprobs,
      batch.ref_logprobs,
      **given,
    )
    mean_entropy = None
    if entropy_bonus is not None:
      acted = kept if some else mask
      mean_entropy = entropy_lib.mean_entropy(entropy, acted, tokens)
      value -= factor * mean_entropy
    balance = None
    if router_aux_coef:
      balance = load_balancing.load_balancing_loss(*load, all_load)
      value += router_aux_coef * balance
    aux |= of_correction
    of_sampler = rollout_mismatch.of_tokens(loss, logprobs, batch, weights)
    aux = aux | {"entropy": entropy}
    return value, (aux, of_sampler, mean_entropy, balance)

  def of_all_parts(params, batch: Batch):
    """What no part of a minibatch knows: its tokens kept, how many, its load.

    Tokens of highest entropy and the load take a forward pass.
    """
    mask, kept = batch.completion_mask, None
    if len(mask) == 1 or not (some or entropy_bonus or router_aux_coef):
      return None, None, None
    if not (some or router_aux_coef):
      return None, jnp.sum(mask), None

    def of_part(part):
      _, entropy, *load = score(params, map_rows(constrain, part))
      return entropy if some else None, load  # what is not asked for is not run

    entropies, load = jax.lax.map(of_part, batch)
    load = jax.tree.map(lambda x: jnp.sum(x, axis=0), load)
    if some:
      kept = keep(entropies, mask)
    return kept, jnp.sum(kept if some else mask), *(load or [None])

  def accumulate(params, batch: Batch, factor):
    """Loss and gradient over a minibatch, micro-batch by micro-batch."""

    def add(total, part):
      out = jax.value_and_grad(micro_loss, has_aux=True)(
        params, factor, *part, tokens, load
      )
      (value, aux), grads = out
      # In float32: a bfloat16 sum forgets parts 256 times smaller than itself.
      added = jax.tree.map(jnp.add, total, (value, in_float32(grads)))
      return added, aux

    weights = weighting(batch.completion_mask)
    if batch.sample_weights is not None:
      weights = weights * batch.sample_weights[..., None]
      batch = batch.replace(sample_weights=None)  # they are in it
    parts = _split(batch, weights, micro_batches)
    kept, tokens, load = of_all_parts(params, parts[0])
    zero = jnp.zeros(()), in_float32(jax.tree.map(jnp.zeros_like, params))
    (value, grads), aux = jax.lax.scan(add, zero, (*parts, kept))
    aux, of_sampler, mean_entropy, balance = aux
    mask = parts[0].completion_mask
    first = {"first": rollout_mismatch.metrics(of_sampler, mask)}
    metrics = _token_metrics(aux, mask) | first
    if router_aux_coef:
      metrics["mean"]["router_aux_loss"] = jnp.sum(balance)
    return value, grads, metrics, mean_entropy

  return accumulate
