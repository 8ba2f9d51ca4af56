"""What `grpojax.compile` refuses before it compiles, keeps, and says."""

import dataclasses
import json

import jax
import pytest

from grpojax.aot import parts, programs, topology
from grpojax.aot.chips import CHIPS
from grpojax.aot.parts import Part
from grpojax.core.mesh import make_mesh
from grpojax.core.objective import Objective
from grpojax.training.settings.run import TrainSettings

PART = Part(7, 5, seconds=0.5)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
  """Programs that were compiled rather than remembered."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  programs_compiled = []
  monkeypatch.setattr(
    parts, "_compile", lambda *args: programs_compiled.append(args) or PART
  )
  return programs_compiled


def measure():
  lowered = jax.jit(lambda x: x + 1).lower(1.0)
  machine = topology.Machine("cpu:1", CHIPS["cpu"], jax.devices())
  return parts.measure(lowered, machine, 3)


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
    "null",
    '{"memory_bytes": 3}',  # what is missing would be 0
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
  "name, error, remedy",
  [
    ("v5e:2x2", "JAX TPU support not installed; cannot", "needs libtpu: pip"),
    ("h100:8", "topology not implemented for cuda", "jax-cuda13-plugin=="),
    ("v5e:3x3", "no such topology", "no such machine: no such topology"),
  ],
)
def test_without_the_plugin_of_a_machine(monkeypatch, name, error, remedy):
  def refuse(**_):
    raise RuntimeError(error)

  monkeypatch.setattr(topology.topologies, "get_topology_desc", refuse)
  monkeypatch.setattr(topology, "_ENVIRONMENT", {})
  monkeypatch.setattr(topology.jax.config, "update", lambda *_: None)
  with pytest.raises(ValueError, match=f"^--topology={name}: .*{remedy}"):
    topology.machine(name)


@pytest.mark.parametrize(
  "eos, ids",
  [
    (7, (7,)),
    ([7, 8], (7, 8)),
    (None, (0,)),
    ([], (0,)),
    ("x", (0,)),
    (["x", 2.5], (0,)),
  ],
)
def test_ends_of_completions_that_a_config_names(eos, ids):
  """Training reads them with the tokenizer, which need not be there."""
  hf_config = programs.hf.read_config("arithmetic-base")
  hf_config |= {"eos_token_id": eos}
  assert programs._policy(TrainSettings(), hf_config, "cpu").eos_ids == ids


def test_experts_to_balance_that_there_are_not():
  settings = TrainSettings(loss=Objective(router_aux_coef=0.1))
  with pytest.raises(ValueError, match=r"loss.router_aux_coef = 0.1: .* use 0"):
    programs.open_run(settings, make_mesh())


def test_models_of_a_strange_type(tmp_path):
  file = tmp_path / "a.json"
  file.write_text('{"model_type": ["qwen2"]}')
  with pytest.raises(ValueError, match="is not supported"):
    programs.hf.to_transformer_config(programs.read_model(str(file)))
