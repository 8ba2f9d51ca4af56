"""Errors of gradients with any advantage, by enumeration of all groups."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpojax.core.advantages import leave_one_out, score_weighted
from grpojax.statistics import advantage_errors as lib

P = np.array([0.5, 0.3, 0.2])
SCORES = np.array([[1.0, 0.5], [-2.0, 1.0], [0.0, 0.0]])
SCORES = SCORES - P @ SCORES
Z = np.array([0.3, 1.5, -0.5])
GRADIENT = (P * Z) @ SCORES
G = 4


def groups_of(size):
  return np.array(list(itertools.product(range(3), repeat=size)))


def expected(advantage, weights):
  """Averages the estimates over all pairs of groups of 4 of a prompt.

  The two directions are a basis, scaled to E[v v^T] = I.
  """
  groups = groups_of(G)
  chance = P[groups].prod(-1)
  a = np.einsum("kd,ngd->nkg", np.sqrt(2) * np.eye(2), SCORES[groups])

  @jax.jit
  @jax.vmap
  def estimate(a, z, w):
    return lib.advantage_errors(a, z, advantage, w)

  total = 0.0
  first = np.arange(len(groups))
  for shift in first:
    both = np.stack([first, np.roll(first, shift)], 1)  # [n, 2]
    errors = estimate(
      jnp.asarray(a[both].swapaxes(1, 2)),
      jnp.asarray(Z[groups[both]]),
      {name: jnp.asarray(w[groups[both]]) for name, w in weights.items()},
    )
    total += chance[both].prod(-1) @ np.stack(errors, -1)
  return lib.AdvantageErrors(*total)


def exact(size, weights):
  """Computes the error of weighted leave-one-out over all groups."""
  groups = groups_of(size)
  w = weights[groups]
  z = Z[groups]
  without = (w * z).sum(-1, keepdims=True) - w * z
  advantages = z - without / (w.sum(-1, keepdims=True) - w)
  result = np.einsum("ng,ngd->nd", advantages, SCORES[groups]) / size
  return P[groups].prod(-1) @ ((result - GRADIENT) ** 2).sum(-1)


@pytest.mark.parametrize(
  "advantage, weights",
  [
    (leave_one_out, {}),
    (
      functools.partial(score_weighted, power=1.0),
      {"logit_score_sq": np.array([1.0, 5.0, 2.0])},
    ),
  ],
)
def test_errors_are_exact_at_both_sizes(advantage, weights, float64):
  result = expected(advantage, weights)
  values = next(iter(weights.values()), np.ones(3))
  assert_allclose(result.mse, exact(4, values), rtol=1e-8)
  for size in (2, 4):
    error = result.c2 / size + result.c3 / (size * (size - 1))
    assert_allclose(error, exact(size, values), rtol=1e-8)


def test_metrics():
  errors = lib.AdvantageErrors(*jnp.array([8.0, 18.0, 1.0, 2.0, 3.0]))
  row = lib.metrics(errors, jnp.float32(2.0), 5)
  assert float(row["own_optimal_group_size"]) == 4.0
  assert float(row["own_gradient_mse"]) == 1.0
