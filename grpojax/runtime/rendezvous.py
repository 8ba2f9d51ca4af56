"""Processes meet before JAX connects them.

Where a port is taken, two processes have the same number or one never comes,
JAX's connecting faults, or waits for minutes in which it hears no signal and
then aborts. So they first meet here, at the same address: process 0 listens,
the others say who they are, and it answers once all of them are there, or
tells all of them what is wrong. A line of JSON each.
"""

import contextlib
import errno
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from grpojax.runtime import interrupts

PATIENCE = 300
"""Seconds that the first process to come waits for the last one."""

_SAY_AFTER = 10  # seconds of waiting without a word
_LIMIT = 4096  # bytes of a line


Peers = dict[int, socket.socket]


class _Waiting:
  """How long this process waits still; says once for whom."""

  def __init__(self, who: str, address: str):
    self._who, self._address, self._said = who, address, False
    self._began = time.monotonic()

  def check(self, reason: str) -> None:
    """Raises ValueError where it has been long enough."""
    waited = time.monotonic() - self._began
    if waited > PATIENCE:
      raise ValueError(
        f"{self._who} waited {PATIENCE} s at {self._address}: {reason}. Start "
        "every process with the same --coordinator and --num_processes and a "
        "--process_id of its own"
      )
    if waited > _SAY_AFTER and not self._said:
      self._said = True
      print(
        f"{self._who} waits at {self._address}, {PATIENCE} s at most: {reason}",
        file=sys.stderr,
        flush=True,
      )


def _send(connection: socket.socket, **values: Any) -> None:
  with contextlib.suppress(OSError):  # it has left, which is noticed elsewhere
    connection.sendall((json.dumps(values) + "\n").encode())


def _line(connection: socket.socket) -> dict[str, Any] | None:
  """What one says; None where it has left, or is none of ours."""
  text, limit = b"", connection.gettimeout()
  end = math.inf if limit is None else time.monotonic() + limit
  try:
    while not text.endswith(b"\n") and len(text) < _LIMIT:
      some = connection.recv(1)
      if not some or time.monotonic() > end:
        return None
      text += some
    said = json.loads(text)
  except (OSError, ValueError, RecursionError):
    return None
  return said if isinstance(said, dict) and "grpojax" in said else None


def _has_left(connection: socket.socket) -> bool:
  connection.settimeout(0)
  try:
    return not connection.recv(1, socket.MSG_PEEK)
  except BlockingIOError:
    return False
  except OSError:
    return True


def _listen(port: int) -> socket.socket:
  try:
    if socket.has_dualstack_ipv6():
      return socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True
      )
    return socket.create_server(("", port))
  except OSError as error:
    if error.errno != errno.EADDRINUSE:
      raise ValueError(f"port {port} of --coordinator: {error}") from error
    raise ValueError(
      f"port {port} of --coordinator is in use on this machine: by another "
      "run, by what is left of one, or by a second --process_id=0; end that, "
      "or give all processes another port"
    ) from error


def _check(said: dict[str, Any], count: int, there: dict[int, Any]) -> None:
  """Whether a process that has come is one that is waited for."""
  i, n, who = (said.get(name) for name in ("process", "count", "who"))
  who = f"{who!s:.100}".encode("ascii", "backslashreplace").decode()
  if n != count:
    raise ValueError(
      f"process 0 was started with --num_processes={count}, process {i} "
      f"({who}) with {n}: give all of them the same"
    )
  if i in there or i not in range(1, count):
    raise ValueError(
      f"two processes have --process_id={i}, the second is {who}: give each "
      f"its own, 0 to {count - 1}"
    )


@contextlib.contextmanager
def _answered(connections: list[socket.socket]) -> Iterator[None]:
  """Tells the others that it went well; or why not, and hangs up."""
  try:
    yield
  except BaseException as error:
    for connection in connections:
      if isinstance(error, ValueError):
        _send(connection, grpojax="refused", why=str(error))
      connection.close()
    raise
  for connection in connections:
    _send(connection, grpojax="all are there")


def _next(listener: socket.socket) -> tuple[socket.socket, Any] | None:
  """Who has come, and what it says; None where nobody of ours has."""
  listener.settimeout(0.2)
  try:
    connection, _ = listener.accept()
  except OSError:
    return None
  connection.settimeout(5)
  said = _line(connection)
  if said is None or type(said.get("process")) is not int:
    connection.close()
    return None
  return connection, said


def _host(port: int, count: int, waiting: _Waiting) -> Peers:
  """Process 0: waits for all others."""
  connections, there = [], {}
  with _listen(port) as listener, _answered(connections):
    while missing := set(range(1, count)) - set(there):
      for i, connection in there.items():
        if _has_left(connection):
          raise interrupts.Left(f"process {i} was ended before the run began")
      names = ", ".join(map(str, sorted(missing)))
      waiting.check(f"of {count} processes, {names} did not come")
      if (come := _next(listener)) is None:
        continue
      connection, said = come
      connections.append(connection)
      _check(said, count, there)
      there[said["process"]] = connection
      _send(connection, grpojax="welcome")
  return there


def _come(address: tuple[str, int], who: dict[str, Any]) -> socket.socket:
  """To process 0, which has found all of them.

  Raises:
    ValueError: what it has found to be wrong.
    OSError: process 0 is not there.
    interrupts.Left: it was.
  """
  with contextlib.ExitStack() as stack:
    connection = socket.create_connection(address, timeout=5)
    stack.enter_context(connection)
    _send(connection, grpojax="here", **who)
    said = _line(connection)
    if said is None:
      raise OSError("what answers there is not process 0 of a run that begins")
    if said["grpojax"] == "welcome":
      # It is process 0 that says when they have waited enough.
      connection.settimeout(PATIENCE + 60)
      said = _line(connection)
    if said is None:
      raise interrupts.Left("process 0 was ended before the run began")
    if "why" in said:
      raise ValueError(said["why"])
    stack.pop_all()
  return connection


def _visit(
  address: tuple[str, int], count: int, process: int, waiting: _Waiting
) -> Peers:
  """Another process: comes to process 0, and waits for its answer."""
  who = {"process": process, "count": count}
  who["who"] = f"pid {os.getpid()} on {socket.gethostname()}"
  while True:
    try:
      return {0: _come(address, who)}
    except OSError as error:
      reason = error.strerror or str(error)
      waiting.check(f"process 0 is not there ({reason})")
      time.sleep(0.2)


def meet(address: str, port: int, count: int, process: int) -> Peers:
  """Returns when all processes of a run are there.

  Args:
    address: of process 0's machine: a name or a number.
    port: on which it listens, for as long as this takes.
    count: of processes, as all of them must say.
    process: this one, in 0..count-1.

  Returns:
    Connections that stay open for as long as the processes live, by process:
    of process 0 to all others, of these to process 0.

  Raises:
    ValueError: in all of them, what is wrong; also after `PATIENCE` seconds.
    interrupts.Left: one was ended in the meantime, by SIGTERM this one.
  """
  waiting = _Waiting(f"process {process} of {count}", f"{address}:{port}")
  with interrupts.leaving():
    if process == 0:
      return _host(port, count, waiting)
    return _visit((address.strip("[]"), port), count, process, waiting)
