"""Figure 5: accuracy along training against the group size, at a fixed budget.

    python -m grpojax.studies.group_size [--config=configs/figure5.py]
                                         [--config.key=value ...]
                                         [--run_dir=DIR]

At each budget N = B G of samples a step it trains with every group size and
with group_size = "auto", on several seeds. The theory, G* = 1 + sqrt(c3 / c1),
comes from a diagnosis of the initial policy, and from those of the automatic
runs. DIR, by default runs/group_size, gets

    prediction.json   the diagnosis
    curves.csv        one row a training step: budget, group size, seed, reward,
                      accuracy where it was evaluated
    results.csv       one row a budget and group size: mean reward and accuracy
                      over training with their 95% intervals over seeds
    summary.json      G* predicted and measured, the automatic runs compared
    group_size.png
    logs/             output of the training runs
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

from grpojax.core.random_keys import seed_key
from grpojax.runtime.cli.config import below
from grpojax.runtime.cli.settings import changed, section, setting, to_config
from grpojax.runtime.files import records
from grpojax.statistics import diagnostics
from grpojax.statistics.intervals import mean_interval
from grpojax.studies import run as study
from grpojax.training import policy as policy_lib
from grpojax.training.config import SETTINGS as TRAIN_SETTINGS
from grpojax.training.config import from_config
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.data import splits
from grpojax.training.run import setup
from grpojax.training.settings.run import AUTO, TrainSettings
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step import sampling as sampling_lib

FLAGS = study.FLAGS
SETTINGS = study.settings(
  "group_size",
  seeds=setting(3, "runs of each size; an interval needs 2", within="[2, inf)"),
  budgets=setting((128, 256), "samples a step"),
  group_sizes=setting((4, 8, 16, 32, 64, 128), "fixed group sizes"),
  predict=section(
    "the diagnosis before training",
    prompts=setting(128, "prompts, at least 3", within="[3, inf)"),
    group_size=setting(16, "completions a prompt", within="[4, inf)"),
    tangents=setting(16, "random directions", within="[2, inf)"),
    batch=setting(
      16, "prompts sampled and diagnosed at a time", within="[1, inf)"
    ),
  ),
  train=changed(
    TRAIN_SETTINGS,
    {
      "steps": 24,
      "data.options.difficulty": (2, 2),
      "sampling.max_new_tokens": 56,
      "optim.learning_rate": 5e-5,
      "eval.every": 4,
      "eval.num_prompts": 128,
      "log.trackers": (),
      "checkpoint.every": 24,
      "auto_group_size.start": 32,  # too large, to see it move
      "auto_group_size.largest": 64,
      "diagnostics.every": 2,  # of the automatic runs
      "diagnostics.share": 1.0,
    },
  ),
)
"""The quick setting: the embedded arithmetic model on two cores."""

METRICS = {
  "group_size": "group_size",
  "reward": "reward_mean",
  **{x: x for x in ("accuracy", "optimal_group_size", "c1", "c3")},
}
"""Metrics of a training run by their columns of curves.csv."""


def default_config() -> ConfigDict:
  """Makes the quick setting's config, which configs/figure5.py changes."""
  return to_config(SETTINGS)


def train_settings(
  config: ConfigDict, budget: int, group_size: int | str, seed: int
) -> TrainSettings:
  """Makes the training run of one point; ValueError if there can be none."""
  run = config.train.copy_and_resolve_references()
  auto = group_size == AUTO
  with run.unlocked(), run.ignore_type():
    run.name = f"N{budget}-G{group_size}-seed{seed}"
    run.seed = seed
    run.group_size = group_size
    first = run.auto_group_size.start if auto else group_size
    run.batch_size = budget // first
    if auto:  # as large as it may be with 3 prompts a step to diagnose
      largest = run.auto_group_size.largest
      while largest > first and budget // largest < 3:
        largest //= 2
      run.auto_group_size.largest = largest
    else:
      run.diagnostics.every = 0
    fewest = budget // (run.auto_group_size.largest if auto else group_size)
    # Smaller batches of prompts are cut into fewer parts.
    micro = run.optim.micro_batches
    while micro > 1 and fewest % (micro * run.optim.minibatches):
      micro -= 1
    run.optim.micro_batches = micro
  return from_config(run.lock())


def _sizes(config: ConfigDict) -> list[str]:
  """Names of the group sizes, as in column `run` of the tables."""
  return [*map(str, config.group_sizes), AUTO]


def _points(config: ConfigDict):
  """Yields (seed, budget, group size) of all runs, seed after seed."""
  sizes = [*config.group_sizes, AUTO]
  return itertools.product(range(config.seeds), config.budgets, sizes)


