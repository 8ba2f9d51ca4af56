"""Reference policy: storage in device or host memory, and its prompts.

The reference may read other prompts (`model.reference_prompt`), with a hint
that the policy learns to do without (self-distillation).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from grpojax.core import meshes
from grpojax.core.types import Params, Prompts
from grpojax.data import pipeline
from grpojax.data.examples import READ
from grpojax.runtime.cli.configs import config_error
from grpojax.runtime.text import tokenization
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.policies import Policy
from grpojax.training.settings.inputs import REFERENCE_MEMORY
from grpojax.training.settings.run import TrainSettings

_MULTIPLE = 64  # pad prompts to multiples of this, to compile few programs


def check_memory(memory: str, mesh: Mesh) -> None:
  """Raises ValueError if devices lack the memory set by model.reference."""
  device = mesh.local_devices[0]
  kind = REFERENCE_MEMORY[memory]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if kind is not None and kind not in kinds:
    remedy = f"{device.platform} has no memory of the kind {kind}: use device"
    raise ValueError(config_error("model.reference", memory, remedy))


def to_memory(params: Params | None, memory: str) -> Any:
  """Moves a reference to device or host `memory`; keeps None and {} (LoRA)."""
  kind = REFERENCE_MEMORY[memory]
  if kind is None:
    return params
  return jax.tree.map(
    lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind)), params
  )


def to_device(params: Params | None) -> PyTree:
  """Moves a reference to device memory; keeps None and {} (LoRA)."""

  def move(x):
    (kind,) = {d.default_memory().kind for d in x.sharding.addressable_devices}
    return jax.device_put(x, x.sharding.with_memory_kind(kind))

  return jax.tree.map(move, params)


def copied(params: Params) -> Params:
  """Copies parameters."""
  return jax.tree.map(jnp.copy, params)


def check_prompt(settings: TrainSettings, example: Mapping[str, Any]) -> None:
  """Raises ValueError if an example lacks a field of model.reference_prompt."""
  template = settings.model.reference_prompt
  missing = tokenization.fields(template) - example.keys()
  if missing:
    remedy = (
      f"an example has no {', '.join(sorted(missing))}: use its fields "
      f"{', '.join(sorted(example))}"
    )
    raise ValueError(config_error("model.reference_prompt", template, remedy))


def hinted(template: str, example: Mapping[str, Any]) -> Any:
  """Returns the reference's prompt, with the reset's observation, if any."""
  prompt = example.get(READ, example["prompt"])
  values = {
    name: example.get(name, "") for name in tokenization.fields(template)
  }
  if isinstance(prompt, str):
    return template.format(**values | {"prompt": prompt})
  # In a chat the template surrounds only the last message.
  *before, last = prompt
  values["prompt"] = last["content"]
  return [*before, {**last, "content": template.format(**values)}]


def make_read_prompts(
  settings: TrainSettings, policy: Policy, mesh: Mesh
) -> Callable[[Sequence[Mapping[str, Any]]], Prompts] | None:
  """Returns a function from examples to the reference's prompts.

  None if the reference has the policy's prompts. Missing fields are empty.
  """
  template = settings.model.reference_prompt
  if not template:
    return None
  encode = prompts_lib.encoder(settings, policy)

  def read_prompts(examples: Sequence[Mapping[str, Any]]) -> Prompts:
    rows = [encode(hinted(template, example))[1] for example in examples]
    size = -(-max(map(len, rows)) // _MULTIPLE) * _MULTIPLE
    prompts = pipeline.padded(rows, size, policy.pad_id)
    return meshes.place(prompts, mesh, "batch")

  return read_prompts
