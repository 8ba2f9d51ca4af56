"""Errors of the gradient with each baseline, measured.

    python -m grpojax.studies.baselines [--run_dir=DIR] [--config.key=value ...]

Held-out arithmetic problems, the embedded models and exact scores of all
parameters, as in `grpojax.studies.mse`: the mean squared error of a prompt's
gradient with leave-one-out baselines that weigh the other samples in several
ways, beside leave_one_out, vanilla, an oracle that knows the value V(x), and
the best constant baseline E[|s|^2 Z] / E|s|^2. `norm_ratio` knows the scores'
lengths from the other prompts. How: `studies.baseline_errors`. Intervals are
over completions, with the prompts fixed, and any `projections` too.

The run directory has pools/, a file a prompt as soon as it is sampled (the same
command goes on where it stopped), results.csv, summary.json and baselines.png.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from grpojax.core.advantages.weighted_baselines import logit_score_sq
from grpojax.runtime.cli.config import config_error
from grpojax.runtime.cli.settings import changed, section, setting
from grpojax.runtime.files import records
from grpojax.studies import baseline_errors, errors, mse, run, samples
from grpojax.studies.baseline_errors import Pool

_OTHER_SAMPLES = 77  # added to the seed: not those of studies.mse

FLAGS = run.FLAGS
_SHARED = changed(
  mse.SETTINGS,
  {
    "name": "baselines",
    "num_prompts": 6,
    "samples": 256,
    "group_sizes": (8,),
  },
)
SETTINGS = section(
  _SHARED.text,
  **_SHARED.fields,
  blocks=setting(
    8, "blocks of a prompt's completions, for the intervals", within="[3, inf)"
  ),
)
"""Those of `studies.mse` and one more; about eight minutes of CPU time."""


def config_errors(config: ConfigDict) -> list[str]:
  """Lists all that is wrong with the values."""
  trial = ConfigDict(config.to_dict())
  trial.samples = 3 * max(config.group_sizes, default=1)  # has its own check
  wrong = mse.config_errors(trial)
  if config.num_prompts < 2:
    remedy = "norm_ratio learns from the other prompts: give 2 or more"
    wrong.append(config_error("num_prompts", config.num_prompts, remedy))
  if any(config.samples % (config.blocks * g) for g in config.group_sizes):
    remedy = "each of blocks must have whole groups of each size"
    wrong.append(config_error("samples", config.samples, remedy))
  return wrong


def _sample(
  config: ConfigDict, bench: samples.Bench, name: str, index: int
) -> Pool:
  """Samples the pool of one prompt."""
  key = samples.prompt_key(config.seed + _OTHER_SAMPLES, name, index)
  sampled = samples.sample(bench, index, [key])
  unsure = logit_score_sq(
    jnp.asarray(sampled.logprobs), jnp.asarray(sampled.mask)
  )
  return Pool(
    gram=sampled.gram,
    rewards=sampled.rewards,
    lengths=sampled.mask.sum(-1).astype(np.float64),
    logit_score_sq=np.asarray(unsure, np.float64),
  )


def collect(
  config: ConfigDict, directory: pathlib.Path
) -> dict[str, list[Pool]]:
  """Loads all prompts' pools by configuration; samples those that lack."""
  pools: dict[str, list[Pool]] = {}
  directory.mkdir(exist_ok=True)
  for name in samples.CONFIGURATIONS:
    bench, pools[name] = None, []
    for index in range(config.num_prompts):
      path = directory / f"{name}-{index}.npz"
      if not path.is_file():
        bench = bench or samples.open_bench(config, name)
        pool = _sample(config, bench, name, index)
        with records.replacing(path) as part, open(part, "wb") as file:
          np.savez(file, **pool._asdict())
        right = np.mean(pool.rewards)
        print(f"{name} {index + 1}/{config.num_prompts}: {right:.0%} right")
      with np.load(path, allow_pickle=False) as stored:
        pools[name].append(Pool(**{k: stored[k] for k in Pool._fields}))
  return pools


