"""JSON and JSON lines on disk."""

import errno
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.runtime.files import records


def test_rows_round_trip_and_non_finite_numbers_are_null(tmp_path):
  path = tmp_path / "metrics.jsonl"
  records.append_jsonl(path, {"step": jnp.int32(1), "loss": jnp.float32("nan")})
  records.append_jsonl(
    path, {"step": 2, "x": np.array([0.5, np.inf]), "ok": True, "s": "a\nb"}
  )
  assert records.read_jsonl(path) == [
    {"step": 1, "loss": None},
    {"step": 2, "x": [0.5, None], "ok": True, "s": "a\nb"},
  ]
  assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_resume_drops_later_rows_and_an_incomplete_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  records.truncate_jsonl(path, 2)
  assert records.read_jsonl(path) == [] and not path.exists()
  for row in ({"note": "x"}, {"step": 1}, {"step": 2}, {"step": 3}):
    records.append_jsonl(path, row)
  with open(path, "a") as file:
    file.write('{"step": 2, "los')
  assert len(records.read_jsonl(path)) == 4
  records.truncate_jsonl(path, 2)
  records.append_jsonl(path, {"step": 3, "again": True})
  rows = [{"note": "x"}, {"step": 1}, {"step": 2}, {"step": 3, "again": True}]
  assert records.read_jsonl(path) == rows
  assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
  "line, text",
  [
    ("[1, 2]", "no object .*: \\[1, 2\\]"),
    ('{"step": "two"}', "with an integer step: {'step': 'two'}"),
    ('{"step": true}', "with an integer step"),
    ("[" * 10_000, "recursion"),
    ("nonsense", r"no row of JSON \(Expecting value\)"),
  ],
)
def test_damaged_lines_are_named(line, text, tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
  with pytest.raises(ValueError, match=f"metrics.jsonl, line 2: .*{text}"):
    records.read_jsonl(path)


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
  path = tmp_path / "summary.json"
  records.write_json(path, {"a": float("-inf"), "b": (1, np.float32(0.5))})
  with pytest.raises(TypeError):
    records.write_json(path, {"a": {1, 2}})

  def fail(_):
    raise errors.pop()

  errors = [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left")]
  monkeypatch.setattr(os, "fsync", fail)
  with pytest.raises(OSError, match="No space left: '.*/summary.json'$"):
    records.write_json(path, {})
  with pytest.raises(KeyboardInterrupt):
    records.write_json(path, {})
  assert json.loads(path.read_text()) == {"a": None, "b": [1, 0.5]}
  assert os.listdir(tmp_path) == ["summary.json"]


def test_concurrent_writers_each_write_a_whole_file(tmp_path):
  path = tmp_path / "file"
  with records.replacing(path) as first:
    first.write_text("1")
    with records.replacing(path) as second:
      second.write_text("2")
      assert first.read_text() == "1"
    assert path.read_text() == "2"
  assert path.read_text() == "1" and os.listdir(tmp_path) == ["file"]


def test_duration():
  texts = {0: "0s", 59.4: "59s", 60: "1m00s", 3599.6: "1h00m", 7620: "2h07m"}
  assert list(map(records.duration, texts)) == list(texts.values())
