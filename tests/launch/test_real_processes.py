"""The launchers with the program itself: two processes, stopped, resumed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = [
  pytest.mark.long,  # two processes that compile everything
  pytest.mark.skipif(
    not (ROOT / "grpojax" / "runtime" / "distributed.py").exists(),
    reason="grpojax.train joins no other processes yet",
  ),
]


def arguments(toy, model, directory, steps):
  changes = {"steps": steps, "eval.every": 1000, "checkpoint.every": 1000}
  return [
    *toy.arguments(model, **changes, **{"data.name": "arithmetic"}),
    "--config.data.max_prompt_length=32",
    f"--run_dir={directory}",
  ]


def environment(stand_ins, directory, **more):
  """With this Python as `python`, and one CPU device a process."""
  stand_ins.program(
    directory / "bin", "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'
  )
  cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
  path = {"PYTHONPATH": str(ROOT)}
  return stand_ins.environment(directory / "bin", **cpu, **path, **more)


def steps_of(directory):
  path = directory / "metrics.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  return [row["step"] for row in map(json.loads, lines) if "loss" in row]


def wait_for_steps(directory, count, job):
  limit = time.monotonic() + 300
  while len(steps_of(directory)) < count:
    assert time.monotonic() < limit and job.poll() is None
    time.sleep(0.1)


def test_processes_here_are_interrupted_and_go_on(
  stand_ins, toy, toy_model, tmp_path
):
  run, env = tmp_path / "run", environment(stand_ins, tmp_path)
  command = ["bash", str(ROOT / "launch" / "local_multiprocess.sh"), "2"]
  endless = arguments(toy, toy_model, run, 10_000)
  job = subprocess.Popen([*command, *endless], env=env)
  wait_for_steps(run, 2, job)
  os.kill(job.pid, signal.SIGTERM)
  assert job.wait(120) == 75
  saved = len(steps_of(run))
  ended = arguments(toy, toy_model, run, saved + 2)
  done = subprocess.run([*command, *ended], env=env, timeout=300)
  assert done.returncode == 0
  assert steps_of(run) == list(range(1, saved + 3))
  assert (run / "summary.json").exists()
