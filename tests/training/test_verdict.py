"""Verdicts on handmade runs."""

import math

import pytest

from grpojax.training.config import default_config
from grpojax.training.report import verdict as lib

LIMITS = dict(default_config().stop)
GOOD = {"zero_variance_groups": 0.25, "grad_norm": 0.5}
EQUAL = {"zero_variance_groups": 1.0, "reward_mean": 0.0}
SOLVED = {"zero_variance_groups": 1.0, "reward_mean": 1.0}
NAN = {"skipped_updates": 1, "grad_norm": None}
FAILED = {"zero_variance_groups": 1.0, "rewards_missing": 1.0}
FLAT = [0.4, 0.6, 0.5, 0.5]
ROSE = {"low": 0.1, "high": 0.3, "prompts": 100}
FELL = {"low": -0.3, "high": -0.1, "prompts": 100}
UNCLEAR = {"low": -0.1, "high": 0.3, "prompts": 100}


def steps(*rows, rewards=FLAT):
  return [
    {"step": i + 1, "reward_mean": rewards[i % len(rewards)]} | row
    for i, row in enumerate(rows)
  ]


def evaluation(step, accuracy, prompts=100):
  bounds = {"accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
  return {"step": step, "accuracy": accuracy, "prompts": prompts} | bounds


def held_out(*accuracies):
  return [evaluation(8 * i, accuracy) for i, accuracy in enumerate(accuracies)]


RISING = [*[0.1, 0.2] * 4, *[0.2, 0.1] * 2, *[0.4, 0.3] * 2]
DONE = {"finished": True}
MANY = steps(*[GOOD] * 16)
RISE = steps(*[GOOD] * 16, rewards=RISING)
NONFINITE = steps(*[GOOD] * 2, *[NAN] * 10)
NO_TOKENS = {"skipped_updates": 1, "grad_norm": 0.0}
NO_REWARD = FAILED | {"reward_mean": math.nan}
THREE = {"limits": LIMITS | {"zero_variance_groups": 3}}
TWO = DONE | {"planned": 40, "limits": {"no_improvement": 2}}
OTHERS = [evaluation(0, 0.9, prompts=50), evaluation(16, 0.3)]
MIXED = steps(EQUAL, FAILED, EQUAL, NAN | {"zero_variance_groups": 0.5})

CASES = [  # rows, other facts, level, end of the sentence
  ([], {}, "", "No step yet."),
  (held_out(0.2), DONE, "", "Finished without training."),
  (steps(*[EQUAL] * 4), DONE, "bad", "in 4 of 4 steps no group's rewards "
   "differed; mean reward 0."),
  (MIXED, {}, "bad", "Learned nothing: in 2 of 4 steps no group's rewards "
   "differed, in 1 of 4 steps no completion had a reward, in 1 of 4 steps "
   "gradients were not finite; mean reward 0.275."),
  (steps(*[EQUAL] * 3), THREE, "bad", "; mean reward 0. Stopped at step 3 of "
   "16 (stop.zero_variance_groups)."),
  (steps(*[EQUAL] * 4) + held_out(0.2, 0.6), DONE | {"gain": ROSE}, "good",
   "rose on the same prompts; held-out accuracy 20.0% before, 60.0% after."),
  (steps(*[NO_TOKENS] * 16), DONE, "", "Finished: step 16 of 16."),
  (steps(*[NO_REWARD] * 40), {}, "bad", "Learned nothing: in 40 of 40 steps no "
   "completion had a reward."),
  (NONFINITE, {}, "bad", "Stopped at step 12 of 16 (stop.skipped_updates): in "
   "10 steps in a row gradients were not finite, and updates were skipped."),
  (MANY + held_out(0.5, 0.35), {"gain": FELL}, "bad", "Accuracy fell: 50.0% "
   "after step 0, 35.0% after step 8."),
  (MANY + held_out(0.2, 0.8, 0.3), DONE | {"gain": UNCLEAR}, "bad", "Accuracy "
   "fell: 80.0% after step 8, 30.0% after step 16."),
  (MANY + OTHERS, DONE, "", "Finished: step 16 of 16."),
  (MANY + held_out(0.4, 0.5), TWO, "", "did not rise in the last 2 evaluations "
   "(stop.no_improvement); held-out accuracy 40.0% before, 50.0% after."),
  (RISE + held_out(0.2, 0.25), DONE | {"gain": UNCLEAR}, "good", "Still "
   "improving at step 16 of 16: mean reward +0.2 in the last quarter of the "
   "steps; held-out accuracy 20.0% before, 25.0% after; more steps may help "
   "(--config.steps)."),
  (steps(*[GOOD] * 12, *[SOLVED] * 4), DONE, "", "Finished: step 16 of 16."),
  (MANY + held_out(0.2, 0.3), DONE | {"gain": UNCLEAR}, "", "no clear change "
   "in accuracy; held-out accuracy 20.0% before, 30.0% after, on 100 prompts."),
  (MANY + held_out(0.2, 0.3), {"gain": ROSE}, "", "Not finished: step 16 of "
   "16; held-out accuracy 20.0% before, 30.0% after."),
  (steps(GOOD), {"planned": None}, "", "Not finished: step 1."),
]  # fmt: skip


@pytest.mark.parametrize("rows, known, level, text", CASES)
def test_the_first_applicable_verdict(rows, known, level, text):
  known = {"planned": 16, "limits": LIMITS, "finished": False} | known
  verdict = lib.verdict(lib.facts(rows, **known))
  assert (verdict["level"], verdict["text"][-len(text) :]) == (level, text)


def test_facts_use_the_last_row_of_a_step_and_finite_values():
  rows = [*steps(GOOD, NAN), {"step": 2, "reward_mean": 0.1} | EQUAL]
  rows += [{"step": 3, "reward_mean": math.nan}, {"step": 4, "accuracy": 1}]
  run = lib.facts(rows, 4, LIMITS, False)
  assert [row.get("reward_mean") for row in run.steps] == [0.4, 0.0, None]
  assert run.evaluations == []


def test_the_most_frequent_trouble_comes_first():
  cut = {"truncated": 0.9}
  weightless = {"rollout_effective_samples": 0.05}
  rows = steps(*[cut] * 10, cut | weightless, weightless, *[GOOD] * 20, EQUAL)
  run = lib.facts(rows, 40, LIMITS, False)  # 1 of 33 steps is not often
  assert lib.troubled_metrics(run) == ["truncated", "rollout_effective_samples"]
  run = lib.facts(rows + held_out(0.9, 0.1), 40, LIMITS, False)
  assert lib.troubled_metrics(run)[:2] == ["accuracy", "truncated"]
