"""The held-out problems that models are asked: the same ones for all of them.

Each model writes prompts in its own format and counts them with its own
tokenizer, so what `data.too_long` drops differs between models. Two models are
compared on what fits both.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from grpojax.core.types import Prompts
from grpojax.data.pipeline import Subset
from grpojax.training import prompts as prompts_lib
from grpojax.training import reward_inputs
from grpojax.training import splits as splits_lib
from grpojax.training.policy import Policy


class HeldOut(NamedTuple):
  """What one model is asked.

  Attributes:
    batches: of `(Prompts, examples)`, in the order of the data set.
    too_long: problems that were left out because this model's prompt of them
      is longer than `data.max_prompt_length`.
  """

  batches: list[tuple[Prompts, list[dict[str, Any]]]]
  too_long: int


def _prompt(example: Mapping[str, Any]) -> str:
  """What decides whether an example fits a model."""
  return json.dumps(example["prompt"], sort_keys=True, default=repr)


def _problem(example: Mapping[str, Any]) -> str:
  """What makes two examples the same problem."""
  parts = example["prompt"], example.get("answer")
  return json.dumps(parts, sort_keys=True, default=repr)


def _all(examples: Any) -> Iterator[dict[str, Any]]:
  return (examples[i] for i in range(len(examples)))


def _batches(*args: Any) -> list[tuple[Prompts, list[dict[str, Any]]]]:
  return list(prompts_lib.held_out(*args))


def _named(name: str, function: Callable[..., Any], *args: Any) -> Any:
  """Calls `function`; its errors say which model they are about."""
  try:
    return function(*args)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error


def _in_common(
  names: Sequence[str], splits: Sequence[splits_lib.Split]
) -> list[Any]:
  """Of each model's examples, those that fit all models."""
  seen = [[_prompt(e) for e in _all(split.examples)] for split in splits]
  common = set.intersection(*map(set, seen))
  if not common:
    raise ValueError(
      f"no held-out prompt fits both {' and '.join(names)}: raise "
      "--config.data.max_prompt_length"
    )
  return [
    Subset(split.examples, [i for i, p in enumerate(prompts) if p in common])
    for split, prompts in zip(splits, seen, strict=True)
  ]


def problems(
  config: ConfigDict, names: Sequence[str], policies: Sequence[Policy]
) -> list[HeldOut]:
  """Held-out problems that fit all models, in each model's format.

  Args:
    config: whose `data` and `eval` are read, for all models.
    names: of the models, for errors.
    policies: the models.

  Returns:
    For each model, the same problems in the same order.

  Raises:
    ValueError: no problem fits all models; a prompt is too long and
      `data.too_long` is "refuse"; the data lack what a reward function needs;
      or the data set is not the same twice.
  """
  splits = [
    _named(name, splits_lib.load_split, config, policy, "test")
    for name, policy in zip(names, policies, strict=True)
  ]
  reward_inputs.check_columns(config, reward_inputs.resolve(config), splits[0])
  examples = [split.examples for split in splits]
  if any(split.dropped for split in splits):
    examples = _in_common(names, splits)
  asked = [
    HeldOut(_named(name, _batches, config, policy, fitting), split.dropped)
    for name, policy, fitting, split in zip(
      names, policies, examples, splits, strict=True
    )
  ]
  first, *others = (
    [_problem(e) for _, batch in held_out.batches for e in batch]
    for held_out in asked
  )
  if any(other != first for other in others):
    raise ValueError(
      f"the data set {config.data.name} gave {' and '.join(names)} different "
      "problems: its load must return the same for the same arguments"
    )
  return asked
