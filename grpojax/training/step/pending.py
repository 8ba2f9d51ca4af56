"""Stored form of the next step's completions, drawn a step ahead.

With sampling.ahead = 1 completions are always sampled from the parameters
before the last update, so that results do not depend on timing. Checkpoints
contain the pending draw, and a resumed run continues with it.
"""

import io
import json

import jax
import numpy as np

from grpojax.core import meshes, rows
from grpojax.core.types import Rollout, TrainState
from grpojax.data.examples import READ
from grpojax.rewards.pool import Failure, GroupRewards
from grpojax.training.step.draws import Draw

_HEADER = 8  # bytes of the file's length
_PROMPT = "prompt_text", READ  # fields that an environment's reset may change
_ARRAY = "\0"  # key of an array's number, which no field or function has


def to_stored(state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
  """Returns a state with its pending draw as an array of bytes.

  The bytes are the length of an npz file, the file, and zeros up to a rounded
  size, because each new size compiles another checksum program. The file has
  the draw as JSON text, with numbers for its arrays, and the arrays. Every
  process must call this function.
  """
  if state.pending is None:
    return state
  arrays = []

  def numbered(x):
    arrays.append(x)
    return {_ARRAY: len(arrays) - 1}

  rollout, rewards, examples, _ = state.pending
  fields = {
    "rollout": meshes.fetch(vars(rollout)),
    "rewards": rewards._asdict(),
    "examples": [{k: x[k] for k in _PROMPT if k in x} for x in examples],
  }
  text = json.dumps(fields, default=numbered).encode()
  file = io.BytesIO()
  np.savez(file, np.frombuffer(text, np.uint8), *arrays)
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
    text, *arrays = (file[f"arr_{i}"] for i in range(len(file.files)))
  fields = json.loads(
    text.tobytes(),
    object_hook=lambda x: arrays[x[_ARRAY]] if _ARRAY in x else x,
  )
  rewards = GroupRewards(**fields["rewards"])
  failures = [
    [[Failure(*failure) for failure in sample] for sample in group]
    for group in rewards.failures
  ]
  draw = Draw(
    rows.place(Rollout(**fields["rollout"]), mesh),
    rewards._replace(failures=failures),
    fields["examples"],
  )
  return state.replace(pending=draw)
