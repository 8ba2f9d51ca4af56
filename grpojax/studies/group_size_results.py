"""Tables, comparison and picture of the study `group_size`."""

import math
import pathlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from grpojax.runtime import pictures, records
from grpojax.statistics.intervals import mean_interval
from grpojax.studies import run as study
from grpojax.studies import training_runs
from grpojax.training.group_sizes import AUTO


def curves(config: ConfigDict, directory: pathlib.Path) -> list[dict[str, Any]]:
  """One row a training step of every run."""
  rows = []
  for budget in config.budgets:
    for size in (*config.group_sizes, AUTO):
      for seed in range(config.seeds):
        name = f"N{budget}-G{size}-seed{seed}"
        rows += [
          {
            "budget": budget,
            "run": str(size),
            "seed": seed,
            "step": row["step"],
            "group_size": row["group_size"],
            "reward": row["reward_mean"],
            "accuracy": row["accuracy"],
            "optimal_group_size": row.get("optimal_group_size"),
            "c1": row.get("c1"),
            "c3": row.get("c3"),
          }
          for row in training_runs.metrics(directory, name)
        ]
  return rows


def _interval(values) -> list[float]:
  return list(mean_interval(values))


def table(config: ConfigDict, rows) -> list[dict[str, Any]]:
  """Means over a whole training run, over seeds with 95% intervals.

  The reward is that of fresh samples for new training prompts: the objective
  itself, at every step. Seeds differ in their first samples, and all group
  sizes share that, so the intervals are of a run's difference from the mean of
  the fixed sizes with its seed.
  """
  out = []
  for budget in config.budgets:
    sizes = (*config.group_sizes, AUTO)
    runs = {
      (size, seed): [
        r
        for r in rows
        if (r["budget"], r["run"], r["seed"]) == (budget, str(size), seed)
      ]
      for size in sizes
      for seed in range(config.seeds)
    }
    lines = [{"budget": budget, "run": str(size)} for size in sizes]
    for name in ("reward", "accuracy"):
      means = np.array(
        [
          [
            np.mean([r[name] for r in runs[x, s] if r[name] is not None])
            for s in range(config.seeds)
          ]
          for x in sizes
        ]
      )
      seeds = means[:-1].mean(0)  # those of the fixed sizes
      centred = means - seeds + seeds.mean()
      for line, values, size_means in zip(lines, means, centred, strict=True):
        mean, low, high = _interval(size_means)
        line |= {name: mean, f"{name}_low": low, f"{name}_high": high}
        line[f"{name}s"] = values.tolist()
    out += lines
  return out


def compare(config: ConfigDict, lines) -> dict[str, Any]:
  """For each budget: best and worst fixed size, and the automatic run."""
  comparison = {}
  for budget in config.budgets:
    of_budget = [line for line in lines if line["budget"] == budget]
    auto = next(line for line in of_budget if line["run"] == AUTO)
    fixed = [line for line in of_budget if line["run"] != AUTO]
    best = max(fixed, key=lambda line: line["reward"])
    worst = min(fixed, key=lambda line: line["reward"])

    def against(other, auto=auto):  # the same seeds: the same first samples
      return _interval(np.subtract(auto["rewards"], other["rewards"]))

    comparison[str(budget)] = {
      "best_group_size": int(best["run"]),
      "worst_group_size": int(worst["run"]),
      "best_reward": best["reward"],
      "worst_reward": worst["reward"],
      "auto_reward": auto["reward"],
      "best_minus_worst": _interval(
        np.subtract(best["rewards"], worst["rewards"])
      ),
      "auto_minus_best": against(best),
      "auto_minus_worst": against(worst),
    }
  return comparison


def _along(config: ConfigDict, rows, budget: int):
  """G* of the automatic runs of a budget, from averages of c1 and c3.

  Over the seeds and the whole run: single estimates are too noisy.
  """
  diagnosed = [
    r
    for r in rows
    if r["budget"] == budget and r["run"] == AUTO and r["c1"] is not None
  ]
  steps = sorted({r["step"] for r in diagnosed})
  c1, c3 = (
    np.array(
      [np.mean([r[c] for r in diagnosed if r["step"] == s]) for s in steps]
    )
    for c in ("c1", "c3")
  )
  c1, c3 = np.cumsum(c1), np.cumsum(c3)
  with np.errstate(divide="ignore", invalid="ignore"):
    best = 1 + np.sqrt(np.maximum(c3, 0) / np.maximum(c1, 0))
  return np.array(steps), best


def draw(config: ConfigDict, rows, lines, prediction, path) -> None:
  """Accuracy against steps, mean reward against G, and G along the runs."""
  figure, grid = study.new_figure(len(config.budgets), 3)
  colour = figure_colours(len(config.group_sizes))
  for axes, budget in zip(grid, config.budgets, strict=True):
    _draw_curves(axes[0], config, rows, budget, colour)
    _draw_sizes(axes[1], lines, budget, prediction)
    _draw_choice(axes[2], config, rows, budget)
    axes[0].set_title(f"N = {budget} samples a step", fontsize=10)
  pictures.save_figure(figure, path)


def figure_colours(count: int):
  """`count` colours from light to dark."""
  from matplotlib import colormaps

  return [colormaps["viridis_r"](x) for x in np.linspace(0.1, 0.95, count)]


