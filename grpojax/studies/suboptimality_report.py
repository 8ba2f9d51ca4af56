"""Tables, picture and text of `studies.suboptimality`."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from grpojax.runtime import pictures
from grpojax.statistics.intervals import mean_interval
from grpojax.studies import asymptotics, run

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)  # of quantiles.csv
_COLOURS = {"vanilla": "C3", "leave_one_out": "C0", "oracle": "C2"}
_NAMES = {"vanilla": "vanilla", "leave_one_out": "GRPO", "oracle": "oracle"}


class Outcome(NamedTuple):
  """One estimator at one group size, all in units of n times the reward.

  Attributes:
    gaps: n (J* - J(theta_n)) of every run, for each n of config.steps.
    limit: quantiles of the limit distribution.
    limit_mean: its mean, sum of the chi-squares' weights.
    linear_mean: mean for each n if J were quadratic.
    bands: see `asymptotics.null_bands`.
  """

  gaps: Float[np.ndarray, "S R"]
  limit: Float[np.ndarray, "Q"]
  limit_mean: float
  linear_mean: Float[np.ndarray, "S"]
  bands: tuple[float, float]


def tables(
  steps: tuple[int, ...], outcomes: Mapping[tuple[str, int], Outcome]
) -> dict[str, list[dict]]:
  """Rows of the CSV files, by file name."""
  rows = {"results": [], "quantiles": [], "distances": []}
  for (estimator, g), one in outcomes.items():
    label = {"estimator": estimator, "group_size": g}
    oracle = outcomes["oracle", g].limit
    for i, n in enumerate(steps):
      gaps = one.gaps[i]
      mean, low, high = mean_interval(gaps)
      ks, w1 = asymptotics.distances(gaps, one.limit)
      ks_to_oracle, w1_to_oracle = asymptotics.distances(gaps, oracle)
      numbers = {
        "mean": mean,
        "low": low,
        "high": high,
        "limit_mean": one.limit_mean,
        "linear_mean": one.linear_mean[i],
        "ks": ks,
        "ks_band": one.bands[0],
        "w1": w1,
        "w1_band": one.bands[1],
        "ks_to_oracle_limit": ks_to_oracle,
        "w1_to_oracle_limit": w1_to_oracle,
      }
      rows["results"].append(label | {"n": n} | _rounded(numbers))
    for level in LEVELS:
      numbers = {"runs": np.quantile(one.gaps[-1], level)}
      numbers["limit"] = np.quantile(one.limit, level)
      rows["quantiles"].append(label | {"level": level} | _rounded(numbers))
  for (a, one), (b, other) in itertools.combinations(outcomes.items(), 2):
    ks_runs, w1_runs = asymptotics.distances(one.gaps[-1], other.gaps[-1])
    ks_limits, w1_limits = asymptotics.distances(one.limit, other.limit)
    numbers = {
      "ks_runs": ks_runs,
      "ks_limits": ks_limits,
      "w1_runs": w1_runs,
      "w1_limits": w1_limits,
    }
    label = {"a": f"{a[0]} {a[1]}", "b": f"{b[0]} {b[1]}"}
    rows["distances"].append(label | _rounded(numbers))
  return rows


def _rounded(row: dict) -> dict:
  return {name: float(f"{value:.5g}") for name, value in row.items()}


def grpo_to_oracle(distances: Sequence[Mapping]) -> dict[int, dict]:
  """Rows of distances.csv that pair GRPO and the oracle at the same G, by G."""
  pairs = {}
  for row in distances:
    (a, g), (b, other_size) = row["a"].split(), row["b"].split()
    if (a, b) == ("leave_one_out", "oracle") and g == other_size:
      pairs[int(g)] = row
  return pairs


def text(rows: Mapping[str, Sequence[Mapping]], best: float) -> str:
  """The last n's results for people."""
  results = rows["results"]
  last = results[-1]["n"]
  lines = [
    f"n x gap after n = {last} steps and its distance to the limit",
    f"{'estimator':15}{'G':>3}{'mean':>8}{'95% interval':>17}{'(limit)':>9}"
    f"{'KS':>8}{'(band)':>8}{'W1':>8}{'(band)':>8}",
  ]
  for row in results:
    if row["n"] != last:
      continue
    mean, low, high, limit, _, ks, ks_band, w1, w1_band, *_ = (
      f"{float(value):.4f}" for value in list(row.values())[3:]
    )
    lines.append(
      f"{row['estimator']:15}{row['group_size']:3}{mean:>8} [{low}, {high}]"
      f" ({limit}){ks:>8}{ks_band:>8}{w1:>8}{w1_band:>8}"
    )
  lines.append("KS distance of GRPO's and the oracle's runs (of their limits):")
  lines += [
    f"{'':15}{g:3}{float(r['ks_runs']):8.4f} ({float(r['ks_limits']):.4f})"
    for g, r in grpo_to_oracle(rows["distances"]).items()
  ]
  lines.append(f"GRPO's limit is smallest at G = {best:.2f}")
  return "\n".join(lines)


