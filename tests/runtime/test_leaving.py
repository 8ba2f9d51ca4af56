"""How a process ends, by what it ends with; the others are stand-ins."""

import os
import signal
import socket
import subprocess
import sys
import time
import types
import weakref

import jax
import pytest

from grpojax.runtime import interrupts, leaving


class Ended(Exception):
  """In the place of the process's end."""


@pytest.fixture
def leave(monkeypatch):
  """(error, whether the others come) -> how it ended, how long it waited."""

  def end(code):
    raise Ended(code)

  def run(error, others=True):
    waited = []

    def wait_at_barrier(name, milliseconds):
      waited.append(milliseconds // 1000)
      if not others:
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")

    client = types.SimpleNamespace(wait_at_barrier=wait_at_barrier)
    state = types.SimpleNamespace(client=client)
    monkeypatch.setattr(leaving.jax_distributed, "global_state", state)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(interrupts.os, "_exit", end)
    with pytest.raises((Ended, SystemExit)) as caught:
      with leaving.together(30, {}):
        raise error
    code = caught.value.args[0]
    return caught.type is Ended, code, sum(waited)

  return run


@pytest.mark.parametrize(
  "error, others, expected",
  [
    (SystemExit(75), True, (False, 75, 30)),
    (SystemExit(75), False, (True, 75, 30)),
    (SystemExit("error: no"), True, (False, 1, 10)),
    (SystemExit("error: no"), False, (True, 1, 10)),
    (SystemExit(130), True, (True, 130, 0)),  # it alone was interrupted
    (KeyboardInterrupt(), True, (True, 130, 0)),
    (KeyError("a bug"), True, (True, 1, 0)),
  ],
)
def test_exit_codes(leave, error, others, expected):
  assert leave(error, others) == expected


@pytest.mark.parametrize(
  "error",
  [
    jax.errors.JaxRuntimeError("INTERNAL: Connection closed by peer"),
    ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer"),
    SystemExit("error: UNKNOWN: Gloo AllReduce failed"),
  ],
)
def test_others_that_are_gone_are_said_to_be(leave, error, capsys):
  assert leave(error) == (True, 1, 0)
  said = capsys.readouterr().err
  assert "process 0: another process of this run is gone" in said
  assert "the same command resumes" in said and "Traceback" not in said


def test_a_message_is_said_once_and_a_bug_with_its_traceback(leave, capsys):
  leave(SystemExit("error: no such thing"), False)
  assert capsys.readouterr().err == "error: no such thing\n"
  leave(KeyError("a bug"))
  assert "KeyError: 'a bug'" in capsys.readouterr().err


def test_a_device_without_memory_is_nobody_elses_fault(leave, capsys):
  text = "RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes"
  assert leave(jax.errors.JaxRuntimeError(text)) == (True, 1, 0)
  said = capsys.readouterr().err
  assert "Traceback" in said and "is gone" not in said


def test_one_that_is_killed_ends_this_one(monkeypatch, capsys):
  ended = []
  monkeypatch.setattr(leaving, "end", ended.append)
  monkeypatch.setattr(leaving, "GRACE", 0.01)
  monkeypatch.setattr(jax, "process_index", lambda: 0)
  here, there = socket.socketpair()
  with here, leaving._watching({3: here}):
    time.sleep(0.05)
    assert not ended
    there.close()
    time.sleep(0.2)
  assert ended == [1]
  assert "process 3 of this run is gone" in capsys.readouterr().err


def test_one_that_leaves_first_ends_nobody_who_leaves_too(monkeypatch, capsys):
  ended = []
  monkeypatch.setattr(leaving, "end", ended.append)
  monkeypatch.setattr(jax, "process_index", lambda: 0)
  here, there = socket.socketpair()
  with here:
    with leaving._watching({3: here}):
      there.close()
      time.sleep(0.05)
    time.sleep(0.1)
  assert not ended
  assert "process 3 of this run is gone" in capsys.readouterr().err


def test_nothing_is_said_where_all_leave(monkeypatch, capsys):
  monkeypatch.setattr(jax, "process_index", lambda: 0)
  here, there = socket.socketpair()
  with here:
    with leaving._watching({3: here}):
      time.sleep(0.05)
    there.close()  # while it still looks
    time.sleep(0.1)
  assert capsys.readouterr().err == ""


class _Ended:
  """What is told of SIGTERM in its destructor, where no exception passes."""

  signal = signal.SIGTERM

  def __del__(self):
    os.kill(os.getpid(), self.signal)
    signal.getsignal(self.signal)  # the handler has run by now


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_is_heeded_where_exceptions_are_ignored():
  handler, done = signal.getsignal(signal.SIGTERM), []
  with pytest.raises(interrupts.Left, match="SIGTERM before"):
    with interrupts.leaving():
      _Ended()
      done.append(1)
  assert done == [1] and signal.getsignal(signal.SIGTERM) == handler
  with pytest.raises(interrupts.Left), interrupts.leaving():
    os.kill(os.getpid(), signal.SIGTERM)
    done.append(2)
  assert done == [1]


class _Interrupted(_Ended):
  signal = signal.SIGINT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_heard_where_exceptions_are_ignored(ctrl_c):
  handler, done = signal.getsignal(signal.SIGINT), []
  with interrupts.heard() as came:
    with pytest.raises(KeyboardInterrupt):
      _Interrupted()
      done.append(1)  # not in the destructor, but soon after it
      time.sleep(10)
    assert done == [1] and came == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  assert signal.getsignal(signal.SIGINT) == handler
  with interrupts.heard() as came:  # in what has no name that is known
    thing = _Thing()
    ref = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del thing
    assert ref() is None
  assert came == [signal.SIGINT]


class _Thing:
  pass


def test_ctrl_c_stays_ignored():
  old = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    with interrupts.heard() as came:
      os.kill(os.getpid(), signal.SIGINT)
      signal.getsignal(signal.SIGINT)  # a handler would have run by now
    assert came == [] and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
  except KeyboardInterrupt:  # would end all tests
    pytest.fail("it was heard")
  finally:
    signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize("program", [True, False])
def test_a_program_skips_the_end_of_the_interpreter(program):
  """Where XLA, which may be compiling still, would crash."""
  lines = [
    "import sys, threading, grpojax",
    "from grpojax.runtime import interrupts",
    "sys.excepthook = grpojax._interrupted" if program else "",
    # A thread that the interpreter would wait for.
    "threading.Timer(1, print, ['last']).start()",
    "print('first')",
    "interrupts.exit_program()",
  ]
  done = subprocess.run(
    [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True
  )
  said = "first\n" if program else "first\nlast\n"
  assert (done.returncode, done.stdout, done.stderr) == (130, said, "")