def _draw_curves(axes, config: ConfigDict, rows, budget, colours) -> None:
  for size, colour in zip(
    (*config.group_sizes, AUTO), [*colours, "crimson"], strict=True
  ):
    of_size = [
      r for r in rows if (r["budget"], r["run"]) == (budget, str(size))
    ]
    of_size = [r for r in of_size if r["accuracy"] is not None]
    steps = sorted({r["step"] for r in of_size})
    values = np.array(
      [[r["accuracy"] for r in of_size if r["step"] == s] for s in steps]
    )
    mean, low, high = np.array([_interval(v) for v in values]).T
    name = f"G = {size}" if size != AUTO else AUTO
    axes.plot(steps, mean, color=colour, label=name, lw=1.5)
    axes.fill_between(steps, low, high, color=colour, alpha=0.12, lw=0)
  axes.set(xlabel="step", ylabel="held-out accuracy (greedy)", ylim=(0, 1.02))
  axes.legend(fontsize=7, loc="lower right")
  axes.grid(alpha=0.3)


def _log_sizes(axes, which: str, sizes) -> None:
  """Makes an axis, "x" or "y", logarithmic with the group sizes as ticks."""
  getattr(axes, f"set_{which}scale")("log", base=2)
  names = [str(size) for size in sizes]
  limits = (min(sizes) / 1.5, max(sizes) * 1.5)
  settings = {"ticks": sizes, "ticklabels": names, "lim": limits}
  axes.set(**{f"{which}{name}": value for name, value in settings.items()})


def _draw_sizes(axes, lines, budget, prediction) -> None:
  fixed = [x for x in lines if x["budget"] == budget and x["run"] != AUTO]
  auto = next(x for x in lines if x["budget"] == budget and x["run"] == AUTO)
  sizes = [int(line["run"]) for line in fixed]
  mean, low, high = (
    np.array([line[f"reward{end}"] for line in fixed])
    for end in ("", "_low", "_high")
  )
  axes.errorbar(sizes, mean, (mean - low, high - mean), fmt="o-", capsize=3)
  axes.axhline(auto["reward"], color="crimson", label="auto", lw=1.5)
  axes.axhspan(
    auto["reward_low"], auto["reward_high"], color="crimson", alpha=0.12, lw=0
  )
  _log_sizes(axes, "x", sizes)
  low, high, best = (
    prediction[f"optimal_group_size{end}"] for end in ("_low", "_high", "")
  )
  if low is not None:  # or nothing could be predicted
    high = high or 2 * max(sizes)
    axes.axvspan(low, high, color="gray", alpha=0.2, lw=0, label="95%")
  if best is not None:
    axes.axvline(best, color="black", ls="--", label=f"predicted {best:.0f}")
  axes.set(xlabel="group size G", ylabel="mean reward over training")
  axes.legend(fontsize=7)
  axes.grid(alpha=0.3)


def _draw_choice(axes, config: ConfigDict, rows, budget) -> None:
  for seed in range(config.seeds):
    key = (budget, AUTO, seed)
    of_run = [r for r in rows if (r["budget"], r["run"], r["seed"]) == key]
    axes.step(
      [r["step"] for r in of_run],
      [r["group_size"] for r in of_run],
      where="mid",
      alpha=0.7,
      lw=max(4 - seed, 1),
      label=f"auto, seed {seed}",
    )
  steps, best = _along(config, rows, budget)
  finite = np.isfinite(best)
  axes.plot(
    steps[finite], best[finite], "k--", label="G* of all estimates so far"
  )
  _log_sizes(axes, "y", config.group_sizes)
  axes.set(xlabel="step", ylabel="group size")
  axes.legend(fontsize=7)
  axes.grid(alpha=0.3)


def write(config: ConfigDict, directory: pathlib.Path, prediction) -> None:
  """Writes the tables, the summary and the picture, and prints the result."""
  rows = curves(config, directory)
  lines = table(config, rows)
  study.write_csv(directory / "curves.csv", rows)
  plain = [
    {k: v for k, v in x.items() if not isinstance(v, list)} for x in lines
  ]
  study.write_csv(directory / "results.csv", plain)
  along = {}
  for budget in config.budgets:
    best = _along(config, rows, budget)[1]
    # Without a diagnosis that had enough prompts there is none.
    along[str(budget)] = float(best[-1]) if len(best) else math.nan
  comparison = compare(config, lines)
  records.write_json(
    directory / "summary.json",
    {"predicted": prediction, "along_training": along, "measured": comparison},
  )
  draw(config, rows, lines, prediction, directory / "group_size.png")
  names = [f"optimal_group_size{end}" for end in ("", "_low", "_high")]
  best, low, high = (prediction[name] for name in names)
  print(f"predicted G* {best} [{low}, {high}] before training")
  for line in plain:
    print(
      f"N = {line['budget']}  G = {line['run']:>4}: mean reward "
      f"{line['reward']:.3f} [{line['reward_low']:.3f}, "
      f"{line['reward_high']:.3f}]  mean accuracy {line['accuracy']:.3f} "
      f"[{line['accuracy_low']:.3f}, {line['accuracy_high']:.3f}]"
    )
  for budget, x in comparison.items():
    print(
      f"N = {budget}: best G {x['best_group_size']}, auto - best "
      f"{x['auto_minus_best'][0]:+.3f}, auto - worst "
      f"{x['auto_minus_worst'][0]:+.3f}; G* along training "
      f"{along[budget]:.0f}"
    )
  print(f"tables and picture are in {directory}/")
