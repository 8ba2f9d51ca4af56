import collections
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from grpojax.statistics.pass_at_k import majority_at_k, pass_at_k


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_mean_over_all_subsets(n):
  correct = np.array([[i < c for i in range(n)] for c in range(n + 1)])
  for k in range(1, n + 1):
    subsets = list(itertools.combinations(range(n), k))
    expected = [
      np.mean([row[list(s)].any() for s in subsets]) for row in correct
    ]
    got = jax.jit(pass_at_k, static_argnums=1)(jnp.asarray(correct), k)
    assert_allclose(got, expected, atol=1e-6)
    assert got[0] == 0 and np.all(got[n - k + 1 :] == 1)


def test_pass_at_k_of_many_samples():
  """The binomial coefficients overflow float32."""
  n = 2000
  c = 3
  k = 700
  correct = jnp.arange(n) < c
  expected = 1 - math.comb(n - c, k) / math.comb(n, k)
  assert_allclose(pass_at_k(correct, k), expected, rtol=1e-5)
  assert pass_at_k(jnp.arange(n) < 1990, n) == 1


def vote(labels, correct):
  """Returns the chance of a right plurality, with random tie breaking."""
  counts = collections.Counter(labels[labels != -1].tolist())
  winners = [x for x, n in counts.items() if n == max(counts.values())]
  right = [correct[labels == x][0] for x in winners]
  return np.mean(right) if winners else 0.0


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_majority_is_the_mean_over_all_subsets(n):
  """With several right answers, ties and silent samples."""
  rng = np.random.default_rng(n)
  for answers in range(1, 6):
    labels = rng.integers(-1, answers, (6, n))
    right = rng.random(answers + 1) < 0.4
    correct = (labels >= 0) & right[labels]
    for k in range(1, n + 1):
      subsets = [list(s) for s in itertools.combinations(range(n), k)]
      expected = [
        np.mean([vote(row[s], c[s]) for s in subsets])
        for row, c in zip(labels, correct, strict=True)
      ]
      got = majority_at_k(labels.reshape(2, 3, n), correct.reshape(2, 3, n), k)
      assert got.shape == (2, 3) and got.dtype == np.float64
      assert_allclose(got.reshape(-1), expected, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 40, 128])
def test_majority_of_two_answers_is_hypergeometric(k):
  right = 55
  n = 128
  labels = np.arange(n) >= right
  drawn = stats.hypergeom(n, right, k)
  expected = drawn.sf(k // 2)
  if k % 2 == 0:
    expected += drawn.pmf(k // 2) / 2
  got = majority_at_k(labels.astype(int), ~labels, k)
  assert_allclose(got, expected, rtol=1e-11, atol=1e-30)


def test_refusals():
  with pytest.raises(ValueError, match="1 <= k <= n"):
    pass_at_k(jnp.ones((2, 6), bool), 7)
  with pytest.raises(ValueError, match="equally correct"):
    majority_at_k(np.array([0, 0, 1]), np.array([1, 0, 0], bool), 2)
  with pytest.raises(ValueError, match="cannot be correct"):
    majority_at_k(np.array([0, 0, -1]), np.array([1, 1, 1], bool), 2)
