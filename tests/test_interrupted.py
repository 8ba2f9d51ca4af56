"""Killed and interrupted runs end like an uninterrupted run."""

import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import zlib

import pytest
from run_helpers import assert_same_weights, environment, rows_of, untimed

from grpojax import train
from grpojax.runtime import checkpoint
from grpojax.runtime.files import records
from grpojax.training.step import scoring

HERE = pathlib.Path(__file__).parent

# All state that a resumed run could lose: a reference, shuffled epochs, a
# schedule, several updates per step, stochastic rounding of moments.
LONG = {
  "steps": 14,
  "loss.beta": 0.01,
  "optim.minibatches": 2,
  "optim.micro_batches": 1,
  "optim.schedule": "cosine",
  "optim.moments_dtype": "bfloat16",
  "eval.every": 5,
  "group_size": "auto",
  "auto_group_size.smallest": 8,
  "auto_group_size.largest": 16,
  "auto_group_size.decay": 0.5,
  "auto_group_size.margin": 0.0,
  "auto_group_size.confidence": 0.0,
  "diagnostics.every": 1,
}

# The checkpoint has the next step's rollout; the reference follows the policy,
# and these rollouts are diagnosed.
AHEAD = {
  "steps": 14,
  "sampling.ahead": 1,
  "loss.correction": "sequence_truncate",
  "loss.beta": 0.01,
  "model.reference_every": 2,
  "advantage": "score_weighted",
  "diagnostics.every": 2,
}


@pytest.fixture
def uninterrupted(toy_task, toy_model, tmp_path_factory):
  """A whole run with given settings, cached."""

  def uninterrupted(settings):
    name = f"uninterrupted-{zlib.crc32(repr(settings).encode())}"
    run = tmp_path_factory.getbasetemp() / name
    if not (run / "summary.json").exists():
      words = toy_task.arguments(toy_model, **settings)
      train.main([*words, f"--run_dir={run}"])
    return run

  return uninterrupted


def assert_same_run(run, expected, settings=LONG):
  """Compares runs bit by bit, except times."""
  assert_same_weights(run / "model", expected / "model")
  for name in ("metrics.jsonl", "samples.jsonl"):
    ours, theirs = (
      untimed(records.read_jsonl(x / name)) for x in (run, expected)
    )
    assert ours == theirs
  rows = rows_of(run)
  steps = list(range(1, settings["steps"] + 1))
  assert [row["step"] for row in rows] == steps
  several = settings.get("group_size") == "auto"
  assert (len({row["group_size"] for row in rows}) > 1) == several
  for before, row in itertools.pairwise(rows):
    seconds = row["train_seconds"] - before["train_seconds"]
    assert 0 <= row["seconds_compile"] <= row["seconds_step"] <= seconds + 1e-6


@pytest.mark.parametrize(
  "settings, kills",
  [  # test_checkpoint.py kills a smaller program
    pytest.param(LONG, 3, marks=pytest.mark.long),
    pytest.param(AHEAD, 2, marks=pytest.mark.slow),
    pytest.param(AHEAD | {"steps": 80}, 20, marks=pytest.mark.long),
  ],
)
def test_kill_at_any_moment(
  settings, kills, uninterrupted, toy_task, toy_model, tmp_path, capsys
):
  run = tmp_path / "run"
  rng = random.Random()
  argv = [*toy_task.arguments(toy_model, **settings), f"--run_dir={run}"]
  steps = 0
  codes = []
  for _ in range(kills):
    command = [sys.executable, str(HERE / "toy.py"), *argv]
    process = subprocess.Popen(command, env=environment())
    goal = steps + rng.randint(2, 4)
    while process.poll() is None and steps < goal:
      time.sleep(0.002)
      rows = records.read_jsonl(run / "metrics.jsonl")
      steps = max([steps, *(row["step"] for row in rows)])
    time.sleep(rng.random() * 0.1)
    process.kill()
    codes.append(process.wait())
  *first, _ = codes  # the last kill may come too late
  assert first == [-signal.SIGKILL] * (kills - 1)
  train.main(argv)
  assert "resuming after step" in capsys.readouterr().out
  assert_same_run(run, uninterrupted(settings), settings)


