"""Worker processes that compute rewards, with a time limit for each completion.

    with Pool(["math_verify", "overlong"], workers=4, timeout=10.0) as pool:
      results = pool.compute([Job(prompt, completion, example), ...])

A reward that raises, hangs, ends its process, or returns something other than a
finite number is a `Failure` and gives NaN; the others are not affected. Workers
are new programs, never forks, and load no JAX. Processes exchange lines of
JSON, nothing that could run code; `worker` tells what else a function may do.

    submit   jobs -> tasks, each done by a thread with one idle worker
    collect  (task, outcomes), from `Submission.done` in any order -> results
"""

import concurrent.futures
import contextlib
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.rewards import conventions, functions, worker
from grpojax.rewards.process import Lost, Process, to_line
from grpojax.rewards.worker import Outcome

POLL = 0.5
"""Seconds between two calls of `check_signals`: so many to twice as many."""


class Job(NamedTuple):
  """A completion to be judged: two texts, and the example (of JSON values)."""

  prompt: str
  completion: str
  example: dict[str, Any]


class Failure(NamedTuple):
  """A reward that could not be computed.

  Attributes:
    function: short name of the function.
    reason: its mistake, in words.
    prompt: the prompt.
    completion: the completion.
  """

  function: str
  reason: str
  prompt: str
  completion: str


class Result(NamedTuple):
  """The reward of a completion.

  Attributes:
    reward: the weighted sum of the values (`functions.combine`); NaN where a
      function failed, or all abstain.
    values: one for each function; None where it abstains or failed.
    failures: empty if all went well.
    extras: other numbers of the functions, by "FUNCTION/NAME".
  """

  reward: float
  values: tuple[float | None, ...]
  failures: tuple[Failure, ...]
  extras: Mapping[str, float] = {}


class _Task(NamedTuple):
  """Work of one worker under one time limit.

  Attributes:
    functions: indices of the functions.
    jobs: indices of the completions: one, or (TRL's convention) a whole group.
  """

  functions: Sequence[int]
  jobs: Sequence[int]


class Submission:
  """Jobs on their way, made by `Pool.submit`.

  A class because the threads share it: `done` is where they put each task with
  its outcomes (or the exception that ended the thread's work).
  """

  def __init__(self, jobs: list[Job], tasks: list[_Task]):
    self.jobs, self.tasks = jobs, tasks
    self.done: queue.SimpleQueue = queue.SimpleQueue()
    self.abandoned = False
    # Workers lost in a row, without a result in between. Threads count without
    # a lock: one that is missed only delays giving up.
    self.lost = 0

  def items(self, task: _Task) -> list[Job]:
    """The completions of a task."""
    return [self.jobs[i] for i in task.jobs]


