"""What reward functions are given: columns of the data, and the step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from grpojax.data.examples import SOURCE
from grpojax.rewards import conventions, functions
from grpojax.rewards.conventions import STATE
from grpojax.rewards.pool import Pool
from grpojax.training import mixtures


def resolve(config: ConfigDict) -> list[functions.Reward]:
  """The config's reward functions, by themselves.

  Raises:
    ValueError: a function that does not exist, or options that it lacks.
  """
  options = config.reward.options.to_dict()
  return functions.resolve_all(config.reward.functions, options)


def check_columns(
  config: ConfigDict, rewards: Sequence[functions.Reward], split: Any
) -> None:
  """Whether the data have the columns that reward functions ask for.

  Args:
    config: the run's.
    rewards: from `resolve`.
    split: a `splits.Split`; the first example of each data set is looked at.

  Raises:
    ValueError: one is missing.
  """
  parts, only = split.parts or {"": split}, mixtures.scored_by(config)
  for name, reward in zip(config.reward.functions, rewards, strict=True):
    for source, part in parts.items():
      if not source or source in only.get(functions.label(name), parts):
        example = part.examples[0] | ({SOURCE: source} if source else {})
        where = f"data set {source or config.data.name!r}"
        conventions.check_columns(name, reward, example, where)


def with_step(
  pool: Pool, examples: list[dict[str, Any]], step: int, steps: int
) -> list[dict[str, Any]]:
  """Examples that say how far the run is, where a function asks for that.

  Args:
    pool: of the reward functions.
    examples: of prompts that are about to be sampled.
    step: steps done.
    steps: of the run.
  """
  if not pool.wants(STATE):
    return examples
  state = {"global_step": step, "max_steps": steps}  # TRL's names
  return [{**example, STATE: state} for example in examples]


def batches_with_step(
  pool: Pool, batches: Iterable[tuple[Any, Any]], step: int, steps: int
) -> Iterator[tuple[Any, Any]]:
  """Batches of prompts whose examples say it; see `with_step`."""
  for prompts, examples in batches:
    yield prompts, with_step(pool, examples, step, steps)
