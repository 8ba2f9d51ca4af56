"""Rewards of several functions: what a step compares of them."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.aot import programs
from grpojax.core import advantages
from grpojax.core import mesh as mesh_lib
from grpojax.core.advantages import multi_reward
from grpojax.rewards import groups, pool
from grpojax.training.step import host
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step.batch import (
  aggregation,
  make_batch_program,
  reward_weights,
)

NAN = np.nan
VALUES = {
  "right": np.array([[1, 0, 1], [0, 0, 1]], np.float32),
  "short": np.array([[3, NAN, 9], [5, 1, 1]], np.float32),
}
FAILED = np.array([[0, 0, 0], [0, 0, 1]], bool)
MASK = np.ones((2, 3, 4))


def scores_of(weights):
  total = sum(
    w * np.nan_to_num(v) for w, v in zip(weights, VALUES.values(), strict=True)
  )
  total = np.where(FAILED, NAN, total).astype(np.float32)
  return groups.GroupRewards(total, VALUES, FAILED, [[[]] * 3] * 2)


def program_of(settings, tabular, samples):
  """`(rewards, **options) -> (batch, metrics)` of these samples."""
  program = make_batch_program(settings)
  return jax.jit(functools.partial(program, tabular.lm(1, 3), None, samples))


def test_a_failure_takes_no_part_by_any_function():
  found = rewards_lib.stack_values(scores_of((1.0, 2.0)))
  expected = [[[1, 0, 1], [0, 0, NAN]], [[3, NAN, 9], [5, 1, NAN]]]
  np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, scale", [("batch_std", 0.25), ("leave_one_out", None)]
)
def test_a_step_compares_what_was_asked_for(
  name, scale, tabular, settings_with, samples_of
):
  weights = (1.0, -0.5)
  settings = settings_with(
    reward__functions=("a", "b"),
    reward__weights=weights,
    reward__aggregation="normalize_then_sum",
    advantage=name,
    group_size=3,
    batch_size=2,
    optim__micro_batches=1,
  )
  make_batch = program_of(settings, tabular, samples_of(MASK))
  scores = scores_of(weights)
  values = rewards_lib.stack_values(scores)
  scale = scale and np.float32(scale)
  batch, row = make_batch(scores.rewards, values=values, scale=scale)
  compared = multi_reward.normalize_then_sum(jnp.asarray(values), weights)
  expected = advantages.ADVANTAGES[name](compared) * (scale or 1)
  np.testing.assert_allclose(batch.advantages, expected, rtol=1e-5, atol=1e-6)
  # The metrics are of the weighted sum.
  np.testing.assert_allclose(
    row["reward_mean"], np.nanmean(scores.rewards), rtol=1e-6
  )
  assert not batch.completion_mask[1, 2].any() and batch.advantages[1, 2] == 0


@pytest.mark.parametrize("offset", [0.0, 1e8, -1e11])
def test_an_offset_of_all_rewards_changes_no_difference(offset, settings_with):
  """In float32 1e8 + 1 is 1e8; only the middle group's offset is so large."""
  raw = np.array([[0.0, 1, 1, 3], [4, 1, NAN, 2], [0.1, 0.7, 0.3, 0.1]])
  total = raw + np.array([[0.0], [offset], [0.0]])
  exact = pool.exact_enough(total)
  assert (exact.dtype == np.float32) == (not offset)
  scores = groups.GroupRewards(exact, {"a": exact}, np.isnan(raw), [[[]]] * 3)
  mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
  for changes in ({}, {"reward__aggregation": "normalize_then_sum"}):
    settings = settings_with(advantage="grpo", **changes)
    placed, values = rewards_lib.place_rewards(settings, scores, mesh)
    placed = placed if values is None else values[0]
    placed = np.asarray(placed)
    found, expected = (x[1] - x[1, 0] for x in (placed, raw))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    expected = raw[[0, 2]].astype(np.float32)
    np.testing.assert_array_equal(placed[[0, 2]], expected)
  metrics = rewards_lib.metrics(scores)
  if offset:
    assert metrics["reward_mean"] == np.nanmean(total)
    assert metrics["reward_std"] == np.nanstd(total)
  # Those that are not of a group alone are what they were.
  settings = settings_with(advantage="shrinkage")
  placed, _ = rewards_lib.place_rewards(settings, scores, mesh)
  np.testing.assert_array_equal(placed, total.astype(np.float32))


def test_a_diagnosis_is_of_rewards_less_their_mean(monkeypatch):
  monkeypatch.setattr(host, "diagnosis_key", lambda state: None)
  step = types.SimpleNamespace(
    mesh=mesh_lib.make_mesh(devices=jax.devices()[:1]),
    diagnose=lambda params, rollout, rewards, *_: {"rewards": rewards},
    check_signals=lambda: None,
  )
  state = types.SimpleNamespace(params=None)
  rewards = np.array([[1e8, 1e8 + 1], [1e8 + 3, np.nan]])
  scores = groups.GroupRewards(rewards, {}, np.isnan(rewards), [[], []])
  diagnose = host.HostStep._diagnose.__wrapped__  # whose state is no TrainState
  found = diagnose(step, state, None, scores)
  expected = [[-4 / 3, -1 / 3], [5 / 3, np.nan]]
  np.testing.assert_allclose(found["rewards"], expected, rtol=1e-6)
  assert np.isnan(found["gradient_mse_vanilla"])


