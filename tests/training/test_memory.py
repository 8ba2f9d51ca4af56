"""Lower bound of a run's memory: by hand, and against compiled programs."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax import train
from grpojax.core import logprobs, meshes
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.core.update import make_update
from grpojax.models.transformer import TransformerConfig, transformer
from grpojax.runtime.files import records
from grpojax.training.files import run_directory
from grpojax.training.run import memory, setup
from grpojax.training.run.setup import optimizer
from grpojax.training.step.batch import make_batch_program

B = 8
G = 4
P = 24
T = 48
SIZES = {
  "batch_size": B,
  "group_size": G,
  "data__max_prompt_length": P,
  "sampling__max_new_tokens": T,
  "logits_chunk": 16,
  "optim__micro_batches": 2,
  "eval__batch_size": 3,
}
INT8 = {"sampling__cache_dtype": "int8", "loss__correction": "token_truncate"}
MODEL = TransformerConfig(
  vocab_size=50, width=12, layers=3, heads=4, kv_heads=2, head_dim=4, mlp=20
)
# Embeddings; q and o, k and v, the MLP; two norms per layer; the last norm.
WEIGHTS = 50 * 12 + 3 * (2 * 12 * 16 + 2 * 12 * 8 + 3 * 12 * 20 + 2 * 12) + 12


def mesh():
  return meshes.make_mesh(devices=jax.devices()[:1])


def four():
  """A mesh of one device four times, for shapes only."""
  devices = np.array([jax.devices()[0]] * 4).reshape(1, 2, 1, 2)
  return jax.sharding.Mesh(devices, meshes.AXES)


def bytes_of(parts):
  return {part.text: part.bytes for part in parts}


def held_by(settings, model=MODEL, devices=None, teacher=None):
  """Bytes of the parts of each phase of a training run."""
  phases = memory.training(settings, model, devices or mesh(), teacher)
  return [bytes_of(parts) for parts in phases.values()]


def test_parts_of_each_phase(settings_with):
  sampling, update, test = held_by(settings_with(**SIZES))
  token = 3 * 2 * 2 * 4 * 4  # keys and values: layers, 2, K, E, bytes
  state = 3 * 4 * WEIGHTS + 8  # with Adam's moments and two counts
  assert sampling == {
    "parameters and optimizer": state,
    "decode cache": 8 * (24 + 4 * 48) * token,
  }
  assert update == {
    "parameters and optimizer": state,
    "gradients": 4 * WEIGHTS,
    "activations": 4 * 4 * 48 * 3 * 12 * 4,  # of the 4 prompts of a part
  }
  assert test["decode cache"] == 3 * (24 + 48) * token
  (alone,) = memory.evaluation(settings_with(**SIZES), MODEL, 5).values()
  assert bytes_of(alone) == {
    "parameters": 4 * WEIGHTS,
    "decode cache": 3 * (24 + 5 * 48) * token,
  }
  half, *_ = held_by(settings_with(**SIZES, model__dtype="bfloat16"))
  assert half["decode cache"] * 2 == sampling["decode cache"]
  in_8_bits, _, test = held_by(settings_with(**SIZES, **INT8))
  assert in_8_bits["decode cache"] == 8 * (24 + 4 * 48 // 4) * token
  assert test["decode cache"] == 3 * (24 + 48) * token  # not in 8 bits


def test_references_and_adapters(settings_with):
  def held(teacher=None, **changes):
    parts = held_by(settings_with(**SIZES, **changes), teacher=teacher)[1]
    return parts["parameters and optimizer"]

  plain = held()
  assert held(loss__beta=0.1) - plain == 4 * WEIGHTS
  assert held(loss__beta=0.1, model__reference="host") == plain
  teacher = dataclasses.replace(MODEL, vocab_size=60)
  assert held(teacher, loss__beta=0.1) - plain == 4 * (WEIGHTS + 10 * 12)
  exact = {"loss__beta": 0.1, "loss__kl": "exact"}
  update = held_by(settings_with(**SIZES, **exact))[1]
  assert update["states of the reference"] == 8 * 4 * 48 * 12 * 4
  adapted = {"lora__rank": 2, "lora__targets": "layers/(q|o)"}
  adapted |= {"model__dtype": "bfloat16", "loss__beta": 0.1}
  adapters = 3 * 2 * (12 * 2 + 2 * 16)  # layers, q and o, A and B
  assert held(**adapted) == 2 * WEIGHTS + 3 * 4 * adapters + 8
  update = held_by(settings_with(**SIZES, **adapted))[1]
  assert update["gradients"] == 4 * adapters
  # A reference that follows the policy has adapters too.
  adapted["model__reference_every"] = 1
  assert held(**adapted) == 2 * WEIGHTS + 4 * 4 * adapters + 8
  on_host = held(**adapted, model__reference="host")
  assert on_host == 2 * WEIGHTS + 3 * 4 * adapters + 8


def test_the_state_of_each_optimizer_on_one_and_four_devices(settings_with):
  # Wide enough for factored moments.
  wide = dataclasses.replace(
    MODEL, vocab_size=140, width=128, head_dim=32, mlp=132
  )
  norms = 3 * 2 * 128 + 128
  keys = 3 * 2 * 128 * 64  # k and v are 64 wide
  matrices = 140 * 128 + 3 * (2 * 128 * 128 + 3 * 128 * 132) + keys
  weights = norms + matrices
  statistics = 140 + 128 + 3 * (2 * (128 + 128) + 3 * (128 + 132))
  optims = [{}, {"moments_dtype": "bfloat16"}, {"name": "adafactor"}]
  # Unused statistics have a single number: 1 in each of 6 factored arrays,
  # 2 in each of 5 unfactored arrays.
  statistics += 6 + 5 * 2
  whole = [12 * weights, 8 * weights, 4 * (weights + norms + keys + statistics)]
  # Norms and statistics are replicated, except the statistics of o and down.
  by_four = 3 * (128 + 128 + 128 + 132)
  on_all = statistics - by_four
  cut = [
    12 * (norms + matrices // 4),
    8 * (norms + matrices // 4),
    4 * (2 * norms + (matrices + keys + by_four) // 4 + on_all),
  ]
  for optim, *expected in zip(optims, whole, cut, strict=True):
    settings = settings_with(
      **SIZES, **{f"optim__{name}": value for name, value in optim.items()}
    )
    for devices, size in zip((mesh(), four()), expected, strict=True):
      held = held_by(settings, wide, devices)[1]["parameters and optimizer"]
      assert held == size + 8, (optim, devices.shape)  # with two counts


def test_four_devices_divide_activations_and_gradients(settings_with):
  settings = settings_with(**SIZES)
  whole = held_by(settings)
  cut = held_by(settings, MODEL, four())
  for i, name in enumerate(("decode cache", "activations", "decode cache")):
    assert cut[i][name] == whole[i][name] // 4
  matrices = WEIGHTS - 3 * 2 * 12 - 12  # norms are replicated
  assert cut[1]["gradients"] == 4 * (matrices // 4 + WEIGHTS - matrices)


@pytest.mark.parametrize(
  "gib, vocab, chunk",
  [(15.75, 152064, 512), (75, 152064, 4096), (2**-20, 50, 1), (None, 50, 256)],
)
def test_logits_take_at_most_a_tenth_of_a_device(gib, vocab, chunk):
  limit = None if gib is None else int(gib * 2**30)
  model = dataclasses.replace(MODEL, vocab_size=vocab)
  assert memory.logits_chunk(model, limit) == chunk
  if chunk > 1 and limit:  # twice as many would take more
    assert 12 * chunk * vocab <= limit / 10 < 2 * 12 * chunk * vocab


def test_a_run_records_its_logits_chunk(toy_task, toy_model, tmp_path):
  """A resumed run may choose another one, as on another device."""
  run = tmp_path / "run"
  for step, cpu_default in (1, 256), (2, 32):
    argv = toy_task.arguments(toy_model, steps=step, logits_chunk=0)
    with mock.patch.object(logprobs, "CHUNK", cpu_default):
      train.main([*argv, f"--run_dir={run}"])
    assert run_directory.read_config(run).logits_chunk == cpu_default
  (row,) = records.read_jsonl(run / run_directory.CHANGES)
  assert "logits_chunk: 256 -> 32" in row["changed"]


def total(compiled):
  """Upper bound of a compiled program's peak memory in bytes."""
  m = compiled.memory_analysis()
  new = m.output_size_in_bytes - m.alias_size_in_bytes
  return m.argument_size_in_bytes + new + m.temp_size_in_bytes