def draw(
  path: str | os.PathLike,
  steps: tuple[int, ...],
  outcomes: Mapping[tuple[str, int], Outcome],
) -> None:
  """Writes the distributions, their means against G, and convergence in n.

  Args:
    path: of the PNG.
    steps: every n.
    outcomes: by estimator and group size.
  """
  figure, axes = run.new_figure(1, 3, 4.2)
  sizes = sorted({g for _, g in outcomes})
  _distributions(axes[0, 0], sizes[0], steps[-1], outcomes)
  _means(axes[0, 1], sizes, steps[-1], outcomes)
  _convergence(axes[0, 2], steps, outcomes)
  pictures.save_figure(figure, path)


def _distributions(axis, g, n, outcomes) -> None:
  """Share of runs above each gap: theory as a line, runs as points."""
  for name, colour in _COLOURS.items():
    one = outcomes[name, g]
    tail = 1 - (np.arange(len(one.limit)) + 0.5) / len(one.limit)
    axis.plot(one.limit, tail, colour, lw=1)
    gaps = np.sort(one.gaps[-1])
    tail = 1 - (np.arange(len(gaps)) + 0.5) / len(gaps)
    points = np.unique(
      np.searchsorted(-tail, -np.geomspace(1, 0.5 / len(gaps), 40))
    )
    points = points[points < len(gaps)]
    axis.plot(
      gaps[points], tail[points], f"{colour}o", ms=3, label=_NAMES[name]
    )
  axis.set(
    yscale="log",
    xlabel=f"n x gap, n = {n}, G = {g}",
    ylabel="share of runs above",
    title="Runs (points), theory (lines)",
  )
  axis.set_xlim(left=0)
  axis.legend(frameon=False)


def _intervals(axis, x, gaps, colour, label) -> None:
  mean = gaps.mean(-1)
  half = 1.96 * gaps.std(-1, ddof=1) / np.sqrt(gaps.shape[-1])
  axis.errorbar(x, mean, half, fmt=f"{colour}o", ms=3, capsize=2, label=label)


def _means(axis, sizes, n, outcomes) -> None:
  for name, colour in _COLOURS.items():
    of_size = [outcomes[name, g] for g in sizes]
    axis.plot(sizes, [one.limit_mean for one in of_size], colour, lw=1)
    gaps = np.array([one.gaps[-1] for one in of_size])
    _intervals(axis, sizes, gaps, colour, _NAMES[name])
  axis.set_xscale("log", base=2)
  axis.set_xticks(sizes, map(str, sizes))
  axis.set(
    xlabel="group size G, equal samples a step",
    ylabel=f"mean of n x gap, n = {n}",
    title="Means (95%), limit (lines)",
  )
  axis.set_ylim(bottom=0)


def _convergence(axis, steps, outcomes) -> None:
  """Mean over G of the ratio to the limit, for each estimator."""
  steps = np.array(steps)
  for shift, (name, colour) in zip(
    (0.93, 1, 1.07), _COLOURS.items(), strict=True
  ):
    of_size = [
      one for (estimator, _), one in outcomes.items() if estimator == name
    ]
    ratio = np.array([one.gaps / one.limit_mean for one in of_size])
    _intervals(axis, steps * shift, ratio.mean(0), colour, None)
    linear = [one.linear_mean / one.limit_mean for one in of_size]
    axis.plot(steps * shift, np.mean(linear, 0), f"{colour}--", lw=1)
  axis.axhline(1, color="black", lw=1)
  axis.set(
    xscale="log",
    xlabel="n, steps",
    ylabel="mean of n x gap / mean of the limit",
    title="Convergence (dashed: if quadratic)",
  )
  axis.minorticks_off()
  axis.set_xticks(steps, map(str, steps))
