"""Worker processes that compute rewards, with a time limit for each completion.

    with Pool(["math_verify", "overlong"], workers=4, timeout=10.0) as pool:
      results = pool.score([Job(prompt, completion, example), ...])

A reward that raises, hangs, ends its process, or returns something other than a
finite number is a `Failure` and gives NaN; the others are not affected. Workers
are started anew, never forked, and load no JAX. Processes exchange lines of
JSON, nothing that could run code; `worker` says what else a function may do.
"""

import concurrent.futures
import itertools
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.rewards import functions, worker
from grpojax.rewards.process import Lost, Process


class Job(NamedTuple):
  """What is scored: two texts, and the example (of JSON values)."""

  prompt: str
  completion: str
  example: dict[str, Any]


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
  """

  reward: float
  values: tuple[float | None, ...]
  failures: tuple[Failure, ...]


POLL = 0.5
"""Seconds between the calls of `poll` while the workers are at work."""


class Submission:
  """Jobs on their way; made by `Pool.submit`."""

  def __init__(self, jobs: list[Job], lines: list[bytes]):
    self.jobs, self.lines = jobs, lines
    self.next = itertools.count().__next__  # atomic
    self.results: list[Result | None] = [None] * len(jobs)
    self.lost = 0  # workers in a row, without a result between them
    self.lock = threading.Lock()
    self.abandoned = False
    self.futures: list[concurrent.futures.Future] = []
    self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # one a worker


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
    timeout: seconds for a completion, all functions together.
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
    self._workers = [Process(_line(setup)) for _ in range(workers)]
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

  def submit(self, jobs: Sequence[Job]) -> Submission:
    """Starts to compute rewards and returns at once.

    Raises:
      ValueError: an example has something that is no JSON.
    """
    jobs = list(jobs)
    lines = [_line(job) for job in jobs] if self._workers else []
    sent = Submission(jobs, lines)
    sent.futures = [
      self._threads.submit(self._drain, sent) for _ in self._workers
    ]
    return sent

  def collect(
    self, sent: Submission, poll: Callable[[], None] | None = None
  ) -> list[Result]:
    """Waits for the results of a submission, in the order of its jobs.

    Args:
      sent: from `submit`.
      poll: called while it waits: every `POLL` seconds or, without workers,
        before each completion; the longest time without a call is then that of
        one completion's reward. It may raise, say because the run is to end.
        Then the submission is abandoned: none of its other jobs are tried, and
        workers that are at one are killed (new ones start when they are
        needed), so nothing keeps `close` or the next submission waiting.

    Raises:
      Exception: what `poll` raises.
    """
    if not self._workers:
      return [self._score_here(job, poll) for job in sent.jobs]
    try:
      # Not by concurrent.futures.wait, which may keep the futures locked where
      # Ctrl-C interrupts it: then nothing could end.
      for _ in sent.futures:
        self._wait_for_one(sent, poll)
    except BaseException:
      sent.abandoned = True
      raise
    for future in sent.futures:
      future.result()
    return list(sent.results)

  def _wait_for_one(
    self, sent: Submission, poll: Callable[[], None] | None
  ) -> None:
    """Waits until one more worker has nothing left to do."""
    while True:
      try:
        return sent.ended.get(timeout=poll and POLL)
      except queue.Empty:
        poll()

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
      while not stop() and (index := sent.next()) < len(sent.jobs):
        sent.results[index] = self._score(process, sent, index, stop)
    finally:
      self._idle.put(process)
      sent.ended.put(None)

  def _score_here(self, job: Job, poll: Callable[[], None] | None) -> Result:
    if poll:
      poll()
    outcomes = [worker.evaluate(f, *job) for f in self._functions]
    return self._result(job, outcomes)

  def _score(
    self,
    process: Process,
    sent: Submission,
    index: int,
    stop: Callable[[], bool],
  ) -> Result:
    line, outcomes = sent.lines[index], []
    if sent.lost >= self.patience:
      error = f"not tried: {self.patience} workers were lost in a row"
    else:
      error = None
      try:
        process.ask(line, len(self.names), self._timeout, outcomes, stop)
      except Lost as lost:
        error = str(lost)
      with sent.lock:
        sent.lost = sent.lost + 1 if error else 0
    if error:  # of the function that was at work; those after it have no value
      outcomes.append((None, error))
      outcomes += [(None, None)] * (len(self.names) - len(outcomes))
    return self._result(sent.jobs[index], outcomes)

  def _result(self, job: Job, outcomes: Sequence[Any]) -> Result:
    values = tuple(value for value, _ in outcomes)
    failures = tuple(
      Failure(name, error, job.prompt, job.completion)
      for name, (_, error) in zip(self.names, outcomes, strict=True)
      if error is not None
    )
    total = None if failures else functions.combine(values, self.weights)
    return Result(math.nan if total is None else total, values, failures)


def _line(message: Any) -> bytes:
  def plain(value):
    if hasattr(value, "tolist"):  # of NumPy
      return value.tolist()
    raise TypeError(f"{value!r} is of type {type(value).__name__}")

  try:
    return json.dumps(message, default=plain).encode() + b"\n"
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"only JSON reaches the reward workers (or use 0 workers): {error}"
    ) from error
