"""JSONL and Parquet files: examples, splits and errors."""

import datetime
import decimal
import json
import random
import tempfile
import types

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet as pq

from grpojax.data import datasets, jsonl, parquet

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
ROWS = [
  {"prompt": "6 * 7?", "answer": "42", "level": 1, "tags": ["a", {"b": None}]},
  {"prompt": "Ünïcode \u2028 → 𝟙?", "answer": "ja"},
  {"prompt": [{"role": "user", "content": "Hi"}], "answer": "-1.50"},
]
GOOD = '{"prompt": "x", "answer": "1"}'


def plain(count, start=0):
  return [
    {"prompt": f"{i}?", "answer": str(i)} for i in range(start, start + count)
  ]


def write(file, rows, end="\n"):
  """Writes rows in the format of the file's suffix."""
  file.parent.mkdir(exist_ok=True, parents=True)
  if file.suffix == ".parquet":
    pq.write_table(pyarrow.Table.from_pylist(rows), file)
  else:
    file.write_text("".join(json.dumps(row) + end for row in rows))
  return file


@pytest.fixture(params=["jsonl", "parquet"])
def kind(request):
  """A file format; all formats have the same options, rows and errors."""
  suffix = f".{request.param}"
  load = datasets.DATASETS[request.param]
  make = lambda path, rows: write(path.with_suffix(suffix), rows)
  return types.SimpleNamespace(suffix=suffix, load=load, write=make)


def test_rows_for_verl_are_examples(kind, tmp_path):
  file = kind.write(tmp_path / "train", VERL)
  for path in (file, tmp_path):
    rows = list(kind.load("train", path=path))
    assert rows == [row | {"answer": str(i + 1)} for i, row in enumerate(VERL)]
  named = kind.load("train", path=file, answer="extra_info.index")
  assert [row["answer"] for row in named] == list(range(5))
  with pytest.raises(ValueError, match=r"row|line 1.*'extra_info.no'"):
    kind.load("train", path=file, answer="extra_info.no")


def test_fields_can_have_other_names(tmp_path):
  turns = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "6 * 7?"},
  ]
  rows = [
    {"question": "1?", "final": 42, "answer": "long"},
    {"chat": turns, "final": 0.5, "question_id": 3},
    {"question": "3?", "final": "", "chat": turns},
  ]
  file = write(tmp_path / "a.jsonl", rows)
  names = {"prompt": "question", "answer": "final", "messages": "chat"}
  assert list(jsonl.load("train", path=file, **names)) == [
    rows[0] | {"prompt": "1?", "answer": 42},
    rows[1] | {"prompt": turns, "answer": 0.5},
    rows[2] | {"prompt": "3?", "answer": ""},
  ]
  write(file, [{"prompt": "x"}])
  assert list(jsonl.load("train", path=file, answer="")) == [{"prompt": "x"}]


def test_a_directory_has_files_for_each_split(kind, tmp_path):
  for name, count, start in (
    ("a/data/train-00000-of-00002", 3, 0),
    ("a/data/train-00001-of-00002", 4, 3),
    ("a/data/validation-00000-of-00001", 2, 50),
    ("b/train/x", 1, 0),
    ("b/train/y", 1, 1),
    ("b/validation", 1, 7),
    ("b/test", 1, 9),
  ):
    kind.write(tmp_path / name, plain(count, start))

  def read(path, split="train", **options):
    return list(kind.load(split, path=tmp_path / path, **options))

  assert read("a") == plain(7)
  assert read("a", "test") == plain(2, 50)
  assert read("b") == plain(2)
  assert read("b", "test") == plain(1, 9)
  assert read("a", size=2) == plain(2)
  assert read("a", size=5) == plain(5)
  for name in ("b/train-1", "b/train", "b/data/train_x"):
    kind.write(tmp_path / name, plain(1, 2))
    with pytest.raises(ValueError, match="b has .*train.* and .*a pattern, '"):
      read("b")
    (tmp_path / name).with_suffix(kind.suffix).unlink()
  joined = kind.load("train", path=tmp_path / "a")
  assert joined[3] == plain(1, 3)[0] and len(joined) == 7
  kind.write(tmp_path / "a/data/train-00002-of-00003", plain(1))
  with pytest.raises(ValueError, match="is one of 3 files, but 1 exist"):
    read("a")


