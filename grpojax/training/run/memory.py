"""Lower bound of a program's memory, before it is compiled.

The bound counts parameters, optimizer, gradients, the input of each layer and
the decode cache, split over all devices if possible. Programs that fit always
pass; some that do not fit may pass, too (see `python -m grpojax.compile`).
"""

import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from grpojax.core import logprobs
from grpojax.models import lora, sharding
from grpojax.models.config import TransformerConfig, parameter_shapes
from grpojax.training.run.setup import optimizer
from grpojax.training.settings.batches import group_sizes, samples_per_step
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step.extensions.moving_reference import follows_policy


class Part(NamedTuple):
  """Memory of the arrays of one kind."""

  text: str  # description in errors
  bytes: int  # per device
  settings: tuple[str, ...]  # settings or flags that determine the size


Phases = dict[str, list[Part]]
"""Parts that are in memory at the same time, per phase of a program."""


def _parameters(model: TransformerConfig, dtype: Any) -> PyTree:
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, dtype),
    parameter_shapes(model),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def _cache(
  settings: TrainSettings,
  model: TransformerConfig,
  prompts: int,
  group_size: int,
  names: tuple[str, ...],
  in_8_bits: bool = False,
) -> Part:
  """Returns the memory of the key-value cache; `names` set its batch size."""
  itemsize = jnp.dtype(settings.model.dtype).itemsize
  # Numbers per token: a key and a value in each layer with attention.
  token = 2 * len(model.layers_with("k")) * model.kv_heads * model.head_dim
  completions = group_size * settings.sampling.max_new_tokens
  completions *= 1 if in_8_bits else itemsize
  size = completions + settings.data.max_prompt_length * itemsize
  lengths = ("sampling.max_new_tokens", "data.max_prompt_length")
  # A linear layer has a float32 state per prompt and per completion.
  states = model.linear.memory if model.linear else 0
  states *= 4 * len(model.layers_with("linear_o")) * (group_size + 1)
  size = prompts * (token * size + states)
  return Part("decode cache", size, (*names, *lengths))


