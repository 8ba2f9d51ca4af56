"""One worker process as its parent sees it: started, asked, killed."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

START = 120.0
"""Seconds that a worker has to load its functions."""

_MOST = 2**16  # bytes of an answer; a worker sends far less


class Lost(Exception):
  """The worker is gone, or had to be killed; the message says why."""


class Process:
  """A process of `worker`; a class because it holds one.

  It leads a session of its own: Ctrl-C in a terminal does not reach it, and
  what it has started is killed with it.
  """

  def __init__(self, setup: bytes):
    self._setup = setup
    self._process: subprocess.Popen | None = None
    self._closed = False
    self._lock = threading.Lock()
    self._pending = b""

  def start(self) -> None:
    """Starts the process, without waiting for it."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with self._lock:
      if self._closed:
        raise Lost("the pool was closed")
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

  def wait_until_ready(self) -> None:
    """Waits until the functions are loaded."""
    answers: list[Any] = []
    self._exchange(self._setup, 1, START, answers)
    ready, error = answers[0]
    if ready is None:
      self.kill()
      raise Lost(error)

  def ask(
    self, line: bytes, count: int, timeout: int | float, answers: list[Any]
  ) -> None:
    """Sends a line and appends so many answers; starts a process if none is.

    Raises:
      Lost: no answer in time, or the process has died. It is killed; answers
        has those that came before.
    """
    if self._process is None:
      self.start()
      self.wait_until_ready()
    self._exchange(line, count, timeout, answers)

  def kill(self) -> None:
    """Kills the process and what it has started, if there is one."""
    with self._lock:
      process, self._process = self._process, None
    if process is None:
      return
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()

  def close(self) -> None:
    """Kills the process, and lets no other one start."""
    with self._lock:
      self._closed = True
    self.kill()

  def _exchange(self, line, count, timeout, answers) -> None:
    try:
      self._talk(line, count, timeout, answers)
    except BaseException:
      self.kill()
      raise

  def _talk(self, line, count, timeout, answers) -> None:
    process, deadline = self._process, time.monotonic() + timeout
    if process is None:
      raise Lost("the pool was closed")
    reader, writer = process.stdout.fileno(), process.stdin.fileno()
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(writer, select.POLLOUT)
    rest = memoryview(line)
    while count:
      left = deadline - time.monotonic()
      if left <= 0:
        raise Lost(f"no result after {timeout:g} s")
      ready = dict(poll.poll(1000 * left + 1))
      if writer in ready:
        try:
          rest = rest[os.write(writer, rest[:_MOST]) :]
        except BrokenPipeError:
          rest = rest[:0]  # it is gone, as its end of file will tell
        if not rest:
          poll.unregister(writer)
      if reader in ready:
        data = os.read(reader, _MOST)
        if not data or len(self._pending) > _MOST:
          raise Lost(_end_of(process))
        *lines, self._pending = (self._pending + data).split(b"\n")
        answers += [_answer(answer) for answer in lines]
        count -= len(lines)


def _answer(line: bytes) -> tuple[Any, str | None]:
  try:
    value, error = json.loads(line)
    known = value is None or isinstance(value, float) or value == "ready"
    if known and (error is None or isinstance(error, str)):
      return value, error
  except (TypeError, ValueError):
    pass
  raise Lost("the worker's answer makes no sense")


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
