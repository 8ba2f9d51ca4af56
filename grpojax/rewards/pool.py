"""Pool of processes that compute rewards, with a time limit per completion.

    with Pool(["math_answer", "overlong"], workers=4, timeout=10.0) as pool:
      submission = pool.submit([[(prompt, completion, example), ...], ...], G)
      rewards = pool.collect([submission]).rewards  # [B, G]

If a function raises, hangs, ends its process, or does not return a finite
number, the reward is NaN with a `Failure`; other rewards are not affected.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from grpojax.rewards import conventions, functions, worker
from grpojax.rewards.conventions import IDS, Item
from grpojax.rewards.worker import Outcome
from grpojax.runtime.processes import workers as workers_lib
from grpojax.runtime.processes.workers import Job, WorkerPool


class Failure(NamedTuple):
  """A failed computation of a reward."""

  function: str
  reason: str
  prompt: str
  completion: str


class GroupRewards(NamedTuple):
  """Rewards of all completions of a batch; NaN marks a missing value."""

  # Weighted sums (`functions.combine`), in the dtype of `exact_enough`. The
  # loss leaves out completions with NaN.
  rewards: Float[np.ndarray, "B G"]
  values: dict[str, Float[np.ndarray, "B G"]]  # by short name of the function
  # True if a function failed. NaN without a failure: all functions abstained.
  failed: Bool[np.ndarray, "B G"]
  failures: list[list[Sequence[Failure]]]  # [B][G]; see `all_failures`
  # Further numbers returned by functions, keyed by "FUNCTION/NAME".
  extras: dict[str, Float[np.ndarray, "B G"]] = {}


OF_TURNS = ("messages", "turn_rewards", "episode_info", "episode_error")
"""Columns that an environment adds to the example of a trajectory."""

_Groups = Float[np.ndarray, "*B G"]


def exact_enough(rewards: _Groups) -> _Groups:
  """Returns rewards in float32, or float64 if float32 would lose differences.

  Rewards of a group that differ only by rounding become equal.
  """
  worst, equal, lossy = _range(rewards)
  rewards = np.where(equal & np.isfinite(rewards), worst, rewards)
  return rewards if lossy.any() else rewards.astype(np.float32)


def in_float32(rewards: _Groups) -> _Groups:
  """Casts to float32, minus a group's minimum if differences would be lost."""
  worst, _, lossy = _range(rewards)
  return np.where(lossy, rewards - worst, rewards).astype(np.float32)


def _range(rewards: _Groups) -> tuple[np.ndarray, ...]:
  """Returns each group's minimum and two conditions, `(minimum, equal, lossy)`.

  `equal`: rewards differ only by rounding; `lossy`: float32 would lose their
  differences, which are small for their size (1e8 and 1e8 + 1).
  """
  finite = {"where": np.isfinite(rewards), "axis": -1, "keepdims": True}
  best = np.max(rewards, initial=-np.inf, **finite)
  worst = np.min(rewards, initial=np.inf, **finite)
  spread = best - worst
  size = np.maximum(np.abs(best), np.abs(worst))
  equal = spread <= 2**-40 * size
  return worst, equal, ~equal & (spread < 2**-12 * size)


_Task = tuple[list[int], list[tuple[int, int]]]
"""Indices of functions, and (prompt, completion) of each item."""


class Submission(workers_lib.Submission):
  """Groups of `size` items sent to the workers; job i computes `tasks[i]`."""

  def __init__(
    self,
    groups: Sequence[Sequence[Item]],
    size: int,
    tasks: list[_Task],
    timeout: int | float,
  ):
    self.groups = groups
    self.size = size
    self.tasks = tasks
    jobs = []
    for indices, places in tasks:
      items = [groups[b][g] for b, g in places]
      count = len(indices) * len(items)
      jobs.append(Job([indices, items], count, timeout * len(items)))
    super().__init__(jobs)


