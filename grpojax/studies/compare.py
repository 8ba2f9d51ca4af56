"""Settings compared by training: equal samples, each at its best learning rate.

    python -m grpojax.studies.compare [--config.arms="SETTINGS, SETTINGS, ..."]
                                      [--config.key=value ...] [--run_dir=DIR]

Each arm is a text of settings of `grpojax.train` with spaces between them, such
as "advantage=norm_ratio diagnostics.every=2". An arm trains with each learning
rate on seeds of the tuning alone; with the rate of the highest mean reward it
trains on the seeds of the comparison. Arms share a seed's prompts and its
policy's first samples, so they are compared in pairs, with the first arm. What
is compared is the mean reward over training, of fresh samples for new prompts:
the objective itself, at every step. DIR, by default runs/compare, gets

    tuning.csv      one row an arm and learning rate
    curves.csv      one row a step of the comparison's runs
    results.csv     one row an arm: learning rate, mean reward and held-out
                    accuracy at the end, differences from the first arm with
                    95% intervals over seeds
    compare.png
    logs/           what the training runs printed
"""

import itertools
import math
import pathlib
import sys
from collections.abc import Mapping

from ml_collections import ConfigDict

from grpojax.runtime import command_line
from grpojax.runtime.config import flatten
from grpojax.runtime.settings import changed, section, setting
from grpojax.studies import compare_results as results
from grpojax.studies import run as study
from grpojax.studies import training_runs
from grpojax.training import config as train_config_lib
from grpojax.training import group_sizes
from grpojax.training.config import SETTINGS as TRAIN_SETTINGS
from grpojax.training.settings_input import ONE

PROGRAM = "python -m grpojax.studies.compare"


FLAGS = study.FLAGS
SETTINGS = section(
  "the study",
  name=setting("compare", "of the study; its directory is runs/NAME"),
  arms=setting(
    (
      "advantage=leave_one_out",
      "advantage=grpo",
      "advantage=length_weighted",
      "advantage=score_weighted",
      "advantage=norm_ratio diagnostics.every=2",
    ),
    "what is compared, with the first: settings with spaces between them",
  ),
  learning_rates=setting(
    (1.25e-4, 3e-4, 7.5e-4), "of which each arm gets its best"
  ),
  tuning_seeds=setting(
    2, "runs of each arm and rate to find it, on seeds of their own", within=ONE
  ),
  seeds=setting(
    5,
    "runs of each arm that are compared; an interval needs 2",
    within="[2, inf)",
  ),
  train=changed(
    TRAIN_SETTINGS,
    {
      "steps": 24,
      "batch_size": 16,
      "data.options.difficulty": (2, 2),
      "sampling.max_new_tokens": 56,
      "eval.every": 24,
      "eval.num_prompts": 256,
      "log.trackers": (),
      "checkpoint.every": 24,
    },
  ),
)
"""The quick setting: advantages on the embedded model, two cores."""


def arm_config(config: ConfigDict, arm: str) -> ConfigDict:
  """The training settings of an arm.

  Raises:
    ValueError: for a setting that `grpojax.train` does not have, or a value of
      another type.
  """
  words = [f"--config.{word}" for word in arm.split()]
  run, _ = command_line.parse(
    words, {}, TRAIN_SETTINGS, PROGRAM, lambda: config.train
  )
  return run


def train_config(
  config: ConfigDict, arm: int, rate: float, seed: int
) -> ConfigDict:
  """The run of an arm, by its place, with a learning rate and a seed."""
  run = arm_config(config, config.arms[arm])
  with run.unlocked():
    run.name = f"arm{arm}-rate{rate:g}-seed{seed}"
    run.optim.learning_rate, run.seed = float(rate), config.train.seed + seed
  return run.lock()


