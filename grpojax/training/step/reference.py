"""Reference policy: storage in device or host memory, updates and prompts.

A fixed reference is the starting policy, stored with the run. A moving one
(TR-DPO, arXiv 2404.09656) is part of the state and its checkpoints: every
`model.reference_every` steps its parameters become

    mix * policy + (1 - mix) * reference,    mix = model.reference_mix

With mix = 1 this copies the policy; a small mix at every step is an exponential
average. For LoRA both factors of the adapters are mixed.

The reference may read other prompts (`model.reference_prompt`), with a hint
that the policy learns to do without (self-distillation).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from grpojax.core import meshes
from grpojax.core.types import Params, Prompts, TrainState
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


def follows_policy(settings: TrainSettings) -> bool:
  """Returns True if the reference changes while training."""
  return settings.loss.beta > 0 and settings.model.reference_every > 0


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


def state_to_memory(state: TrainState, settings: TrainSettings) -> TrainState:
  """Moves a state's reference to the memory set by model.reference."""
  reference = to_memory(state.reference, settings.model.reference)
  return state.replace(reference=reference)


def make_copy(shardings: PyTree) -> Callable[[Params], Params]:
  """Returns a function that copies parameters on their devices."""
  copy = functools.partial(jax.tree.map, jnp.copy)
  return jax.jit(copy, out_shardings=shardings)


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


def make_update_reference(
  settings: TrainSettings, shardings: TrainState
) -> Callable[[TrainState], TrainState]:
  """Returns a function that updates a moving reference when it is due."""
  every = settings.model.reference_every
  mix = settings.model.reference_mix

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings.params)
  def move(reference: Params, params: Params) -> Params:
    return jax.tree.map(
      lambda r, p: (mix * p + (1 - mix) * r).astype(r.dtype), reference, params
    )

  def update_reference(state: TrainState) -> TrainState:
    if state.reference is None or int(state.step) % every:
      return state
    new = move(to_device(state.reference), state.params)
    return state_to_memory(state.replace(reference=new), settings)

  return update_reference
