"""Calls and failures of trackers."""

import math
import pathlib
import sys
from unittest import mock

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from grpojax.runtime.terminal import trackers

RUN = trackers.TrackedRun(
  pathlib.Path("nowhere"), "mine", {"optim.learning_rate": 0.1, "x": (1, 2)}
)


@pytest.fixture
def two(monkeypatch):
  """Trackers that record their calls, of which "bad" fails at its second."""
  two = {"good": mock.Mock(), "bad": mock.Mock()}
  failures = [None, ConnectionError("no route\nto host")]
  two["bad"].log.side_effect = failures
  two["bad"].close.side_effect = RuntimeError("gone")

  def opener(tracker):
    def open_run(run):
      tracker.run = run
      return trackers.Tracker(tracker.log, tracker.close, run.id or "new")

    return open_run

  table = {name: opener(tracker) for name, tracker in two.items()}
  monkeypatch.setattr(trackers, "TRACKERS", table)
  return two


def test_a_failing_tracker_is_reported_and_removed(two, capsys):
  opened, ids = trackers.open_all(["good", "bad"], RUN, {"good": "old"})
  assert ids == {"good": "old", "bad": "new"}
  assert two["good"].run.id == "old" and two["bad"].run.id == ""
  odd = {"flag": True, "text": "1", "bad": math.nan, "list": [1.0], "no": None}
  for step in (1, 2, 3):
    row = {"step": step, "loss": np.float32(step / 2)} | odd
    trackers.log_all(opened, step, row)
  calls = [mock.call(step, {"loss": step / 2}) for step in (1, 2, 3)]
  assert two["good"].log.mock_calls == calls
  assert two["bad"].log.mock_calls == calls[:2]
  output = capsys.readouterr().out
  assert output.count("\n") == 1
  assert "step 2: bad fails (ConnectionError: no route to host)" in output
  trackers.close_all(opened)
  assert two["good"].close.call_count == 1 and not two["bad"].close.called
  trackers.close_all({"bad": trackers.Tracker(None, two["bad"].close)})
  assert "bad does not close: RuntimeError: gone" in capsys.readouterr().out


def test_a_tracker_that_cannot_open_closes_all(two, monkeypatch):
  def refuses(run):
    raise SystemExit("http://me:SECRET@host/api\x1b[31m is closed")

  monkeypatch.setitem(trackers.TRACKERS, "wandb", refuses)
  monkeypatch.setitem(sys.modules, "wandb", sys)  # seems to be installed
  # Without passwords and control characters.
  text = r"http://\.\.\.@host/api\\x1b\[31m is closed .WANDB_MODE=offline.*"
  text += "; without it: --config.log.trackers=good$"
  with pytest.raises(ValueError, match=f"does not open: SystemExit: {text}"):
    trackers.open_all(["good", "wandb"], RUN, {})
  assert two["good"].close.call_count == 1


def test_trackers_are_named_or_functions_of_the_user(tmp_path):
  (tmp_path / "mine.py").write_text("def open_run(run):\n  return run.name\n")
  assert trackers.opener(f"{tmp_path}/mine.py:open_run")(RUN) == "mine"
  for name, message in (
    ("mlflow", "choose one of .*'wandb'"),
    (f"{tmp_path}/mine.py:opens", "mine.py has no 'opens'"),
    ("nowhere.py:open_run", "nowhere.py"),
  ):
    with pytest.raises(ValueError, match=f"log.trackers = .*{message}"):
      trackers.opener(name)


def test_tensorboard_tags_and_purge(tmp_path):
  tracker = trackers.tensorboard(RUN._replace(directory=tmp_path, step=4))
  tracker.log(5, {"loss": 0.5})
  tracker.close()
  (file,) = (tmp_path / "tensorboard").iterdir()
  data = file.read_bytes()
  events = []
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
  library = mock.MagicMock()
  opened = library.init.return_value
  opened.id = "abc"
  monkeypatch.setitem(sys.modules, "wandb", library)
  monkeypatch.setenv("WANDB_PROJECT", "theirs")
  tracker = trackers.wandb(RUN._replace(directory=tmp_path, id="abc"))
  tracker.log(4, {"loss": 0.5})
  tracker.close()
  assert tracker.id == "abc"
  options = {"project": "theirs", "dir": str(tmp_path), "config": RUN.config}
  options |= {"id": "abc", "resume": "allow", "name": "mine"}
  assert library.init.call_args.kwargs.items() >= options.items()
  assert opened.mock_calls == [
    mock.call.define_metric("*", step_metric="step"),
    mock.call.log({"step": 4, "loss": 0.5}),
    mock.call.finish(),
  ]
