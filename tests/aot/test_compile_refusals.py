"""What `grpojax.compile` refuses, before it compiles and after."""

from unittest import mock

import pytest
from jax.errors import JaxRuntimeError
from jax.stages import Lowered

from grpojax.aot import parts, programs, topology
from grpojax.aot.chips import CHIPS
from grpojax.core.mesh import make_mesh
from grpojax.core.objective import Objective
from grpojax.training.settings.run import TrainSettings


@pytest.mark.parametrize(
  "message, size",
  [
    ("Used 17.50G of 15.75G hbm. Exceeded", 35 * 2**29),
    (
      "the total memory required for HLO temporaries (20.50M) exceeds available"
      " HBM (15.75G)",
      41 * 2**19,
    ),
  ],
)
def test_a_program_that_needs_too_much_memory(message, size):
  """As libtpu's versions say it; any other error is raised."""
  lowered = mock.Mock(spec=Lowered)
  lowered.compile.side_effect = JaxRuntimeError(
    f"RESOURCE_EXHAUSTED: {message}"
  )
  part = parts.measure(lowered, CHIPS["v5e"], 3)
  assert (part.memory_bytes, part.error) == (size, "out of memory")
  lowered.compile.side_effect = JaxRuntimeError("INTERNAL: of 3G hbm")
  with pytest.raises(JaxRuntimeError, match="INTERNAL"):
    parts.measure(lowered, CHIPS["v5e"], 3)


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
