"""The repetition penalty: tokens that have been there, and their logits.

A logit z of a token that is in the prompt or earlier in the completion becomes
z / penalty where it is positive and z * penalty where it is not (CTRL, arXiv
1909.05858, section 4.1, in the form of transformers'
RepetitionPenaltyLogitsProcessor), before the temperature and the cuts.

The distribution thus depends on the tokens that have been there. In whole
completions these are known by the place where each token of the vocabulary
stands first: one array [B, G, V] of integers, whatever their length, which is
compared with the positions of a chunk whose logits are there anyway.

    prompt 3, completion 1 4 1, V = 5    first places of 0 .. 4: 3 0 3 -1 1
                                         before position 1: tokens 1 and 3
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.mesh import constrain

_IN_PROMPT = -1


def penalised(
  logits: Float[Array, "*n V"], seen: Bool[Array, "*n V"], penalty: float | int
) -> Float[Array, "*n V"]:
  """Lowers the logits of seen tokens, where penalty > 1."""
  lowered = jnp.where(logits > 0, logits / penalty, logits * penalty)
  return jnp.where(seen, lowered, logits)


def in_prompts(
  prompt_ids: Int[Array, "B P"], prompt_mask: Bool[Array, "B P"], vocab: int
) -> Bool[Array, "B V"]:
  """Returns the tokens of each prompt; padding is none."""
  ids = jnp.where(prompt_mask, prompt_ids, vocab)  # out of bounds: dropped
  mark = jax.vmap(lambda row, ids: row.at[ids].set(True, mode="drop"))
  return mark(jnp.zeros((len(ids), vocab), bool), ids)


def mark(
  seen: Bool[Array, "B G V"], ids: Int[Array, "B G"]
) -> Bool[Array, "B G V"]:
  """Adds one more token of each sample to `seen`."""
  return jax.vmap(jax.vmap(lambda row, i: row.at[i].set(True)))(seen, ids)


def first_places(
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G T"],
  vocab: int,
) -> Int[Array, "B G V"]:
  """Returns the place where each token stands first in each completion.

  Places are counted from 0; -1 is in the prompt, T nowhere. Padding of the
  completions does not matter, for it stands behind all of their tokens.
  """
  t = jnp.arange(ids.shape[-1])
  never = jnp.full((*ids.shape[:2], vocab), ids.shape[-1], jnp.int32)
  place = jax.vmap(jax.vmap(lambda row, ids: row.at[ids].min(t)))
  prompt = in_prompts(prompt_ids, prompt_mask, vocab)[:, None]
  first = jnp.where(prompt, _IN_PROMPT, place(never, ids))
  return constrain(first, "batch", "group", "vocabulary")


def seen_before(
  first: Int[Array, "B G V"],
  positions: Int[Array, "B R C"],
  segments: Int[Array, "B R C"] | None,
) -> Bool[Array, "B R C V"]:
  """Returns the tokens that have been there before each position.

  Segments are the completions, 0 to G - 1, of the positions; on padding
  anything. None where row r is completion r.
  """
  if segments is None:
    of_rows = first[:, :, None]
  else:
    look_up = jax.vmap(lambda first, segment: first[segment])
    of_rows = look_up(first, jnp.maximum(segments, 0))
  return of_rows < positions[..., None]
