"""The picture of a run."""

import numpy as np
import pytest

from grpojax.runtime.files import records
from grpojax.runtime.terminal import pictures


def _png_size(path):
  data = path.read_bytes()
  assert data.startswith(b"\x89PNG")
  return tuple(int.from_bytes(data[i : i + 4], "big") for i in (16, 20))


def test_learning_curve(tmp_path, monkeypatch):
  path, png = tmp_path / "metrics.jsonl", tmp_path / "curve.png"
  with pytest.raises(ValueError, match="no rows"):
    pictures.learning_curve(path, png)
  drawn, sizes = [], []
  draw = pictures._draw

  def spy(axes, rows, key):
    draw(axes, rows, key)
    lines = axes.lines[0].get_xydata().tolist()
    bands = [c.get_paths()[0].vertices for c in axes.collections]
    drawn.append((key, lines, bands))
    sizes.append(axes.get_position().size.prod())

  monkeypatch.setattr(pictures, "_draw", spy)
  for step in (1, 2):
    row = {"step": step, "reward_mean": 0.1 * step, "entropy": float("nan")}
    row |= {"completion_length_mean": 8 + step, "zero_variance_groups": 0.0}
    records.append_jsonl(path, row)
  for step, accuracy in ((0, 0.4), (2, 0.6)):
    row = {"step": step, "accuracy": accuracy}
    row |= {"accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
    records.append_jsonl(path, row)
  pictures.learning_curve(path, png)
  assert _png_size(png) == (1000, 700)
  keys = [key for key, _, _ in drawn]
  # Without a metric that never changes.
  assert keys == ["accuracy", "reward_mean", "completion_length_mean"]
  assert sizes[0] > 2.5 * max(sizes[1:])  # the accuracy is the largest
  assert drawn[1][1] == [[1, 0.1], [2, 0.2]]
  assert drawn[0][1] == [[0, 0.4], [2, 0.6]]
  band = drawn[0][2][0]
  np.testing.assert_allclose((band.min(0), band.max(0)), ((0, 0.3), (2, 0.7)))
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    "curve.png",
    "metrics.jsonl",
  ]


def test_best_group_sizes_are_drawn_with_their_intervals(tmp_path, monkeypatch):
  """null is infinite: only the lower bound is known then."""
  path, drawn = tmp_path / "metrics.jsonl", []
  monkeypatch.setattr(
    pictures, "save_figure", lambda figure, _: drawn.append(figure)
  )
  best = "optimal_group_size"
  for step, (value, low, high) in enumerate(
    [(4.0, 2.0, 9.0), (20.0, 6.0, float("inf")), (float("inf"), 3.0, None)]
  ):
    row = {"step": step, "group_size": 8, best: value}
    records.append_jsonl(path, row | {f"{best}_low": low, f"{best}_high": high})
  pictures.learning_curve(path, tmp_path / "curve.png")
  (axes,) = drawn[0].axes
  sizes, of_run = (line.get_ydata() for line in axes.lines)
  np.testing.assert_array_equal(sizes, [4, 20, np.nan])
  np.testing.assert_array_equal(of_run, [8, 8, 8])
  (intervals,) = axes.collections
  ends = [segment[:, 1].tolist() for segment in intervals.get_segments()]
  assert ends == [[2, 9], [6, 40], [3, 40]] and axes.get_ylim() == (1, 40)


def test_a_picture_leaves_out_what_is_no_number_of_a_step(tmp_path):
  path, picture = tmp_path / "metrics.jsonl", tmp_path / "curve.png"
  for row in ({"accuracy": 1}, {"step": 1, "accuracy": "x", "entropy": [1]}):
    records.append_jsonl(path, row)
  with pytest.raises(ValueError, match="no rows to draw"):
    pictures.learning_curve(path, picture)
  records.append_jsonl(path, {"step": 1, "accuracy": 0.5})
  pictures.learning_curve(path, picture)
  assert picture.exists()
