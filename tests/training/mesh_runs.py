"""Compares training runs on meshes of eight devices with one device.

test_meshes.py runs it with JAX_NUM_CPU_DEVICES=8.
"""

import contextlib
import functools
import io
import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpojax.core import meshes
from grpojax.core.step import init_state
from grpojax.core.types import Prompts
from grpojax.core.update import make_update
from grpojax.models import huggingface as hf
from grpojax.training import policies
from grpojax.training.config import default_config, from_config
from grpojax.training.run import fit, setup
from grpojax.training.step import sampling as sampling_lib
from grpojax.training.step.batch import make_batch_program

STEPS = 3
B = 4
G = 16
T = 6
SETTINGS = {
  # Other seeds may have gradients near 0, which Adam turns into updates of
  # rounding errors.
  "seed": 1,
  "steps": STEPS,
  "batch_size": B,
  "group_size": G,  # split by device counts that do not divide B
  "data.options.difficulty": (2, 4),
  "sampling.max_new_tokens": T,
  "logits_chunk": 64,
  "reward.functions": (f"{__file__}:digits",),
  "loss.beta": 0.1,
  "optim.learning_rate": 1e-3,
  "optim.minibatches": 2,
  "optim.micro_batches": 4,  # 2 prompts, and halves of their groups
  "eval.every": STEPS,
  "eval.num_prompts": 11,
  "eval.batch_size": 8,  # and then 3
  "checkpoint.every": 100,
  "log.trackers": (),
  "mesh.data": 1,
}
MODELS = {
  "llama": {"tie_word_embeddings": True},
  "untied": {"vocab_size": 101, "tie_word_embeddings": False, "mlp_bias": True},
  # local and global layers
  "gemma": {
    "model_type": "gemma3_text",
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 7,
  },
  "experts": {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
  },
}


def step(state, action):
  """An environment whose reward depends on the length of the action."""
  turns = (state or 0) + 1
  reward = len(action) % 3
  return {"observation": "go on", "reward": reward, "state": turns}


def digits(prompt, completion, example):
  """A reward of several values for a random model."""
  del prompt, example
  return sum(map(ord, completion)) % 7 / 3


def rare(prompt, completion, example):
  """A reward with many zero-variance groups."""
  del prompt, example
  return float(sum(map(ord, completion)) % 23 == 0)


def make_model(directory, **changes):
  """Writes a random model of width 16 with large weights."""
  source = directory / "source"
  source.mkdir()
  hf.copy_files(hf.resolve("arithmetic-base"), source)
  config = hf.read_config("arithmetic-base")
  config |= {"hidden_size": 16, "intermediate_size": 24, "head_dim": 4}
  config |= {"num_hidden_layers": 2} | changes
  (source / "config.json").write_text(json.dumps(config))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype),
    hf.abstract_params(config),
  )
  hf.save(directory / "model", params, source)
  return directory / "model"


def settings_of(model, changes):
  config = default_config()
  settings = SETTINGS | {"name": "run", "model.path": str(model)} | changes
  with config.unlocked():
    config.update_from_flattened_dict(settings)
  return from_config(config)


def run(model, directory, devices, changes):
  """Returns all samples of a run in order, and its exported parameters."""
  settings = settings_of(model, changes)
  sampled = []
  decode = policies.decode
  mesh = setup.make_mesh

  def spy(policy, samples, *rows):
    sampled.append(jax.device_get(samples))
    return decode(policy, samples, *rows)

  policies.decode = spy
  setup.make_mesh = functools.partial(mesh, devices=jax.devices()[:devices])
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      fit.run(settings, directory)
  finally:
    policies.decode = decode
    setup.make_mesh = mesh
  return sampled, hf.load_params(directory / "model")


def close(a, b, atol, name=""):
  """Asserts that two trees are equal up to this error."""
  for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name)


def same_samples(name, a, b):
  np.testing.assert_array_equal(a.completion_ids, b.completion_ids, name)
  np.testing.assert_array_equal(a.completion_mask, b.completion_mask, name)
  np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4, err_msg=name)


def compare(name, one, other, start):
  """Asserts that two runs have equal results that differ from the start."""
  for a, b in zip(one[0], other[0], strict=True):
    same_samples(name, a, b)
  close(other[1], one[1], 1e-5, name)
  moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), one[1], start)
  assert max(jax.tree.leaves(moved)) > 1e-3, moved


