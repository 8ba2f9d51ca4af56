"""Parquet files: what they give, and that their mistakes are found at once."""

import concurrent.futures
import datetime
import decimal
import json
import random
import tempfile

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet as pq

from grpojax.data import datasets, parquet

VERL = [
  {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": f"{i} + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
    "extra_info": {"index": i, "split": "train"},
  }
  for i in range(5)
]


def write(file, rows, **options):
  file.parent.mkdir(exist_ok=True, parents=True)
  pq.write_table(pyarrow.Table.from_pylist(rows), file, **options)
  return file


@pytest.fixture(params=["jsonl", "parquet"])
def kind(request):
  """Both kinds of files have the same options, rows and errors."""

  def write_as(path, rows):
    path = path.with_suffix(f".{request.param}")
    if request.param == "parquet":
      return write(path, rows)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

  write_as.load = datasets.DATASETS[request.param]
  write_as.suffix = f".{request.param}"
  return write_as


def plain(count, start=0):
  return [
    {"prompt": f"{i}?", "answer": str(i)} for i in range(start, start + count)
  ]


def test_verl_s_columns_are_examples(kind, tmp_path):
  file = kind(tmp_path / "train", VERL)
  for path in (file, tmp_path):
    rows = list(kind.load("train", path=path))
    assert rows == [row | {"answer": str(i + 1)} for i, row in enumerate(VERL)]
  named = kind.load("train", path=file, answer="extra_info.index")
  assert [row["answer"] for row in named] == list(range(5))
  with pytest.raises(ValueError, match=r"row|line 1.*'extra_info.no'"):
    kind.load("train", path=file, answer="extra_info.no")


def test_files_of_a_split_in_a_directory(kind, tmp_path):
  kind(tmp_path / "a/data/train-00000-of-00002", plain(3))
  kind(tmp_path / "a/data/train-00001-of-00002", plain(4, 3))
  kind(tmp_path / "a/data/validation-00000-of-00001", plain(2, 50))
  kind(tmp_path / "b/train/x", plain(1))
  kind(tmp_path / "b/train/y", plain(1, 1))
  kind(tmp_path / "b/validation", plain(1, 7))
  kind(tmp_path / "b/test", plain(1, 9))

  def read(path, split="train", **options):
    return list(kind.load(split, path=tmp_path / path, **options))

  assert read("a") == plain(7)
  assert read("a", "test") == plain(2, 50)
  assert read("b") == plain(2)
  assert read("b", "test") == plain(1, 9)
  assert read("a", size=2) == plain(2)
  assert read("a", size=5) == plain(5)
  for name in ("b/train-1", "b/train", "b/data/train_x"):
    kind(tmp_path / name, plain(1, 2))
    with pytest.raises(ValueError, match="b has .*train.* and .*a pattern: '"):
      read("b")
    (tmp_path / name).with_suffix(kind.suffix).unlink()
  joined = kind.load("train", path=tmp_path / "a")
  assert joined[3] == plain(1, 3)[0] and len(joined) == 7
  kind(tmp_path / "a/data/train-00002-of-00003", plain(1))
  with pytest.raises(ValueError, match="is one of 3 files, and 1 are there"):
    read("a")


def test_a_pattern_is_one_set_of_files(kind, tmp_path):
  kind(tmp_path / "p1", plain(30))
  kind(tmp_path / "p2", plain(30, 30))
  kind(tmp_path / "deep/er/p3", plain(3, 60))
  pattern = str(tmp_path / f"p*{kind.suffix}")
  assert list(kind.load("train", path=pattern)) == plain(60)
  whole = kind.load("train", path=f"{tmp_path}/**/*{kind.suffix}")
  assert len(whole) == 63
  halves = [
    list(kind.load(split, path=pattern, test=0.3))
    for split in ("train", "test")
  ]
  assert sorted(map(str, sum(halves, []))) == sorted(map(str, plain(60)))
  assert all(halves)
  no_file = rf"train{kind.suffix} does not exist.*and data.options.test"
  for split, path, share, message in (
    ("test", pattern, 0, "one set of files without held-out"),
    ("train", str(tmp_path / "q*"), 0, r"q\* is not a file, and matches none"),
    ("train", pattern, 1, "2 files of data.path holds no example"),
    ("train", tmp_path, 0, no_file),
  ):
    with pytest.raises(ValueError, match=message):
      kind.load(split, path=path, test=share)


def test_the_answer_follows_a_mark(kind, tmp_path):
  rows = [{"prompt": "6 * 7?", "answer": "6 * 7 = 42\n#### no #### 42 "}]
  file = kind(tmp_path / "a", rows)
  (row,) = kind.load("train", path=file, answer_after="####")
  assert row == rows[0] | {"answer": "42", "solution": rows[0]["answer"]}
  with pytest.raises(ValueError, match="has no '@'.*answer_after"):
    kind.load("train", path=file, answer_after="@")


def test_columns_are_the_fields_that_are_read(kind, tmp_path):
  rows = [row | {"level": 1, "other": 2} for row in plain(3)]
  columns = ("level", "answer", "prompt")
  found = kind.load("train", path=kind(tmp_path / "a", rows), columns=columns)
  assert list(found) == [row | {"level": 1} for row in plain(3)]


def test_threads_read_the_same_examples(kind, tmp_path, monkeypatch):
  monkeypatch.setattr(parquet, "_ROWS", 7)
  rows = [row | {"text": "x" * i} for i, row in enumerate(plain(99))]
  examples = kind.load("train", path=kind(tmp_path / "a", rows))
  order = [random.Random(1).randrange(99) for _ in range(500)]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(examples.__getitem__, order))
  assert found == [rows[i] for i in order]


