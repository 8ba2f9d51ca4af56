"""What completions of held-out prompts say about one model, or about two.

Everything is computed from one value a prompt: prompts are what varies, and the
samples of one prompt are not independent of each other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from grpojax.core.intervals import (
  PairedDifference,
  mean_interval,
  paired_difference,
  paired_proportions,
  wilson_interval,
)
from grpojax.core.pass_at_k import SILENT, majority_at_k, pass_at_k
from grpojax.rewards import exact, math
from grpojax.rewards.pool import Failure

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


def failed(failures: Sequence[Failure]) -> str:
  """A line about rewards that could not be computed."""
  first = failures[0]
  return (
    f"{len(failures)} rewards failed; the first: {first.function} "
    f"({first.reason}) of {first.completion[:80]!r}"
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


def _right_or_wrong(*values: np.ndarray) -> bool:
  return all(np.isin(v, (0, 1)).all() for v in values)


def estimate(values: np.ndarray) -> tuple[float, float, float]:
  """Mean over prompts with its 95% interval: mean, low, high.

  Wilson's interval where each prompt is right or wrong, else Student's.
  """
  if _right_or_wrong(values):
    found = wilson_interval(int(np.sum(values)), len(values))
  else:
    found = mean_interval(jnp.asarray(values))
  mean, low, high = map(float, found)
  return mean, low, high


def numbers(values: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """For JSON: three fields of the accuracy, or name -> [mean, low, high]."""
  found = {name: estimate(value) for name, value in values.items()}
  if "accuracy" not in found:
    return {name: list(value) for name, value in found.items()}
  names = ("accuracy", "accuracy_low", "accuracy_high")
  return dict(zip(names, found["accuracy"], strict=True))


def compare(
  a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
) -> dict[str, PairedDifference]:
  """Paired differences, a less b, of what `per_prompt` gave for two models.

  Agresti and Min's interval where each prompt is right or wrong for both, else
  Student's; see `core.intervals`.
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
  for name, (*found, p_value) in compare(a, b).items():
    both = (_percent(*estimate(values[name])) for values in (a, b))
    row = TITLES.get(name, name), *both, _percent(*found, sign="+")
    rows.append((*row, f"{p_value:.2g}"))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "   ".join(
      f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)
    ).rstrip()
    for row in rows
  ]
