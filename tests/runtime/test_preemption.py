"""SIGTERM: noticed once, fatal twice, and the old handler comes back."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

from grpojax.runtime import preemption


def test_one_sigterm_is_noticed_and_the_old_handler_restored():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.install() as requested:
    assert not requested()
    os.kill(os.getpid(), signal.SIGTERM)
    assert requested()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  assert signal.getsignal(signal.SIGTERM) == before

  requested = preemption.install()
  assert not requested() and signal.getsignal(signal.SIGTERM) != before
  requested.uninstall()
  assert signal.getsignal(signal.SIGTERM) == before


def _run(signals: int) -> subprocess.CompletedProcess:
  code = (
    "import os, signal, sys\n"
    "from grpojax.runtime import preemption\n"
    "with preemption.install() as requested:\n"
    f"  for _ in range({signals}):\n"
    "    os.kill(os.getpid(), signal.SIGTERM)\n"
    "  sys.exit(preemption.EXIT_PREEMPTED if requested() else 0)\n"
  )
  root = pathlib.Path(__file__).parents[2]
  return subprocess.run(
    [sys.executable, "-c", code], cwd=root, capture_output=True, text=True
  )


def test_exit_codes_of_a_process():
  once, twice = _run(1), _run(2)
  assert once.returncode == 75 == preemption.EXIT_PREEMPTED == os.EX_TEMPFAIL
  assert once.stderr.startswith("SIGTERM: saving")
  assert twice.returncode == -signal.SIGTERM


def test_only_the_main_thread_can_install():
  errors = []

  def other():
    try:
      preemption.install()
    except ValueError as error:
      errors.append(error)

  thread = threading.Thread(target=other)
  thread.start()
  thread.join()
  assert errors and "main thread" in str(errors[0])
