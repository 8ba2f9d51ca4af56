"""The bytes of main memory that a step cannot do without."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from grpojax.aot import programs
from grpojax.aot.report import forward_passes
from grpojax.core import mesh as mesh_lib
from grpojax.models.sharding import shard_bytes


def _weights(run: programs.Run, mesh: jax.sharding.Mesh, tokens: int) -> float:
  """Numbers of the weights that a device reads for so many tokens.

  Of experts those that tokens go to, were they all different; of an embedding
  that is no output head as well, a row a token, which is left out.
  """
  model, total = run.model, 0.0
  whole = run.state.params if run.policy.frozen is None else run.policy.frozen
  for name, x in flatten_dict(whole, sep="/").items():
    size = x.size / mesh.shape["tensor"]
    if name == "embed" and not model.tied:
      continue
    if name.startswith("layers/expert_"):
      read = min(1.0, tokens * model.experts_per_token / model.experts)
      size *= read / mesh.shape["expert"]
    total += size
  return total


def _read_a_token(run: programs.Run, t: int) -> int:
  """Numbers of keys and values that token t attends to, in all samples.

  A prompt's are read once for its group. A local layer reads those in its
  window.
  """
  model, limit = run.model, run.config.data.max_prompt_length
  total = 0
  for local in model.local_layers or (False,) * model.layers:
    own, prompt = t, limit
    if local:
      own = min(t, model.window)
      prompt = min(limit, model.window - own)
    total += run.prompts * (prompt + run.group_size * own)
  return total * 2 * model.kv_heads * model.head_dim


def least_bytes(run: programs.Run) -> dict[str, float]:
  """What each part of a step moves at least, a device.

  Sampling reads all weights and what is filled of the caches for each token.
  Each of `forward_passes` reads the weights once a micro-batch; the update
  twice, and adds to the gradients; the optimizer reads the gradients, and reads
  and writes parameters and its state. Activations and logits are left out.
  """
  config, optim = run.config, run.config.optim
  itemsize = jnp.dtype(config.model.dtype).itemsize
  sampling = mesh_lib.sampling_mesh(run.mesh, config.mesh.sampling_tensor)
  samples = run.prompts * run.group_size
  tokens = range(1, config.sampling.max_new_tokens)
  caches = itemsize * int(np.sum([_read_a_token(run, t) for t in tokens]))
  updates = optim.epochs * optim.minibatches
  cuts = optim.minibatches * optim.micro_batches
  trained = samples * config.sampling.max_new_tokens // cuts
  passes = itemsize * optim.micro_batches * _weights(run, run.mesh, trained)
  params = shard_bytes(run.state.params)
  state = params + shard_bytes(run.state.opt_state)
  gradients = params * (2 * optim.micro_batches + 1)
  before, within = forward_passes(run)
  return {
    "rollout": len(tokens) * itemsize * _weights(run, sampling, samples)
    + caches / sampling.size,
    "reference": passes * optim.minibatches * before,
    "update": updates * ((2 + within) * passes + gradients + 2 * state),
  }