class Pool:
  """Computes rewards by functions of these names.

  A class because it holds processes: use it in a `with`, or `close` it.

  Where nothing but hanging or crashing happens, a batch is given up after
  `patience` = max(8, 4 * workers) workers lost in a row: its other completions
  are failures too, after about patience / workers * timeout seconds. The next
  batch starts afresh. Single completions that hang cost timeout / workers
  seconds each, on average.

  Args:
    names: names of the reward functions, for `functions.resolve`.
    options: their keyword arguments, by short name.
    weights: a weight for each; None is 1.
    workers: processes. 0 computes in this process, when results are collected,
      and catches exceptions but neither limits time nor survives a crash.
    timeout: seconds for a completion, all functions together; functions that
      take those of a prompt at once have so many for each of them.
    sources: data sets that each function is for, by short name.

  Raises:
    ValueError: functions that `functions.resolve_all` refuses, a number out
      of range, or a worker that did not start.
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
    self._functions = functions.resolve_all(names, options, sources)
    if len(self.weights) != len(names) or not all(
      map(math.isfinite, self.weights)
    ):
      raise ValueError(
        f"reward weights {self.weights}: give a finite number for each of"
        f" {self.names}"
      )
    if workers < 0 or timeout <= 0 or not math.isfinite(timeout):
      raise ValueError(
        f"workers = {workers}, timeout = {timeout}: workers must not be"
        " negative, and the timeout a positive number of seconds"
      )
    keywords = {name: dict(each) for name, each in (options or {}).items()}
    setup = {"names": list(names), "options": keywords, "sources": sources}
    setup["timeout"] = timeout
    self._timeout, self.patience = timeout, max(8, 4 * workers)
    self._workers = [Process(to_line(setup)) for _ in range(workers)]
    self._idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
    self._threads = concurrent.futures.ThreadPoolExecutor(max(workers, 1))
    self._closed = False
    try:
      for process in self._workers:
        process.start()
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
    """True where a function takes `conventions.IDS` or `STATE`, by `name`."""
    return any(conventions.wants(f, name) for f in self._functions)

  def compute(self, jobs: Sequence[Job]) -> list[Result]:
    """Results in the order of the jobs."""
    return self.collect(self.submit(jobs))

  def submit(
    self, jobs: Sequence[Job], groups: Sequence[Sequence[int]] | None = None
  ) -> Submission:
    """Starts to compute rewards and returns at once.

    Args:
      jobs: the completions.
      groups: indices of those of one prompt, which functions of TRL's
        convention get together; None is each for itself.

    Raises:
      ValueError: an example has something that is no JSON.
    """
    groups = [[i] for i in range(len(jobs))] if groups is None else groups
    whole = [isinstance(f, conventions.Trl) for f in self._functions]
    of_jobs = [i for i, takes_groups in enumerate(whole) if not takes_groups]
    of_groups = [i for i, takes_groups in enumerate(whole) if takes_groups]
    tasks = [_Task(of_jobs, [job]) for job in range(len(jobs)) if of_jobs]
    tasks += [_Task(of_groups, group) for group in groups if of_groups]
    sent = Submission(list(jobs), tasks)
    if self._workers:
      lines = [to_line([task.functions, sent.items(task)]) for task in tasks]
      for task, line in zip(tasks, lines, strict=True):
        self._threads.submit(self._run, sent, task, line)
    return sent

  def collect(
    self, sent: Submission, check_signals: Callable[[], None] | None = None
  ) -> list[Result]:
    """Waits for the results of a submission, in the order of its jobs.

    Args:
      sent: result of `submit`.
      check_signals: called while it waits: every `POLL` seconds or, without
        workers, before each completion; the longest time without a call is then
        that of one completion's reward. It may raise, say because the run is to
        end. Then the submission is abandoned: none of its other jobs are tried,
        and workers that are at one are killed (new ones start when they are
        needed), so nothing keeps `close` or the next submission waiting.

    Raises:
      Exception: that of `check_signals`.
    """
    outcomes: list[list] = [[None] * len(self.names) for _ in sent.jobs]
    next_done = self._next_done if self._workers else self._next_here
    try:
      # A SimpleQueue, not futures: those may stay locked where Ctrl-C
      # interrupts a wait for them, and then nothing could end.
      for task, values in next_done(sent, check_signals):
        for i, outcome in enumerate(values):  # function by function
          function, job = divmod(i, len(task.jobs))
          outcomes[task.jobs[job]][task.functions[function]] = outcome
    except BaseException:
      sent.abandoned = True
      raise
    pairs = zip(sent.jobs, outcomes, strict=True)
    return [self._result(job, of_job) for job, of_job in pairs]

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

  def _next_here(self, sent: Submission, check_signals):
    """Computes the tasks in this process, one after the other."""
    for task in sent.tasks:
      if check_signals:
        check_signals()
      items = sent.items(task)
      results = [
        worker.evaluate(self._functions[i], items) for i in task.functions
      ]
      yield task, [outcome for of_items in results for outcome in of_items]

  def _next_done(self, sent: Submission, check_signals):
    """Waits for the tasks that threads have done, in any order."""
    last = time.monotonic()
    for _ in sent.tasks:
      message = None
      while message is None:
        with contextlib.suppress(queue.Empty):
          message = sent.done.get(timeout=check_signals and POLL)
        if check_signals and time.monotonic() - last >= POLL:
          check_signals()
          last = time.monotonic()
      if isinstance(message, BaseException):
        raise message
      yield message

  def _run(self, sent: Submission, task: _Task, line: bytes) -> None:
    """Has one worker do a task, in a thread."""

    def stop() -> bool:
      return self._closed or sent.abandoned

    size = len(task.jobs)
    count = len(task.functions) * size
    outcomes: list[Outcome] = []  # function by function
    process = self._idle.get()
    try:
      if stop():
        raise Lost("stopped")
      if sent.lost >= self.patience:
        raise Lost(f"not tried: {self.patience} workers were lost in a row")
      process.ask(line, count, self._timeout * size, outcomes, stop)
      sent.lost = 0
      sent.done.put((task, outcomes))
    except Lost as error:
      sent.lost += 1
      # The error is that of the function that was at work, and of all of its
      # completions; those after it have no value.
      outcomes = outcomes[: len(outcomes) // size * size]
      outcomes += [Outcome(None, str(error))] * size
      outcomes += [Outcome(None)] * (count - len(outcomes))
      sent.done.put((task, outcomes))
    except BaseException as error:
      sent.done.put(error)
    finally:
      self._idle.put(process)

  def _result(self, job: Job, outcomes: Sequence[Outcome]) -> Result:
    """The reward of a completion, from what each function made of it."""
    named = list(zip(self.names, outcomes, strict=True))
    values = tuple(outcome.value for outcome in outcomes)
    errors = [(name, x.error) for name, x in named if x.error is not None]
    total = None if errors else functions.combine(values, self.weights)
    if total is not None and abs(total) > worker.LARGEST:
      error = f"is {total:.3g}, more than {worker.LARGEST:g}"
      errors, total = [("weighted sum", error)], None
    extras = {
      f"{name}/{key}": number
      for name, outcome in named
      for key, number in outcome.extras.items()
    }
    failures = (
      Failure(name, error, job.prompt, job.completion) for name, error in errors
    )
    reward = math.nan if total is None else total
    return Result(reward, values, tuple(failures), extras)