def test_rows_are_read_from_the_disk(tmp_path):
  allocated = pyarrow.total_allocated_bytes()
  large = [{"prompt": "x" * 10_000, "answer": "1"}] * 300  # 3 MB
  file = write(tmp_path / "b.parquet", large)
  many = parquet.load("train", path=file)
  assert len(many) == 300 and many[299]["answer"] == "1"
  assert pyarrow.total_allocated_bytes() - allocated < 100_000
  file.unlink()
  assert many[298]["answer"] == "1"


def test_columns_that_are_not_of_json(tmp_path):
  day = datetime.datetime(2026, 1, 2, 3)
  row = plain(1)[0] | {"when": day, "cost": decimal.Decimal("1.5")}
  file = write(tmp_path / "a.parquet", [row | {"image": b"\x89PNG"}])
  with pytest.raises(ValueError, match="row 1: the column 'image' holds bytes"):
    parquet.load("train", path=file)
  columns = ("prompt", "answer", "when", "cost")
  (found,) = parquet.load("train", path=file, columns=columns)
  assert found == row | {"when": "2026-01-02T03:00:00", "cost": "1.5"}
  json.dumps(found)
  with pytest.raises(ValueError, match="no column 'x'; its columns are"):
    parquet.load("train", path=file, columns=("x",))


def test_a_bad_row_is_named(tmp_path):
  """Its checks are those of JSONL's lines."""
  rows = [*plain(2), plain(1)[0] | {"answer": None}, *plain(1)]
  file = write(tmp_path / "a.parquet", rows)
  with pytest.raises(ValueError, match="row 3: .*a number, not None"):
    parquet.load("train", path=file)
  assert len(parquet.load("train", path=file, size=2)) == 2


def test_files_that_are_not_whole(tmp_path):
  rows = [{"prompt": f"{random.random()}", "answer": "1"} for _ in range(500)]
  content = write(tmp_path / "a.parquet", rows).read_bytes()
  bad = tmp_path / "bad.parquet"
  for part in (b"", b"prompt,answer", content[: len(content) // 2]):
    bad.write_bytes(part)
    with pytest.raises(ValueError, match="bad.parquet is no Parquet file"):
      parquet.load("train", path=bad)
  bad.write_bytes(content[:40] + bytes(2000) + content[2040:])
  with pytest.raises(ValueError, match="bad.parquet cannot be read: "):
    parquet.load("train", path=bad)


def test_a_disk_without_room(tmp_path, monkeypatch):
  file = write(tmp_path / "a.parquet", plain(2))

  def full(**_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(tempfile, "TemporaryFile", full)
  with pytest.raises(ValueError, match="No space left.*set TMPDIR to a disk"):
    parquet.load("train", path=file)


def test_a_date_that_python_does_not_have(tmp_path):
  when = pyarrow.array([2**60], pyarrow.timestamp("ms"))
  table = pyarrow.table({"prompt": ["a"], "answer": ["b"], "when": when})
  pq.write_table(table, tmp_path / "x.parquet")
  with pytest.raises(ValueError, match="x.parquet cannot be read: "):
    parquet.load("train", path=tmp_path / "x.parquet")


def test_short_numbers_keep_their_own_digits(tmp_path):
  """Of an answer 0.1 in 32 bits "0.1" is right, in 16 bits too."""
  half, single = pyarrow.float16(), pyarrow.float32()
  columns = {
    "prompt": pyarrow.array(["a", "b"]).cast(pyarrow.string_view()),
    "answer": pyarrow.array([0.1, 1e30], single),
    "half": pyarrow.array(np.array([0.1, np.inf], np.float16), half),
    "list": pyarrow.array([[0.3], None], pyarrow.list_(single)),
    "part": pyarrow.array(
      [{"x": [0.1], "y": "z"}, None],
      pyarrow.struct({"x": pyarrow.list_(single, 1), "y": pyarrow.string()}),
    ),
    "map": pyarrow.array([[("k", 0.7)], []], pyarrow.map_("string", single)),
    "word": pyarrow.array([0.2, 0.2], single).dictionary_encode(),
    "double": pyarrow.array([np.float32(0.1).item(), None]),
  }
  pq.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
  assert list(parquet.load("train", path=tmp_path / "a.parquet")) == [
    {"prompt": "a", "answer": 0.1, "half": 0.1, "list": [0.3]}
    | {"part": {"x": [0.1], "y": "z"}, "map": [["k", 0.7]], "word": 0.2}
    | {"double": 0.10000000149011612},
    {"prompt": "b", "answer": 1e30, "half": float("inf"), "list": None}
    | {"part": None, "map": [], "word": 0.2, "double": None},
  ]


def test_two_columns_of_one_name_are_refused(tmp_path):
  file, one = tmp_path / "a.parquet", pyarrow.array(["1"])
  names = ["prompt", "answer", "x", "x"]
  pq.write_table(pyarrow.table([one] * 4, names=names), file)
  with pytest.raises(ValueError, match="a.parquet has 2 columns 'x'"):
    parquet.load("train", path=file)
  assert parquet.load("train", path=file, columns=names[:2])[0]
  twice = pyarrow.StructArray.from_arrays([one, one], names=["y", "y"])
  pq.write_table(pyarrow.table([one, one, twice], names=names[:3]), file)
  with pytest.raises(ValueError, match="a.parquet cannot be read.* duplicate"):
    parquet.load("train", path=file)
