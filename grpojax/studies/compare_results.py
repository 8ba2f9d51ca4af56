"""Tables and picture of the study `compare`."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from grpojax.runtime import pictures
from grpojax.statistics.intervals import mean_interval
from grpojax.studies import run as study
from grpojax.studies import training_runs


def mean_reward(directory: pathlib.Path, name: str) -> float:
  """Of a run: of all its steps that had any reward."""
  rows = training_runs.metrics(directory, name)
  rewards = [r["reward_mean"] for r in rows if r["reward_mean"] is not None]
  return float(np.mean(rewards)) if rewards else float("nan")


def _accuracy(directory: pathlib.Path, name: str) -> float:
  return training_runs.summary(directory, name)["accuracy_after"]


def table(
  arms: Sequence[str],
  rates: Sequence[float],
  numbers: Mapping[str, np.ndarray],
) -> list[dict[str, Any]]:
  """One row an arm: means over seeds, and differences from the first arm.

  Args:
    arms: their settings.
    rates: the learning rate of each.
    numbers: what is compared, by name: of each arm and seed, [arms, seeds].

  Returns:
    For each number NAME its mean, NAME_more (than the first arm's), and that
    difference's 95% interval (Student's, of the pairs of one seed each),
    NAME_more_low and NAME_more_high.
  """
  lines = []
  for i, (arm, rate) in enumerate(zip(arms, rates, strict=True)):
    line: dict[str, Any] = {"arm": arm, "learning_rate": rate}
    for name, values in numbers.items():
      more, low, high = mean_interval(values[i] - values[0])
      line[name] = float(values[i].mean())
      line |= {f"{name}_more": more}
      line |= {f"{name}_more_low": low, f"{name}_more_high": high}
    lines.append(line)
  return lines


def curves(
  directory: pathlib.Path, arms: Sequence[str], names: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
  """One row a step of every run of the comparison."""
  return [
    {
      "arm": arm,
      "seed": seed,
      "step": row["step"],
      "reward": row["reward_mean"],
      "accuracy": row["accuracy"],
    }
    for arm, of_arm in zip(arms, names, strict=True)
    for seed, name in enumerate(of_arm)
    for row in training_runs.metrics(directory, name)
  ]


def draw(rows, tuned, lines, path: pathlib.Path) -> None:
  """Reward along training, against the learning rate, and the differences."""
  figure, ((along, by_rate, more),) = study.new_figure(1, 3)
  for i, line in enumerate(lines):
    arm, colour = line["arm"], f"C{i}"
    of_arm = [r for r in rows if r["arm"] == arm and r["reward"] is not None]
    steps = sorted({r["step"] for r in of_arm})
    means = [
      np.mean([r["reward"] for r in of_arm if r["step"] == s]) for s in steps
    ]
    along.plot(steps, means, color=colour, lw=1.5)
    rates = sorted(rate for a, rate in tuned if a == i)
    by_rate.plot(rates, [tuned[i, x] for x in rates], "o-", color=colour)
    middle, low, high = (
      line[f"reward_more{end}"] for end in ("", "_low", "_high")
    )
    more.errorbar(
      middle,
      -i,
      xerr=[[middle - low], [high - middle]],
      fmt="o",
      color=colour,
      capsize=3,
    )
  along.set(xlabel="step", ylabel="mean reward")
  by_rate.set(xlabel="learning rate (tuning)", xscale="log")
  rates = sorted({rate for _, rate in tuned})
  by_rate.set_xticks(rates, [f"{rate:g}" for rate in rates])
  by_rate.minorticks_off()
  by_rate.set_ylabel("mean reward over training")
  more.axvline(0, color="black", lw=0.8)
  more.set_yticks(range(0, -len(lines), -1))
  names = [line["arm"].replace(" ", "\n") for line in lines]
  more.set_yticklabels(names, fontsize=7)
  more.set_xlabel("mean reward more than the first, 95%")
  for axes in (along, by_rate, more):
    axes.grid(alpha=0.3)
  pictures.save_figure(figure, path)


def write(
  config: ConfigDict,
  directory: pathlib.Path,
  tuned: Mapping[tuple[int, float], float],
  rates: Sequence[float],
  names: Sequence[Sequence[str]],
) -> None:
  """Writes the tables and the picture, and prints the result.

  Args:
    config: the study's.
    directory: the study's.
    tuned: mean reward of each arm, by its place, and learning rate.
    rates: those that were chosen, one an arm.
    names: of the runs of the comparison, for each arm and seed.
  """
  arms = config.arms
  numbers = {
    name: np.array([[read(directory, n) for n in of_arm] for of_arm in names])
    for name, read in (("reward", mean_reward), ("accuracy", _accuracy))
  }
  lines = table(arms, rates, numbers)
  tuning = [
    {"arm": arms[i], "learning_rate": rate, "reward": reward}
    for (i, rate), reward in tuned.items()
  ]
  rows = curves(directory, arms, names)
  study.write_csv(directory / "tuning.csv", tuning)
  study.write_csv(directory / "curves.csv", rows)
  study.write_csv(directory / "results.csv", lines)
  draw(rows, tuned, lines, directory / "compare.png")
  ends = (min(config.learning_rates), max(config.learning_rates))
  for line in lines:
    edge = len(config.learning_rates) > 1 and line["learning_rate"] in ends
    print(
      f"{line['arm']}: learning rate {line['learning_rate']:g}"
      f"{' (at the edge: give others)' if edge else ''}, mean reward "
      f"{line['reward']:.3f}, {line['reward_more']:+.3f} "
      f"[{line['reward_more_low']:+.3f}, {line['reward_more_high']:+.3f}]; "
      f"accuracy {line['accuracy']:.3f}, {line['accuracy_more']:+.3f} "
      f"[{line['accuracy_more_low']:+.3f}, {line['accuracy_more_high']:+.3f}]"
    )
  print(f"differences are from the first; tables are in {directory}/")
