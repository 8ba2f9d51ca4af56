"""Compares training settings at equal samples and tuned learning rates.

    python -m grpojax.studies.compare [--config.arms="SETTINGS, SETTINGS, ..."]
                                      [--config.key=value ...] [--run_dir=DIR]

An arm is a list of settings of `grpojax.train` separated by spaces, such as
"advantage=score_weighted score_power=1". It gets the learning rate with the
highest mean reward on separate tuning seeds. With the same seed all arms have
the same prompts and first samples. So each arm is compared with the first arm
seed by seed: by the mean reward of fresh samples over training, and by the
held-out accuracy, averaged over evaluations every `train.eval.every` steps. If
arms differ in rewards, sampling distribution or choice of prompts, only the
accuracy is compared. DIR, by default runs/compare, receives

    tuning.csv      a row per arm and learning rate
    curves.csv      a row per step of the compared runs
    results.csv     a row per arm: means, and differences from the first arm
                    with 95% intervals over seeds
    summary.json, compare.png, and output of the training runs in logs/
"""

import contextlib
import itertools
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from grpojax.core.options import ONE_OR_MORE
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.configs import flatten
from grpojax.runtime.cli.settings import changed, setting
from grpojax.studies import run as study
from grpojax.training.config import SETTINGS as TRAIN_SETTINGS
from grpojax.training.config import from_config, to_config
from grpojax.training.run import start
from grpojax.training.settings import batches
from grpojax.training.settings.inputs import DIFFICULTY_OFF
from grpojax.training.settings.run import Facts, TrainSettings

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
    "arms: settings separated by spaces; the first arm is the baseline",
  ),
  learning_rates=setting((1.25e-4, 3e-4, 7.5e-4), "rates tried for each arm"),
  tuning_seeds=setting(2, "tuning runs per arm and rate", within=ONE_OR_MORE),
  seeds=setting(5, "compared runs per arm", within="[2, inf)"),
  train=changed(
    TRAIN_SETTINGS,
    study.QUICK | {"batch_size": 16, "eval.every": 24, "eval.num_prompts": 256},
  ),
)

ASKED = ("data.", "environment.", "sampling.max_new_tokens")
"""Settings of held-out problems and answers; they must be equal in all arms."""

REWARDED = (
  "reward.",
  "sampling.temperature",
  "sampling.top_",
  "sampling.min_p",
  "difficulty.priority",
)
"""Settings that must be equal in all arms to compare mean rewards."""

FREE = (
  "environment.credit",
  "environment.workers",
  "environment.timeout",
  "reward.workers",
  "reward.timeout",
  "reward.on_device",
)
"""Exceptions to `ASKED` and `REWARDED`: settings that influence neither."""

# Training metrics by column of curves.csv.
METRICS = {"reward": "reward_mean", "accuracy": "accuracy"}

Tuned = Float[np.ndarray, "arms rates"]  # mean rewards


def train_settings(
  config: ConfigDict, arm: int, rate: float, seed: int
) -> TrainSettings:
  """Returns the settings of an arm's run; ValueError if they are invalid."""
  words = [f"--config.{word}" for word in config.arms[arm].split()]
  run, _ = command_line.parse(
    words, {}, TRAIN_SETTINGS, default=lambda: config.train
  )
  with run.unlocked():
    run.name = f"arm{arm}-rate{rate:g}-seed{seed}"
    run.optim.learning_rate = float(rate)
    run.seed = config.train.seed + seed
  return from_config(run.lock())


def _first_runs(config: ConfigDict) -> list[TrainSettings]:
  """Returns each arm's settings with the first learning rate and seed."""
  rate = config.learning_rates[0]
  return [train_settings(config, i, rate, 0) for i in range(len(config.arms))]


def config_errors(config: ConfigDict) -> list[str]:
  """Lists errors that range checks miss: equal arms, incompatible settings."""
  wrong = []
  if len(config.arms) < 2 or len(set(config.arms)) < len(config.arms):
    wrong.append(f"arms = {config.arms!r}: give two or more, all different")
  rates = config.learning_rates
  usable = [r for r in rates if type(r) in (int, float) and 0 < r < math.inf]
  if not rates or len({f"{r:g}" for r in usable}) < len(rates):
    wrong.append(
      f"learning_rates = {rates!r}: give finite numbers above 0, all different"
    )
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
        wrong.append(f"arm {arm!r}: remove {name}, which the study sets")
  return wrong or [*_incomparable(config)] or _unreadable(config)


