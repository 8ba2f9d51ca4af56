"""Import of users' Python files."""

import importlib
import os
import pathlib
import pickle
import sys
import typing

import pytest

from grpojax.rewards import functions, worker
from grpojax.runtime.files import user_code

ORDINARY = """
from __future__ import annotations
import dataclasses, enum, pathlib, typing
import near_by

class Kind(enum.Enum):
  RIGHT = 1

@dataclasses.dataclass
class Result:
  value: float
  kind: Kind = Kind.RIGHT

TEXT = (pathlib.Path(__file__).parent / "answer.txt").read_text()
COUNT = []

def reward(prompt, completion, example):
  import later
  COUNT.append(1)
  return Result(near_by.VALUE + later.VALUE + float(TEXT)).value
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
  """Writes files by name; restores modules and paths after the test."""
  monkeypatch.setattr(sys, "path", [*sys.path])
  before = set(sys.modules)

  def files(**texts):
    for name, text in texts.items():
      path = tmp_path / name.replace("__", "/").replace("/init", "/__init__")
      path.parent.mkdir(parents=True, exist_ok=True)
      path.with_suffix(path.suffix or ".py").write_text(text)
    return tmp_path

  yield files
  for name in set(sys.modules) - before:
    del sys.modules[name]


def test_a_file_is_loaded_once_as_a_module(write):
  home = write(reward=ORDINARY, near_by="VALUE = 1.0", later="VALUE = 2.0")
  (home / "answer.txt").write_text("4")
  module = user_code.load(str(home / "reward.py"))
  assert module.reward("", "", {}) == 7
  result = module.Result(3.0)
  assert pickle.loads(pickle.dumps(result)) == result
  hints = typing.get_type_hints(module.Result)
  assert hints == {"value": float, "kind": module.Kind}
  # The same module by another path.
  again = user_code.load(f"{home}/../{home.name}/reward.py")
  assert again is module and again.COUNT == [1]
  assert sys.path[0] != str(home)


def test_files_with_the_same_name_are_separate_modules(write):
  home = write(a__reward="VALUE = 1", b__reward="VALUE = 2")
  values = [user_code.load(str(home / x / "reward.py")).VALUE for x in "ab"]
  assert values == [1, 2]


def test_a_file_in_a_package_is_its_module(write):
  home = write(
    ours__init="",
    ours__inner__init="",
    ours__base="VALUE = 5",
    ours__inner__reward="from ..base import VALUE\nfrom ours import base",
  )
  module = user_code.load(str(home / "ours" / "inner" / "reward.py"))
  assert module.VALUE == module.base.VALUE == 5
  assert module.__name__ == "ours.inner.reward"
  elsewhere = write(more__ours__init="", more__ours__inner__init="")
  other = elsewhere / "more" / "ours" / "inner" / "reward.py"
  other.write_text("VALUE = 6")
  with pytest.raises(ImportError, match="is imported as ours.inner.reward"):
    user_code.load(str(other))


@pytest.mark.parametrize("line", ["import both", "from both import f"])
def test_ambiguous_imports_are_refused(write, line):
  helper = "def f():\n  pass\n"
  home = write(a__both=helper, b__both=helper, a__one=line, b__two=line)
  user_code.load(str(home / "a" / "one.py"))
  with pytest.raises(ImportError, match="imports both, and there are two"):
    user_code.load(str(home / "b" / "two.py"))


def test_a_file_that_failed_can_be_loaded_again(write):
  home = write(needs="VALUE = open(__file__ + '.txt').read()")
  for _ in range(2):
    with pytest.raises(FileNotFoundError):
      user_code.load(str(home / "needs.py"))
  (home / "needs.py.txt").write_text("1")
  assert user_code.load(str(home / "needs.py")).VALUE == "1"
  with pytest.raises(OSError, match="there is no file"):
    user_code.load(str(home / "missing.py"))
  with pytest.raises(ImportError, match="no Python file: .* end with .py"):
    user_code.load(str(home / "needs.py.txt"))


def test_sources_are_the_file_and_its_imports(write, monkeypatch):
  home = write(
    reward="import json, near, missing\ndef f():\n  from sub import deep",
    near="import reward",  # a circle
    other="VALUE = 1",
    sub__init="",
    sub__deep="from .base import VALUE\nfrom . import more",
    sub__base="VALUE = 1",
    sub__more="this is no Python",
  )
  monkeypatch.chdir(home)
  names = {"reward.py", "near.py"}
  package = {f"sub/{x}.py" for x in ("__init__", "deep", "base", "more")}
  texts = user_code.sources("reward.py")
  assert texts.keys() == names | package
  assert texts["near.py"] == "import reward"
  assert user_code.sources("sub/deep.py").keys() == package
  texts = user_code.sources("../" + home.name + "/near.py")
  assert {pathlib.PurePath(x).name for x in texts} >= names
  assert all(x.startswith("../") for x in texts)
  monkeypatch.syspath_prepend(str(home))
  assert user_code.sources("other") == {}  # not imported yet
  importlib.import_module("other")
  assert user_code.sources("other") == {"other.py": "VALUE = 1"}
  for place in ("no.py", "pytest", "grpojax.rewards.math"):
    assert user_code.sources(place) == {}


def test_user_code_has_its_own_working_directory(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(user_code, "_directory", [os.curdir])
  (tmp_path / "beside").mkdir()
  (tmp_path / "beside" / "answer.txt").write_text("7")
  lines = [
    "import os, pathlib",
    "os.chdir('beside')",
    "def reward(prompt, completion, example):",
    "  value = float(pathlib.Path('answer.txt').read_text())",
    "  os.chdir('..') if prompt == 'leave' else None",
    "  return value",
  ]
  (tmp_path / "moves.py").write_text("\n".join(lines))
  reward = functions.resolve("moves.py:reward")
  items = [("stay", "", {}), ("leave", "", {}), ("stay", "", {})]
  first, second, third = worker.evaluate(reward, items)
  assert os.getcwd() == str(tmp_path)
  assert first.value == second.value == 7 and "answer.txt" in third.error
  (tmp_path / "beside" / "answer.txt").unlink()
  (tmp_path / "beside").rmdir()  # the directory of the user's code
  assert worker.evaluate(lambda *_: 1.0, items[:1])[0].value == 1
