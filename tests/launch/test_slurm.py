"""slurm.sbatch, run by stand-ins that behave like SLURM 22.05."""

import os
import pathlib
import re
import signal
import subprocess
import types

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch/slurm.sbatch"

# Runs the job, and repeats it while it is queued again.
SBATCH = """#!/usr/bin/env bash
export SLURM_JOB_ID=4711 SLURM_NTASKS=2 SLURM_RESTART_COUNT=0
while true; do
  rm -f "$HOME/requeued"
  bash "$@" || code="$?"
  [[ -e "$HOME/requeued" ]] || exit "${code:-0}"
  ((++SLURM_RESTART_COUNT))
  code=0
done
"""
# Runs a process per task and returns their highest code. A SIGTERM to srun
# itself kills the tasks: "srun: forcing job termination".
SRUN = """#!/usr/bin/env bash
echo "$*" >>"$HOME/srun"
while [[ "$1" == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do
  SLURM_PROCID="$i" SLURM_LOCALID="$i" SLURM_STEP_NODELIST=localhost "$@" &
  tasks+=("$!")
done
trap 'kill -KILL "${tasks[@]}"' TERM
highest=0
for task in "${tasks[@]}"; do
  code=0
  wait "$task" || code="$?"
  if ((code > highest)); then highest="$code"; fi
done
exit "$highest"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >>"$HOME/scontrol"
[[ "$*" == "requeue 4711" ]] && touch "$HOME/requeued"
"""
# Ends with the code in `code`, or saves at SIGTERM.
PYTHON = """#!/usr/bin/env bash
trap 'exit 75' TERM
echo "$SLURM_RESTART_COUNT $SLURM_PROCID $*" >>"$HOME/started"
echo "$$" >>"$HOME/pids$SLURM_RESTART_COUNT"
code="$HOME/code$SLURM_RESTART_COUNT"
until [[ -e "$code" ]]; do sleep 0.02; done
exit "$(<"$code")"
"""


@pytest.fixture
def cluster(stand_ins, tmp_path):
  programs = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL}
  for name, text in (programs | {"python": PYTHON}).items():
    stand_ins.program(tmp_path / "bin", name, text)
  env = stand_ins.environment(tmp_path / "bin", HOME=str(tmp_path))

  def submit(*arguments):
    return subprocess.Popen(["sbatch", str(SCRIPT), *arguments], env=env)

  return types.SimpleNamespace(home=tmp_path, submit=submit)


def lines(path):
  return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("code", [0, 1])
def test_a_finished_job_is_not_queued_again(cluster, code):
  (cluster.home / "code0").write_text(str(code))
  assert cluster.submit("--run_dir=/shared/r").wait(20) == code
  assert not lines(cluster.home / "scontrol")
  started = sorted(lines(cluster.home / "started"))
  words = "-u -m grpojax.train --run_dir=/shared/r"
  assert started == [f"0 0 {words}", f"0 1 {words}"]


def test_an_interrupted_job_is_queued_again(cluster, stand_ins):
  (cluster.home / "code1").write_text("0")
  job = cluster.submit("--config.data.template={prompt} a  b", "--run_dir=r")
  stand_ins.wait_until(lambda: len(lines(cluster.home / "pids0")) == 2)
  for pid in lines(cluster.home / "pids0"):  # as --signal=TERM@300 does
    os.kill(int(pid), signal.SIGTERM)
  assert job.wait(20) == 0
  assert lines(cluster.home / "scontrol") == ["requeue 4711"]
  words = "-u -m grpojax.train --config.data.template={prompt} a  b --run_dir=r"
  assert sorted(lines(cluster.home / "started")) == [
    f"{restart} {task} {words}" for restart in (0, 1) for task in (0, 1)
  ]


def test_sbatch_signals_the_tasks_and_may_queue_the_job_again():
  options = dict(
    re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", SCRIPT.read_text(), re.M)
  )
  assert "requeue" in options and options["open-mode"] == "append"
  # "B:" would signal only the shell, which could only make srun kill.
  assert re.fullmatch(r"TERM@\d+", options["signal"])
  assert options["ntasks-per-node"] == options["gpus-per-node"]


def test_outside_of_a_job_it_prints_usage(stand_ins, monkeypatch):
  monkeypatch.delenv("SLURM_JOB_ID", raising=False)
  done = stand_ins.run("bash", SCRIPT)
  assert done.returncode == 2
  assert "sbatch launch/slurm.sbatch" in done.stderr
