"""Arguments of library calls: understood, or refused in a sentence.

Shapes and dtypes are known everywhere; values only outside of jit, and there
they are checked.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, Shaped

from grpojax.core.group_axis import as_array
from grpojax.core.types import LM, Params, Prompts

Ids = int | np.integer | np.ndarray | Sequence[int | np.integer]


def random_key(key: Any) -> Key[Array, ""]:
  """Returns a key as `jax.random.key` makes it; those of `PRNGKey` are wrapped.

  Raises:
    ValueError: it is neither.
  """
  dtype, shape = getattr(key, "dtype", None), jnp.shape(key)
  if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
    if shape == ():
      return key
  elif dtype == jnp.uint32 and len(shape) == 1:
    return jax.random.wrap_key_data(key)
  raise ValueError(f"{key!r} is not one random key: give jax.random.key(seed)")


def end_ids(eos_ids: Any) -> Int[np.ndarray, "E"]:
  """Returns the ids that end a completion, of one integer or several.

  Raises:
    ValueError: there are none, or something else.
  """
  ids = np.atleast_1d(np.asarray(eos_ids))
  if not ids.size:
    raise ValueError("eos_ids is empty: no completion could ever finish")
  if ids.ndim > 1 or not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(f"eos_ids are integers, as (1, 2), not {eos_ids!r}")
  return ids


def read_rewards(
  rewards: Any, shape: tuple[int, ...], source: str
) -> Shaped[Array, "B G"]:
  """Returns rewards, an array or lists of numbers, as an array of `shape`.

  Raises:
    ValueError: they are not numbers, or not one a completion; the message names
      their source.
  """
  rewards = as_array(rewards, source)
  if rewards.shape != shape:
    raise ValueError(
      f"{source} needs rewards [B, G] = {shape}, one a completion (nan where "
      f"there is none), not shape {rewards.shape}"
    )
  return rewards


def check_prompts(
  lm: LM, params: Params, prompt_ids: Array, prompt_mask: Array
) -> None:
  """Refuses prompts that a model would silently misread.

  Raises:
    ValueError: shapes or dtypes that do not fit; outside of jit also padding
      that is not at the right, ids outside the vocabulary, or no token at all.
  """
  of_ids, of_mask = jnp.shape(prompt_ids), jnp.shape(prompt_mask)
  if len(of_ids) != 2 or of_ids != of_mask:
    raise ValueError(
      f"prompt_ids and prompt_mask are both [B, P], not {of_ids} and {of_mask}"
    )
  if not jnp.issubdtype(prompt_ids.dtype, jnp.integer):
    raise ValueError(f"prompt_ids are integers, not {prompt_ids.dtype}")
  if prompt_mask.dtype != bool:
    raise ValueError(
      f"prompt_mask is boolean, True on real tokens, not {prompt_mask.dtype}: "
      "give prompt_mask.astype(bool)"
    )
  for x in (prompt_ids, prompt_mask):
    traced = isinstance(x, jax.core.Tracer)
    if traced or not getattr(x, "is_fully_addressable", True):
      return  # this process cannot see the values
  mask = np.asarray(prompt_mask)
  if not mask.any():
    raise ValueError(
      "no prompt has a token: prompt_mask is False everywhere (a single row "
      "without tokens only pads the batch)"
    )
  rows = np.flatnonzero((mask[:, 1:] & ~mask[:, :-1]).any(-1))
  if rows.size:
    raise ValueError(
      f"prompt_mask of row {rows[0]} is not a leading run of True: prompts are "
      "right-padded; grpojax.prompts_from_left_padded(ids, mask) moves padding "
      "from the left"
    )
  prefix = jax.eval_shape(lm.prefill, params, prompt_ids, prompt_mask)
  logits = jax.eval_shape(lm.unembed, params, prefix.last_hidden)
  ids, vocabulary = np.asarray(prompt_ids), logits.shape[-1]
  wrong = np.argwhere(mask & ((ids < 0) | (ids >= vocabulary)))
  if wrong.size:
    row, column = wrong[0]
    raise ValueError(
      f"prompt_ids[{row}, {column}] = {ids[row, column]} is outside the "
      f"model's vocabulary, 0 to {vocabulary - 1}"
    )


def prompts_from_left_padded(
  ids: Shaped[Array, "B P"] | np.ndarray,
  mask: Shaped[Array, "B P"] | np.ndarray,
  targets: Any = None,
) -> Prompts:
  """Makes prompts of ids that are padded on the left, as tokenizers do it.

  The mask is True or 1 on real tokens, which stay in their order:

    ids  [[9 9 1 2]   mask [[0 0 1 1]   ->  [[1 2 9 9]   [[1 1 0 0]
          [3 4 5 6]]        [1 1 1 1]]       [3 4 5 6]]   [1 1 1 1]]
  """
  ids, mask = jnp.asarray(ids), jnp.asarray(mask).astype(bool)
  order = jnp.argsort(~mask, axis=-1, stable=True)
  aligned: Bool[Array, "B P"] = jnp.take_along_axis(mask, order, axis=-1)
  return Prompts(jnp.take_along_axis(ids, order, axis=-1), aligned, targets)
