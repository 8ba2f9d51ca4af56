"""Surrogates: the table's closed forms far off-policy, and one of one's own.

That they are TRL's and verl's is in test_other_losses.py; hostile numbers and
the gradient on-policy are in test_losses.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import losses
from grpojax.core.losses import surrogates
from grpojax.core.objective import Objective
from grpojax.core.step import init_state
from grpojax.core.types import Batch
from grpojax.core.update import UpdateOptions, make_update

RATIOS, SURROGATES = surrogates.RATIOS, surrogates.SURROGATES
MASK = jnp.array([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]]], bool)
ADVANTAGES = jnp.array([[2.0, -1.0], [-3.0, 5.0]])


# Of one's own.


def log_surrogate(ratios, logprobs, advantages, *, scale=1.0):
  """REINFORCE, which needs no ratio, and something to look at."""
  assert ratios.shape == logprobs.shape == advantages.shape
  aux = {"small_ratio": ratios < 1, "surprise": -logprobs}
  return -scale * logprobs * advantages, aux


def case():
  rng = np.random.default_rng(0)
  logprobs, old = -rng.exponential(size=(2, *MASK.shape)).astype(np.float32)
  weights = losses.token_mean(MASK)
  return jnp.asarray(logprobs), jnp.asarray(old), weights


def test_it_is_the_loss_of_each_token():
  logprobs, old, weights = case()
  logprobs = jnp.where(MASK, logprobs, jnp.nan)  # as padding may be

  def loss(logprobs):
    return losses.grpo_loss(
      logprobs, ADVANTAGES, weights, MASK, old, surrogate=log_surrogate, scale=2
    )

  f = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (value, aux), gradient = f(logprobs)
  signed = np.where(MASK, ADVANTAGES[..., None], 0) / np.sum(MASK)
  expected = -2 * np.sum(np.where(MASK, logprobs, 0) * signed)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  np.testing.assert_allclose(gradient, -2 * signed, rtol=1e-6)
  assert aux.keys() == {"ratio", "kl", "small_ratio", "surprise"}


def test_what_it_monitors_is_logged_as_a_mean_over_tokens(tabular):
  lm = tabular.lm(2, 5)
  table, tx = lm.init(jax.random.key(1)), optax.sgd(0.1)
  ids = jnp.asarray(np.random.default_rng(1).integers(0, 5, MASK.shape))
  batch = Batch(
    prompt_ids=jnp.array([[0], [1]]),
    prompt_mask=jnp.ones((2, 1), bool),
    completion_ids=ids,
    completion_mask=MASK,
    advantages=ADVANTAGES,
    old_logprobs=jnp.full(MASK.shape, -1.0),
  )
  objective = Objective(surrogate=log_surrogate)
  update = make_update(lm, tx, objective, UpdateOptions(micro_batches=2))
  _, metrics = jax.jit(update)(init_state(table, tx, jax.random.key(0)), batch)
  rows = tabular.rows([0, 1], ids)
  logprobs = tabular.log_table(table)[*rows, np.asarray(ids)]
  mask = np.asarray(MASK)
  np.testing.assert_allclose(
    metrics["surprise"], -logprobs[mask].mean(), rtol=1e-5
  )
  small = (logprobs < -1)[mask].mean()
  assert 0 < small < 1
  np.testing.assert_allclose(metrics["small_ratio"], small, rtol=1e-6)
  assert "clip_fraction_low" not in metrics


@pytest.mark.parametrize(
  "returned, text",
  [
    (lambda x: (x.sum(), {}), "one number a token: got the loss ()"),
    (lambda x: (x[..., :1], {}), "got the loss (2, 2, 1)"),
    (lambda x: (x, {"mean": x.mean()}), "to be logged {'mean': ()}"),
    (lambda x: (x, {"kl": x, "mine": x}), "must not log ['kl']"),
  ],
)
def test_what_would_broadcast_is_refused(returned, text):
  logprobs, old, weights = case()
  with pytest.raises(ValueError) as error:
    losses.grpo_loss(
      logprobs,
      ADVANTAGES,
      weights,
      MASK,
      old,
      surrogate=lambda ratios, logprobs, advantages: returned(ratios),
    )
  assert text in str(error.value)


# Far off-policy.

LOGS = np.array([-3.0, -0.3, 0.0, 0.1, 2.0])


def multiples(advantage, name, ratio="token_ratio", logs=LOGS, **settings):
  """Of -A grad log pi, at each token of one completion; what is logged."""
  old, ones = jnp.full((1, 1, len(logs)), -5.0), jnp.ones((1, 1, len(logs)))

  def loss(x):
    return losses.grpo_loss(
      x,
      jnp.full((1, 1), advantage),
      ones,
      ones.astype(bool),
      old,
      surrogate=SURROGATES[name],
      ratio=RATIOS[ratio],
      **settings,
    )

  new = old + jnp.asarray(logs, jnp.float32)
  gradient, aux = jax.grad(loss, has_aux=True)(new)
  aux = {k: np.asarray(v[0, 0]) for k, v in aux.items()}
  return np.asarray(gradient[0, 0]) / -advantage, aux


def test_cispo_bounds_the_weights_and_cuts_nobody_off():
  for advantage in (2.0, -2.0):
    found, aux = multiples(advantage, "cispo", cispo_min=0.1, cispo_max=3)
    np.testing.assert_allclose(found, np.exp(LOGS).clip(0.1, 3), rtol=1e-5)
    np.testing.assert_array_equal(aux["clip_fraction_low"], LOGS < -2.5)
    np.testing.assert_array_equal(aux["clip_fraction_high"], LOGS > 1.5)


@pytest.mark.parametrize("advantage, tau", [(2.0, 0.7), (-2.0, 1.5)])
def test_sapo_fades_on_both_sides(advantage, tau):
  temperatures = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.5}
  found, aux = multiples(advantage, "sapo", **temperatures)
  r = np.exp(LOGS)
  expected = r / np.cosh(tau * (r - 1) / 2) ** 2
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=3e-6)
  np.testing.assert_allclose(
    aux["gradient_weight"], expected, rtol=1e-5, atol=3e-6
  )


@pytest.mark.parametrize("advantage, k, rate", [(2.0, 2, 3), (-2.0, 1, 0.5)])
def test_vespo_weighs_whole_completions(advantage, k, rate):
  settings = {"vespo_k_pos": 2, "vespo_lambda_pos": 3}
  settings |= {"vespo_k_neg": 1, "vespo_lambda_neg": 0.5}
  found, aux = multiples(advantage, "vespo", "trajectory_ratio", **settings)
  w = np.exp(LOGS.sum())
  expected = np.full(5, w**k * np.exp(rate * (1 - w)))
  np.testing.assert_allclose(found, expected, rtol=1e-4)
  np.testing.assert_allclose(aux["gradient_weight"], expected, rtol=1e-4)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_gmpo_clips_tokens_and_takes_their_geometric_mean(advantage):
  settings = {"gmpo_clip_low": 0.4, "gmpo_clip_high": 0.3}
  found, aux = multiples(advantage, "gmpo", **settings)
  cut = LOGS > 0.3 if advantage > 0 else LOGS < -0.4
  bound = 0.3 if advantage > 0 else -0.4
  mean = np.exp(np.where(cut, bound, LOGS).mean())
  np.testing.assert_allclose(found, np.where(cut, 0, mean), rtol=1e-5)
  side = "high" if advantage > 0 else "low"
  np.testing.assert_array_equal(aux[f"clip_fraction_{side}"], cut)


def test_the_trajectory_ratio_has_each_tokens_own_gradient():
  found, aux = multiples(
    -2.0, "clipped", "trajectory_ratio", logs=LOGS + 0.5, clip_low=0.9
  )
  w = np.exp((LOGS + 0.5).sum())
  np.testing.assert_allclose(aux["ratio"], np.full(5, w), rtol=1e-5)
  np.testing.assert_allclose(found, np.full(5, w), rtol=1e-5)
