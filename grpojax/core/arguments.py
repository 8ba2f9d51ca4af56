"""Checks and conversions of the arguments of library calls.

Shapes and dtypes are always checked, values only outside of jit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Shaped

from grpojax.core.ends import Ends
from grpojax.core.group_axis import as_array
from grpojax.core.prompt_checks import (
  check_fields,
  check_ids,
  check_layout,
  is_readable,
)
from grpojax.core.types import LM, Params, Prompts, Rollout

Ids = Ends | int | np.integer | np.ndarray | Sequence[int | np.integer]


def read_ends(eos_ids: Any) -> Ends:
  """Returns `Ends` with an array [E] of ids; ValueError for non-integers."""
  ends = eos_ids if isinstance(eos_ids, Ends) else Ends(eos_ids)
  ids = np.atleast_1d(np.asarray(ends.ids))
  if not ids.size:
    raise ValueError("eos_ids is empty: give at least one id")
  if ids.ndim > 1 or not np.issubdtype(ids.dtype, np.integer):
    raise ValueError(f"eos_ids must be integers like (1, 2), not {ends.ids!r}")
  return ends._replace(ids=ids)


def check_end_ids(lm: LM, params: Params, prompts: Prompts, ids: Any) -> None:
  """Raises ValueError for end ids outside the model's vocabulary."""
  vocabulary = _vocabulary(lm, params, prompts.prompt_ids, prompts.prompt_mask)
  ids = read_ends(ids).ids.tolist()
  wrong = [i for i in ids if not 0 <= i < vocabulary]
  if wrong:
    raise ValueError(
      f"eos_ids has {wrong}, outside the model's vocabulary: use ids from 0 to "
      f"{vocabulary - 1}"
    )


def _vocabulary(lm: LM, params: Params, ids: Array, mask: Array) -> int:
  prefix = jax.eval_shape(lm.prefill, params, ids, mask)
  return jax.eval_shape(lm.unembed, params, prefix.last_hidden).shape[-1]


def check_params(params: Params) -> None:
  """Raises ValueError for parameters of a dtype that cannot be trained.

  In float16 squared gradients and Adam's eps underflow: Adam divides by 0.
  """
  for path, leaf in jax.tree.leaves_with_path(params):
    dtype = jnp.result_type(leaf)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
      raise ValueError(
        f"parameter {jax.tree_util.keystr(path)} is {dtype}: cast it to "
        "float32 or bfloat16, or keep it out of the parameters"
      )


def init_optimizer(tx: optax.GradientTransformation, params: Params) -> Any:
  """Returns an optimizer's initial state; ValueError if it is not supported."""
  try:
    state = tx.init(params)
    jax.eval_shape(tx.update, params, state, params)
  except (AttributeError, TypeError) as error:
    raise ValueError(
      "the optimizer is called as tx.update(gradients, state, parameters), "
      f"which fails ({error}): use another optimizer (lbfgs, polyak_sgd, momo "
      "and reduce_on_plateau need the loss, lookahead two sets of parameters)"
    ) from error
  return state


def read_rewards(
  rewards: Any, shape: tuple[int, ...], source: str
) -> Shaped[Array, "B G *K"]:
  """Returns rewards (an array or lists of numbers) as an array of `shape`.

  ValueError for other shapes or types; it names their `source`.
  """
  rewards = as_array(rewards, source)
  if rewards.shape != shape:
    axes = "[B, G]" if len(shape) == 2 else "[B, G, K], K turns,"
    unit = "completion" if len(shape) == 2 else "turn, 0 after the last"
    raise ValueError(
      f"{source} needs rewards {axes} = {shape}, one per {unit} (nan if "
      f"missing), not shape {rewards.shape}"
    )
  return rewards


def check_read_prompts(
  lm: LM, params: Params, prompt_ids: Array, prompt_mask: Array
) -> None:
  """Raises ValueError for prompts that a model would silently misread.

  Outside of jit it also checks padding, and that ids are in the vocabulary.
  """
  check_layout(prompt_ids, prompt_mask)
  if prompt_ids.ndim != 2:
    raise ValueError(
      f"a step reads prompts [B, P], not {prompt_ids.shape}: scan or vmap it "
      "over additional axes"
    )
  if is_readable(prompt_ids, prompt_mask):
    vocabulary = _vocabulary(lm, params, prompt_ids, prompt_mask)
    check_ids(prompt_ids, prompt_mask, vocabulary)


def check_prompts(prompts: Prompts, vocab_size: int) -> None:
  """Checks prompts before a jitted step, which cannot see their values.

  It repeats the checks of `Prompts`. ValueError also for ids of real tokens
  outside the vocabulary.
  """
  check_fields(*vars(prompts).values())
  check_ids(prompts.prompt_ids, prompts.prompt_mask, vocab_size)


def call_reward(
  reward_fn: Callable[[Rollout, Any], Any], samples: Rollout, targets: Any
) -> Any:
  """Returns the rewards; TypeError if `reward_fn` reads traced values."""
  try:
    return reward_fn(samples, targets)
  except TypeError as error:
    is_traced = isinstance(error, jax.errors.JAXTypeError)
    if not is_traced and "Tracer" not in str(error):
      raise
    raise TypeError(
      "reward_fn reads values of arrays, which a jitted step does not have: "
      "write it in jax.numpy, or sample, reward and update in separate calls "
      '("A reward on the host" in docs/library.md)'
    ) from error


def prompts_from_left_padded(
  ids: Shaped[Array, "B P"] | np.ndarray,
  mask: Shaped[Array, "B P"] | np.ndarray,
  targets: Any = None,
) -> Prompts:
  """Makes prompts from left-padded ids, the layout of most tokenizers.

  The mask is True or 1 on real tokens, which keep their order:

    ids  [[9 9 1 2]   mask [[0 0 1 1]   ->  [[1 2 9 9]   [[1 1 0 0]
          [3 4 5 6]]        [1 1 1 1]]       [3 4 5 6]]   [1 1 1 1]]
  """
  ids = jnp.asarray(ids)
  mask = jnp.asarray(mask).astype(bool)
  order = jnp.argsort(~mask, axis=-1, stable=True)
  aligned: Bool[Array, "B P"] = jnp.take_along_axis(mask, order, axis=-1)
  return Prompts(jnp.take_along_axis(ids, order, axis=-1), aligned, targets)
