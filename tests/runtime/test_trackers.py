"""Trackers: their calls and their failures; installed libraries need no network."""

import math
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from grpojax.runtime.terminal import trackers

RUN = trackers.TrackedRun(
  pathlib.Path("nowhere"), "mine", {"optim.learning_rate": 0.1, "x": (1, 2)}
)


class Recorder:
  """A tracker that records its calls."""

  def __init__(self, fails_at=None):
    self.rows, self.closed, self.fails_at = [], 0, fails_at

  def open(self, run):
    self.run = run
    return trackers.Tracker(self.log, self.close, run.id or "new")

  def log(self, step, numbers):
    if step == self.fails_at:
      raise ConnectionError("no route\nto host")
    self.rows.append((step, numbers))

  def close(self):
    self.closed += 1
    if self.fails_at:
      raise RuntimeError("gone")


@pytest.fixture
def two(monkeypatch):
  recorders = {"good": Recorder(), "bad": Recorder(fails_at=2)}
  table = {name: recorder.open for name, recorder in recorders.items()}
  monkeypatch.setattr(trackers, "TRACKERS", table)
  return recorders


def test_a_failing_tracker_is_reported_and_removed(two, capsys):
  opened, ids = trackers.open_all(["good", "bad"], RUN, {"good": "old"})
  assert ids == {"good": "old", "bad": "new"}
  assert two["good"].run.id == "old" and two["bad"].run.id == ""
  odd = {"flag": True, "text": "1", "bad": math.nan, "list": [1.0], "no": None}
  for step in (1, 2, 3):
    row = {"step": step, "loss": np.float32(step / 2)} | odd
    trackers.log_all(opened, step, row)
  assert [step for step, _ in two["good"].rows] == [1, 2, 3]
  assert two["bad"].rows == [(1, {"loss": 0.5})]
  output = capsys.readouterr().out
  assert output.count("\n") == 1
  assert "step 2: bad fails (ConnectionError: no route to host)" in output
  trackers.close_all(opened)
  assert (two["good"].closed, two["bad"].closed) == (1, 0)
  trackers.close_all({"bad": trackers.Tracker(None, two["bad"].close)})
  assert "bad does not close: RuntimeError: gone" in capsys.readouterr().out


def test_a_tracker_that_cannot_open_closes_all(two, monkeypatch):
  def refuses(run):
    raise SystemExit("http://me:SECRET@host/api\x1b[31m is closed")

  monkeypatch.setitem(trackers.TRACKERS, "wandb", refuses)
  monkeypatch.setattr(trackers, "PACKAGES", {})
  # Without passwords and control characters.
  text = r"http://\.\.\.@host/api\\x1b\[31m is closed .WANDB_MODE=offline.*"
  text += "; without it: --config.log.trackers=good$"
  with pytest.raises(ValueError, match=f"does not open: SystemExit: {text}"):
    trackers.open_all(["good", "wandb"], RUN, {})
  assert two["good"].closed == 1


@pytest.mark.parametrize(
  "name, message",
  [
    ("mlflow", "give tensorboard or wandb, or a function"),
    (f"{__file__}:opens", "has no function 'opens'"),
    ("nowhere.py:open_run", "nowhere.py"),
  ],
)
def test_unknown_trackers(name, message):
  with pytest.raises(ValueError, match=f"log.trackers = .*{message}"):
    trackers.opener(name)


def test_a_users_tracker(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text(
    "from grpojax.runtime.terminal.trackers import Tracker\n"
    "rows = []\n"
    "def open_run(run):\n"
    "  log = lambda step, numbers: rows.append((step, numbers))\n"
    "  return Tracker(log, rows.clear, run.id or run.name)\n"
  )
  name = f"{file}:open_run"
  opened, ids = trackers.open_all([name], RUN, {})
  assert ids == {name: "mine"}
  trackers.log_all(opened, 1, {"step": 1, "loss": 0.5})
  rows = trackers.opener(name).__globals__["rows"]
  assert rows == [(1, {"loss": 0.5})]
  trackers.close_all(opened)
  assert not rows


def test_tensorboard_tags_and_purge(tmp_path):
  tracker = trackers.tensorboard(RUN._replace(directory=tmp_path, step=4))
  tracker.log(5, {"loss": 0.5})
  tracker.close()
  (file,) = (tmp_path / "tensorboard").iterdir()
  data, events = file.read_bytes(), []
  while data:  # length, its checksum, the event, its checksum
    size = int.from_bytes(data[:8], "little")
    events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
    data = data[16 + size :]
  scalars = [(e.step, v.tag) for e in events for v in e.summary.value]
  assert scalars == [(5, "loss")]
  # SessionLog.START at step s hides what an earlier file holds from s on.
  starts = [e.step for e in events if e.session_log.status == 1]
  assert starts == [5]


def test_calls_of_wandb(monkeypatch, tmp_path):
  calls = []
  opened = types.SimpleNamespace(
    id="abc",
    define_metric=lambda *a, **k: calls.append((a, k)),
    log=calls.append,
    finish=lambda: calls.append("finish"),
  )
  library = types.SimpleNamespace(
    init=lambda **keywords: calls.append(keywords) or opened,
    Settings=lambda **keywords: keywords,
  )
  monkeypatch.setitem(sys.modules, "wandb", library)
  monkeypatch.setenv("WANDB_PROJECT", "theirs")
  run = RUN._replace(directory=tmp_path, id="abc")
  tracker = trackers.wandb(run)
  tracker.log(4, {"loss": 0.5})
  tracker.close()
  assert tracker.id == "abc"
  options, steps, row, end = calls
  expected = {"project": "theirs", "dir": str(tmp_path), "config": RUN.config}
  expected |= {"id": "abc", "resume": "allow", "name": "mine"}
  assert options.items() >= expected.items()
  assert steps == (("*",), {"step_metric": "step"})
  assert row == {"step": 4, "loss": 0.5} and end == "finish"


PROGRAM = """
import pathlib, sys
from grpojax.runtime.terminal import trackers
folder, id = sys.argv[1:]
run = trackers.TrackedRun(pathlib.Path(folder), "mine", {"a.b": 1}, -1, id)
tracker = trackers.wandb(run)
tracker.log(1 if not id else 2, {"loss": 0.5 if not id else 0.25, "a/b": 1.0})
tracker.close()
print("id", tracker.id)
"""


@pytest.mark.slow
def test_wandb_resumes_a_run_offline(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  known = ""
  for _ in range(2):
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), known]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("id "), done.stdout
    new = done.stdout.removeprefix("id ").strip()
    assert known in ("", new)
    known = new
  files = list(tmp_path.glob(f"wandb/offline-run-*-{known}/run-{known}.wandb"))
  assert b"loss" in files[0].read_bytes()
