"""What a report says of a step, against sums by hand."""

import dataclasses

import jax
import pytest

from grpojax.aot import programs, report
from grpojax.aot.parts import Part
from grpojax.core import mesh as mesh_lib
from grpojax.core.objective import Objective
from grpojax.training.config import default_config, from_config

# arithmetic-instruct: 4 layers of width 128, 4 heads and 2 kv heads of 32, and
# an MLP of 448; 100 tokens, tied.
LAYERS = 4 * (128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 448)
HEAD = 100 * 128
PARAMETERS = LAYERS + HEAD + 128 * (2 * 4 + 1)
B, G, P, T = 4, 8, 16, 32


def open_run(**changes):
  config = default_config()
  flat = {"batch_size": B, "group_size": G, "sampling.max_new_tokens": T}
  flat |= {"data.max_prompt_length": P, "reward.workers": 1}
  config.update_from_flattened_dict(flat | changes)
  mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
  return programs.open_run(from_config(config), mesh)


FLOPS = {
  # changes -> operations a parameter and token
  "trained": ({}, 2 + 6),
  "a reference": ({"loss.beta": 0.1}, 2 + 2 + 6),
  "epochs": ({"optim.epochs": 3, "loss.old_logprobs": "rollout"}, 2 + 3 * 6),
  "rescored": (
    {"optim.minibatches": 2, "loss.old_logprobs": "trainer"},
    2 + 2 + 6,
  ),
  "tokens of highest entropy": (
    {"loss.top_entropy_quantile": 0.2, "optim.epochs": 2},
    2 + 2 * (2 + 6),
  ),
  "found at once": (
    {"loss.top_entropy_quantile": 0.2, "optim.micro_batches": 1},
    2 + 6,
  ),
  "on-policy": ({"loss.old_logprobs": "trainer"}, 2 + 6),
  "adapters": ({"lora.rank": 4, "loss.beta": 0.1}, 2 + 2 + 4),
}


@pytest.mark.parametrize("case", FLOPS)
def test_operations_of_a_step(case):
  changes, each = FLOPS[case]
  expected = LAYERS * B * (P + G * T) + HEAD * B * G * T
  assert report.model_flops(open_run(**changes)) == each * expected


def test_the_load_of_all_parts_takes_a_pass():
  loss = Objective(router_aux_coef=0.01)
  for micro_batches, within in ((2, 1), (1, 0)):
    run = open_run(**{"optim.micro_batches": micro_batches})
    settings = dataclasses.replace(run.settings, loss=loss)
    run = run._replace(settings=settings)
    assert report.forward_passes(run) == (0, within)


def test_memory_of_each_program():
  """What is there beside a program's temporaries, once each."""
  run = open_run(**{"loss.beta": 0.1})
  host = open_run(**{"loss.beta": 0.1, "model.reference": "host"})
  size = 4 * PARAMETERS
  for name in ("rollout", "reference", "update", "step"):
    part = Part(memory_bytes=10 * size, temporary_bytes=3 * size)
    memory = report._memory(run, name, part)
    assert memory["parameters"] == memory["reference"] == size, name
    # Two moments; a key, and counts of steps, prompts, skipped and two of optax
    assert 0 < memory["optimizer"] - 2 * size <= 8 + 5 * 4, name
    assert sum(memory.values()) - memory["optimizer"] == 5 * size, name
    # It comes from the host for the program that is given it.
    memory = report._memory(host, name, part)
    needed = name in ("reference", "step")
    assert memory["reference"] == needed * size, name


def test_memory_of_what_does_not_compile():
  """XLA says then how much arguments and temporaries take together."""
  run = open_run(**{"loss.beta": 0.1})
  arguments = {"rollout": 1, "reference": 2, "update": 3, "step": 4}
  for name, arrays in arguments.items():
    state = report._memory(run, name, Part(0))
    size, rest = state["parameters"], state["optimizer"]
    given = arrays * size + (rest - 2 * size) * (arrays > 2)
    memory = report._memory(run, name, Part(given + 7 * size, error="too much"))
    assert sum(memory.values()) == 2 * size + rest + 7 * size, name


def test_parts_of_the_prompts_are_sampled_one_after_another(monkeypatch):
  """The rollout's program runs once for each, in the same memory."""
  measured = []

  def measure(lowered, chip, trips, runs):
    measured.append((lowered, trips, runs))
    return Part(memory_bytes=9, temporary_bytes=7)

  monkeypatch.setattr(programs, "lower", lambda run, name: name)
  monkeypatch.setattr(report.parts, "measure", measure)
  run = open_run(**{"sampling.parts": 4})
  machine = report.Machine("cpu:1", report.chips.CHIPS["cpu"], [])
  for name in ("rollout", "update"):
    found = report.measure(run, name, machine, lambda _: None)
    state = found["memory"]["parameters"] + found["memory"]["optimizer"]
    assert found["memory_bytes"] == state + 7
  assert measured == [("rollout", T - 1, 4), ("update", T - 1, 1)]


@pytest.mark.parametrize(
  "changes, prompts",
  [({}, B), ({"sampling.parts": 2}, B // 2)],
)
def test_the_cache_of_what_is_decoded_at_once(changes, prompts):
  run = open_run(**changes)
  part = Part(memory_bytes=2**30, temporary_bytes=2**30)
  token = 2 * 4 * 2 * 32 * 4  # keys and values: 2, layers, K, E, bytes
  found = report._memory(run, "rollout", part)["cache"]
  assert found == prompts * G * T * token
