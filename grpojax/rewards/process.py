"""One worker process as its parent sees it: started, asked, killed."""

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from grpojax.rewards.worker import Outcome

_START = 120.0  # seconds that a worker has to load its functions
_STOP = 0.1  # seconds within which a thread notices that it is to stop
_MOST = 2**16  # bytes of an answer; a worker sends far less


def to_line(message: Any) -> bytes:
  """A message to a worker; ValueError where something in it is no JSON."""

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


class Lost(Exception):
  """The worker is gone, or had to be killed; the message says why."""


class Process:
  """One worker as its parent sees it; one thread at a time may use it."""

  def __init__(self, setup: bytes):
    self._setup = setup
    self._process: subprocess.Popen | None = None
    self._pending = b""  # the beginning of a line

  def start(self) -> None:
    """Starts the process, without waiting for it."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    self._pending = b""
    # Runs a new program; the memory of this one, with JAX, is not copied.
    self._process = subprocess.Popen(
      # -P: modules are looked for where this process does, nowhere else.
      [sys.executable, "-P", "-m", "grpojax.rewards.worker"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      bufsize=0,
      # A function that uses JAX must not take the accelerator.
      env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
      # Ctrl-C does not reach it, and what it has started is killed with it.
      start_new_session=True,
    )
    for pipe in (self._process.stdin, self._process.stdout):
      os.set_blocking(pipe.fileno(), False)

  def wait_until_ready(self, stop: Callable[[], bool]) -> None:
    """Waits until the functions are loaded; raises as `ask`."""
    (answer,) = self._exchange(self._setup, 1, _START, stop)
    if answer.error is not None:
      self.kill()
      raise Lost(answer.error)

  def ask(
    self,
    line: bytes,
    count: int,
    timeout: int | float,
    stop: Callable[[], bool],
  ) -> Iterator[Outcome]:
    """Sends a line and yields `count` answers, within so many seconds.

    Starts a process if there is none. `stop` is asked every `_STOP` seconds.
    Raises `Lost`, and kills the process, where no answer comes in time, `stop`
    says True, or it has died.
    """
    if self._process is not None and self._process.poll() is not None:
      self.kill()  # it ended after its last answer, no fault of this line
    if self._process is None:
      self.start()
      self.wait_until_ready(stop)
    yield from self._exchange(line, count, timeout, stop)

  def kill(self) -> None:
    """Kills the process and what it has started, if there is one."""
    process, self._process = self._process, None
    if process is None:
      return
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()

  def _exchange(self, line, count, timeout, stop) -> Iterator[Outcome]:
    """Writes the line and reads the answers, both as far as the pipes go."""
    deadline = time.monotonic() + timeout
    reader = self._process.stdout.fileno()
    writer = self._process.stdin.fileno()
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    poller.register(writer, select.POLLOUT)
    # Nobody can know it beforehand, so an answer with it is to this line.
    name = secrets.token_hex(8)
    rest = memoryview(f"{name} ".encode() + line)
    try:
      while count:
        left = deadline - time.monotonic()
        if left <= 0:
          raise Lost(f"no result after {timeout:g} s")
        if stop():
          raise Lost("stopped")
        ready = dict(poller.poll(1000 * min(left, _STOP) + 1))
        if writer in ready:
          try:
            rest = rest[os.write(writer, rest[:_MOST]) :]
          except BrokenPipeError:
            rest = rest[:0]  # it is gone, as its end of file will tell
          if not rest:
            poller.unregister(writer)
        if reader in ready:
          answers = _answers(self._read(reader), name)[:count]
          count -= len(answers)
          yield from answers
    except BaseException:
      self.kill()
      raise

  def _read(self, reader: int) -> list[bytes]:
    """Whole lines that have come."""
    data = os.read(reader, _MOST)
    if not data:
      raise Lost(_end_of(self._process))
    *lines, pending = (self._pending + data).split(b"\n")
    self._pending = pending[-_MOST:]  # an endless line is no answer
    return lines


def _answers(lines: Iterable[bytes], name: str) -> list[Outcome]:
  """Outcomes in the lines [name, value, error, extras].

  Others, late answers or text that a function wrote, are ignored.
  """
  outcomes = []
  for line in lines:
    try:
      of, value, error, extras = json.loads(line)
      numbers = all(isinstance(x, float) for x in extras.values())
    except (AttributeError, TypeError, ValueError, RecursionError):
      continue
    typed = isinstance(value, float | None) and isinstance(error, str | None)
    if of == name and typed and numbers:
      outcomes.append(Outcome(value, error, extras))
  return outcomes


def _end_of(process: subprocess.Popen) -> str:
  """Says how a process that closed its pipe has ended."""
  try:
    code = process.wait(1.0)
  except subprocess.TimeoutExpired:
    return "the worker closed its pipe"
  if code >= 0:
    return f"ended its process with code {code}"
  names = {signal_.value: signal_.name for signal_ in signal.Signals}
  return f"ended its process by {names.get(-code, f'signal {-code}')}"
