"""The interface of all data sets; see `grpojax.data.datasets`."""

import inspect
import pathlib

import pytest

from grpojax.data import datasets
from grpojax.data.examples import MARK, SPLITS

SAMPLE = str(pathlib.Path(__file__).parent / "gsm8k")
PATHS = {"gsm8k": SAMPLE, "jsonl": SAMPLE}
OPTIONS = {"jsonl": {"prompt": "question"}}
# Tested in files of their own.
ELSEWHERE = (datasets.HUB, "parquet")


def load(name, split, **settings):
  path = PATHS.get(name, "")
  options = OPTIONS.get(name)
  return datasets.load(name, split, path, options, **settings)


@pytest.mark.parametrize("name", sorted({*datasets.DATASETS} - {*ELSEWHERE}))
@pytest.mark.parametrize("split", SPLITS)
def test_random_access_to_examples(name, split):
  examples = load(name, split, size=3, seed=1)
  assert len(examples) == 3
  again = load(name, split, size=3, seed=1)
  for i in (2, 0, 1):
    assert examples[i] == again[i]
    assert isinstance(examples[i]["prompt"], str) and examples[i]["prompt"]
    assert isinstance(examples[i]["answer"], str) and examples[i]["answer"]
    solution = examples[i].get("solution")
    if solution is not None:
      assert solution.rpartition(MARK)[2].strip() == examples[i]["answer"]
  for wrong in (3, -1):
    with pytest.raises(IndexError):
      examples[wrong]


@pytest.mark.parametrize("name", datasets.DATASETS)
def test_unknown_splits_names_options_and_paths_are_refused(name):
  with pytest.raises(ValueError, match="choose one of"):
    load(name, "valid")
  with pytest.raises(ValueError, match="'gsm8': use one of arithmetic, gsm8k"):
    datasets.load("gsm8", "train")
  with pytest.raises(ValueError, match="data.options.colour.* takes .*size"):
    datasets.load(name, "train", PATHS.get(name, ""), {"colour": 1})
  if "path" not in inspect.signature(datasets.DATASETS[name]).parameters:
    with pytest.raises(ValueError, match="has no files"):
      datasets.load(name, "train", "somewhere")


WRONG = [
  *[(name, "size", value) for name in datasets.DATASETS for value in ("x", 0)],
  *[("arithmetic", "difficulty", x) for x in ("hard", (1.5, 2), True)],
  *[("jsonl", key, 3) for key in ("prompt", "answer", "messages")],
  *[("jsonl", "size", 1.5), ("huggingface", "test", "half")],
]


@pytest.mark.parametrize("name, key, value", WRONG)
def test_options_of_another_type_are_refused(name, key, value):
  with pytest.raises(
    ValueError, match=f"^--config.data.options.{key} = .*must be "
  ):
    datasets.load(name, "train", PATHS.get(name, ""), {key: value})


def test_unknown_annotations_accept_any_option(monkeypatch):
  def load(split, *, size: "int | None" = None, rate: float, x=1, **more):
    return [size, rate, more]

  monkeypatch.setitem(datasets.DATASETS, "mine", load)
  options = {"size": "7", "rate": 2, "x": [set()], "colour": 1}
  loaded = datasets.load("mine", "train", "", options)
  assert loaded == ["7", 2, {"colour": 1}]
