"""Pool that computes rewards, with a time limit for each completion.

    with Pool(["math_verify", "overlong"], workers=4, timeout=10.0) as pool:
      submission = pool.submit([[(prompt, completion, example), ...], ...], G)
      rewards = pool.collect([submission]).rewards  # [B, G]

A reward that raises, hangs, ends its process, or returns something other than a
finite number is a `Failure` and gives NaN; the others are not affected. Workers
are new programs, never forks, and load no JAX. Processes exchange lines of
JSON, nothing that could run code; `worker` tells what else a function may do.
A thread with one idle worker does a task; `collect` waits for the outcomes.

Without workers `collect` computes them, and the system's alarm raises an
exception in a function that takes too long. Only a worker survives what crashes
or never returns from C.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from grpojax.rewards import conventions, functions, worker
from grpojax.rewards.conventions import Item
from grpojax.rewards.process import Lost, Process, to_line
from grpojax.rewards.worker import Outcome, OutOfTime

POLL = 0.5
"""Seconds between two calls of `check_signals`: so many to twice as many."""

_NOT_TRIED = "not tried: {} in a row had no result"


class Failure(NamedTuple):
  """A reward that could not be computed: by which function, and why."""

  function: str
  reason: str
  prompt: str
  completion: str


class GroupRewards(NamedTuple):
  """Rewards of all completions of a batch.

  Attributes:
    rewards: weighted sum of the values (`functions.combine`), float32 or
      `exact_enough`; NaN where there is none: to be masked out.
    values: values of each function, by short name; NaN where it has none.
    failed: True where the reward could not be computed; where it is NaN
      otherwise, all functions abstain.
    failures: [B][G], reasons for that; `groups.all_failures` lists them.
    extras: other numbers that functions returned, by "FUNCTION/NAME", or NaN.
  """

  rewards: Float[np.ndarray, "B G"]
  values: dict[str, Float[np.ndarray, "B G"]]
  failed: Bool[np.ndarray, "B G"]
  failures: list[list[Sequence[Failure]]]
  extras: dict[str, Float[np.ndarray, "B G"]] = {}


def exact_enough(
  rewards: Float[np.ndarray, "*B G"],
) -> Float[np.ndarray, "*B G"]:
  """Returns rewards in float32, or float64 where that loses differences.

  Those of a group that differ by rounding only are made equal.
  """
  worst, equal, lossy = _range(rewards)
  rewards = np.where(equal & np.isfinite(rewards), worst, rewards)
  return rewards if lossy.any() else rewards.astype(np.float32)


def in_float32(
  rewards: Float[np.ndarray, "*B G"],
) -> Float[np.ndarray, "*B G"]:
  """Rounds rewards; groups that lose by that are less their least one."""
  worst, _, lossy = _range(rewards)
  return np.where(lossy, rewards - worst, rewards).astype(np.float32)


def _range(rewards: Float[np.ndarray, "*B G"]) -> tuple[np.ndarray, ...]:
  """Least of each group, if they differ by rounding, and if float32 loses that.

  It does where they differ little for their size, as 1e8 and 1e8 + 1.
  """
  finite = {"where": np.isfinite(rewards), "axis": -1, "keepdims": True}
  best = np.max(rewards, initial=-np.inf, **finite)
  worst = np.min(rewards, initial=np.inf, **finite)
  spread, size = best - worst, np.maximum(np.abs(best), np.abs(worst))
  equal = spread <= 2**-40 * size
  return worst, equal, ~equal & (spread < 2**-12 * size)


class _Task(NamedTuple):
  """Work of one worker under one time limit.

  Attributes:
    functions: indices of the functions.
    places: (prompt, completion) of one item, or (TRL's) of a whole group's.
  """

  functions: Sequence[int]
  places: Sequence[tuple[int, int]]


_Done = tuple[_Task, list[Outcome]]  # of a task, function by function


class Submission:
  """Groups of `size` items on their way, one a prompt, made by `Pool.submit`.

  Threads put each task with its outcomes, or an exception, into `done`.
  """

  def __init__(
    self, groups: Sequence[Sequence[Item]], size: int, tasks: list[_Task]
  ):
    self.groups, self.size, self.tasks = groups, size, tasks
    self.done: queue.SimpleQueue = queue.SimpleQueue()
    self.abandoned = False
    # Tasks lost in a row, without a result in between. Threads count without
    # a lock: one that is missed only delays giving up.
    self.lost = 0

  def items(self, task: _Task) -> list[Item]:
    """The completions of a task."""
    return [self.groups[b][g] for b, g in task.places]


def abandon(submissions: Sequence[Submission]) -> None:
  """Gives up what nobody waits for: the rest is not tried."""
  for submission in submissions:
    submission.abandoned = True


def _in_time(seconds: int | float, function: Callable[[], None]) -> bool:
  """Calls a function, and interrupts it after so many seconds.

  Returns:
    False where it was interrupted. There is no limit in threads but the main
    one, which get no signals, nor while a debugger is at work.
  """
  if threading.current_thread() is not threading.main_thread():
    function()
    return True

  def interrupt(number, frame):
    if sys.gettrace() is None:
      raise OutOfTime

  timer, left = signal.ITIMER_REAL, (0.0, 0.0)
  others = signal.signal(signal.SIGALRM, interrupt)
  try:
    try:
      # And again each second, for a function that catches it.
      left = signal.setitimer(timer, min(seconds, worker.FOREVER), 1.0)
      function()
    finally:
      signal.setitimer(timer, 0)  # interrupted here, it is set below
    return True
  except OutOfTime:
    return False
  finally:
    signal.signal(signal.SIGALRM, others or signal.SIG_DFL)
    signal.setitimer(timer, *left)


def _cut_short(
  task: _Task, outcomes: list[Outcome], error: str
) -> list[Outcome]:
  """Completes the outcomes, function by function, of a task that was ended.

  The error is that of the function that was at work, and of all of its
  completions; those after it have no value.
  """
  size = len(task.places)
  count = len(task.functions) * size
  outcomes = outcomes[: len(outcomes) // size * size]
  outcomes += [Outcome(None, error)] * size
  return (outcomes + [Outcome(None)] * count)[:count]


class Pool:
  """Computes rewards by functions of these names; use it in a `with`.

  Where nothing but hanging or crashing happens, a submission is given up after
  `patience` = max(8, 4 * workers) tasks lost in a row: its other completions
  are failures too. The next one starts afresh.

  Args:
    names: names of the reward functions, for `functions.resolve`.
    options: their keyword arguments, by short name.
    weights: a weight for each; None is 1.
    workers: processes. 0 computes in this process, when results are collected,
      and catches exceptions but survives no crash.
    timeout: seconds for a completion, all functions together; functions that
      take those of a prompt at once have so many for each of them.
    sources: data sets that each function is for, by short name.

  Raises:
    ValueError: functions that `functions.resolve_all` refuses, or a worker that
      did not start.
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
    self._sources = [(sources or {}).get(name) for name in self.names]
    setup = {
      "names": list(names),
      "options": {name: dict(each) for name, each in (options or {}).items()},
      "sources": self._sources,
      "timeout": timeout,
    }
    self._timeout, self.patience = timeout, max(8, 4 * workers)
    self._workers = [Process(to_line(setup)) for _ in range(workers)]
    self._idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
    self._threads = concurrent.futures.ThreadPoolExecutor(max(workers, 1))
    self._closed = False
    try:
      # By our threads, which last as long as the pool: workers end with them.
      list(self._threads.map(Process.start, self._workers))
      for process in self._workers:
        process.wait_until_ready(lambda: False)
        self._idle.put(process)
    except BaseException as error:
      self.close()
      if isinstance(error, Lost):
        message = f"a reward worker did not start: {error}"
        raise ValueError(message) from error
      raise

  def wants(self, name: str) -> bool:
    """True where a function takes something that costs to bring."""
    return any(conventions.wants(f, name) for f in self._functions)

  def submit(self, groups: Sequence[Sequence[Item]], size: int) -> Submission:
    """Starts to compute the rewards of groups of `size` completions.

    Raises:
      ValueError: an example has something that is no JSON.
    """
    of_jobs, of_groups = [], []
    for i, function in enumerate(self._functions):
      takes_groups = isinstance(function, conventions.Trl)
      (of_groups if takes_groups else of_jobs).append(i)
    prompts, tasks = range(len(groups)), []
    if of_jobs:
      # First completions, then second ones: where one example makes a function
      # hang, its completions are not in a row, and the rest is not given up.
      places = [(b, g) for g in range(size) for b in prompts]
      tasks += [_Task(of_jobs, [place]) for place in places]
    if of_groups:
      rows = [[(b, g) for g in range(size)] for b in prompts]
      tasks += [_Task(of_groups, row) for row in rows]
    sent = Submission(groups, size, tasks)
    if self._workers:
      lines = [to_line([task.functions, sent.items(task)]) for task in tasks]
      for task, line in zip(tasks, lines, strict=True):
        self._threads.submit(self._run, sent, task, line)
    return sent

  def collect(
    self,
    submissions: Sequence[Submission],
    check_signals: Callable[[], None] = lambda: None,
  ) -> GroupRewards:
    """Waits for parts of a batch; returns the rewards as if they were one.

    `check_signals` is called every `POLL` seconds or, without workers, before
    each completion. Where it raises, all of them are abandoned: other items are
    not tried, and workers that are at one are killed, so nothing keeps `close`
    or the next submission waiting.
    """
    rows = []  # [B][G] of an item and its outcomes
    try:
      for sent in submissions:
        outcomes = self._outcomes(sent, check_signals)
        for b, group in enumerate(sent.groups):
          rows.append([(x, outcomes[b, g]) for g, x in enumerate(group)])
    except BaseException:
      abandon(submissions)
      raise
    shape = len(rows), submissions[0].size
    return self._group_rewards(rows, shape)

  def _outcomes(
    self, sent: Submission, check_signals: Callable[[], None]
  ) -> dict[tuple[int, int], dict[int, Outcome]]:
    """Waits for the outcomes by place and function."""
    outcomes = collections.defaultdict(dict)
    next_done = self._next_done if self._workers else self._next_here
    for task, values in next_done(sent, check_signals):
      keys = itertools.product(task.functions, task.places)
      for (i, place), outcome in zip(keys, values, strict=True):
        outcomes[place][i] = outcome
    return outcomes

  def _group_rewards(
    self,
    rows: list[list[tuple[Item, dict[int, Outcome]]]],
    shape: tuple[int, int],
  ) -> GroupRewards:
    """Makes arrays of what each function made of each item."""
    absent = functools.partial(np.full, shape, np.nan)
    rewards, values = absent(), {name: absent() for name in self.names}
    extras = collections.defaultdict(absent)
    failures: list[list[Sequence[Failure]]] = [[] for _ in rows]
    for b, g in np.ndindex(shape):
      (prompt, completion, _), outcomes = rows[b][g]
      errors = []
      for i, name in enumerate(self.names):
        value, error, numbers = outcomes[i]
        if value is not None:
          values[name][b, g] = value
        if error is not None:
          errors.append((name, error))
        for key, number in numbers.items():
          extras[f"{name}/{key}"][b, g] = number
      of_functions = [outcomes[i].value for i in range(len(self.names))]
      total = functions.combine(of_functions, self.weights)
      if total is not None and not errors:
        if abs(total) <= worker.LARGEST:
          rewards[b, g] = total
        else:
          error = f"is {total:.3g}, more than {worker.LARGEST:g}"
          errors.append(("weighted sum", error))
      failed = [Failure(*error, prompt, completion) for error in errors]
      failures[b].append(failed)
    return GroupRewards(
      exact_enough(rewards),
      {name: exact_enough(of_one) for name, of_one in values.items()},
      np.array([bool(x) for row in failures for x in row], bool).reshape(shape),
      failures,
      {name: extras[name].astype(np.float32) for name in sorted(extras)},
    )

  def close(self) -> None:
    """Ends the workers, also in the middle of a submission."""
    self._closed = True
    self._threads.shutdown(cancel_futures=True)  # waits 0.1 s at most
    for process in self._workers:
      process.kill()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def _next_here(self, sent: Submission, check_signals) -> Iterator[_Done]:
    """Computes the tasks in this process, one after the other."""
    for task in sent.tasks:
      check_signals()
      outcomes: list[Outcome] = []
      if sent.lost >= self.patience:
        yield task, _cut_short(task, [], _NOT_TRIED.format(self.patience))
        continue

      def compute(task=task, outcomes=outcomes) -> None:
        items = sent.items(task)
        for i in task.functions:
          reward, sources = self._functions[i], self._sources[i]
          outcomes.extend(worker.evaluate(reward, items, sources))

      limit = self._timeout * len(task.places)
      if _in_time(limit, compute):
        sent.lost = 0
      else:
        sent.lost += 1
        error = f"no result after {limit:g} s"
        outcomes = _cut_short(task, outcomes, error)
      yield task, outcomes

  def _next_done(self, sent: Submission, check_signals) -> Iterator[_Done]:
    """Waits for the tasks that threads have done, in any order."""
    last = time.monotonic()
    for _ in sent.tasks:
      message = None
      while message is None:
        # A SimpleQueue, not futures: those may stay locked where Ctrl-C
        # interrupts a wait for them, and then nothing could end.
        with contextlib.suppress(queue.Empty):
          message = sent.done.get(timeout=POLL)
        if time.monotonic() - last >= POLL:
          check_signals()
          last = time.monotonic()
      if isinstance(message, BaseException):
        raise message
      yield message

  def _run(self, sent: Submission, task: _Task, line: bytes) -> None:
    """Has one worker do a task, in a thread."""

    def stop() -> bool:
      return self._closed or sent.abandoned

    size = len(task.places)
    count = len(task.functions) * size
    outcomes: list[Outcome] = []  # function by function
    process = self._idle.get()
    try:
      if stop():
        raise Lost("stopped")
      if sent.lost >= self.patience:
        raise Lost(_NOT_TRIED.format(self.patience))
      for outcome in process.ask(line, count, self._timeout * size, stop):
        outcomes.append(outcome)
      sent.lost = 0
      sent.done.put((task, outcomes))
    except Lost as error:
      sent.lost += 1
      sent.done.put((task, _cut_short(task, outcomes, str(error))))
    except BaseException as error:
      sent.done.put(error)
    finally:
      self._idle.put(process)
