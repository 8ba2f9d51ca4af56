"""Signals: noticed or raised, whatever runs, and the old handler comes back."""

import os
import signal
import subprocess
import sys
import time

import pytest

from grpojax.runtime.processes import interrupts


def send(number):
  os.kill(os.getpid(), number)
  signal.getsignal(number)  # the handler has run by now


@pytest.fixture(autouse=True)
def handlers_are_restored():
  before = [signal.getsignal(number) for number in interrupts.BOTH]
  yield
  assert [signal.getsignal(number) for number in interrupts.BOTH] == before


class InDestructor:
  """Sends a signal in its destructor, where no exception passes."""

  def __init__(self, number):
    self.number = number

  def __del__(self):
    send(self.number)


def test_the_first_sigterm_is_noticed_and_the_second_kills(capfd):
  with interrupts.sigterm_requests(several=False) as requested:
    assert not requested()
    send(signal.SIGTERM)
    assert requested() and requested(together=True)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  assert capfd.readouterr().err.startswith("SIGTERM: ends when")
  assert interrupts.EXIT_PREEMPTED == 75 == os.EX_TEMPFAIL


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_sigterm_ends_a_fork(capfd):
  with interrupts.sigterm_requests(several=False) as requested:
    child = os.fork()
    if not child:
      time.sleep(20)
      os._exit(0)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -15 and not requested()
  assert capfd.readouterr().err == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_is_heeded_where_exceptions_are_ignored():
  done = []
  with pytest.raises(interrupts.Left, match="by SIGTERM"):
    with interrupts.raising_sigterm():
      InDestructor(signal.SIGTERM)
      done.append(1)
  assert done == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_noted_where_exceptions_are_ignored(ctrl_c):
  done = []
  with interrupts.raising_ctrl_c() as came:
    InDestructor(signal.SIGINT)
    done.append(1)
    assert came == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
      send(signal.SIGINT)
  assert done == [1] and came == [signal.SIGINT] * 2


@pytest.mark.parametrize(
  "context",
  [interrupts.raising_ctrl_c, lambda: interrupts.deferred(*interrupts.BOTH)],
)
def test_ctrl_c_stays_ignored(context):
  with interrupts.handled(signal.SIG_IGN, signal.SIGINT):
    with context() as came:
      send(signal.SIGINT)
      assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN and not came


def test_signals_wait_for_the_end_of_what_they_would_harm(ctrl_c):
  with pytest.raises(KeyboardInterrupt):
    with interrupts.deferred(*interrupts.BOTH) as came:
      send(signal.SIGINT)
      send(signal.SIGINT)
      assert came == [signal.SIGINT] * 2


@pytest.mark.parametrize("program", [True, False])
def test_a_program_skips_the_end_of_the_interpreter(program):
  """Where XLA, which may be compiling still, would crash."""
  lines = [
    "import threading",
    "from grpojax.runtime.processes import interrupts",
    "interrupts.begin()" if program else "",
    # A thread that the interpreter would wait for.
    "threading.Timer(0.3, print, ['last']).start()",
    "print('first')",
    "interrupts.exit_program()",
  ]
  done = subprocess.run(
    [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True
  )
  out = "first\n" if program else "first\nlast\n"
  assert (done.returncode, done.stdout, done.stderr) == (130, out, "")
