"""Computes the rewards of groups of completions from a rollout's texts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from grpojax.rewards.conventions import IDS, Item
from grpojax.rewards.pool import Failure, GroupRewards, Pool, Submission

OF_TURNS = ("messages", "turn_rewards", "episode_info", "episode_error")
"""Columns that an environment adds to the example of a trajectory."""


def submit_groups(
  pool: Pool,
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
  lengths: Int[np.ndarray, "B G"],
  finished: Bool[np.ndarray, "B G"],
  max_length: int,
  ids: Int[np.ndarray, "B G T"] | None = None,
  transcripts: Sequence[Sequence[Mapping[str, Any]]] | None = None,
) -> Submission:
  """Starts to compute the rewards of groups and returns at once.

  The B examples have a "prompt_text"; texts are [B][G], without EOS. Reward
  functions see three more keys: "completion_length" (tokens, with the EOS),
  "max_completion_length" (`max_length`) and "finished" (True after an EOS).
  [B][G] `transcripts` of an environment add the keys `OF_TURNS`; `ids` add the
  token ids for functions that have a parameter for them.
  """
  with_ids = ids is not None and pool.wants(IDS)

  def item(b: int, g: int) -> Item:
    added = {
      "completion_length": int(lengths[b, g]),
      "max_completion_length": max_length,
      "finished": bool(finished[b, g]),
    }
    if with_ids:
      added[IDS] = ids[b, g, : lengths[b, g]].tolist()
    if transcripts is not None:
      added |= {name: transcripts[b][g][name] for name in OF_TURNS}
    return examples[b]["prompt_text"], texts[b][g], examples[b] | added

  size = lengths.shape[1]
  rows = [[item(b, g) for g in range(size)] for b in range(len(examples))]
  return pool.submit(rows, size)


def all_failures(rewards: GroupRewards) -> list[Failure]:
  """Lists a batch's failures, ordered by index in the group, then by prompt."""
  by_completion = zip(*rewards.failures, strict=True)
  return [x for row in by_completion for failures in row for x in failures]
