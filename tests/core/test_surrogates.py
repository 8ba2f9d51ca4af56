"""A surrogate of one's own: what it gets, and what becomes of what it returns.

Those that come with the project are tested with the loss, in test_losses.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import losses, surrogates
from grpojax.core.binding import bind
from grpojax.core.grpo_step import init_state
from grpojax.core.types import Batch
from grpojax.core.update import make_update

MASK = jnp.array([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]]], bool)
ADVANTAGES = jnp.array([[2.0, -1.0], [-3.0, 5.0]])


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
  loss = functools.partial(losses.grpo_loss, surrogate=log_surrogate)
  update = make_update(lm, tx, loss=loss, micro_batches=2)
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


@pytest.mark.parametrize("name", surrogates.SURROGATES)
def test_each_gets_those_settings_that_it_asks_for(name):
  logprobs, old, weights = case()
  offered = {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0, "other": 1}
  surrogate = bind(surrogates.SURROGATES[name], **offered)
  value, _ = losses.grpo_loss(
    logprobs, ADVANTAGES, weights, MASK, old, surrogate=surrogate
  )
  assert np.isfinite(value)


@pytest.mark.parametrize("name", surrogates.SURROGATES)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
  logprobs, _, weights = case()

  def loss(logprobs):
    surrogate = surrogates.SURROGATES[name]
    return losses.grpo_loss(
      logprobs, ADVANTAGES, weights, MASK, surrogate=surrogate
    )[0]

  expected = -weights * np.where(MASK, ADVANTAGES[..., None], 0)
  np.testing.assert_allclose(jax.grad(loss)(logprobs), expected, rtol=1e-6)


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