class Pool(WorkerPool):
  """Computes rewards with named functions; use it in a `with` block.

  Completions that the pool gave up (see `WorkerPool`) count as failures. If
  `functions.workers_for` returns 0, `collect` computes rewards in this process.
  `timeout` is seconds per completion for all functions together; `Trl`
  functions get it times the group size. `sources` maps a function's short name
  to the data sets for which it is called.
  """

  def __init__(
    self,
    names: Sequence[str],
    options: Mapping[str, Any] | None = None,
    weights: Sequence[int | float] | None = None,
    workers: int = 0,
    timeout: int | float = 10.0,
    sources: Mapping[str, Sequence[str]] | None = None,
  ):
    self.names = [functions.label(name) for name in names]
    self.weights = [1.0] * len(names) if weights is None else list(weights)
    self._functions = functions.resolve_all(names, options)
    self._timeout = timeout
    setup = {
      "names": list(names),
      "options": {name: dict(each) for name, each in (options or {}).items()},
      "sources": [(sources or {}).get(name) for name in self.names],
    }
    processes = functions.workers_for(names, workers)
    super().__init__(worker, setup, processes)

  def wants(self, name: str) -> bool:
    """Returns True if a `Trl` function has a parameter `name`: IDS or STATE."""
    trl = (x for x in self._functions if isinstance(x, conventions.Trl))
    return any(x.takes is None or name in x.takes for x in trl)

  def submit(self, groups: Sequence[Sequence[Item]], size: int) -> Submission:
    """Starts to compute rewards of groups; ValueError unless items are JSON."""
    by_group = []
    by_item = []
    for i, function in enumerate(self._functions):
      is_trl = isinstance(function, conventions.Trl)
      (by_group if is_trl else by_item).append(i)
    prompts = range(len(groups))
    tasks = []
    if by_item:
      # All first completions, then all second ones: the pool gives up after
      # several failures in a row, which should not be due to a single example.
      tasks += [(by_item, [(b, g)]) for g in range(size) for b in prompts]
    if by_group:
      tasks += [(by_group, [(b, g) for g in range(size)]) for b in prompts]
    sent = Submission(groups, size, tasks, self._timeout)
    self.start(sent)
    return sent

  def collect(
    self,
    submissions: Sequence[Submission],
    check_signals: Callable[[], None] = lambda: None,
  ) -> GroupRewards:
    """Waits for submissions and returns their rewards as a single batch.

    `check_signals` is called as in `results`; if it raises, the pool abandons
    all submissions.
    """
    groups = [group for sent in submissions for group in sent.groups]
    sizes = [len(sent.groups) for sent in submissions]
    starts = itertools.accumulate(sizes, initial=0)
    first = dict(zip(submissions, starts, strict=False))  # rows of the batch
    # Outcomes by (row of the batch, index in the group, function).
    outcomes = collections.defaultdict(lambda: Outcome(None))
    for sent, done in self.results(submissions, check_signals):
      indices, places = sent.tasks[done.index]
      values = done.outcomes
      if done.error is not None:
        # The running function failed for all its completions; the functions
        # after it have no value.
        ended = len(values) // len(places) * len(places)
        values = values[:ended] + [Outcome(None, done.error)] * len(places)
      # A worker answers function by function, each for all completions.
      keys = itertools.product(indices, places)
      for (i, (b, g)), outcome in zip(keys, values, strict=False):
        outcomes[first[sent] + b, g, i] = outcome
    return self._group_rewards(groups, submissions[0].size, outcomes)

  def _group_rewards(
    self,
    groups: Sequence[Sequence[Item]],
    size: int,
    outcomes: Mapping[tuple[int, int, int], Outcome],
  ) -> GroupRewards:
    shape = len(groups), size
    all_missing = functools.partial(np.full, shape, np.nan)
    rewards = all_missing()
    values = {name: all_missing() for name in self.names}
    extras = collections.defaultdict(all_missing)
    failed = np.zeros(shape, bool)
    failures: list[list[Sequence[Failure]]] = [[] for _ in groups]
    for b, g in np.ndindex(shape):
      prompt, completion, _ = groups[b][g]
      errors = {}
      scores = []
      for i, name in enumerate(self.names):
        value, error, numbers = outcomes[b, g, i]
        scores.append(value)
        values[name][b, g] = np.nan if value is None else value
        if error is not None:
          errors[name] = error
        for key, number in numbers.items():
          extras[f"{name}/{key}"][b, g] = number
      total = functions.combine(scores, self.weights)
      if total is not None and not errors:
        rewards[b, g] = total
        if not abs(total) <= worker.LARGEST:
          rewards[b, g] = np.nan
          reason = f"is {total:.3g}, more than {worker.LARGEST:g}"
          errors["weighted sum"] = reason
      failed[b, g] = bool(errors)
      failures[b].append(
        [Failure(*error, prompt, completion) for error in errors.items()]
      )
    return GroupRewards(
      exact_enough(rewards),
      {name: exact_enough(array) for name, array in values.items()},
      failed,
      failures,
      {name: extras[name].astype(np.float32) for name in sorted(extras)},
    )


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
