"""Figure 5: accuracy during training by group size, at a fixed budget.

    python -m grpojax.studies.group_size [--config=configs/figure5.py]
                                         [--config.key=value ...]
                                         [--run_dir=DIR]

At each budget of N = B G samples per step it trains with every group size and
with group_size = "auto", on several seeds. Predictions G* = 1 + sqrt(c3 / c1)
come from diagnoses of the initial policy and of automatic runs. DIR, by default
runs/group_size, receives

    prediction.json   the first diagnosis
    curves.csv        a row per training step and run
    results.csv       a row per budget and group size: mean reward and accuracy
                      over training with 95% intervals over seeds
    summary.json      G* predicted and measured, the automatic runs compared
    group_size.png, and output of the training runs in logs/
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.core.options import ONE_OR_MORE
from grpojax.core.random_keys import seed_key
from grpojax.runtime.cli.configs import below
from grpojax.runtime.cli.settings import changed, section, setting
from grpojax.runtime.files import records
from grpojax.statistics import diagnostics
from grpojax.statistics.intervals import mean_interval
from grpojax.studies import run as study
from grpojax.training import policies
from grpojax.training.config import SETTINGS as TRAIN_SETTINGS
from grpojax.training.config import from_config
from grpojax.training.data import prompts, splits
from grpojax.training.run import setup
from grpojax.training.settings.run import AUTO, Facts, TrainSettings, completed
from grpojax.training.step import draws, sampling, scoring

FLAGS = study.FLAGS
SETTINGS = study.settings(
  "group_size",
  seeds=setting(3, "runs per budget and group size", within="[2, inf)"),
  budgets=setting((128, 256), "samples per step, N"),
  group_sizes=setting((4, 8, 16, 32, 64, 128), "fixed group sizes"),
  predict=section(
    "the diagnosis before training",
    prompts=setting(128, "prompts", within="[3, inf)"),
    group_size=setting(16, "completions per prompt", within="[4, inf)"),
    tangents=setting(16, "random directions", within="[2, inf)"),
    batch=setting(16, "prompts per batch", within=ONE_OR_MORE),
  ),
  train=changed(
    TRAIN_SETTINGS,
    study.QUICK
    | {
      "optim.learning_rate": 5e-5,
      "eval.every": 4,
      "eval.num_prompts": 128,
      "auto_group_size.start": 32,  # too large, to show that it moves
      "auto_group_size.largest": 64,
      "diagnostics.every": 2,  # in automatic runs only
      "diagnostics.share": 1.0,
    },
  ),
)

METRICS = {
  "group_size": "group_size",
  "reward": "reward_mean",
  **{x: x for x in ("accuracy", "optimal_group_size", "c1", "c3")},
}
"""Training metrics by column of curves.csv."""


def train_settings(
  config: ConfigDict, budget: int, group_size: int | str, seed: int
) -> TrainSettings:
  """Returns the settings of a training run; ValueError if they are invalid."""
  run = config.train.copy_and_resolve_references()
  auto = group_size == AUTO
  with run.unlocked(), run.ignore_type():
    run.name = f"N{budget}-G{group_size}-seed{seed}"
    run.seed = seed
    run.group_size = group_size
    first = run.auto_group_size.start if auto else group_size
    run.batch_size = budget // first
    largest = group_size
    if auto:  # the largest size that leaves 3 prompts per step to diagnose
      largest = run.auto_group_size.largest
      while largest > first and budget // largest < 3:
        largest //= 2
      run.auto_group_size.largest = largest
    else:
      run.diagnostics.every = 0
    fewest = budget // largest
    # Fewer prompts allow fewer micro-batches.
    micro = run.optim.micro_batches
    while micro > 1 and fewest % (micro * run.optim.minibatches):
      micro -= 1
    run.optim.micro_batches = micro
  return from_config(run.lock())


def _sizes(config: ConfigDict) -> list[str]:
  """Returns the group sizes as texts, like the tables' column `run`."""
  return [*map(str, config.group_sizes), AUTO]


