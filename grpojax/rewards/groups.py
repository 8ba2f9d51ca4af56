"""Rewards of groups of completions: lists of texts in, arrays [B, G] out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from grpojax.rewards.conventions import IDS
from grpojax.rewards.pool import Failure, Job, Pool, Submission


class GroupRewards(NamedTuple):
  """Rewards of all completions.

  Attributes:
    rewards: [B, G], float32; NaN where there is none: to be masked out.
    values: [B, G] of each function, by short name; NaN where it has none.
    failed: [B, G], where the reward could not be computed; where it is NaN
      otherwise, all functions abstain.
    failures: [B][G], the rewards that could not be computed, see
      `all_failures`.
    extras: [B, G] of each other number that the functions gave, by
      "FUNCTION/NAME"; NaN where it was not given.
  """

  rewards: Float[np.ndarray, "B G"]
  values: dict[str, Float[np.ndarray, "B G"]]
  failed: Bool[np.ndarray, "B G"]
  failures: list[list[Sequence[Failure]]]
  extras: dict[str, Float[np.ndarray, "B G"]] = {}


class Pending(NamedTuple):
  """Groups on their way; see `submit_groups`."""

  submission: Submission
  shape: tuple[int, int]


def submit_groups(
  pool: Pool,
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
  lengths: Int[np.ndarray, "B G"],
  finished: Bool[np.ndarray, "B G"],
  max_length: int,
  ids: Int[np.ndarray, "B G T"] | None = None,
) -> Pending:
  """Starts to score groups and returns at once; see `reward_groups`."""
  prompts, size = len(examples), lengths.shape[1]
  with_ids = ids is not None and pool.wants(IDS)

  def given(b, g):
    tokens = ids[b, g, : lengths[b, g]].tolist() if with_ids else None
    return {IDS: tokens} if with_ids else {}

  # Neighbours are of different prompts: if one example makes a function hang,
  # its completions do not come one after the other (see `Pool`).
  jobs = [
    Job(
      example["prompt_text"],
      texts[b][g],
      {
        **example,
        "completion_length": int(lengths[b, g]),
        "max_completion_length": max_length,
        "finished": bool(finished[b, g]),
        **given(b, g),
      },
    )
    for g in range(size)
    for b, example in enumerate(examples)
  ]
  together = [range(b, len(jobs), prompts) for b in range(prompts)]
  return Pending(pool.submit(jobs, together), (prompts, size))


def collect_groups(
  pool: Pool,
  pending: Sequence[Pending],
  check_signals: Callable[[], None] | None = None,
) -> GroupRewards:
  """Waits for groups that `submit_groups` has sent off.

  Args:
    pool: the one that they were sent to.
    pending: the groups, one part of a batch after another; all of one size.
    check_signals: called while it waits, see `Pool.collect`; where it raises,
      they are abandoned.

  Returns:
    What there would be, had all of them been sent at once.
  """
  parts = []
  try:
    for part in pending:
      results = pool.collect(part.submission, check_signals)
      prompts, size = part.shape
      parts.append([results[g * prompts :][:prompts] for g in range(size)])
  except BaseException:
    abandon(pending)
    raise
  size = pending[0].shape[1]
  results = [
    result for g in range(size) for part in parts for result in part[g]
  ]
  prompts = len(results) // size

  def grouped(values, dtype=np.float32):
    return np.array(values, dtype).reshape(size, prompts).T.copy()

  return GroupRewards(
    grouped([result.reward for result in results]),
    {
      name: grouped([result.values[i] for result in results])
      for i, name in enumerate(pool.names)
    },
    grouped([bool(result.failures) for result in results], bool),
    [[x.failures for x in results[b::prompts]] for b in range(prompts)],
    {
      name: grouped([result.extras.get(name, np.nan) for result in results])
      for name in sorted({key for result in results for key in result.extras})
    },
  )


def joined_extras(
  parts: Sequence[tuple[int, dict[str, Float[np.ndarray, "b G"]]]], size: int
) -> dict[str, Float[np.ndarray, "B G"]]:
  """Extras of several parts of a batch; NaN where a part has none of a name.

  Args:
    parts: the prompts of each, and its extras.
    size: G.
  """
  names = sorted({name for _, extras in parts for name in extras})
  return {
    name: np.concatenate(
      [
        extras.get(name, np.full((prompts, size), np.nan, np.float32))
        for prompts, extras in parts
      ]
    )
    for name in names
  }


def all_failures(scores: GroupRewards) -> list[Failure]:
  """Of a batch: of the first completions of all prompts, then the second."""
  return [
    failure
    for of_prompts in zip(*scores.failures, strict=True)
    for some in of_prompts
    for failure in some
  ]


def abandon(pending: Sequence[Pending]) -> None:
  """Nobody waits for these groups: what is not done of them is not tried."""
  for part in pending:
    part.submission.abandoned = True


def reward_groups(
  pool: Pool,
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
  lengths: Int[np.ndarray, "B G"],
  finished: Bool[np.ndarray, "B G"],
  max_length: int,
  ids: Int[np.ndarray, "B G T"] | None = None,
) -> GroupRewards:
  """Scores all completions of a batch.

  Args:
    pool: computes the rewards.
    examples: [B]; each has a "prompt_text". The reward functions see them with
      three more keys: "completion_length", "max_completion_length", "finished".
    texts: [B][G] completions, without their EOS.
    lengths: [B, G], tokens, with the EOS.
    finished: [B, G], whether an EOS ended the completion.
    max_length: the limit on completions, T, tokens.
    ids: of the completions' tokens, where a function may want them.

  Returns:
    Rewards, the values of each function, and what failed.
  """
  given = examples, texts, lengths, finished, max_length, ids
  pending = submit_groups(pool, *given)
  return collect_groups(pool, [pending])