# Moments of SIGTERM: settings, function, number of the call that sends it, and
# finished steps. Three batches of held-out prompts are scored before the first
# step and after every fifth.
REWARDS = "collect_rewards"
MOMENTS = {
  "first step": (LONG, REWARDS, 3 + 1, 0),
  "rewards": (LONG, REWARDS, 3 + 4, 3),
  "last evaluation": (LONG, REWARDS, 3 + 14 + 2 * 3 + 1, 14),
  "last checkpoint": (LONG, "save", 7, 14),
  # Step 2 is diagnosed, so its rewards come before its update.
  "diagnosed rewards": (AHEAD, REWARDS, 3 + 3, 1),
  # Step 3 computes the next rewards after its update.
  "next rewards": (AHEAD, REWARDS, 3 + 4, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  "moment",
  [  # test_adapters.py also resumes a run
    pytest.param(x, marks=pytest.mark.long if MOMENTS[x][0] == LONG else ())
    for x in MOMENTS
  ],
)
def test_sigterm_saves_and_the_next_run_resumes(
  moment, uninterrupted, toy_task, toy_model, tmp_path, monkeypatch, capfd
):
  run = tmp_path / "run"
  settings, name, calls, done = MOMENTS[moment]
  argv = [*toy_task.arguments(toy_model, **settings), f"--run_dir={run}"]
  module = scoring if name == REWARDS else checkpoint
  original = getattr(module, name)
  begun = []
  ended = []

  def interrupted(*args, **options):
    begun.append(1)
    if len(begun) == calls and settings == AHEAD:
      signal.raise_signal(signal.SIGTERM)
    result = original(*args, **options)
    ended.append(len(begun))
    if len(begun) == calls and settings == LONG:
      signal.raise_signal(signal.SIGTERM)
    return result

  handler = signal.getsignal(signal.SIGTERM)
  with monkeypatch.context() as patch:
    patch.setattr(module, name, interrupted)
    with pytest.raises(SystemExit) as caught:
      train.main(argv)
  assert caught.value.code == 75
  assert signal.getsignal(signal.SIGTERM) == handler
  assert [row["step"] for row in rows_of(run)] == list(range(1, done + 1))
  if settings == AHEAD:
    # Only an update waits for the next rewards.
    assert (calls in ended) == (moment == "next rewards")
  assert not (run / "summary.json").exists()
  rest = "still to be written: model, report.html, summary.json; the same"
  assert (rest in capfd.readouterr().out) == (done == 14)
  if done:
    with checkpoint.open_checkpointer(
      run / "checkpoints", readonly=True
    ) as saved:
      assert checkpoint.latest_step(saved) == done
  train.main(argv)
  if done:
    assert f"resuming after step {done}" in capfd.readouterr().out
  assert_same_run(run, uninterrupted(settings), settings)


@pytest.mark.slow
def test_a_swallowed_ctrl_c_still_ends_the_run(
  toy_task, toy_model, tmp_path, monkeypatch, capsys, ctrl_c
):
  """Python swallows exceptions in callbacks of weak references."""
  original = scoring.collect_rewards
  calls = []

  def swallowed(*args, **options):
    calls.append(1)
    if len(calls) == 1:
      try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
      except KeyboardInterrupt:
        pass
    return original(*args, **options)

  monkeypatch.setattr(scoring, "collect_rewards", swallowed)
  with pytest.raises(SystemExit) as caught:
    train.main([*toy_task.arguments(toy_model), f"--run_dir={tmp_path}/run"])
  assert caught.value.code == 130
  text = "interrupted; there is no checkpoint yet; the same"
  assert text in capsys.readouterr().out