def _points(config: ConfigDict):
  """Yields (seed, budget, group size) of all runs, seed after seed."""
  sizes = [*config.group_sizes, AUTO]
  return itertools.product(range(config.seeds), config.budgets, sizes)


def config_errors(config: ConfigDict) -> list[str | tuple[str, str]]:
  """Lists errors that range checks miss, such as incompatible settings."""
  wrong = study.size_errors(config, "budgets", "group_sizes")
  p = config.predict
  if p.prompts % p.batch:
    remedy = f"must be a multiple of predict.batch = {p.batch}"
    wrong.append(("predict.prompts", remedy))
  if wrong:
    return wrong
  for seed, budget, size in _points(config):
    if size != AUTO and budget % size:
      return [("group_sizes", f"{size} must divide the budget {budget}")]
    try:
      train_settings(config, budget, size, seed)
    except ValueError as error:
      why = below("train", f"{error}")
      return [f"budget {budget}, group size {size}: {why}"]
  return []


def predict(config: ConfigDict) -> dict[str, Any]:
  """Returns the diagnosis of the initial policy on training prompts."""
  p = config.predict
  settings = dataclasses.replace(
    train_settings(config, config.budgets[0], config.group_sizes[0], seed=0),
    seed=config.train.seed,
    group_size=p.group_size,
    batch_size=p.batch,
  )
  policy = setup.with_weights(settings, setup.open_policy(settings))
  distribution = settings.sampling.distribution
  sampler = sampling.make_sampler(settings, policy, p.group_size, distribution)
  project = policies.jit(
    policy,
    functools.partial(
      diagnostics.score_projections,
      tangents=p.tangents,
      micro_batches=p.batch,
      vectorized=policy.vmappable,
      sampling=distribution,
      chunk_size=settings.optim.update.chunk_size,
    ),
  )
  sampling_key, tangents_key = jax.random.split(seed_key(settings.seed))
  split = splits.load_split(settings, policy, "train")
  longest = splits.longest_prompt(split)
  settings = completed(settings, Facts(prompt_length=longest))
  batches = prompts.training_batches(
    settings, policy, split.examples, p.group_size
  )
  projections = []
  rewards = []
  with scoring.open_reward_pool(settings) as reward_pool:
    for i in range(p.prompts // p.batch):
      batch, examples = next(batches)
      key = jax.random.fold_in(sampling_key, i)
      args = policy.params, jax.device_put(batch), examples, key
      source = draws.Source(policy, sampler, reward_pool)
      drawn = draws.draw(source, *args, draws.Timer()).collect()
      rewards.append(drawn.rewards.rewards)
      # All prompts need the same directions: their projections are multiplied.
      projected = project(policy.params, drawn.rollout, tangents_key)
      projections.append(np.asarray(projected))
      print(f"diagnosis: {(i + 1) * p.batch}/{p.prompts} prompts", flush=True)
  rewards = np.concatenate(rewards)
  diagnosis = diagnostics.diagnose(
    jax.numpy.asarray(np.concatenate(projections, axis=1)),
    jax.numpy.asarray(rewards),
  )
  row = diagnostics.metrics(diagnosis) | {"reward_mean": np.mean(rewards)}
  return {name: float(x) for name, x in row.items()}


def table(config: ConfigDict, rows: study.Rows) -> list[dict[str, Any]]:
  """Returns means over training, averaged over seeds with 95% intervals.

  The reward of fresh samples for new prompts at every step estimates the
  objective itself. Runs of the same seed share first samples, so intervals are
  of a run's difference from the mean of the fixed-size runs with its seed.
  """
  sizes = _sizes(config)
  table_rows = []
  for budget in config.budgets:
    lines = [{"budget": budget, "run": size} for size in sizes]
    runs = [x | {"seed": i} for x in lines for i in range(config.seeds)]
    for name in ("reward", "accuracy"):
      means = study.run_means(rows, name, runs).reshape(len(sizes), -1)
      by_seed = means[:-1].mean(0)  # over the fixed sizes
      centred = means - by_seed + by_seed.mean()
      for line, values, shifted in zip(lines, means, centred, strict=True):
        line |= study.with_interval(name, shifted)
        line |= {f"{name}s": values.tolist()}
    table_rows += lines
  return table_rows


def compare(config: ConfigDict, lines) -> dict[str, Any]:
  """Compares automatic runs with the best and worst fixed size, by budget."""

  def difference(a, b):  # paired, because equal seeds share first samples
    return list(mean_interval(np.subtract(a["rewards"], b["rewards"])))

  comparison = {}
  for budget in config.budgets:
    *fixed, auto = study.select(lines, budget=budget)
    best = max(fixed, key=lambda line: line["reward"])
    worst = min(fixed, key=lambda line: line["reward"])
    comparison[str(budget)] = {
      "best_group_size": int(best["run"]),
      "worst_group_size": int(worst["run"]),
      "best_reward": best["reward"],
      "worst_reward": worst["reward"],
      "auto_reward": auto["reward"],
      "best_minus_worst": difference(best, worst),
      "auto_minus_best": difference(auto, best),
      "auto_minus_worst": difference(auto, worst),
    }
  return comparison


def _along(rows, budget: int):
  """Returns the steps of a budget's automatic runs, and G* at each.

  G* is from c1 and c3, averaged over seeds and earlier steps to reduce noise.
  """
  automatic = study.select(rows, budget=budget, run=AUTO)
  at_step = study.by_step(automatic, "c1"), study.by_step(automatic, "c3")
  c1, c3 = (np.cumsum([np.mean(x) for x in by.values()]) for by in at_step)
  with np.errstate(divide="ignore", invalid="ignore"):
    best = 1 + np.sqrt(np.maximum(c3, 0) / np.maximum(c1, 0))
  return np.array([*at_step[0]]), best


def draw(grid, config: ConfigDict, rows, lines, prediction) -> None:
  """Plots accuracy by step, mean reward by G, and the automatic G by step."""
  for axes, budget in zip(grid, config.budgets, strict=True):
    _draw_curves(axes[0], config, study.select(rows, budget=budget))
    _draw_sizes(axes[1], study.select(lines, budget=budget), prediction)
    _draw_choice(axes[2], config, rows, budget)
    axes[0].set_title(f"N = {budget} samples per step", fontsize=10)
    for ax in axes:
      ax.grid(alpha=0.3)


def _draw_curves(axes, config: ConfigDict, rows) -> None:
  from matplotlib import colormaps

  shades = np.linspace(0.1, 0.95, len(config.group_sizes))  # light to dark
  colours = [*map(colormaps["viridis_r"], shades), "crimson"]
  for size, colour in zip(_sizes(config), colours, strict=True):
    values = study.by_step(study.select(rows, run=size), "accuracy")
    intervals = [mean_interval(np.array(x)) for x in values.values()]
    mean, low, high = np.array(intervals).T
    name = f"G = {size}" if size != AUTO else AUTO
    axes.plot([*values], mean, color=colour, label=name, lw=1.5)
    axes.fill_between([*values], low, high, color=colour, alpha=0.12, lw=0)
  axes.set(xlabel="step", ylabel="held-out accuracy (greedy)", ylim=(0, 1.02))
  axes.legend(fontsize=7, loc="lower right")


def _draw_sizes(axes, lines, prediction) -> None:
  *fixed, auto = lines
  sizes = [int(line["run"]) for line in fixed]
  mean, low, high = np.array([study.ends(x, "reward") for x in fixed]).T
  axes.errorbar(sizes, mean, (mean - low, high - mean), fmt="o-", capsize=3)
  mean, *ends = study.ends(auto, "reward")
  axes.axhline(mean, color="crimson", label="auto", lw=1.5)
  axes.axhspan(*ends, color="crimson", alpha=0.12, lw=0)
  study.size_axis(axes, sizes)
  axes.set_xlim(min(sizes) / 1.5, max(sizes) * 1.5)
  best, low, high = study.ends(prediction, "optimal_group_size")
  if low is not None:  # None if no prediction was possible
    high = high or 2 * max(sizes)
    axes.axvspan(low, high, color="gray", alpha=0.2, lw=0, label="95%")
  if best is not None:
    axes.axvline(best, color="black", ls="--", label=f"predicted {best:.0f}")
  axes.set(xlabel="group size G", ylabel="mean reward over training")
  axes.legend(fontsize=7)


def _draw_choice(axes, config: ConfigDict, rows, budget) -> None:
  for seed in range(config.seeds):
    run = study.select(rows, budget=budget, run=AUTO, seed=seed)
    points = [row["step"] for row in run], [row["group_size"] for row in run]
    style = {"lw": max(4 - seed, 1), "label": f"auto, seed {seed}"}
    axes.step(*points, where="mid", alpha=0.7, **style)
  steps, best = _along(rows, budget)
  points = steps[np.isfinite(best)], best[np.isfinite(best)]
  axes.plot(*points, "k--", label="G* of all estimates so far")
  sizes = config.group_sizes
  axes.set_yscale("log", base=2)
  axes.set_yticks(sizes, [str(size) for size in sizes])
  axes.set_ylim(min(sizes) / 1.5, max(sizes) * 1.5)
  axes.set(xlabel="step", ylabel="group size")
  axes.legend(fontsize=7)


def _lines(prediction, lines, comparison, along) -> Iterator[str]:
  """Yields the lines to print."""
  yield "predicted G* {} [{}, {}] before training".format(
    *study.ends(prediction, "optimal_group_size")
  )
  for line in lines:
    reward, accuracy = (
      "mean {} {:.3f} [{:.3f}, {:.3f}]".format(name, *study.ends(line, name))
      for name in ("reward", "accuracy")
    )
    yield f"N = {line['budget']}  G = {line['run']:>4}: {reward}  {accuracy}"
  for budget, x in comparison.items():
    yield (
      f"N = {budget}: best G {x['best_group_size']}, auto - best "
      f"{x['auto_minus_best'][0]:+.3f}, auto - worst "
      f"{x['auto_minus_worst'][0]:+.3f}; G* along training "
      f"{along[budget]:.0f}"
    )


def compute(config: ConfigDict, directory: pathlib.Path) -> study.Results:
  """Predicts the best group size, then trains with all sizes."""
  path = directory / "prediction.json"
  if not path.exists():
    records.write_json(path, predict(config))
  prediction = json.loads(path.read_text())
  budgets = config.budgets
  sizes = _sizes(config)
  runs = []
  labels = []
  for seed, budget, size in _points(config):
    runs.append(train_settings(config, budget, size, seed))
    labels.append({"budget": budget, "run": str(size), "seed": seed})
  rows = study.trained(labels, runs, directory, METRICS)
  rows.sort(key=lambda x: (budgets.index(x["budget"]), sizes.index(x["run"])))
  lines = table(config, rows)
  comparison = compare(config, lines)
  along = {}
  for budget in budgets:
    best = _along(rows, budget)[1]
    # There is no G* if every diagnosis had too few prompts.
    along[str(budget)] = float(best[-1]) if len(best) else math.nan
  summary = {"predicted": prediction, "along_training": along}
  return study.Results(
    tables={"curves": rows, "results": lines},
    lines=[*_lines(prediction, lines, comparison, along)],
    draw=lambda grid: draw(grid, config, rows, lines, prediction),
    panels=(len(budgets), 3),
    summary=summary | {"measured": comparison},
  )


def main(argv: list[str]) -> None:
  """Starts or resumes the study with the command line `argv`."""
  study.execute(argv, SETTINGS, config_errors, __doc__, compute)


if __name__ == "__main__":
  main(sys.argv[1:])
