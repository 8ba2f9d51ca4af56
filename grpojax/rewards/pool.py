"""Worker processes that compute rewards, with a time limit for each completion.

    with Pool(["math_verify", "overlong"], workers=4, timeout=10.0) as pool:
      results = pool.score([Job(prompt, completion, example), ...])

A reward that raises, hangs, ends its process, or returns something other than a
finite number is a `Failure` and gives NaN; the others are not affected. Workers
are started anew, never forked, and load no JAX. Processes exchange lines of
JSON, nothing that could run code; `worker` says what else a function may do.
"""

import concurrent.futures
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.rewards import conventions, functions, tasks, worker
from grpojax.rewards.outcomes import LARGEST, Outcome
from grpojax.rewards.process import Lost, Process
from grpojax.rewards.tasks import Job, Submission, Task


class Failure(NamedTuple):
  """A reward that could not be computed.

  Attributes:
    function: its short name.
    reason: what it did.
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
    values: of each function; None where it abstains or failed.
    failures: none if all went well.
    extras: other numbers of the functions, by "FUNCTION/NAME".
  """

  reward: float
  values: tuple[float | None, ...]
  failures: tuple[Failure, ...]
  extras: Mapping[str, float] = {}


POLL = 0.5
"""Seconds between the calls of `check_signals` while the workers are at
work."""


