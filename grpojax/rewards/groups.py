"""Rewards of groups of completions: lists of texts in, arrays [B, G] out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from grpojax.rewards.conventions import IDS
from grpojax.rewards.pool import Failure, Job, Pool, Submission


class GroupRewards(NamedTuple):
  """Rewards of all completions of a batch.

  Attributes:
    rewards: float32; NaN where there is none: to be masked out.
    values: values of each function, by short name; NaN where it has none.
    failed: True where the reward could not be computed; where it is NaN
      otherwise, all functions abstain.
    failures: [B][G], reasons for that; `all_failures` lists them.
    extras: other numbers that functions returned, by "FUNCTION/NAME", or NaN.
  """

  rewards: Float[np.ndarray, "B G"]
  values: dict[str, Float[np.ndarray, "B G"]]
  failed: Bool[np.ndarray, "B G"]
  failures: list[list[Sequence[Failure]]]
  extras: dict[str, Float[np.ndarray, "B G"]] = {}


def submit_groups(
  pool: Pool,
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
  lengths: Int[np.ndarray, "B G"],
  finished: Bool[np.ndarray, "B G"],
  max_length: int,
  ids: Int[np.ndarray, "B G T"] | None = None,
) -> Submission:
  """Starts to compute the rewards of groups and returns at once.

  Args:
    pool: computes the rewards.
    examples: [B]; each has a "prompt_text". The reward functions see them with
      three more keys: "completion_length", "max_completion_length", "finished".
    texts: [B][G] completions, without their EOS.
    lengths: [B, G], tokens, with the EOS.
    finished: [B, G], True where an EOS ended the completion.
    max_length: the limit on completions, T, tokens.
    ids: the completions' tokens, where a function may take them.
  """
  with_ids = ids is not None and pool.wants(IDS)

  def job(b: int, g: int) -> Job:
    added = {
      "completion_length": int(lengths[b, g]),
      "max_completion_length": max_length,
      "finished": bool(finished[b, g]),
    }
    if with_ids:
      added[IDS] = ids[b, g, : lengths[b, g]].tolist()
    return Job(examples[b]["prompt_text"], texts[b][g], examples[b] | added)

  size = lengths.shape[1]
  jobs = [[job(b, g) for g in range(size)] for b in range(len(examples))]
  return pool.submit(jobs, size)


def collect_groups(
  pool: Pool,
  submissions: Sequence[Submission],
  check_signals: Callable[[], None] = lambda: None,
) -> GroupRewards:
  """Waits for what `submit_groups` has sent, one part of a batch after another.

  As if all groups had been sent at once. Where `check_signals`, which is called
  while it waits, raises, all of them are abandoned.
  """
  groups = []  # [B][G] results
  try:
    for submission in submissions:
      groups += pool.collect(submission, check_signals)
  except BaseException:
    abandon(submissions)
    raise
  results = [result for group in groups for result in group]
  names = sorted({name for result in results for name in result.extras})

  def array(values: Iterable, dtype=np.float32) -> np.ndarray:
    shape = len(groups), submissions[0].size
    return np.array(list(values), dtype).reshape(shape)

  values, extras = {}, {}
  for i, name in enumerate(pool.names):
    values[name] = array(r.values[i] for r in results)
  for name in names:
    extras[name] = array(r.extras.get(name, np.nan) for r in results)
  return GroupRewards(
    array(r.reward for r in results),
    values,
    array((bool(r.failures) for r in results), bool),
    [[r.failures for r in group] for group in groups],
    extras,
  )


def joined_extras(
  parts: Sequence[tuple[int, dict[str, Float[np.ndarray, "b G"]]]], size: int
) -> dict[str, Float[np.ndarray, "B G"]]:
  """Joins extras of parts (prompts, extras); NaN where one lacks a name."""
  names = sorted({name for _, extras in parts for name in extras})
  joined = {}
  for name in names:
    arrays = [
      extras.get(name, np.full((prompts, size), np.nan, np.float32))
      for prompts, extras in parts
    ]
    joined[name] = np.concatenate(arrays)
  return joined


def all_failures(rewards: GroupRewards) -> list[Failure]:
  """Failures of a batch: of all prompts' first completions, then the second."""
  by_completion = zip(*rewards.failures, strict=True)
  return [x for row in by_completion for failures in row for x in failures]


def abandon(submissions: Sequence[Submission]) -> None:
  """Gives up groups for which nobody waits: the rest is not tried."""
  for submission in submissions:
    submission.abandoned = True