@pytest.mark.slow
def test_compiled_programs_take_1_to_10_times_the_bound(settings_with):
  settings = settings_with(**SIZES)
  model = dataclasses.replace(MODEL, width=64, mlp=256)
  lm = transformer(model, remat="full")
  tx = optimizer(settings)
  first = lambda key: setup.first_state(settings, tx, lm.init(key))
  state = jax.eval_shape(first, jax.random.key(0))
  prompts = Prompts(
    jax.ShapeDtypeStruct((B, P), jnp.int32), jax.ShapeDtypeStruct((B, P), bool)
  )
  sample = functools.partial(
    rollout, lm, group_size=G, max_new_tokens=T, eos_ids=(1,)
  )
  args = state.params, prompts, state.key
  sampler = jax.jit(sample).lower(*args).compile()
  update = make_update(lm, tx, settings.loss, settings.optim.update)
  samples = jax.eval_shape(sample, *args)
  rewards = jax.ShapeDtypeStruct((B, G), jnp.float32)
  make_batch = functools.partial(make_batch_program(settings), lm)
  batch, _ = jax.eval_shape(make_batch, state.params, samples, rewards)
  update = jax.jit(update, donate_argnums=0).lower(state, batch).compile()
  # The new state replaces the old one in place.
  stored = state.replace(key=jax.eval_shape(jax.random.key_data, state.key))
  shardings = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))
  assert update.memory_analysis().alias_size_in_bytes == shardings
  phases = memory.training(settings, model, mesh())
  moments = 8 * sum(x.size for x in jax.tree.leaves(state.params))
  bounds = [sum(part.bytes for part in parts) for parts in phases.values()]
  bounds[0] -= moments  # not an argument of the sampler
  for bound, compiled in zip(bounds, (sampler, update), strict=False):
    assert 0.1 * total(compiled) < bound <= total(compiled)


def test_too_large_programs_are_refused_with_their_parts(settings_with):
  settings = settings_with(**SIZES | {"group_size": 10**6})
  phases = memory.training(settings, MODEL, mesh())
  needed = sum(part.bytes for part in phases["sampling a step's completions"])
  memory.refuse(phases, needed)
  with pytest.raises(ValueError) as caught:
    memory.refuse(phases, needed - 1)
  message = str(caught.value)
  assert "decode cache 73.7 GB (batch_size, group_size," in message
  assert "\n" not in message and "optimizer" not in message  # under 1%
  assert message.endswith(
    "Change --config.batch_size, --config.group_size, "
    "--config.sampling.max_new_tokens, --config.data.max_prompt_length"
  )


def test_host_memory_is_limited_by_control_groups(tmp_path):
  physical = memory.host_bytes(tmp_path)  # no limits, no swap space
  for folder in ("proc", "sys/fs/cgroup"):
    (tmp_path / folder).mkdir(parents=True)
  (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nSwapTotal: 3 kB")
  for limit, memory_size in (("max\n", physical), ("1048576\n", 2**20)):
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
    assert memory.host_bytes(tmp_path) == memory_size + 3 * 1024
