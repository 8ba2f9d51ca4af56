"""Accuracy of a model on held-out problems, or of two models on the same ones.

    python -m grpojax.evaluate DIR [--compare=DIR] [--samples=N]
                               [--k=1,2,4] [--majority] [--temperature=1.0]
                               [--out=FILE.json] [--config.key=value ...]

DIR (or --model=DIR) is a Hugging Face directory, the name of an embedded model,
ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub, or the run directory of a
training run, finished or not, whose config is then the default.
Without --samples it decodes greedily and prints the accuracy with Wilson's 95%
interval; with --samples=N it draws N completions a prompt and prints pass@k
(unbiased) for each k, with a 95% interval over prompts. --majority adds maj@k:
how often the most frequent answer of k completions is right.

--compare evaluates a second model on the same problems and prints, for each
number, the paired difference (--model less --compare) with its 95% interval and
a two-sided p-value. Each model is prompted in its own format. Data, prompt
lengths and the length of completions are those of one config for both: the
config of --model if that is a run; the config of --compare is not used. With
data.too_long=drop both are asked the problems that fit both. Both sample with
the same random numbers.
"""

import contextlib
import functools
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.core.sampling import Sampling
from grpojax.runtime import command_line, disk, records, screen
from grpojax.runtime import config as config_lib
from grpojax.runtime.settings import setting
from grpojax.statistics.pass_at_k import MOST_SAMPLES
from grpojax.training import (
  evaluation,
  held_out,
  memory,
  mixtures,
  reward_inputs,
  samplers,
  scoring,
  trained,
)
from grpojax.training.config import SETTINGS, validate
from grpojax.training.held_out import HeldOut

FLAGS = {
  "model": setting(
    "",
    "a directory, an embedded model, a run, or ORG/NAME[@REVISION] of the Hub",
  ),
  "compare": setting(
    "", 'a second model, on the data settings of the first one; "" = none'
  ),
  "best": setting(
    False,
    "of --model, the state of the highest held-out accuracy (checkpoint.best)",
  ),
  "samples": setting(
    0, "completions a prompt; 0 = one greedy completion", within="[0, inf)"
  ),
  "k": setting(
    "1", "pass@k to report, comma-separated, each at most --samples"
  ),
  "majority": setting(
    False, "also report maj@k, the vote of k answers, for each k"
  ),
  "temperature": setting(1.0, "temperature of the samples", within="(0, inf)"),
  "out": setting("", 'also write the result to this JSON file; "" = none'),
}
# Settings that two models have in common when they are compared.
SHARED = ("data.", "reward.", "sampling.max_new_tokens")


def _check_flags(config: ConfigDict, flags: ConfigDict) -> list[int]:
  """Refuses flags that do not fit together; returns the ks, none if greedy."""
  try:
    ks = [int(k) for k in flags.k.split(",")]
  except ValueError:
    raise ValueError(f"--k={flags.k}: give numbers like 1,2,4") from None
  if flags.samples and config.eval.num_prompts < 2:
    raise ValueError(
      "an interval over prompts needs --config.eval.num_prompts=2"
    )
  if not flags.samples and flags.k != FLAGS["k"].default:
    raise ValueError("--k needs --samples: pass@k is estimated from samples")
  if not flags.samples and flags.majority:
    raise ValueError("--majority needs --samples: there is no vote of one")
  if flags.majority and config.reward.functions[0] not in evaluation.ANSWERS:
    raise ValueError(
      "--majority counts the votes for each answer, which only "
      f"{', '.join(evaluation.ANSWERS)} can read: --config.reward.functions "
      f"begins with {config.reward.functions[0]!r}"
    )
  judges = {config.reward.functions[0], *mixtures.judges(config).values()}
  if flags.majority and len(judges) > 1:
    raise ValueError(
      "--majority reads the answers to all problems alike, but the data sets "
      f"of data.mixture are judged by {', '.join(sorted(judges))}"
    )
  if flags.majority and flags.samples > MOST_SAMPLES:
    raise ValueError(f"--majority takes at most --samples={MOST_SAMPLES}")
  if flags.out and not pathlib.Path(flags.out).absolute().parent.is_dir():
    raise ValueError(f"--out={flags.out}: its directory does not exist")
  if flags.samples and not all(1 <= k <= flags.samples for k in ks):
    raise ValueError(f"--k={flags.k}: each k must be in 1..{flags.samples}")
  return ks if flags.samples else []


def _parse(argv: list[str]):
  def parse(default=None):
    program = "python -m grpojax.evaluate"
    return command_line.parse(
      argv, FLAGS, SETTINGS, program, default, "model", __doc__
    )

  config, flags = parse()
  if trained.is_run(flags.model):  # a run is evaluated as it was trained
    config, flags = parse(lambda: trained.read_config(flags.model))
  validate(config)
  if not flags.model:
    raise ValueError(
      "give --model: a directory, an embedded model, a run, or ORG/NAME of the "
      "Hub"
    )
  ks = _check_flags(config, flags)
  reward_inputs.resolve(config)
  if flags.out:
    disk.check_file(flags.out, "--out")
  return config, flags, ks


