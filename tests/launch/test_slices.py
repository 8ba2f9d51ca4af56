"""launch/slices.py goes on, whatever becomes of one compilation."""

import importlib.util
import json
import pathlib
import subprocess

import pytest

from grpojax.models import huggingface as hf
from grpojax.runtime.cli import command_line
from grpojax.training.config import SETTINGS, from_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = sorted((ROOT / "tests/data/model_configs").glob("*.json"))
SMALL = next(file for file in MODELS if "0.5B" in file.name)


@pytest.fixture
def slices(monkeypatch, tmp_path):
  spec = importlib.util.spec_from_file_location(
    "slices", ROOT / "launch/slices.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  monkeypatch.setattr(module, "ROWS", tmp_path / "slices.jsonl")
  return module


def report(fits, gib=1):
  part = {"memory_bytes": gib * 2**30, "seconds": 1.0, "compile_seconds": 1.0}
  return {
    "fits": fits,
    "step_seconds": 2.0 if fits else None,
    "mfu": 0.3,
    "parts": {"rollout": part, "update": part},
  }


@pytest.fixture
def compiled(monkeypatch):
  """Commands that were run; each takes the next of what is to happen."""
  commands, happens = [], []

  def run(command, timeout, **_):
    commands.append(command)
    what = happens.pop(0)
    if what == "late":
      raise subprocess.TimeoutExpired(command, timeout)
    if isinstance(what, dict):
      (out,) = (w.removeprefix("--out=") for w in command if "--out=" in w)
      pathlib.Path(out).write_text(json.dumps(what))
      what = ""
    return subprocess.CompletedProcess(command, 1, "", what)

  monkeypatch.setattr(subprocess, "run", run)
  return commands, happens


def of(commands):
  """The slices that were compiled for."""
  words = (word for command in commands for word in command)
  return [w.split("=")[1] for w in words if w.startswith("--topology=")]


def test_a_failure_is_noted_and_the_next_slice_tried(slices, compiled):
  commands, happens = compiled
  happens += ["trace\nXlaRuntimeError: no\n\n", "", report(True)]
  slices.try_slices("small", SMALL, "v5e", 9)
  first, second, third = slices.read_rows()
  assert first["error"] == "code 1: XlaRuntimeError: no"
  assert second["error"] == "code 1: nothing" and third["fits"]
  assert of(commands) == [row["topology"] for row in slices.read_rows()]
  # Nothing of it is compiled again.
  slices.try_slices("small", SMALL, "v5e", 9)
  assert len(commands) == 3
  assert slices.table().count("small") == 1


def test_what_takes_too_long_ends_the_chip(slices, compiled):
  commands, happens = compiled
  happens += ["late"]
  slices.ROWS.write_text('{"model": "sm')  # a line that was not finished
  slices.try_slices("small", SMALL, "v5e", 9)
  (row,) = slices.read_rows()
  assert row["error"] == "took more than 9 s" and len(commands) == 1


def test_what_never_fits_ends(slices, compiled):
  commands, happens = compiled
  happens += [report(False, gib=17)] * 99
  slices.try_slices("small", SMALL, "v5e", 9)
  assert len(commands) <= slices.TRIES
  assert max(map(of(commands).count, of(commands))) <= 2


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
@pytest.mark.parametrize("file", MODELS, ids=lambda file: file.stem)
def test_layouts_are_settings_of_a_run(slices, file, chip):
  model = hf.to_transformer_config(json.loads(file.read_text()))
  memory = slices.chips.device(slices.chips.CHIPS[chip]).hbm_bytes
  layout = slices.layout(model, 256, memory, (1.0, 1.0))
  words = [f"--config={slices.CONFIG}", *slices.search.command(layout).split()]
  config, _ = command_line.parse(words, {}, SETTINGS, "train")
  from_config(config)
  mesh = config.mesh
  assert mesh.data * mesh.fsdp * mesh.expert * mesh.tensor == 256
