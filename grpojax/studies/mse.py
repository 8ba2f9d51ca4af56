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
import functools
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.data import arithmetic
from grpojax.rewards.exact import exact_answer
from grpojax.rewards.math import math_answer
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.config import config_error
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import records
from grpojax.runtime.text import tokenizer
from grpojax.statistics import u_statistics
from grpojax.statistics.u_statistics import Moments
from grpojax.studies import errors, questions, run
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
_NO_SAMPLE = 2**31 - 1  # samples fold their number into a pool's key
_PANELS = (  # label; columns of a point, its interval and its curve
  ("mean squared error", ("mse", "mse_low", "mse_high", "theory")),
  (
    "ratio to the oracle",
    ("ratio_to_oracle", "ratio_low", "ratio_high", "theory_ratio"),
  ),
)


class Problems(NamedTuple):
  """Kind of problems, and what the models are asked in.

  Attributes:
    load: `(train settings, split) -> examples`.
    template: template of a problem in plain text.
    solution: `(example) -> text` after it, in an example of the prompt.
    reward: `(prompt, completion, example) -> 0 or 1`.
    one_line: True where a solution in plain text ends with its line.
  """

  load: Callable[..., Any]
  template: str
  solution: Callable[[Mapping], str]
  reward: Callable[..., float]
  one_line: bool


