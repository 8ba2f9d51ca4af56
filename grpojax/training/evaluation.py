"""Completions of held-out prompts, and what they say about one model or two.

Everything is computed from one value a prompt: prompts are what varies, and the
samples of one prompt are not independent of each other.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Params, Prompts
from grpojax.rewards import exact, groups, math
from grpojax.rewards.pool import Failure
from grpojax.runtime.screen import printable
from grpojax.statistics.intervals import (
  PairedDifference,
  mean_interval,
  paired_difference,
  paired_proportions,
  wilson_interval,
)
from grpojax.statistics.pass_at_k import SILENT, majority_at_k, pass_at_k
from grpojax.training import mixtures, scored_text, scoring
from grpojax.training import policy as policy_lib
from grpojax.training.policy import Policy

CORRECT = 1.0  # a completion with at least this reward is right
ANSWERS = {  # of rewards of which the votes for an answer can be counted
  "exact_answer": exact.given_answer,
  "math_answer": math.given_answer,
}
TITLES = {"accuracy": "greedy accuracy"}


class Evaluation(NamedTuple):
  """Completions of held-out prompts.

  Attributes:
    rewards: [prompts, samples]; nan, where there is none, is not right.
    texts: the completions, [prompts][samples].
    examples: the problems, with their "prompt_text".
    failures: rewards that could not be computed.
  """

  rewards: np.ndarray
  texts: list[list[str]]
  examples: list[dict[str, Any]]
  failures: list[Failure] = []


def _pad(prompts: Prompts, rows: int) -> Prompts:
  """Fills a last, shorter batch with empty prompts: one shape, one program."""
  missing = rows - len(prompts.prompt_ids)
  return jax.tree.map(
    lambda x: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)), prompts
  )


def evaluate(
  policy: Policy,
  params: Params,
  sampler: Callable[..., Any],
  batches: Iterable[tuple[Prompts, list[dict[str, Any]]]],
  reward_pool: scoring.RewardPool,
  key: jax.Array,
  batch_size: int,
  mesh: jax.sharding.Mesh | None = None,
  check_signals: Callable[..., None] = lambda together=False: None,
  told: Callable[[int], None] = lambda done: None,
) -> Evaluation:
  """Samples and scores completions of every batch.

  Args:
    policy: the model; its own parameters are not used.
    params: the parameters to evaluate.
    sampler: from `samplers.make_sampler`.
    batches: of `(Prompts, examples)`, the last one may be shorter.
    reward_pool: of the rewards, the first of which says what is right.
    key: of the samples.
    batch_size: rows that a shorter batch is padded to.
    mesh: where to put the prompts; None is one device.
    check_signals: called before each batch, `together` with all processes; and
      see `policy.wait` and `scored_text.finish`.
    told: called with how many prompts are done, at first with 0.
  """
  rewards, texts, seen, failures = [], [], [], []
  told(0)
  for i, (prompts, examples) in enumerate(batches):
    check_signals(together=True)
    padded = _pad(prompts, batch_size)
    if mesh is not None:
      padded = mesh_lib.place(padded, mesh, "batch")
    samples = sampler(params, padded, jax.random.fold_in(key, i))
    policy_lib.wait(samples, check_signals)
    decoded, scores = scored_text.score(
      policy, reward_pool, examples, samples, check_signals
    )
    rewards.append(scoring.correctness(reward_pool, scores, examples))
    texts += decoded
    seen += examples
    failures += groups.all_failures(scores)
    told(len(seen))
  return Evaluation(np.concatenate(rewards), texts, seen, failures)


def failed(failures: Sequence[Failure]) -> str:
  """A line about rewards that could not be computed."""
  first = failures[0]
  reason = printable(first.reason)  # may quote the completion
  return (
    f"{len(failures)} rewards failed; the first: {first.function} "
    f"({reason}) of {first.completion[:80]!r}"
  )


def answer_labels(
  texts: list[list[str]], answer: Callable[[str], str | None]
) -> Int[np.ndarray, "prompts samples"]:
  """Equal numbers for a prompt's samples with the same answer; -1 for none."""
  rows = []
  for group in texts:
    answers = list(map(answer, group))
    names = {name: i for i, name in enumerate(dict.fromkeys(answers))}
    rows.append([SILENT if a is None else names[a] for a in answers])
  return np.array(rows)


