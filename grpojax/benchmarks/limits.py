"""Limits of a step: peaks of the devices, and bytes that it has to move.

Peaks are those of the table of chips, or measured where a device is in none.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from grpojax.aot import chips, programs
from grpojax.aot.report import forward_passes
from grpojax.core import mesh as mesh_lib
from grpojax.models.sharding import shard_bytes

_SIZE = 2048  # rows and columns of the product that is measured
_COPIED = 2**26  # numbers that are read and written; more than any cache holds
_REPEATS = 7


class Machine(NamedTuple):
  """Devices of one kind, and the peaks of one of them.

  Attributes:
    kind: Kind of the devices.
    count: Number of devices.
    flops: Rate of matrix products, FLOP/s.
    bandwidth: Rate of main memory, reading and writing, bytes/s.
    source: Source of the two rates.
  """

  kind: str
  count: int
  flops: float
  bandwidth: float
  source: str


def _shortest(function: Callable[[Any], Any], x: Any) -> float:
  """Seconds of the fastest of several runs, after one that compiles."""
  x, seconds = jax.block_until_ready(function(x)), []
  for _ in range(_REPEATS):
    start = time.perf_counter()
    x = jax.block_until_ready(function(x))
    seconds.append(time.perf_counter() - start)
  return min(seconds)


def measured(
  dtype: Any, size: int = _SIZE, copied: int = _COPIED
) -> tuple[float, float]:
  """Measures the FLOP/s of a square matrix product and the bytes/s of a copy.

  The latter is of float32 numbers, each of which is read and written.
  """
  x = jnp.full((size, size), 1 / size, dtype)  # its own square
  product = _shortest(jax.jit(lambda x: x @ x), x)
  # In place: new memory would first have to be handed out by the system.
  add = jax.jit(lambda y: y + 1, donate_argnums=0)
  copy = _shortest(add, jnp.zeros(copied, jnp.float32))
  return 2 * size**3 / product, 2 * 4 * copied / copy


def find(kind: str, count: int, dtype: Any) -> Machine:
  """Returns the peaks of `count` devices of a `device_kind`.

  `dtype` is that of the matrix product, where peaks have to be measured.
  """
  chip = chips.of_kind(kind)
  if chip:
    device = chips.device(chip)
    source = f"bfloat16, {chip.source}"
    return Machine(kind, count, device.flops, device.hbm_bandwidth, source)
  # One device of a CPU can have all its cores, which the others share.
  share = count if kind == "cpu" else 1
  flops, bandwidth = (peak / share for peak in measured(dtype))
  return Machine(kind, count, flops, bandwidth, f"measured, {dtype}")


def peak_memory(mesh: jax.sharding.Mesh) -> int | None:
  """Most bytes that a device of this process held; None if it does not say."""
  stats = [device.memory_stats() or {} for device in mesh.local_devices]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  return max(peaks, default=None)


def _weights(run: programs.Run, mesh: jax.sharding.Mesh, tokens: int) -> float:
  """Numbers of the weights that a device reads for so many tokens.

  Of experts those that tokens go to, were they all different. An embedding that
  is no output head is left out: a row a token.
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


def _attended(run: programs.Run, t: int) -> int:
  """Numbers of keys and values that token t attends to, in all samples.

  A prompt's are read once for its group.
  """
  model, limit = run.model, run.settings.data.max_prompt_length
  total = 0
  for local in model.local_layers or (False,) * model.layers:
    own, prompt = t, limit
    if local:
      own = min(t, model.window)
      prompt = min(limit, model.window - own)
    total += run.prompts * (prompt + run.group_size * own)
  return total * 2 * model.kv_heads * model.head_dim


def least_bytes(run: programs.Run) -> dict[str, float]:
  """Returns the bytes that each part of a step moves at least, a device.

  Sampling reads all weights and what is filled of the caches for each token.
  Each of `forward_passes` reads the weights once a micro-batch; the update
  twice, and adds to the gradients; the optimizer reads the gradients, and reads
  and writes parameters and its state. Activations and logits are left out.
  """
  settings, update = run.settings, run.settings.optim.update
  itemsize = jnp.dtype(settings.model.dtype).itemsize
  sampling = mesh_lib.sampling_mesh(run.mesh, settings.mesh.sampling_tensor)
  samples = run.prompts * run.group_size
  tokens = range(1, settings.sampling.max_new_tokens)
  caches = itemsize * sum(_attended(run, t) for t in tokens)
  updates = update.epochs * update.minibatches
  micro_batches = update.minibatches * update.micro_batches
  trained = samples * settings.sampling.max_new_tokens // micro_batches
  passes = itemsize * update.micro_batches * _weights(run, run.mesh, trained)
  params = shard_bytes(run.state.params)
  state = params + shard_bytes(run.state.opt_state)
  gradients = params * (2 * update.micro_batches + 1)
  before, within = forward_passes(run)
  return {
    "rollout": len(tokens) * itemsize * _weights(run, sampling, samples)
    + caches / sampling.size,
    "reference": passes * update.minibatches * before,
    "update": updates * ((2 + within) * passes + gradients + 2 * state),
  }