def test_a_pattern_matches_several_files(kind, tmp_path):
  kind.write(tmp_path / "p1", plain(30))
  kind.write(tmp_path / "p2", plain(30, 30))
  kind.write(tmp_path / "deep/er/p3", plain(3, 60))
  pattern = f"{tmp_path}/p*{kind.suffix}"
  assert list(kind.load("train", path=pattern)) == plain(60)
  assert len(kind.load("train", path=f"{tmp_path}/**/*{kind.suffix}")) == 63
  halves = [
    list(kind.load(split, path=pattern, test=0.3))
    for split in ("train", "test")
  ]
  assert sorted(map(str, sum(halves, []))) == sorted(map(str, plain(60)))
  assert all(halves)
  options = {"path": tmp_path / f"p1{kind.suffix}"}
  options["test"] = f"{tmp_path}/p[2]{kind.suffix}"
  assert list(kind.load("train", **options)) == plain(30)
  assert list(kind.load("test", **options)) == plain(30, 30)
  with pytest.raises(ValueError, match="nowhere matches no file"):
    kind.load("test", **options | {"test": "nowhere"})


@pytest.mark.parametrize(
  "split, path, share, message",
  [
    ("train", "", 0, "needs data.path"),
    ("train", "/dev/null", 0, "/dev/null matches no file"),
    ("train", "DIR/q*", 0, r"q\* matches no file"),
    ("train", "DIR", 0, "has no train.SUFFIX, .*and data.options.test"),
    ("train", "DIR", 0.1, "for a file or a pattern"),
    ("train", "DIR/p1.SUFFIX", 1.5, "must be 0 to 1"),
    ("train", "DIR/p*", 1, "no 'train' row among the 6 of 2 files"),
    ("train", "DIR/p1.SUFFIX", 1, "no 'train' row among the 3 of .*p1.SUFFIX"),
    ("test", "DIR/p*", 0, "has no test split.*0.05"),
  ],
)
def test_missing_files_and_splits_are_refused(
  kind, tmp_path, split, path, share, message
):
  kind.write(tmp_path / "p1", plain(3))
  kind.write(tmp_path / "p2", plain(3))
  path = path.replace("DIR", str(tmp_path)).replace(".SUFFIX", kind.suffix)
  with pytest.raises(ValueError, match=message.replace(".SUFFIX", kind.suffix)):
    kind.load(split, path=path, test=share)


def test_the_answer_can_follow_a_mark(kind, tmp_path):
  rows = [{"prompt": "6 * 7?", "answer": "6 * 7 = 42\n#### no #### 42 "}]
  file = kind.write(tmp_path / "a", rows)
  (row,) = kind.load("train", path=file, answer_after="####")
  assert row == rows[0] | {"answer": "42", "solution": rows[0]["answer"]}
  with pytest.raises(ValueError, match="has no '@'.*answer_after"):
    kind.load("train", path=file, answer_after="@")


def test_only_the_listed_columns_are_read(kind, tmp_path):
  rows = [row | {"level": 1, "other": 2} for row in plain(3)]
  columns = ("level", "answer", "prompt")
  few = kind.load(
    "train", path=kind.write(tmp_path / "a", rows), columns=columns
  )
  assert list(few) == [row | {"level": 1} for row in plain(3)]


