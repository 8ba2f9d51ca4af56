"""Pools of worker processes, with a time limit per job.

Workers are new programs, never forks, and load no JAX. A thread per worker
sends the jobs. Without workers `WorkerPool.results` does the jobs in this
process, where an alarm interrupts slow jobs. Only workers protect this process
from crashes and from C code that hangs.

A worker reads lines `ID SECONDS JSON`, which cannot run code. The first line
prepares it; each later line is a job, answered by lines [ID, OUTCOME]. The ID
is random, so user code that forks, prints, closes files or writes to every open
file cannot disturb other jobs. Code that searches for the current ID can forge
its own result: model-written code needs a sandbox.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import queue
import resource
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from grpojax.runtime.processes import user_calls

_POLL = 0.5  # seconds to wait for a result between calls of `check_signals`
_START = 120.0  # seconds for a worker to load its functions
_STOP = 0.1  # seconds between calls of `stop`
_CLOSING = 5.0  # seconds for an idle worker to close its resources
_BLOCK = 2**16  # bytes to read or write at once
_MEMORY = 2**33  # limit in bytes for a worker's data
_LEEWAY = 2.0  # seconds after a job's limit until an orphaned worker ends

Answer = Callable[[Any], Iterable[Any]]  # maps a job to its JSON outcomes
# Parses a JSON outcome; a ValueError, TypeError or AttributeError skips it.
Parse = Callable[[Any], Any]


def to_line(message: Any) -> bytes:
  """Encodes a message for a worker as JSON; ValueError if that fails."""
  try:
    return json.dumps(message, default=to_plain).encode() + b"\n"
  except (TypeError, ValueError) as error:
    wrong = f"workers receive only JSON (or use 0 workers): {error}"
    raise ValueError(wrong) from error


def to_plain(value: Any) -> Any:
  """Converts NumPy's arrays and numbers for JSON; TypeError for other types."""
  if hasattr(value, "tolist"):
    return value.tolist()
  raise TypeError(f"{value!r} is of type {type(value).__name__}")


def run(prepare: Callable[[Any], Answer]) -> None:
  """Runs a worker: does jobs by `prepare(setup)` until its input ends."""
  with contextlib.suppress(BrokenPipeError):
    _serve(prepare)
  with contextlib.suppress(OSError, ValueError):  # it may be closed
    sys.stderr.flush()
  os._exit(0)  # without waiting for threads of user code


def _serve(prepare: Callable[[Any], Answer]) -> None:
  with contextlib.suppress(AttributeError, OSError):  # not on Linux
    # Linux kills this process when its parent thread ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
  requests = os.fdopen(os.dup(0), "rb")
  replies = os.dup(1)
  # User code may read or print, but not disturb the messages.
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(2, 1)
  sys.stdout.reconfigure(line_buffering=True)  # lines survive a kill

  def reply(name: bytes, outcome: Any) -> None:
    # Starts a new line, because other code may have written half a line.
    line = memoryview(f"\n{json.dumps([name.decode(), outcome])}\n".encode())
    while line:
      line = line[os.write(replies, line) :]

  name, _, setup = requests.readline().split(b" ", 2)
  try:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > _MEMORY:
      resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    answer = prepare(json.loads(setup))
  except BaseException as error:
    plain = isinstance(error, ValueError)
    reply(name, str(error) if plain else user_calls.describe(error))
    return
  reply(name, None)  # ready
  for line in requests:
    # User code may have changed the action, whose default ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    name, seconds, job = line.split(b" ", 2)
    limit = min(float(seconds) + _LEEWAY, user_calls.FOREVER)
    signal.setitimer(signal.ITIMER_REAL, limit)
    for outcome in answer(json.loads(job)):
      reply(name, outcome)
    signal.setitimer(signal.ITIMER_REAL, 0)
  # The parent waits up to `_CLOSING` seconds.
  user_calls.call(getattr(answer, "close", lambda: None))


class Job(NamedTuple):
  """Work for a worker, with a time limit."""

  content: Any  # JSON for the worker
  count: int  # number of outcomes
  seconds: int | float  # time limit
  place: int = 0  # jobs with equal places share a pinned worker


class Lost(Exception):
  """Raised if a job has no result; the message gives the reason."""


