"""Measures the mean squared error of gradient estimators by group size.

    python -m grpojax.studies.mse [--run_dir=DIR] [--config.key=value ...]

It repeats Figure 4 of arXiv 2603.01162 for a base model, an instruct model, and
the base model with solved examples in its prompt. The error is that of the
gradient of a prompt's expected reward with respect to all parameters or, for
large models, of random `projections` of the gradients of the layers' matrices.
Errors are conditional on the prompt, and averaged over held-out prompts.

Points are errors of groups from a pool of completions per prompt
(`errors.group_errors`). Curves are the exact formulas of
`statistics.u_statistics.mse` with moments from a second pool. Intervals are
over completions and projections, with the prompts fixed.

The run directory receives rows.jsonl (a line per finished prompt, from which
the same command resumes), results.csv, summary.json and mse.png.
"""

import functools
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.core.options import ONE_OR_MORE
from grpojax.core.random_keys import seed_key
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import records
from grpojax.statistics import u_statistics
from grpojax.statistics.u_statistics import Moments
from grpojax.studies import errors, run, samples
from grpojax.training.files.sources import find_model

_TITLES = {
  "base": "plain text",
  "instruct": "chat template",
  "in-context": "plain text, {} examples in the prompt",
}
_STYLES = {  # estimator: label, colour, marker, horizontal shift of points
  "vanilla": ("vanilla", "tab:gray", "s", 1.0),
  "centred": ("GRPO, own mean (theory)", "tab:green", None, 1.0),
  "leave_one_out": ("GRPO, leave-one-out", "tab:blue", "o", 0.95),
  "oracle": ("oracle", "tab:orange", "^", 1.05),
}
_PANELS = {  # label: columns of a point, its interval and its curve
  "mean squared error": "mse mse_low mse_high theory",
  "ratio to the oracle": "ratio_to_oracle ratio_low ratio_high theory_ratio",
}

FLAGS = run.FLAGS
SETTINGS = run.settings(
  "mse",
  seed=run.SEED,
  base=setting("arithmetic-base", "model for plain text, bundled or a path"),
  instruct=setting("arithmetic-instruct", "model with a chat template"),
  shots=setting(2, "solved problems in context", within=ONE_OR_MORE),
  num_prompts=setting(12, "held-out problems", within=ONE_OR_MORE),
  samples=setting(768, "completions per prompt in each of the two pools"),
  group_sizes=setting(
    (2, 4, 8, 16, 32, 64), "group sizes, each a divisor of the largest"
  ),
  max_new_tokens=setting(80, "longest completion, tokens", within=ONE_OR_MORE),
  problems=setting(
    "expressions", "bare expressions, or questions in words", samples.PROBLEMS
  ),
  projections=setting(
    0,
    "random projections of the scores of the layers' matrices; 0 = exact "
    "scores of all parameters, for small models",
    within="[0, inf)",
  ),
)


def config_errors(config: ConfigDict) -> Iterator[tuple[str, str]]:
  """Yields errors that range checks miss, such as incompatible settings."""
  if wrong := run.size_errors(config, "group_sizes"):
    yield from wrong
    return
  sizes = config.group_sizes
  largest = max(sizes)
  if any(largest % g for g in sizes) or len(set(sizes)) < len(sizes):
    yield "group_sizes", "must be different divisors of the largest"
  elif config.samples % largest or config.samples < 3 * largest:
    least = 3 * largest
    yield "samples", f"must be a multiple of {largest}, {least} or more"
  if config.projections in (1, 2):
    yield "projections", "must be 0, or 3 or more to estimate intervals"
  for key, split in {"num_prompts": "test", "shots": "train"}.items():
    most = len(samples.questions(None, split))
    if config.problems == "questions" and config[key] > most:
      yield key, f"must be at most {most}, the number of questions"
  for name in ("base", "instruct"):
    try:
      find_model(config[name])
    except ValueError as error:
      yield name, f"{error}"