def _note_settings(config: ConfigDict, compare: str) -> None:
  """Says where a run is evaluated on other data than it was trained for."""
  if not trained.is_run(compare):
    return
  ours, theirs = map(config_lib.flatten, (config, trained.read_config(compare)))
  names = [
    name
    for name in sorted(ours.keys() | theirs.keys())
    if name.startswith(SHARED) and ours.get(name) != theirs.get(name)
  ]
  if names:
    print(f"{compare} has other {', '.join(names)}; those of --model are used")


def _say_left_out(names: list[str], asked: list[HeldOut]) -> None:
  """Says how many problems are not asked, and because of which model."""
  for name, one in zip(names, asked, strict=True):
    if one.too_long:
      print(f"{name}: {one.too_long} held-out prompts are too long")
  if len(names) > 1 and any(one.too_long for one in asked):
    count = sum(len(examples) for _, examples in asked[0].batches)
    print(f"compared on the {count} held-out prompts that fit both")


def _set_up(argv: list[str]):
  """All that can be wrong, before anything compiles."""
  config, flags, ks = _parse(argv)
  names = [flags.model] + [flags.compare] * bool(flags.compare)
  models = []
  for name in names:
    best = flags.best and not models
    policy, params = trained.load(name, config.model.dtype, best)
    memory.check_evaluation(config, policy, flags.samples or 1)
    models.append((policy, params))
  asked = held_out.problems(config, names, [policy for policy, _ in models])
  _say_left_out(names, asked)
  count = sum(len(examples) for _, examples in asked[0].batches)
  if flags.samples and count < 2:
    raise ValueError(
      f"{count} held-out prompt is left, and an interval over prompts needs 2: "
      "raise --config.data.max_prompt_length or --config.eval.num_prompts"
    )
  _note_settings(config, flags.compare)
  return config, flags, ks, models, asked


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  with command_line.usage_errors():
    config, flags, ks, models, asked = _set_up(argv)
  sampling = Sampling(flags.temperature if flags.samples else 0.0)
  first = config.reward.functions[0]
  answer = evaluation.ANSWERS[first] if flags.majority else None
  values, each = [], []
  with contextlib.ExitStack() as stack:
    with command_line.usage_errors():
      reward_pool = stack.enter_context(scoring.open_reward_pool(config))
    told = stack.enter_context(screen.opened(0, config.log.every))
    for (policy, params), (batches, _) in zip(models, asked, strict=True):
      total = sum(len(examples) for _, examples in batches)
      so_far = config.steps, config.steps  # of the run, which has ended
      batches = reward_inputs.batches_with_step(
        reward_pool.pool, batches, *so_far
      )
      result = evaluation.evaluate(
        policy,
        params,
        samplers.make_sampler(config, policy, flags.samples or 1, sampling),
        batches,
        reward_pool,
        jax.random.key(config.seed),
        config.eval.batch_size,
        told=functools.partial(told.evaluated, total=total),
      )
      if result.failures:
        print(evaluation.failed(result.failures))
      values.append(evaluation.per_prompt(result, ks, answer))
      each.append(evaluation.by_data_set(config, result, values[-1]))
  by_data_set = {
    name: [of_model[name] for of_model in each] for name in each[0]
  }
  try:  # first, for the screen may be gone; and so may the disk
    if flags.out:
      _write(flags, values, by_data_set)
  finally:
    _report(flags, values)
    for name, of_one in by_data_set.items():
      print(f"\n{name}", end=", ")
      _report(flags, of_one)


def _write(
  flags: ConfigDict,
  values: list[dict[str, np.ndarray]],
  by_data_set: dict[str, list[dict[str, np.ndarray]]],
) -> None:
  """Writes --out."""
  results = _results(flags, values)
  if by_data_set:
    results["data_sets"] = {
      name: _results(flags, of_one) for name, of_one in by_data_set.items()
    }
  with command_line.usage_errors():
    records.write_json(flags.out, results)


def _results(
  flags: ConfigDict, values: list[dict[str, np.ndarray]]
) -> dict[str, Any]:
  """The numbers of one model, or of two, for JSON."""
  results = {"model": flags.model} | evaluation.numbers(values[0])
  if flags.compare:
    results["compare"] = {"model": flags.compare} | evaluation.numbers(
      values[1]
    )
    differences = evaluation.compare(*values)
    results["difference"] = {k: v._asdict() for k, v in differences.items()}
  return results


def _report(flags: ConfigDict, values: list[dict[str, np.ndarray]]) -> None:
  """Prints the numbers of one model, or of two."""
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
