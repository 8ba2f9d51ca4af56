"""Memory that a run cannot do without, counted before anything is allocated.

What is counted is a lower bound: arrays that certainly exist at the same time,
cut over all devices where they may be. What fits is never refused; what passes
may still be too much, for compiled programs need more.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from ml_collections import ConfigDict

from grpojax.core.mesh import row_shards
from grpojax.models import hf, lora, sharding
from grpojax.models.config import TransformerConfig, parameter_shapes
from grpojax.runtime import config as config_lib
from grpojax.runtime import device_memory
from grpojax.training import from_config, group_sizes
from grpojax.training import reference as reference_lib
from grpojax.training.optimizer import optimizer
from grpojax.training.policy import Policy

FLOAT32 = 4  # bytes, of trained parameters, gradients and logits
ID = 4  # bytes of a token's id, or of its place
PENALTY = "sampling.repetition_penalty"


class Part(NamedTuple):
  """Arrays of one kind.

  Attributes:
    what: in words.
    bytes: on each device.
    settings: those that decide how large they are.
  """

  what: str
  bytes: int
  settings: tuple[str, ...]


class Rows(NamedTuple):
  """The sizes of one rollout.

  Attributes:
    prompts: B.
    group_size: G.
    prompt_length: P.
    length: T.
    settings: those that decide B and G, in this order.
    slots: samples of each prompt that are decoded at once, see `Decoding`.
    penalised: whether there is a repetition penalty.
  """

  prompts: int
  group_size: int
  prompt_length: int
  length: int
  settings: tuple[str, ...]
  slots: int = 0
  penalised: bool = False

  @property
  def at_once(self) -> int:
    """Samples that are decoded at once."""
    return self.prompts * min(self.slots or self.group_size, self.group_size)


def _tree_bytes(tree: PyTree, mesh: jax.sharding.Mesh) -> int:
  """Bytes of abstract arrays on each device, cut as a run cuts them."""
  return sharding.shard_bytes(sharding.placed(tree, mesh))


def _parameters(model: TransformerConfig, dtype: Any) -> PyTree:
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, dtype),
    parameter_shapes(model),
    is_leaf=lambda x: isinstance(x, tuple),
  )


def rollout(
  model: TransformerConfig, rows: Rows, itemsize: int, devices: int
) -> list[Part]:
  """What sampling completions holds besides the parameters.

  Args:
    model: the shape of the decoder.
    rows: of the batch.
    itemsize: bytes of a number that is computed with.
    devices: that share all of it.
  """
  samples = rows.prompts * rows.group_size
  token = 2 * model.layers * model.kv_heads * model.head_dim * itemsize
  lengths = ("data.max_prompt_length",), ("sampling.max_new_tokens",)
  prompts, completions = (
    rows.settings[:1] + lengths[0],
    rows.settings + lengths[1],
  )
  parts = [
    ("decode cache", rows.at_once * rows.length * token, completions),
    ("completions", samples * rows.length * ID, completions),
    # Each prompt once, whatever the group size, with its ids and its mask.
    ("prompts", rows.prompts * rows.prompt_length * (token + ID + 1), prompts),
    ("logits", rows.at_once * model.vocab_size * FLOAT32, rows.settings),
  ]
  if rows.penalised:  # a boolean for each token of the vocabulary
    seen = rows.at_once * model.vocab_size
    parts.append(("tokens seen", seen, (*rows.settings, PENALTY)))
  return [Part(what, size // devices, names) for what, size, names in parts]


def _update(
  config: ConfigDict,
  model: TransformerConfig,
  rows: Rows,
  itemsize: int,
  mesh: jax.sharding.Mesh,
) -> list[Part]:
  """What the gradient of a micro-batch holds besides the parameters."""
  cuts = config.optim.minibatches * config.optim.micro_batches
  samples = rows.prompts * rows.group_size
  tokens = samples // cuts * rows.length
  at_once = max(1, samples // cuts)
  positions = config.logits_chunk * row_shards(mesh) // at_once
  chunk = at_once * min(rows.length, max(1, positions))
  settings = (*rows.settings, "optim.micro_batches")
  long = (*settings, "sampling.max_new_tokens")
  activations = tokens * model.width * itemsize
  parts = [
    ("completions", samples * rows.length * ID, long),
    # The input of each layer, from which the rest can be computed again.
    ("activations", model.layers * activations, long),
    (
      "logits",
      chunk * model.vocab_size * FLOAT32,
      (*settings, "logits_chunk"),
    ),
  ]
  if rows.penalised:  # the place where each token of the vocabulary is first
    seen = samples // cuts * model.vocab_size * ID
    parts.append(("tokens seen", seen, (*settings, PENALTY)))
  return [Part(what, size // mesh.size, names) for what, size, names in parts]


def training(
  config: ConfigDict, model: TransformerConfig, mesh: jax.sharding.Mesh
) -> dict[str, list[Part]]:
  """What each part of a step, and an evaluation, needs a device.

  Args:
    config: the run's.
    model: the shape of its model.
    mesh: the run's.

  Returns:
    Parts that exist at the same time, by what the run is doing then.
  """
  dtype = jnp.dtype(config.model.dtype)
  params = _parameters(model, jnp.float32)
  trained, frozen, names = params, 0, ("mesh.fsdp", "lora.rank")
  reference = 0  # bytes, where it comes from the host for a pass
  if config.lora.rank:
    trained = lora.abstract(params, config.lora.rank, config.lora.targets)
    frozen = _tree_bytes(_parameters(model, dtype), mesh)
  # The base model is the reference of adapters, until it follows them.
  follows = reference_lib.follows(config)
  if follows or (from_config.needs_reference(config) and trained is params):
    reference = _tree_bytes(trained, mesh)
    if config.model.reference == "device":
      frozen, reference = frozen + reference, 0
  optimized = jax.eval_shape(optimizer(config).init, trained)
  state = _tree_bytes({"params": trained, "opt_state": optimized}, mesh)
  kept = (*names, "optim.name", "optim.moments_dtype")
  held = [Part("parameters and optimizer", state + frozen, kept)]
  gradients = Part("gradients", _tree_bytes(trained, mesh), names)
  leaves = config_lib.flatten(config)
  size = group_sizes.group_sizes(leaves)[0]
  lengths = config.data.max_prompt_length, config.sampling.max_new_tokens
  step = Rows(
    group_sizes.samples_per_step(leaves) // size,
    size,
    *lengths,
    ("batch_size", "group_size"),
    config.sampling.slots,
    config.sampling.repetition_penalty != 1,
  )
  test = Rows(config.eval.batch_size, 1, *lengths, ("eval.batch_size",))
  sizes = dtype.itemsize, mesh.size
  part = step._replace(prompts=step.prompts // config.sampling.parts)
  phases = {
    "sampling a step's completions": held + rollout(model, part, *sizes),
    "an update": [
      *held,
      gradients,
      *_update(config, model, step, dtype.itemsize, mesh),
    ],
    "an evaluation": held + rollout(model, test, *sizes),
  }
  if reference:
    named = ("mesh.fsdp", "lora.rank", "loss.beta")
    phases["scoring"] = [*held, Part("the reference", reference, named)]
  return phases


def evaluation(
  config: ConfigDict, model: TransformerConfig, samples: int
) -> dict[str, list[Part]]:
  """As `training`, for an evaluation by itself, on one device.

  Args:
    config: of the evaluation.
    model: the shape of the model.
    samples: completions a prompt.
  """
  dtype = jnp.dtype(config.model.dtype)
  shapes = jax.tree.leaves(_parameters(model, dtype))
  size = sum(x.size * dtype.itemsize for x in shapes)
  rows = Rows(
    config.eval.batch_size,
    samples,
    config.data.max_prompt_length,
    config.sampling.max_new_tokens,
    ("eval.batch_size", "--samples"),
    config.sampling.slots,
  )
  held = [Part("parameters", size, ("--model",))]
  return {"an evaluation": held + rollout(model, rows, dtype.itemsize, 1)}


def fine_tuning(
  model: TransformerConfig, rows: int, row_length: int
) -> dict[str, list[Part]]:
  """As `training`, for supervised fine-tuning on one device.

  Args:
    model: the shape of the model.
    rows: of a step.
    row_length: in tokens.
  """
  names = ("model.width", "model.layers", "model.mlp")
  weights = sum(x.size for x in jax.tree.leaves(_parameters(model, jnp.int8)))
  held = Part(
    "parameters, gradients and momentum", 3 * FLOAT32 * weights, names
  )
  activations = model.layers * rows * row_length * model.width * FLOAT32
  part = Part("activations", activations, ("rows", "row_length", *names[:2]))
  return {"a step": [held, part]}


def gigabytes(size: int) -> str:
  """For people: three digits, in GB (1e9 bytes)."""
  return f"{size / 1e9:,.0f} GB" if size >= 1e11 else f"{size / 1e9:.3g} GB"


def refuse(phases: Mapping[str, list[Part]], limit: int | None) -> None:
  """Refuses what cannot fit.

  Args:
    phases: from `training` or `evaluation`.
    limit: bytes that a device has; None is not known, and refuses nothing.

  Raises:
    ValueError: one of the phases needs more; the parts and what to change.
  """

  def total(parts):
    return sum(part.bytes for part in parts)

  doing, parts = max(phases.items(), key=lambda item: total(item[1]))
  if limit is None or total(parts) <= limit:
    return
  parts = sorted(parts, key=lambda part: part.bytes, reverse=True)
  shown = [
    f"{part.what} {gigabytes(part.bytes)} ({', '.join(part.settings)})"
    for part in parts
    if part.bytes >= limit / 100
  ]
  raise ValueError(
    f"not enough memory: {doing} takes {gigabytes(total(parts))} a device or "
    f"more, and there are {gigabytes(limit)}: {'; '.join(shown)}. Change "
    f"{', '.join(map(_typed, parts[0].settings))}"
  )


def _typed(setting: str) -> str:
  """As it is given to a program: a flag has its dashes already."""
  return setting if setting.startswith("-") else f"--config.{setting}"


def _shape(policy: Policy) -> TransformerConfig:
  return hf.to_transformer_config(hf.read_config(policy.directory))


def check(config: ConfigDict, policy: Policy, mesh: jax.sharding.Mesh) -> None:
  """Refuses a training run that cannot fit; see `refuse`.

  Args:
    config: the run's.
    policy: its model, with or without weights.
    mesh: its mesh.
  """
  limit = device_memory.device_bytes(mesh.local_devices[0])
  refuse(training(config, _shape(policy), mesh), limit)


def check_fine_tuning(
  model: TransformerConfig, rows: int, row_length: int
) -> None:
  """Refuses fine-tuning that cannot fit; see `fine_tuning` and `refuse`."""
  limit = device_memory.device_bytes(jax.local_devices()[0])
  refuse(fine_tuning(model, rows, row_length), limit)


def check_evaluation(config: ConfigDict, policy: Policy, samples: int) -> None:
  """Refuses an evaluation that cannot fit; see `evaluation` and `refuse`."""
  limit = device_memory.device_bytes(jax.local_devices()[0])
  refuse(evaluation(config, _shape(policy), samples), limit)