def _measure(config: ConfigDict, bench: samples.Bench, name: str, index: int):
  """Samples two pools for a prompt; returns the prompt's row of rows.jsonl."""
  configuration = samples.CONFIGURATIONS.index(name)
  key = jax.random.fold_in(seed_key(config.seed), configuration)
  key = jax.random.fold_in(key, index)
  keys = [jax.random.fold_in(key, i) for i in (0, 1)]
  sampled = samples.sample(bench, index, keys)
  rewards = sampled.rewards
  block = max(config.group_sizes)
  blocks = config.samples // block
  # The first pool is measured, the second gives the formulas' moments.
  first = slice(config.samples)
  second = slice(config.samples, None)

  def pool(part, gram=sampled.gram):
    return gram[part, part], rewards[part]

  baseline = errors.best_baseline(*pool(second))
  group_errors = functools.partial(
    errors.group_errors,
    group_sizes=config.group_sizes,
    block=block,
    baseline=baseline,
  )
  row = {}
  for field, estimate, part, count in (
    ("errors", group_errors, first, blocks),
    ("moments", errors.score_moments, second, blocks),
    ("lengths", errors.score_lengths, slice(None), 2 * blocks),
  ):
    row[field] = estimate(*pool(part))
    without = errors.without_blocks(estimate, *pool(part), count)
    row[f"{field}_without"] = without
    if bench.projections:
      row[f"{field}_projected"] = errors.stacked(
        estimate(*pool(part, gram)) for gram in sampled.without
      )
  return {
    "configuration": name,
    "index": index,
    "problem": bench.batches[index][1][0]["prompt"],
    "success": float(np.mean(rewards)),
    "distinct": sampled.distinct,
    "best_baseline": baseline,
  } | {field: numbers._asdict() for field, numbers in row.items()}


def _collect(config: ConfigDict, path: pathlib.Path) -> list[dict[str, Any]]:
  """Measures the prompts missing in `path`; returns the rows of all prompts."""
  records.truncate_jsonl(path, 0)  # drops an incomplete line
  rows = {(r["configuration"], r["index"]): r for r in records.read_jsonl(path)}
  points = [
    (n, i) for n in samples.CONFIGURATIONS for i in range(config.num_prompts)
  ]
  missing = [point for point in points if point not in rows]
  benches = {name: samples.open_bench(config, name) for name in dict(missing)}
  began = time.perf_counter()
  for number, (name, index) in enumerate(missing, 1):
    row = rows[name, index] = _measure(config, benches[name], name, index)
    records.append_jsonl(path, row)
    print(
      f"prompt {len(rows)}/{len(points)}  {name}: {row['problem']}  "
      f"{row['success']:.0%} right, {row['distinct']} distinct  "
      f"{run.time_left(began, number, len(missing))}",
      flush=True,
    )
  return [rows[point] for point in points]


def _by_configuration(rows: run.Rows) -> dict[str, list[run.Row]]:
  names = dict.fromkeys(row["configuration"] for row in rows)
  return {name: run.select(rows, configuration=name) for name in names}


def _stacks(rows: run.Rows, field: str) -> list[dict[str, np.ndarray]]:
  """Returns a field's values [X, ...] by name, then their jackknife replicates.

  A replicate leaves out a block or, with projections, a projection.
  """
  fields = (field, f"{field}_without", f"{field}_projected")
  return [
    {name: np.array([row[x][name] for row in rows]) for name in rows[0][x]}
    for x in fields
    if x in rows[0]
  ]


def table(rows: run.Rows, group_sizes: Sequence[int]) -> list[dict[str, Any]]:
  """Returns the rows of results.csv, by configuration, group size, estimator.

  A row has the measured error and theory (means over prompts, 95% intervals),
  the difference in standard errors, and the ratio to the oracle.
  """
  lines = []
  for name, of_name in _by_configuration(rows).items():
    measured = _stacks(of_name, "errors")
    moments = [Moments(**x) for x in _stacks(of_name, "moments")]
    for index, group_size in enumerate(group_sizes):
      theory = [u_statistics.mse(x, group_size)._asdict() for x in moments]
      numbers = [  # by estimator: measured, and theory
        {x: tuple(y[x][..., index] for y in measured) for x in _STYLES},
        {x: tuple(np.asarray(y[x], float) for y in theory) for x in _STYLES},
      ]
      for x in _STYLES:
        line = {"configuration": name, "estimator": x, "group_size": group_size}
        lines.append(run.rounded(line | _comparison(numbers, x)))
  return lines


def _comparison(numbers: Sequence[Mapping], estimator: str) -> dict[str, float]:
  """Compares an estimator's measured error with theory and the oracle."""
  point, curve = (errors.mean_over_prompts(*x[estimator]) for x in numbers)
  ratio, expected = (
    errors.ratio_of_means(x[estimator], x["oracle"]) for x in numbers
  )
  error = np.hypot(point["error"], curve["error"])
  gap = point["mean"] - curve["mean"]
  return {
    "mse": point["mean"],
    "mse_low": point["low"],
    "mse_high": point["high"],
    "theory": curve["mean"],
    "theory_low": curve["low"],
    "theory_high": curve["high"],
    "deviation": float(gap / error) if error > 0 else 0.0,
    "ratio_to_oracle": ratio["mean"],
    "ratio_low": ratio["low"],
    "ratio_high": ratio["high"],
    "theory_ratio": expected["mean"],
  }


