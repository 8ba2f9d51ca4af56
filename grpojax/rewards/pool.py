"""Pool that computes rewards, with a time limit for each completion.

    with Pool(["math_answer", "overlong"], workers=4, timeout=10.0) as pool:
      submission = pool.submit([[(prompt, completion, example), ...], ...], G)
      rewards = pool.collect([submission]).rewards  # [B, G]

A reward that raises, hangs, ends its process, or returns something other than a
finite number is a `Failure` and gives NaN; the others are not affected.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from grpojax.rewards import conventions, functions, worker
from grpojax.rewards.conventions import Item
from grpojax.rewards.worker import Outcome
from grpojax.runtime.processes import workers as workers_lib
from grpojax.runtime.processes.workers import Job, WorkerPool
from grpojax.runtime.processes.workers import abandon as abandon


class Failure(NamedTuple):
  """A reward that could not be computed: by which function, and why."""

  function: str
  reason: str
  prompt: str
  completion: str


class GroupRewards(NamedTuple):
  """Rewards of all completions of a batch; NaN stands for no value."""

  # Weighted sum of the values (`functions.combine`), float32 or `exact_enough`;
  # NaN if there is none: to be masked out.
  rewards: Float[np.ndarray, "B G"]
  # Values of each function, by short name; NaN if it has none.
  values: dict[str, Float[np.ndarray, "B G"]]
  # True if the reward could not be computed. If it is NaN otherwise, all
  # functions abstain.
  failed: Bool[np.ndarray, "B G"]
  failures: list[list[Sequence[Failure]]]  # reasons; see `groups.all_failures`
  # Other numbers that functions returned, by "FUNCTION/NAME", or NaN.
  extras: dict[str, Float[np.ndarray, "B G"]] = {}


_Groups = Float[np.ndarray, "*B G"]


def exact_enough(rewards: _Groups) -> _Groups:
  """Returns rewards in float32, or float64 if that loses differences.

  Rewards of a group that differ by rounding only become equal.
  """
  worst, equal, lossy = _range(rewards)
  rewards = np.where(equal & np.isfinite(rewards), worst, rewards)
  return rewards if lossy.any() else rewards.astype(np.float32)


def in_float32(rewards: _Groups) -> _Groups:
  """Rounds rewards; groups that lose differences first subtract their least."""
  worst, _, lossy = _range(rewards)
  return np.where(lossy, rewards - worst, rewards).astype(np.float32)


def _range(rewards: _Groups) -> tuple[np.ndarray, ...]:
  """Per group: the least reward, and True if rewards differ by rounding only.

  Third, True if float32 loses their differences: these are small for the size
  of the rewards, as of 1e8 and 1e8 + 1.
  """
  finite = {"where": np.isfinite(rewards), "axis": -1, "keepdims": True}
  best = np.max(rewards, initial=-np.inf, **finite)
  worst = np.min(rewards, initial=np.inf, **finite)
  spread, size = best - worst, np.maximum(np.abs(best), np.abs(worst))
  equal = spread <= 2**-40 * size
  return worst, equal, ~equal & (spread < 2**-12 * size)


_Task = tuple[list[int], list[tuple[int, int]]]
"""Functions and places (prompt, completion), one or (TRL's) a whole group."""


class Submission(workers_lib.Submission):
  """Groups of `size` items on their way, one a prompt; `jobs` do `tasks`."""

  def __init__(
    self,
    groups: Sequence[Sequence[Item]],
    size: int,
    tasks: list[_Task],
    timeout: int | float,
  ):
    self.groups, self.size, self.tasks = groups, size, tasks
    jobs = []
    for indices, places in tasks:
      items = [groups[b][g] for b, g in places]
      count = len(indices) * len(items)
      jobs.append(Job([indices, items], count, timeout * len(items)))
    super().__init__(jobs)


class Pool(WorkerPool):
  """Computes rewards by functions of these names; use it in a `with`.

  Completions that a submission has given up (see `WorkerPool`) are failures.
  Without `workers`, rewards are computed in this process, when results are
  collected; that survives no crash, so `functions.workers_for` starts a worker
  if a function needs it. `timeout` is in seconds for a completion, all
  functions together; functions of all completions of a prompt have as many for
  each of them. `sources` are data sets that functions are for, by short name.
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
    """True if a function takes an input that is costly to bring."""
    return any(conventions.wants(f, name) for f in self._functions)

  def submit(self, groups: Sequence[Sequence[Item]], size: int) -> Submission:
    """Starts to compute rewards of groups of `size`; ValueError for no JSON."""
    takes_groups = [isinstance(f, conventions.Trl) for f in self._functions]
    of_groups = [i for i, takes in enumerate(takes_groups) if takes]
    of_jobs = [i for i, takes in enumerate(takes_groups) if not takes]
    prompts, tasks = range(len(groups)), []
    if of_jobs:
      # First completions, then second ones: if one example makes a function
      # hang, its completions are not in a row, and the rest is not given up.
      places = [(b, g) for g in range(size) for b in prompts]
      tasks += [(of_jobs, [place]) for place in places]
    if of_groups:
      rows = [[(b, g) for g in range(size)] for b in prompts]
      tasks += [(of_groups, row) for row in rows]
    sent = Submission(groups, size, tasks, self._timeout)
    self.start(sent)
    return sent

  def collect(
    self,
    submissions: Sequence[Submission],
    check_signals: Callable[[], None] = lambda: None,
  ) -> GroupRewards:
    """Waits for parts of a batch; returns the rewards as if they were one.

    `check_signals` is called as in `results`; if it raises, all are abandoned.
    """
    # Of a submission, by place and function.
    outcomes = {sent: collections.defaultdict(dict) for sent in submissions}
    absent = itertools.repeat(Outcome(None))
    for sent, done in self.results(submissions, check_signals):
      (indices, places), values = sent.tasks[done.index], done.outcomes
      if done.error is not None:
        # Of the function that was at work, for all of its completions; those
        # after it have no value.
        ended = len(values) // len(places) * len(places)
        values = values[:ended] + [Outcome(None, done.error)] * len(places)
      keys = itertools.product(indices, places)
      values = itertools.chain(values, absent)
      for (i, place), outcome in zip(keys, values, strict=False):
        outcomes[sent][place][i] = outcome
    rows = [
      [(item, outcomes[sent][b, g]) for g, item in enumerate(group)]
      for sent in submissions
      for b, group in enumerate(sent.groups)
    ]
    return self._group_rewards(rows, (len(rows), submissions[0].size))

  def _group_rewards(
    self,
    rows: list[list[tuple[Item, dict[int, Outcome]]]],
    shape: tuple[int, int],
  ) -> GroupRewards:
    """Makes arrays of what each function made of each item."""
    absent = functools.partial(np.full, shape, np.nan)
    rewards, values = absent(), {name: absent() for name in self.names}
    extras = collections.defaultdict(absent)
    failed = np.zeros(shape, bool)
    failures: list[list[Sequence[Failure]]] = [[] for _ in rows]
    for b, g in np.ndindex(shape):
      (prompt, completion, _), outcomes = rows[b][g]
      errors = {}  # by function
      for i, name in enumerate(self.names):
        value, error, numbers = outcomes[i]
        values[name][b, g] = np.nan if value is None else value
        if error is not None:
          errors[name] = error
        for key, number in numbers.items():
          extras[f"{name}/{key}"][b, g] = number
      of_functions = [outcomes[i].value for i in range(len(self.names))]
      total = functions.combine(of_functions, self.weights)
      if total is not None and not errors:
        rewards[b, g] = total
        if not abs(total) <= worker.LARGEST:
          rewards[b, g] = np.nan
          more = f"is {total:.3g}, more than {worker.LARGEST:g}"
          errors["weighted sum"] = more
      failed[b, g] = bool(errors)
      failures[b].append(
        [Failure(*error, prompt, completion) for error in errors.items()]
      )
    return GroupRewards(
      exact_enough(rewards),
      {name: exact_enough(of_one) for name, of_one in values.items()},
      failed,
      failures,
      {name: extras[name].astype(np.float32) for name in sorted(extras)},
    )