def test_a_share_is_held_out_by_prompt(tmp_path):
  rng = random.Random(0)
  rows = [{"prompt": f"{i % 400}?", "answer": str(i)} for i in range(1200)]
  rows += [
    {"messages": [{"role": "user", "content": str(i)}], "answer": "1"}
    for i in range(100)
  ]
  file = write(tmp_path / "a.jsonl", rows)
  other = tmp_path / "b.jsonl"

  def split(name, share):
    return list(jsonl.load(name, path=file, test=share))

  train = split("train", 0.2)
  test = split("test", 0.2)
  keys = [{json.dumps(x["prompt"]) for x in s} for s in (train, test)]
  assert not keys[0] & keys[1] and len(keys[0] | keys[1]) == 500
  assert len(train) + len(test) == 1300
  assert 0.14 < len(keys[1]) / 500 < 0.26
  # Whitespace around a prompt does not matter.
  write(other, [{"prompt": f"{i}? ", "answer": ""} for i in range(400)])
  again = jsonl.load("test", path=other, test=0.2)
  texts = {x["prompt"].strip() for x in again}
  assert texts == {x["prompt"] for x in test if "?" in x["prompt"]}
  # Neither the order nor other rows matter.
  rng.shuffle(rows)
  write(file, rows[:700])
  chosen = {json.dumps(x["prompt"]) for x in split("test", 0.2)}
  assert chosen <= keys[1]
  assert len(split("test", 1)) == 700


def test_examples_are_copied_to_the_disk(kind, tmp_path, monkeypatch):
  monkeypatch.setattr(parquet, "_ROWS", 7)  # per batch
  allocated = pyarrow.total_allocated_bytes()
  large = [row | {"text": "x" * 10_000} for row in plain(300)]  # 3 MB
  file = kind.write(tmp_path / "b", large)
  many = kind.load("train", path=file)
  assert many[299] == large[299]
  assert pyarrow.total_allocated_bytes() - allocated < 100_000
  file.unlink()
  assert list(many) == large


