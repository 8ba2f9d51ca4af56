"""The bytes of main memory that a step cannot do without."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from grpojax.aot import programs
from grpojax.core import mesh as mesh_lib
from grpojax.models.sharding import shard_bytes


def _size(tree: PyTree) -> int:
  return sum(x.size for x in jax.tree.leaves(tree))


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
  The reference reads the weights once a micro-batch; the update twice, and
  adds to the gradients; the optimizer reads the gradients, and reads and writes
  parameters and its state. Activations and logits are left out.
  """
  config, optim = run.config, run.config.optim
  itemsize = jnp.dtype(config.model.dtype).itemsize
  sampling = mesh_lib.sampling_mesh(run.mesh, config.mesh.sampling_tensor)
  whole = run.state.params if run.policy.frozen is None else run.policy.frozen
  weights = _size(whole) * itemsize
  tokens = range(1, config.sampling.max_new_tokens)
  caches = itemsize * int(np.sum([_read_a_token(run, t) for t in tokens]))
  updates = optim.epochs * optim.minibatches
  passes = weights / run.mesh.shape["tensor"] * optim.micro_batches
  params = shard_bytes(run.state.params)
  state = params + shard_bytes(run.state.opt_state)
  gradients = params * (2 * optim.micro_batches + 1)
  return {
    "rollout": len(tokens) * weights / sampling.shape["tensor"]
    + caches / sampling.size,
    "reference": passes * optim.minibatches * (run.ref_params is not None),
    "update": updates * (2 * passes + gradients + 2 * state),
  }
