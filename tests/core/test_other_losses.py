"""Losses and gradients equal those of TRL's and verl's own code.

other_losses.py writes their numbers to other_losses.json.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core import advantages as advantages_lib
from grpojax.core import losses
from grpojax.core.advantages import multi_reward
from grpojax.core.binding import bind
from grpojax.core.losses import entropy as entropy_lib
from grpojax.core.losses import surrogates
from grpojax.core.losses.rollout_correction import is_weights
from grpojax.core.objective import Objective
from grpojax.rewards import functions

FILE = pathlib.Path(__file__).with_name("other_losses.json")
MADE = json.loads(FILE.read_text())
RATIO = surrogates.RATIOS
SURROGATE = surrogates.SURROGATES
CISPO, SAPO, GMPO, DRO, TV, KL = (
  {"surrogate": SURROGATE[name]}
  for name in ("cispo", "sapo", "gmpo", "dro", "dppo_tv", "dppo_kl")
)
GSPO = {"ratio": RATIO["sequence_ratio"]}
VESPO = {"surrogate": SURROGATE["vespo"], "ratio": RATIO["trajectory_ratio"]}
LOSS_TYPES = {  # TRL's name: weighting, and settings of grpo_loss
  "grpo": ("sequence_mean", {}),
  "bnpo": ("token_mean", {}),
  "dapo": ("token_mean", {}),
  "dr_grpo": ("fixed_length", {}),
  "luspo": ("sequence_sum", {}),
  "cispo": ("token_mean", CISPO),
  "sapo": ("sequence_mean", SAPO),
  "vespo": ("token_mean", VESPO),
}
NAMES = {  # TRL's settings with another name here
  "epsilon_low": "clip_low",
  "epsilon_high": "clip_high",
  "delta": "dual_clip",
  "use_bias_correction_kl": "kl_correction",
  "top_entropy_quantile": "share",
  "entropy_coef": "bonus",
}
VERL = {
  "vanilla": ("token_mean", {"clip_high": 0.28}),
  "vanilla dual": ("token_mean", {"dual_clip": 1.25}),
  "vanilla sum": ("sequence_sum", {}),
  "vanilla norm": ("fixed_length", {}),
  "gspo": ("sequence_mean", GSPO | {"clip_low": 0.1, "clip_high": 0.15}),
  "gmpo": (
    "sequence_mean",
    GMPO | {"gmpo_clip_low": 0.4, "gmpo_clip_high": 0.3},
  ),
  "cispo": ("token_mean", CISPO | {"cispo_min": 0.6, "cispo_max": 1.5}),
  "sapo": (
    "sequence_mean",
    SAPO | {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
  ),
  "dro": ("token_mean", DRO | {"dro_beta": 0.3}),
  "dppo_tv": (
    "token_mean",
    TV | {"dppo_low": 0.05, "dppo_high": 0.1, "dppo_ratio_max": 1.6},
  ),
  "dppo_kl": (
    "token_mean",
    KL | {"dppo_low": 0.001, "dppo_high": 0.08, "dppo_ratio_max": 20.0},
  ),
}
CASES = [(theirs, name) for theirs in ("trl", "verl") for name in MADE[theirs]]


def our_settings(theirs, name):
  """Weighting, and settings of grpo_loss."""
  if theirs == "verl":
    return VERL[name]
  changes = dict(MADE["trl"][name]["settings"])
  del changes["on_policy"]
  weighting, settings = LOSS_TYPES[changes.pop("loss_type", "dapo")]
  names = NAMES | {"epsilon_high": "cispo_max"} if "cispo" in name else NAMES
  if changes.pop("importance_sampling_level", "token") == "sequence":
    settings = settings | GSPO
  return weighting, settings | {names.get(k, k): x for k, x in changes.items()}


def data():
  """Two prompts with three completions each; nan on padding."""
  made = {k: np.reshape(x, (2, 3, -1)) for k, x in MADE["given"].items()}
  mask = made.pop("mask")
  advantages = made.pop("advantages")[..., 0]
  arrays = {k: np.where(mask, x, np.nan) for k, x in made.items()}
  arrays |= {"mask": mask, "advantages": advantages}
  return {k: jnp.asarray(x) for k, x in arrays.items()}


def ours(
  logprobs, entropy, on_policy, weighting, *, share=1, bonus=0, **settings
):
  """The loss of a single micro-batch, as in `make_update`."""
  arrays = data()
  mask = arrays["mask"]
  counted = mask
  weights = bind(losses.WEIGHTINGS[weighting], length=8)(mask)
  if share < 1:
    entropies = jax.lax.stop_gradient(entropy)
    counted = entropy_lib.highest_entropy(entropies, mask, share)
    settings["token_mask"] = counted
  args = logprobs, arrays["advantages"], weights, mask
  old = None if on_policy else arrays["old_logprobs"]
  value, _ = losses.grpo_loss(*args, old, arrays["ref_logprobs"], **settings)
  return value - bonus * entropy_lib.mean_entropy(entropy, counted)


@pytest.mark.parametrize("theirs, name", CASES)
def test_values_and_gradients_equal(theirs, name, float64):
  expected = MADE[theirs][name]
  weighting, settings = our_settings(theirs, name)
  settings = settings | {"on_policy": "on-policy" in name}
  loss = functools.partial(ours, weighting=weighting, **settings)
  arrays = data()["logprobs"], data()["entropy"]
  value, gradients = jax.value_and_grad(loss, (0, 1))(*arrays)
  # Weights are float32, and terms of size 1 may cancel.
  np.testing.assert_allclose(value, expected["loss"], rtol=1e-6, atol=1e-7)
  for gradient, key in zip(gradients, ("logprobs", "entropy"), strict=True):
    theirs_ = np.array(expected.get(f"by_{key}", np.zeros(30))).reshape(-1)
    np.testing.assert_allclose(
      gradient.reshape(-1), theirs_, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("name", ["", "multi_turn_"])
def test_token_baselines_equal_verl(name, float64):
  """With the own reward in the mean."""
  made = MADE["verl_advantages"]
  shaped = lambda key: jnp.asarray(made[key]).reshape(2, 3, -1)
  sampled = shaped("holes") > 0 if name else data()["mask"]
  p = jnp.exp(jnp.asarray(MADE["given"]["old_logprobs"])).reshape(2, 3, 5)
  args = shaped("rewards")[..., 0], 1 - 2 * p + shaped("sum_of_squares")
  advantages = advantages_lib.optimal_token_baseline(
    *args, sampled, power=1.0, leave_one_out=False
  )
  expected = shaped(f"{name}optimal_token_baseline")
  np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-7)


def test_reinforce_plus_plus_equals_verl(float64):
  made = MADE["verl_advantages"]
  lengths = data()["mask"].sum(-1)
  rewards = jnp.asarray(made["rewards"]).reshape(2, 3)
  expected = np.array(made["reinforce_plus_plus"])[:, 0].reshape(2, 3)
  advantages = advantages_lib.reinforce_plus_plus(rewards, lengths)
  np.testing.assert_allclose(advantages, expected, rtol=1e-6)


def test_geometric_mask_equals_verl():
  """verl's bounds are of the inverse ratio."""
  arrays = data()
  mask = arrays["mask"]
  log_ratio = jnp.where(mask, arrays["logprobs"] - arrays["old_logprobs"], 0)
  bounds = 1 / 1.1, 1 / 0.8
  weights, outside = is_weights(log_ratio, mask, "geometric_mask", *bounds)
  theirs = np.array(MADE["verl_advantages"]["geometric_mask"])
  theirs = theirs.reshape(2, 3, 5)
  assert 0 < theirs.sum() < mask.sum()
  np.testing.assert_array_equal(np.where(mask, weights, 0), theirs)
  np.testing.assert_array_equal(outside, mask & (theirs == 0))


