"""Real text from scratch: a tokenizer, SFT and GRPO on GSM8K, on two CPU cores.

    python -m grpojax.studies.gsm8k --config.data.path=DIR
                                    [--config.key=value ...] [--run_dir=RUN]

DIR has GSM8K's train.jsonl and test.jsonl (arXiv 2110.14168). A byte-level BPE
is trained on the training set, a decoder of a million parameters on those of
its texts that fit into a row (see `grpojax.sft`), then GRPO goes on from there
on the shortest training problems (see `grpojax.train`). What is measured,
before and after GRPO: the reward of samples on these training problems, the
same ones for both, and greedy accuracy on the shortest held-out problems. RUN,
by default runs/gsm8k, gets

    texts/            the problems of SFT: the training set, without the notes
                      of the calculator, <<48/2=24>>
    prompts/          the problems of GRPO: the shortest of both splits
    sft/              the model after SFT, and its loss curve
    grpo/             the training run; grpo/model is the final model
    before.json, after.json   rewards on the training problems
    curve.csv         one row a step of GRPO: reward, accuracy
    summary.json
    gsm8k.png

The same command resumes at the stage, and in GRPO at the step, where it ended.
"""

import json
import pathlib
import re
import sys
import time
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.data import gsm8k
from grpojax.data.examples import SPLITS
from grpojax.runtime import records
from grpojax.runtime.config import below, config_error
from grpojax.runtime.settings import changed, section, setting, to_config
from grpojax.studies import gsm8k_results as results
from grpojax.studies import run as study
from grpojax.training import config as train_config_lib
from grpojax.training import (
  evaluation,
  fit,
  from_config,
  prompts,
  samplers,
  scoring,
  sft,
  sft_config,
  splits,
)
from grpojax.training import policy as policy_lib
from grpojax.training.config import SETTINGS as TRAIN_SETTINGS

PROGRAM = "python -m grpojax.studies.gsm8k"
_NOTE = re.compile(r"<<[^<>]*>>")


FLAGS = study.FLAGS
SETTINGS = section(
  "the study",
  name=setting("gsm8k", "name of the study; its directory is runs/NAME"),
  prompts=setting(
    256,
    "training problems of GRPO, the shortest; an interval needs 2",
    within="[2, inf)",
  ),
  samples=setting(
    16,
    "completions of each, before and after; an interval needs 2",
    within="[2, inf)",
  ),
  data=section(
    "the data", path=setting("", "directory of train.jsonl and test.jsonl")
  ),
  sft=changed(
    sft_config.SETTINGS,
    {
      "name": "sft",
      "steps": 1000,
      "format": "dialogue",
      "rows": 20,
      "row_length": 128,
      "log_every": 10,
      "data.name": "gsm8k",
      "tokenizer": "bpe",
      "vocab_size": 2048,
      "model.heads": 2,
      "model.kv_heads": 2,
    },
  ),
  train=changed(
    TRAIN_SETTINGS,
    {
      "name": "grpo",
      "steps": 160,
      "batch_size": 16,
      "group_size": 16,
      "data.name": "gsm8k",
      "data.max_prompt_length": 96,
      "sampling.max_new_tokens": 72,
      "sampling.temperature": 0.7,
      "logits_chunk": 24,
      "reward.functions": ("math_answer",),
      "optim.learning_rate": 1.5e-4,
      "optim.micro_batches": 4,
      "eval.every": 20,
      "eval.num_prompts": 256,
      "checkpoint.every": 20,
      "log.every": 5,
      "log.samples_every": 20,
      "log.trackers": (),
    },
  ),
)
"""A run of less than twenty minutes on two cores."""


def default_config() -> ConfigDict:
  """The embedded study."""
  return to_config(SETTINGS)


def sft_run(config: ConfigDict, directory: pathlib.Path) -> ConfigDict:
  """The config of supervised fine-tuning."""
  run = config.sft.copy_and_resolve_references()
  with run.unlocked():
    run.data.path = str(directory / "texts")
  return run.lock()


