"""What the layers know of the tokens that pass through them, by kind of pass.

Which tokens see which, their positions, and the rotary tables of these, which
are the same in all layers of a kind.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from grpojax.core.types import Params
from grpojax.models import cache as cache_lib
from grpojax.models.block import TokenContext
from grpojax.models.block_attention import WHOLE
from grpojax.models.cache import Cache
from grpojax.models.config import TransformerConfig
from grpojax.models.rope import RotaryTable, rope_tables

ROPE = "rope"
"""Name of rotary tables of all positions, where they are with the parameters
(see `LM.prepare`)."""


def rope_of_kinds(
  config: TransformerConfig, positions: Int[Array, "*tokens"]
) -> tuple[RotaryTable, ...]:
  """The rotary tables of each kind of layers (`TransformerConfig.ropes`)."""
  return tuple(
    rope_tables(positions, config.head_dim, rope) for rope in config.ropes
  )


def _row_mask(
  size: int, segments: Int[Array, "B G S"] | None
) -> Bool[Array, "..."]:
  """Causal along the row, and within a segment where there are several."""
  mask = jnp.tril(jnp.ones((size, size), bool))
  if segments is not None:
    mask = mask & (segments[..., :, None] == segments[..., None, :])
    mask = mask[:, :, None, None]  # all heads: [B, G, 1, 1, S, S]
  return mask


def of_rows(
  config: TransformerConfig,
  positions: Int[Array, "B G S"],
  segments: Int[Array, "B G S"] | None,
  prompt_mask: Bool[Array, "B P"] | None,
) -> TokenContext:
  """Of whole rows; longer ones attend in blocks, and need no whole mask."""
  size = positions.shape[-1]
  mask = _row_mask(size, segments) if size <= WHOLE else None
  tables = rope_of_kinds(config, positions)
  return TokenContext(tables, mask, positions, prompt_mask, segments=segments)


def of_prompts(
  config: TransformerConfig, prompt_mask: Bool[Array, "B P"]
) -> TokenContext:
  """Of the prompts, as rows of a group of one."""
  b, p = prompt_mask.shape
  positions = jnp.broadcast_to(jnp.arange(p), (b, 1, p))
  # Causal alone: padding stands behind all real tokens, which do not see it,
  # and what is computed of it is never read.
  return of_rows(config, positions, None, None)


def of_next(
  config: TransformerConfig,
  params: Params,
  cache: Cache,
  lengths: Int[Array, "B G"] | None,
  positions: Int[Array, "B G S"],
  prompt_mask: Bool[Array, "B P"],
) -> TokenContext:
  """Of the next tokens of rows in a cache.

  `lengths` says how many tokens each row has in it; None where all have as many
  as were written.
  """
  mask = _row_mask(positions.shape[-1], None)
  slot_mask = cache_lib.filled(cache)
  if lengths is not None:
    slot_mask = cache_lib.ages(cache) < lengths[..., None, None, None, None]
  if ROPE in params:  # slots without a sample may be at any position
    look_up = lambda x: jnp.take(x, positions, axis=0, mode="clip")
    tables = jax.tree.map(look_up, params[ROPE])
  else:
    tables = rope_of_kinds(config, positions)
  return TokenContext(
    tables,
    mask,
    positions,
    prompt_mask,
    slot_mask=slot_mask,
    slot_positions=cache_lib.slot_positions(cache, positions),
  )
