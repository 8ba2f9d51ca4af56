"""One place for each name: words that other files must import, not repeat."""

import ast
import functools
import pathlib

import pytest

from grpojax.data import examples
from grpojax.runtime.terminal import trackers
from grpojax.training.run import run_directory, run_storage

ROOT = pathlib.Path(__file__).resolve().parents[1] / "grpojax"
OWNERS = {
  examples.MARK: "data/examples.py",
  run_directory.METRICS: "training/run/run_directory.py",
  run_directory.SAMPLES: "training/run/run_directory.py",
  run_directory.FAILURES: "training/run/run_directory.py",
  trackers.TENSORBOARD: "runtime/terminal/trackers.py",
  run_directory.TRACKED: "training/run/run_directory.py",
  run_storage.CHECKPOINTS: "training/run/run_storage.py",
  run_storage.REFERENCE: "training/run/run_storage.py",
  run_directory.CURVE: "training/run/run_directory.py",
  run_directory.REWARDS: "training/run/run_directory.py",
  run_directory.EVALUATIONS: "training/run/run_directory.py",
  run_directory.REPORT: "training/run/run_directory.py",
}


@functools.cache
def texts(path):
  """All texts in a file's code, those of f-strings too; docstrings are none."""
  tree = ast.parse(path.read_text())
  said = {
    id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
  }
  return [
    node.value
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant)
    and isinstance(node.value, str)
    and id(node) not in said
  ]


@pytest.mark.parametrize("name", OWNERS)
def test_a_name_stands_in_one_file(name):
  files = {
    str(path.relative_to(ROOT))
    for path in ROOT.rglob("*.py")
    # In a sentence a plain word is a word, and no file.
    if any(
      name == text or (name in text.split() and not name.isalpha())
      for text in texts(path)
    )
  }
  assert files == {OWNERS[name]}


def test_splits_stand_in_one_file():
  for path in ROOT.rglob("*.py"):
    tuples = [
      n
      for n in ast.walk(ast.parse(path.read_text()))
      if isinstance(n, ast.Tuple)
    ]
    values = [[getattr(e, "value", None) for e in n.elts] for n in tuples]
    if str(path.relative_to(ROOT)) != "data/examples.py":
      assert [*examples.SPLITS] not in values, path
