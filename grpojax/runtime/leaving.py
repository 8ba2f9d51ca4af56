"""How one of several processes ends: with all others, or alone."""

import contextlib
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping

import jax
from jax._src import distributed as jax_distributed

from grpojax.runtime.interrupts import INTERRUPTED, end

_OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND")

GRACE = 5.0
"""Seconds in which a process leaves by itself after another one has ended."""


def _leave(code: int, patience: int) -> None:
  """Leaves together with all others; ends this process if they do not come.

  Args:
    code: the exit code.
    patience: seconds to wait for them.
  """
  client = jax_distributed.global_state.client
  try:
    # JAX's shutdown, of itself, aborts where another process does not come.
    client.wait_at_barrier("leaving", 1000 * patience)
  except jax.errors.JaxRuntimeError:
    end(code)
  jax.distributed.shutdown()


def _of_another(error: BaseException) -> bool:
  """Whether an error says that another process is gone.

  That of a collective is a ValueError where a program is dispatched, and may
  have been turned into an exit's message since. What a device says of this
  process's own program (no memory is left) is of no other.
  """
  text = str(error)
  own = isinstance(error, jax.errors.JaxRuntimeError) and text.startswith(_OWN)
  of_jax = isinstance(error, jax.errors.JaxRuntimeError) and not own
  return of_jax or "Gloo" in text


def _end_after_another(error: BaseException) -> None:
  print(
    f"process {jax.process_index()}: another process of this run is gone, "
    "see what it said last; the same command resumes from the last "
    f"checkpoint ({str(error).partition(chr(10))[0][:200]})",
    file=sys.stderr,
  )
  end(1)


def _gone(peers: Mapping[int, socket.socket]) -> list[int]:
  """Which processes have ended, of those that this one is connected to."""
  readable = select.select(list(peers.values()), [], [], 0.5)[0]
  return [i for i, peer in peers.items() if peer in readable]


def _watch(
  peers: Mapping[int, socket.socket], leaving: threading.Event
) -> None:
  """Ends this process when another one has ended and this one does not leave.

  JAX finds out by itself, after up to half a minute, and aborts.
  """
  while not leaving.is_set():
    gone = _gone(peers)
    if gone and not leaving.is_set():
      # At once: where it is process 0, JAX aborts in a second.
      print(
        f"process {jax.process_index()}: process {gone[0]} of this run is "
        "gone, see what it said last; the same command resumes from the last "
        "checkpoint",
        file=sys.stderr,
        flush=True,
      )
      if not leaving.wait(GRACE):
        end(1)
      return


@contextlib.contextmanager
def _watching(peers: Mapping[int, socket.socket]) -> Iterator[None]:
  leaving = threading.Event()
  if peers:
    args = peers, leaving
    threading.Thread(target=_watch, args=args, daemon=True).start()
  try:
    yield
  finally:
    leaving.set()


@contextlib.contextmanager
def together(
  patience: int, peers: Mapping[int, socket.socket]
) -> Iterator[None]:
  """Leaves together with all others, or at once where something broke.

  Those that come here by an exit code (a message, SIGTERM) may all be on their
  way; by another error or Ctrl-C, it is alone, and the others notice.

  Args:
    patience: seconds to wait for the others in the first case.
    peers: connections that end where another process does.
  """
  try:
    with _watching(peers):
      yield
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    end(INTERRUPTED)
  except SystemExit as error:
    if _of_another(error):
      _end_after_another(error)
    code = error.code or 0
    if isinstance(code, str):  # said before it waits
      print(code, file=sys.stderr, flush=True)
      code = 1
    if code == INTERRUPTED:
      end(code)
    # What all have refused, all have refused by now.
    _leave(code, min(patience, 10) if code == 1 else patience)
    sys.exit(code)
  except BaseException as error:
    if _of_another(error):
      _end_after_another(error)
    traceback.print_exc()
    end(1)
  _leave(0, patience)
