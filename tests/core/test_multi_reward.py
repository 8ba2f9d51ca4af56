"""Rewards of several functions, normalised each in its group."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.core import advantages
from grpojax.core.advantages import multi_reward
from grpojax.rewards import functions

normalize_then_sum = jax.jit(
  multi_reward.normalize_then_sum, static_argnames="epsilon"
)
NAN = np.nan
FILE = pathlib.Path(__file__).with_name("other_losses.json")
TRL = json.loads(FILE.read_text())["trl_several_rewards"]  # by other_losses.py
WEIGHTS = jnp.array(TRL["weights"])
VALUES = jnp.array(TRL["rewards"]).T.reshape(3, 3, 4)  # there [B * G, K]
EXPECTED = {k: np.reshape(x, (3, 4)) for k, x in TRL["advantages"].items()}


def test_it_is_trls_normalize_then_sum():
  total = normalize_then_sum(VALUES, WEIGHTS, epsilon=1e-4)
  actual = advantages.batch_std(total, epsilon=1e-4)
  np.testing.assert_allclose(actual, EXPECTED["normalize_then_sum"], atol=2e-6)


def test_trls_sum_then_normalize_is_the_weighted_sum():
  """As the pool adds it up, compared by two of our advantages."""
  columns = np.asarray(VALUES, np.float64).reshape(3, -1).T
  values = [[None if np.isnan(v) else v for v in row] for row in columns]
  total = [functions.combine(row, WEIGHTS.tolist()) for row in values]
  total = jnp.array(np.array(total, np.float32).reshape(3, 4))  # None is nan
  actual = jax.jit(functools.partial(advantages.grpo, epsilon=1e-4))(total)
  np.testing.assert_allclose(actual, EXPECTED["grpo"], atol=2e-6)
  actual = jax.jit(advantages.dr_grpo)(total)
  np.testing.assert_allclose(actual, EXPECTED["dr_grpo"], atol=2e-5)


def test_who_has_nothing_to_say_takes_no_side():
  values = jnp.array([[[1.0, NAN, 0, NAN]], [[5.0, 5, 5, NAN]]])
  actual = normalize_then_sum(values, jnp.array([1.0, 3.0]))
  half = 0.5**0.5
  np.testing.assert_allclose(actual, [[half, 0, -half, NAN]], rtol=1e-5)
  # Every group sums to 0, so that nothing is left to centre.
  sums = np.nansum(normalize_then_sum(VALUES, WEIGHTS), -1)
  np.testing.assert_allclose(sums, 0, atol=1e-6)