def _unreadable(config: ConfigDict) -> list[str]:
  """Lists the arms whose model, data or rewards cannot be read."""
  wrong = []
  checked = []
  for arm, run in zip(config.arms, _first_runs(config), strict=True):
    inputs = run.model, run.data, run.reward
    if inputs in checked:
      continue
    checked.append(inputs)
    try:
      with contextlib.redirect_stdout(None):  # it is also in the run's log
        start.read_inputs(run, Facts(), pathlib.Path(run.name))
    except ValueError as error:
      wrong.append(f"arm {arm!r}: {error}")
  return wrong


def _budget(run: TrainSettings) -> tuple[tuple[int, int], set[float]]:
  """Returns (completions, held-out problems), and times of evaluations."""
  samples = run.steps * batches.samples_per_step(run)
  evaluations = range(run.eval.every, run.steps, run.eval.every)
  return (samples, run.eval.num_prompts), {x / run.steps for x in evaluations}


def _incomparable(config: ConfigDict) -> Iterator[str]:
  """Yields reasons why arms cannot be compared at equal samples."""
  if problems := differing(config, ASKED):
    yield (
      f"arms differ in {', '.join(problems)}, so their held-out problems "
      "differ and cannot be compared: use the same value for all"
    )
  runs = _first_runs(config)
  first_spent, first_evaluated = _budget(runs[0])
  for arm, run in zip(config.arms, runs, strict=True):
    prefix = f"arm {arm!r}:"
    spent, evaluated = _budget(run)
    if run.difficulty.priority != DIFFICULTY_OFF and config.learning_rates[1:]:
      yield (
        f"{prefix} difficulty.priority chooses the prompts, so rewards cannot "
        "choose a learning rate: give a single rate"
      )
    if run.filter_groups.enable or run.stop.no_improvement:
      yield (
        f"{prefix} arms are compared at equal samples, which filter_groups."
        "enable and stop.no_improvement do not allow: turn them off"
      )
    elif not spent[0] or spent != first_spent:
      text = "{} completions per run and {} held-out problems, but {} and {}"
      yield (
        f"{prefix} {text.format(*spent, *first_spent)} for the first arm: make "
        "them equal by steps, batch_size (prompts per step), eval.num_prompts"
      )
    elif evaluated != first_evaluated:
      yield f"{prefix} set eval.every to evaluate when the first arm does"
  judges = {run.reward.functions[0] for run in runs}
  if len(judges) > 1:
    yield (
      f"arms differ in the first of reward.functions ({', '.join(judges)}), "
      "which decides if an answer is right: put the same function first"
    )


def differing(config: ConfigDict, names: tuple[str, ...]) -> list[str]:
  """Lists the settings with these prefixes that differ between arms."""
  flat = [flatten(to_config(run)) for run in _first_runs(config)]
  return sorted(
    name
    for name in set().union(*flat)
    if name.startswith(names)
    and name not in FREE
    and any(x.get(name) != flat[0].get(name) for x in flat)
  )


def tune(config: ConfigDict, directory: pathlib.Path) -> Tuned:
  """Trains each arm at each learning rate; returns the mean rewards.

  With a single rate nothing is trained, and the result is 0.
  """
  arms = range(len(config.arms))
  rates = config.learning_rates
  if len(rates) == 1:
    return np.zeros((len(arms), 1))
  seeds = range(config.seeds, config.seeds + config.tuning_seeds)
  points = list(itertools.product(arms, rates, seeds))
  labels = [{"arm": i, "rate": rate, "seed": n} for i, rate, n in points]
  runs = [train_settings(config, *point) for point in points]
  rows = study.trained(labels, runs, directory, METRICS)
  means = study.run_means(rows, "reward", labels)
  return means.reshape(len(arms), len(rates), -1).mean(-1)


def best_rates(rates: Sequence[float], tuned: Tuned) -> list[float]:
  """Returns each arm's best learning rate; exits if an arm has no reward."""
  if lost := np.flatnonzero(np.isnan(tuned).all(1)).tolist():
    raise SystemExit(f"error: no run of arms {lost} had a reward: see logs/")
  return [float(rates[i]) for i in np.nanargmax(tuned, axis=1)]