@dataclasses.dataclass(eq=False)
class Process:
  """A worker process, for one thread at a time."""

  module: str  # name of a module that calls `run`
  setup: bytes  # first line for the worker
  parse: Parse  # parses outcomes
  longest: int  # approximate limit of bytes of an answer
  _process: subprocess.Popen | None = None
  _pending: bytearray = dataclasses.field(default_factory=bytearray)

  def start(self, stop: Callable[[], bool]) -> None:
    """Starts the process and waits until it is prepared; raises like `ask`."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    self._pending = bytearray()
    try:
      self._process = subprocess.Popen(
        # -P: imports modules only from this process's path.
        [sys.executable, "-P", "-m", self.module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        # User code with JAX must not take the accelerator.
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        start_new_session=True,  # no Ctrl-C; its children are killed with it
      )
    except OSError as error:
      limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
      raise Lost(
        f"{error.strerror}: each worker takes two of the {limit} files that "
        "this process may open; raise the limit (ulimit -n; -u for processes), "
        "or lower reward.workers or environment.workers"
      ) from error
    for pipe in (self._process.stdin, self._process.stdout):
      os.set_blocking(pipe.fileno(), False)
    job = Job(None, 1, _START)
    (error,) = self._exchange(self.setup, job, stop, lambda error: error)
    if error is not None:
      self.kill()
      raise Lost(str(error))

  def ask(self, line: bytes, job: Job, stop: Callable) -> Iterator[Any]:
    """Sends a job's line (starts a process if needed); yields the outcomes.

    Kills the process and raises `Lost` after the time limit, if the process
    dies, or if `stop` (called every `_STOP` seconds) returns True.
    """
    if self._process is not None and self._process.poll() is not None:
      self.kill()  # it ended after its previous answer
    if self._process is None:
      self.start(stop)
    yield from self._exchange(line, job, stop, self.parse)

  def finish(self) -> None:
    """Lets an idle process close its resources, and waits for its end."""
    if self._process is not None:
      self._process.stdin.close()
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(_CLOSING)

  def kill(self) -> None:
    """Kills the process, if any, and all its children."""
    process = self._process
    self._process = None
    if process is None:
      return
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()

  def _exchange(self, line, job, stop, parse) -> Iterator[Any]:
    """Writes the line and reads the answers, without blocking on either."""
    count = job.count
    deadline = time.monotonic() + job.seconds
    reader = self._process.stdout.fileno()
    writer = self._process.stdin.fileno()
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    poller.register(writer, select.POLLOUT)
    name = secrets.token_hex(8)  # unpredictable, so it identifies the answers
    unsent = memoryview(f"{name} {job.seconds} ".encode() + line)
    try:
      while count:
        left = deadline - time.monotonic()
        if left <= 0:
          raise Lost(f"no result after {job.seconds:g} s")
        if stop():
          raise Lost("stopped")
        ready = dict(poller.poll(1000 * min(left, _STOP) + 1))
        if writer in ready:
          try:
            unsent = unsent[os.write(writer, unsent[:_BLOCK]) :]
          except BrokenPipeError:
            unsent = unsent[:0]  # `_read` will raise
          if not unsent:
            poller.unregister(writer)
        if reader in ready:
          answers = read_answers(self._read(reader), name, parse)[:count]
          count -= len(answers)
          yield from answers
    except BaseException:
      self.kill()
      raise

  def _read(self, reader: int) -> list[bytearray]:
    data = os.read(reader, _BLOCK)
    if not data:
      raise Lost(_end_of(self._process))
    self._pending += data
    if b"\n" not in data:
      del self._pending[: -self.longest]  # bounds an endless line
      return []
    *lines, self._pending = self._pending.split(b"\n")
    return lines


def read_answers(lines: Iterable, name: str, parse: Parse) -> list[Any]:
  """Parses the outcomes of lines [name, OUTCOME]; ignores all other lines."""
  outcomes = []
  errors = AttributeError, TypeError, ValueError, RecursionError
  for line in lines:
    with contextlib.suppress(*errors):
      line_name, outcome = json.loads(line)
      if line_name == name:
        outcomes.append(parse(outcome))
  return outcomes


def _end_of(process: subprocess.Popen) -> str:
  try:
    code = process.wait(1.0)
  except subprocess.TimeoutExpired:
    return "the worker closed its pipe"
  if code >= 0:
    return f"ended its process with code {code}"
  names = {signal_.value: signal_.name for signal_ in signal.Signals}
  return f"ended its process by {names.get(-code, f'signal {-code}')}"


class Done(NamedTuple):
  """Result of a job."""

  index: int
  outcomes: list[Any]  # fewer than the job's count after an error
  error: str | None


class Submission:
  """Jobs in progress, and a queue of the jobs that are `Done`."""

  def __init__(self, jobs: Sequence[Job]):
    self.jobs = jobs
    self.done: queue.SimpleQueue = queue.SimpleQueue()
    self.abandoned = False
    self.lost = 0  # jobs lost in a row; approximate, because there is no lock


def abandon(submissions: Sequence[Submission]) -> None:
  """Gives up submissions; workers at their jobs are killed."""
  for submission in submissions:
    submission.abandoned = True


class WorkerPool(contextlib.AbstractContextManager):
  """Context manager that does jobs in worker processes, or in this process.

  After `patience` = max(8, 4 * workers) jobs lost in a row, a submission skips
  its remaining jobs. ValueError if the setup is not JSON, or a worker does not
  start.
  """

  def __init__(
    self,
    module: ModuleType,  # defines `parse`, and `prepare(setup)` -> `Answer`
    setup: Any,  # JSON for `prepare`
    workers: int,  # number of processes; 0 does the jobs in this process
    longest: int = 2**16,  # limit of bytes of an answer
    pinned: bool = False,  # jobs with the same `Job.place` share a worker
  ):
    self.patience = max(8, 4 * workers)
    self._answer = None if workers else module.prepare(setup)
    line = to_line(setup) if workers else b""
    # Pinned workers have a queue each, by `Job.place`; others share a queue.
    count = workers if pinned else min(workers, 1)
    self._jobs = [queue.SimpleQueue() for _ in range(count)]
    self._threads = []
    self._closed = False
    ready: queue.SimpleQueue = queue.SimpleQueue()
    for i in range(workers):
      process = Process(module.__name__, line, module.parse, longest)
      arguments = process, self._jobs[i % count], ready
      thread = threading.Thread(target=self._work, args=arguments, daemon=True)
      self._threads.append(thread)
      thread.start()
    try:
      for _ in self._threads:
        if error := ready.get():
          raise error
    except BaseException as error:
      self.close()
      if isinstance(error, Lost):
        raise ValueError(f"a worker did not start: {error}") from error
      raise

  def _work(self, process, jobs, ready) -> None:
    """Starts a worker, sends it jobs, and ends it."""
    try:
      process.start(lambda: self._closed)
      ready.put(None)
      while job := jobs.get():
        sent, index, line = job
        stop = lambda sent=sent: self._closed or sent.abandoned
        try:
          answers = process.ask(line, sent.jobs[index], stop)
          sent.done.put(self._do(sent, index, answers))
        except BaseException as exception:
          sent.done.put(exception)
      process.finish()
    except BaseException as error:
      ready.put(error)
    finally:
      process.kill()

  def start(self, sent: Submission) -> None:
    """Starts the jobs; ValueError if the content of a job is not JSON."""
    if self._threads:
      lines = [to_line(job.content) for job in sent.jobs]
      for index, line in enumerate(lines):
        place = sent.jobs[index].place % len(self._jobs)
        self._jobs[place].put((sent, index, line))

  def results(
    self, submissions: Sequence[Submission], check_signals: Callable[[], None]
  ) -> Iterator[tuple[Submission, Done]]:
    """Yields (submission, result) for each job, as jobs finish.

    Calls `check_signals` every 0.5 s or, without workers, before each job. If
    it raises, all submissions are abandoned.
    """
    last = time.monotonic()
    try:
      for sent in submissions:
        for index in range(len(sent.jobs)):
          message = None
          while message is None:
            if not self._threads or time.monotonic() - last >= _POLL:
              check_signals()
              last = time.monotonic()
            message = self._next(sent, index)
          if isinstance(message, BaseException):
            raise message
          yield sent, message
    except BaseException:
      abandon(submissions)
      raise

  def close(self) -> None:
    """Ends the workers, even during a submission."""
    if self._closed:
      return
    self._closed = True
    for i in range(len(self._threads)):
      self._jobs[i % len(self._jobs)].put(None)
    close = getattr(self._answer, "close", lambda: None)
    user_calls.in_time(_CLOSING, lambda: user_calls.call(close))
    for thread in self._threads:
      thread.join()

  def __exit__(self, *_):
    self.close()

  def _next(self, sent: Submission, index: int) -> Done | BaseException | None:
    """Waits briefly for a result; without workers, does the job `index`."""
    if not self._threads:
      return self._do(sent, index, self._ask_here(sent.jobs[index]))
    # A Future could stay locked forever if Ctrl-C interrupts a wait for it.
    with contextlib.suppress(queue.Empty):
      return sent.done.get(timeout=_POLL)

  def _do(self, sent: Submission, index: int, answers: Iterator[Any]) -> Done:
    """Collects a job's outcomes, unless its submission is abandoned."""
    outcomes = []
    error = None
    try:
      if self._closed or sent.abandoned:
        raise Lost("stopped")
      if sent.lost >= self.patience:
        raise Lost(f"not tried: {self.patience} jobs in a row had no result")
      outcomes.extend(answers)  # keeps the answers before an error
      sent.lost = 0
    except Lost as lost:
      sent.lost += 1
      error = str(lost)
    return Done(index, outcomes, error)

  def _ask_here(self, job: Job) -> Iterator[Any]:
    """Does a job in this process; yields outcomes, then may raise `Lost`."""
    outcomes = []
    work = lambda: outcomes.extend(self._answer(job.content))
    ended = user_calls.in_time(job.seconds, work)
    yield from outcomes
    if not ended:
      raise Lost(f"no result after {job.seconds:g} s")
