"""GSM8K, on 32 problems per split from the files of OpenAI (MIT)."""

import fcntl
import importlib
import pathlib
import sys
import types

import pytest
from run_helpers import start

from grpojax.data import gsm8k
from grpojax.data.examples import SPLITS
from grpojax.rewards.exact import exact_answer

SAMPLE = pathlib.Path(__file__).parent / "gsm8k"


def test_problems_have_the_order_of_the_file():
  train, test = (gsm8k.load(s, path=SAMPLE) for s in SPLITS)
  assert len(train) == len(test) == 32
  assert train[0]["prompt"].startswith("Natalia sold clips to 48")
  assert train[0]["answer"] == "72" and test[0]["answer"] == "18"
  for example in train:
    assert exact_answer("", example["solution"], example) == 1.0


def test_bad_lines_and_directories_are_refused(tmp_path):
  line = '{"question": "How many?", "answer": "three"}'
  good = '{"question": "How many?", "answer": "One. #### 1"}'
  (tmp_path / "test.jsonl").write_text(f"{good}\n\n{line}\n")
  assert gsm8k.load("test", path=tmp_path, size=1)[0]["answer"] == "1"
  with pytest.raises(ValueError, match="test.jsonl, line 3"):
    gsm8k.load("test", path=tmp_path)
  with pytest.raises(ValueError, match="no GSM8K in.*train.jsonl.*data.path"):
    gsm8k.load("train", path=tmp_path)


def test_a_missing_library_gets_advice(monkeypatch):
  for name in ("tensorflow_datasets", "tensorflow_datasets.text"):
    monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(
    ValueError, match="pip install tensorflow-datasets.*data.path"
  ):
    gsm8k.load("train")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  """A directory prepared by TensorFlow Datasets from the sample."""
  pytest.importorskip("tensorflow_datasets")
  original = importlib.import_module("tensorflow_datasets.text.gsm8k.gsm8k")
  registered = importlib.import_module("tensorflow_datasets.core.registered")
  with registered.skip_registration():

    class Gsm8k(original.Gsm8k):
      def _split_generators(self, manager):
        return {
          split: self._generate_examples(SAMPLE / f"{split}.jsonl")
          for split in SPLITS
        }

  path = tmp_path_factory.mktemp("tfds")
  Gsm8k(data_dir=path, file_format="array_record").download_and_prepare()
  return path


def contents(examples):
  return sorted(tuple(sorted(example.items())) for example in examples)


@pytest.mark.parametrize(
  "below, split", [("", "train"), ("gsm8k", "test"), ("gsm8k/1.0.0", "train")]
)
def test_both_local_copies_hold_the_same_problems(below, split, prepared):
  loaded = gsm8k.load(split, path=prepared / below)
  assert contents(loaded) == contents(gsm8k.load(split, path=SAMPLE))
  assert list(gsm8k.load(split, path=prepared / below, size=5)) == [*loaded][:5]


@pytest.mark.slow
def test_the_default_directory_needs_no_tensorflow_and_no_network(prepared):
  code = """
    import socket, sys
    def refuse(*args): raise AssertionError("the network was tried")
    socket.socket.connect = refuse
    from grpojax.data import gsm8k
    print(len(gsm8k.load("test")), "tensorflow" in sys.modules)
  """
  program = start(code, TFDS_DATA_DIR=str(prepared))
  assert program.communicate() == ("32 False\n", "")


def test_a_single_process_prepares_the_data(tmp_path, monkeypatch):
  log = []

  class Builder:
    data_dir = str(tmp_path / "gsm8k" / "1.0.0")

    def __init__(self, name, file_format):
      assert (name, file_format) == ("gsm8k", "array_record")

    def is_prepared(self):
      return "prepared" in log

    def download_and_prepare(self):
      with open(tmp_path / "gsm8k.lock") as file:
        with pytest.raises(BlockingIOError):
          fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      log.append("prepared")

  def refuse(*args, **options):
    raise requests.ConnectionError("no route")

  monkeypatch.setattr(
    gsm8k, "_tfds", lambda: types.SimpleNamespace(builder=Builder)
  )
  requests = pytest.importorskip("requests")
  monkeypatch.setattr(requests, "head", refuse)
  with pytest.raises(ValueError, match=r"(?s)no route.*data\.path"):
    gsm8k._prepared()
  monkeypatch.setattr(requests, "head", lambda *args, **options: None)
  for _ in range(2):
    assert gsm8k._prepared().is_prepared()
  assert log == ["prepared"]
  # Another process prepares it while this process waits for the lock.
  log.clear()
  monkeypatch.setattr(fcntl, "flock", lambda *_: log.append("prepared"))
  gsm8k._prepared()
  assert log == ["prepared"]


def test_a_format_without_random_access_is_refused(prepared, tmp_path):
  source = prepared / "gsm8k" / "1.0.0"
  for name in ("features.json", "dataset_info.json"):
    text = (source / name).read_text().replace("array_record", "tfrecord")
    (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match="format tfrecord.*array_record"):
    gsm8k.load("train", path=tmp_path)
