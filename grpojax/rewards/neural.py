"""Reward models: sequence classifiers with a single logit.

The reward is the logit at the last real token of prompt and completion, as in
transformers' `AutoModelForSequenceClassification`.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpojax.core import meshes
from grpojax.core.types import LM, Params
from grpojax.data import pipeline
from grpojax.models import huggingface as hf

Chat = list[dict[str, Any]]


def load(path: str | os.PathLike, **options: Any) -> tuple[LM, Params]:
  """Loads a classifier with `hf.load`; ValueError unless num_labels is 1."""
  hf_config = hf.read_config(path, options.get("ignore_keys", ()))
  labels = hf.to_transformer_config(hf_config).labels
  if labels != 1:
    kind = f"has {labels} labels" if labels else "is a language model"
    raise ValueError(
      f"the model in {path} {kind}: a reward model is a sequence classifier "
      "with num_labels=1"
    )
  return hf.load(path, **options)


def _batches(rows: list[list[int]], lengths: Sequence[int], batch_size: int):
  """Yields batches `(indices, ids, mask)`, padded to the next larger length."""
  bins = np.searchsorted(lengths, [len(row) for row in rows])
  for i, length in enumerate(lengths):
    (members,) = np.nonzero(bins == i)
    for start in range(0, len(members), batch_size):
      indices = members[start : start + batch_size]
      batch = [rows[i] for i in indices]
      batch += [[0]] * (batch_size - len(batch))
      padded = pipeline.padded(batch, length, pad_id=0)
      yield indices, padded.prompt_ids, padded.prompt_mask


def make_reward_model(
  lm: LM,
  params: Params,
  encode: Callable[[str | Chat], list[int]],
  *,
  lengths: Sequence[int],
  batch_size: int,
  sharding: jax.sharding.Sharding | None = None,
) -> Callable[[Sequence[str | Chat]], np.ndarray]:
  """Returns a function `(samples) -> rewards` (float32) of texts or chats.

  A sample is a whole text, or a chat whose last message is the completion;
  `encode` turns it into ids. Sequences are padded to one of the ascending
  `lengths`, each compiled at first use; longer sequences lose their beginning.
  ValueError for a sample without tokens. `sharding` places ids and mask
  [batch_size, length]; its number of devices for rows must divide `batch_size`.
  """
  run = jax.jit(
    lambda params, ids, mask: lm.unembed(
      params, lm.prefill(params, ids, mask).last_hidden
    )[:, 0]
  )

  def reward_model(samples: Sequence[str | Chat]) -> np.ndarray:
    rows = [encode(sample)[-lengths[-1] :] for sample in samples]
    if not all(rows):
      raise ValueError("a text for the reward model has no tokens")
    result = np.zeros(len(rows), np.float32)
    pending = []
    for indices, *arrays in _batches(rows, lengths, batch_size):
      if sharding is not None:
        arrays = [meshes.put(x, sharding) for x in arrays]
      pending.append((indices, run(params, *map(jnp.asarray, arrays))))
    for indices, values in pending:  # waits only after all are dispatched
      result[indices] = meshes.fetch(values)[: len(indices)]
    return result

  return reward_model
