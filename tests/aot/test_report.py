"""Reports of a step against sums by hand, and refused machines and models."""

import dataclasses
from unittest import mock

import jax
import pytest
from jax.errors import JaxRuntimeError
from jax.stages import Lowered

from grpojax.aot import programs, report, topology
from grpojax.aot.chips import CHIPS
from grpojax.aot.report import Part
from grpojax.core import meshes
from grpojax.core.objective import Objective
from grpojax.training.config import default_config, from_config
from grpojax.training.settings.run import TrainSettings

# arithmetic-instruct: 4 layers of width 128, 4 heads and 2 kv heads of 32, and
# an MLP of 448; 100 tokens, tied.
LAYERS = 4 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 448)
HEAD = 100 * 128
PARAMETERS = LAYERS + HEAD + 128 * (2 * 4 + 1)
B = 4
G = 8
P = 16
T = 32


def open_run(**changes):
  config = default_config()
  flat = {"batch_size": B, "group_size": G, "sampling.max_new_tokens": T}
  flat |= {"data.max_prompt_length": P, "reward.workers": 1}
  config.update_from_flattened_dict(flat | changes)
  mesh = meshes.make_mesh(devices=jax.devices()[:1])
  return programs.open_run(from_config(config), mesh)


@pytest.mark.parametrize(
  "reference, update, changes",  # operations per parameter and token
  [
    (0, 6, {}),
    (2, 6, {"loss.beta": 0.1}),
    (0, 3 * 6, {"optim.epochs": 3, "loss.old_logprobs": "rollout"}),
    (2, 6, {"optim.minibatches": 2, "loss.old_logprobs": "trainer"}),
    (0, 2 * 8, {"loss.top_entropy_quantile": 0.2, "optim.epochs": 2}),
    (0, 6, {"loss.top_entropy_quantile": 0.2, "optim.micro_batches": 1}),
    (0, 6, {"loss.old_logprobs": "trainer"}),  # on-policy
    (2, 4, {"lora.rank": 4, "loss.beta": 0.1}),
  ],
)
def test_operations_of_a_step(reference, update, changes):
  tokens = LAYERS * B * (P + G * T) + HEAD * B * G * T
  each = {"rollout": 2, "reference": reference, "update": update}
  run = open_run(**changes)
  flops = report.part_flops(run)
  assert flops == {name: n * tokens for name, n in each.items()}
  if not changes:  # the experts' load needs a pass over all micro-batches
    loss = Objective(router_aux_coef=0.01)
    run = run._replace(settings=dataclasses.replace(run.settings, loss=loss))
    assert report.part_flops(run)["update"] == 8 * tokens


def test_memory_of_each_program():
  """Parameters, moments and reference count once, next to temporaries."""
  run = open_run(**{"loss.beta": 0.1})
  host = open_run(**{"loss.beta": 0.1, "model.reference": "host"})
  size = 4 * PARAMETERS
  taken = {"rollout": 1, "reference": 2, "update": 3, "step": 4}
  for name, arrays in taken.items():
    part = Part(memory_bytes=10 * size, temporary_bytes=3 * size)
    memory = report._memory(run, name, part)
    assert memory["parameters"] == memory["reference"] == size, name
    # Two moments; a key, and counts of steps, prompts, skipped and two of optax
    moments = memory["optimizer"]
    assert 0 < moments - 2 * size <= 8 + 5 * 4, name
    assert sum(memory.values()) - moments == 5 * size, name
    # The host's reference is on the device only for programs that use it.
    memory = report._memory(host, name, part)
    assert memory["reference"] == size * (name in ("reference", "step")), name
    # If compilation fails, XLA's figure includes the arguments.
    arguments = arrays * size + (moments - 2 * size) * (arrays > 2)
    part = Part(arguments + 7 * size, error="too much")
    memory = report._memory(run, name, part)
    assert sum(memory.values()) == 2 * size + moments + 7 * size, name


def test_sampling_parts_multiply_runs_but_not_memory(monkeypatch):
  """The rollout's program runs once per part, in the same memory."""
  measured = []

  def measure(lowered, chip, trips, runs):
    measured.append((lowered, trips, runs))
    return Part(memory_bytes=9, temporary_bytes=7)

  monkeypatch.setattr(programs, "lower", lambda run, name: name)
  monkeypatch.setattr(report, "compile_part", measure)
  run = open_run(**{"sampling.parts": 4})
  machine = report.Machine("cpu:1", CHIPS["cpu"], [])
  for name in ("rollout", "update"):
    counted = report.measure(run, name, machine)
    state = counted["memory"]["parameters"] + counted["memory"]["optimizer"]
    assert counted["memory_bytes"] == state + 7
  assert measured == [("rollout", T - 1, 4), ("update", T - 1, 1)]


