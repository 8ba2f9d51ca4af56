"""Table, summary and picture of `studies.mse`, from its rows."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from grpojax.runtime import pictures
from grpojax.statistics.u_statistics import Estimators, Moments, mse
from grpojax.studies import errors, run

TITLES = {
  "base": "base model",
  "instruct": "instruct model",
  "in-context": "base model, {shots} examples in the prompt",
}
STYLES = {  # estimator: label, colour, marker, horizontal shift of points
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

_Numbers = tuple[np.ndarray, np.ndarray]  # one a prompt [X], replicates [X, b]


def mean_over_prompts(
  values: np.ndarray, without: np.ndarray
) -> dict[str, float]:
  """Mean over prompts, with its standard error and 95% interval."""
  variances = errors.jackknife(without)
  mean = float(values.mean())
  half = errors.mean_half_width(variances, without.shape[-1] - 1)
  return {
    "mean": mean,
    "low": mean - half,
    "high": mean + half,
    "error": float(variances.sum() ** 0.5 / len(values)),
  }


def ratio_of_means(above: _Numbers, below: _Numbers) -> dict[str, float]:
  """Ratio of two means over prompts, with its interval (delta method)."""
  scale = below[0].mean()
  if scale <= 0:
    return dict.fromkeys(("mean", "low", "high"), float("nan"))
  ratio = above[0].mean() / scale
  residual = mean_over_prompts(
    *(a - ratio * b for a, b in zip(above, below, strict=True))
  )
  half = (residual["high"] - residual["low"]) / (2 * scale)
  return {"mean": ratio, "low": ratio - half, "high": ratio + half}


def _array(rows: Sequence[Mapping], field: str, name: str) -> np.ndarray:
  return np.array([row[field][name] for row in rows])


def _moments(rows: Sequence[Mapping], field: str) -> Moments:
  return Moments(*(_array(rows, field, name) for name in Moments._fields))


def _numbers(rows: Sequence[Mapping], index: int, group_size: int):
  """Measured and theoretical errors of all estimators at one group size."""
  measured = {
    name: (
      _array(rows, "errors", name)[:, index],
      _array(rows, "errors_without", name)[:, :, index],
    )
    for name in Estimators._fields
  }
  values = mse(_moments(rows, "moments"), group_size)._asdict()
  without = mse(_moments(rows, "moments_without"), group_size)._asdict()
  theory = {
    name: tuple(np.asarray(x[name], np.float64) for x in (values, without))
    for name in Estimators._fields
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
  """One row a configuration, estimator and group size.

  Args:
    rows: of the study, one a configuration and prompt.
    group_sizes: the study's.

  Returns:
    Rows of results.csv: measured mean squared error and theory, means over
    prompts with 95% intervals; their difference in standard errors; and the
    ratio to the oracle's error.
  """
  rows_of_table = []
  for name in dict.fromkeys(row["configuration"] for row in rows):
    of_configuration = [row for row in rows if row["configuration"] == name]
    for index, group_size in enumerate(group_sizes):
      measured, theory = _numbers(of_configuration, index, group_size)
      for estimator in STYLES:
        point, curve = (
          mean_over_prompts(*x[estimator]) for x in (measured, theory)
        )
        ratio, expected = (
          ratio_of_means(x[estimator], x["oracle"]) for x in (measured, theory)
        )
        numbers = {
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
        rows_of_table.append(
          {
            "configuration": name,
            "estimator": estimator,
            "group_size": group_size,
          }
          | {key: float(f"{x:.6g}") for key, x in numbers.items()}
        )
  return rows_of_table


def summary(
  rows: Sequence[Mapping[str, Any]], rows_of_table: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """What summary.json holds of each configuration.

  Args:
    rows: of the study.
    rows_of_table: from `table`.

  Returns:
    By configuration: means over prompts of the success rate, of the distinct
    completions in both pools and of the best baseline; mean moments with
    intervals; and for each estimator its largest deviation from theory.
  """
  summaries = {}
  for name in dict.fromkeys(row["configuration"] for row in rows):
    of_configuration = [row for row in rows if row["configuration"] == name]
    lines = [r for r in rows_of_table if r["configuration"] == name]
    means = ("success", "distinct", "best_baseline")
    summaries[name] = {
      key: float(np.mean([r[key] for r in of_configuration])) for key in means
    }
    summaries[name]["moments"] = {
      key: mean_over_prompts(
        _array(of_configuration, "moments", key),
        _array(of_configuration, "moments_without", key),
      )
      for key in Moments._fields
    }
    summaries[name]["largest_deviation"] = {
      estimator: max(
        (r["deviation"] for r in lines if r["estimator"] == estimator), key=abs
      )
      for estimator in STYLES
    }
  return summaries


def draw(
  rows: Sequence[Mapping[str, Any]],
  config: ConfigDict,
  path: str | os.PathLike,
) -> None:
  """Draws errors, and below them ratios to the oracle's, against group size.

  Args:
    rows: from `table`.
    config: the study's.
    path: of the PNG.
  """
  names = list(dict.fromkeys(row["configuration"] for row in rows))
  figure, axes = run.new_figure(2, len(names), width=3.6)
  for column, name in zip(axes.T, names, strict=True):
    for estimator, style in STYLES.items():
      of_curve = [
        r
        for r in rows
        if (r["configuration"], r["estimator"]) == (name, estimator)
      ]
      for ax, (_, columns) in zip(column, _PANELS, strict=True):
        _lines(ax, of_curve, style, columns)
    column[0].set_title(TITLES[name].format(shots=config.shots), fontsize=10)
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
  figure.legend(*legend, loc="outside lower center", ncols=4, fontsize=9)
  pictures.save_figure(figure, path)


def _lines(ax, rows, style, columns):
  """Points with intervals over a curve; `columns` are point, ends and curve."""
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
    marker=marker,
    ms=4,
    lw=0,
    elinewidth=1,
    capsize=2,
    label=label,
  )
