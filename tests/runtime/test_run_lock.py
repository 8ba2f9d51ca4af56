"""Locks of run directories, between real processes."""

import fcntl
import os
import re
import signal

import pytest
from run_helpers import start

from grpojax.runtime.files import disk, run_lock

# Runs the file alone, so that a process starts fast.
HOLD = f'import runpy; hold = runpy.run_path({run_lock.__file__!r})["hold"]'
PROGRAM = f"""
{HOLD}
import sys
try:
  with hold(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
except ValueError as error:
  print(error, flush=True)
"""


def output(process):
  return process.stdout.readline().strip()


def test_the_holder_is_named_until_it_ends(tmp_path):
  holder = start(PROGRAM, tmp_path)
  assert output(holder) == "held"
  host = re.escape(os.uname().nodename)
  text = rf"^{tmp_path} is in use by process {holder.pid} on {host} since "
  text += r"\d{4}-\d\d-\d\d .* \(-c .*\); "
  with pytest.raises(ValueError, match=text), run_lock.hold(tmp_path):
    pass
  holder.stdin.close()
  holder.wait()
  for _ in range(2):
    with run_lock.hold(tmp_path):
      pass
    assert not os.listdir(tmp_path)


def test_a_file_removed_before_the_lock_is_reopened(tmp_path, monkeypatch):
  path = tmp_path / run_lock.LOCK
  flock = fcntl.flock
  calls = []

  def late(file, operation):
    if not calls:
      path.unlink()
    calls.append(operation)
    flock(file, operation)

  monkeypatch.setattr(fcntl, "flock", late)
  with run_lock.hold(tmp_path):
    assert path.is_file() and len(calls) > 1


FORKED = f"""
{HOLD}
import os, sys
with hold(sys.argv[1]):
  child = os.fork() or (sys.stdin.read(), os._exit(0))
print(child, flush=True)
os.waitpid(child, 0)
"""
STARTED = f"""
{HOLD}
import os, signal, subprocess, sys
with hold(sys.argv[1]):
  print(subprocess.Popen(["sleep", "9"], close_fds=False).pid, flush=True)
  os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("program", [FORKED, STARTED])
def test_children_do_not_keep_the_lock(tmp_path, program):
  process = start(program, tmp_path)
  child = int(output(process))
  if program == STARTED:
    process.wait()
  os.kill(child, 0)  # it is alive
  with run_lock.hold(tmp_path):
    pass
  os.kill(child, signal.SIGKILL)
  process.stdin.close()
  process.wait()


def test_links_are_not_followed(tmp_path):
  (tmp_path / "letter").write_text("Dear")
  with pytest.raises(NotADirectoryError), run_lock.hold(tmp_path / "letter/x"):
    pass
  (tmp_path / run_lock.LOCK).symlink_to(tmp_path / "letter")
  with pytest.raises(OSError, match="symbolic"), run_lock.hold(tmp_path):
    pass
  assert (tmp_path / "letter").read_text() == "Dear"


@pytest.mark.parametrize("instead", ["nothing", "file", "link", "directory"])
def test_a_replaced_directory_is_noticed(tmp_path, instead):
  run = tmp_path / "run"
  other = tmp_path / "other"
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
