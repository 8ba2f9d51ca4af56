"""What a run remembers, and when it stops."""

import dataclasses
import json
import math

import jax.numpy as jnp
import pytest

from grpojax.core.losses import rollout_mismatch
from grpojax.training.config import default_config
from grpojax.training.run import progress

GOOD = {
  "skipped_updates": 0,
  "rewards_missing": 0.0,
  "zero_variance_groups": 0.9,
  "truncated": 0.5,
  "rollout_effective_samples": 0.4,
  "train_seconds": 1.5,
}
# The least that counts as such a step, and something less that is only shown.
BAD = {
  "skipped_updates": (1, None, "1 updates skipped"),
  "rewards_missing": (1.0, 0.25, "25% without reward"),
  "zero_variance_groups": (1.0, None, "no group's rewards differ"),
  "truncated": (0.75, None, "75% cut off at sampling.max_new_tokens"),
  "few_effective_samples": (0.95, None, "95% of the samples without weight"),
}


def test_every_trouble_has_a_limit():
  of_steps = set(default_config().stop) - {"no_improvement"}  # of evaluations
  assert of_steps == set(progress.STOP_CONDITIONS) == set(BAD)


@pytest.mark.parametrize("name", BAD)
def test_a_trouble_in_a_row_ends_a_run(name):
  whole, less, words = BAD[name]
  limits = dict.fromkeys(BAD, 0) | {name: 3}
  bad, now = GOOD | {name: whole}, progress.Progress()
  if name == "few_effective_samples":
    bad = GOOD | {"rollout_effective_samples": 1 - whole}
  for row in [bad, bad, GOOD, bad, bad]:
    now = progress.after(now, row)
    assert progress.stop_reason(now, limits) is None
  # What is kept in a checkpoint counts on.
  notes = json.loads(json.dumps(dataclasses.asdict(now)))
  now = progress.after(progress.from_notes(notes), bad)
  why = progress.stop_reason(now, limits)
  assert "in 3 steps in a row" in why and f"--config.stop.{name}=0" in why
  assert progress.stop_reason(now, dict.fromkeys(BAD, 0)) is None
  assert now.steps_with[name] == 5
  assert sum(now.steps_with.values()) == 5
  shown = bad if less is None else GOOD | {name: less}
  assert progress.troubles(shown) == [words]
  assert progress.troubles(GOOD) == []


def test_less_than_all_ends_nothing():
  now = progress.Progress()
  for _ in range(5):
    now = progress.after(now, GOOD | {"rewards_missing": 0.99})
  assert progress.stop_reason(now, dict.fromkeys(BAD, 1)) is None
  assert now.steps_with["rewards_missing"] == 5


def test_seconds_and_failures_add_up():
  row = GOOD | {"reward_failures": 3}
  now = progress.after(progress.after(progress.Progress(), row), GOOD)
  assert now.failed_rewards == 3 and now.train_seconds == 1.5


def test_what_a_checkpoint_does_not_say_is_not_known():
  assert progress.from_notes(None) == progress.Progress()
  assert progress.from_notes({"of": "another version"}).baseline is None


def test_a_step_without_rewards_says_nothing_of_its_samples():
  mask = jnp.zeros((2, 3, 4), bool)
  arrays = {"log_ratio": jnp.zeros(mask.shape)}
  share = rollout_mismatch.metrics(arrays, mask)["rollout_effective_samples"]
  assert math.isnan(share)
  row = GOOD | {"rewards_missing": 1.0, "rollout_effective_samples": share}
  limits = dict.fromkeys(BAD, 0) | {"few_effective_samples": 1}
  now = progress.after(progress.Progress(), row)
  assert progress.stop_reason(now, limits) is None
