"""Start, signals and end of a program."""

import os
import signal
import subprocess
import sys
import time

import pytest
from run_helpers import start

from grpojax.runtime.processes import interrupts


def send(number):
  os.kill(os.getpid(), number)
  signal.getsignal(number)  # lets the handler run


@pytest.fixture(autouse=True)
def handlers_are_restored():
  before = [signal.getsignal(number) for number in interrupts.BOTH]
  yield
  assert [signal.getsignal(number) for number in interrupts.BOTH] == before


class InDestructor:
  """Sends a signal in its destructor, which suppresses exceptions."""

  def __init__(self, number):
    self.number = number

  def __del__(self):
    send(self.number)


def test_the_first_sigterm_is_recorded_and_the_second_kills(capfd):
  with interrupts.sigterm_requests(several=False) as requested:
    assert not requested()
    send(signal.SIGTERM)
    assert requested() and requested(together=True)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  assert capfd.readouterr().err.startswith("SIGTERM: ends after")
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
def test_signals_in_destructors_are_recorded(ctrl_c):
  done = []
  with pytest.raises(interrupts.Left, match="by SIGTERM"):
    with interrupts.raising_sigterm():
      InDestructor(signal.SIGTERM)
      done.append(0)
  with interrupts.raising_ctrl_c() as came:
    InDestructor(signal.SIGINT)
    done.append(1)
    assert came == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
      send(signal.SIGINT)
  assert done == [0, 1] and came == [signal.SIGINT] * 2


def test_deferred_signals_arrive_at_the_end(ctrl_c):
  with interrupts.handled(signal.SIG_IGN, signal.SIGINT):
    with interrupts.deferred(*interrupts.BOTH) as came:
      send(signal.SIGINT)
      assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN and not came
  with pytest.raises(KeyboardInterrupt):
    with interrupts.deferred(*interrupts.BOTH) as came:
      send(signal.SIGINT)
      send(signal.SIGINT)
      assert came == [signal.SIGINT] * 2


BEGIN = """
from grpojax.runtime.processes import interrupts
interrupts.begin()
"""


@pytest.mark.parametrize("both", [False, True])
def test_a_program_survives_the_end_of_its_reader(both, tmp_path):
  lines = [
    "import pathlib, sys",
    "for step in range(5):",
    "  print('step', step)",
    "  print('so', step, file=sys.stderr)",
    "  sys.stdin.readline()",
    f"pathlib.Path({str(tmp_path / 'done')!r}).touch()",
  ]
  process = start("\n".join([BEGIN, *lines]))
  assert process.stdout.readline() == "step 0\n"
  assert process.stderr.readline() == "so 0\n"
  process.stdout.close()
  if both:
    process.stderr.close()
  process.stdin.write("\n" * 5)
  process.stdin.close()
  assert process.wait(60) == 0 and (tmp_path / "done").exists()
  if not both:
    first, *lines = process.stderr.read().splitlines()
    assert first.startswith("the standard output cannot be written (Broken")
    assert lines == [f"so {step}" for step in range(1, 5)]


def test_output_to_closed_streams_is_discarded(tmp_path):
  lines = [
    "import os, sys",
    f"with open({str(tmp_path / 'file')!r}, 'w') as file:",
    "  print('out')",
    "  print('error', file=sys.stderr)",
    "  os.write(1, b'from C'), os.write(2, b'from C')",
    "  assert file.fileno() > 2 and not sys.stdin.read()",
  ]
  words = sys.executable, "-c", "\n".join([BEGIN, *lines])
  closed = 'exec <&- >&- 2>&-; exec "$@"'
  subprocess.run(["sh", "-c", closed, "sh", *words], timeout=60, check=True)
  assert (tmp_path / "file").read_text() == ""


def test_user_code_may_wrap_close_and_restore_the_outputs():
  lines = [
    "import gc, io, sys",
    "names = ('stdout', 'stderr')",
    "for name in names * 2:",
    "  buffer = getattr(sys, name).buffer",
    "  setattr(sys, name, io.TextIOWrapper(buffer, encoding='utf-8'))",
    "gc.collect()",
    "print('out', flush=True)",
    "print('error', file=sys.stderr, flush=True)",
    "sys.stdout.close()",
    "print('still', flush=True)",
    "for name in names:",
    "  setattr(sys, name, getattr(sys, f'__{name}__'))",
    "print('restored \\udcff \\u20ac')",  # not encodable in ASCII
    "print('restored', file=sys.stderr)",
  ]
  process = start("\n".join([BEGIN, *lines]), PYTHONIOENCODING="ascii")
  output, error = process.communicate(timeout=60)
  assert output == "out\nstill\nrestored \\udcff \\u20ac\n"
  assert error == "error\nrestored\n"


@pytest.mark.parametrize("name, output", [("main", "cleanup\n"), ("_load", "")])
def test_ctrl_c_during_imports_ends_without_cleanup(name, output, ctrl_c):
  lines = [
    "import os, signal",
    f"def {name}():",
    "  try:",
    "    os.kill(os.getpid(), signal.SIGINT)",
    "  finally:",
    "    print('cleanup')",
    f"{name}()",
  ]
  process = start("\n".join([BEGIN, *lines]))
  assert process.communicate(timeout=60) == (output, "interrupted\n")
  assert process.returncode == 130
