"""Trackers: a resumed run stays the same run."""

import json
import sys

import pytest

from grpojax.runtime.terminal import trackers


@pytest.fixture
def tracked(monkeypatch):
  """Events of a stub tracker, in order."""
  events = []

  def opened(run):
    events.append(("open", run.id, run.step, run.config["steps"], run.name))

    def log(step, numbers):
      if step == 3:
        raise TimeoutError("slow")
      events.append((step, *sorted({"loss", "accuracy"} & numbers.keys())))

    return trackers.Tracker(log, lambda: events.append("close"), "the_run")

  table = trackers.TRACKERS | {"wandb": opened}
  monkeypatch.setattr(trackers, "TRACKERS", table)
  monkeypatch.setitem(sys.modules, "wandb", sys)  # seems to be installed
  return events


@pytest.mark.slow
def test_a_resumed_run_keeps_its_tracker_run(
  tracked, train_toy, tmp_path, capsys
):
  settings = {"log.trackers": "tensorboard,wandb", "eval.every": 2}
  train_toy(steps=2, **settings)
  first = [("open", "", -1, 2, "toy"), (0, "accuracy"), (1, "loss")]
  first += [(2, "loss"), (2, "accuracy"), "close"]
  assert tracked == first
  saved = (tmp_path / "run" / "trackers.json").read_text()
  assert json.loads(saved) == {"wandb": "the_run"}
  assert (tmp_path / "run" / "tensorboard").is_dir()
  tracked.clear()
  capsys.readouterr()
  rows = train_toy(steps=4, **settings)
  # The stub fails at the third step.
  assert tracked == [("open", "the_run", 2, 4, "toy")]
  printed = capsys.readouterr().out
  assert printed.count("wandb fails (TimeoutError: slow)") == 1
  assert sum("loss" in row for row in rows) == 4