def per_prompt(
  result: Evaluation,
  ks: Sequence[int] = (),
  answer: Callable[[str], str | None] | None = None,
) -> dict[str, np.ndarray]:
  """What is estimated, by name: one value a prompt, [prompts].

  Args:
    result: the completions.
    ks: of pass@k; without any, the accuracy of the first completion.
    answer: the answer that a completion gives, see `ANSWERS`: also maj@k, for
      the same ks.
  """
  right = result.rewards >= CORRECT
  if not ks:
    return {"accuracy": right[:, 0].astype(np.float32)}
  values = {f"pass@{k}": np.asarray(pass_at_k(jnp.array(right), k)) for k in ks}
  if answer is not None:
    labels = answer_labels(result.texts, answer)
    values |= {f"maj@{k}": majority_at_k(labels, right, k) for k in ks}
  return values


def outcomes(
  result: Evaluation, accuracy: Float[np.ndarray, "B"]
) -> dict[str, Any]:
  """A row of evaluations.jsonl but for its step: which answers were right.

  Args:
    result: the completions.
    accuracy: 0 or 1 a prompt, of `per_prompt`.

  Returns:
    `right`, a text of a 0 or 1 a prompt, and `problems`, a fingerprint of what
    was asked in which order: evaluations that have the same one can be compared
    prompt by prompt.
  """
  asked = [[e.get("prompt"), e.get("answer")] for e in result.examples]
  text = json.dumps(asked, sort_keys=True, default=repr)
  return {
    "problems": hashlib.sha256(text.encode()).hexdigest()[:16],
    "right": "".join(map(str, accuracy.astype(int).tolist())),
  }


def by_data_set(
  config: ConfigDict, result: Evaluation, values: Mapping[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
  """The values of `per_prompt` by data set; empty where nothing is mixed."""
  rows = mixtures.by_source(config, result.examples)
  return {
    name: {key: value[some] for key, value in values.items()}
    for name, some in rows.items()
  }


def _right_or_wrong(*values: np.ndarray) -> bool:
  return all(np.isin(v, (0, 1)).all() for v in values)


def estimate(values: np.ndarray) -> tuple[float, float, float]:
  """Mean over prompts with its 95% interval: mean, low, high.

  Wilson's interval where each prompt is right or wrong, else Student's.
  """
  if _right_or_wrong(values):
    return wilson_interval(int(np.sum(values)), len(values))
  return mean_interval(values)


def numbers(values: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """For JSON: three fields of the accuracy, or name -> [mean, low, high]."""
  estimates = {name: estimate(value) for name, value in values.items()}
  if "accuracy" not in estimates:
    return {name: list(value) for name, value in estimates.items()}
  names = ("accuracy", "accuracy_low", "accuracy_high")
  return dict(zip(names, estimates["accuracy"], strict=True))


def compare(
  a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> dict[str, PairedDifference]:
  """Paired differences, a less b, of what `per_prompt` gave for two models.

  Agresti and Min's interval where each prompt is right or wrong for both, else
  Student's; see `statistics.intervals`.
  """
  return {
    name: paired_proportions(a[name] == 1, b[name] == 1)
    if _right_or_wrong(a[name], b[name])
    else paired_difference(a[name], b[name])
    for name in a
  }


def _percent(mean: float, low: float, high: float, sign: str = "") -> str:
  return f"{mean:{sign}.1%}  [{low:{sign}.1%}, {high:{sign}.1%}]"


def lines(values: Mapping[str, np.ndarray]) -> list[str]:
  """One model's numbers, to print."""
  return [
    f"{TITLES.get(name, name)}  {_percent(*estimate(value))}"
    for name, value in values.items()
  ]


def table(
  a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> list[str]:
  """Both models' numbers and their paired differences, to print."""
  rows = [("", "model", "compare", "model - compare", "p")]
  for name, (*difference, p_value) in compare(a, b).items():
    both = (_percent(*estimate(values[name])) for values in (a, b))
    row = TITLES.get(name, name), *both, _percent(*difference, sign="+")
    rows.append((*row, f"{p_value:.2g}"))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "   ".join(
      f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)
    ).rstrip()
    for row in rows
  ]
