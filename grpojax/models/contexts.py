"""Contexts of tokens: the positions, masks and rotary tables of a pass."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from grpojax.core.packing.flat_tokens import FlatTokens, flatten
from grpojax.core.types import Params, Prefix
from grpojax.models.block import Routing, TokenContext
from grpojax.models.block_attention import WHOLE, RowAttention
from grpojax.models.cache import Cache, attention_of
from grpojax.models.config import TransformerConfig
from grpojax.models.gated_delta import Rows
from grpojax.models.rope import RotaryTable, rope_tables

ROPE = "rope"  # name of the rotary tables in prepared parameters


def rotary_tables(
  config: TransformerConfig, positions: Int[Array, "*tokens"]
) -> tuple[RotaryTable, ...]:
  """Returns a rotary table for each of `TransformerConfig.ropes`."""
  return tuple(
    rope_tables(positions, config.head_dim, rope) for rope in config.ropes
  )


def _row_mask(
  size: int, segments: Int[Array, "B G S"] | None
) -> Bool[Array, "..."]:
  mask = jnp.tril(jnp.ones((size, size), bool))
  if segments is not None:
    # Packed completions see only their own segment: [B, G, 1, 1, S, S].
    same = segments[..., :, None] == segments[..., None, :]
    mask = (mask[None, None] & same)[:, :, None, None]  # same for all heads
  return mask


def of_rows(
  config: TransformerConfig,
  positions: Int[Array, "B G S"],
  segments: Int[Array, "B G S"] | None,
  prompt_mask: Bool[Array, "B P"] | None,
  row_attention: RowAttention | None,
) -> TokenContext:
  """Returns the context of whole rows, without a mask if they are long."""
  size = positions.shape[-1]
  has_mask = size <= WHOLE or row_attention is None
  mask = _row_mask(size, segments) if has_mask else None
  tables = rotary_tables(config, positions)
  return TokenContext(tables, mask, positions, prompt_mask, segments=segments)


def of_prompts(
  config: TransformerConfig,
  prompt_mask: Bool[Array, "B P"],
  row_attention: RowAttention | None,
) -> TokenContext:
  """Returns the context of prompts, as groups of one."""
  b, p = prompt_mask.shape  # padding needs no mask, because it comes last
  positions = jnp.broadcast_to(jnp.arange(p), (b, 1, p))
  context = of_rows(config, positions, None, None, row_attention)
  return context._replace(rows=Rows(real=prompt_mask[:, None]))


def of_next(
  config: TransformerConfig,
  params: Params,
  cache: Cache,
  positions: Int[Array, "B G S"],
  prefix: Prefix,
) -> TokenContext:
  """Returns the context of the next tokens, at `positions` in completions."""
  _, prompt_mask = prefix.state
  start = positions[..., 0]  # the number of tokens in each row's cache
  rows = Rows(positions >= 0, begins=start == 0)
  positions = prefix.length[:, None, None] + positions
  slots = jnp.arange(attention_of(cache[0]).size)[None, None]
  if ROPE in params:  # positions of padding may be out of range
    look_up = lambda x: jnp.take(x, positions, axis=0, mode="clip")
    tables = jax.tree.map(look_up, params[ROPE])
  else:
    tables = rotary_tables(config, positions)
  return TokenContext(
    tables,
    _row_mask(positions.shape[-1], None),
    positions,
    prompt_mask,
    slot_mask=(slots < start[..., None])[:, :, None, None, None],
    slot_positions=prefix.length[:, None, None] + slots,
    rows=rows,
  )


class FlatContext(NamedTuple):
  """Context of prompts and rows, joined to flat tokens without padding."""

  tables: tuple[RotaryTable, ...]
  routing: Routing
  parts: tuple[TokenContext, TokenContext]  # prompts and rows, for attention
  flat: FlatTokens  # places of the tokens in prompts and rows


def join_flat(
  prompts: Shaped[Array, "B 1 P *more"],
  rows: Shaped[Array, "n G S *more"],
  flat: FlatTokens,
) -> Shaped[Array, "C 1 N *more"]:
  """Joins values of prompts and rows to those of flat tokens."""
  parts = flatten(prompts, flat.prompts), flatten(rows, flat.rows)
  return jnp.concatenate(parts, axis=2)


def split_flat(
  x: Shaped[Array, "C 1 N *more"], flat: FlatTokens
) -> tuple[Shaped[Array, "C 1 _ *more"], Shaped[Array, "C 1 _ *more"]]:
  """Splits values of flat tokens into those of prompts and of rows, flat."""
  return tuple(jnp.split(x, [flat.prompts.place_of_token.shape[1]], axis=2))


def of_flat(
  config: TransformerConfig,
  prompts: TokenContext,
  rows: TokenContext,
  flat: FlatTokens,
) -> FlatContext:
  """Joins the contexts of prompts and rows."""
  join = lambda prompts, rows: join_flat(prompts, rows, flat)
  tables = rotary_tables(config, join(prompts.positions, rows.positions))
  routing = jax.tree.map(join, prompts.routing, rows.routing)
  return FlatContext(tables, routing, (prompts, rows), flat)
