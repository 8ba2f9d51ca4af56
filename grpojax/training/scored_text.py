"""From samples to text and rewards: each process has its own rows of them.

Which rows those are has nothing to do with the devices that sampled them: the
ids are few, so every process gets all of them, and decodes and scores its block
of the prompts (`distributed.my_rows`), whole groups. What it finds is then
gathered: all processes know all rewards, in the order of the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Rollout
from grpojax.rewards import groups
from grpojax.rewards.pool import Failure
from grpojax.runtime import distributed
from grpojax.training import policy as policy_lib
from grpojax.training import scoring
from grpojax.training.policy import Policy

Texts = list[list[str]]


class Begun(NamedTuple):
  """A part of a batch whose rewards are being computed.

  Attributes:
    prompts: of the part, in all processes.
    texts: completions of this process's prompts, [own][G].
    pending: their rewards.
  """

  prompts: int
  texts: Texts
  pending: groups.Pending


def begin(
  policy: Policy,
  reward_pool: scoring.RewardPool,
  examples: Sequence[dict[str, Any]],
  samples: Rollout,
) -> Begun:
  """Decodes this process's completions, and sends them off to be scored.

  Args:
    policy: whose tokenizer decodes them.
    reward_pool: of the rewards.
    examples: of the part's prompts; the samples may be of more, which only pad
      the batch.
    samples: that are there; in every process the same part of the batch.
  """
  names = ("completion_ids", "completion_mask", "finished")
  on_host = mesh_lib.fetch({name: getattr(samples, name) for name in names})
  samples, mine = samples.replace(**on_host), distributed.my_rows(len(examples))
  texts = policy_lib.decode(policy, samples, mine)
  pending = scoring.submit(reward_pool, examples[mine], texts, samples, mine)
  return Begun(len(examples), texts, pending)


def finish(
  reward_pool: scoring.RewardPool,
  examples: Sequence[dict[str, Any]],
  parts: Sequence[Begun],
  check_signals: Callable[[], None],
  every_text: bool = False,
) -> tuple[Texts, groups.GroupRewards]:
  """Waits for the rewards of a batch.

  Args:
    reward_pool: of the rewards.
    examples: [B], of the whole batch.
    parts: of it, one after another.
    check_signals: called while the functions compute, see `Pool.collect`; may
      raise.
    every_text: return all texts, and not this process's only.

  Returns:
    Completions [B][G] (of several processes, the first has the first ones), and
    the scores of all of them.
  """
  texts = [group for part in parts for group in part.texts]
  sizes = [part.prompts for part in parts]
  if every_text or reward_pool.model:
    texts = gather_rows(texts, sizes)
  by_model = reward_pool.model(examples, texts) if reward_pool.model else None
  with distributed.agreed():
    pending = [part.pending for part in parts]
    scores = groups.collect_groups(reward_pool.pool, pending, check_signals)
  scores = _of_all(scores, sizes)
  if by_model is not None:
    scores = scoring.with_model(reward_pool, scores, by_model, examples, texts)
  return texts, scores


def gather_rows(own: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
  """Every process's rows, in the order of the batch.

  Args:
    own: this process's rows of one part after another, of JSON's types.
    sizes: prompts of each part, in all processes.
  """
  if not distributed.several():
    return list(own)
  said = list(map(iter, distributed.gather(list(own))))
  return [
    next(rows)
    for size in sizes
    for process, rows in enumerate(said)
    for _ in range(size)[distributed.rows_of(process, size)]
  ]


def _of_all(
  scores: groups.GroupRewards, sizes: Sequence[int]
) -> groups.GroupRewards:
  """The scores of all processes, from this one's."""
  if not distributed.several():
    return scores
  names = list(scores.values)
  arrays = scores.rewards, scores.failed, *scores.values.values()
  extras = [
    {name: values[i].tolist() for name, values in scores.extras.items()}
    for i in range(len(scores.rewards))
  ]
  lists = scores.failures, extras, *(x.tolist() for x in arrays)
  rows = gather_rows(list(zip(*lists, strict=True)), sizes)
  failures, extras, rewards, failed, *values = zip(*rows, strict=True)
  found = [
    (1, {name: np.array([x], np.float32) for name, x in row.items()})
    for row in extras
  ]
  return groups.GroupRewards(
    np.array(rewards, np.float32),
    {n: np.array(x, np.float32) for n, x in zip(names, values, strict=True)},
    np.array(failed, bool),
    [[[Failure(*x) for x in some] for some in group] for group in failures],
    groups.joined_extras(found, scores.rewards.shape[1]),
  )


def score(
  policy: Policy,
  reward_pool: scoring.RewardPool,
  examples: Sequence[dict[str, Any]],
  samples: Rollout,
  check_signals: Callable[[], None] = lambda: None,
) -> tuple[Texts, groups.GroupRewards]:
  """All texts of a batch in one part and their scores, see `finish`."""
  begun = begin(policy, reward_pool, examples, samples)
  return finish(reward_pool, examples, [begun], check_signals, every_text=True)