def _means(rows: run.Rows, field: str) -> dict[str, dict[str, float]]:
  """Returns means over prompts of a field's values, with intervals."""
  stacks = _stacks(rows, field)
  return {
    key: errors.mean_over_prompts(*(stack[key] for stack in stacks))
    for key in stacks[0]
  }


def _lengths(rows: run.Rows) -> dict[str, Any]:
  """Summarises lengths of scores and rewards over prompts with unequal rewards.

  `vanilla_to_oracle` is the ratio of their exact errors at any group size.
  """
  varied = [row for row in rows if 0 < row["success"] < 1]
  if not varied:
    return {}
  moments = _stacks(rows, "moments")
  vanilla, oracle = (
    tuple(x[f"{name}_trace"] for x in moments) for name in ("vanilla", "oracle")
  )
  return {
    "prompts_with_equal_rewards": len(rows) - len(varied),
    "prompts_with_best_baseline_below_half_value": sum(
      x["lengths"]["best_baseline"] < x["lengths"]["value"] / 2 for x in varied
    ),
    "vanilla_to_oracle": errors.ratio_of_means(vanilla, oracle),
    "lengths": _means(varied, "lengths"),
  }


def summary(rows: run.Rows, lines: run.Rows) -> dict[str, Any]:
  """Returns means over prompts, and largest deviations, by configuration."""
  summaries = {}
  for name, of_name in _by_configuration(rows).items():
    summaries[name] = means = {
      x: float(np.mean([row[x] for row in of_name]))
      for x in ("success", "distinct", "best_baseline")
    }
    means["moments"] = _means(of_name, "moments")
    deviations = means["largest_deviation"] = {}
    for x in _STYLES:
      of_estimator = run.select(lines, configuration=name, estimator=x)
      deviations[x] = max((y["deviation"] for y in of_estimator), key=abs)
    means |= _lengths(of_name)
  return summaries


def draw(axes: np.ndarray, rows: run.Rows, config: ConfigDict) -> None:
  """Plots errors by group size, and below them their ratios to the oracle's."""
  configurations = _by_configuration(rows)
  for column, (name, lines) in zip(axes.T, configurations.items(), strict=True):
    for estimator, style in _STYLES.items():
      curve = run.select(lines, estimator=estimator)
      for ax, columns in zip(column, _PANELS.values(), strict=True):
        _draw_curve(ax, curve, style, columns.split())
    column[0].set_title(_TITLES[name].format(config.shots), fontsize=10)
    column[1].set_xlabel("group size G")
    for ax in column:
      run.size_axis(ax, config.group_sizes)
      if ax.dataLim.y1 > 0:  # False if all rewards were equal
        ax.set_yscale("log")
      ax.grid(alpha=0.3)
  for ax, label in zip(axes[:, 0], _PANELS, strict=True):
    ax.set_ylabel(label)
  legend = axes[0, 0].get_legend_handles_labels()
  place = {"loc": "outside lower center", "ncols": 4, "fontsize": 9}
  axes[0, 0].figure.legend(*legend, **place)


def _draw_curve(ax, rows, style, columns) -> None:
  """Plots a curve, and points with intervals; columns as in `_PANELS`."""
  label, colour, marker, shift = style
  names = ("group_size", *columns, "theory_low", "theory_high")
  sizes, value, low, high, theory, *band = (
    np.array([row[name] for row in rows]) for name in names
  )
  if not marker:
    ax.plot(sizes, theory, color=colour, lw=0.8, label=label)
    return
  ax.plot(sizes, theory, color=colour, lw=1.2)
  if columns[-1] == "theory":
    ax.fill_between(sizes, *band, color=colour, alpha=0.15, lw=0)
  points = {"fmt": marker, "ms": 4, "color": colour, "label": label}
  lengths = value - low, high - value
  ax.errorbar(sizes * shift, value, lengths, elinewidth=1, capsize=2, **points)


def compute(config: ConfigDict, directory: pathlib.Path) -> run.Results:
  """Measures all prompts and compares their errors with theory."""
  rows = _collect(config, directory / "rows.jsonl")
  lines = table(rows, config.group_sizes)
  summaries = summary(rows, lines)
  return run.Results(
    tables={"results": lines},
    lines=[
      f"{name} {key}: {x['mean']:.3f} [{x['low']:.3f}, {x['high']:.3f}]"
      for name, numbers in summaries.items()
      for key, x in numbers.get("lengths", {}).items()
    ],
    draw=lambda axes: draw(axes, lines, config),
    panels=(2, len(summaries)),
    summary=summaries,
  )


def main(argv: list[str]) -> None:
  """Starts or resumes the study with the command line `argv`."""
  run.execute(argv, SETTINGS, config_errors, __doc__, compute)


if __name__ == "__main__":
  main(sys.argv[1:])
