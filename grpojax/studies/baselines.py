"""Errors of the gradient with each baseline, measured.

    python -m grpojax.studies.baselines [--run_dir=DIR] [--config.key=value ...]

Held-out arithmetic problems, the embedded models and exact scores of all
parameters, as in `grpojax.studies.mse`: the mean squared error of a prompt's
gradient with leave-one-out baselines that weigh the other samples in several
ways, beside leave_one_out, vanilla, an oracle that knows the value V(x), and
the best constant baseline E[|s|^2 Z] / E|s|^2. `norm_ratio` knows the scores'
lengths from the other prompts. And the error of a step whose groups are divided
among its prompts (`statistics.allocation`), by that with equal numbers.

A pool is S completions of one prompt, known by the Gram matrix of their scores
(`studies.errors`), their rewards, and what the weights are made of. All that is
compared here is unbiased, so that an estimator's mean squared error is
E|ghat|^2 - |g|^2. The first is measured on groups of the pool, each of them
within one of b blocks, several random divisions of a block into groups; the
second is a U-statistic, sum_{i != j} K_ij (Z_i - c)(Z_j - c) / (S (S - 1)),
with a constant c that other prompts chose. Blocks are independent: intervals
are jackknives over them, with the prompts fixed, and any `projections` too.

The run directory has pools/, a file a prompt as soon as it is sampled (the same
command goes on where it stopped), results.csv, summary.json and baselines.png.
"""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from grpojax.core import advantages
from grpojax.core.advantages.weighted_baselines import (
  ScoreNorms,
  logit_score_sq,
  score_norm_sums,
)
from grpojax.runtime.cli.config import config_error
from grpojax.runtime.cli.settings import changed, section, setting
from grpojax.runtime.files import records
from grpojax.statistics import allocation
from grpojax.studies import errors, mse, run, samples

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


class Pool(NamedTuple):
  """S completions of one prompt."""

  gram: Float[np.ndarray, "S S"]  # inner products of their scores
  rewards: Float[np.ndarray, "S"]
  lengths: Float[np.ndarray, "S"]  # in tokens
  logit_score_sq: Float[np.ndarray, "S"]  # from `core.advantages`


Advantage = Callable[[Pool], Array]  # of groups, fields [n, G] -> [n, G]


def norms_of_others(pools: Sequence[Pool], index: int) -> ScoreNorms:
  """Sums that `norm_ratio` would learn from the other prompts' pools."""
  scaled = []
  for pool in [*pools[:index], *pools[index + 1 :]]:
    sums = score_norm_sums(
      jnp.diag(pool.gram)[None], jnp.asarray(pool.rewards)[None]
    )
    # Each prompt weighs alike: the scale of its scores is its own.
    middle = jnp.maximum(sums.middle, 1e-30)
    scaled.append([x / middle for x in (sums.level, sums.slope, sums.middle)])
  level, slope, middle = (sum(x) for x in zip(*scaled, strict=True))
  return ScoreNorms(level, slope, middle)


def estimators(
  value: float, best: float, norms: ScoreNorms
) -> dict[str, Advantage]:
  """Advantages that are compared, by name; `value` is V(x), for the oracle."""
  a = advantages

  def weighted(power):
    return lambda p: a.score_weighted(p.rewards, p.logit_score_sq, power)

  return {
    "leave_one_out": lambda p: a.leave_one_out(p.rewards),
    "vanilla": lambda p: a.vanilla(p.rewards),
    "oracle": lambda p: p.rewards - value,
    "length_weighted": lambda p: a.length_weighted(p.rewards, p.lengths),
    "score_weighted, power 1": weighted(1.0),
    "score_weighted, power 2": weighted(2.0),
    "score_weighted, power 3": weighted(3.0),
    "true |s|^2 weights": lambda p: a.score_weighted(p.rewards, p.gram, 1.0),
    "norm_ratio": lambda p: a.norm_ratio(p.rewards, norms),
    "best constant": lambda p: p.rewards - best,
  }


def _divisions(size: int, group_size: int, blocks: int, rounds: int, seed: int):
  """Draws groups within blocks: indices [blocks, groups, G].

  For 8 samples in 2 blocks, G = 2 and one round, for example
  [[[2, 0], [1, 3]], [[5, 4], [7, 6]]].
  """
  rng = np.random.default_rng(seed)
  shuffled = [
    np.concatenate([rng.permutation(block) for _ in range(rounds)])
    for block in np.arange(size).reshape(blocks, -1)
  ]
  return np.array(shuffled).reshape(blocks, -1, group_size)


def gradient_sq(pool: Pool, constant: float, samples: np.ndarray) -> float:
  """Unbiased estimate of |g|^2 from the samples of a pool with these indices.

  `constant` is a baseline that this pool did not choose.
  """
  y = pool.rewards[samples].astype(np.float64) - constant
  products = pool.gram[np.ix_(samples, samples)] * y[:, None] * y
  n = len(samples)
  return float(products.sum() - np.trace(products)) / (n * (n - 1))