def problems(config: ConfigDict) -> list[str]:
  """What is wrong with the values of a config, a line each."""
  wrong = []
  if len(config.arms) < 2 or len(set(config.arms)) < len(config.arms):
    wrong.append(f"arms = {config.arms!r}: give two or more, all different")
  rates = config.learning_rates
  if not rates or not all(
    type(r) in (int, float) and 0 < r < math.inf for r in rates
  ):
    wrong.append(f"learning_rates = {rates!r}: give finite numbers above 0")
  elif len({f"{r:g}" for r in rates}) < len(rates):
    wrong.append(f"learning_rates = {rates!r}: two of them are the same")
  most = 2**32 - config.seeds - config.tuning_seeds
  if not 0 <= config.train.seed <= most:
    wrong.append(f"train.seed = {config.train.seed}: must be in 0..{most}")
  if wrong:
    return wrong
  for i, arm in enumerate(config.arms):
    try:
      train_config_lib.validate(train_config(config, i, rates[0], 0))
    except ValueError as error:
      wrong.append(f"arm {arm!r}: {error}")
    for name in ("seed", "name", "optim.learning_rate"):
      if any(word.split("=")[0] == name for word in arm.split()):
        wrong.append(f"arm {arm!r}: {name} is set by the study")
  return wrong or _unequal(config)


def _unequal(config: ConfigDict) -> list[str]:
  """The arms that cannot be compared with the first, a line each."""
  runs = [flatten(arm_config(config, arm)) for arm in config.arms]
  wrong, evaluated = [], "eval.num_prompts"
  for arm, run in zip(config.arms, runs, strict=True):
    if run["steps"] < 1:
      wrong.append(f"arm {arm!r}: steps = {run['steps']}: give 1 or more")
    for name in ("filter_groups.enable", "stop.no_improvement"):
      if run[name]:
        wrong.append(
          f"arm {arm!r}: with {name} a run samples as much as it needs, and "
          "arms are compared at equal samples"
        )
    if run[evaluated] != runs[0][evaluated]:
      wrong.append(
        f"arm {arm!r}: {evaluated} = {run[evaluated]}, and "
        f"{runs[0][evaluated]} of the first: give all the same"
      )
  if wrong:
    return wrong
  samples = [run["steps"] * group_sizes.samples_per_step(run) for run in runs]
  return [
    f"arm {arm!r}: {count} completions a run, and {samples[0]} of the first:"
    " set batch_size (prompts a step) or steps for as many"
    for arm, count in zip(config.arms, samples, strict=True)
    if count != samples[0]
  ]


def tune(
  config: ConfigDict, directory: pathlib.Path
) -> dict[tuple[int, float], float]:
  """Mean reward of each arm, by its place, and learning rate."""
  seeds = range(config.seeds, config.seeds + config.tuning_seeds)
  rates = map(float, config.learning_rates)
  points = list(itertools.product(range(len(config.arms)), rates))
  runs = {x: [train_config(config, *x, seed) for seed in seeds] for x in points}
  if len(config.learning_rates) > 1:  # or there is nothing to choose from
    training_runs.train_all([*itertools.chain(*runs.values())], directory)
    with command_line.usage_errors():
      return {
        x: sum(results.mean_reward(directory, run.name) for run in of_point)
        / len(of_point)
        for x, of_point in runs.items()
      }
  return dict.fromkeys(points, 0.0)


def best_rates(tuned: Mapping[tuple[int, float], float]) -> list[float]:
  """The learning rate of the highest mean reward, for each arm in its place.

  Raises:
    ValueError: an arm never had a reward.
  """
  best = {}
  for (arm, rate), reward in tuned.items():
    if not math.isnan(reward) and reward > best.get(arm, (-math.inf,))[0]:
      best[arm] = reward, rate
  lost = {arm for arm, _ in tuned} - best.keys()
  if lost:
    raise ValueError(f"no run of the arms {sorted(lost)} had any reward")
  return [best[arm][1] for arm in sorted(best)]


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  config, directory = study.open_study(
    argv, PROGRAM, SETTINGS, problems, __doc__
  )
  training_runs.share_compilations(directory)
  with study.resumable():
    tuned = tune(config, directory)
    with command_line.usage_errors():
      rates = best_rates(tuned)
    runs = [
      [train_config(config, arm, rate, seed) for seed in range(config.seeds)]
      for arm, rate in enumerate(rates)
    ]
    # Seed by seed: what is there of an interrupted study can be compared.
    by_seed = zip(*runs, strict=True)
    training_runs.train_all([*itertools.chain(*by_seed)], directory)
  names = [[run.name for run in of_arm] for of_arm in runs]
  with command_line.usage_errors():
    results.write(config, directory, tuned, rates, names)


if __name__ == "__main__":
  main(sys.argv[1:])
