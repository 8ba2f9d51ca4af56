"""Mean squared error of gradient estimators against group size, measured.

    python -m grpojax.studies.mse [--run_dir=DIR] [--config.key=value ...]

Figure 4 of arXiv 2603.01162 on the embedded arithmetic models: vanilla, GRPO
(leave-one-out, and centred with the group's own mean) and oracle, each against
the group size, for a base model, an instruct model, and the base model with
solved examples in its prompt. The gradient is that of the expected reward of a
prompt with respect to all parameters; errors are conditional on the prompt, and
averaged over held-out prompts.

For each prompt two pools of completions are sampled. Groups of the first are
measured (`errors.group_errors`); the curves are the exact formulas of
`statistics.u_statistics.mse` with moments estimated from the second, because
the completions of a real model cannot be enumerated. Intervals are over the
completions, with the prompts fixed.

The run directory has rows.jsonl, a line a prompt as soon as it is done (the
same command goes on where it stopped), results.csv, summary.json and mse.png.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.data import arithmetic
from grpojax.rewards.exact import exact_answer
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.config import config_error
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import records
from grpojax.runtime.text import tokenizer
from grpojax.statistics import u_statistics
from grpojax.statistics.u_statistics import Moments
from grpojax.studies import errors, run
from grpojax.training import policy as policy_lib
from grpojax.training.config import default_config, from_config
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.data import splits
from grpojax.training.step import sampling as sampling_lib

CONFIGURATIONS = ("base", "instruct", "in-context")
_TITLES = {
  "base": "base model",
  "instruct": "instruct model",
  "in-context": "base model, {shots} examples in the prompt",
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
    "arithmetic-base", "model prompted in context: embedded, or a directory"
  ),
  instruct=setting(
    "arithmetic-instruct", "model prompted by its chat template, likewise"
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
)
"""About seven minutes of CPU time."""


def config_errors(config: ConfigDict) -> list[str]:
  """Lists what is wrong with values that are in their ranges."""
  wrong = []
  sizes = config.group_sizes
  if not sizes or not all(isinstance(g, int) and g >= 2 for g in sizes):
    remedy = "give whole numbers of 2 or more"
    wrong.append(config_error("group_sizes", sizes, remedy))
  elif any(max(sizes) % g for g in sizes) or len(set(sizes)) < len(sizes):
    remedy = "each must divide the largest, once"
    wrong.append(config_error("group_sizes", sizes, remedy))
  elif config.samples % max(sizes) or config.samples < 3 * max(sizes):
    remedy = (
      f"must be a multiple of {max(sizes)}, the largest group, at least 3 times"
    )
    wrong.append(config_error("samples", config.samples, remedy))
  for name in ("base", "instruct"):
    try:
      policy_lib.find_model(config[name])
    except ValueError as error:
      wrong.append(config_error(name, config[name], f"{error}"))
  return wrong


class Bench(NamedTuple):
  """All that one configuration's prompts need."""

  policy: policy_lib.Policy
  batches: list  # one prompt each, with its example
  sampler: Any  # of one pool, from `step.sampling.make_sampler`
  score: Any  # from `errors.make_score`


def open_bench(config: ConfigDict, name: str) -> Bench:
  """Loads a configuration's model, and formats its prompts.

  Raises:
    SystemExit: the model cannot be read, or takes no examples in its prompt.
  """
  path = config.instruct if name == "instruct" else config.base
  with command_line.usage_errors():
    policy = policy_lib.load_policy(path)
  train = default_config()
  train.seed = config.seed
  train.eval.num_prompts = config.num_prompts
  train.sampling.max_new_tokens = config.max_new_tokens
  settings = from_config(train)
  template = settings.data.template
  if name == "in-context":
    if policy.tokenizer.chat_template:
      raise SystemExit(
        f"error: --config.base = {path!r} has a chat template: the in-context "
        "configuration needs a model of plain text"
      )
    examples = splits.load_examples(settings, "train")
    solved = [examples[i]["prompt"] for i in range(config.shots)]
    shots = (f"{p}\n{arithmetic.solution(p)}\n\n" for p in solved)
    template = "".join(shots) + template
  held_out = splits.load_examples(settings, "test")

  def length(index):
    prompt = held_out[index]["prompt"]
    return len(tokenizer.encode_prompt(policy.tokenizer, prompt, template)[1])

  longest = max(map(length, range(config.num_prompts)))
  data = dataclasses.replace(
    settings.data, template=template, max_prompt_length=longest
  )
  settings = dataclasses.replace(settings, data=data)
  batches = prompts_lib.prompt_batches(
    settings, policy, held_out, batch_size=1, shuffle=False, repeat=False
  )
  sampling = settings.sampling.distribution
  return Bench(
    policy,
    list(batches),
    sampling_lib.make_sampler(settings, policy, config.samples, sampling),
    errors.make_score(policy.lm, sampling),
  )


def prompt_key(seed: int, name: str, index: int) -> jax.Array:
  """Random key of the samples of a configuration's prompt."""
  key = jax.random.key(seed)
  key = jax.random.fold_in(key, CONFIGURATIONS.index(name))
  return jax.random.fold_in(key, index)


