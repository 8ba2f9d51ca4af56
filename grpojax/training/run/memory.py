"""Least memory of a run, counted before anything is allocated.

What is counted is a lower bound: arrays that certainly exist at the same time,
split over all devices where they may be. What fits is never refused; what
passes may still be too much, for compiled programs need more.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from grpojax.core.mesh import row_shards
from grpojax.models import huggingface as hf
from grpojax.models import lora, sharding
from grpojax.models.config import TransformerConfig, parameter_shapes
from grpojax.runtime import device_memory
from grpojax.training.optimizer import optimizer
from grpojax.training.policy import Policy
from grpojax.training.settings.batches import group_sizes, samples_per_step
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step.reference import follows_policy

WORD = 4  # bytes of a float32, of a token's id, or of its place


class Part(NamedTuple):
  """Arrays of one kind.

  Attributes:
    text: What they are, in words.
    bytes: Bytes on each device.
    settings: Settings or flags that decide how large they are.
  """

  text: str
  bytes: int
  settings: tuple[str, ...]


Phases = dict[str, list[Part]]
"""Parts that exist at the same time, by what a program is doing then."""


def _tree_bytes(tree: PyTree, mesh: jax.sharding.Mesh) -> int:
  """Bytes of abstract arrays on each device, sharded as a run shards them."""
  return sharding.shard_bytes(sharding.placed(tree, mesh))


def _parameters(model: TransformerConfig, dtype: Any) -> PyTree:
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, dtype),
    parameter_shapes(model),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def _sampling(
  settings: TrainSettings,
  model: TransformerConfig,
  prompts: int,
  group_size: int,
  names: tuple[str, ...],
  devices: int,
  penalised: bool = False,
) -> list[Part]:
  """Arrays that sampling holds besides the parameters.

  Args:
    settings: Settings of the run, or of an evaluation.
    model: Shape of the decoder.
    prompts: Prompts B, sampled at once.
    group_size: Completions a prompt, G.
    names: Settings that decide B and G, in this order.
    devices: Number of devices that share all of it.
    penalised: True where a repetition penalty remembers tokens.
  """
  itemsize = jnp.dtype(settings.model.dtype).itemsize
  token = 2 * model.layers * model.kv_heads * model.head_dim * itemsize
  slots = settings.sampling.decoding.slots or group_size
  at_once = prompts * min(slots, group_size)
  length = settings.sampling.max_new_tokens
  longest = settings.data.max_prompt_length
  completions = (*names, "sampling.max_new_tokens")
  of_prompts = (names[0], "data.max_prompt_length")
  parts = [
    ("decode cache", at_once * length * token, completions),
    ("completions", prompts * group_size * length * WORD, completions),
    # Each prompt once, whatever the group size, with its ids and its mask.
    ("prompts", prompts * longest * (token + WORD + 1), of_prompts),
    ("logits", at_once * model.vocab_size * WORD, names),
  ]
  if penalised:
    # A boolean for each token of the vocabulary.
    penalty = (*names, "sampling.repetition_penalty")
    parts.append(("tokens seen", at_once * model.vocab_size, penalty))
  return [Part(text, size // devices, names) for text, size, names in parts]


def _update(
  settings: TrainSettings, model: TransformerConfig, mesh: jax.sharding.Mesh
) -> list[Part]:
  """Arrays that a micro-batch's gradient holds besides the parameters."""
  update, samples = settings.optim.update, samples_per_step(settings)
  length = settings.sampling.max_new_tokens
  itemsize = jnp.dtype(settings.model.dtype).itemsize
  split = samples // (update.minibatches * update.micro_batches)
  at_once = max(1, split)
  positions = update.chunk_size * row_shards(mesh) // at_once
  chunk = at_once * min(length, max(1, positions))
  names = ("batch_size", "group_size", "optim.micro_batches")
  long = (*names, "sampling.max_new_tokens")
  activations = model.layers * split * length * model.width * itemsize
  parts = [
    ("completions", samples * length * WORD, long),
    # The input of each layer, from which the rest can be computed again.
    ("activations", activations, long),
    ("logits", chunk * model.vocab_size * WORD, (*names, "logits_chunk")),
  ]
  if settings.sampling.distribution.repetition_penalty != 1:
    # The place where each token of the vocabulary is first.
    penalty = (*names, "sampling.repetition_penalty")
    parts.append(("tokens seen", split * model.vocab_size * WORD, penalty))
  return [Part(text, size // mesh.size, names) for text, size, names in parts]


def training(
  settings: TrainSettings, model: TransformerConfig, mesh: jax.sharding.Mesh
) -> Phases:
  """Counts the parts of a step, and of an evaluation, on each device."""
  params = _parameters(model, jnp.float32)
  trained, frozen, names = params, 0, ("mesh.fsdp", "lora.rank")
  if settings.lora.rank:
    trained = lora.abstract(params, settings.lora.rank, settings.lora.targets)
    base = _parameters(model, jnp.dtype(settings.model.dtype))
    frozen = _tree_bytes(base, mesh)
  # The base model is the reference of adapters, until it follows them.
  reference = 0  # bytes, where it comes from the host for a pass
  fixed = settings.loss.needs_reference and not settings.lora.rank
  if follows_policy(settings) or fixed:
    reference = _tree_bytes(trained, mesh)
    if settings.model.reference == "device":
      frozen, reference = frozen + reference, 0
  optimized = jax.eval_shape(optimizer(settings).init, trained)
  state = _tree_bytes({"params": trained, "opt_state": optimized}, mesh)
  optim = (*names, "optim.name", "optim.moments_dtype")
  held = [Part("parameters and optimizer", state + frozen, optim)]
  gradients = Part("gradients", _tree_bytes(trained, mesh), names)
  size = group_sizes(settings)[0]
  penalised = settings.sampling.distribution.repetition_penalty != 1
  prompts = samples_per_step(settings) // size // settings.sampling.parts
  step = ("batch_size", "group_size")
  test_prompts, test = settings.eval.batch_size, ("eval.batch_size",)
  phases = {
    "sampling a step's completions": held
    + _sampling(settings, model, prompts, size, step, mesh.size, penalised),
    "an update": [*held, gradients, *_update(settings, model, mesh)],
    "an evaluation": held
    + _sampling(settings, model, test_prompts, 1, test, mesh.size),
  }
  if reference:
    names = ("mesh.fsdp", "lora.rank", "loss.beta")
    phases["scoring"] = [*held, Part("the reference", reference, names)]
  return phases


def evaluation(
  settings: TrainSettings, model: TransformerConfig, samples: int
) -> Phases:
  """Counts the parts of an evaluation by itself, on one device."""
  dtype = jnp.dtype(settings.model.dtype)
  shapes = jax.tree.leaves(_parameters(model, dtype))
  size = sum(x.size * dtype.itemsize for x in shapes)
  names = ("eval.batch_size", "--samples")
  prompts = settings.eval.batch_size
  held = [Part("parameters", size, ("--model",))]
  sampling = _sampling(settings, model, prompts, samples, names, devices=1)
  return {"an evaluation": held + sampling}


def fine_tuning(model: TransformerConfig, rows: int, row_length: int) -> Phases:
  """Counts the parts of supervised fine-tuning, on one device."""
  names = ("model.width", "model.layers", "model.mlp")
  weights = sum(x.size for x in jax.tree.leaves(_parameters(model, jnp.int8)))
  held = Part("parameters, gradients and momentum", 3 * WORD * weights, names)
  activations = model.layers * rows * row_length * model.width * WORD
  part = Part("activations", activations, ("rows", "row_length", *names[:2]))
  return {"a step": [held, part]}


def gigabytes(size: int) -> str:
  """Returns bytes for people: three digits, in GB (1e9 bytes)."""
  return f"{size / 1e9:,.0f} GB" if size >= 1e11 else f"{size / 1e9:.3g} GB"


def refuse(phases: Mapping[str, list[Part]], limit: int | None) -> None:
  """Refuses phases that cannot fit.

  Args:
    phases: Parts by phase.
    limit: Bytes that a device has; None is not known, and refuses nothing.

  Raises:
    ValueError: A phase needs more; the message has its parts and a remedy.
  """

  def total(parts):
    return sum(part.bytes for part in parts)

  doing, parts = max(phases.items(), key=lambda item: total(item[1]))
  if limit is None or total(parts) <= limit:
    return
  parts = sorted(parts, key=lambda part: part.bytes, reverse=True)
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
    f"not enough memory: {doing} takes {gigabytes(total(parts))} a device or "
    f"more, and there are {gigabytes(limit)}: {'; '.join(listed)}. Change "
    f"{', '.join(flags)}"
  )


def _shape(policy: Policy) -> TransformerConfig:
  return hf.to_transformer_config(hf.read_config(policy.directory))


def check(
  settings: TrainSettings, policy: Policy, mesh: jax.sharding.Mesh
) -> None:
  """Refuses a training run that cannot fit."""
  limit = device_memory.device_bytes(mesh.local_devices[0])
  refuse(training(settings, _shape(policy), mesh), limit)


def check_fine_tuning(
  model: TransformerConfig, rows: int, row_length: int
) -> None:
  """Refuses fine-tuning that cannot fit."""
  limit = device_memory.device_bytes(jax.local_devices()[0])
  refuse(fine_tuning(model, rows, row_length), limit)


def check_evaluation(
  settings: TrainSettings, policy: Policy, samples: int
) -> None:
  """Refuses an evaluation that cannot fit."""
  limit = device_memory.device_bytes(jax.local_devices()[0])
  refuse(evaluation(settings, _shape(policy), samples), limit)
