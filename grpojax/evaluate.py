"""Accuracy of a model on held-out problems.

    python -m grpojax.evaluate --model=DIR [--samples=N] [--k=1,2,4]
                               [--temperature=1.0] [--config.key=value ...]

DIR is a Hugging Face directory, the name of an embedded model, or the run
directory of a training run, finished or not, whose config is then the default.
Without --samples it decodes greedily and prints the accuracy with Wilson's 95%
interval; with --samples=N it draws N completions a prompt and prints pass@k
(unbiased) for each k, with a 95% interval over prompts.
"""

import functools
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from grpojax import experiment
from grpojax.core.intervals import (
  mean_interval,
  pass_at_k,
  wilson_interval,
)
from grpojax.core.sampling import Sampling
from grpojax.core.types import Params, Prompts
from grpojax.runtime import checkpoint, command_line, metrics
from grpojax.runtime import config as config_lib

CORRECT = 1.0  # a completion with at least this reward is right
FLAGS = {
  "model": ("", "a model directory, an embedded model's name, or a run"),
  "samples": (0, "completions a prompt; 0 is one greedy completion"),
  "k": ("1", "pass@k to report, comma-separated, each at most --samples"),
  "temperature": (1.0, "of the samples"),
  "out": ("", "also write the result to this JSON file"),
}


class Evaluation(NamedTuple):
  """Completions of held-out prompts.

  Attributes:
    rewards: [prompts, samples].
    texts: the completions, [prompts][samples].
    examples: the problems, with their "prompt_text".
  """

  rewards: np.ndarray
  texts: list[list[str]]
  examples: list[dict[str, Any]]


def _pad(prompts: Prompts, rows: int) -> Prompts:
  """Fills a last, shorter batch with empty prompts: one shape, one program."""
  missing = rows - len(prompts.prompt_ids)
  return jax.tree.map(
    lambda x: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), prompts
  )


def evaluate(
  policy: experiment.Policy,
  params: Params,
  sampler: Callable[..., Any],
  batches: Iterable[tuple[Prompts, list[dict[str, Any]]]],
  reward: Callable[..., float],
  key: jax.Array,
  batch_size: int,
  place: jax.sharding.Sharding | None = None,
) -> Evaluation:
  """Samples and scores completions of every batch.

  Args:
    policy: the model; its own parameters are not used.
    params: the parameters to evaluate.
    sampler: from `experiment.make_sampler`.
    batches: of `(Prompts, examples)`, the last one may be shorter.
    reward: `(prompt, completion, example) -> float`.
    key: of the samples.
    batch_size: rows that a shorter batch is padded to.
    place: sharding of the prompts; None is one device.
  """
  rewards, texts, seen = [], [], []
  for i, (prompts, examples) in enumerate(batches):
    padded = jax.device_put(_pad(prompts, batch_size), place)
    samples = sampler(params, padded, jax.random.fold_in(key, i))
    decoded = experiment.decode(policy, samples)[: len(examples)]
    rewards.append(experiment.score(reward, examples, decoded))
    texts += decoded
    seen += examples
  return Evaluation(np.concatenate(rewards), texts, seen)


def accuracy(result: Evaluation) -> dict[str, float]:
  """Accuracy of one completion a prompt, with Wilson's 95% interval."""
  right = int(np.sum(result.rewards[:, 0] >= CORRECT))
  rate, low, high = wilson_interval(right, len(result.rewards))
  return {
    "accuracy": float(rate),
    "accuracy_low": float(low),
    "accuracy_high": float(high),
  }


def pass_at(result: Evaluation, ks: Iterable[int]) -> dict[str, list[float]]:
  """pass@k with its 95% interval over prompts: name -> [mean, low, high]."""
  right = jnp.asarray(result.rewards >= CORRECT)
  return {
    f"pass@{k}": [float(x) for x in mean_interval(pass_at_k(right, k))]
    for k in ks
  }


