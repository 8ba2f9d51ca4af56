"""What `grpojax.compile` refuses before it compiles, keeps, and says."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from grpojax import compile as program
from grpojax.aot import parts, programs, topology
from grpojax.aot.chips import CHIPS
from grpojax.aot.parts import Part
from grpojax.core.mesh import make_mesh
from grpojax.training.config import default_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
PART = Part(7, 5, seconds=0.5)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
  """Programs that were compiled rather than remembered."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  found = []
  monkeypatch.setattr(
    parts, "_compile", lambda *given: found.append(given) or PART
  )
  return found


def measure():
  lowered = jax.jit(lambda x: x + 1).lower(1.0)
  return parts.measure(lowered, "cpu:1", CHIPS["cpu"], 3)


def test_the_same_program_is_compiled_once(compiled):
  assert measure() == (PART, False)
  assert measure() == (PART, True)
  assert len(compiled) == 1
  assert [f.suffix for f in parts.cache_directory().iterdir()] == [".json"]


WHOLE = dataclasses.asdict(PART)


@pytest.mark.parametrize(
  "damage",
  [
    "",
    "[1]",
    "null",
    '{"memory_bytes": 3}',  # what is missing would be 0
    json.dumps(WHOLE | {"temporary_bytes": None}),
    json.dumps(WHOLE | {"seconds": "x"}),
    json.dumps(WHOLE | {"more": 1}),
  ],
)
def test_damaged_results_are_compiled_again(compiled, damage):
  measure()
  (file,) = parts.cache_directory().iterdir()
  file.write_text(damage)
  assert measure() == (PART, False)
  assert measure() == (PART, True)


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags_of_the_compiler_make_another_program(
  compiled, monkeypatch, name
):
  measure()
  monkeypatch.setenv(name, "--xla_something=1")
  assert measure() == (PART, False)


def test_a_directory_that_keeps_nothing(compiled, monkeypatch, tmp_path):
  (tmp_path / "file").touch()
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
  assert measure() == measure() == (PART, False)


@pytest.mark.parametrize(
  "name", ["", "cpu:0", "cpu:2x2", "v5e:0x2", "v5e:2", "v9:2x2", "v5p:2x2"]
)
def test_machines_that_there_are_not(name):
  with pytest.raises(ValueError, match=f"--topology={name}: give a chip"):
    topology.parse(name)


SLICES = """
import sys
from grpojax.aot import topology
from grpojax.core import mesh
for name in sys.argv[1:]:
  devices, chip = topology.devices(name)
  print(mesh.make_mesh(devices=devices).size, chip.devices)
"""


def test_slices_that_libtpu_has_to_be_told_of():
  pytest.importorskip("libtpu")
  names = ["v5e:1x1", "v6e:1x2", "v4:2x2x1"]
  done = subprocess.run(
    [sys.executable, "-c", SLICES, *names],
    capture_output=True,
    text=True,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == ["1 1", "2 1", "4 1"]


def test_without_libtpu(monkeypatch):
  def refuse(**_):
    raise RuntimeError("JAX TPU support not installed; cannot generate")

  monkeypatch.setattr(topology.topologies, "get_topology_desc", refuse)
  monkeypatch.setattr(topology, "_ENVIRONMENT", {})
  monkeypatch.setattr(topology.jax.config, "update", lambda *_: None)
  with pytest.raises(ValueError, match="v5e:2x2: it needs libtpu: pip"):
    topology.devices("v5e:2x2")


def test_results_that_cannot_be_written(tmp_path):
  for out, why in (
    (tmp_path, "is a directory"),
    (tmp_path / "a" / "b.json", "its directory does not exist"),
    ("/proc/a.json", "cannot be written"),
  ):
    with pytest.raises(SystemExit, match=why):
      program.main([f"--out={out}", "--topology=cpu:0"])


@pytest.mark.parametrize(
  "given, ids",
  [
    (7, (7,)),
    ([7, 8], (7, 8)),
    (None, (0,)),
    ([], (0,)),
    ("x", (0,)),
    (["x", 2.5], (0,)),
  ],
)
def test_ends_of_completions_that_a_config_names(given, ids):
  """Training reads them with the tokenizer, which need not be there."""
  hf_config = programs.hf.read_config("arithmetic-base")
  found = programs._policy(
    default_config(), hf_config | {"eos_token_id": given}
  )
  assert found.eos_ids == ids


def test_experts_to_balance_that_there_are_not():
  config = default_config()
  config.loss.router_aux_coef = 0.1
  with pytest.raises(ValueError, match=r"loss.router_aux_coef = 0.1: .* use 0"):
    programs.open_run(config, make_mesh())


def test_models_of_a_strange_type(tmp_path):
  file = tmp_path / "a.json"
  file.write_text('{"model_type": ["qwen2"]}')
  with pytest.raises(ValueError, match="is not supported"):
    programs.hf.to_transformer_config(programs.read_model(str(file))[1])