def training(
  settings: TrainSettings,
  model: TransformerConfig,
  mesh: jax.sharding.Mesh,
  teacher: TransformerConfig | None = None,
) -> Phases:
  """Returns the memory of sampling, an update and an evaluation, per device."""

  def size(tree):
    return sharding.shard_bytes(sharding.placed(tree, mesh))

  def shared(*parts):
    return [part._replace(bytes=part.bytes // mesh.size) for part in parts]

  trained = _parameters(model, jnp.float32)
  other_bytes = 0
  rank = settings.lora.rank
  frozen_dtype = jnp.dtype(settings.model.dtype)
  # With LoRA the model is frozen, and only the adapters have gradients.
  if rank:
    other_bytes = size(_parameters(model, frozen_dtype))
    trained = lora.abstract(trained, rank, settings.lora.targets)
  # The fixed reference of LoRA is the base model, which is counted already.
  fixed = settings.loss.needs_reference and not rank
  if settings.model.reference == "device" and teacher:
    other_bytes += size(_parameters(teacher, frozen_dtype))
  elif settings.model.reference == "device":
    other_bytes += size(trained) * (fixed or follows_policy(settings))
  optimized = jax.eval_shape(optimizer(settings).init, trained)
  state = size({"params": trained, "opt_state": optimized})
  names = ("mesh.fsdp", "lora.rank")
  optim = (*names, "optim.name", "optim.moments_dtype")
  resident = Part("parameters and optimizer", state + other_bytes, optim)
  samples = samples_per_step(settings)
  group_size = group_sizes(settings)[0]
  step = ("batch_size", "group_size")
  # With an environment all parts are sampled at the same time.
  at_once = 1 if settings.environment.on else settings.sampling.parts
  prompts = samples // group_size // at_once
  in_8_bits = settings.sampling.distribution.cache_dtype == "int8"
  cache = _cache(settings, model, prompts, group_size, step, in_8_bits)
  eval_prompts = settings.eval.batch_size
  eval_cache = _cache(settings, model, eval_prompts, 1, ("eval.batch_size",))
  update = settings.optim.update
  length = settings.sampling.max_new_tokens
  # Completion tokens of a micro-batch.
  tokens = samples // (update.minibatches * update.micro_batches) * length
  # Count the input of each layer; other activations can be recomputed.
  states = model.layers * tokens * model.width * frozen_dtype.itemsize
  state_names = (*step, "optim.micro_batches", "sampling.max_new_tokens")
  updating = [Part("activations", states, state_names)]
  if settings.loss.has_exact_kl:  # needs the hidden states of all tokens
    states = samples * length * (teacher or model).width * frozen_dtype.itemsize
    state_names = ("loss.kl", *step, "sampling.max_new_tokens")
    updating.append(Part("states of the reference", states, state_names))
  gradients = Part("gradients", size(trained), names)
  return {
    "sampling a step's completions": [resident, *shared(cache)],
    "an update": [resident, gradients, *shared(*updating)],
    "an evaluation": [resident, *shared(eval_cache)],
  }


def evaluation(
  settings: TrainSettings, model: TransformerConfig, samples: int
) -> Phases:
  """Returns the memory of grpojax.evaluate, on one device."""
  params = _parameters(model, jnp.dtype(settings.model.dtype))
  resident = Part("parameters", sharding.shard_bytes(params), ("--model",))
  names = ("eval.batch_size", "--samples")
  prompts = settings.eval.batch_size
  cache = _cache(settings, model, prompts, samples, names)
  return {"an evaluation": [resident, cache]}


def fine_tuning(model: TransformerConfig, rows: int, row_length: int) -> Phases:
  """Returns the memory of a step of grpojax.sft in float32, on one device."""
  names = ("model.width", "model.layers", "model.mlp")
  size = sharding.shard_bytes(_parameters(model, jnp.float32))
  resident = Part("parameters, gradients and momentum", 3 * size, names)
  size = 4 * model.layers * rows * row_length * model.width
  activations = Part("activations", size, ("rows", "row_length", *names[:2]))
  return {"a step": [resident, activations]}


def logits_chunk(model: TransformerConfig, limit: int | None) -> int:
  """Returns the default of logits_chunk for an accelerator of `limit` bytes.

  It is the largest power of 2 whose logits, probabilities and gradients take at
  most a tenth of it, as each chunk reads and writes the head's gradient.
  """
  if limit is None:
    return logprobs.CHUNK
  most = limit // (10 * 3 * 4 * model.vocab_size)
  return 2 ** (max(most, 1).bit_length() - 1)


def gigabytes(size: int) -> str:
  """Formats bytes as GB (1e9 bytes) with three digits."""
  return f"{size / 1e9:,.0f} GB" if size >= 1e11 else f"{size / 1e9:.3g} GB"


def refuse(phases: Phases, limit: int | None = None) -> None:
  """Raises ValueError if a phase exceeds `limit` (default: device memory)."""
  if limit is None:
    limit = device_bytes(jax.local_devices()[0])

  def total(phase):
    return sum(part.bytes for part in phases[phase])

  phase = max(phases, key=total)
  if limit is None or total(phase) <= limit:
    return
  parts = sorted(phases[phase], key=lambda part: part.bytes, reverse=True)
  listed = [
    f"{part.text} {gigabytes(part.bytes)} ({', '.join(part.settings)})"
    for part in parts
    if part.bytes >= limit / 100
  ]
  flags = [
    name if name.startswith("-") else f"--config.{name}"
    for name in parts[0].settings
  ]
  raise ValueError(
    f"not enough memory: {phase} takes at least {gigabytes(total(phase))} per "
    f"device, which has {gigabytes(limit)}: {'; '.join(listed)}. Change "
    f"{', '.join(flags)}"
  )


def host_bytes(root: str | os.PathLike = "/") -> int:
  """Returns the memory of this machine or container in bytes, with swap space.

  If a control group has a smaller limit, it replaces the physical memory.
  `root` contains the directories `proc` and `sys`.
  """

  def read(name: str) -> str:
    try:
      return pathlib.Path(root, name).read_text()
    except OSError:  # some systems lack the file
      return ""

  memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  # Versions 2 and 1 of control groups.
  for name in ("memory.max", "memory/memory.limit_in_bytes"):
    limit = read(f"sys/fs/cgroup/{name}").strip()
    if limit.isdecimal():  # "max" is no limit
      memory = min(memory, int(limit))
  if swap := re.search(r"^SwapTotal:\s*(\d+)", read("proc/meminfo"), re.M):
    memory += int(swap[1]) * 1024
  return memory


def accelerator_bytes() -> int | None:
  """Returns the memory of an accelerator in bytes; None on CPUs."""
  device = jax.local_devices()[0]
  return None if device.platform == "cpu" else device_bytes(device)


def device_bytes(device: jax.Device) -> int | None:
  """Returns a device's memory in bytes, if known; CPUs share host memory."""
  limit = (device.memory_stats() or {}).get("bytes_limit")
  if limit or device.platform != "cpu":
    return limit or None
  return host_bytes() // jax.local_device_count("cpu")
