"""Rollout of the next step, sampled before the update of this one.

With sampling.ahead = 1 completions are always sampled from the parameters
before the last update, so that results do not depend on timing. Checkpoints
contain the pending rollout, and a resumed run continues with it.
"""

import io
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpojax.core import meshes
from grpojax.core.types import Rollout, TrainState
from grpojax.data.examples import READ
from grpojax.rewards.groups import GroupRewards
from grpojax.rewards.pool import Failure

_HEADER = 8  # bytes of the file's length
_PROMPT = "prompt_text", READ  # fields that an environment's reset may change
_BY_FUNCTION = ("values", "extras")  # fields of `GroupRewards`: arrays by name


class Pending(NamedTuple):
  """Completions of the next step with their rewards and prompts."""

  rollout: Rollout
  rewards: GroupRewards
  prompts: list[dict[str, Any]]  # fields `_PROMPT` of each example


def make_pending(
  rollout: Rollout, rewards: GroupRewards, examples: Sequence[dict[str, Any]]
) -> Pending:
  """Returns a `Pending` of a rollout, its rewards and its examples' prompts."""
  prompts = [{k: x[k] for k in _PROMPT if k in x} for x in examples]
  return Pending(rollout, rewards, prompts)


def to_stored(state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
  """Returns a state with its pending rollout as an array of bytes.

  The bytes are the length of an npz file, the file, and zeros up to a rounded
  size, because each new size compiles another checksum program. Every process
  must call this function.
  """
  if state.pending is None:
    return state
  rollout, rewards, prompts = state.pending
  arrays = {
    f"rollout/{name}": value
    for name, value in meshes.fetch(vars(rollout)).items()
    if value is not None
  }
  arrays |= {"rewards": rewards.rewards, "failed": rewards.failed}
  names = {kind: list(getattr(rewards, kind)) for kind in _BY_FUNCTION}
  for kind in names:  # numbered, since a name may be invalid in a file
    values = getattr(rewards, kind).values()
    arrays |= {f"{kind}/{i}": value for i, value in enumerate(values)}
  # Failures, prompts and names are JSON text, stored as an array of bytes.
  about = json.dumps([rewards.failures, prompts, names]).encode()
  file = io.BytesIO()
  np.savez(file, about=np.frombuffer(about, np.uint8), **arrays)
  content = file.tell().to_bytes(_HEADER, "little") + file.getvalue()
  # Round up to a multiple of a power of two.
  unit = 1 << (len(content).bit_length() - 3)  # 1/8 to 1/4 of the length
  content = content.ljust(-(-len(content) // unit) * unit, b"\0")
  stored = np.frombuffer(content, np.uint8)
  return state.replace(pending=meshes.place(stored, mesh))


def from_stored(state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
  """Inverts `to_stored`; the rollout is placed on the mesh."""
  if state.pending is None:
    return state
  stored = meshes.fetch(state.pending).tobytes()
  length = int.from_bytes(stored[:_HEADER], "little")
  content = io.BytesIO(stored[_HEADER:][:length])
  with np.load(content, allow_pickle=False) as file:
    arrays = {name: file[name] for name in file.files}
  failures, prompts, names = json.loads(arrays.pop("about").tobytes())
  by_function = {
    kind: {name: arrays[f"{kind}/{i}"] for i, name in enumerate(names[kind])}
    for kind in _BY_FUNCTION
  }
  fields = {
    name.removeprefix("rollout/"): value
    for name, value in arrays.items()
    if name.startswith("rollout/")
  }
  rollout = meshes.map_rows(
    lambda x, *names: meshes.place(x, mesh, *names), Rollout(**fields)
  )
  rewards = GroupRewards(
    rewards=arrays["rewards"],
    failed=arrays["failed"],
    failures=[[[Failure(*x) for x in row] for row in g] for g in failures],
    **by_function,
  )
  return state.replace(pending=Pending(rollout, rewards, prompts))