def measure(
  pools: Sequence[Pool],
  index: int,
  group_size: int,
  *,
  blocks: int,
  rounds: int = 8,
) -> dict[str, tuple[float, Float[np.ndarray, "b"]]]:
  """Measures the mean squared errors of one prompt's gradient.

  Args:
    pools: pools of all prompts of a configuration, at least 2.
    index: index of the one that is measured.
    group_size: G; divides S / blocks.
    blocks: number b of blocks of the pool.
    rounds: number of divisions of each block into groups.

  Returns:
    For each of `estimators` its error, and the same without each block.
  """
  pool, n = pools[index], len(pools[index].rewards)
  others = [errors.best_baseline(p.gram, p.rewards) for p in pools]
  constant = float(np.mean(np.delete(others, index)))

  # The pool's fields by groups, and the products within each group.
  groups = _divisions(n, group_size, blocks, rounds, index)  # [b, m, G]
  fields = pool._replace(gram=np.diag(pool.gram))
  grouped = jax.tree.map(
    lambda x: jnp.asarray(x[groups].reshape(-1, group_size), jnp.float32),
    fields,
  )
  inside = pool.gram[groups[..., :, None], groups[..., None, :]]  # [b, m, G, G]

  # |g|^2 of the whole pool, and without each of its blocks.
  subsets = [np.arange(n), *errors.without_each(blocks, n)]
  truth = np.array([gradient_sq(pool, constant, x) for x in subsets])

  advantage_of = estimators(
    float(pool.rewards.mean()),
    others[index],
    norms_of_others(pools, index),
  )
  measured = {}
  for name, advantage in advantage_of.items():
    weights = np.asarray(advantage(grouped), np.float64) / group_size
    weights = weights.reshape(groups.shape)
    squares = np.einsum("bmg,bmgh,bmh->bm", weights, inside, weights).mean(-1)
    without = (squares.sum() - squares) / (blocks - 1)
    measured[name] = float(squares.mean() - truth[0]), without - truth[1:]
  return measured


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
        measure(of_prompts, i, size, blocks=config.blocks)
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


def _group_error(pool: Pool, chosen: np.ndarray, group_size: int) -> float:
  """Estimate of v = c2 / G + c3 / (G (G - 1)) from some of the samples."""
  gram = pool.gram[np.ix_(chosen, chosen)].astype(np.float64)
  m = errors.score_moments(gram, pool.rewards[chosen])
  return m.oracle_trace / group_size + m.remainder / (
    group_size * (group_size - 1)
  )


def allocation_errors(
  pools: Sequence[Pool],
  group_size: int,
  *,
  earlier: int = 8,
  groups: int = 4,
  rounds: int = 50,
) -> dict[str, float]:
  """Errors with groups divided among the prompts, by those with equal numbers.

  Several `groups` a prompt on average, by what earlier samples say: v of half
  of the pool, held against the other half; and success rates, those of the
  pool and those of `earlier` samples of each prompt, a mean over `rounds`.
  """
  count, total = len(pools[0].rewards), groups * len(pools)
  halves = np.arange(count)[::2], np.arange(count)[1::2]
  of_halves = [
    np.array([_group_error(pool, half, group_size) for pool in pools])
    for half in halves
  ]
  truth = np.mean(of_halves, axis=0)

  def error(guessed, true):
    least = 1e-3 * np.mean(np.abs(guessed))  # an estimate may be negative
    counts = allocation.allocate(np.maximum(guessed, least), total)
    return allocation.relative_error(true, counts)

  def of_rates(right, n):
    guessed = allocation.errors_of_rates(0.5 + right, 0.5 + n - right)
    return error(guessed, truth)

  first, second = of_halves
  rng = np.random.default_rng(0)
  drawn = [
    [rng.choice(pool.rewards, earlier, replace=False).sum() for pool in pools]
    for _ in range(rounds)
  ]
  known = np.array([pool.rewards.sum() for pool in pools])
  return {
    "error_of_other_half": (error(first, second) + error(second, first)) / 2,
    "success_rates": of_rates(known, count),
    f"success_rates_of_{earlier}": float(
      np.mean([of_rates(np.array(right), earlier) for right in drawn])
    ),
  }


def summary(
  pools: Mapping[str, Sequence[Pool]], group_size: int
) -> dict[str, Any]:
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
      "allocation": allocation_errors(of_prompts, group_size),
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
    causes = summary(pools, max(config.group_sizes))
    records.write_json(directory / "summary.json", causes)
    draw(rows, directory / "baselines.png")
    for row in rows:
      print(
        "{configuration:10s} G={group_size} {estimator:24s} {mse_mean:8.1f} "
        "[{mse_low:.1f}, {mse_high:.1f}]".format(**row)
      )
    for name, row in causes.items():
      texts = [f"{k} {v:.3f}" for k, v in row["allocation"].items()]
      print(f"{name}: groups divided by {', '.join(texts)}")
    print(f"tables and picture are in {directory}/")


if __name__ == "__main__":
  main(sys.argv[1:])
