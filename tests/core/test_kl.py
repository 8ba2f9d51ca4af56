"""Values and gradients of the KL estimators, by enumeration of a few tokens.

A token's probability is its weight in the loss, so gradients are expectations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import losses
from grpojax.core.decoding.sampling import Sampling, transform_logits
from grpojax.core.logprobs import _kl_divergence
from grpojax.core.losses.kl import k1, k2, k3

POLICY = np.array([0.3, -0.7, 1.1, 0.2])
REFERENCE = np.array([-0.4, 0.5, 0.9, -0.1])
OLD = np.array([0.6, -0.2, 0.5, 0.4])


def kl_divergence(a, b):
  """KL(a || b) of two softmax distributions, in closed form."""
  a, b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
  return jnp.sum(jnp.exp(a) * (a - b))


def kl_term(logprobs, old, reference, kl, correction, on_policy=False):
  """The loss's KL term, expected over a token of the old policy."""
  arrays = (x[:, None, None] for x in (logprobs, old, reference))
  logprobs, old, reference = arrays
  options = {"kl": kl, "beta": 1.0, "kl_correction": correction}
  args = logprobs, jnp.zeros((4, 1)), jnp.exp(old), jnp.ones((4, 1, 1), bool)
  old = None if on_policy else old
  return losses.grpo_loss(*args, old, reference, **options)


@pytest.mark.parametrize(
  ("kl", "correction", "on_policy", "gradient"),
  [
    (k1, False, True, "zero"),
    (k2, False, True, "reverse"),
    (k3, False, True, "forward"),
    (k1, True, True, "reverse"),
    (k3, True, True, "reverse"),
    (k1, True, False, "reverse"),
    (k3, True, False, "reverse"),
  ],
)
def test_gradients_in_the_loss(kl, correction, on_policy, gradient, float64):
  policy, reference = jnp.asarray(POLICY), jnp.asarray(REFERENCE)
  old = jax.nn.log_softmax(policy if on_policy else jnp.asarray(OLD))

  def expected_term(logits):
    logprobs = jax.nn.log_softmax(logits), old, jax.nn.log_softmax(reference)
    return kl_term(*logprobs, kl, correction, on_policy)[0]

  actual = jax.jit(jax.grad(expected_term))(policy)
  expected = {
    "zero": jnp.zeros(4),
    "forward": jax.grad(kl_divergence, 1)(reference, policy),
    "reverse": jax.grad(kl_divergence, 0)(policy, reference),
  }
  np.testing.assert_allclose(actual, expected[gradient], atol=1e-12)


def test_expected_values(float64):
  policy = jax.nn.log_softmax(jnp.asarray(POLICY))
  reference = jax.nn.log_softmax(jnp.asarray(REFERENCE))
  divergence = kl_divergence(policy, reference)
  for kl in (k1, k3):
    value = jnp.exp(policy) @ kl(policy, reference)
    np.testing.assert_allclose(value, divergence, atol=1e-14)
  biased = jnp.exp(policy) @ k2(policy, reference)
  assert abs(biased - divergence) > 1e-3
  near = jax.nn.log_softmax(jnp.asarray(POLICY + 0.01 * OLD))
  actual = jnp.exp(policy) @ k2(policy, near)
  np.testing.assert_allclose(actual, kl_divergence(policy, near), rtol=0.01)
  assert (k3(policy, reference) >= 0).all()


@pytest.mark.slow
def test_values_and_gradients_under_top_k(float64):
  sampling = Sampling(temperature=0.8, top_k=2)

  def cut(logits):  # in float64
    inside = transform_logits(logits, sampling) > -1e29
    return jax.nn.log_softmax(jnp.where(inside, logits / 0.8, -1e30)), inside

  policy = jnp.asarray(POLICY)
  reference = jax.nn.log_softmax(jnp.asarray(REFERENCE) / 0.8)
  frozen, inside = cut(policy)
  assert (inside != cut(jnp.asarray(REFERENCE))[1]).any()
  mass = jnp.sum(jnp.exp(reference) * inside)

  def divergence(logits):
    logprobs = cut(logits)[0]
    return jnp.exp(logprobs) @ (logprobs - reference)

  def forward(logits):  # KL(reference given S || policy)
    given_s = reference - jnp.log(mass)
    terms = jnp.exp(given_s) * (given_s - cut(logits)[0])
    return jnp.sum(jnp.where(inside, terms, 0))

  def expected(logits, kl, correction):
    loss, aux = kl_term(cut(logits)[0], frozen, reference, kl, correction)
    return loss, jnp.exp(frozen) @ aux["kl"][:, 0, 0]

  truth, gradient = jax.value_and_grad(divergence)(policy)
  assert truth > -jnp.log(mass) and mass < 0.9
  biased = truth - (1 - mass)
  close = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12)
  for kl, correction, value, slope in (
    (k1, True, truth, gradient),
    (k3, True, biased, gradient),
    (k2, False, None, gradient),
    (k3, False, biased, mass * jax.grad(forward)(policy)),
  ):
    out = jax.value_and_grad(expected, has_aux=True)(policy, kl, correction)
    close(out[1], slope)
    close(out[0][1], biased)
    if value is not None:
      close(out[0][0], value)


def test_k3_is_accurate_near_the_reference():
  actual = k3(jnp.zeros(2), jnp.array([1e-3, -1e-3]))
  np.testing.assert_allclose(actual, [5.0017e-7, 4.9983e-7], rtol=1e-3)


def test_exact_kl_equals_torch(float64):
  """With ids excluded by the policy, and additional ids of the reference."""
  torch = pytest.importorskip("torch")
  rng = np.random.default_rng(0)
  logits, reference = 3 * rng.normal(size=(4, 7)), 3 * rng.normal(size=(4, 9))
  logits[1, 2:] = -1e30
  weights = rng.normal(size=4)

  inputs = torch.tensor(logits, requires_grad=True)
  log_p = torch.log_softmax(inputs, -1)
  log_q = torch.log_softmax(torch.tensor(reference), -1)[:, :7]
  options = {"reduction": "none", "log_target": True}
  expected = torch.nn.functional.kl_div(log_q, log_p, **options).sum(-1)
  (expected * torch.tensor(weights)).sum().backward()
  actual, pull = jax.vjp(lambda x: _kl_divergence(x, reference), logits)
  np.testing.assert_allclose(actual, expected.detach(), rtol=1e-12)
  np.testing.assert_allclose(pull(weights)[0], inputs.grad, atol=1e-12)
  assert inputs.grad.abs().max() > 0.1
  same, pull = jax.vjp(lambda x: _kl_divergence(x, logits), logits)
  np.testing.assert_allclose(same, 0, atol=1e-14)
  np.testing.assert_allclose(pull(weights)[0], 0, atol=1e-14)


@pytest.mark.parametrize("kl", [k2, k3])
def test_tokens_excluded_by_the_reference_are_pulled_back(kl):
  gradient = jax.grad(lambda x: kl(x, jnp.array([-60.0])).sum())(jnp.zeros(1))
  assert gradient[0] >= 1


def test_kl_penalty_ignores_padding():
  logprobs = jnp.array([[[-1.0, -2.0, jnp.nan], [-jnp.inf, jnp.nan, 0.0]]])
  reference = jnp.array([[[-1.5, -1.0, 3.0], [jnp.nan, 0.0, -jnp.inf]]])
  mask = jnp.array([[[True, True, False], [False, False, False]]])
  actual = losses.kl_penalty(logprobs, reference, mask)
  np.testing.assert_allclose(actual, [[-0.5, 0.0]], atol=1e-6)