def held_out(config: ConfigDict, policy: experiment.Policy):
  """One pass over the held-out prompts, in their order."""
  return experiment.prompt_batches(
    config,
    policy,
    experiment.held_out_examples(config),
    batch_size=config.eval.batch_size,
    shuffle=False,
    repeat=False,
  )


def _is_run(model: str) -> bool:
  return (pathlib.Path(model) / "checkpoints").is_dir()


def _run_config(run: str) -> ConfigDict:
  path = pathlib.Path(run) / checkpoint.CONFIG
  return config_lib.from_json(path.read_text())


def _load(model: str, config: ConfigDict):
  """A policy and its parameters, from a model directory or from a run."""
  if not _is_run(model):
    policy = experiment.load_policy(model, config.model.dtype)
    return policy, policy.params
  run, saved = pathlib.Path(model), _run_config(model)
  policy = experiment.load_policy(saved.model.path, saved.model.dtype)
  tx = experiment.optimizer(saved)
  like = jax.eval_shape(
    functools.partial(experiment.first_state, saved, tx), policy.params
  )
  with checkpoint.open_checkpointer(run, readonly=True) as checkpointer:
    step = checkpoint.latest_step(checkpointer)
    if step is None:
      raise ValueError(f"{run} has no complete checkpoint yet")
    state = checkpoint.restore(checkpointer, like, step)
  print(f"checkpoint of step {step}")
  return policy, state.params


def _parse(argv: list[str]):
  parse = functools.partial(
    command_line.parse, argv, FLAGS, program="python -m grpojax.evaluate"
  )
  config, flags = parse()
  if _is_run(flags.model):  # a run is evaluated as it was trained
    config, flags = parse(lambda: _run_config(flags.model))
  config_lib.validate(config)
  if not flags.model:
    raise ValueError("give --model: a directory, an embedded name, or a run")
  try:
    ks = [int(k) for k in flags.k.split(",")]
  except ValueError:
    raise ValueError(f"--k={flags.k}: give numbers like 1,2,4") from None
  if flags.samples and config.eval.num_prompts < 2:
    raise ValueError(
      "an interval over prompts needs --config.eval.num_prompts=2"
    )
  if not flags.samples and flags.k != FLAGS["k"][0]:
    raise ValueError("--k needs --samples: pass@k is estimated from samples")
  if flags.out and not pathlib.Path(flags.out).absolute().parent.is_dir():
    raise ValueError(f"--out={flags.out}: its directory does not exist")
  if flags.samples < 0 or (flags.samples and flags.temperature <= 0):
    raise ValueError("--samples must be 0 or more, --temperature more than 0")
  if flags.samples and not all(1 <= k <= flags.samples for k in ks):
    raise ValueError(f"--k={flags.k}: each k must be in 1..{flags.samples}")
  return config, flags, ks


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  with command_line.usage_errors():
    config, flags, ks = _parse(argv)
    policy, params = _load(flags.model, config)
  sampling = Sampling(flags.temperature if flags.samples else 0.0)
  sampler = experiment.make_sampler(
    config, policy, flags.samples or 1, sampling
  )
  result = evaluate(
    policy,
    params,
    sampler,
    held_out(config, policy),
    experiment.host_reward(config),
    jax.random.key(config.seed),
    config.eval.batch_size,
  )
  print(f"{flags.model}: {len(result.rewards)} held-out prompts")
  if flags.samples:
    numbers = pass_at(result, ks)
    for name, (mean, low, high) in numbers.items():
      print(f"{name}  {mean:.1%}  [{low:.1%}, {high:.1%}]")
  else:
    numbers = accuracy(result)
    rate, low, high = numbers.values()
    print(f"greedy accuracy  {rate:.1%}  [{low:.1%}, {high:.1%}]")
  if flags.out:
    metrics.write_json(flags.out, {"model": flags.model} | numbers)


if __name__ == "__main__":
  main(sys.argv[1:])
