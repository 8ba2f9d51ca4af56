"""Prompts and packed completions in the layers, without their padding."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from grpojax.core.flat_tokens import FlatTokens, flatten, unflatten
from grpojax.core.load_balancing import ExpertLoad
from grpojax.models import block as block_lib
from grpojax.models import cache, token_contexts
from grpojax.models.block import Heads, Layer, Local, TokenContext
from grpojax.models.config import TransformerConfig
from grpojax.models.rope import RotaryTable


class FlatContext(NamedTuple):
  """What all layers know of flat tokens.

  Attributes:
    tables: rotary tables of the flat tokens, see `TokenContext`.
    load_weights: of the flat tokens, see `TokenContext`.
    parts: what attention knows, of the prompts and of the rows.
    flat: where their tokens are.
  """

  tables: tuple[RotaryTable, ...]
  load_weights: Float[Array, "C 1 N"] | None
  parts: tuple[TokenContext, TokenContext]
  flat: FlatTokens


def join(
  prompts: Shaped[Array, "B 1 P *more"],
  rows: Shaped[Array, "n G S *more"],
  flat: FlatTokens,
) -> Shaped[Array, "C 1 N *more"]:
  """The flat tokens of prompts and of rows."""
  parts = (prompts, flat.prompts), (rows, flat.rows)
  return jnp.concatenate([flatten(*x) for x in parts], axis=2)


def split(
  x: Shaped[Array, "C 1 N *more"], flat: FlatTokens
) -> tuple[Shaped[Array, "C 1 _ *more"], Shaped[Array, "C 1 _ *more"]]:
  """Those of prompts, and those of rows."""
  return tuple(jnp.split(x, [flat.prompts.place_of_token.shape[1]], axis=2))


def context_of(
  config: TransformerConfig,
  parts: tuple[TokenContext, TokenContext],
  flat: FlatTokens,
) -> FlatContext:
  """Of what prompts and rows are known."""
  positions = join(*(part.positions for part in parts), flat)
  weights = None
  if parts[0].load_weights is not None:
    weights = join(*(part.load_weights for part in parts), flat)
  tables = token_contexts.rope_of_kinds(config, positions)
  return FlatContext(tables, weights, parts, flat)


def block(
  config: TransformerConfig,
  x: Float[Array, "C 1 N D"],
  layer: Layer,
  local: Local,
  context: FlatContext,
) -> tuple[Float[Array, "C 1 N D"], ExpertLoad | None]:
  """One decoder layer of prompts and of their completions, see `block.block`.

  All is done to the flat tokens but attention, which has padded ones.
  """
  of_prompts, of_rows = context.parts
  flat = context.flat
  attend = functools.partial(block_lib.attend, config, local)

  def attention(heads):
    apart = zip(*(split(x, flat) for x in heads), strict=True)
    places = flat.prompts, flat.rows
    prompts, rows = (
      Heads(*(unflatten(x, where, part.positions.shape) for x in of_part))
      for of_part, where, part in zip(apart, places, context.parts, strict=True)
    )
    of_them, row = attend(of_prompts, None, None, prompts)
    prompt = jax.tree.map(flat.of_rows, cache.of_prompt(row))
    out, _ = attend(of_rows, prompt, None, rows)
    return join(of_them, out, flat), None

  table = block_lib.rotary_table(local, context.tables)
  weights = context.load_weights
  x, _, load = block_lib.layer_of(config, x, layer, table, weights, attention)
  return x, load
