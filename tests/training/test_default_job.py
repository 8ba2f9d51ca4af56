"""configs/arithmetic.py, the job of a program that is given no config."""

import functools

import jax
import numpy as np

from grpojax.core import packing_layout
from grpojax.data import arithmetic
from grpojax.data.carries import forgetful_sum
from grpojax.runtime import config as config_lib
from grpojax.training.config import default_config, default_job, validate


def test_other_configs_and_studies_do_not_follow_it():
  job = config_lib.flatten(default_job())
  base = config_lib.flatten(default_config())
  assert job.keys() == base.keys()
  paths = job["model.path"], base["model.path"]
  assert paths == ("arithmetic-careless", "arithmetic-instruct")
  assert (job["name"], job["data.name"]) == ("arithmetic", "arithmetic")
  validate(default_job())


def test_its_update_compiles_twice():
  """Rows of the completions that it starts with, and of right ones."""
  config, rng = default_job(), np.random.default_rng(0)
  examples, optim = arithmetic.load("train", seed=0), config.optim
  size = config.group_size
  forgetful = functools.partial(forgetful_sum, rng, forget=(0.35, 0.95))

  found = set()
  for step in range(15):
    first = step * config.batch_size
    problems = [examples[first + i]["prompt"] for i in range(config.batch_size)]
    for add in (forgetful, int.__add__):
      lengths = [  # in characters, which are tokens; and an EOS
        [len(arithmetic.solution(problem, add)) + 1 for _ in range(size)]
        for problem in problems
      ]
      planned = packing_layout.plan(
        np.array(lengths),
        config.sampling.max_new_tokens,
        24,  # tokens of the longest prompt, three quarters of the most
        optim.minibatches,
        optim.micro_batches,
      )
      found.add(tuple(x.shape for x in jax.tree.leaves(planned)))
  assert 1 <= len(found) <= 2
