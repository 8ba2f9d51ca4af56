"""JSON lines, TensorBoard, the progress line and the learning curve."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from grpojax.runtime import metrics


def test_rows_round_trip_and_non_finite_numbers_are_null(tmp_path):
  path = tmp_path / "metrics.jsonl"
  metrics.append_jsonl(path, {"step": jnp.int32(1), "loss": jnp.float32("nan")})
  metrics.append_jsonl(
    path, {"step": 2, "x": np.array([0.5, np.inf]), "ok": True, "s": "a\nb"}
  )
  assert metrics.read_jsonl(path) == [
    {"step": 1, "loss": None},
    {"step": 2, "x": [0.5, None], "ok": True, "s": "a\nb"},
  ]
  assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_resume_drops_later_rows_and_a_torn_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  for row in ({"note": "x"}, {"step": 1}, {"step": 2}, {"step": 3}):
    metrics.append_jsonl(path, row)
  with open(path, "a") as file:
    file.write('{"step": 2, "los')
  assert len(metrics.read_jsonl(path)) == 4
  metrics.truncate_jsonl(path, 2)
  metrics.append_jsonl(path, {"step": 3, "again": True})
  rows = [{"note": "x"}, {"step": 1}, {"step": 2}, {"step": 3, "again": True}]
  assert metrics.read_jsonl(path) == rows
  assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_missing_and_broken_files(tmp_path):
  path = tmp_path / "metrics.jsonl"
  metrics.truncate_jsonl(path, 2)
  assert metrics.read_jsonl(path) == [] and not path.exists()
  path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
  with pytest.raises(ValueError, match="line 2: not JSON"):
    metrics.read_jsonl(path)


def test_write_json_replaces_whole_or_not_at_all(tmp_path):
  path = tmp_path / "summary.json"
  metrics.write_json(path, {"a": float("-inf"), "b": (1, np.float32(0.5))})
  assert json.loads(path.read_text()) == {"a": None, "b": [1, 0.5]}
  with pytest.raises(TypeError):
    metrics.write_json(path, {"a": {1, 2}})
  assert json.loads(path.read_text())["b"] == [1, 0.5]
  assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_progress_is_one_line_with_the_time_left():
  line = metrics.progress(
    9, 60, 2.5, {"reward": jnp.float32(0.51234), "note": "ok"}
  )
  # (60 - 9) x 2.5 s = 127.5 s
  assert line == "step  9/60  reward 0.512  note ok  2.50 s/step  2m08s left"


@pytest.mark.parametrize(
  "seconds, text",
  [(0, "0s"), (59.4, "59s"), (60, "1m00s"), (3599.6, "1h00m"), (7620, "2h07m")],
)
def test_duration(seconds, text):
  assert metrics.duration(seconds) == text


def test_tensorboard_tags_and_purge(tmp_path):
  writer = metrics.tensorboard_writer(tmp_path, step=4)
  row = {"step": 5, "loss": 0.5, "bad": float("nan"), "text": "x", "yes": True}
  metrics.write_scalars(writer, 5, row)
  writer.close()
  (file,) = tmp_path.iterdir()
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


def _png_size(path):
  data = path.read_bytes()
  assert data.startswith(b"\x89PNG")
  return tuple(int.from_bytes(data[i : i + 4], "big") for i in (16, 20))


def test_learning_curve(tmp_path, monkeypatch):
  path, png = tmp_path / "metrics.jsonl", tmp_path / "curve.png"
  with pytest.raises(ValueError, match="no rows"):
    metrics.learning_curve(path, png)
  drawn = []
  draw = metrics._draw

  def spy(axes, rows, key):
    draw(axes, rows, key)
    lines = axes.lines[0].get_xydata().tolist()
    bands = [c.get_paths()[0].vertices for c in axes.collections]
    drawn.append((key, lines, bands))

  monkeypatch.setattr(metrics, "_draw", spy)
  for step in (1, 2):
    row = {"step": step, "reward_mean": 0.1 * step, "entropy": float("nan")}
    metrics.append_jsonl(path, row | {"completion_length_mean": 9})
  for step, accuracy in ((0, 0.4), (2, 0.6)):
    row = {"step": step, "accuracy": accuracy}
    row |= {"accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
    metrics.append_jsonl(path, row)
  metrics.learning_curve(path, png)
  assert _png_size(png) == (1000, 700)
  keys = [key for key, _, _ in drawn]
  assert keys == ["reward_mean", "accuracy", "completion_length_mean"]
  assert drawn[0][1] == [[1, 0.1], [2, 0.2]]
  assert drawn[1][1] == [[0, 0.4], [2, 0.6]]
  band = drawn[1][2][0]
  np.testing.assert_allclose((band.min(0), band.max(0)), ((0, 0.3), (2, 0.7)))
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "curve.png",
    "metrics.jsonl",
  ]
