"""Settings compared by training: equal samples, each at its best learning rate.

    python -m grpojax.studies.compare [--config.arms="SETTINGS, SETTINGS, ..."]
                                      [--config.key=value ...] [--run_dir=DIR]

Each arm is a text of settings of `grpojax.train` with spaces between them, such
as "advantage=score_weighted score_power=1". An arm trains with each learning
rate on seeds of the tuning alone; with the rate of the highest mean reward it
trains on the seeds of the comparison. Arms share a seed's prompts and its
policy's first samples, so they are compared in pairs, with the first arm. What
is compared is the mean reward over training, of fresh samples for new prompts:
the objective itself, at every step; and the held-out accuracy, the mean of the
evaluations after `train.eval.every` steps. Where arms differ in rewards, in the
distribution that is sampled or in how prompts are drawn (`difficulty.priority`)
only the accuracy is compared. Arms of other data are refused. DIR, by default
runs/compare, gets

    tuning.csv      one row an arm and learning rate
    curves.csv      one row a step of the comparison's runs
    results.csv     one row an arm: learning rate, what is compared, and
                    differences from the first arm with 95% intervals over seeds
    compare.png
    logs/           what the training runs printed
"""

import contextlib
import itertools
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from grpojax.core.options import ONE_OR_MORE
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.config import flatten
from grpojax.runtime.cli.settings import changed, setting
from grpojax.studies import run as study
from grpojax.training.config import SETTINGS as TRAIN_SETTINGS
from grpojax.training.config import from_config, to_config
from grpojax.training.run import start
from grpojax.training.settings import batches as batches_lib
from grpojax.training.settings.inputs import DIFFICULTY_OFF
from grpojax.training.settings.run import TrainSettings

