"""A task that a tiny model learns in seconds, for tests of the programs.

Every answer is 7. The tiny model was trained on texts that mostly answer 3 and
sometimes 7, so greedy accuracy starts at 0 and GRPO can raise it. As a program
this is `grpojax.train` on the task, slow enough to be killed between two
checkpoints.
"""

import contextlib
import pathlib
import sys
import time

from grpojax.data import arithmetic, datasets

ANSWER = "7"
DELAY = 0.0  # seconds to read a problem
PROBLEMS = 50  # few, so that a run has several epochs


class Problems(list):
  """Problems that take `DELAY` to read."""

  def __getitem__(self, index):
    time.sleep(DELAY)
    return super().__getitem__(index)


def load(split, *, seed=0, size=PROBLEMS, difficulty=(2, 4)):
  del seed, difficulty
  first = {"train": 0, "test": 1000}[split]
  numbers = range(first, first + size)
  return Problems(
    {"prompt": f"{i % 97}+{i % 11}", "answer": ANSWER} for i in numbers
  )


def document(rng, **options):
  del options
  digit = rng.choice(list("357"), p=[0.5, 0.2, 0.3])
  return f"{rng.integers(97)}+{rng.integers(11)}\n####{digit}\n\n"


@contextlib.contextmanager
def task():
  """Replaces the arithmetic task by the toy task."""
  old = datasets.DATASETS["arithmetic"], arithmetic.document
  datasets.DATASETS["arithmetic"] = load
  arithmetic.document = document
  try:
    yield
  finally:
    datasets.DATASETS["arithmetic"], arithmetic.document = old


def arguments(model: pathlib.Path, reads=("",), **changes):
  """Arguments of a run that takes a second, without compilation.

  `reads` are prefixes of the settings of a program other than `train`.
  """
  settings = {
    "name": "toy",
    "steps": 8,
    "batch_size": 8,
    "group_size": 8,
    "model.path": model,
    "data.max_prompt_length": 8,
    "sampling.max_new_tokens": 8,
    "logits_chunk": 64,
    "optim.learning_rate": 1e-2,
    "optim.warmup_steps": 0,
    "optim.micro_batches": 4,
    "optim.packing": False,
    "diagnostics.every": 0,
    "diagnostics.share": 0.375,
    "eval.every": 3,
    "eval.num_prompts": 10,
    "eval.batch_size": 4,
    "checkpoint.every": 2,
    "log.samples_every": 2,
    "log.trackers": "",
  }
  settings |= {k.replace("__", "."): v for k, v in changes.items()}
  return [
    f"--config.{key}={value}"
    for key, value in settings.items()
    if key.startswith(tuple(reads))
  ]


if __name__ == "__main__":
  from grpojax import train

  DELAY = 0.01
  with task():
    train.main(sys.argv[1:])
