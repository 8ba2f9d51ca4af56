"""launch/slices.py goes on, whatever becomes of one compilation."""

import importlib.util
import json
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ROOT / "tests/data/model_configs/Qwen2.5-0.5B-Instruct.json"


@pytest.fixture
def slices(monkeypatch, tmp_path):
  spec = importlib.util.spec_from_file_location(
    "slices", ROOT / "launch/slices.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  monkeypatch.setattr(module, "ROWS", tmp_path / "slices.jsonl")
  return module


PART = {"memory_bytes": 2**30, "seconds": 1.0, "xla_seconds": None}
FITS = {
  "fits": True,
  "step_seconds": 2.0,
  "mfu": 0.3,
  "parts": {"rollout": PART, "update": PART | {"xla_seconds": 2.5}},
  "settings": {"mesh.fsdp": 4},
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
  happens += ["trace\nXlaRuntimeError: no\n\n", "", {"fits": False}, FITS]
  slices.try_slices("small", SMALL, "v5e", 9)
  first, second, third = slices.read_rows()
  assert first["error"] == "code 1: XlaRuntimeError: no"
  assert second["error"] == "code 1: nothing" and third["fits"]
  moments = {"mesh.fsdp": 4, "optim.moments_dtype": "bfloat16"}
  assert third["settings"] == moments  # those of float32 did not fit
  assert of(commands) == ["v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:2x4"]
  # Nothing of it is compiled again.
  slices.try_slices("small", SMALL, "v5e", 9)
  assert len(commands) == 4
  words = "--config.mesh.fsdp=4 --config.optim.moments_dtype=bfloat16"
  assert (
    f"| small | v5e:2x4 | 1.0, 1.0 | 1 + 1 to 2.5 | 30.0% | `{words}` |"
    in (slices.table())
  )


def test_what_takes_too_long_ends_the_chip(slices, compiled):
  commands, happens = compiled
  happens += ["late"]
  slices.ROWS.write_text('{"model": "sm')  # a line that was not finished
  slices.try_slices("small", SMALL, "v5e", 9)
  (row,) = slices.read_rows()
  assert row["error"] == "took more than 9 s" and len(commands) == 1


def test_the_rows_that_are_there_make_a_table(slices, monkeypatch):
  monkeypatch.setattr(slices, "ROWS", ROOT / "launch/slices.jsonl")
  rows = slices.table().splitlines()[2:]
  readme = (ROOT / "launch/README.md").read_text()
  assert len(rows) >= 32 and all(row in readme for row in rows)


def test_layouts_are_compiled_again(slices, compiled):
  commands, happens = compiled
  old = {"model": "small", "topology": "v5e:2x2", "fits": True, "old": 1}
  rows = [old | {"settings": {"mesh.fsdp": n}} for n in (1, 2, 4)]
  other = {"model": "small", "topology": "v6e:2x2", "fits": True}
  slices.write_rows([*rows, other])
  plain = {key: value for key, value in FITS.items() if key != "settings"}
  happens += [plain, "killed", {"fits": False}]
  slices.compile_again(ROOT, "v5e", "small", 9)
  assert all("--search" not in command for command in commands)
  assert ["--config.mesh.fsdp=1" in c for c in commands] == [True, False, False]
  new, kept, gone, untouched = slices.read_rows()
  assert new["settings"] == {"mesh.fsdp": 1} and "old" not in new
  assert new["xla_seconds"] == {"rollout": None, "update": 2.5}
  assert kept == rows[1] and untouched == other
  assert not gone["fits"] and gone["settings"] == {"mesh.fsdp": 4}
