"""Figure 5: accuracy along training against the group size, at a fixed budget.

    python -m grpojax.studies.group_size [--config=configs/figure5.py]
                                         [--config.key=value ...]
                                         [--run_dir=DIR]

At each budget N = B G of samples a step it trains with every group size, with
several seeds, and with group_size = "auto"; each of these is a training run in
DIR/runs (see `grpojax.train`), so an interrupted study resumes in the middle of
a run. Beside them stands the group size that theory predicts, G* = 1 +
sqrt(c3 / c1), from a diagnosis of the policy that training starts from, and
along the automatic runs. DIR, by default runs/group_size, gets

    curves.csv        one row a training step: budget, group size, seed, reward,
                      accuracy where it was evaluated
    results.csv       one row a budget and group size: mean reward and accuracy
                      over training with their 95% intervals over seeds
    summary.json      G* predicted and measured, the automatic runs compared
    group_size.png
    logs/             what the training runs printed
"""

import functools
import itertools
import json
import sys
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.runtime import command_line, records
from grpojax.runtime.config import below, config_error
from grpojax.runtime.settings import changed, section, setting, to_config
from grpojax.statistics import diagnostics
from grpojax.studies import group_size_results as results
from grpojax.studies import run as study
from grpojax.studies import training_runs
from grpojax.training import config as train_config_lib
from grpojax.training import (
  from_config,
  group_sizes,
  samplers,
  scored_text,
  scoring,
  splits,
)
from grpojax.training import policy as policy_lib
from grpojax.training import prompts as prompts_lib
from grpojax.training.config import SETTINGS as TRAIN_SETTINGS

PROGRAM = "python -m grpojax.studies.group_size"


FLAGS = study.FLAGS
SETTINGS = section(
  "the study",
  name=setting("group_size", "name of the study; its directory is runs/NAME"),
  seeds=setting(3, "runs of each size; an interval needs 2", within="[2, inf)"),
  budgets=setting((128, 256), "samples a step"),
  group_sizes=setting((4, 8, 16, 32, 64, 128), "fixed group sizes"),
  predict=section(
    "the diagnosis before training",
    prompts=setting(128, "prompts, at least 3", within="[3, inf)"),
    group_size=setting(16, "completions a prompt", within="[4, inf)"),
    tangents=setting(16, "random directions", within="[2, inf)"),
    batch=setting(
      16, "prompts sampled and diagnosed at a time", within="[1, inf)"
    ),
  ),
  train=changed(
    TRAIN_SETTINGS,
    {
      "steps": 24,
      "data.options.difficulty": (2, 2),
      "sampling.max_new_tokens": 56,
      "optim.learning_rate": 5e-5,
      "eval.every": 4,
      "eval.num_prompts": 128,
      "log.trackers": (),
      "checkpoint.every": 24,
      "auto_group_size.start": 32,  # too large, to see it move
      "auto_group_size.largest": 64,
      "diagnostics.every": 2,  # of the automatic runs
      "diagnostics.share": 1.0,
    },
  ),
)
"""The quick setting: the embedded arithmetic model on two cores."""


def default_config() -> ConfigDict:
  """The quick setting as a config."""
  return to_config(SETTINGS)


def train_config(
  config: ConfigDict, budget: int, group_size: int | str, seed: int
) -> ConfigDict:
  """The training run of one point of the study."""
  run = config.train.copy_and_resolve_references()
  auto = group_size == group_sizes.AUTO
  with run.unlocked(), run.ignore_type():
    run.name = f"N{budget}-G{group_size}-seed{seed}"
    run.seed, run.group_size = seed, group_size
    first = run.auto_group_size.start if auto else group_size
    run.batch_size = budget // first
    if auto:  # as large as it may be with 3 prompts a step to diagnose
      largest = run.auto_group_size.largest
      while largest > first and budget // largest < 3:
        largest //= 2
      run.auto_group_size.largest = largest
    else:
      run.diagnostics.every = 0
    fewest = budget // (run.auto_group_size.largest if auto else group_size)
    # Smaller batches of prompts are cut into fewer parts.
    micro = run.optim.micro_batches
    while micro > 1 and fewest % (micro * run.optim.minibatches):
      micro -= 1
    run.optim.micro_batches = micro
  return run.lock()


