"""local_multiprocess.sh, with a stand-in for the training."""

import os
import re
import signal
import subprocess
import sys

import pytest
from run_helpers import ROOT

SCRIPT = ROOT / "launch" / "local_multiprocess.sh"

# Process I ends with the code in `codeI`, or saves at SIGTERM.
PYTHON = f"""#!/usr/bin/env bash
if [[ "$1" == -c ]]; then
  if [[ -e "$HOME/slow" ]]; then
    touch "$HOME/asked"
    until [[ -e "$HOME/go" ]]; do sleep 0.02; done
  fi
  exec {sys.executable} -S "$@"
fi
trap 'exit 75' TERM
for word in "$@"; do
  if [[ "$word" == --process_id=* ]]; then i="${{word#*=}}"; fi
done
echo "$JAX_PLATFORMS $JAX_NUM_CPU_DEVICES $*" >"$HOME/started$i.new"
mv "$HOME/started$i.new" "$HOME/started$i"
until [[ -e "$HOME/code$i" ]]; do sleep 0.02; done
exit "$(<"$HOME/code$i")"
"""


def start(stand_ins, directory, *arguments):
  stand_ins.program(directory / "bin", "python", PYTHON)
  env = stand_ins.environment(directory / "bin", HOME=str(directory))
  for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
    env.pop(name, None)
  # Shells in the background ignore SIGINT, which then cannot be trapped.
  command = ["env", "--default-signal=INT", "bash", str(SCRIPT), *arguments]
  return subprocess.Popen(command, env=env)


@pytest.mark.parametrize(
  ("codes", "code"),
  [((0, 0), 0), ((75, 75), 75), ((75, 1), 1), ((0, 137), 137), ((75, 0), 75)],
)
def test_failures_count_more_than_interruptions(
  stand_ins, tmp_path, codes, code
):
  for i, exit_code in enumerate(codes):
    (tmp_path / f"code{i}").write_text(str(exit_code))
  assert start(stand_ins, tmp_path, "2", "--run_dir=a  b").wait(20) == code
  pattern = (
    r"cpu 1 -u -m grpojax\.train --coordinator=127\.0\.0\.1:(\d+) "
    r"--num_processes=2 --process_id=(\d) --run_dir=a  b\n"
  )
  matches = [
    re.fullmatch(pattern, (tmp_path / f"started{i}").read_text())
    for i in (0, 1)
  ]
  assert matches[0][1] == matches[1][1]
  assert [match[2] for match in matches] == ["0", "1"]


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_processes(stand_ins, tmp_path, which):
  job = start(stand_ins, tmp_path, "3")
  stand_ins.wait_until(lambda: len(list(tmp_path.glob("started?"))) == 3)
  os.kill(job.pid, which)
  assert job.wait(20) == 75


@pytest.mark.parametrize("arguments", [(), ("0",), ("--run_dir=x",)])
def test_the_number_of_processes_is_required(stand_ins, arguments):
  done = stand_ins.run("bash", SCRIPT, *arguments)
  assert done.returncode == 2
  assert "give the number of processes" in done.stderr


def test_an_early_signal_is_not_lost(stand_ins, tmp_path):
  (tmp_path / "slow").touch()
  job = start(stand_ins, tmp_path, "2")
  stand_ins.wait_until((tmp_path / "asked").exists)
  os.kill(job.pid, signal.SIGTERM)
  (tmp_path / "go").touch()
  assert job.wait(20) == 75
  assert not list(tmp_path.glob("started?"))
