"""Fixtures for tests of the programs: a tiny model and a finished run."""

import contextlib
import dataclasses
import importlib.util
import io
import pathlib
import sys
from typing import NamedTuple

import pytest

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent / "grpojax"
READERS = {
  str(path)
  for folder in (".", "core", "training")
  for path in (PACKAGE / folder).glob("*.py" if folder == "." else "**/*.py")
  if path.name != "options.py" and path.parent.name != "settings"
}
"""Files that use settings: not those that check them, or copy them whole."""


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
  """Notes which settings the programs' own code reads, by dotted path."""
  from grpojax.training.config import AT_TOP
  from grpojax.training.settings.run import TrainSettings

  read, at_top = set(), {path: name for name, path in AT_TOP.items()}

  def watch(kind, prefix=""):
    paths = {}
    for field in dataclasses.fields(kind):
      path = f"{prefix}{field.name}"
      if section := field.metadata.get("section"):
        watch(section, f"{path}.")
      elif inline := field.metadata.get("inline"):
        watch(inline, prefix)
      else:
        paths[field.name] = at_top.get(path, path)

    def get(self, name):
      caller = sys._getframe(1).f_code.co_filename
      if name in paths and caller in READERS:
        read.add(paths[name])
      return object.__getattribute__(self, name)

    monkeypatch.setattr(kind, "__getattribute__", get)

  watch(TrainSettings)
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
