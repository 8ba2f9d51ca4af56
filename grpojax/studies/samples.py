"""Samples pools of completions and computes the Gram matrix of their scores.

A base model gets prompts in plain text, without and with solved examples; an
instruct model gets them in its chat template.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.data import arithmetic
from grpojax.data.examples import Example
from grpojax.data.pipeline import Subset
from grpojax.rewards.exact import exact_answer
from grpojax.rewards.math import given_answer
from grpojax.runtime.cli import command_line
from grpojax.runtime.text.tokenization import encode_prompt
from grpojax.studies import errors
from grpojax.training import policies
from grpojax.training.config import default_config, from_config
from grpojax.training.data import prompts, splits
from grpojax.training.step import sampling

CONFIGURATIONS = ("base", "instruct", "in-context")
_DIRECTIONS = 2**31 - 1  # folded into a pool's key; no sample has this number


class Problems(NamedTuple):
  """Examples of a kind of problem, their prompt format and reward."""

  load: Callable[..., Any]  # `(train settings, split) -> examples`
  template: str  # of a prompt in plain text
  solution: Callable[[Mapping], str]  # text after a solved example's prompt
  reward: Callable[..., float]  # `(prompt, completion, example) -> 0 or 1`
  one_line: bool  # True if a plain-text completion stops at a line break


def questions(_, split: str) -> list[Example]:
  """Returns fixed examples {"prompt": "What is 3 + 4?", "answer": "7"}.

  Five kinds alternate: sums, differences, products and quotients of two small
  numbers, and sums of three. There are 65 in "test", 70 in "train". On harder
  questions a model of 100 million parameters is always wrong.
  """
  pairs = list(itertools.product(range(2, 10), repeat=2))
  triples = itertools.product(range(1, 4), repeat=3)
  kinds = [
    [(f"{a} + {b}", a + b) for a, b in pairs],
    [(f"{a} - {b}", a - b) for a, b in pairs if a > b],
    [(f"{a} * {b}", a * b) for a, b in pairs],
    [(f"{a * b} / {b}", a) for a, b in pairs],
    [(f"{a} + {b} + {c}", a + b + c) for a, b, c in triples],
  ]
  rng = np.random.default_rng(0)
  chosen = slice(13) if split == "test" else slice(13, None)
  orders = [rng.permutation(len(kind))[chosen] for kind in kinds]
  return [
    {"prompt": f"What is {kind[i][0]}?", "answer": str(kind[i][1])}
    for turn in zip(*orders, strict=False)  # the shortest kind has 27 questions
    for kind, i in zip(kinds, turn, strict=True)
  ]


PROBLEMS = {
  "expressions": Problems(
    splits.load_examples,
    "{prompt}\n",
    lambda example: arithmetic.solution(example["prompt"]),
    exact_answer,
    one_line=False,
  ),
  "questions": Problems(
    questions,
    "Question: {prompt}\nAnswer:",
    lambda example: " " + example["answer"],
    lambda _, text, example: float(given_answer(text) == example["answer"]),
    one_line=True,
  ),
}


class Bench(NamedTuple):
  """Model, prompts and compiled functions of a configuration."""

  policy: policies.Policy
  batches: list  # a prompt and its example in each
  sampler: Any  # samples a pool; from `step.sampling.make_sampler`
  score: Any  # from `errors.make_score` or `errors.make_projected_score`
  reward: Any = exact_answer
  projections: int = 0


def open_bench(config: ConfigDict, name: str) -> Bench:
  """Loads a configuration's model and formats its prompts; exits on errors."""
  path = config.instruct if name == "instruct" else config.base
  problems = PROBLEMS[config.problems]
  with command_line.usage_errors():
    policy = policies.load_policy(path)
  train = default_config()
  train.seed = config.seed
  train.eval.num_prompts = config.num_prompts
  train.sampling.max_new_tokens = config.max_new_tokens
  settings = from_config(train)
  template = settings.data.template
  tokenizer = policy.tokenizer
  if name != "instruct":
    template = problems.template
    tokenizer.chat_template = None
    if problems.one_line:
      ids = range(len(tokenizer))
      ends = (i for i in ids if "\n" in tokenizer.decode(i))
      policy = policy._replace(eos_ids=(*policy.eos_ids, *ends))
  if name == "in-context":
    shots = [
      template.format(prompt=x["prompt"]) + problems.solution(x) + "\n\n"
      for x in Subset(problems.load(settings, "train"), range(config.shots))
    ]
    template = "".join([*shots, template])
  held_out = Subset(problems.load(settings, "test"), range(config.num_prompts))
  texts = [x["prompt"] for x in held_out]
  longest = max(len(encode_prompt(tokenizer, x, template)[1]) for x in texts)
  data = dataclasses.replace(
    settings.data, template=template, max_prompt_length=longest
  )
  settings = dataclasses.replace(settings, data=data)
  batches = prompts.prompt_batches(
    settings, policy, held_out, batch_size=1, shuffle=False, repeat=False
  )
  distribution = settings.sampling.distribution
  count = config.projections
  sampler = sampling.make_sampler(
    settings, policy, config.samples, distribution
  )
  make_score = errors.make_projected_score if count else errors.make_score
  score = make_score(policy.lm, distribution)
  return Bench(policy, list(batches), sampler, score, problems.reward, count)


class Sampled(NamedTuple):
  """Rewards and scores of a prompt's completions, pool after pool."""

  rewards: np.ndarray  # [S]
  gram: np.ndarray  # [S, S], inner products of their scores
  without: np.ndarray  # [V, S, S], the same without each projection
  distinct: int  # number of distinct completions


def sample(bench: Bench, index: int, keys: Sequence[jax.Array]) -> Sampled:
  """Samples a pool per key, and computes the Gram matrix of all completions."""
  prompt, (example,) = bench.batches[index]
  params = bench.policy.params
  score = bench.score
  args = bench.sampler, params, prompt, ()
  pools = [sampling.complete(*args, key).rollout for key in keys]
  decoded = [policies.decode(bench.policy, pool) for pool in pools]
  texts = [text for (group,) in decoded for text in group]
  rewards = [bench.reward("", text, example) for text in texts]
  ids = np.concatenate([pool.completion_ids[0] for pool in pools])
  mask = np.concatenate([pool.completion_mask[0] for pool in pools])
  if bench.projections:  # fresh directions for each prompt
    key = jax.random.fold_in(keys[0], _DIRECTIONS)
    directions = errors.random_directions(params, key, bench.projections)
    score = functools.partial(score, directions)
  gram, distinct = errors.score_gram(score, params, prompt, ids, mask)
  without = np.empty((0, *gram.shape[-2:]))
  if bench.projections:
    without = (gram.sum(0) - gram) / (len(gram) - 1)
    gram = gram.mean(0)
  return Sampled(np.array(rewards, np.float32), gram, without, distinct)
