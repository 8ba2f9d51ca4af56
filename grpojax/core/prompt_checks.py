"""Checks of prompts, when they are made and when a model reads them.

Shapes and dtypes are always checked, values only if this process can read them:
not those of tracers, `ShapeDtypeStruct`s or arrays on other processes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Values = Array | np.ndarray


def is_readable(*arrays: Any) -> bool:
  """Returns True if this process can read the values of all arrays."""
  return all(
    isinstance(x, (np.ndarray, jax.Array))
    and not isinstance(x, jax.core.Tracer)
    and getattr(x, "is_fully_addressable", True)
    for x in arrays
  )


def check_layout(ids: Values, mask: Values) -> None:
  """Checks the shapes, dtypes and padding of prompts [..., P].

  ValueError for other shapes or dtypes, left padding, or no tokens at all.
  """
  if jnp.ndim(ids) < 2 or jnp.shape(ids) != jnp.shape(mask):
    raise ValueError(
      f"prompt_ids and prompt_mask must be [B, P], not {jnp.shape(ids)} and "
      f"{jnp.shape(mask)}"
    )
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise ValueError(f"prompt_ids must be integers, not {ids.dtype}")
  if mask.dtype != bool:
    raise ValueError(
      f"prompt_mask must be boolean, True on real tokens, not {mask.dtype}: "
      "give prompt_mask.astype(bool)"
    )
  if not is_readable(ids, mask):
    return
  mask = np.asarray(mask)
  if not mask.any():
    raise ValueError(
      "no prompt has a token: prompt_mask is False everywhere (a row without "
      "tokens only pads the batch)"
    )
  rows = np.argwhere((mask[..., 1:] & ~mask[..., :-1]).any(-1))
  if rows.size:
    raise ValueError(
      f"prompt_mask of row {_index(rows[0])} is not a leading run of True: pad "
      "on the right; grpojax.prompts_from_left_padded(ids, mask) moves padding"
    )


def check_fields(ids: Any, mask: Any, targets: Any, weights: Any) -> None:
  """Checks the fields of new `Prompts`, unless a transformation made them.

  ValueError as in `check_layout`, or for targets or weights of other lengths.
  """
  if not is_readable(ids, mask):
    return
  check_layout(ids, mask)
  batch = mask.shape[:-1]
  fields = {"targets": targets, "weights": weights}
  for path, leaf in jax.tree.leaves_with_path(fields):
    if is_readable(leaf) and leaf.shape[: len(batch)] != batch:
      name = jax.tree_util.keystr(path, simple=True, separator=".")
      raise ValueError(
        f"{name} has the shape {leaf.shape}: its first axes must be those of "
        f"the prompts, {batch}"
      )


def check_ids(ids: Values, mask: Values, vocab_size: int) -> None:
  """Raises ValueError for ids of real tokens outside the vocabulary."""
  if not is_readable(ids, mask):
    return
  ids = np.asarray(ids)
  wrong = np.argwhere(np.asarray(mask) & ((ids < 0) | (ids >= vocab_size)))
  if wrong.size:
    raise ValueError(
      f"prompt_ids[{_index(wrong[0])}] = {ids[tuple(wrong[0])]} is outside the "
      f"model's vocabulary, 0 to {vocab_size - 1}: use the model's tokenizer"
    )


def _index(place: np.ndarray) -> str:
  return ", ".join(map(str, place))
