"""tpu_vm_worker.sh, with a stand-in for the training."""

import os
import pathlib
import shutil
import signal
import subprocess
import time
import types

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch/tpu_vm_worker.sh"

# Prints its arguments, then waits for `end` or saves at SIGTERM.
PYTHON = """#!/usr/bin/env bash
printf '<%s>' "$@" && echo
echo "$$" >"$HOME/pid"
trap 'echo saving; exit 75' TERM
until [[ -e "$HOME/end" ]]; do sleep 0.02; done
echo "the last line"
exit "$(<"$HOME/end")"
"""
UV = """#!/usr/bin/env bash
echo "uv $*" >>"$HOME/uv"
"""


@pytest.fixture
def worker(stand_ins, tmp_path):
  """Calls of the script in a home directory."""
  home = tmp_path / "home"
  stand_ins.program(tmp_path / "bin", "uv", UV)
  (home / "grpojax-venv").mkdir(parents=True)
  stand_ins.program(home / "grpojax-venv" / "bin", "python", PYTHON)
  env = stand_ins.environment(tmp_path / "bin", HOME=str(home))

  def call(*words):
    return stand_ins.run("bash", SCRIPT, *words, env=env)

  def wait_for(path):
    stand_ins.wait_until(lambda: path.exists() and path.read_text())
    return path.read_text().strip()

  yield types.SimpleNamespace(call=call, home=home, env=env, wait_for=wait_for)
  (home / "end").write_text("1")  # ends a running training


def test_install_marks_the_installed_files(worker):
  assert worker.call("installed", "12").returncode == 1
  assert worker.call("install", "12", "tpu,gcs").returncode == 0
  assert worker.call("installed", "12").returncode == 0
  assert worker.call("installed", "13").returncode == 1  # other files
  commands = (worker.home / "uv").read_text()
  assert "-e .[tpu,gcs]" in commands and "--python=3.13" in commands


@pytest.mark.slow
def test_a_training_outlives_the_connection_and_leaves_its_code(worker):
  assert worker.call("code").returncode != 0
  start = worker.call("start", "--run_dir=gs://mine/r", "--a=b  c")
  assert start.returncode == 0
  pid = worker.wait_for(worker.home / "pid")
  assert worker.call("installed", "12").returncode == 0  # while it runs
  again = worker.call("start", "--run_dir=gs://mine/r")
  assert "running already" in again.stdout
  assert worker.call("code").returncode != 0
  follow = subprocess.Popen(
    ["bash", SCRIPT, "follow"], env=worker.env, stdout=subprocess.PIPE
  )
  words = "<-u><-m><grpojax.train><--run_dir=gs://mine/r><--a=b  c>\n"
  assert follow.stdout.readline().decode() == words
  time.sleep(0.1)  # `follow` should wait for further output
  (worker.home / "end").write_text("3")
  assert follow.communicate(timeout=20)[0] == b"the last line\n"
  assert worker.call("code").stdout == "3\n"
  assert worker.wait_for(worker.home / "pid") == pid  # a single training


def test_a_preempted_training_can_start_again(worker):
  worker.call("start")
  pid = int(worker.wait_for(worker.home / "pid"))
  os.killpg(os.getpgid(pid), signal.SIGTERM)  # like a shutdown
  assert worker.wait_for(worker.home / "grpojax-run" / "code") == "75"
  (worker.home / "end").write_text("0")
  worker.call("start")
  worker.call("follow")
  assert worker.call("code").stdout == "0\n"
  log = (worker.home / "grpojax-run" / "log").read_text()
  assert log.count("grpojax.train") == 2 and "saving" in log


def test_variables_reach_a_command_and_the_training(worker, tmp_path):
  root = tmp_path / "grpojax"
  (root / "launch").mkdir(parents=True)
  script = shutil.copy(SCRIPT, root / "launch")
  (root / ".grpojax-env").write_text("export HF_TOKEN=se\\ cret\n")
  words = ("bash", script, "exec", "bash", "-c", 'echo "$HF_TOKEN" "$PWD"')
  done = subprocess.run(words, env=worker.env, capture_output=True, text=True)
  assert done.stdout == f"se cret {root}\n"
  python = worker.home / "grpojax-venv" / "bin" / "python"
  python.write_text('#!/bin/sh\necho "$HF_TOKEN"\n')
  flags = root / "launch" / "xla_flags.sh"
  flags.write_text('#!/bin/sh\nexec "$@"\n')
  flags.chmod(0o755)
  subprocess.run(["bash", script, "start"], env=worker.env, check=True)
  log = worker.home / "grpojax-run" / "log"
  assert worker.wait_for(log) == "se cret"
