"""Mean squared error of gradient estimators against group size, measured.

    python -m grpojax.studies.mse [--run_dir=DIR] [--config.key=value ...]

Figure 4 of arXiv 2603.01162 on the embedded arithmetic models: vanilla, GRPO
(leave-one-out, and centred with the group's own mean) and oracle, each against
the group size, for a base model, an instruct model, and the base model with
solved examples in its prompt. The gradient is that of the expected reward of a
prompt with respect to all parameters; errors are conditional on the prompt, and
averaged over held-out prompts.

A language model of hundreds of millions of parameters is asked `questions`. Its
scores are those of the layers' matrices by random `projections`: all errors and
moments are linear in the scores' products, whose estimates are unbiased, and
the intervals include their spread.

For each prompt two pools of completions are sampled. Groups of the first are
measured (`errors.group_errors`); the curves are the exact formulas of
`statistics.u_statistics.mse` with moments estimated from the second, because
the completions of a real model cannot be enumerated. Intervals are over the
completions, with the prompts fixed.

The run directory has rows.jsonl, a line a prompt as soon as it is done (the
same command goes on where it stopped), results.csv, summary.json and mse.png.
"""

import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.runtime.cli.config import config_error
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import records
from grpojax.statistics import u_statistics
from grpojax.statistics.u_statistics import Moments
from grpojax.studies import errors, run, samples
from grpojax.training import policy as policy_lib

_TITLES = {
  "base": "base model",
  "instruct": "instruct model",
  "in-context": "base model, {shots} examples in the prompt",
}
_TITLES_OF_ONE = {
  "base": "plain text",
  "instruct": "chat template",
  "in-context": "plain text, {shots} examples in the prompt",
}
_STYLES = {  # estimator: label, colour, marker, horizontal shift of points
  "vanilla": ("vanilla", "tab:gray", "s", 1.0),
  "centred": ("GRPO, own mean (theory)", "tab:green", None, 1.0),
  "leave_one_out": ("GRPO, leave-one-out", "tab:blue", "o", 0.95),
  "oracle": ("oracle", "tab:orange", "^", 1.05),
}
_PANELS = (  # label; columns of a point, its interval and its curve
  ("mean squared error", ("mse", "mse_low", "mse_high", "theory")),
  (
    "ratio to the oracle",
    ("ratio_to_oracle", "ratio_low", "ratio_high", "theory_ratio"),
  ),
)


FLAGS = run.FLAGS
SETTINGS = run.settings(
  "mse",
  seed=run.SEED,
  base=setting(
    "arithmetic-base", "model asked in plain text: embedded, or a directory"
  ),
  instruct=setting(
    "arithmetic-instruct", "model asked by its chat template, likewise"
  ),
  shots=setting(
    2, "solved training problems before an in-context prompt", within="[1, inf)"
  ),
  num_prompts=setting(12, "held-out problems", within="[1, inf)"),
  samples=setting(768, "completions a prompt in each of the two pools"),
  group_sizes=setting(
    (2, 4, 8, 16, 32, 64), "group sizes, each a divisor of the largest"
  ),
  max_new_tokens=setting(80, "longest completion, tokens", within="[1, inf)"),
  problems=setting(
    "expressions",
    "problems in the form of the embedded models, or in words",
    samples.PROBLEMS,
  ),
  projections=setting(
    0,
    "random projections of the scores of the layers' matrices; 0 = exact "
    "scores of all parameters, for models that are small enough",
    within="[0, inf)",
  ),
)
"""About seven minutes of CPU time."""


def config_errors(config: ConfigDict) -> list[str]:
  """Lists what is wrong with values that are in their ranges."""
  if wrong := run.size_errors(config, "group_sizes"):
    return wrong
  sizes, largest = config.group_sizes, max(config.group_sizes)
  if any(largest % g for g in sizes) or len(set(sizes)) < len(sizes):
    remedy = "each must divide the largest, once"
    wrong.append(config_error("group_sizes", sizes, remedy))
  elif config.samples % largest or config.samples < 3 * largest:
    remedy = (
      f"must be a multiple of {largest}, the largest group, at least 3 times"
    )
    wrong.append(config_error("samples", config.samples, remedy))
  if config.projections in (1, 2):
    remedy = "their spread is part of the intervals: give 3 or more, or 0"
    wrong.append(config_error("projections", config.projections, remedy))
  for key, split in {"num_prompts": "test", "shots": "train"}.items():
    most = len(samples.questions(None, split))
    if config.problems == "questions" and config[key] > most:
      remedy = f"there are {most} such questions"
      wrong.append(config_error(key, config[key], remedy))
  for name in ("base", "instruct"):
    try:
      policy_lib.find_model(config[name])
    except ValueError as error:
      wrong.append(config_error(name, config[name], f"{error}"))
  return wrong