class Sampled(NamedTuple):
  """Completions of one prompt: pools, one after another."""

  mask: np.ndarray  # [S, T], True on their tokens
  rewards: np.ndarray  # [S]
  gram: np.ndarray  # [S, S], inner products of their scores
  distinct: int  # number of different ones
  logprobs: np.ndarray  # [S, T]


def sample(bench: Bench, index: int, keys: Sequence[jax.Array]) -> Sampled:
  """Samples a pool for each key, and computes the scores of all together."""
  prompts, (example,) = bench.batches[index]
  ids, mask, logprobs, rewards = [], [], [], []
  for key in keys:
    pool = bench.sampler(bench.policy.params, prompts, key)
    (texts,) = policy_lib.decode(bench.policy, pool)
    rewards += [exact_answer("", text, example) for text in texts]
    ids.append(np.asarray(pool.completion_ids[0]))
    mask.append(np.asarray(pool.completion_mask[0]))
    logprobs.append(np.asarray(pool.logprobs[0]))
  mask = np.concatenate(mask)
  gram, distinct = errors.score_gram(
    bench.score, bench.policy.params, prompts, np.concatenate(ids), mask
  )
  rewards = np.array(rewards, np.float32)
  return Sampled(mask, rewards, gram, distinct, np.concatenate(logprobs))


def _measure(config: ConfigDict, bench: Bench, name: str, index: int):
  """Samples two pools for a prompt; returns its row of results."""
  key = prompt_key(config.seed, name, index)
  sampled = sample(bench, index, [jax.random.fold_in(key, i) for i in (0, 1)])
  # The first pool is measured, the second gives theory its moments.
  n, blocks = config.samples, config.samples // max(config.group_sizes)
  first, second = sampled.gram[:n, :n], sampled.gram[n:, n:]
  rewards, rewards_of_second = sampled.rewards[:n], sampled.rewards[n:]
  baseline = errors.best_baseline(second, rewards_of_second)
  measured, measured_without = errors.group_errors(
    first, rewards, config.group_sizes, blocks, baseline
  )
  moments = errors.score_moments(second, rewards_of_second)
  without = errors.moment_replicates(second, rewards_of_second, blocks)
  return {
    "configuration": name,
    "index": index,
    "problem": bench.batches[index][1][0]["prompt"],
    "success": float(np.mean(sampled.rewards)),
    "distinct": sampled.distinct,
    "best_baseline": baseline,
    "errors": measured._asdict(),
    "errors_without": measured_without._asdict(),
    "moments": moments._asdict(),
    "moments_without": without._asdict(),
  }


def _collect(config: ConfigDict, path: pathlib.Path) -> list[dict[str, Any]]:
  """Measures the prompts that `path` lacks; returns the rows of all."""
  records.truncate_jsonl(path, 0)  # drops a line that was cut off
  rows = {(r["configuration"], r["index"]): r for r in records.read_jsonl(path)}
  points = [(n, i) for n in CONFIGURATIONS for i in range(config.num_prompts)]
  missing = [point for point in points if point not in rows]
  benches = {name: open_bench(config, name) for name in dict(missing)}
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


def _stack(rows: Sequence[Mapping], field: str) -> dict[str, np.ndarray]:
  """Arrays of a field's values by name, with a leading axis of prompts."""
  names = rows[0][field]
  return {name: np.array([row[field][name] for row in rows]) for name in names}


def _numbers(rows: Sequence[Mapping], index: int, group_size: int):
  """Returns errors by estimator at one group size: measured, and of theory."""
  values, without = _stack(rows, "errors"), _stack(rows, "errors_without")
  measured = {x: (values[x][:, index], without[x][..., index]) for x in values}
  exact = [
    u_statistics.mse(Moments(**_stack(rows, field)), group_size)._asdict()
    for field in ("moments", "moments_without")
  ]
  theory = {
    x: tuple(np.asarray(e[x], np.float64) for e in exact) for x in values
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
    without = _stack(of_configuration, "moments_without")
    moments = {
      key: errors.mean_over_prompts(values, without[key])
      for key, values in _stack(of_configuration, "moments").items()
    }
    deviations = {
      x: [r["deviation"] for r in lines[name] if r["estimator"] == x]
      for x in _STYLES
    }
    largest = {x: max(values, key=abs) for x, values in deviations.items()}
    summaries[name] = means | {"moments": moments, "largest_deviation": largest}
  return summaries


def draw(
  rows: Sequence[Mapping[str, Any]], config: ConfigDict, path: pathlib.Path
) -> None:
  """Draws errors, and below them ratios to the oracle's, against group size."""
  configurations = _by_configuration(rows)
  with run.picture(path, 2, len(configurations), width=3.6) as axes:
    for column, (name, lines) in zip(
      axes.T, configurations.items(), strict=True
    ):
      for estimator, style in _STYLES.items():
        of_curve = [r for r in lines if r["estimator"] == estimator]
        for ax, (_, columns) in zip(column, _PANELS, strict=True):
          _draw_curve(ax, of_curve, style, columns)
      column[0].set_title(_TITLES[name].format(shots=config.shots), fontsize=10)
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
    records.write_json(directory / "summary.json", summary(rows, results))
    draw(results, config, directory / "mse.png")
    print(f"tables and picture are in {directory}/")


if __name__ == "__main__":
  main(sys.argv[1:])
