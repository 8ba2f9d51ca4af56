"""Weightings, ratios, KL terms and surrogates: gradients, and hostile numbers.

test_other_losses.py has parity with TRL and verl.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpojax.core import losses
from grpojax.core.decoding.sampling import Sampling, transform_logits
from grpojax.core.logprobs import _kl_divergence
from grpojax.core.losses import surrogates
from grpojax.core.losses.kl import k1, k2, k3
from grpojax.core.objective import Objective
from grpojax.core.step import init_state
from grpojax.core.types import Batch
from grpojax.core.update import UpdateOptions, make_update

WEIGHTINGS = losses.WEIGHTINGS | {
  "fixed_length": lambda mask: losses.fixed_length(mask, 8)
}
RATIOS = surrogates.RATIOS
SURROGATES = surrogates.SURROGATES
MASK = jnp.array(
  [[[1, 1, 1, 0], [1, 0, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 0]]], bool
)
ADVANTAGES = jnp.array([[2.0, -1.0], [-3.0, 5.0]])
KL = [(k1, True), (k2, False), (k3, False), (k3, True)]


def random_case(seed, shape=(3, 4, 5)):
  """Log-probabilities of three policies, advantages and a ragged mask."""
  keys = jax.random.split(jax.random.key(seed), 5)
  logprobs, old, ref = (
    jnp.log(jax.random.uniform(k, shape, minval=0.05)) for k in keys[:3]
  )
  rewards = jax.random.normal(keys[3], shape[:-1])
  lengths = jax.random.randint(keys[4], (*shape[:-1], 1), 1, shape[-1] + 1)
  mask = jnp.arange(shape[-1]) < lengths
  return logprobs, old, ref, rewards, mask


@pytest.mark.slow
def test_padding_has_no_weight():
  """Padding of tokens, samples and prompts; test_other_losses has values."""
  padded = jnp.pad(MASK, ((0, 2), (0, 1), (0, 3)))
  for weighting in WEIGHTINGS.values():
    weights = weighting(MASK)
    assert weights.shape == MASK.shape and weights.dtype == jnp.float32
    assert ((weights > 0) == MASK).all()
    assert_array_equal(weighting(padded)[:2, :2, :4], weights)
    assert (weighting(jnp.zeros((2, 3, 4), bool)) == 0).all()


@pytest.mark.parametrize(
  "with_old", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_on_policy_gradient_is_reinforce(with_old):
  """For all surrogates and ratios; also with bounds of 0."""
  logprobs, _, _, rewards, mask = random_case(2)
  weights = losses.sequence_mean(mask)
  expected = -weights * jnp.where(mask, rewards[..., None], 0)

  cases = [{"surrogate": s} for s in SURROGATES.values()]
  cases.append({"clip_low": 0.0, "clip_high": 0.0})

  @jax.jit
  def all_gradients(logprobs):
    def loss(x, settings):
      old = logprobs if with_old else None
      return losses.grpo_loss(x, rewards, weights, mask, old, **settings)

    return [
      jax.grad(loss, has_aux=True)(logprobs, {"ratio": ratio} | case)
      for ratio in RATIOS.values()
      for case in cases
    ]

  for gradient, aux in all_gradients(logprobs):
    assert_allclose(gradient, expected, rtol=2e-6, atol=1e-9)
    assert (aux["ratio"] == 1).all() and (aux["kl"] == 0).all()
    assert not any(np.any(x) for k, x in aux.items() if k.startswith("clip"))


def test_only_logprobs_are_differentiated():
  logprobs, old, ref, rewards, mask = random_case(3)
  weights = losses.token_mean(mask)

  def loss(rewards, *others):
    args = logprobs, rewards, weights, mask, *others
    return losses.grpo_loss(*args, beta=0.5)[0]

  for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(rewards, old, ref):
    assert (gradient == 0).all()


HOSTILE = [
  # Every ratio, surrogate and KL term.
  ("token_ratio", "clipped", KL[0], True),
  *[("token_ratio", "clipped", kl, False) for kl in KL],
  ("sequence_ratio", "clipped", KL[3], False),
  ("trajectory_ratio", "clipped", KL[3], False),
  *[("token_ratio", s, KL[2], False) for s in SURROGATES if s != "clipped"],
]


@pytest.mark.slow
@pytest.mark.parametrize("ratio, surrogate, kl, on_policy", HOSTILE)
def test_hostile_numbers(ratio, surrogate, kl, on_policy):
  """Junk on padding, and tokens that a policy excludes."""
  logprobs, old, ref, rewards, mask = random_case(8)
  mask = mask.at[2, 1].set(False)
  weights = losses.sequence_mean(mask)

  functions = {"ratio": RATIOS[ratio], "surrogate": SURROGATES[surrogate]}
  functions |= {"kl": kl[0], "kl_correction": kl[1]}

  def loss(logprobs, old, ref, rewards):
    args = logprobs, rewards, weights, mask, None if on_policy else old, ref
    return losses.grpo_loss(*args, beta=0.1, **functions)

  outcome = jax.jit(jax.value_and_grad(loss, has_aux=True))
  clean = outcome(logprobs, old, ref, rewards)
  assert (clean[1][~mask] == 0).all()
  dirty_rewards = rewards.at[2, 1].set(jnp.nan)
  arrays = logprobs, old, ref
  for junk in itertools.permutations([jnp.nan, -jnp.inf, jnp.inf]):
    dirty = [jnp.where(mask, x, j) for x, j in zip(arrays, junk, strict=True)]
    dirty = outcome(*dirty, dirty_rewards)
    jax.tree.map(assert_array_equal, dirty, clean)
  # A token that some policies exclude.
  for extreme in (-1e30, -3e38, -jnp.inf):
    hit = logprobs.at[:, :, 0].set(extreme)
    for policies in itertools.product((logprobs, hit), repeat=3):
      for x in jax.tree.leaves(outcome(*policies, rewards)):
        assert np.isfinite(x).all()


# KL estimators, by enumeration of a few tokens. A token's probability is its
# weight in the loss, so gradients are expectations.

POLICY = np.array([0.3, -0.7, 1.1, 0.2])
REFERENCE = np.array([-0.4, 0.5, 0.9, -0.1])
OLD = np.array([0.6, -0.2, 0.5, 0.4])


def kl_divergence(a, b):
  """KL(a || b) of two softmax distributions, in closed form."""
  a = jax.nn.log_softmax(a)
  b = jax.nn.log_softmax(b)
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
  policy = jnp.asarray(POLICY)
  reference = jnp.asarray(REFERENCE)
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
  assert_allclose(actual, expected[gradient], atol=1e-12)


def test_expected_values(float64):
  policy = jax.nn.log_softmax(jnp.asarray(POLICY))
  reference = jax.nn.log_softmax(jnp.asarray(REFERENCE))
  divergence = kl_divergence(policy, reference)
  for kl in (k1, k3):
    value = jnp.exp(policy) @ kl(policy, reference)
    assert_allclose(value, divergence, atol=1e-14)
  biased = jnp.exp(policy) @ k2(policy, reference)
  assert abs(biased - divergence) > 1e-3
  near = jax.nn.log_softmax(jnp.asarray(POLICY + 0.01 * OLD))
  actual = jnp.exp(policy) @ k2(policy, near)
  assert_allclose(actual, kl_divergence(policy, near), rtol=0.01)
  assert (k3(policy, reference) >= 0).all()


@pytest.mark.slow
def test_kl_under_a_cut_has_the_documented_value_and_gradient(float64):
  sampling = Sampling(temperature=0.8, top_k=2)

  def cut(logits):  # in float64: the same cut, at the same temperature
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
  assert_allclose(actual, [5.0017e-7, 4.9983e-7], rtol=1e-3)


def test_exact_kl_equals_torch(float64):
  """With ids excluded by the policy, and additional ids of the reference."""
  torch = pytest.importorskip("torch")
  rng = np.random.default_rng(0)
  logits = 3 * rng.normal(size=(4, 7))
  reference = 3 * rng.normal(size=(4, 9))
  logits[1, 2:] = -1e30
  weights = rng.normal(size=4)

  inputs = torch.tensor(logits, requires_grad=True)
  log_p = torch.log_softmax(inputs, -1)
  log_q = torch.log_softmax(torch.tensor(reference), -1)[:, :7]
  options = {"reduction": "none", "log_target": True}
  expected = torch.nn.functional.kl_div(log_q, log_p, **options).sum(-1)
  (expected * torch.tensor(weights)).sum().backward()
  actual, pull = jax.vjp(lambda x: _kl_divergence(x, reference), logits)
  assert_allclose(actual, expected.detach(), rtol=1e-12)
  assert_allclose(pull(weights)[0], inputs.grad, atol=1e-12)
  assert inputs.grad.abs().max() > 0.1
  same, pull = jax.vjp(lambda x: _kl_divergence(x, logits), logits)
  assert_allclose(same, 0, atol=1e-14)
  assert_allclose(pull(weights)[0], 0, atol=1e-14)


@pytest.mark.parametrize("kl", [k2, k3])
def test_tokens_excluded_by_the_reference_are_pulled_back(kl):
  gradient = jax.grad(lambda x: kl(x, jnp.array([-60.0])).sum())(jnp.zeros(1))
  assert gradient[0] >= 1


def test_kl_penalty_ignores_padding():
  logprobs = jnp.array([[[-1.0, -2.0, jnp.nan], [-jnp.inf, jnp.nan, 0.0]]])
  reference = jnp.array([[[-1.5, -1.0, 3.0], [jnp.nan, 0.0, -jnp.inf]]])
  mask = jnp.array([[[True, True, False], [False, False, False]]])
  actual = losses.kl_penalty(logprobs, reference, mask)
  assert_allclose(actual, [[-0.5, 0.0]], atol=1e-6)


# User-defined surrogates.


def log_surrogate(ratios, logprobs, advantages, *, scale=1.0):
  """REINFORCE, which needs no ratio, with logged arrays."""
  assert ratios.shape == logprobs.shape == advantages.shape
  aux = {"small_ratio": ratios < 1, "surprise": -logprobs}
  return -scale * logprobs * advantages, aux


def test_aux_arrays_are_logged_as_means_over_tokens(tabular):
  lm = tabular.lm(2, 5)
  table = lm.init(jax.random.key(1))
  tx = optax.sgd(0.1)
  ids = jnp.asarray(np.random.default_rng(1).integers(0, 5, MASK.shape))
  batch = Batch(
    prompt_ids=jnp.array([[0], [1]]),
    prompt_mask=jnp.ones((2, 1), bool),
    completion_ids=ids,
    completion_mask=MASK,
    advantages=ADVANTAGES,
    old_logprobs=jnp.full(MASK.shape, -2.2),
  )
  objective = Objective(surrogate=log_surrogate)
  update = make_update(lm, tx, objective, UpdateOptions(micro_batches=2))
  _, metrics = jax.jit(update)(init_state(table, tx, jax.random.key(0)), batch)
  rows = tabular.rows([0, 1], ids)
  logprobs = tabular.log_table(table)[*rows, np.asarray(ids)]
  mask = np.asarray(MASK)
  surprise = -logprobs[mask].mean()
  loss = -(logprobs * np.asarray(ADVANTAGES)[..., None])[mask].mean()
  assert_allclose(metrics["loss"], loss, rtol=1e-5)
  assert_allclose(metrics["surprise"], surprise, rtol=1e-5)
  small = (logprobs < -2.2)[mask].mean()
  assert 0 < small < 1
  assert_allclose(metrics["small_ratio"], small, rtol=1e-6)
  assert "clip_fraction_low" not in metrics


@pytest.mark.parametrize(
  "returned, text",
  [
    (lambda x: (x.sum(), {}), "a number per token: got a loss ()"),
    (lambda x: (x[..., :1], {}), "got a loss (2, 2, 1)"),
    (lambda x: (x, {"mean": x.mean()}), "logged arrays {'mean': ()}"),
    (lambda x: (x, {"kl": x, "mine": x}), "must not log ['kl']"),
  ],
)
def test_arrays_of_a_wrong_shape_or_name_are_refused(returned, text):
  surrogate = lambda ratios, logprobs, advantages: returned(ratios)
  ones = jnp.ones(MASK.shape)
  args = ones, ADVANTAGES, ones, MASK, ones
  with pytest.raises(ValueError, match=re.escape(text)):
    losses.grpo_loss(*args, surrogate=surrogate)


# Far off-policy.

LOGS = np.array([-3.0, -0.3, 0.0, 0.1, 2.0])


def multiples(advantage, name, ratio="token_ratio", **settings):
  """Multiples of -A grad log pi at each token, and logged arrays."""
  old = jnp.full((1, 1, 5), -5.0)
  ones = jnp.ones((1, 1, 5))
  args = jnp.full((1, 1), advantage), ones, ones.astype(bool), old
  settings |= {"surrogate": SURROGATES[name], "ratio": RATIOS[ratio]}

  def loss(x):
    return losses.grpo_loss(x, *args, **settings)

  new = old + jnp.asarray(LOGS, jnp.float32)
  gradient, aux = jax.jit(jax.grad(loss, has_aux=True))(new)
  aux = {k: np.asarray(v[0, 0]) for k, v in aux.items()}
  return np.asarray(gradient[0, 0]) / -advantage, aux


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("name", [x for x in SURROGATES if x != "dro"])
def test_logged_arrays_describe_the_gradient(name, advantage):
  bounds = dict.fromkeys(("dppo_low", "dppo_high"), 2e-4)
  own = {"cispo": {"cispo_min": 0.1}, "dppo_tv": bounds, "dppo_kl": bounds}
  settings = own.get(name, {})
  result, aux = multiples(advantage, name, **settings)
  if "gradient_weight" in aux:
    assert_allclose(result, aux["gradient_weight"], rtol=1e-4)
    return
  sides = aux["clip_fraction_low"], aux["clip_fraction_high"]
  assert any(side.any() for side in sides)
  if name == "cispo":
    assert_allclose(result, np.exp(LOGS).clip(0.1, 5), rtol=1e-5)
    assert_array_equal(sides, [LOGS < -2.5, LOGS > 1.7])
  else:
    assert_array_equal(result == 0, sides[advantage > 0])
    assert not sides[advantage < 0].any()


def test_dro_pulls_to_the_old_policy():
  """By beta log r over the advantage; finite far off."""
  result, aux = multiples(-2.0, "dro", dro_beta=1.0)
  assert_allclose(result, 1 + LOGS / 2, rtol=1e-5)
  assert not {"clip_fraction_low", "gradient_weight"} & aux.keys()
  far = jnp.full((1, 1, 1), -100.0)

  def loss(x):
    ratios = jnp.exp(x)  # underflows
    return jnp.sum(SURROGATES["dro"](ratios, x, 0 * x, dro_beta=1.0)[0])

  assert np.isfinite(jax.grad(loss)(far)).all()


def test_trajectory_ratio_gradients_are_per_token():
  result, aux = multiples(-2.0, "clipped", "trajectory_ratio", clip_low=1.0)
  whole = np.full(5, np.exp(LOGS.sum()))
  assert_allclose(aux["ratio"], whole, rtol=1e-5)
  assert_allclose(result, whole, rtol=1e-5)
