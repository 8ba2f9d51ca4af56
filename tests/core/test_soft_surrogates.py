"""What each surrogate makes of tokens far off-policy: the table's closed forms.

That the losses are those of TRL and verl is in test_other_losses.py.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import losses, surrogates

RATIOS, SURROGATES = surrogates.RATIOS, surrogates.SURROGATES
EVERY = [
  pytest.param(s, r, marks=[pytest.mark.slow] * (r != "token_ratio"))
  for s, r in itertools.product(SURROGATES, RATIOS)
]
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


@pytest.mark.parametrize(
  "name, settings, text",
  [
    ("cispo", {"cispo_max": 0.2}, "1 <= cispo_max, not 0.0 and 0.2"),
    ("cispo", {"cispo_min": 1.2}, "cispo_min <= 1"),
    ("gmpo", {"gmpo_clip_low": -1}, "must be >= 0, not -1 and 0.4"),
    ("sapo", {"sapo_temperature_pos": 0}, "must be > 0, not 0 and 1.05"),
    ("vespo", {"vespo_lambda_neg": 0}, "vespo_lambda > 0"),
    ("vespo", {"vespo_k_pos": -1}, "vespo_k must be >= 0"),
  ],
)
def test_useless_settings_are_refused(name, settings, text):
  with pytest.raises(ValueError) as error:
    multiples(1.0, name, **settings)
  assert text in str(error.value)


@pytest.mark.parametrize("name, ratio", EVERY)
def test_on_policy_it_is_reinforce_off_policy_it_stays_finite(name, ratio):
  """With junk on padding, and tokens that a policy now excludes."""
  rng = np.random.default_rng(1)
  shape = (2, 3, 4)
  ordinary = -jnp.asarray(rng.exponential(size=shape), jnp.float32)
  mask = jnp.arange(4) < jnp.asarray(rng.integers(1, 5, (2, 3, 1)))
  advantages = jnp.asarray(rng.standard_normal(shape[:2]), jnp.float32)
  weights = losses.sequence_mean(mask)

  @jax.jit
  def outcome(new, old):
    def loss(x):
      return losses.grpo_loss(
        x,
        advantages,
        weights,
        mask,
        old,
        surrogate=SURROGATES[name],
        ratio=RATIOS[ratio],
      )

    return jax.value_and_grad(loss, has_aux=True)(new)

  expected = -weights * advantages[..., None]
  _, gradient = outcome(ordinary, ordinary)
  np.testing.assert_allclose(gradient, expected, rtol=2e-6, atol=1e-9)
  junk = jnp.where(mask, ordinary, jnp.nan)
  clean, dirty = outcome(ordinary, ordinary - 0.1), outcome(junk, junk - 0.1)
  jax.tree.map(np.testing.assert_array_equal, dirty, clean)
  for extreme in (-1e30, -3e38, -jnp.inf):
    hit = ordinary.at[:, :, 0].set(extreme)
    for new, old in itertools.product((ordinary, hit), repeat=2):
      for x in jax.tree.leaves(outcome(new, old)):
        assert np.isfinite(x).all()