class Pool:
  """Computes rewards; see the module's description.

  A class because it holds processes: use it in a `with`, or `close` it.

  Where nothing but hanging or crashing happens, a batch is given up after
  `patience` = max(8, 4 * workers) workers lost in a row: its other completions
  are failures too, after about patience / workers * timeout seconds. The next
  batch starts afresh. Single completions that hang cost timeout / workers
  seconds each, on average.

  Args:
    names: of the reward functions, see `functions.resolve`.
    options: their keyword arguments, by short name.
    weights: of the functions; None is 1 for each.
    workers: processes. 0 computes in this process, when results are collected,
      and catches exceptions but neither limits time nor survives a crash.
    timeout: seconds for a completion, all functions together; functions that
      have those of a prompt at once have so many for each of them.
    memory: bytes of data that a worker may allocate.
    sources: which data sets a function scores, see `functions.resolve_all`.

  Raises:
    ValueError: see `functions.resolve_all`; a number is out of range; or
      a worker did not start.
  """

  def __init__(
    self,
    names: Sequence[str],
    options: Mapping[str, Any] | None = None,
    weights: Sequence[int | float] | None = None,
    workers: int = 0,
    timeout: int | float = 10.0,
    memory: int = 2**33,
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
    bound = {name: dict(each) for name, each in (options or {}).items()}
    setup = {"names": list(names), "options": bound}
    setup |= {"timeout": timeout, "memory": memory, "sources": sources}
    self._timeout, self.patience = timeout, max(8, 4 * workers)
    self._workers = [Process(tasks.line(setup)) for _ in range(workers)]
    self._idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
    self._threads = concurrent.futures.ThreadPoolExecutor(max(workers, 1))
    self._closed = False
    try:
      for process in self._workers:
        process.start()
      for process in self._workers:
        process.wait_until_ready()
        self._idle.put(process)
    except Lost as error:
      self.close()
      raise ValueError(f"a reward worker did not start: {error}") from error
    except BaseException:
      self.close()
      raise

  def score(self, jobs: Sequence[Job]) -> list[Result]:
    """Results in the order of the jobs."""
    return self.collect(self.submit(jobs))

  def wants(self, name: str) -> bool:
    """Whether a function is given this, see `conventions.wants`."""
    return any(conventions.wants(f, name) for f in self._functions)

  def submit(
    self, jobs: Sequence[Job], groups: Sequence[Sequence[int]] | None = None
  ) -> Submission:
    """Starts to compute rewards and returns at once.

    Args:
      jobs: the completions.
      groups: numbers of those that are of one prompt, which some functions get
        together (see `conventions`); None is each for itself.

    Raises:
      ValueError: an example has something that is no JSON.
    """
    jobs = list(jobs)
    groups = [[i] for i in range(len(jobs))] if groups is None else groups
    planned = tasks.plan(self._functions, groups)
    sent = Submission(jobs, planned, len(self.names))
    if self._workers:
      sent.lines = [
        tasks.line([task.functions, sent.items(task)]) for task in planned
      ]
    sent.futures = [
      self._threads.submit(self._drain, sent) for _ in self._workers
    ]
    return sent

  def collect(
    self, sent: Submission, check_signals: Callable[[], None] | None = None
  ) -> list[Result]:
    """Waits for the results of a submission, in the order of its jobs.

    Args:
      sent: from `submit`.
      check_signals: called while it waits: every `POLL` seconds or, without
        workers, before each completion; the longest time without a call is then
        that of one completion's reward. It may raise, say because the run is to
        end. Then the submission is abandoned: none of its other jobs are tried,
        and workers that are at one are killed (new ones start when they are
        needed), so nothing keeps `close` or the next submission waiting.

    Raises:
      Exception: what `check_signals` raises.
    """
    if not self._workers:
      for task in sent.tasks:
        self._score_here(sent, task, check_signals)
      return self._results(sent)
    try:
      # Not by concurrent.futures.wait, which may keep the futures locked where
      # Ctrl-C interrupts it: then nothing could end.
      for _ in sent.futures:
        self._wait_for_one(sent, check_signals)
    except BaseException:
      sent.abandoned = True
      raise
    for future in sent.futures:
      future.result()
    return self._results(sent)

  def _wait_for_one(
    self, sent: Submission, check_signals: Callable[[], None] | None
  ) -> None:
    """Waits until one more worker has nothing left to do."""
    while True:
      try:
        return sent.ended.get(timeout=check_signals and POLL)
      except queue.Empty:
        check_signals()

  def close(self) -> None:
    """Ends the workers, also in the middle of a submission."""
    self._closed = True
    self._threads.shutdown(cancel_futures=True)  # waits `STOP` seconds at most
    for process in self._workers:
      process.kill()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def _drain(self, sent: Submission) -> None:
    """Lets one worker compute rewards until all jobs are taken."""

    def stop() -> bool:
      return self._closed or sent.abandoned

    process = self._idle.get()
    try:
      while not stop() and (index := sent.next()) < len(sent.tasks):
        self._score(process, sent, index, stop)
    finally:
      self._idle.put(process)
      sent.ended.put(None)

  def _score_here(
    self, sent: Submission, task: Task, check_signals: Callable[[], None] | None
  ) -> None:
    if check_signals:
      check_signals()
    items = sent.items(task)
    found = [worker.evaluate(self._functions[i], items) for i in task.functions]
    sent.keep(task, [outcome for some in found for outcome in some])

  def _score(
    self,
    process: Process,
    sent: Submission,
    index: int,
    stop: Callable[[], bool],
  ) -> None:
    task, outcomes, error = sent.tasks[index], [], None
    if sent.lost >= self.patience:
      error = f"not tried: {self.patience} workers were lost in a row"
    else:
      count = len(task.functions) * len(task.jobs)
      limit = self._timeout * len(task.jobs)
      try:
        process.ask(sent.lines[index], count, limit, outcomes, stop)
      except Lost as lost:
        error = str(lost)
      with sent.lock:
        sent.lost = sent.lost + 1 if error else 0
    if error:
      outcomes = tasks.cut_short(task, outcomes, error)
    sent.keep(task, outcomes)

  def _results(self, sent: Submission) -> list[Result]:
    pairs = zip(sent.jobs, sent.outcomes, strict=True)
    return [self._result(job, outcomes) for job, outcomes in pairs]

  def _result(self, job: Job, outcomes: Sequence[Outcome]) -> Result:
    named = list(zip(self.names, outcomes, strict=True))
    values = tuple(outcome.value for outcome in outcomes)
    failures = tuple(
      Failure(name, outcome.error, job.prompt, job.completion)
      for name, outcome in named
      if outcome.error is not None
    )
    total = None if failures else functions.combine(values, self.weights)
    if total is not None and abs(total) > LARGEST:
      error = f"is {total:.3g}, more than {LARGEST:g}"
      failures = (Failure("weighted sum", error, job.prompt, job.completion),)
      total = None
    extras = {
      f"{name}/{key}": number
      for name, outcome in named
      for key, number in outcome.extras.items()
    }
    reward = math.nan if total is None else total
    return Result(reward, values, failures, extras)
