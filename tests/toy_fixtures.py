"""Fixtures for tests of programs: a tiny model and a finished run."""

import contextlib
import dataclasses
import fcntl
import importlib
import io
import os
import pathlib
import pickle
import sys
from typing import NamedTuple

import pytest

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent / "grpojax"
CHECKS = [
  "core/options.py",
  "training/config.py",
  "training/settings/conflicts.py",
]
"""Files that read all settings, or only check them."""


class ToyRun(NamedTuple):
  """A finished training run."""

  argv: list[str]
  home: pathlib.Path  # working directory
  directory: pathlib.Path  # run directory
  output: str
  read: set[str]  # dotted paths of used settings


@pytest.fixture(scope="session")
def toy():
  return importlib.import_module("toy")


@pytest.fixture
def toy_task(toy):
  """The toy task instead of arithmetic, for a test."""
  with toy.task():
    yield toy


@pytest.fixture(scope="session")
def toy_model(toy, tmp_path_factory):
  """A model of 4,000 parameters, trained on texts of the toy task."""
  from grpojax import sft

  path = tmp_path_factory.mktemp("models") / "toy"
  settings = (
    "steps=120 rows=8 row_length=64 log_every=10 model.width=16 model.layers=1 "
    "model.heads=2 model.kv_heads=1 model.mlp=32 optim.warmup_steps=5 "
    "optim.learning_rate=0.02"
  )
  words = [f"--config.{word}" for word in settings.split()]
  with toy.task():
    sft.main([f"--out={path}", *words])
  return path


def _sections(options, prefix=""):
  """Dataclasses of a tree of settings with their dotted paths."""
  yield type(options), prefix
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    if dataclasses.is_dataclass(value):
      inline = "inline" in field.metadata
      yield from _sections(
        value, prefix if inline else f"{prefix}{field.name}."
      )


def _record(monkeypatch):
  """Records the dotted paths of settings that a run reads."""
  from grpojax.training.settings.run import TrainSettings

  read = set()
  folders = tuple(str(PACKAGE / name) + "/" for name in ("core", "training"))
  checks = {str(PACKAGE / name) for name in CHECKS}

  def reads(frame):
    while frame.f_code.co_filename == dataclasses.__file__:  # asdict
      frame = frame.f_back
    file = frame.f_code.co_filename
    name = frame.f_code.co_name
    in_run = file.startswith(folders) and file not in checks
    return in_run and not name.endswith("errors")

  def recording(prefix, names):
    def get(self, name):
      if name in names and reads(sys._getframe(1)):
        read.add(f"{prefix}{name}")
      return object.__getattribute__(self, name)

    return get

  for kind, prefix in _sections(TrainSettings()):
    names = {field.name for field in dataclasses.fields(kind)}
    get = recording(prefix, names)
    monkeypatch.setattr(kind, "__getattribute__", get, raising=False)
  return read


@pytest.fixture(scope="session")
def toy_run(toy, toy_model, tmp_path_factory):
  """A complete run of `grpojax.train` without --run_dir.

  Processes of xdist share it.
  """
  folder = tmp_path_factory.getbasetemp()
  folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
  result = folder / "toy_run.pickle"
  home = folder / "home"
  with open(folder / "toy_run.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not result.exists():
      result.write_bytes(pickle.dumps(_run(toy, toy_model, home)))
  return ToyRun(*pickle.loads(result.read_bytes()))


def _run(toy, toy_model, home):
  from grpojax import train

  home.mkdir()
  settings = {"group_size": "auto", "auto_group_size.largest": 16}
  settings |= {"diagnostics.every": 3, "log.trackers": "tensorboard"}
  argv = toy.arguments(toy_model, **settings)
  with pytest.MonkeyPatch.context() as patch, toy.task():
    patch.chdir(home)
    read = _record(patch)
    with contextlib.redirect_stdout(io.StringIO()) as output:
      train.main(argv)
  directory = home / "runs" / "toy"
  return argv, home, directory, output.getvalue(), read


def single_loop(lm):
  """Returns a model whose rollouts run in one loop, as with kernels."""
  lm = lm._replace(grow_cache=None)
  if lm.prepare is None:
    return lm

  def prepare(*args, **formats):
    decoder, params = original.prepare(*args, **formats)
    return decoder._replace(grow_cache=None), params

  original = lm
  return lm._replace(prepare=prepare)