def _points(config: ConfigDict):
  """(budget, group size, seed) of all runs, one seed after the other."""
  sizes = [*config.group_sizes, group_sizes.AUTO]
  return itertools.product(range(config.seeds), config.budgets, sizes)


def problems(config: ConfigDict) -> list[str]:
  """What is wrong with the values of a config, a line each."""
  wrong = []
  for field in ("budgets", "group_sizes"):
    values = config[field]
    if not values or not all(isinstance(v, int) and v >= 2 for v in values):
      remedy = "give whole numbers of 2 or more"
      wrong.append(config_error(field, values, remedy))
  p = config.predict
  if p.prompts % p.batch:
    todo = f"must be a multiple of predict.batch = {p.batch}"
    wrong.append(config_error("predict.prompts", p.prompts, todo))
  if wrong:
    return wrong
  for budget, size in itertools.product(config.budgets, config.group_sizes):
    if budget % size:
      todo = f"{size} does not divide the budget {budget}"
      wrong.append(config_error("group_sizes", config.group_sizes, todo))
  if wrong:
    return wrong
  for seed, budget, size in _points(config):
    try:
      train_config_lib.validate(train_config(config, budget, size, seed))
    except ValueError as error:
      why = below("train", f"{error}")
      return [f"budget {budget}, group size {size}: {why}"]
  return []


def predict(config: ConfigDict) -> dict[str, Any]:
  """Diagnoses the policy that training starts from, on training prompts."""
  p = config.predict
  settings = config.train.copy_and_resolve_references()
  with settings.unlocked(), settings.ignore_type():
    settings.group_size, settings.batch_size = p.group_size, p.batch
  policy = from_config.with_weights(settings, from_config.open_policy(settings))
  sampling = from_config.sampling(settings)
  sampler = samplers.make_sampler(settings, policy, p.group_size, sampling)

  project = policy_lib.jit(
    policy,
    functools.partial(
      diagnostics.score_projections,
      tangents=p.tangents,
      micro_batches=p.batch,
      vectorized=policy.vmappable,
      sampling=sampling,
      chunk_size=settings.logits_chunk,
    ),
  )

  sampling_key, tangents_key = jax.random.split(jax.random.key(settings.seed))
  examples = splits.load_split(settings, policy, "train").examples
  batches = prompts_lib.training_batches(
    settings, policy, examples, p.group_size
  )
  projections, rewards = [], []
  with scoring.open_reward_pool(settings) as reward_pool:
    for i in range(p.prompts // p.batch):
      prompts, examples = next(batches)
      key = jax.random.fold_in(sampling_key, i)
      samples = sampler(policy.params, jax.device_put(prompts), key)
      _, scores = scored_text.score(policy, reward_pool, examples, samples)
      rewards.append(scores.rewards)
      # The same directions for all prompts: their products are what is wanted.
      projected = project(policy.params, samples, tangents_key)
      projections.append(np.asarray(projected))
      print(f"diagnosis: {(i + 1) * p.batch}/{p.prompts} prompts", flush=True)
  diagnosis = diagnostics.diagnose(
    jax.numpy.asarray(np.concatenate(projections, axis=1)),
    jax.numpy.asarray(np.concatenate(rewards)),
  )
  row = {k: float(v) for k, v in diagnostics.metrics(diagnosis).items()}
  return row | {"reward_mean": float(np.mean(np.concatenate(rewards)))}


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  config, directory = study.open_study(
    argv, PROGRAM, SETTINGS, problems, __doc__
  )
  training_runs.share_compilations(directory)
  path = directory / "prediction.json"
  with study.resumable():
    if not path.exists():
      records.write_json(path, predict(config))
    prediction = json.loads(path.read_text())
    runs = [
      train_config(config, budget, size, seed)
      for seed, budget, size in _points(config)
    ]
    training_runs.train_all(runs, directory)
  with command_line.usage_errors():
    results.write(config, directory, prediction)


if __name__ == "__main__":
  main(sys.argv[1:])
