"""Fixtures for tests of the programs: a tiny model and a finished run."""

import contextlib
import importlib.util
import io
import pathlib
import sys
from typing import NamedTuple

import pytest
from ml_collections import ConfigDict

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent / "grpojax"
READERS = [PACKAGE / "train.py", *sorted((PACKAGE / "training").glob("*.py"))]


class ToyRun(NamedTuple):
  """A finished training run.

  Attributes:
    argv: its command line.
    home: the working directory that it was started from.
    directory: the run directory.
    output: what it printed.
    read: the settings that the programs read, as dotted paths.
  """

  argv: list[str]
  home: pathlib.Path
  directory: pathlib.Path
  output: str
  read: set[str]


@pytest.fixture(scope="session")
def toy():
  spec = importlib.util.spec_from_file_location("toy", HERE / "toy.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def toy_task(toy):
  """The toy task instead of arithmetic, for one test."""
  with toy.task():
    yield toy


@pytest.fixture(scope="session")
def toy_model(toy, tmp_path_factory):
  """A model of 4,000 parameters that knows the form of the toy's answers."""
  from grpojax import sft

  path = tmp_path_factory.mktemp("models") / "toy"
  settings = {
    "steps": 120,
    "rows": 8,
    "row_length": 64,
    "model.width": 16,
    "model.layers": 1,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.mlp": 32,
    "log_every": 10,
    "optim.warmup_steps": 5,
    "optim.learning_rate": 2e-2,
  }
  words = [f"--config.{key}={value}" for key, value in settings.items()]
  with toy.task():
    sft.main([f"--out={path}", *words])
  return path


def _record(monkeypatch):
  """Notes which settings the programs' own code reads from a config."""
  read, paths = set(), {}
  programs = set(map(str, READERS))

  def recording(original):
    def get(self, name):
      value = original(self, name)
      parent = paths.get(id(self), (self, ""))[1]
      path = f"{parent}.{name}" if parent else name
      if isinstance(value, ConfigDict):
        paths[id(value)] = value, path  # kept alive, so that ids stay its own
      elif sys._getframe(1).f_code.co_filename in programs:
        read.add(path)
      return value

    return get

  for method in ("__getattr__", "__getitem__"):
    original = getattr(ConfigDict, method)
    monkeypatch.setattr(ConfigDict, method, recording(original))
  return read


@pytest.fixture(scope="session")
def toy_run(toy, toy_model, tmp_path_factory):
  """`python -m grpojax.train` from start to end, without --run_dir."""
  from grpojax import train

  home = tmp_path_factory.mktemp("home")
  settings = {"group_size": "auto", "auto_group_size.largest": 16}
  settings |= {"diagnostics.every": 3, "log.trackers": "tensorboard"}
  argv = toy.arguments(toy_model, **settings)
  with pytest.MonkeyPatch.context() as patch, toy.task():
    patch.chdir(home)
    read = _record(patch)
    with contextlib.redirect_stdout(io.StringIO()) as output:
      train.main(argv)
  directory = home / "runs" / "toy"
  return ToyRun(argv, home, directory, output.getvalue(), read)