FLAGS = study.FLAGS
SETTINGS = study.settings(
  "compare",
  arms=setting(
    (
      "advantage=leave_one_out",
      "advantage=grpo",
      "advantage=length_weighted",
      "advantage=score_weighted",
    ),
    "what is compared, with the first: settings with spaces between them",
  ),
  learning_rates=setting(
    (1.25e-4, 3e-4, 7.5e-4), "of which each arm gets its best"
  ),
  tuning_seeds=setting(
    2,
    "runs of each arm and rate to find it, on seeds of their own",
    within=ONE_OR_MORE,
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

ASKED = ("data.", "environment.", "sampling.max_new_tokens")
"""Settings that decide which problems are asked, and how they are answered."""

REWARDED = (
  "reward.",
  "sampling.temperature",
  "sampling.top_",
  "sampling.min_p",
  "sampling.repetition_penalty",
  "difficulty.priority",
)
"""Settings without which mean rewards do not compare."""

FREE = (
  "environment.credit",
  *(
    f"{x}.{y}"
    for x in ("environment", "reward")
    for y in ("workers", "timeout")
  ),
  "reward.on_device",
)
"""Settings among these that change neither."""

Tuned = Mapping[tuple[int, float], float]
"""Mean reward of each arm, by its place, and learning rate."""


def train_settings(
  config: ConfigDict, arm: int, rate: float, seed: int
) -> TrainSettings:
  """Makes the run of an arm, by its place, with a learning rate and a seed.

  Raises:
    ValueError: Settings that a training run cannot have.
  """
  words = [f"--config.{word}" for word in config.arms[arm].split()]
  run, _ = command_line.parse(
    words, {}, TRAIN_SETTINGS, default=lambda: config.train
  )
  with run.unlocked():
    run.name = f"arm{arm}-rate{rate:g}-seed{seed}"
    run.optim.learning_rate, run.seed = float(rate), config.train.seed + seed
  return from_config(run.lock())


def config_errors(config: ConfigDict) -> list[str]:
  """Lists what is wrong with the values of a config."""
  wrong = []
  if len(config.arms) < 2 or len(set(config.arms)) < len(config.arms):
    wrong.append(f"arms = {config.arms!r}: give two or more, all different")
  rates = config.learning_rates
  usable = [r for r in rates if type(r) in (int, float) and 0 < r < math.inf]
  if not rates or len({f"{r:g}" for r in usable}) < len(rates):
    remedy = "give finite numbers above 0, all different"
    wrong.append(f"learning_rates = {rates!r}: {remedy}")
  if wrong:
    return wrong
  last_seed = config.seeds + config.tuning_seeds - 1
  for i, arm in enumerate(config.arms):
    try:
      train_settings(config, i, rates[0], last_seed)
    except ValueError as error:
      wrong.append(f"arm {arm!r}: {error}")
    for name in ("seed", "name", "optim.learning_rate"):
      if any(word.split("=")[0] == name for word in arm.split()):
        wrong.append(f"arm {arm!r}: {name} is set by the study")
  return wrong or _incomparable(config) or _unreadable(config)


def _unreadable(config: ConfigDict) -> list[str]:
  """Lists the arms whose model, data or rewards cannot be read."""
  wrong, inputs = [], []
  for i, arm in enumerate(config.arms):
    run = train_settings(config, i, config.learning_rates[0], 0)
    if (run.model, run.data, run.reward) in inputs:
      continue
    inputs.append((run.model, run.data, run.reward))
    try:
      with contextlib.redirect_stdout(None):  # the run's log says it
        start.read_inputs(run, pathlib.Path(run.name))
    except ValueError as error:
      wrong.append(f"arm {arm!r}: {error}")
  return wrong


def _incomparable(config: ConfigDict) -> list[str]:
  """Lists the arms that do not spend what the first does."""
  wrong, spent, evaluated, judges = [], [], [], set()
  if problems := differing(config, ASKED):
    wrong.append(
      f"arms differ in {', '.join(problems)}, so their held-out problems "
      "differ and cannot be compared: use one value for all"
    )
  tuned = len(config.learning_rates) > 1
  for i, arm in enumerate(config.arms):
    run = train_settings(config, i, config.learning_rates[0], 0)
    samples = run.steps * batches_lib.samples_per_step(run)
    spent.append((samples, run.eval.num_prompts))
    judges.add(run.reward.functions[0])
    between = range(run.eval.every, run.steps, run.eval.every)
    evaluated.append({step / run.steps for step in between})
    if run.difficulty.priority != DIFFICULTY_OFF and tuned:
      wrong.append(
        f"arm {arm!r}: rewards of prompts that it draws itself choose no "
        "learning rate: give a single one"
      )
    if run.filter_groups.enable or run.stop.no_improvement:
      wrong.append(
        f"arm {arm!r}: with filter_groups.enable or stop.no_improvement a run "
        "samples as much as it needs, and arms are compared at equal samples"
      )
    elif not samples or spent[i] != spent[0]:
      wrong.append(
        f"arm {arm!r}: {samples} completions a run and {spent[i][1]} held-out "
        "problems, and {} and {} of the first: set steps, batch_size (prompts "
        "a step) and eval.num_prompts for as many".format(*spent[0])
      )
    elif evaluated[i] != evaluated[0]:
      wrong.append(
        f"arm {arm!r}: is evaluated at other parts of a run than the first: "
        "set eval.every for the same"
      )
  if len(judges) > 1:
    wrong.append(
      f"arms differ in the first of reward.functions ({', '.join(judges)}), "
      "which says what a right answer is: put the same one first"
    )
  return wrong


def differing(config: ConfigDict, names: tuple[str, ...]) -> list[str]:
  """Lists the settings in which arms differ, of those that begin so."""
  rate = config.learning_rates[0]
  flat = [
    flatten(to_config(train_settings(config, arm, rate, 0)))
    for arm in range(len(config.arms))
  ]
  return sorted(
    name
    for name in set().union(*flat)
    if name.startswith(names)
    and name not in FREE
    and any(x.get(name) != flat[0].get(name) for x in flat)
  )


def mean_of(rows: Sequence[Mapping[str, Any]], column: str) -> float:
  """Mean of a metric over a run's steps, of those that have it."""
  values = [row[column] for row in rows if row[column] is not None]
  return float(np.mean(values)) if values else float("nan")


def tune(config: ConfigDict, directory: pathlib.Path) -> Tuned:
  """Trains each arm with each learning rate; zeros where there is one rate."""
  seeds = range(config.seeds, config.seeds + config.tuning_seeds)
  rates = map(float, config.learning_rates)
  points = list(itertools.product(range(len(config.arms)), rates))
  if len(config.learning_rates) == 1:  # there is nothing to choose from
    return dict.fromkeys(points, 0.0)
  runs = {
    (arm, rate): [train_settings(config, arm, rate, seed) for seed in seeds]
    for arm, rate in points
  }
  study.train_all([*itertools.chain(*runs.values())], directory)
  tuned = {}
  for point, of_point in runs.items():
    rewards = [
      mean_of(study.run_metrics(directory, run.name), "reward_mean")
      for run in of_point
    ]
    tuned[point] = sum(rewards) / len(rewards)
  return tuned


def best_rates(tuned: Tuned) -> list[float]:
  """Learning rate of the highest mean reward, for each arm in its place.

  Raises:
    SystemExit: an arm never had a reward.
  """
  best = {}
  for (arm, rate), reward in tuned.items():
    if not math.isnan(reward) and reward > best.get(arm, (-math.inf,))[0]:
      best[arm] = reward, rate
  lost = {arm for arm, _ in tuned} - best.keys()
  if lost:
    raise SystemExit(f"error: no run of the arms {sorted(lost)} had a reward")
  return [best[arm][1] for arm in sorted(best)]


def table(
  arms: Sequence[str],
  rates: Sequence[float],
  numbers: Mapping[str, np.ndarray],
) -> list[dict[str, Any]]:
  """Rows of results.csv: means over seeds, and differences from the first arm.

  `numbers` are [arms, seeds], by name. For each NAME there are its mean,
  NAME_more (than the first arm's), and that difference's 95% interval
  (Student's, of the pairs of one seed each), NAME_more_low and NAME_more_high.
  """
  lines = []
  for i, (arm, rate) in enumerate(zip(arms, rates, strict=True)):
    line: dict[str, Any] = {"arm": arm, "learning_rate": rate}
    for name, values in numbers.items():
      line[name] = float(values[i].mean())
      line |= study.with_interval(f"{name}_more", values[i] - values[0])
    lines.append(line)
  return lines


def draw(rows, tuned: Tuned, lines, name: str, path: pathlib.Path) -> None:
  """Draws reward along training, by learning rate, and differences in `name`.

  A single learning rate has no panel. `rows` are those of curves.csv, `lines`
  those of results.csv.
  """
  several = len({rate for _, rate in tuned}) > 1
  with study.picture(path, 1, 2 + several) as axes:
    along, *by_rate, more = axes[0]
    for i, line in enumerate(lines):
      arm, colour = line["arm"], f"C{i}"
      rewards = study.by_step([r for r in rows if r["arm"] == arm], "reward")
      means = [np.mean(x) for x in rewards.values()]
      along.plot([*rewards], means, color=colour, lw=1.5, label=arm)
      rates = sorted(rate for a, rate in tuned if a == i)
      for ax in by_rate:
        ax.plot(rates, [tuned[i, x] for x in rates], "o-", color=colour)
      middle, low, high = (
        line[f"{name}_more{end}"] for end in ("", "_low", "_high")
      )
      ends = [[middle - low], [high - middle]]
      more.errorbar(middle, -i, xerr=ends, fmt="o", color=colour, capsize=3)
    along.set(xlabel="step", ylabel="mean reward")
    along.legend(fontsize=7)
    for ax in by_rate:
      ax.set(xlabel="learning rate (tuning)", xscale="log")
      ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
      ax.minorticks_off()
      ax.set_ylabel("mean reward over training")
    more.axvline(0, color="black", lw=0.8)
    names = [line["arm"].replace(" ", "\n") for line in lines]
    more.set_yticks(range(0, -len(lines), -1), names, fontsize=7)
    more.set_xlabel(f"mean {name} more than the first, 95%")
    for ax in axes[0]:
      ax.grid(alpha=0.3)


def _with_difference(line: Mapping[str, Any], name: str) -> str:
  more, low, high = (line[f"{name}_more{end}"] for end in ("", "_low", "_high"))
  return f"{line[name]:.3f}, {more:+.3f} [{low:+.3f}, {high:+.3f}]"


def write(
  config: ConfigDict,
  directory: pathlib.Path,
  tuned: Tuned,
  rates: Sequence[float],
  runs: Sequence[Sequence[TrainSettings]],
) -> None:
  """Writes the tables and the picture, and prints the result.

  There are a learning rate that was chosen, and runs by seed, for each arm.
  """
  arms, curves = config.arms, []
  columns = {"reward": "reward_mean", "accuracy": "accuracy"}
  if rewarded := differing(config, REWARDED):
    del columns["reward"]
  numbers = {name: np.zeros((len(arms), config.seeds)) for name in columns}
  for i, (arm, of_arm) in enumerate(zip(arms, runs, strict=True)):
    for seed, run in enumerate(of_arm):
      rows = study.run_metrics(directory, run.name)
      for name, column in columns.items():
        numbers[name][i, seed] = mean_of(rows, column)
      for row in rows:
        curve = {"arm": arm, "seed": seed, "step": row["step"]}
        curve |= {"reward": row["reward_mean"], "accuracy": row["accuracy"]}
        curves.append(curve)
  lines = table(arms, rates, numbers)
  tuning = [
    {"arm": arms[i], "learning_rate": rate, "reward": reward}
    for (i, rate), reward in tuned.items()
  ]
  study.write_tables(directory, tuning=tuning, curves=curves, results=lines)
  draw(curves, tuned, lines, next(iter(columns)), directory / "compare.png")
  ends = (min(config.learning_rates), max(config.learning_rates))
  for line in lines:
    edge = len(config.learning_rates) > 1 and line["learning_rate"] in ends
    hint = " (at the edge: give others)" if edge else ""
    means = "; ".join(
      f"mean {name} {_with_difference(line, name)}" for name in columns
    )
    print(
      f"{line['arm']}: learning rate {line['learning_rate']:g}{hint}, {means}"
    )
  if rewarded:
    print(f"rewards are not compared: arms differ in {', '.join(rewarded)}")
  print("differences are from the first arm")
  print(f"tables and picture are in {directory}/")


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  opened = study.study(argv, SETTINGS, config_errors, __doc__)
  with opened as (config, directory):
    tuned = tune(config, directory)
    rates = best_rates(tuned)
    runs = [
      [train_settings(config, arm, rate, seed) for seed in range(config.seeds)]
      for arm, rate in enumerate(rates)
    ]
    # Seed by seed: what is there of an interrupted study can be compared.
    by_seed = zip(*runs, strict=True)
    study.train_all([*itertools.chain(*by_seed)], directory)
    write(config, directory, tuned, rates, runs)


if __name__ == "__main__":
  main(sys.argv[1:])
