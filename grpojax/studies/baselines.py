"""Which baseline has the least noisy gradient, measured.

    python -m grpojax.studies.baselines [--run_dir=DIR] [--config.key=value ...]

Held-out arithmetic problems, the embedded models and exact scores of all
parameters, as in `grpojax.studies.mse`: the mean squared error of a prompt's
gradient with leave-one-out baselines that weigh the other samples in several
ways, beside leave_one_out, vanilla, an oracle that knows the value V(x), and
the best constant baseline E[|s|^2 Z] / E|s|^2. `norm_ratio` knows the scores'
lengths from the other prompts. How: `studies.baseline_errors`. Intervals are
over completions, with the prompts fixed. --config.configurations=gsm8k
--config.gsm8k=RUN, a run of `grpojax.studies.gsm8k`, measures its model before
GRPO on training problems of its own.

The run directory has pools/, a file a prompt as soon as it is sampled (the same
command goes on where it stopped), results.csv, summary.json and baselines.png.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.core.weighted_baselines import logit_score_sq
from grpojax.runtime import command_line, pictures, records
from grpojax.runtime.config import config_error
from grpojax.runtime.settings import changed, section, setting, to_config
from grpojax.studies import (
  baseline_errors,
  errors,
  gram,
  gsm8k_bench,
  mse,
  run,
)
from grpojax.studies.baseline_errors import Pool
from grpojax.studies.mse_report import mean_over_prompts, ratio_of_means
from grpojax.training import policy as policy_lib

_OTHER_SAMPLES = 77  # added to the seed: not those of studies.mse
CONFIGURATIONS = (*mse.CONFIGURATIONS, "gsm8k")


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
  powers=setting((1.0, 2.0, 3.0), "powers of score_weighted's weights"),
  configurations=setting(
    mse.CONFIGURATIONS, "models, and how they are prompted", CONFIGURATIONS
  ),
  gsm8k=setting(
    "",
    "for the configuration gsm8k: directory of a run of studies.gsm8k, whose "
    "config says how its model is prompted and sampled",
  ),
)
"""Those of `studies.mse` and some more; about eight minutes of CPU time."""


def default_config() -> ConfigDict:
  """The embedded study."""
  return to_config(SETTINGS)


def problems(config: ConfigDict) -> list[str]:
  """All that is wrong with the values, a line each."""
  trial = ConfigDict(config.to_dict())
  trial.samples = 3 * max(config.group_sizes, default=1)  # has its own check
  wrong = mse.problems(trial)
  if config.num_prompts < 2:
    todo = "norm_ratio learns from the other prompts: give 2 or more"
    wrong.append(config_error("num_prompts", config.num_prompts, todo))
  if any(config.samples % (config.blocks * g) for g in config.group_sizes):
    todo = "each of blocks must have whole groups of each size"
    wrong.append(config_error("samples", config.samples, todo))
  if not all(power > 0 for power in config.powers):
    wrong.append(config_error("powers", config.powers, "must be more than 0"))
  given = config.configurations
  if not given or len(set(given)) < len(given):
    wrong.append(
      config_error("configurations", given, "give one or more, each once")
    )
  if "gsm8k" in given:
    why = gsm8k_bench.problems(config.gsm8k, config.num_prompts)
    wrong += [config_error("gsm8k", config.gsm8k, why)] if why else []
  return wrong


def _open_bench(config: ConfigDict, name: str) -> mse.Bench:
  """The model and the prompts of a configuration."""
  if name != "gsm8k":
    return mse.open_bench(config, name)
  return gsm8k_bench.open_bench(
    config.gsm8k, config.samples, config.num_prompts
  )


def _sample(
  config: ConfigDict, bench: mse.Bench, name: str, index: int
) -> Pool:
  """The pool of one prompt."""
  prompts, examples = bench.batches[index]
  key = jax.random.key(config.seed + _OTHER_SAMPLES)
  for number in (CONFIGURATIONS.index(name), index):
    key = jax.random.fold_in(key, number)
  samples = bench.sampler(bench.policy.params, prompts, key)
  texts = policy_lib.decode(bench.policy, samples)
  mask = np.asarray(samples.completion_mask[0])
  products, _ = gram.score_gram(
    bench.score,
    bench.policy.params,
    prompts,
    np.asarray(samples.completion_ids[0]),
    mask,
    config.chunk_size,
  )
  unsure = logit_score_sq(samples.logprobs, samples.completion_mask)
  return Pool(
    products,
    bench.rewards(examples[0], texts[0]),
    mask.sum(-1).astype(np.float64),
    np.asarray(unsure[0], np.float64),
  )


def collect(
  config: ConfigDict, directory: pathlib.Path
) -> dict[str, list[Pool]]:
  """The pools of all prompts by configuration; samples those that lack."""
  pools: dict[str, list[Pool]] = {}
  directory.mkdir(exist_ok=True)
  for name in config.configurations:
    bench, pools[name] = None, []
    for index in range(config.num_prompts):
      path = directory / f"{name}-{index}.npz"
      if not path.is_file():
        with command_line.usage_errors():
          bench = bench or _open_bench(config, name)
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
  """One row a configuration, group size and estimator: means over prompts."""
  rows = []
  for name, of_prompts in pools.items():
    for size in config.group_sizes:
      each = [
        baseline_errors.measure(
          of_prompts, i, size, blocks=config.blocks, powers=config.powers
        )
        for i in range(len(of_prompts))
      ]
      numbers = {
        estimator: tuple(
          np.array([found[estimator][part] for found in each])
          for part in range(2)
        )
        for estimator in each[0]
      }
      for estimator, of_one in numbers.items():
        error = mean_over_prompts(*of_one)
        ratio = ratio_of_means(of_one, numbers["leave_one_out"])
        row = {"configuration": name, "group_size": size}
        row |= {"estimator": estimator}
        row |= {f"mse_{k}": error[k] for k in ("mean", "low", "high")}
        row |= {f"ratio_{k}": ratio[k] for k in ("mean", "low", "high")}
        rows.append(_rounded(row))
  return rows


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
  return {
    k: float(f"{x:.6g}") if isinstance(x, float) else x for k, x in row.items()
  }


def summary(pools: Mapping[str, Sequence[Pool]]) -> dict[str, Any]:
  """What the errors come from: means over prompts, by configuration."""
  fields = {"lengths": "length", "logit_score_sq": "logit_score_sq"}
  return {
    name: {
      "value": float(np.mean([p.rewards.mean() for p in of_prompts])),
      "best_constant": float(
        np.mean([errors.best_baseline(p.gram, p.rewards) for p in of_prompts])
      ),
      "log_correlation_with_score_sq": baseline_errors.correlations(
        of_prompts, fields
      ),
    }
    for name, of_prompts in pools.items()
  }


def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Errors as parts of leave_one_out's, a panel a configuration."""
  names = list(dict.fromkeys(row["configuration"] for row in rows))
  largest = max(row["group_size"] for row in rows)
  labels = list(dict.fromkeys(row["estimator"] for row in rows))[::-1]
  figure, axes = run.new_figure(1, len(names), width=3.6 + (len(names) == 1))
  for ax, name in zip(axes[0], names, strict=True):
    shown = [
      row
      for row in rows
      if (row["configuration"], row["group_size"]) == (name, largest)
    ]
    for row in shown:
      mean = row["ratio_mean"]
      ends = [[mean - row["ratio_low"]], [row["ratio_high"] - mean]]
      at = labels.index(row["estimator"])
      ax.errorbar(mean, at, xerr=np.maximum(ends, 0), fmt="o", ms=4, capsize=2)
    ax.axvline(1, color="tab:gray", lw=0.8)
    means = [row["ratio_mean"] for row in shown]
    if max(means) > 5 * min(means):  # else ticks of a logarithmic axis collide
      ax.set_xscale("log")
    ax.set_yticks(range(len(labels)), labels if name == names[0] else [])
    ax.set_xlabel("error / leave_one_out's")
    ax.set_title(f"{name}, G = {largest}", fontsize=10)
    ax.grid(alpha=0.3, axis="x", which="both")
  pictures.save_figure(figure, path)


def main(argv: list[str]) -> None:
  """Runs the study with `argv`, the words after its name."""
  config, directory = run.open_study(
    argv, "python -m grpojax.studies.baselines", SETTINGS, problems, __doc__
  )
  with run.resumable():
    pools = collect(config, directory / "pools")
  rows = table(config, pools)
  run.write_csv(directory / "results.csv", rows)
  records.write_json(directory / "summary.json", summary(pools))
  draw(rows, directory / "baselines.png")
  for row in rows:
    print(
      "{configuration:10s} G={group_size} {estimator:24s} {mse_mean:8.1f} "
      "[{mse_low:.1f}, {mse_high:.1f}]".format(**row)
    )
  print(f"wrote {directory}/results.csv, summary.json and baselines.png")


if __name__ == "__main__":
  main(sys.argv[1:])
