"""The model of `studies.gsm8k` before GRPO, for studies of its gradient."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from grpojax.rewards.math import math_answer
from grpojax.runtime import config as config_lib
from grpojax.studies import gram, gsm8k, mse
from grpojax.training import from_config, prompts, samplers, splits
from grpojax.training import policy as policy_lib

BETWEEN = 0.1, 0.9
"""Shares of right answers of problems that have a gradient to speak of."""


def problems(directory: str, num_prompts: int) -> str:
  """Why a study cannot have problems of such a run; "" if it can."""
  if not directory:
    return "give the directory of a run of grpojax.studies.gsm8k"
  root = pathlib.Path(directory)
  try:
    found = len(_chosen(root))
    run = _run(root)
    policy_lib.find_model(run.model.path)
  except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
    return f"no run of grpojax.studies.gsm8k with its before.json ({error})"
  if run.reward.functions != (math_answer.__name__,):
    return (
      f"its problems were scored by {run.reward.functions}; this study scores "
      f"with {math_answer.__name__} alone"
    )
  if found < num_prompts:
    low, high = BETWEEN
    return (
      f"has {found} problems that are solved {low:.0%} to {high:.0%} of the "
      f"time, fewer than num_prompts = {num_prompts}"
    )
  return ""


def _chosen(directory: pathlib.Path) -> list[int]:
  """The problems with such shares, by the samples of before.json."""
  stage = json.loads((directory / "before.json").read_text())
  shares, (low, high) = np.array(stage["rewards"], np.float64), BETWEEN
  return np.flatnonzero((low <= shares) & (shares <= high)).tolist()


def _run(directory: pathlib.Path) -> ConfigDict:
  """The config of GRPO, which samples as before.json's samples were."""
  study = config_lib.from_json((directory / "config.json").read_text())
  study, _ = config_lib.fill_in(study, gsm8k.default_config())
  # Absolute: a relative one that is not there could be a name on the Hub.
  return gsm8k.grpo_run(study, directory.absolute())


def open_bench(directory: str, samples: int, num_prompts: int) -> mse.Bench:
  """Loads the model after supervised fine-tuning, and training problems.

  In float32, whatever the run trained in: the scores are to be exact.

  Args:
    directory: the run of `studies.gsm8k`.
    samples: completions of a pool.
    num_prompts: problems, the first ones of `_chosen`. Other samples chose
      them, so that theirs are as good as any.

  Raises:
    OSError, ValueError: of what `problems` says.
  """
  root = pathlib.Path(directory)
  run = _run(root)
  policy = policy_lib.load_policy(run.model.path)
  examples = splits.load_examples(run, "train")
  batches = [
    prompts.prompts_of(run, policy, examples, [i])
    for i in _chosen(root)[:num_prompts]
  ]
  sampling = from_config.sampling(run)
  return mse.Bench(
    policy,
    batches,
    samplers.make_sampler(run, policy, samples, sampling),
    gram.make_score(policy.lm, sampling),
    rewards_of,
  )


def rewards_of(example: dict, texts: Sequence[str]) -> np.ndarray:
  """Of the completions of one problem, [S]."""
  rewards = [math_answer("", text, example) for text in texts]
  return np.array(rewards, np.float32)
