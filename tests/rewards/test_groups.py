import math
import pathlib

import numpy as np
import pytest

from grpojax.rewards import groups
from grpojax.rewards.pool import Pool

USER = str(pathlib.Path(__file__).with_name("user_rewards.py"))


def compute(pool, *args):
  return pool.collect([groups.submit_groups(pool, *args)])


@pytest.mark.parametrize("workers", [0, 2])
def test_groups_have_rewards_and_failures_are_masked(workers):
  examples = [
    {"prompt_text": "ab", "answer": "1"},
    {"prompt_text": "abc", "answer": "2"},
  ]
  texts = [["1", "2", "none"], ["4", "raise", "6"]]
  lengths = np.array([[1, 2, 3], [10, 5, 5]], np.int32)
  finished = np.array([[True] * 3, [False, True, True]])
  names = [f"{USER}:behave", f"{USER}:length_of_prompt", "length", "unfinished"]
  with Pool(names, weights=(1, 100, 1000, 0.25), workers=workers) as pool:
    rewards = compute(pool, examples, texts, lengths, finished, 10)
  assert rewards.rewards.dtype == np.float32
  expected = [
    [1 + 200 - 100, 2 + 200 - 200, 200 - 300],
    [4 + 300 - 1000 - 0.25, math.nan, 6 + 300 - 500],
  ]
  np.testing.assert_allclose(rewards.rewards, expected, rtol=1e-6)
  nan = math.nan
  values = {
    "behave": [[1, 2, nan], [4, nan, 6]],
    "length_of_prompt": [[2] * 3, [3, 3, 3]],
    "length": [[-0.1, -0.2, -0.3], [-1, -0.5, -0.5]],
    "unfinished": [[0] * 3, [-1, 0, 0]],
  }
  assert rewards.values.keys() == values.keys()
  for name, expected in values.items():
    np.testing.assert_allclose(rewards.values[name], expected, rtol=1e-6)
  np.testing.assert_array_equal(rewards.failed, [[0] * 3, [0, 1, 0]])
  [failure] = groups.all_failures(rewards)
  assert failure.prompt == "abc" and failure.completion == "raise"


def test_neighbouring_jobs_are_of_different_prompts():
  """So that one bad example does not make a whole batch be given up."""
  examples = [{"prompt_text": p, "answer": ""} for p in "abc"]
  ones = np.ones((3, 4), np.int32)
  with Pool([f"{USER}:behave"]) as pool:
    sent = groups.submit_groups(
      pool, examples, [["1"] * 4] * 3, ones, ones > 0, 8
    )
  items = [item for job in sent.jobs for item in job.content[1]]
  assert "".join(prompt for prompt, _, _ in items) == "abc" * 4