def config_errors(config: ConfigDict) -> list[str | tuple[str, str]]:
  """Lists the mistakes in values that are in their ranges."""
  wrong = study.size_errors(config, "budgets", "group_sizes")
  p = config.predict
  if p.prompts % p.batch:
    remedy = f"must be a multiple of predict.batch = {p.batch}"
    wrong.append(("predict.prompts", remedy))
  if wrong:
    return wrong
  for seed, budget, size in _points(config):
    if size != AUTO and budget % size:
      return [("group_sizes", f"{size} does not divide the budget {budget}")]
    try:
      train_settings(config, budget, size, seed)
    except ValueError as error:
      why = below("train", f"{error}")
      return [f"budget {budget}, group size {size}: {why}"]
  return []


def predict(config: ConfigDict) -> dict[str, Any]:
  """Diagnoses the policy that training starts from, on training prompts."""
  p = config.predict
  settings = dataclasses.replace(
    train_settings(config, config.budgets[0], config.group_sizes[0], seed=0),
    seed=config.train.seed,
    group_size=p.group_size,
    batch_size=p.batch,
  )
  policy = setup.with_weights(settings, setup.open_policy(settings))
  sampling = settings.sampling.distribution
  sampler = sampling_lib.make_sampler(settings, policy, p.group_size, sampling)
  project = policy_lib.jit(
    policy,
    functools.partial(
      diagnostics.score_projections,
      tangents=p.tangents,
      micro_batches=p.batch,
      vectorized=policy.vmappable,
      sampling=sampling,
      chunk_size=settings.optim.update.chunk_size,
    ),
  )
  sampling_key, tangents_key = jax.random.split(seed_key(settings.seed))
  split = splits.load_split(settings, policy, "train")
  settings = splits.with_prompt_length(settings, split)
  batches = prompts_lib.training_batches(
    settings, policy, split.examples, p.group_size
  )
  projections, rewards = [], []
  with rewards_lib.open_reward_pool(settings) as reward_pool:
    for i in range(p.prompts // p.batch):
      prompts, examples = next(batches)
      key = jax.random.fold_in(sampling_key, i)
      sampled = sampler(policy.params, jax.device_put(prompts), examples, key)
      scored = policy, reward_pool, examples, sampled
      rewards.append(rewards_lib.compute_rewards(*scored)[1].rewards)
      # The same directions for all prompts: their products are to be compared.
      projected = project(policy.params, sampled.rollout, tangents_key)
      projections.append(np.asarray(projected))
      print(f"diagnosis: {(i + 1) * p.batch}/{p.prompts} prompts", flush=True)
  rewards = np.concatenate(rewards)
  diagnosis = diagnostics.diagnose(
    jax.numpy.asarray(np.concatenate(projections, axis=1)),
    jax.numpy.asarray(rewards),
  )
  row = diagnostics.metrics(diagnosis) | {"reward_mean": np.mean(rewards)}
  return {name: float(x) for name, x in row.items()}


def table(config: ConfigDict, rows) -> list[dict[str, Any]]:
  """Means over a whole training run, over seeds with 95% intervals.

  The reward is the objective itself: of fresh samples for new prompts at every
  step. Group sizes share a seed's first samples, so intervals are of a run's
  difference from the mean of the fixed sizes with its seed.
  """
  sizes = _sizes(config)
  lines = []
  for budget in config.budgets:
    of_budget = [{"budget": budget, "run": size} for size in sizes]
    runs = [x | {"seed": i} for x in of_budget for i in range(config.seeds)]
    for name in ("reward", "accuracy"):
      means = study.run_means(rows, name, runs).reshape(len(sizes), -1)
      of_seeds = means[:-1].mean(0)  # those of the fixed sizes
      centred = means - of_seeds + of_seeds.mean()
      for line, values, around in zip(of_budget, means, centred, strict=True):
        line |= study.with_interval(name, around)
        line |= {f"{name}s": values.tolist()}
    lines += of_budget
  return lines


def _split(lines, budget: int):
  """Returns the lines of a budget's fixed sizes, and that of its auto runs."""
  *fixed, auto = study.select(lines, budget=budget)
  return fixed, auto


def compare(config: ConfigDict, lines) -> dict[str, Any]:
  """For each budget: best and worst fixed size, and the automatic run."""

  def difference(a, b):  # the same seeds: the same first samples
    return list(mean_interval(np.subtract(a["rewards"], b["rewards"])))

  comparison = {}
  for budget in config.budgets:
    fixed, auto = _split(lines, budget)
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
  """Steps and G* of a budget's automatic runs, from averages of c1 and c3.

  They are over all seeds and earlier steps: single estimates are too noisy.
  """
  automatic = study.select(rows, budget=budget, run=AUTO)
  at_step = study.by_step(automatic, "c1"), study.by_step(automatic, "c3")
  c1, c3 = (np.cumsum([np.mean(x) for x in by.values()]) for by in at_step)
  with np.errstate(divide="ignore", invalid="ignore"):
    best = 1 + np.sqrt(np.maximum(c3, 0) / np.maximum(c1, 0))
  return np.array([*at_step[0]]), best


def draw(grid, config: ConfigDict, rows, lines, prediction) -> None:
  """Draws accuracy against steps, mean reward against G, G along the runs."""
  for axes, budget in zip(grid, config.budgets, strict=True):
    _draw_curves(axes[0], config, rows, budget)
    _draw_sizes(axes[1], lines, budget, prediction)
    _draw_choice(axes[2], config, rows, budget)
    axes[0].set_title(f"N = {budget} samples a step", fontsize=10)
    for ax in axes:
      ax.grid(alpha=0.3)


def _draw_curves(axes, config: ConfigDict, rows, budget) -> None:
  from matplotlib import colormaps

  shades = np.linspace(0.1, 0.95, len(config.group_sizes))  # light to dark
  colours = [*map(colormaps["viridis_r"], shades), "crimson"]
  for size, colour in zip(_sizes(config), colours, strict=True):
    of_size = study.select(rows, budget=budget, run=size)
    values = study.by_step(of_size, "accuracy")
    intervals = [mean_interval(np.array(x)) for x in values.values()]
    mean, low, high = np.array(intervals).T
    name = f"G = {size}" if size != AUTO else AUTO
    axes.plot([*values], mean, color=colour, label=name, lw=1.5)
    axes.fill_between([*values], low, high, color=colour, alpha=0.12, lw=0)
  axes.set(xlabel="step", ylabel="held-out accuracy (greedy)", ylim=(0, 1.02))
  axes.legend(fontsize=7, loc="lower right")


def _draw_sizes(axes, lines, budget, prediction) -> None:
  fixed, auto = _split(lines, budget)
  sizes = [int(line["run"]) for line in fixed]
  mean, low, high = np.array([study.ends(x, "reward") for x in fixed]).T
  axes.errorbar(sizes, mean, (mean - low, high - mean), fmt="o-", capsize=3)
  mean, *ends = study.ends(auto, "reward")
  axes.axhline(mean, color="crimson", label="auto", lw=1.5)
  axes.axhspan(*ends, color="crimson", alpha=0.12, lw=0)
  study.size_axis(axes, sizes)
  axes.set_xlim(min(sizes) / 1.5, max(sizes) * 1.5)
  best, low, high = study.ends(prediction, "optimal_group_size")
  if low is not None:  # or nothing could be predicted
    high = high or 2 * max(sizes)
    axes.axvspan(low, high, color="gray", alpha=0.2, lw=0, label="95%")
  if best is not None:
    axes.axvline(best, color="black", ls="--", label=f"predicted {best:.0f}")
  axes.set(xlabel="group size G", ylabel="mean reward over training")
  axes.legend(fontsize=7)


def _draw_choice(axes, config: ConfigDict, rows, budget) -> None:
  for seed in range(config.seeds):
    of_run = study.select(rows, budget=budget, run=AUTO, seed=seed)
    axes.step(
      [row["step"] for row in of_run],
      [row["group_size"] for row in of_run],
      where="mid",
      alpha=0.7,
      lw=max(4 - seed, 1),
      label=f"auto, seed {seed}",
    )
  steps, best = _along(rows, budget)
  finite = np.isfinite(best)
  axes.plot(
    steps[finite], best[finite], "k--", label="G* of all estimates so far"
  )
  sizes = config.group_sizes
  axes.set_yscale("log", base=2)
  axes.set_yticks(sizes, [str(size) for size in sizes])
  axes.set_ylim(min(sizes) / 1.5, max(sizes) * 1.5)
  axes.set(xlabel="step", ylabel="group size")
  axes.legend(fontsize=7)


def _lines(prediction, lines, comparison, along) -> Iterator[str]:
  """Yields the lines that the study prints."""
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


def results(
  config: ConfigDict, directory: pathlib.Path, prediction
) -> study.Results:
  """Trains with all group sizes, and compares them with the prediction."""
  budgets, sizes = config.budgets, _sizes(config)
  runs, labels = [], []
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
    # Without a diagnosis that had enough prompts there is none.
    along[str(budget)] = float(best[-1]) if len(best) else math.nan
  summary = {"predicted": prediction, "along_training": along}
  return study.Results(
    tables={"curves": rows, "results": lines},
    lines=[*_lines(prediction, lines, comparison, along)],
    draw=lambda grid: draw(grid, config, rows, lines, prediction),
    panels=(len(budgets), 3),
    summary=summary | {"measured": comparison},
  )


def compute(config: ConfigDict, directory: pathlib.Path) -> study.Results:
  """Predicts the best group size, and trains with all."""
  path = directory / "prediction.json"
  if not path.exists():
    records.write_json(path, predict(config))
  return results(config, directory, json.loads(path.read_text()))


def main(argv: list[str]) -> None:
  """Runs the study with `argv`, the words after its name."""
  study.execute(argv, SETTINGS, config_errors, __doc__, compute)


if __name__ == "__main__":
  main(sys.argv[1:])
