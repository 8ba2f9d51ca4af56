"""Evaluates a model on held-out problems, or compares two models.

    python -m grpojax.evaluate DIR [--compare=DIR] [--samples=N]
                               [--k=1,2,4] [--majority] [--temperature=1.0]
                               [--out=FILE.json] [--config.key=value ...]

DIR (or --model=DIR) is a Hugging Face directory, the name of a bundled model,
ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub, or the directory of a
training run, finished or not, whose config becomes the default. Settings that
evaluation ignores are refused. By default it decodes greedily and prints
the accuracy with Wilson's 95% interval; with --samples=N it draws N completions
per prompt and prints pass@k (unbiased) for each k, with a 95% interval over
prompts. --majority adds maj@k: how often the most frequent answer of k
completions is right.

--compare evaluates a second model on the same problems and prints, for each
metric, the paired difference (--model minus --compare) with its 95% interval
and a two-sided p-value. Each model is prompted in its own format. Both use the
same data, lengths and random seed, taken from --model if it is a run, never
from --compare. With data.too_long=drop, problems must fit both models.
"""

import contextlib
import sys
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.types import Params
from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records
from grpojax.runtime.terminal import screen
from grpojax.statistics.pass_at_k import MOST_SAMPLES
from grpojax.training import policies
from grpojax.training.config import SETTINGS, from_config
from grpojax.training.evaluation import evaluation
from grpojax.training.run import memory, run_models
from grpojax.training.settings import mixtures
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes, sampling, scoring
from grpojax.training.step.draws import Source

FLAGS = {
  "model": setting(
    "", "directory, .gguf file, bundled model, run, or ORG/NAME[@REVISION]"
  ),
  "compare": setting(
    "", 'second model, evaluated with the data settings of --model; "" = none'
  ),
  "best": setting(False, "use the checkpoint of highest held-out accuracy"),
  "samples": setting(
    0, "completions per prompt; 0 = one greedy completion", within="[0, inf)"
  ),
  "k": setting("1", "values of k, comma-separated, each at most --samples"),
  "majority": setting(
    False, "also report maj@k, the accuracy of the most frequent of k answers"
  ),
  "temperature": setting(1.0, "sampling temperature", within="[0.01, 100]"),
  "out": setting("", 'JSON file for the result; "" = none'),
}

READS = tuple(
  "seed steps model.dtype model.ignore_keys data. environment. reward. "
  "eval.num_prompts eval.batch_size sampling.max_new_tokens sampling.stop "
  "log.every".split()
)
"""Settings, or prefixes of settings, that affect an evaluation."""

_Models = list[tuple[policies.Policy, Params]]
_Values = list[dict[str, np.ndarray]]
"""For each model, its metrics by name, with a value per prompt: [prompts]."""


def _check_flags(settings: TrainSettings, flags: ConfigDict) -> list[int]:
  """Refuses conflicting flags; returns the values of k, [] if greedy."""
  try:
    ks = [int(k) for k in flags.k.split(",")]
  except ValueError:
    raise ValueError(f"--k={flags.k}: give numbers like 1,2,4") from None
  samples = flags.samples
  majority = flags.majority
  first = settings.reward.functions[0]
  judges = {first, *mixtures.judges(settings).values()}
  errors = {
    "--samples needs --config.eval.num_prompts=2 or more, for intervals": (
      samples and settings.eval.num_prompts < 2
    ),
    "--k and --majority need --samples=N": (
      not samples and (majority or flags.k != FLAGS["k"].default)
    ),
    f"--majority needs {' or '.join(evaluation.VOTING)}, which extract "
    f"answers: the problems are judged by {', '.join(sorted(judges))}": (
      majority and (first not in evaluation.VOTING or len(judges) > 1)
    ),
    f"--majority takes at most --samples={MOST_SAMPLES}": (
      majority and samples > MOST_SAMPLES
    ),
    f"--k={flags.k}: each k must be in 1..{samples}": (
      samples and not all(1 <= k <= samples for k in ks)
    ),
  }
  for message, wrong in errors.items():
    if wrong:
      raise ValueError(message)
  return ks if samples else []


def _parse(argv: list[str]) -> tuple[TrainSettings, ConfigDict, list[int]]:
  def parse(default=None, reads=READS):
    return command_line.parse(
      argv, FLAGS, SETTINGS, __doc__, default, "model", reads
    )

  config, flags = parse()
  if run_models.is_run(flags.model):  # refuse model.dtype, which runs ignore
    reads = [name for name in READS if name != "model.dtype"]
    config, flags = parse(lambda: run_models.read_config(flags.model), reads)
  settings = from_config(config)
  if not flags.model:
    raise ValueError(
      "give --model: a directory, .gguf file, bundled model, run, or ORG/NAME "
      "of the Hub"
    )
  ks = _check_flags(settings, flags)
  scoring.resolve_functions(settings)
  if flags.out:
    disk.check_file(flags.out, "--out")
  return settings, flags, ks


