"""Learning curves."""

import numpy as np
import pytest

from grpojax.runtime.files import records
from grpojax.runtime.terminal import pictures


@pytest.fixture
def draw(tmp_path, monkeypatch):
  """`(*rows) -> figure` of the learning curve."""
  figures = []
  save = pictures.save_figure

  def spy(figure, path):
    figures.append(figure)
    save(figure, path)

  monkeypatch.setattr(pictures, "save_figure", spy)

  def draw(*rows):
    for row in rows:
      records.append_jsonl(tmp_path / "metrics.jsonl", row)
    pictures.learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    return figures[-1]

  return draw


def test_learning_curve(draw, tmp_path):
  for rows in ([], [{"accuracy": 1}, {"step": 1, "accuracy": "x", "kl": [1]}]):
    with pytest.raises(ValueError, match="no rows to draw"):
      draw(*rows)
  same = {"entropy": float("nan"), "zero_variance_groups": 0.0}
  rows = [
    {"step": n, "reward_mean": 0.1 * n, "completion_length_mean": 8 + n} | same
    for n in (1, 2)
  ]
  for step, accuracy in ((0, 0.4), (2, 0.6)):
    row = {"step": step, "accuracy": accuracy}
    row |= {"accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
    rows.append(row)
  accuracy, reward, *others = draw(*rows).axes
  # Metrics that never change are left out.
  assert [x.get_title() for x in others] == ["completion length (tokens)"]
  sizes = [x.get_position().size.prod() for x in (accuracy, reward, *others)]
  assert sizes[0] > 2.5 * max(sizes[1:])  # the accuracy is the largest
  assert reward.lines[0].get_xydata().tolist() == [[1, 0.1], [2, 0.2]]
  assert accuracy.lines[0].get_xydata().tolist() == [[0, 0.4], [2, 0.6]]
  band = accuracy.collections[0].get_paths()[0].vertices
  np.testing.assert_allclose((band.min(0), band.max(0)), ((0, 0.3), (2, 0.7)))
  data = (tmp_path / "curve.png").read_bytes()
  assert data.startswith(b"\x89PNG")
  size = tuple(int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
  assert size == (1000, 700)


def test_infinite_group_sizes_are_drawn_by_their_lower_bound(draw):
  best = "optimal_group_size"
  inf = float("inf")
  values = [(4.0, 2.0, 9.0), (20.0, 6.0, inf), (inf, 3.0, None)]
  names = best, f"{best}_low", f"{best}_high"
  (axes,) = draw(
    *(
      {"step": step, "group_size": 8, **dict(zip(names, x, strict=True))}
      for step, x in enumerate(values)
    )
  ).axes
  sizes, of_run = (line.get_ydata() for line in axes.lines)
  np.testing.assert_array_equal(sizes, [4, 20, np.nan])
  np.testing.assert_array_equal(of_run, [8, 8, 8])
  (intervals,) = axes.collections
  ends = [segment[:, 1].tolist() for segment in intervals.get_segments()]
  assert ends == [[2, 9], [6, 40], [3, 40]] and axes.get_ylim() == (1, 40)