def grpo_run(config: ConfigDict, directory: pathlib.Path) -> ConfigDict:
  """The config of GRPO, from the model of SFT."""
  run = config.train.copy_and_resolve_references()
  with run.unlocked():
    run.model.path = str(directory / "sft")
    run.data.path = str(directory / "prompts")
  return run.lock()


def problems(config: ConfigDict) -> list[str]:
  """What is wrong with the values of a config, a line each."""
  wrong = []
  for check, part in (
    (sft_config.validate, "sft"),
    (train_config_lib.validate, "train"),
  ):
    try:
      check(config[part])
    except ValueError as error:
      wrong.append(below(part, str(error)))
  try:
    for split in SPLITS:
      gsm8k.load(split, path=config.data.path)
  except ValueError as error:
    wrong.append(config_error("data.path", config.data.path, f"{error}"))
  return wrong


def write_problems(config: ConfigDict, directory: pathlib.Path) -> None:
  """Writes the problems of SFT and of GRPO, without the calculator's notes.

  GRPO has the shortest ones (question and solution together, in characters).
  """
  sizes = {"train": config.prompts, "test": config.train.eval.num_prompts}
  for split, size in sizes.items():
    rows = [
      {
        "question": example["prompt"],
        "answer": _NOTE.sub("", example["solution"]),
      }
      for example in gsm8k.load(split, path=config.data.path)
    ]
    shortest = sorted(rows, key=lambda r: len(r["question"] + r["answer"]))
    for name, chosen in (("texts", rows), ("prompts", shortest[:size])):
      (directory / name).mkdir(exist_ok=True)
      text = "".join(json.dumps(row) + "\n" for row in chosen)
      records.write_text(directory / name / f"{split}.jsonl", text)


def measure(config: ConfigDict, run: ConfigDict, model: str) -> dict[str, Any]:
  """Samples a model's completions of the training problems of GRPO."""
  began = time.perf_counter()
  policy = policy_lib.load_policy(model, run.model.dtype)
  sampling = from_config.sampling(run)
  rows = max(run.eval.batch_size // config.samples, 1)
  batches = prompts.prompt_batches(
    run,
    policy,
    splits.load_examples(run, "train"),
    batch_size=rows,
    shuffle=False,
    repeat=False,
  )
  with scoring.open_reward_pool(run) as reward_pool:
    evaluated = evaluation.evaluate(
      policy,
      policy.params,
      samplers.make_sampler(run, policy, config.samples, sampling),
      batches,
      reward_pool,
      jax.random.key(run.seed + 1),
      rows,
    )
  return {
    "rewards": np.mean(evaluated.rewards, axis=1),
    "samples": [
      {"prompt": e["prompt_text"], "completion": t[0], "reward": float(r[0])}
      for e, t, r in zip(
        evaluated.examples[:8], evaluated.texts, evaluated.rewards, strict=False
      )
    ],
    "seconds": time.perf_counter() - began,
  }


def _stages(config: ConfigDict, directory: pathlib.Path) -> None:
  """Does what is not done yet."""
  if not (directory / "prompts" / "test.jsonl").exists():
    write_problems(config, directory)
  run = grpo_run(config, directory)
  if not (directory / "sft").exists():
    print("1/4 supervised fine-tuning", flush=True)
    sft.run(sft_run(config, directory), directory / "sft", PROGRAM)
  for name, model in (("before", "sft"), ("after", "grpo/model")):
    if name == "after":
      print("3/4 GRPO", flush=True)
      fit.run(run, directory / "grpo")
    path = directory / f"{name}.json"
    if not path.exists():
      print(f"{2 if name == 'before' else 4}/4 reward {name} GRPO", flush=True)
      records.write_json(path, measure(config, run, str(directory / model)))


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  config, directory = study.open_study(
    argv, PROGRAM, SETTINGS, problems, __doc__
  )
  # Before and after run the same programs: they are compiled once.
  jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
  with study.resumable():
    _stages(config, directory)
  results.write(config, directory)


if __name__ == "__main__":
  main(sys.argv[1:])