PROBLEMS = {
  "expressions": Problems(
    lambda settings, split: splits.load_examples(settings, split),
    "{prompt}\n",
    lambda example: arithmetic.solution(example["prompt"]),
    exact_answer,
    one_line=False,
  ),
  "questions": Problems(
    lambda settings, split: questions.load(split),
    questions.PLAIN,
    lambda example: " " + example["answer"],
    math_answer,
    one_line=True,
  ),
}


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
  problems=setting(
    "expressions",
    "problems in the form of the embedded models, or in words",
    PROBLEMS,
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
  if config.projections in (1, 2):
    remedy = "their spread is part of the intervals: give 3 or more, or 0"
    wrong.append(config_error("projections", config.projections, remedy))
  most = len(questions.load("test"))
  if config.problems == "questions" and config.num_prompts > most:
    remedy = f"there are {most} held-out questions"
    wrong.append(config_error("num_prompts", config.num_prompts, remedy))
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
  score: Any  # from `errors.make_score` or, of projections, the other
  reward: Any = exact_answer
  projections: int = 0


def _plain(policy: policy_lib.Policy, one_line: bool) -> policy_lib.Policy:
  """Returns a policy of plain text, whatever its tokenizer's chat template."""
  policy.tokenizer.chat_template, ends = None, ()
  if one_line:
    pieces = enumerate(
      map(policy.tokenizer.decode, range(len(policy.tokenizer)))
    )
    ends = tuple(i for i, piece in pieces if "\n" in piece)
  return policy._replace(eos_ids=(*policy.eos_ids, *ends))


def open_bench(config: ConfigDict, name: str) -> Bench:
  """Loads a configuration's model, and formats its prompts.

  Raises:
    SystemExit: the model cannot be read.
  """
  path = config.instruct if name == "instruct" else config.base
  problems = PROBLEMS[config.problems]
  with command_line.usage_errors():
    policy = policy_lib.load_policy(path)
  train = default_config()
  train.seed = config.seed
  train.eval.num_prompts = config.num_prompts
  train.sampling.max_new_tokens = config.max_new_tokens
  settings = from_config(train)
  template = settings.data.template
  if name != "instruct":
    policy = _plain(policy, problems.one_line)
    template = problems.template
  if name == "in-context":
    examples = problems.load(settings, "train")
    solved = [examples[i] for i in range(config.shots)]
    shots = (
      f"{template.format(prompt=x['prompt'])}{problems.solution(x)}\n\n"
      for x in solved
    )
    template = "".join(shots) + template
  held_out = problems.load(settings, "test")

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
  make_score = (
    errors.make_projected_score if config.projections else errors.make_score
  )
  return Bench(
    policy,
    list(itertools.islice(batches, config.num_prompts)),
    sampling_lib.make_sampler(settings, policy, config.samples, sampling),
    make_score(policy.lm, sampling),
    problems.reward,
    config.projections,
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
  without: np.ndarray  # [V, S, S], the same without each projection
  distinct: int  # number of different ones
  logprobs: np.ndarray  # [S, T]


def sample(bench: Bench, index: int, keys: Sequence[jax.Array]) -> Sampled:
  """Samples a pool for each key, and computes the scores of all together."""
  prompts, (example,) = bench.batches[index]
  params, score = bench.policy.params, bench.score
  ids, mask, logprobs, rewards = [], [], [], []
  for key in keys:
    pool = bench.sampler(params, prompts, key)
    (texts,) = policy_lib.decode(bench.policy, pool)
    rewards += [bench.reward("", text, example) for text in texts]
    ids.append(np.asarray(pool.completion_ids[0]))
    mask.append(np.asarray(pool.completion_mask[0]))
    logprobs.append(np.asarray(pool.logprobs[0]))
  mask = np.concatenate(mask)
  if bench.projections:  # fresh ones for each prompt; no sample has this key
    key = jax.random.fold_in(keys[0], _NO_SAMPLE)
    directions = errors.random_directions(params, key, bench.projections)
    score = functools.partial(score, directions)
  gram, distinct = errors.score_gram(
    score, params, prompts, np.concatenate(ids), mask
  )
  rewards = np.array(rewards, np.float32)
  logprobs = np.concatenate(logprobs)
  without = np.empty((0, *gram.shape[-2:]))
  if bench.projections:
    without = (gram.sum(0) - gram) / (len(gram) - 1)
    gram = gram.mean(0)
  return Sampled(mask, rewards, gram, without, distinct, logprobs)


def _measure(config: ConfigDict, bench: Bench, name: str, index: int):
  """Samples two pools for a prompt; returns its row of results."""
  key = prompt_key(config.seed, name, index)
  sampled = sample(bench, index, [jax.random.fold_in(key, i) for i in (0, 1)])
  # The first pool is measured, the second gives theory its moments.
  n, blocks = config.samples, config.samples // max(config.group_sizes)
  gram, rewards, later = sampled.gram, sampled.rewards, slice(n, None)
  baseline = errors.best_baseline(gram[later, later], rewards[later])

  def measure(gram):
    sizes = config.group_sizes
    return errors.group_errors(
      gram[:n, :n], rewards[:n], sizes, blocks, baseline
    )

  measured, measured_without = measure(gram)
  second = gram[later, later], rewards[later]
  row = {
    "errors": measured,
    "errors_without": measured_without,
    "moments": errors.score_moments(*second),
    "moments_without": errors.without_blocks(
      errors.score_moments, *second, blocks
    ),
    "lengths": errors.score_lengths(gram, rewards),
    "lengths_without": errors.without_blocks(
      errors.score_lengths, gram, rewards, 2 * blocks
    ),
  }
  if bench.projections:
    grams, stacked = sampled.without, errors.stacked
    row |= {
      "errors_projected": stacked(measure(gram)[0] for gram in grams),
      "moments_projected": stacked(
        errors.score_moments(gram[later, later], rewards[later])
        for gram in grams
      ),
      "lengths_projected": stacked(
        errors.score_lengths(gram, rewards) for gram in grams
      ),
    }
  return {
    "configuration": name,
    "index": index,
    "problem": bench.batches[index][1][0]["prompt"],
    "success": float(np.mean(rewards)),
    "distinct": sampled.distinct,
    "best_baseline": baseline,
  } | {name: numbers._asdict() for name, numbers in row.items()}


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


def _stacks(rows: Sequence[Mapping], field: str) -> list[dict[str, np.ndarray]]:
  """Stacks of a field and its replicates, those of projections if any."""
  names = (field, f"{field}_without", f"{field}_projected")
  return [_stack(rows, name) for name in names if name in rows[0]]


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
  """Describes how lengths of scores go with rewards, where these differ."""
  varied = [row for row in rows if 0 < row["success"] < 1]
  if not varied or "lengths" not in rows[0]:  # of an older study
    return {}
  lengths = [row["lengths"] for row in varied]
  below = sum(x["best_baseline"] < x["value"] / 2 for x in lengths)
  counts = {
    "prompts_with_equal_rewards": len(rows) - len(varied),
    "prompts_with_best_baseline_below_half_value": below,
  }
  return counts | {"lengths": _means(varied, "lengths")}


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
