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
from collections.abc import Callable
from typing import Any

from grpojax.rewards.outcomes import Outcome

START = 120.0
"""Seconds that a worker has to load its functions."""

STOP = 0.1
"""Seconds within which a worker notices that it is to stop."""

_MOST = 2**16  # bytes of an answer; a worker sends far less


def never() -> bool:
  """Does not stop."""
  return False


class Lost(Exception):
  """The worker is gone, or had to be killed; the message says why."""


class Process:
  """A process of `worker`; a class because it holds one.

  It leads a session of its own: Ctrl-C in a terminal does not reach it, and
  what it has started is killed with it. Only one thread at a time may use it.

  Lines that are no answer to what was asked are ignored: they are late ones to
  earlier questions, or a function wrote them.
  """

  def __init__(self, setup: bytes):
    self._setup = setup
    self._process: subprocess.Popen | None = None
    self._pending = b""

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
      start_new_session=True,
    )
    for pipe in (self._process.stdin, self._process.stdout):
      os.set_blocking(pipe.fileno(), False)

  def wait_until_ready(self, stop: Callable[[], bool] = never) -> None:
    """Waits until the functions are loaded."""
    answers: list[Any] = []
    self._exchange(self._setup, 1, START, answers, stop)
    ready, error, _ = answers[0]
    if ready is None:
      self.kill()
      raise Lost(error)

  def ask(
    self,
    line: bytes,
    count: int,
    timeout: int | float,
    answers: list[Any],
    stop: Callable[[], bool] = never,
  ) -> None:
    """Sends a line and appends so many answers; starts a process if none is.

    Args:
      line: JSON, with its newline.
      count: answers to wait for.
      timeout: seconds for all of them.
      answers: an `Outcome` is appended for each.
      stop: says whether to give up, every `STOP` seconds.

    Raises:
      Lost: no answer in time, it was stopped, or the process has died. It is
        killed; answers has those that came before.
    """
    if self._process is not None and self._process.poll() is not None:
      self.kill()  # it ended after its last answer, no fault of this line
    if self._process is None:
      self.start()
      self.wait_until_ready(stop)
    self._exchange(line, count, timeout, answers, stop)

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

  def _exchange(self, *args) -> None:
    try:
      self._talk(*args)
    except BaseException:
      self.kill()
      raise

  def _talk(self, line, count, timeout, answers, stop) -> None:
    process, deadline = self._process, time.monotonic() + timeout
    reader, writer = process.stdout.fileno(), process.stdin.fileno()
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(writer, select.POLLOUT)
    # Nobody can know it beforehand, so an answer with it is to this line.
    name = secrets.token_hex(8)
    rest = memoryview(f"{name} ".encode() + line)
    while count:
      left = deadline - time.monotonic()
      if left <= 0:
        raise Lost(f"no result after {timeout:g} s")
      if stop():
        raise Lost("stopped")
      ready = dict(poll.poll(1000 * min(left, STOP) + 1))
      if writer in ready:
        try:
          rest = rest[os.write(writer, rest[:_MOST]) :]
        except BrokenPipeError:
          rest = rest[:0]  # it is gone, as its end of file will tell
        if not rest:
          poll.unregister(writer)
      if reader in ready:
        data = os.read(reader, _MOST)
        if not data:
          raise Lost(_end_of(process))
        *lines, pending = (self._pending + data).split(b"\n")
        self._pending = pending[-_MOST:]  # an endless line is no answer
        found = [_answer(line, name) for line in lines]
        found = [answer for answer in found if answer is not None][:count]
        answers += found
        count -= len(found)


def _answer(line: bytes, name: str) -> Outcome | None:
  """The answer [name, value, error, extras] in a line; None if it has none."""
  try:
    of, value, error, extras = json.loads(line)
    numbers = all(isinstance(x, float) for x in extras.values())
  except (AttributeError, TypeError, ValueError, RecursionError):
    return None
  known = value is None or isinstance(value, float) or value == "ready"
  if of == name and known and numbers and isinstance(error, str | None):
    return Outcome(value, error, extras)
  return None


def _end_of(process: subprocess.Popen) -> str:
  """Why a process that closed its pipe has ended."""
  try:
    code = process.wait(1.0)
  except subprocess.TimeoutExpired:
    return "the worker closed its pipe"
  if code >= 0:
    return f"ended its process with code {code}"
  with contextlib.suppress(ValueError):
    return f"ended its process by {signal.Signals(-code).name}"
  return f"ended its process by signal {-code}"
