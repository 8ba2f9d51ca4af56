"""Gram matrices, errors and moments against all pools of a small policy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats
from scipy.stats import multinomial

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.types import Prompts
from grpojax.statistics import u_statistics as u
from grpojax.studies import errors

THETA = np.array([0.3, -0.7, 1.1, 0.2])
FEATURES = np.random.default_rng(0).normal(size=(4, 3))
REWARDS = np.array([1.0, 0.0, 0.4, 2.0])

float64 = pytest.mark.usefixtures("float64")


def population(outputs):
  """Returns probabilities, scores and rewards of all completions."""
  p = np.exp(THETA[:outputs]) / np.exp(THETA[:outputs]).sum()
  features = FEATURES[:outputs]
  return p, features - p @ features, REWARDS[:outputs]


def exact(outputs):
  return u.moments(*map(jax.numpy.asarray, population(outputs)))


def expectation(outputs, run, runs, function):
  """Averages a function of (gram, rewards) over all pools of `runs` runs.

  The function ignores the order within a run, so multisets are enough.
  """
  p, s, z = population(outputs)
  choices = [
    (list(c), multinomial.pmf(np.bincount(c, minlength=outputs), run, p))
    for c in itertools.combinations_with_replacement(range(outputs), run)
  ]
  total = 0.0
  for chosen in itertools.product(choices, repeat=runs):
    index = sum((c for c, _ in chosen), [])
    weight = np.prod([w for _, w in chosen])
    total = total + weight * function(s[index] @ s[index].T, z[index])
  return total


@float64
@pytest.mark.parametrize("outputs, pool", [(4, 4), (3, 7)])
def test_moments_are_unbiased(outputs, pool):
  def estimate(gram, rewards):
    return np.array(errors.score_moments(gram, rewards))

  moments = expectation(outputs, pool, 1, estimate)
  assert_allclose(moments, exact(outputs), rtol=1e-10)


@pytest.mark.slow
@float64
@pytest.mark.parametrize(
  "outputs, group_size, groups",
  [(3, 2, 3), (2, 3, 3), pytest.param(2, 2, 6, marks=pytest.mark.long)],
)
def test_measured_errors_are_unbiased(outputs, group_size, groups):
  def measure(gram, rewards):
    block = len(rewards) // 3
    options = {"block": block, "baseline": 0.7}
    return np.concatenate(
      errors.group_errors(gram, rewards, [group_size], **options)
    )

  mean = expectation(outputs, group_size, groups, measure)
  expected = u.mse(exact(outputs), group_size)
  assert_allclose(mean, expected, rtol=1e-10)


def test_replicates_leave_one_block_out():
  numbers = np.arange(6.0)
  pool = lambda gram, rewards: u.Moments(np.diag(gram), rewards, 0, 0)
  pools = errors.without_blocks(pool, np.diag(numbers), numbers, 3)
  expected = [[2, 3, 4, 5], [0, 1, 4, 5], [0, 1, 2, 3]]
  assert pools[0].tolist() == pools[1].tolist() == expected


def test_mean_over_prompts_has_a_welch_interval():
  """Blocks and projections add variances; degrees are those of the fewer."""
  rng = np.random.default_rng(1)
  samples = rng.normal(size=(4, 9))
  projections = rng.normal(size=(4, 5))
  without = np.stack([np.delete(samples, i, 1).mean(1) for i in range(9)], -1)
  of_blocks = samples.var(1, ddof=1) / 9
  for replicates, variances, degrees in (
    ([without], of_blocks, 8),
    ([without, projections], of_blocks + 4 * projections.var(1), 4),
    ([without * [[1], [0], [0], [0]]], of_blocks * [1, 0, 0, 0], 8),
  ):
    mean = errors.mean_over_prompts(samples.mean(1), *replicates)
    assert mean["mean"] == pytest.approx(samples.mean())
    assert mean["error"] == pytest.approx(variances.sum() ** 0.5 / 4)
    joint = degrees * variances.sum() ** 2 / (variances**2).sum()
    half = stats.t.ppf(0.975, int(joint)) * mean["error"]
    ends = mean["mean"] - half, mean["mean"] + half
    assert (mean["low"], mean["high"]) == pytest.approx(ends)


PROMPTS = Prompts(np.array([[3, 7, 1, 0, 0]]), np.arange(5)[None] < 3)
SAMPLING = Sampling(temperature=1.7)
IDS = np.array(
  [
    [5, 2, 9, 1],
    [4, 1, 0, 0],
    [5, 2, 9, 1],
    [4, 1, 8, 3],  # the second completion with other padding
    [4, 1, 8, 3],  # a longer completion
    [6, 6, 6, 2],
  ]
)
MASK = np.arange(4) < np.array([4, 2, 4, 2, 4, 3])[:, None]


def scores_of(function, params, lm, prompt_ids, prompt_mask, ids, mask):
  """Computes scores [n, d] by the arguments of `function`."""

  def logprobs(params):
    values, _ = token_logprobs(
      lm,
      function(params),
      jnp.asarray(prompt_ids),
      jnp.asarray(prompt_mask),
      jnp.asarray(ids)[None],
      sampling=SAMPLING,
    )
    return jnp.sum(jnp.where(mask, values[0], 0.0), -1)

  jacobian = jax.tree.leaves(jax.jacrev(logprobs)(params))
  return jnp.concatenate([x.reshape(len(ids), -1) for x in jacobian], 1)


@pytest.mark.slow  # many gradients
def test_gram_matrix_equals_the_jacobian_product(tiny, monkeypatch):
  monkeypatch.setattr(errors, "_AT_ONCE", 3)
  monkeypatch.setattr(errors, "_COLUMNS", 700)  # several chunks, a shorter last
  prompt = PROMPTS.prompt_ids, PROMPTS.prompt_mask
  scores = jax.jit(
    lambda params: scores_of(lambda x: x, params, tiny.lm, *prompt, IDS, MASK)
  )(tiny.params)
  scores = np.asarray(scores, np.float64)
  score = errors.make_score(tiny.lm, SAMPLING)
  gram, distinct = errors.score_gram(score, tiny.params, PROMPTS, IDS, MASK)
  assert distinct == 4 and gram.dtype == np.float64
  expected = scores @ scores.T
  assert_allclose(gram, expected, rtol=1e-4, atol=1e-5 * expected.max())
  assert gram[0, 0] == gram[0, 2] and gram[1, 5] == gram[3, 5]


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.mark.long  # many gradients
def test_projected_gram_matrix_is_unbiased(tiny):
  """Directions with sum_v a_v a_v^T = V replace the expectation over signs."""
  score = errors.make_projected_score(tiny.lm, SAMPLING)
  layers = tiny.params["layers"]
  count = max(layers[name].shape[1] for name in MATRICES)
  directions = errors.random_directions(tiny.params, jax.random.key(0), count)
  for x in directions["layers"].values():
    assert {*np.unique(x["a"])} == {-1, 1} and not x["b"].any()
    basis = count**0.5 * np.eye(x["a"].shape[1], count, dtype=np.float32)
    x["a"] = jnp.broadcast_to(basis, x["a"].shape)
  assert directions["layers"].keys() == set(MATRICES)

  def gram(params, score):
    matrix, count = errors.score_gram(score, params, PROMPTS, IDS, MASK)
    assert count == 4
    return matrix

  estimates = gram(tiny.params, functools.partial(score, directions))
  assert estimates.shape == (count, 6, 6)
  # Exact scores by all parameters, minus scores by all but the matrices.
  exact = errors.make_score(tiny.lm, SAMPLING)
  without = {k: v for k, v in layers.items() if k not in MATRICES}
  without = tiny.params | {"layers": without}

  @jax.jit
  def score_without(without, *args):
    whole = lambda x: x | {"layers": layers | x["layers"]}
    return scores_of(whole, without, tiny.lm, *args)

  expected = gram(tiny.params, exact) - gram(without, score_without)
  assert_allclose(
    estimates.mean(0), expected, rtol=1e-4, atol=1e-5 * expected.max()
  )


def test_score_lengths():
  gram = np.diag([1.0, 4.0, 2.0, 3.0])
  rewards = np.array([1.0, 0, 1, 0])
  lengths = errors.score_lengths(gram, rewards)
  correlation = np.corrcoef([1, 4, 2, 3], rewards)[0, 1]
  assert lengths == pytest.approx((0.5, 0.3, correlation))
  assert errors.score_lengths(gram, np.ones(4)) == (1, 1, 0)
  assert errors.best_baseline(np.zeros((3, 3)), np.ones(3)) == 0