def table(
  arms: Sequence[str], rates: Sequence[float], numbers: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
  """Returns the rows of results.csv: means over seeds by arm.

  `numbers` are [arms, seeds] by NAME. NAME_more is the mean paired difference
  from the first arm, NAME_more_low and NAME_more_high its 95% interval.
  """
  lines = []
  for i, (arm, rate) in enumerate(zip(arms, rates, strict=True)):
    line: dict[str, Any] = {"arm": arm, "learning_rate": rate}
    for name, values in numbers.items():
      line[name] = float(values[i].mean())
      line |= study.with_interval(f"{name}_more", values[i] - values[0])
    lines.append(line)
  return lines


def draw(axes, config: ConfigDict, rows, tuned: Tuned, lines, name) -> None:
  """Plots rewards by step, by learning rate if several, and the differences.

  `rows` are from curves.csv, `lines` from results.csv.
  """
  curve, *by_rate, more = axes[0]
  order = np.argsort(config.learning_rates)
  rates = np.array(config.learning_rates)[order]
  for i, line in enumerate(lines):
    arm = line["arm"]
    colour = f"C{i}"
    rewards = study.by_step(study.select(rows, arm=arm), "reward")
    means = [np.mean(x) for x in rewards.values()]
    curve.plot([*rewards], means, color=colour, lw=1.5, label=arm)
    for ax in by_rate:
      ax.plot(rates, tuned[i, order], "o-", color=colour)
    middle, low, high = study.ends(line, f"{name}_more")
    error = [[middle - low], [high - middle]]
    more.errorbar(middle, -i, xerr=error, fmt="o", color=colour, capsize=3)
  curve.set(xlabel="step", ylabel="mean reward")
  curve.legend(fontsize=7)
  for ax in by_rate:
    ax.set(xlabel="learning rate (tuning)", ylabel="mean reward over training")
    ax.set_xscale("log")
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.minorticks_off()
  more.axvline(0, color="black", lw=0.8)
  names = [line["arm"].replace(" ", "\n") for line in lines]
  more.set_yticks(range(0, -len(lines), -1), names, fontsize=7)
  more.set_xlabel(f"mean {name} minus the first arm's, 95%")
  for ax in axes[0]:
    ax.grid(alpha=0.3)


def _lines(config: ConfigDict, rows, compared: Sequence[str]) -> Iterator[str]:
  """Yields a line to print for each row of results.csv."""
  low, high = min(config.learning_rates), max(config.learning_rates)
  for row in rows:
    edge = low < high and row["learning_rate"] in (low, high)
    hint = " (at the edge: try further rates)" if edge else ""
    means = "; ".join(
      "mean {} {:.3f}, {:+.3f} [{:+.3f}, {:+.3f}]".format(
        name, row[name], *study.ends(row, f"{name}_more")
      )
      for name in compared
    )
    yield f"{row['arm']}: learning rate {row['learning_rate']:g}{hint}, {means}"


def compute(config: ConfigDict, directory: pathlib.Path) -> study.Results:
  """Tunes the learning rates, then compares the arms at their best rates."""
  tuned = tune(config, directory)
  rates = best_rates(config.learning_rates, tuned)
  arms = config.arms
  seeds = range(config.seeds)
  # Train seed by seed, so that an interrupted study has whole seeds.
  points = list(itertools.product(seeds, range(len(arms))))
  labels = [{"arm": arms[i], "seed": seed} for seed, i in points]
  runs = [train_settings(config, i, rates[i], seed) for seed, i in points]
  curves = study.trained(labels, runs, directory, METRICS)
  curves.sort(key=lambda row: arms.index(row["arm"]))
  rewarded = differing(config, REWARDED)
  compared = ["accuracy"] if rewarded else [*METRICS]
  means = {name: study.run_means(curves, name, labels) for name in compared}
  by_arm = {name: x.reshape(len(seeds), -1).T for name, x in means.items()}
  rows = table(arms, rates, by_arm)
  lines = [*_lines(config, rows, compared)]
  if rewarded:
    differences = ", ".join(rewarded)
    lines.append(f"rewards are not compared: arms differ in {differences}")
  tuning = [
    {"arm": arm, "learning_rate": float(rate), "reward": reward}
    for arm, rewards in zip(arms, tuned.tolist(), strict=True)
    for rate, reward in zip(config.learning_rates, rewards, strict=True)
  ]
  return study.Results(
    tables={"tuning": tuning, "curves": curves, "results": rows},
    lines=[*lines, "differences are from the first arm"],
    draw=lambda axes: draw(axes, config, curves, tuned, rows, compared[0]),
    panels=(1, 2 + (len(config.learning_rates) > 1)),
    summary={"compared": compared, "results": rows},
  )


def main(argv: list[str]) -> None:
  """Starts or resumes the study with the command line `argv`."""
  study.execute(argv, SETTINGS, config_errors, __doc__, compute)


if __name__ == "__main__":
  main(sys.argv[1:])