def test_the_entropy_coefficient_adapts_as_in_trl():
  moves = {"entropy_coef_delta": 0.02, "entropy_coef_max": 0.06}
  bonus = Objective(entropy_coef=0.01, entropy_target=1.0, **moves)
  control = entropy_lib.init_control(bonus)
  skipped = jnp.array(False)
  rows = zip(MADE["trl_adaptive"], MADE["entropies"], strict=True)
  seen = set()
  for expected, entropy in rows:
    applied = float(entropy_lib.coefficient(bonus, control))
    assert applied == pytest.approx(expected["applied"], abs=1e-6)
    # A skipped step has no effect.
    same = entropy_lib.adapt(bonus, control, jnp.array(jnp.nan), ~skipped)
    assert jax.tree.all(jax.tree.map(np.array_equal, same, control))
    control = entropy_lib.adapt(bonus, control, jnp.array(entropy), skipped)
    coefficient = float(control.coefficient)
    assert coefficient == pytest.approx(expected["coefficient"], abs=1e-6)
    seen |= {round(applied, 3), round(coefficient, 3)}
  assert seen == {0.0, 0.02, 0.04, 0.06}  # both bounds, and between them


# Aggregation of several rewards.


TRL = MADE["trl_several_rewards"]
REWARD_WEIGHTS = jnp.array(TRL["weights"])
REWARDS = jnp.array(TRL["rewards"]).T.reshape(3, 3, 4)  # there [B * G, K]
AGGREGATED = {k: np.reshape(x, (3, 4)) for k, x in TRL["advantages"].items()}
normalize_then_sum = jax.jit(
  multi_reward.normalize_then_sum, static_argnames="epsilon"
)


def test_normalize_then_sum_equals_trl():
  total = normalize_then_sum(REWARDS, REWARD_WEIGHTS, epsilon=1e-4)
  actual = advantages_lib.batch_std(total, epsilon=1e-4)
  np.testing.assert_allclose(
    actual, AGGREGATED["normalize_then_sum"], atol=2e-6
  )


def test_sum_then_normalize_equals_trl():
  """With the weighted sum of the pool of reward functions."""
  columns = np.asarray(REWARDS, np.float64).reshape(3, -1).T
  values = [[None if np.isnan(v) else v for v in row] for row in columns]
  total = [functions.combine(row, REWARD_WEIGHTS.tolist()) for row in values]
  total = jnp.array(np.array(total, np.float32).reshape(3, 4))  # None is nan
  actual = jax.jit(functools.partial(advantages_lib.grpo, epsilon=1e-4))(total)
  np.testing.assert_allclose(actual, AGGREGATED["grpo"], atol=2e-6)
  actual = jax.jit(advantages_lib.dr_grpo)(total)
  np.testing.assert_allclose(actual, AGGREGATED["dr_grpo"], atol=2e-5)
