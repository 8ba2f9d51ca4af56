"""A reward model: a sequence classifier that reads prompt and completion.

The reward is its one logit at the last real token, as in transformers'
`AutoModelForSequenceClassification`.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import LM, Params
from grpojax.models import huggingface as hf

Chat = list[dict[str, Any]]


def load(path: str | os.PathLike, **options: Any) -> tuple[LM, Params]:
  """Reads a classifier by `hf.load`; ValueError for others, or more labels."""
  hf_config = hf.read_config(path, options.get("ignore_keys", ()))
  labels = hf.to_transformer_config(hf_config).labels
  if labels != 1:
    kind = f"has {labels} labels" if labels else "is a language model"
    raise ValueError(
      f"a reward model is a sequence classifier with num_labels=1, but the "
      f"model in {path} {kind}"
    )
  return hf.load(path, **options)


def rewards(
  lm: LM,
  params: Params,
  ids: Int[Array, "N S"],
  mask: Bool[Array, "N S"],
) -> Float[Array, "N"]:
  """Returns the logit of each right-padded sequence at its last real token."""
  prefix = lm.prefill(params, ids, mask)
  return lm.unembed(params, prefix.last_hidden)[:, 0]


def _batches(rows: list[list[int]], lengths: Sequence[int], batch_size: int):
  """Batches of one of few shapes: `(indices, ids, mask)`."""
  sizes = np.array([len(row) for row in rows])
  fitting = np.searchsorted(lengths, sizes)  # the shortest that is enough
  for kind, length in enumerate(lengths):
    (members,) = np.nonzero(fitting == kind)
    for start in range(0, len(members), batch_size):
      indices = members[start : start + batch_size]
      ids = np.zeros((batch_size, length), np.int32)
      used = np.ones(batch_size, np.int32)  # a missing row is one token long
      used[: len(indices)] = sizes[indices]
      for row, index in zip(ids, indices, strict=False):
        row[: sizes[index]] = rows[index]
      yield indices, ids, np.arange(length) < used[:, None]


def make_reward_model(
  lm: LM,
  params: Params,
  encode: Callable[[str | Chat], list[int]],
  *,
  lengths: Sequence[int],
  batch_size: int,
  sharding: jax.sharding.Sharding | None = None,
) -> Callable[[Sequence[str | Chat]], np.ndarray]:
  """Makes a function from texts or chats to their rewards.

  It compiles once for each length that occurs. Of a sequence above the longest
  it reads the end: the completion, and the token that is judged.

  The function is `(samples) -> rewards`, float32. A sample is a whole text, or
  a chat whose last message is the completion, which `encode` turns into ids;
  ValueError for no tokens. Sequences are padded to one of the ascending
  `lengths`. With a `sharding`, of ids and mask [batch_size, length],
  `batch_size` is a multiple of the devices that it splits the rows over.
  """
  run = jax.jit(lambda params, ids, mask: rewards(lm, params, ids, mask))

  def reward_model(samples: Sequence[str | Chat]) -> np.ndarray:
    rows = [encode(sample)[-lengths[-1] :] for sample in samples]
    if not all(rows):
      raise ValueError("a text to judge has no tokens at all")
    result = np.zeros(len(rows), np.float32)
    pending = []
    for indices, *arrays in _batches(rows, lengths, batch_size):
      if sharding is not None:
        arrays = [mesh_lib.put(x, sharding) for x in arrays]
      pending.append((indices, run(params, *map(jnp.asarray, arrays))))
    for indices, values in pending:  # all batches are under way by now
      result[indices] = mesh_lib.fetch(values)[: len(indices)]
    return result

  return reward_model