def test_logits_chunk_of_the_machine(monkeypatch):
  """JAX takes 3/4 of an H100's memory by default."""
  assert open_run().settings.optim.update.chunk_size == 256  # on a CPU
  monkeypatch.setattr(programs.chips, "of_kind", lambda kind: CHIPS["h100"])
  chunk = open_run().settings.optim.update.chunk_size  # of 100 tokens
  assert chunk <= 0.1 * 0.75 * 84.95e9 / (12 * 100) < 2 * chunk


def test_cache_bytes_shrink_with_parts():
  part = Part(memory_bytes=2**30, temporary_bytes=2**30)
  token = 2 * 4 * 2 * 32 * 4  # keys and values: 2, layers, K, E, bytes
  for parts in (1, 2):
    run = open_run(**{"sampling.parts": parts})
    counted = report._memory(run, "rollout", part)["cache"]
    assert counted == B // parts * G * T * token


@pytest.mark.parametrize(
  "message, size",
  [
    ("Used 17.50G of 15.75G hbm. Exceeded", 35 * 2**29),
    ("memory for HLO temporaries (20.50M) exceeds available HBM", 41 * 2**19),
  ],
)
def test_out_of_memory_errors_are_read(message, size):
  """In the wording of libtpu's versions; other errors are raised."""
  lowered = mock.Mock(spec=Lowered)
  lowered.compile.side_effect = JaxRuntimeError(f"EXHAUSTED: {message}")
  part = report.compile_part(lowered, CHIPS["v5e"], 3)
  assert (part.memory_bytes, part.error) == (size, "out of memory")
  lowered.compile.side_effect = JaxRuntimeError("INTERNAL: of 3G hbm")
  with pytest.raises(JaxRuntimeError, match="INTERNAL"):
    report.compile_part(lowered, CHIPS["v5e"], 3)


@pytest.mark.parametrize(
  "name, error, remedy",
  [
    ("v5e:2x2", "JAX TPU support not installed; cannot", "needs libtpu: pip"),
    ("h100:8", "topology not implemented for cuda", "jax-cuda13-plugin=="),
    ("v5e:3x3", "no such topology", "no such machine: no such topology"),
  ],
)
def test_missing_plugin_is_explained(monkeypatch, name, error, remedy):
  def refuse(**_):
    raise RuntimeError(error)

  monkeypatch.setattr(topology.topologies, "get_topology_desc", refuse)
  monkeypatch.setattr(topology, "_ENVIRONMENT", {})
  monkeypatch.setattr(topology.jax.config, "update", lambda *_: None)
  with pytest.raises(ValueError, match=f"^--topology={name}: .*{remedy}"):
    topology.machine(name)


def test_another_libtpu_is_reported(monkeypatch):
  required = ["numpy>=2", 'libtpu==0.0.42.*; extra == "tpu"']
  monkeypatch.setattr(topology.metadata, "requires", lambda _: required)
  for version, reported in (("0.0.42.1", False), ("0.0.420", True)):
    monkeypatch.setattr(topology.metadata, "version", lambda _, v=version: v)
    assert bool(topology.libtpu_warning("v5e:2x2")) == reported
    assert topology.libtpu_warning("h100:8") == ""


def test_eos_ids_and_invalid_models(tmp_path):
  """Training reads the EOS ids with the tokenizer."""
  hf_config = programs.hf.read_config("arithmetic-base")
  mesh = meshes.make_mesh()
  for eos, ids in (7, (7,)), ([7, 8], (7, 8)), (["x", 2.5], (0,)):
    hf_config |= {"eos_token_id": eos}
    policy = programs._policy(TrainSettings(), hf_config, mesh)
    assert policy.eos_ids == ids, eos
  settings = TrainSettings(loss=Objective(router_aux_coef=0.1))
  with pytest.raises(ValueError, match=r"loss.router_aux_coef = 0.1: .* use 0"):
    programs.open_run(settings, mesh)
  file = tmp_path / "a.json"
  file.write_text('{"model_type": ["qwen2"]}')
  with pytest.raises(ValueError, match="is not supported"):
    programs.hf.to_transformer_config(programs.read_model(str(file)))
