"""Data sets of the Hub, read by the real library from a local server."""

import contextlib
import io
import json
import sys

import hub_server
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet as pq
from run_helpers import start

from grpojax.data import datasets

LATER = "b" * 40
README = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files:
  - {split: train, path: other/*}
---
"""


def table(rows):
  file = io.BytesIO()
  pq.write_table(pyarrow.Table.from_pylist(rows), file)
  return file.getvalue()


def sums(count, plus):
  return [
    {"question": f"{i} + {plus}?", "answer": f"so\n#### {i + plus}", "n": i}
    for i in range(count)
  ]


def served():
  own = hub_server.Hub()
  files = {
    "README.md": README,
    "main/train-00000-of-00002.parquet": table(sums(30, 1)),
    "main/train-00001-of-00002.parquet": table(sums(10, 100)),
    "main/test-00000-of-00001.parquet": table(sums(4, 2)),
    "other/a.parquet": table([{"prompt": "x", "answer": np.float32(0.1)}]),
  }
  own.add("org/sums", files, kind="datasets")
  lines = b'{"prompt": "1?", "answer": 1}\n{"prompt": "2?", "answer": 2}\n'
  own.add("org/lines", {"train.jsonl": lines}, kind="datasets")
  lines = b'{"prompt": "other", "answer": 3}\n'
  own.add("org/lines", {"train.jsonl": lines}, LATER, kind="datasets")
  own.heads["datasets/org/lines"]["main"] = LATER
  own.add("org/script", {"script.py": b"raise SystemExit"}, kind="datasets")
  tar = {"data/train.tar": b"\0" * 10240}
  own.add("org/tar", tar, kind="datasets")
  return own


# In another process, because the library reads its settings when imported.
ASK = """
import json, sys
from grpojax.data import datasets
for line in sys.stdin:
  split, path, options = json.loads(line)
  try:
    answer = list(datasets.load(datasets.HUB, split, path, options))
  except ValueError as error:
    answer = str(error)
  print("> " + json.dumps(answer), flush=True)
"""


@contextlib.contextmanager
def asking(home, **environ):
  environ |= {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
  with start(ASK, **environ) as process:

    def ask(split, path, **options):
      process.stdin.write(json.dumps([split, path, options]) + "\n")
      process.stdin.flush()
      line = process.stdout.readline()
      assert line.startswith("> "), line  # no other output
      return json.loads(line[2:])

    yield ask
    assert process.communicate() == ("", "")


GSM8K = {"configuration": "main", "prompt": "question", "answer_after": "####"}


@pytest.mark.slow
def test_data_sets_of_the_hub(tmp_path):
  pytest.importorskip("datasets")
  own = served()
  with (
    hub_server.serve(own) as address,
    asking(tmp_path, HF_ENDPOINT=address) as ask,
  ):
    train = ask("train", "org/sums", **GSM8K)
    assert train == [
      row
      | {"prompt": row["question"], "solution": row["answer"]}
      | {"answer": row["answer"].split()[-1]}
      for row in [*sums(30, 1), *sums(10, 100)]
    ]
    assert len(ask("test", "org/sums", **GSM8K)) == 4
    assert ask("train", "org/sums", **GSM8K, size=3) == train[:3]
    held_out = ask("test", "org/sums", **GSM8K, test=0.3)
    whole = held_out + ask("train", "org/sums", **GSM8K, test=0.3)
    assert held_out and sorted(map(str, whole)) == sorted(map(str, train))
    few = ask("test", "org/sums", **GSM8K, columns=["question", "answer"])
    assert few[0].keys() == {"question", "prompt", "answer", "solution"}
    (row,) = ask("train", "org/sums", configuration="other")
    assert row == {"prompt": "x", "answer": 0.1}
    (row,) = ask("train", "org/lines")
    assert row == {"prompt": "other", "answer": 3}
    old = ask("train", "org/lines", revision=hub_server.COMMIT)
    assert [row["answer"] for row in old] == [1, 2]
    for split, path, options, text in REFUSED:
      message = ask(split, path, **options)
      assert isinstance(message, str) and text in message, message
      assert "\n" not in message
  with asking(tmp_path, HF_HUB_OFFLINE="1") as ask:
    old = ask("train", "org/lines", revision=hub_server.COMMIT)
    assert isinstance(old, list), old
    assert [row["answer"] for row in old] == [1, 2]
    assert "HF_HUB_OFFLINE" in ask("train", "org/never")
    assert "HF_HUB_OFFLINE" in ask("train", "org/lines", revision="c" * 40)
    assert len(ask("test", "org/sums", **GSM8K)) == 4
  assert not [path for _, path in own.log if path.endswith(".tar")]


MAIN = {"configuration": "main"}
REFUSED = [
  ("train", "org/sums", {}, "data.options.configuration selects"),
  ("train", "org/sums", {"configuration": "x"}, "data.options.configuration"),
  ("test", "org/lines", {}, "no split 'test', only ['train']: set data.opt"),
  ("train", "org/none", {}, "no data set 'org/none' with a revision 'main'"),
  ("train", "org/lines", {"revision": "v9"}, "with a revision 'v9'"),
  ("train", "org/script", {}, "data set org/script"),
  ("train", "org/tar", {}, "which may hold code"),
  ("train", "org/sums", MAIN, "train split, row 1: no field 'prompt'"),
  ("train", "org/sums", MAIN | {"columns": ["x"]}, "no column 'x'; its col"),
]


@pytest.mark.parametrize("path", ["", "gsm8k", "json", "../x", "a/b/c", "/a/b"])
def test_paths_must_be_names_of_the_hub(path):
  with pytest.raises(ValueError, match="ORG/NAME of a data set"):
    datasets.load(datasets.HUB, "train", path, {"size": 3})


def test_local_paths_are_refused(tmp_path, monkeypatch):
  (tmp_path / "org/sums").mkdir(parents=True)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ValueError, match="is a local path: set data.name"):
    datasets.load(datasets.HUB, "train", "org/sums")


def test_a_missing_library_gets_advice(monkeypatch):
  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(ValueError, match=r"pip install 'grpojax\[datasets\]'"):
    datasets.load(datasets.HUB, "train", "org/sums")