def programs(model, devices, changes, samples=None):
  """Returns the samples, batch and gradient of one step."""
  settings = settings_of(model, changes)
  mesh = setup.make_mesh(settings, jax.devices()[:devices])
  policy = setup.open_policy(settings)
  policy = setup.with_weights(settings, policy, mesh)
  ids = jnp.arange(8 * B).reshape(B, 8) % 90
  prompts = Prompts(ids, jnp.ones(ids.shape, bool))
  prompts = jax.device_put(prompts, meshes.batch_sharding(mesh, B))
  with jax.set_mesh(mesh):
    everywhere = NamedSharding(mesh, P())
    key = jax.device_put(jax.random.key(1), everywhere)
    sampling = settings.sampling.distribution
    if samples is None:
      sampler = sampling_lib.make_sampler(settings, policy, G, sampling, mesh)
      args = sampler, policy.params, prompts, (), key
      samples = sampling_lib.complete(*args).rollout
    else:
      samples = jax.device_put(samples, everywhere)
    rewards = np.asarray(samples.completion_ids).sum(-1) % 7 / 3
    make_batch = policies.jit(policy, make_batch_program(settings))
    reference = jax.tree.map(lambda x: 0.9 * x, policy.params)
    batch, _ = make_batch(policy.params, samples, rewards, ref_params=reference)

    def gradient(lm, params, batch, reference):
      # An optimizer that stores the gradient in its state.
      tx = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _, params: (jax.tree.map(jnp.zeros_like, params), grads),
      )
      state = init_state(params, tx, key)
      options = settings.optim.update
      update = make_update(lm, tx, settings.loss, options, sampling)
      return update(state, batch, reference)[0].opt_state

    grads = policies.jit(policy, gradient)(policy.params, batch, reference)
  return jax.device_get((samples, batch, grads))


def quick():
  """Compares the programs of a step on a mesh and on one device."""
  with tempfile.TemporaryDirectory() as directory:
    path = make_model(pathlib.Path(directory), **MODELS["llama"])
    one_update = {"optim.minibatches": 1, "loss.kl": "exact"}
    samples, batch, grads = programs(path, 1, one_update)
    cut = {"mesh.fsdp": 8, "mesh.sampling_tensor": 2}
    again, other, same = programs(path, 8, cut | one_update)
    same_samples("quick", samples, again)
    np.testing.assert_allclose(batch.advantages, other.advantages, atol=1e-5)
    np.testing.assert_allclose(
      batch.ref_logprobs, other.ref_logprobs, atol=1e-4
    )
    np.testing.assert_allclose(batch.ref_hidden, other.ref_hidden, atol=1e-4)
    close(grads, same, 1e-6)


def bfloat16():
  """Compares gradients in bfloat16, on a mesh and on one device, with float32.

  Whole runs would differ: Adam scales rounding errors up to full updates.
  """

  def distance(a, b):
    a = np.concatenate([*map(np.ravel, jax.tree.leaves(a))])
    b = np.concatenate([*map(np.ravel, jax.tree.leaves(b))])
    return np.linalg.norm(a - b) / np.linalg.norm(b)

  cut = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
  whole = {"optim.minibatches": 1}
  half = whole | {"model.dtype": "bfloat16"}
  with tempfile.TemporaryDirectory() as directory:
    path = make_model(pathlib.Path(directory), **MODELS["llama"])
    samples, _, one = programs(path, 1, half)
    again, *_ = programs(path, 8, half | cut)
    assert np.mean(samples.completion_ids == again.completion_ids) > 0.9
    *_, mesh = programs(path, 8, half | cut, samples)
    *_, exact = programs(path, 1, whole, samples)
    assert max(distance(one, exact), distance(mesh, exact)) < 0.1
    assert distance(mesh, one) < 0.05


def main(cases):
  """Runs cases: [model, settings of all, settings of each mesh]."""
  for model, settings, choices in cases:
    with tempfile.TemporaryDirectory() as directory:
      directory = pathlib.Path(directory)
      path = make_model(directory, **MODELS[model])
      one = run(path, directory / "one", 1, settings)
      for i, mesh in enumerate(choices):
        other = run(path, directory / str(i), 8, settings | mesh)
        name = f"{model} {settings} {mesh}"
        compare(name, one, other, hf.load_params(path))
        print("equal:", name, flush=True)


if __name__ == "__main__":
  program, *cases = sys.argv[1:]
  PROGRAMS = {"quick": quick, "bfloat16": bfloat16, "runs": main}
  PROGRAMS[program](*map(json.loads, cases))