def table(
  config: ConfigDict, pools: Mapping[str, Sequence[Pool]]
) -> list[dict[str, Any]]:
  """Rows of a configuration, group size and estimator: means over prompts."""
  rows = []
  for name, of_prompts in pools.items():
    for size in config.group_sizes:
      measured = [
        baseline_errors.measure(of_prompts, i, size, blocks=config.blocks)
        for i in range(len(of_prompts))
      ]
      by_estimator = {}
      for estimator in measured[0]:
        values, without = zip(
          *(one[estimator] for one in measured), strict=True
        )
        by_estimator[estimator] = np.array(values), np.array(without)
      for estimator, numbers in by_estimator.items():
        error = errors.mean_over_prompts(*numbers)
        ratio = errors.ratio_of_means(numbers, by_estimator["leave_one_out"])
        row = {"configuration": name, "group_size": size}
        row |= {"estimator": estimator}
        row |= {f"mse_{k}": error[k] for k in ("mean", "low", "high")}
        row |= {f"ratio_{k}": ratio[k] for k in ("mean", "low", "high")}
        rows.append(run.rounded(row))
  return rows


def summary(pools: Mapping[str, Sequence[Pool]]) -> dict[str, Any]:
  """Causes of the errors: means over prompts, by configuration."""

  def mean(function, of_prompts):
    return float(np.mean([function(pool) for pool in of_prompts]))

  def correlation(field):  # of the logarithms of |s|^2 and of the field
    def of_pool(pool):
      score_sq, other = np.diag(pool.gram), getattr(pool, field)
      both = (score_sq > 0) & (other > 0)
      logs = np.log([score_sq[both], other[both]])
      return float(np.corrcoef(logs)[0, 1])

    return of_pool

  return {
    name: {
      "value": mean(lambda p: p.rewards.mean(), of_prompts),
      "best_constant": mean(
        lambda p: errors.best_baseline(p.gram, p.rewards), of_prompts
      ),
      "log_correlation_with_score_sq": {
        "length": mean(correlation("lengths"), of_prompts),
        "logit_score_sq": mean(correlation("logit_score_sq"), of_prompts),
      },
    }
    for name, of_prompts in pools.items()
  }


def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws errors as parts of leave_one_out's, a panel a configuration."""
  largest = max(row["group_size"] for row in rows)
  labels = list(dict.fromkeys(row["estimator"] for row in rows))[::-1]
  with run.picture(path, 1, len(samples.CONFIGURATIONS), width=3.6) as axes:
    for ax, name in zip(axes[0], samples.CONFIGURATIONS, strict=True):
      shown = [
        row
        for row in rows
        if row["configuration"] == name and row["group_size"] == largest
      ]
      for row in shown:
        mean = row["ratio_mean"]
        ends = [[mean - row["ratio_low"]], [row["ratio_high"] - mean]]
        at = labels.index(row["estimator"])
        ends = np.maximum(ends, 0)
        ax.errorbar(mean, at, xerr=ends, fmt="o", ms=4, capsize=2)
      ax.axvline(1, color="tab:gray", lw=0.8)
      ax.set_xscale("log")
      ax.set_yticks(range(len(labels)))
      ax.set_xlabel(f"error / leave_one_out's, G = {largest}")
      ax.set_title(name, fontsize=10)
      ax.grid(alpha=0.3, axis="x", which="both")
      ax.set_yticklabels(labels if name == samples.CONFIGURATIONS[0] else [])


def main(argv: list[str]) -> None:
  """Runs the study with `argv`, the words after its name."""
  with run.study(argv, SETTINGS, config_errors, __doc__) as (config, directory):
    pools = collect(config, directory / "pools")
    rows = table(config, pools)
    run.write_tables(directory, results=rows)
    records.write_json(directory / "summary.json", summary(pools))
    draw(rows, directory / "baselines.png")
    for row in rows:
      print(
        "{configuration:10s} G={group_size} {estimator:24s} {mse_mean:8.1f} "
        "[{mse_low:.1f}, {mse_high:.1f}]".format(**row)
      )
    print(f"tables and picture are in {directory}/")


if __name__ == "__main__":
  main(sys.argv[1:])