def _measure(config: ConfigDict, bench: samples.Bench, name: str, index: int):
  """Samples two pools for a prompt; returns its row of results."""
  key = samples.prompt_key(config.seed, name, index)
  keys = [jax.random.fold_in(key, i) for i in (0, 1)]
  sampled = samples.sample(bench, index, keys)
  # The first pool is measured, the second gives theory its moments.
  n, blocks = config.samples, config.samples // max(config.group_sizes)
  first, second, both = slice(n), slice(n, None), slice(None)
  rewards = sampled.rewards
  gram = sampled.gram[second, second]
  baseline = errors.best_baseline(gram, rewards[second])
  moments, lengths = errors.score_moments, errors.score_lengths

  def group_errors(gram, rewards):
    return errors.group_errors(
      gram, rewards, config.group_sizes, blocks, baseline
    )

  measured, without = group_errors(sampled.gram[first, first], rewards[first])
  row = {
    "errors": measured,
    "errors_without": without,
    "moments": moments(gram, rewards[second]),
    "moments_without": errors.without_blocks(
      moments, gram, rewards[second], blocks
    ),
    "lengths": lengths(sampled.gram, rewards),
    "lengths_without": errors.without_blocks(
      lengths, sampled.gram, rewards, 2 * blocks
    ),
  }
  if bench.projections:
    for field, estimate, part in (
      ("errors", lambda *pool: group_errors(*pool)[0], first),
      ("moments", moments, second),
      ("lengths", lengths, both),
    ):
      row[f"{field}_projected"] = errors.stacked(
        estimate(gram[part, part], rewards[part]) for gram in sampled.without
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
  """Measures the prompts that `path` lacks; returns the rows of all."""
  records.truncate_jsonl(path, 0)  # drops a line that was cut off
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


def _by_configuration(rows: Sequence[Mapping]) -> dict[str, list[Mapping]]:
  names = dict.fromkeys(row["configuration"] for row in rows)
  return {n: [r for r in rows if r["configuration"] == n] for n in names}


def _stacks(rows: Sequence[Mapping], field: str) -> list[dict[str, np.ndarray]]:
  """Arrays of a field's values by name, with a leading axis of prompts.

  Then those of its replicates: without blocks and, if any, of projections.
  """
  fields = (field, f"{field}_without", f"{field}_projected")
  return [
    {name: np.array([row[x][name] for row in rows]) for name in rows[0][x]}
    for x in fields
    if x in rows[0]
  ]


def _numbers(rows: Sequence[Mapping], index: int, group_size: int):
  """Returns errors by estimator at one group size: measured, and of theory."""
  stacks = _stacks(rows, "errors")
  measured = {
    x: tuple(stack[x][..., index] for stack in stacks) for x in stacks[0]
  }
  exact = [
    u_statistics.mse(Moments(**moments), group_size)._asdict()
    for moments in _stacks(rows, "moments")
  ]
  theory = {
    x: tuple(np.asarray(e[x], np.float64) for e in exact) for x in measured
  }
  return measured, theory


def _deviation(measured: Mapping, theory: Mapping) -> float:
  """Measured minus theoretical error, in standard errors of the difference."""
  error = np.hypot(measured["error"], theory["error"])
  gap = measured["mean"] - theory["mean"]
  return float(gap / error) if error > 0 else 0.0


def table(
  rows: Sequence[Mapping[str, Any]], group_sizes: Sequence[int]
) -> list[dict[str, Any]]:
  """Rows of results.csv: one a configuration, estimator and group size.

  Each has the measured mean squared error and theory, means over prompts with
  95% intervals; their difference in standard errors; and the ratio to the
  oracle's error.
  """
  rows_of_table = []
  for name, of_configuration in _by_configuration(rows).items():
    for index, group_size in enumerate(group_sizes):
      measured, theory = _numbers(of_configuration, index, group_size)
      for estimator in _STYLES:
        point, curve = (
          errors.mean_over_prompts(*x[estimator]) for x in (measured, theory)
        )
        ratio, expected = (
          errors.ratio_of_means(x[estimator], x["oracle"])
          for x in (measured, theory)
        )
        row = {
          "configuration": name,
          "estimator": estimator,
          "group_size": group_size,
          "mse": point["mean"],
          "mse_low": point["low"],
          "mse_high": point["high"],
          "theory": curve["mean"],
          "theory_low": curve["low"],
          "theory_high": curve["high"],
          "deviation": _deviation(point, curve),
          "ratio_to_oracle": ratio["mean"],
          "ratio_low": ratio["low"],
          "ratio_high": ratio["high"],
          "theory_ratio": expected["mean"],
        }
        rows_of_table.append(run.rounded(row))
  return rows_of_table


def _means(rows: Sequence[Mapping], field: str) -> dict[str, dict[str, float]]:
  """Means over prompts of a field's values, with intervals."""
  stacks = _stacks(rows, field)
  return {
    key: errors.mean_over_prompts(*(stack[key] for stack in stacks))
    for key in stacks[0]
  }


def _lengths(rows: Sequence[Mapping]) -> dict[str, Any]:
  """Describes how lengths of scores go with rewards, where these differ.

  `vanilla_to_oracle` is the ratio of their exact errors, at every group size.
  """
  varied = [row for row in rows if 0 < row["success"] < 1]
  if not varied or "lengths" not in rows[0]:  # of an older study
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


def summary(
  rows: Sequence[Mapping[str, Any]], rows_of_table: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Means over prompts and largest deviations from theory, by configuration."""
  lines = _by_configuration(rows_of_table)
  summaries = {}
  for name, of_configuration in _by_configuration(rows).items():
    means = {
      key: float(np.mean([r[key] for r in of_configuration]))
      for key in ("success", "distinct", "best_baseline")
    }
    moments = _means(of_configuration, "moments")
    deviations = {
      x: [r["deviation"] for r in lines[name] if r["estimator"] == x]
      for x in _STYLES
    }
    largest = {x: max(values, key=abs) for x, values in deviations.items()}
    summaries[name] = (
      means
      | {"moments": moments, "largest_deviation": largest}
      | _lengths(of_configuration)
    )
  return summaries


def draw(
  rows: Sequence[Mapping[str, Any]], config: ConfigDict, path: pathlib.Path
) -> None:
  """Draws errors, and below them ratios to the oracle's, against group size."""
  configurations = _by_configuration(rows)
  titles = _TITLES_OF_ONE if config.base == config.instruct else _TITLES
  with run.picture(path, 2, len(configurations), width=3.6) as axes:
    for column, (name, lines) in zip(
      axes.T, configurations.items(), strict=True
    ):
      for estimator, style in _STYLES.items():
        of_curve = [r for r in lines if r["estimator"] == estimator]
        for ax, (_, columns) in zip(column, _PANELS, strict=True):
          _draw_curve(ax, of_curve, style, columns)
      title = titles[name].format(shots=config.shots)
      column[0].set_title(title, fontsize=10)
      column[1].set_xlabel("group size G")
      for ax in column:
        ax.set_xscale("log", base=2)
        if ax.dataLim.y1 > 0:  # else all rewards were equal
          ax.set_yscale("log")
        ax.set_xticks(config.group_sizes, [str(g) for g in config.group_sizes])
        ax.grid(alpha=0.3)
    for ax, (label, _) in zip(axes[:, 0], _PANELS, strict=True):
      ax.set_ylabel(label)
    legend = axes[0, 0].get_legend_handles_labels()
    axes[0, 0].figure.legend(
      *legend, loc="outside lower center", ncols=4, fontsize=9
    )


def _draw_curve(ax, rows, style, columns) -> None:
  """Draws points with intervals over a curve: columns point, ends and curve."""
  label, colour, marker, shift = style
  value, low, high, theory = (
    np.array([row[name] for row in rows]) for name in columns
  )
  sizes = np.array([row["group_size"] for row in rows])
  if not marker:
    ax.plot(sizes, theory, color=colour, lw=0.8, label=label)
    return
  ax.plot(sizes, theory, color=colour, lw=1.2)
  if columns[-1] == "theory":
    band = ([row[f"theory_{end}"] for row in rows] for end in ("low", "high"))
    ax.fill_between(sizes, *band, color=colour, alpha=0.15, lw=0)
  ax.errorbar(
    sizes * shift,
    value,
    (value - low, high - value),
    color=colour,
    fmt=marker,
    ms=4,
    elinewidth=1,
    capsize=2,
    label=label,
  )


def main(argv: list[str]) -> None:
  """Runs the study with `argv`, the words after its name."""
  with run.study(argv, SETTINGS, config_errors, __doc__) as (config, directory):
    rows = _collect(config, directory / "rows.jsonl")
    results = table(rows, config.group_sizes)
    run.write_tables(directory, results=results)
    summaries = summary(rows, results)
    records.write_json(directory / "summary.json", summaries)
    draw(results, config, directory / "mse.png")
    for name, numbers in summaries.items():
      for key, x in numbers.get("lengths", {}).items():
        print(
          f"{name} {key}: {x['mean']:.3f} [{x['low']:.3f}, {x['high']:.3f}]"
        )
    print(f"tables and picture are in {directory}/")


if __name__ == "__main__":
  main(sys.argv[1:])