def test_differences_of_rounding_are_none():
  equal = np.array([[0.1 + 0.2, 0.3], [1.0, 0.0]])
  assert pool.exact_enough(equal).dtype == np.float32
  # A tenth of one would be off by 3%.
  assert pool.exact_enough(1e5 + equal / 10).dtype == np.float64
  between = 2.0**24 + 1  # two numbers of float32
  near = np.array([[between, np.nextafter(between, np.inf)]])
  assert len(np.unique(pool.exact_enough(near))) == 1
  large = np.concatenate([equal, [[1e8, 1e8 + 1]]])
  found = pool.exact_enough(large)
  np.testing.assert_array_equal(found, [[0.3, 0.3], *large[1:]])


@pytest.mark.slow
def test_what_is_dropped_is_not_in_the_normalisation(
  tabular, settings_with, samples_of
):
  """The others' advantages are those of their group without it."""
  settings = settings_with(
    reward__functions=("a", "b"),
    reward__weights=(1.0, 1.0),
    reward__aggregation="normalize_then_sum",
    loss__truncated="drop",
    group_size=4,
    batch_size=1,
  )
  samples = samples_of(np.ones((1, 4, 2)), [[True, True, False, True]])
  values = jnp.array([[[1.0, 0, 9, 2]], [[0.0, 4, -7, 1]]])
  make_batch = program_of(settings, tabular, samples)
  batch, row = make_batch(values.sum(0), values=values)
  assert row["zero_variance_groups"] == 0
  left = np.array([[1.0, 0, 2], [0.0, 4, 1]])
  normal = left - left.mean(-1, keepdims=True)
  normal = (normal / normal.std(-1, ddof=1, keepdims=True)).sum(0)
  found = np.asarray(batch.advantages[0])
  np.testing.assert_allclose(found[[0, 1, 3]], 1.5 * normal, rtol=1e-4)
  assert found[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes, expected",
  [
    ({}, 1 / 3),  # as they came, by their sum: 1 in the last group
    ({"loss__truncated": "drop"}, 2 / 3),
    # By itself each varies in the last one.
    ({"reward__aggregation": "normalize_then_sum"}, 0),
    (
      {
        "reward__aggregation": "normalize_then_sum",
        "loss__truncated": "drop",
      },
      1 / 3,
    ),
  ],
)
def test_groups_without_variance_are_those_that_teach_nothing(
  changes, expected, tabular, settings_with, samples_of
):
  """Of three groups one differs in nothing but what was cut off."""
  settings = settings_with(
    reward__functions=("a", "b"),
    reward__weights=(1.0, 2.0),
    group_size=4,
    batch_size=3,
    **changes,
  )
  ends = [[True, True, True, False], [True] * 4, [True] * 4]
  samples = samples_of(np.ones((3, 4, 2)), ends)
  values = jnp.array(
    [
      [[1.0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]],
      [[0.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0.5, 0.5]],
    ]
  )
  make_batch = program_of(settings, tabular, samples)
  total = values[0] + 2 * values[1]
  _, row = make_batch(total, values=values)
  np.testing.assert_allclose(row["zero_variance_groups"], expected, rtol=1e-6)


def test_a_scale_is_of_advantages_that_are_bounded(
  tabular, settings_with, samples_of
):
  settings = settings_with(
    loss__advantage_clip=2.0,
    group_size=3,
    batch_size=2,
    optim__micro_batches=1,
  )
  rewards = jnp.array([[3.0, 0, 0], [1.0, 0, 0]])
  make_batch = program_of(settings, tabular, samples_of(MASK))
  batch, _ = make_batch(rewards, scale=np.float32(0.5))
  expected = [[1.0, -0.75, -0.75], [0.5, -0.25, -0.25]]
  np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)


def test_the_reward_model_has_the_last_weight(settings_with):
  settings = settings_with(
    reward__weights=(2.0,),
    reward__model="somewhere",
    reward__model_weight=3.0,
  )
  assert tuple(reward_weights(settings.reward)) == (2.0, 3.0)
  assert aggregation(settings.reward) is None


@pytest.mark.slow
def test_it_compiles_ahead_of_time(settings_with):
  """What a run compiles is lowered, with the values of all functions."""
  settings = settings_with(
    reward__functions=("exact_answer", "length"),
    reward__weights=(1.0, 1.0),
    reward__aggregation="normalize_then_sum",
    filter_groups__enable=True,
  )
  mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
  run = programs.open_run(settings, mesh)
  shapes = programs.lower(run, "reference").in_avals  # of both kinds
  assert (2, 32, 8) in [x.shape for x in jax.tree.leaves(shapes)]
  drawn = programs.lower(run, "rollout").in_avals[0]
  assert jax.tree.leaves(drawn)[-1].shape == ()  # the first prompt's number