def test_a_full_disk_gets_advice(kind, tmp_path, monkeypatch):
  def full(**_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(tempfile, "TemporaryFile", full)
  with pytest.raises(ValueError, match="No space left.*set TMPDIR to a disk"):
    kind.load("train", path=kind.write(tmp_path / "a", plain(2)))


# JSONL


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n \t\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("cut", [False, True])
def test_line_ends_and_byte_order_marks(start, end, cut, tmp_path):
  lines = [json.dumps(row, ensure_ascii=False) + end for row in ROWS]
  content = start + "".join(lines).encode()
  file = tmp_path / "data.jsonl"
  file.write_bytes(content.rstrip() if cut else content)
  assert list(jsonl.load("train", path=str(file))) == ROWS
  assert list(jsonl.load("train", path=file, size=2)) == ROWS[:2]


@pytest.mark.parametrize(
  "line, text",
  [
    ('{"prompt": "x" 3}', "Expecting ',' delimiter at character 16$"),
    ('["prompt"]', "must be a JSON object, not list"),
    ("[" * 100_000, "recursion"),
    ('{"prompt": "x", "answer": NaN}', "NaN is not valid JSON"),
    ('{"prompt": "x", "answer": 1e999}', "'answer' is inf: must be finite"),
    ('{"prompt": "x", "answer": %s}' % ("1" * 5000), "4300 digits"),
    ('{"prompt": "x", "answer": "1", "y": {"z": 1, "z": 1}}', "the key 'z'"),
    ('{"answer": "1"}', r"no field 'prompt'.*'answer'"),
    ('{"prompt": " ", "answer": "1"}', "nonempty"),
    ('{"prompt": "x", "answer": "1\\udc00"}', "'answer' is not valid Unicode"),
    (
      '{"prompt": [{"role": "user", "content": "\\ud83d "}], "answer": "1"}',
      "prompt: a message's content is not valid Unicode: character 0,",
    ),
    ('{"prompt": 3, "answer": "1"}', "text or a list"),
    ('{"prompt": ["x"], "answer": "1"}', "a message must be an object"),
    ('{"prompt": [{"role": "user"}], "answer": "1"}', "message's content"),
    (
      '{"messages": [{"role": "assistant", "content": "x"}], "answer": "1"}',
      "the model should write",
    ),
    ('{"prompt": "x"}', "data.options.answer to its field"),
    ('{"prompt": "x", "answer": true}', "not True"),
    ('{"prompt": "x", "answer": ["1"]}', "text or a number"),
    (b'{"prompt": "\xff", "answer": "1"}', "byte 13 of the line.*UTF-8"),
  ],
)
def test_opening_a_file_finds_its_bad_lines(line, text, tmp_path):
  file = tmp_path / "a.jsonl"
  line = line if isinstance(line, bytes) else line.encode()
  file.write_bytes(b"\n".join([GOOD.encode(), b"", line, GOOD.encode()]))
  with pytest.raises(ValueError, match=f"(?s)a.jsonl, line 3: .*{text}"):
    jsonl.load("train", path=file)
  assert len(jsonl.load("train", path=file, size=1)) == 1


@pytest.mark.parametrize(
  "content, advice",
  [
    (f"[\n{GOOD}\n]", "a JSON array, convert it to JSONL"),
    ('{\n"prompt": "x"\n}', "JSON over several lines, convert it to JSONL"),
    ("prompt,answer\nx,1", "CSV, convert it to JSONL"),
    ("PAR1\x15", "data.name = 'parquet'"),
  ],
)
def test_other_formats_get_advice(content, advice, tmp_path):
  (tmp_path / "a.json").write_text(content)
  with pytest.raises(ValueError, match=advice):
    jsonl.load("train", path=tmp_path / "a.json")


# Parquet


def test_columns_of_types_outside_json(tmp_path):
  day = datetime.datetime(2026, 1, 2, 3)
  row = plain(1)[0] | {"when": day, "cost": decimal.Decimal("1.5")}
  file = write(tmp_path / "a.parquet", [row | {"image": b"\x89PNG"}])
  with pytest.raises(ValueError, match="row 1: the column 'image' holds bytes"):
    parquet.load("train", path=file)
  columns = ("prompt", "answer", "when", "cost")
  (example,) = parquet.load("train", path=file, columns=columns)
  assert example == row | {"when": "2026-01-02T03:00:00", "cost": "1.5"}
  with pytest.raises(ValueError, match="no column 'x'; its columns are"):
    parquet.load("train", path=file, columns=("x",))


def test_damaged_files_are_refused(tmp_path):
  bad = tmp_path / "bad.parquet"
  when = pyarrow.array([2**60], pyarrow.timestamp("ms"))  # outside of Python's
  pq.write_table(pyarrow.table({"prompt": ["a"], "answer": when}), bad)
  with pytest.raises(ValueError, match="bad.parquet cannot be read: "):
    parquet.load("train", path=bad)
  rows = [{"prompt": f"{random.random()}", "answer": "1"} for _ in range(500)]
  content = write(tmp_path / "a.parquet", rows).read_bytes()
  for part in (b"", b"prompt,answer", content[: len(content) // 2]):
    bad.write_bytes(part)
    with pytest.raises(ValueError, match="bad.parquet is not a Parquet file"):
      parquet.load("train", path=bad)
  bad.write_bytes(content[:40] + bytes(2000) + content[2040:])
  with pytest.raises(ValueError, match="bad.parquet cannot be read: "):
    parquet.load("train", path=bad)


def test_short_floats_keep_their_shortest_digits(tmp_path):
  half = pyarrow.float16()
  single = pyarrow.float32()
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


def test_repeated_column_names_are_refused(tmp_path):
  file = tmp_path / "a.parquet"
  column = pyarrow.array(["1"])
  names = ["prompt", "answer", "x", "x"]
  pq.write_table(pyarrow.table([column] * 4, names=names), file)
  with pytest.raises(ValueError, match="a.parquet has 2 columns 'x'"):
    parquet.load("train", path=file)
  assert parquet.load("train", path=file, columns=names[:2])[0]
  twice = pyarrow.StructArray.from_arrays([column] * 2, names=["y", "y"])
  pq.write_table(pyarrow.table([column] * 2 + [twice], names=names[:3]), file)
  with pytest.raises(ValueError, match="a.parquet cannot be read.* duplicate"):
    parquet.load("train", path=file)
