"""Errors of gradients with any advantages: by enumeration of all groups."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.core.advantages import leave_one_out, score_weighted
from grpojax.statistics import advantage_errors as lib

P = np.array([0.5, 0.3, 0.2])
SCORES = np.array([[1.0, 0.5], [-2.0, 1.0], [0.0, 0.0]])
SCORES = SCORES - P @ SCORES
Z = np.array([0.3, 1.5, -0.5])
WEIGHTS = np.array([1.0, 5.0, 2.0])
GRADIENT = (P * Z) @ SCORES
G = 4


def expected(advantage, weights):
  """Means of the estimates over all groups of 4, two prompts alike.

  The two directions are a basis, scaled so that E[v v^T] = I over them.
  """
  groups = np.array(list(itertools.product(range(3), repeat=G)))
  chance = P[groups].prod(-1)
  basis = np.sqrt(2) * np.eye(2)
  a = np.einsum("kd,ngd->nkg", basis, SCORES[groups])
  # Estimates are means over prompts but for the baseline of |g|^2, which is
  # the other prompt's: one of each pair of groups is enough to be averaged.
  pairs = np.random.default_rng(0).permutation(len(groups))

  @jax.jit
  @jax.vmap
  def found(a, z, w):
    given = {"logit_score_sq": w} if weights else {}
    return lib.advantage_errors(a, z, advantage, given)

  total = 0.0
  for shift in range(len(groups)):  # all pairs of groups
    second = np.roll(pairs, shift)
    both = np.stack([pairs, second], 1)  # [n, 2]
    errors = found(
      jnp.asarray(a[both].swapaxes(1, 2)),
      jnp.asarray(Z[groups[both]]),
      jnp.asarray(WEIGHTS[groups[both]]),
    )
    total += chance[both].prod(-1) @ np.stack(errors, -1)
  return lib.AdvantageErrors(*total)


def exact(size, weights):
  """The error of weighted leave-one-out over all groups."""
  groups = np.array(list(itertools.product(range(3), repeat=size)))
  w, z = weights[groups], Z[groups]
  others = (w * z).sum(-1, keepdims=True) - w * z
  advantages = z - others / (w.sum(-1, keepdims=True) - w)
  found = np.einsum("ng,ngd->nd", advantages, SCORES[groups]) / size
  return P[groups].prod(-1) @ ((found - GRADIENT) ** 2).sum(-1)


def test_leave_one_out_has_its_closed_form(float64):
  found = expected(leave_one_out, False)
  value = P @ Z
  score_sq = (SCORES**2).sum(-1)
  gradient_sq = GRADIENT @ GRADIENT
  c2 = P @ (score_sq * (Z - value) ** 2) - gradient_sq
  c3 = (P @ score_sq) * (P @ (Z - value) ** 2) + gradient_sq
  np.testing.assert_allclose([found.c2, found.c3], [c2, c3], rtol=1e-8)
  np.testing.assert_allclose(found.mse, exact(4, np.ones(3)), rtol=1e-8)


def test_weighted_errors_are_those_at_both_sizes(float64):
  power = functools.partial(score_weighted, power=1.0)
  found = expected(power, True)
  np.testing.assert_allclose(found.mse, exact(4, WEIGHTS), rtol=1e-8)
  for size in (2, 4):
    error = found.c2 / size + found.c3 / (size * (size - 1))
    np.testing.assert_allclose(error, exact(size, WEIGHTS), rtol=1e-8)


def test_metrics():
  errors = lib.AdvantageErrors(*jnp.array([8.0, 18.0, 1.0, 2.0, 3.0]))
  row = lib.metrics(errors, jnp.float32(2.0), 5)
  assert float(row["own_optimal_group_size"]) == 4.0
  assert float(row["own_gradient_mse"]) == 1.0
  assert float(row["own_c3_se"]) == 2.0
