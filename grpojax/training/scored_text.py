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
from grpojax.training import policy as policies
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
  scorer: scoring.Scorer,
  examples: Sequence[dict[str, Any]],
  samples: Rollout,
) -> Begun:
  """Decodes this process's completions, and sends them off to be scored.

  Args:
    policy: whose tokenizer decodes them.
    scorer: of the rewards.
    examples: of the part's prompts; the samples may be of more, which only pad
      the batch.
    samples: that are there; in every process the same part of the batch.
  """
  names = ("completion_ids", "completion_mask", "finished")
  on_host = mesh_lib.fetch({name: getattr(samples, name) for name in names})
  samples, mine = samples.replace(**on_host), distributed.my_rows(len(examples))
  texts = policies.decode(policy, samples, mine)
  pending = scoring.submit(scorer, examples[mine], texts, samples, mine)
  return Begun(len(examples), texts, pending)


def finish(
  scorer: scoring.Scorer,
  examples: Sequence[dict[str, Any]],
  parts: Sequence[Begun],
  poll: Callable[[], None],
  every_text: bool = False,
) -> tuple[Texts, groups.GroupScores]:
  """Waits for the rewards of a batch.

  Args:
    scorer: of the rewards.
    examples: [B], of the whole batch.
    parts: of it, one after another.
    poll: called while the functions compute, see `Pool.collect`; may raise.
    every_text: return all texts, and not this process's only.

  Returns:
    Completions [B][G] (of several processes, the first has the first ones), and
    the scores of all of them.
  """
  texts = [group for part in parts for group in part.texts]
  sizes = [part.prompts for part in parts]
  if every_text or scorer.model:
    texts = gather_rows(texts, sizes)
  by_model = scorer.model(examples, texts) if scorer.model else None
  with distributed.agreed():
    pending = [part.pending for part in parts]
    scores = groups.collect_groups(scorer.pool, pending, poll)
  scores = _of_all(scores, sizes)
  if by_model is not None:
    scores = scoring.with_model(scorer, scores, by_model, examples, texts)
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
  scores: groups.GroupScores, sizes: Sequence[int]
) -> groups.GroupScores:
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
  return groups.GroupScores(
    np.array(rewards, np.float32),
    {n: np.array(x, np.float32) for n, x in zip(names, values, strict=True)},
    np.array(failed, bool),
    [[[Failure(*x) for x in some] for some in group] for group in failures],
    groups.joined_extras(found, scores.rewards.shape[1]),
  )


def score(
  policy: Policy,
  scorer: scoring.Scorer,
  examples: Sequence[dict[str, Any]],
  samples: Rollout,
  poll: Callable[[], None] = lambda: None,
) -> tuple[Texts, groups.GroupScores]:
  """All texts of a batch in one part and their scores, see `finish`."""
  begun = begin(policy, scorer, examples, samples)
  return finish(scorer, examples, [begun], poll, every_text=True)
