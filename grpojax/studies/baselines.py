"""Errors of the gradient with each baseline, measured.

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

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from grpojax.core.advantages.weighted_baselines import logit_score_sq
from grpojax.rewards.math import math_answer
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli import config as config_lib
from grpojax.runtime.cli.config import config_error
from grpojax.runtime.cli.settings import changed, section, setting
from grpojax.runtime.files import records
from grpojax.runtime.terminal import pictures
from grpojax.studies import baseline_errors, errors, gsm8k, mse, run
from grpojax.studies.baseline_errors import Pool
from grpojax.training import policy as policy_lib
from grpojax.training.data import prompts, splits
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import sampling as sampling_lib

_OTHER_SAMPLES = 77  # added to the seed: not those of studies.mse
CONFIGURATIONS = (*mse.CONFIGURATIONS, "gsm8k")
_SOLVED = 0.1, 0.9  # shares of right answers that have a gradient to speak of


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
  if not all(power > 0 for power in config.powers):
    wrong.append(config_error("powers", config.powers, "must be more than 0"))
  names = config.configurations
  if not names or len(set(names)) < len(names):
    wrong.append(
      config_error("configurations", names, "give one or more, each once")
    )
  if "gsm8k" in names:
    reason = gsm8k_error(config.gsm8k, config.num_prompts)
    if reason:
      wrong.append(config_error("gsm8k", config.gsm8k, reason))
  return wrong


def gsm8k_error(directory: str, num_prompts: int) -> str:
  """Reason why a run of `studies.gsm8k` cannot be measured; "" if it can."""
  if not directory:
    return "give the directory of a run of grpojax.studies.gsm8k"
  root = pathlib.Path(directory)
  try:
    count = len(_gsm8k_problems(root))
    train = _gsm8k_settings(root)
    policy_lib.find_model(train.model.path)
  except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
    return f"no run of grpojax.studies.gsm8k with its before.json ({error})"
  if train.reward.functions != (math_answer.__name__,):
    return (
      f"its problems were scored by {train.reward.functions}; this study "
      f"scores with {math_answer.__name__} alone"
    )
  if count < num_prompts:
    low, high = _SOLVED
    return (
      f"has {count} problems that are solved {low:.0%} to {high:.0%} of the "
      f"time, fewer than num_prompts = {num_prompts}"
    )
  return ""


def _gsm8k_problems(directory: pathlib.Path) -> list[int]:
  """Indices of problems that before.json's samples sometimes solve."""
  stage = json.loads((directory / "before.json").read_text())
  shares, (low, high) = np.array(stage["rewards"], np.float64), _SOLVED
  return np.flatnonzero((low <= shares) & (shares <= high)).tolist()


def _gsm8k_settings(directory: pathlib.Path) -> TrainSettings:
  """Settings of the run's GRPO, by which before.json's samples were drawn."""
  study = config_lib.from_json((directory / "config.json").read_text())
  study, _ = config_lib.fill_in(study, gsm8k.default_config())
  # Absolute: a relative one that is not there could be a name on the Hub.
  return gsm8k.grpo_run(study, directory.absolute())


def _gsm8k_rewards(example: dict, texts: Sequence[str]) -> np.ndarray:
  rewards = [math_answer("", text, example) for text in texts]
  return np.array(rewards, np.float32)


def open_gsm8k(directory: str, samples: int, num_prompts: int) -> mse.Bench:
  """Loads the model after supervised fine-tuning, and training problems.

  The problems are the first ones that are sometimes solved: by other samples
  than the pool's, so any choice is fair. The model is in float32, whatever the
  run trained in: the scores are to be exact.

  Raises:
    OSError, ValueError: the run is one that `gsm8k_error` describes.
  """
  root = pathlib.Path(directory)
  train = _gsm8k_settings(root)
  policy = policy_lib.load_policy(train.model.path)
  examples = splits.load_examples(train, "train")
  batches = [
    prompts.prompts_of(train, policy, examples, [i])
    for i in _gsm8k_problems(root)[:num_prompts]
  ]
  sampling = train.sampling.distribution
  return mse.Bench(
    policy,
    batches,
    sampling_lib.make_sampler(train, policy, samples, sampling),
    errors.make_score(policy.lm, sampling),
    _gsm8k_rewards,
  )


def _open_bench(config: ConfigDict, name: str) -> mse.Bench:
  if name == "gsm8k":
    return open_gsm8k(config.gsm8k, config.samples, config.num_prompts)
  return mse.open_bench(config, name)


def _sample(
  config: ConfigDict, bench: mse.Bench, name: str, index: int
) -> Pool:
  """Samples the pool of one prompt."""
  prompt, examples = bench.batches[index]
  key = mse.prompt_key(
    config.seed + _OTHER_SAMPLES, CONFIGURATIONS.index(name), index
  )
  samples = bench.sampler(bench.policy.params, prompt, key)
  texts = policy_lib.decode(bench.policy, samples)
  mask = np.asarray(samples.completion_mask[0])
  products, _ = errors.score_gram(
    bench.score,
    bench.policy.params,
    prompt,
    np.asarray(samples.completion_ids[0]),
    mask,
    config.chunk_size,
  )
  unsure = logit_score_sq(samples.logprobs, samples.completion_mask)
  return Pool(
    gram=products,
    rewards=bench.rewards(examples[0], texts[0]),
    lengths=mask.sum(-1).astype(np.float64),
    logit_score_sq=np.asarray(unsure[0], np.float64),
  )


def collect(
  config: ConfigDict, directory: pathlib.Path
) -> dict[str, list[Pool]]:
  """Loads all prompts' pools by configuration; samples those that lack."""
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
  """Rows of a configuration, group size and estimator: means over prompts."""
  rows = []
  for name, of_prompts in pools.items():
    for size in config.group_sizes:
      measured = [
        baseline_errors.measure(
          of_prompts, i, size, blocks=config.blocks, powers=config.powers
        )
        for i in range(len(of_prompts))
      ]
      by_estimator = {
        estimator: tuple(
          np.array(x)
          for x in zip(*(one[estimator] for one in measured), strict=True)
        )
        for estimator in measured[0]
      }
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
    argv,
    "python -m grpojax.studies.baselines",
    SETTINGS,
    config_errors,
    __doc__,
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