def _load(
  settings: TrainSettings, flags: ConfigDict
) -> tuple[_Models, list[evaluation.HeldOut]]:
  names = [name for name in (flags.model, flags.compare) if name]
  models = []
  for name in names:
    best = flags.best and not models
    policy, params = run_models.load(name, settings.model, best)
    policy = policies.with_stop(policy, settings.sampling.stop)
    samples = flags.samples or 1
    memory.refuse(memory.evaluation(settings, policy.shape, samples))
    models.append((policy, params))
  problems = evaluation.held_out_problems(
    settings, names, [policy for policy, _ in models]
  )
  count = problems[0].count
  for name, held_out in zip(names, problems, strict=True):
    if held_out.too_long:
      print(f"{name}: {held_out.too_long} held-out prompts are too long")
  if len(names) > 1 and any(x.too_long for x in problems):
    print(f"compared on the {count} held-out prompts that fit both")
  if flags.samples and count < 2:
    raise ValueError(
      f"{count} held-out prompt remains, but an interval over prompts needs 2: "
      "raise --config.data.max_prompt_length or --config.eval.num_prompts"
    )
  return models, problems


def _evaluate(
  settings: TrainSettings,
  flags: ConfigDict,
  ks: list[int],
  models: _Models,
  held_out: list[evaluation.HeldOut],
) -> tuple[_Values, dict[str, _Values]]:
  """Returns the metrics of each model, over all problems and by data set."""
  distribution = Sampling(flags.temperature if flags.samples else 0.0)
  count = flags.samples or 1
  answer = None
  if flags.majority:
    answer = evaluation.answer_reader(settings, settings.reward.functions[0])
  values = []
  by_data_set = {}
  with contextlib.ExitStack() as stack:
    with command_line.usage_errors():
      reward_pool = stack.enter_context(scoring.open_reward_pool(settings))
      environment = reward_pool.environment
      if environment:
        for (policy, _), problems in zip(models, held_out, strict=True):
          example = problems.batches[0][1][0]
          episodes.check(settings, policy, environment, example)
    for (policy, params), problems in zip(models, held_out, strict=True):
      sampler = sampling.make_sampler(
        settings, policy, count, distribution, environment=environment
      )
      result = evaluation.evaluate(
        settings,
        Source(policy, sampler, reward_pool),
        params,
        problems.batches,
        settings.steps,
        on_progress=screen.progress(problems.count, settings.log.every),
      )
      if result.failures:
        print(evaluation.failed(result.failures))
      if not np.isfinite(result.rewards).any():
        print(evaluation.UNSCORED)
      values.append(evaluation.per_prompt(result, ks, answer))
      parts = evaluation.by_data_set(settings, result, values[-1])
      for name, metrics in parts.items():
        by_data_set.setdefault(name, []).append(metrics)
  return values, by_data_set


def main(argv: list[str]) -> None:
  """Runs the program with command line arguments `argv`."""
  compilation.keep()
  with command_line.usage_errors():
    settings, flags, ks = _parse(argv)
    models, problems = _load(settings, flags)
  values, by_data_set = _evaluate(settings, flags, ks, models, problems)
  try:  # write before printing, because the terminal may be closed
    if flags.out:
      results = _results(flags, values)
      if by_data_set:
        results["data_sets"] = {
          name: _results(flags, x) for name, x in by_data_set.items()
        }
      with command_line.usage_errors():
        records.write_json(flags.out, results)
  finally:
    _report(flags, values)
    for name, metrics in by_data_set.items():
      print(f"\n{name}", end=", ")
      _report(flags, metrics)


def _results(flags: ConfigDict, values: _Values) -> dict[str, Any]:
  results = {"model": flags.model} | evaluation.numbers(values[0])
  if flags.compare:
    numbers = evaluation.numbers(values[1])
    results["compare"] = {"model": flags.compare} | numbers
    differences = evaluation.compare(*values)
    results["difference"] = {k: v._asdict() for k, v in differences.items()}
  return results


def _report(flags: ConfigDict, values: _Values) -> None:
  count = len(next(iter(values[0].values())))
  if flags.compare:
    print(f"{flags.model} (model) and {flags.compare} (compare):")
    print(f"the same {count} held-out prompts", end="\n\n")
    print(*evaluation.table(*values), sep="\n")
  else:
    print(f"{flags.model}: {count} held-out prompts")
    print(*evaluation.lines(values[0]), sep="\n")


if __name__ == "__main__":
  main(sys.argv[1:])
