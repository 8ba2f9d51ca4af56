"""The lock of a run directory, between real processes."""

import fcntl
import os
import re
import signal
import subprocess
import sys

import pytest

from grpojax.runtime.files import disk, run_lock

# The file alone, so that a process takes no time to start.
HOLD = f'import runpy; hold = runpy.run_path({run_lock.__file__!r})["hold"]'
PROGRAM = """
import sys
try:
  with hold(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
except ValueError as error:
  print(error, flush=True)
"""


def start(directory, program=PROGRAM):
  return subprocess.Popen(
    [sys.executable, "-c", HOLD + program, directory],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


def say(process):
  return process.stdout.readline().strip()


@pytest.fixture
def holder(tmp_path):
  process = start(tmp_path / "run")
  assert say(process) == "held"
  yield process
  process.kill()
  process.wait()


def test_the_second_is_told_who_the_first_is(holder, tmp_path):
  with pytest.raises(ValueError) as error, run_lock.hold(tmp_path / "run"):
    pass
  host = re.escape(os.uname().nodename)
  assert re.match(
    rf"{tmp_path}/run is in use by process {holder.pid} on {host} since "
    r"\d{4}-\d\d-\d\d .* \(-c .*\); ",
    str(error.value),
  )


def test_it_is_free_when_its_holder_has_ended(holder, tmp_path):
  holder.stdin.close()
  holder.wait()
  for _ in range(2):
    with run_lock.hold(tmp_path / "run"):
      pass
    assert not os.listdir(tmp_path / "run")


def test_a_lock_that_is_taken_while_its_file_goes_is_not_one(
  tmp_path, monkeypatch
):
  """Its holder ends between our opening the file and our locking it."""
  path, flock, calls = tmp_path / run_lock.LOCK, fcntl.flock, []

  def late(file, operation):
    if not calls:
      path.unlink()
    calls.append(operation)
    flock(file, operation)

  monkeypatch.setattr(fcntl, "flock", late)
  with run_lock.hold(tmp_path):
    assert path.is_file()
    other = start(tmp_path)
    assert f"in use by process {os.getpid()} on" in say(other)
    other.wait()


FORKED = """
import os, sys
with hold(sys.argv[1]):
  child = os.fork() or (sys.stdin.read(), os._exit(0))
print(child, flush=True)
os.waitpid(child, 0)
"""
STARTED = """
import os, signal, subprocess, sys
with hold(sys.argv[1]):
  print(subprocess.Popen(["sleep", "9"], close_fds=False).pid, flush=True)
  os.kill(os.getpid(), signal.SIGKILL)  # nothing is let go of
"""


@pytest.mark.parametrize("program", [FORKED, STARTED])
def test_children_do_not_keep_it(tmp_path, program):
  """A started program has no part in it; a forked one loses it with us."""
  process = start(tmp_path, program)
  child = int(say(process))
  if program == STARTED:
    process.wait()
  os.kill(child, 0)  # it lives
  with run_lock.hold(tmp_path):
    pass
  os.kill(child, signal.SIGKILL)
  process.stdin.close()
  process.wait()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
  (tmp_path / "letter").write_text("Dear")
  with pytest.raises(NotADirectoryError), run_lock.hold(tmp_path / "letter/x"):
    pass
  (tmp_path / run_lock.LOCK).symlink_to(tmp_path / "letter")
  with pytest.raises(OSError, match="symbolic"), run_lock.hold(tmp_path):
    pass
  assert (tmp_path / "letter").read_text() == "Dear"


@pytest.mark.parametrize("instead", ["nothing", "file", "link", "directory"])
def test_another_directory_in_its_place_is_noticed(tmp_path, instead):
  run, other = tmp_path / "run", tmp_path / "other"
  other.mkdir()
  with run_lock.hold(run) as check:
    check()
    run.rename(tmp_path / "moved")
    if instead == "file":
      run.touch()
    elif instead != "nothing":
      run.symlink_to(other) if instead == "link" else run.mkdir()
      (run / run_lock.LOCK).touch()  # of another process
    with pytest.raises(disk.WriteFailed, match="/run is gone: .* replaced"):
      check()
  if instead in ("link", "directory"):
    assert (run / run_lock.LOCK).exists()
