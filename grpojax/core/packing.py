"""Completions of a group packed into few rows, and unpacked again.

Completions have any length up to T, and as rows of T tokens most of what is
computed may be padding. Packed, several of them share a row:

    samples [G, T]          rows [R, W]
    a a a - - -             b b b b b c
    b b b b b -     ->      a a a d d -
    c - - - - -
    d d - - - -

Each token keeps its position, and attends within its own completion alone
(`positions` and `segments` of `LM.extend`), so that its log-probability is the
same. Log-probabilities are unpacked to [B, G, T]: losses, weights and metrics
know nothing of rows. R and W are from few sizes, for each is a program to
compile.

The layout is made on the host, where the lengths are known
(`packing_layout.plan`); all here is jitted with it as an argument. Only groups
are packed, never different prompts: the rows of a prompt share its keys and
values.
"""

import typing
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped

from grpojax.core import logprobs as logprobs_lib
from grpojax.core import micro_batches as parts_lib
from grpojax.core.types import LM, Params


@typing.no_type_check
@struct.dataclass
class Packing:
  """Where each completion token lies: R rows of W tokens a group.

  Where groups are cut for micro-batches (`micro_batches.cuts`), sample g is in
  part g mod `parts`, and so is row r in part r mod `parts`: a part's samples
  are in its own rows.

  Attributes:
    segments: the sample, 0 to G - 1, that a token is of; -1 on padding.
    positions: of each token in its completion; 0 on padding.
    rows: the row that each sample is in.
    starts: where it begins there.
    lengths: of each sample; without tokens it is nowhere.
    parts: of a group, static.
  """

  segments: Int[Array, "B R W"]
  positions: Int[Array, "B R W"]
  rows: Int[Array, "B G"]
  starts: Int[Array, "B G"]
  lengths: Int[Array, "B G"]
  parts: int = struct.field(pytree_node=False, default=1)


def split(packing: Packing | None, cut: tuple[int, int]) -> Packing | None:
  """The packing of each micro-batch, as `micro_batches.split_samples` does it.

  Args:
    packing: of a batch.
    cut: from `micro_batches.cuts`.

  Raises:
    ValueError: groups are cut into parts that they were not packed in.
  """
  if packing is None:
    return None
  of_groups = cut[1]
  if packing.parts % of_groups:
    raise ValueError(
      f"groups that are packed in parts={packing.parts} cannot be cut into "
      f"{of_groups}: make the packing with as many (see packing_layout.plan)"
    )
  # What is in part p of n has the numbers p, p + n, p + 2 n, ...
  packing = parts_lib.split_samples(packing, cut)
  return packing.replace(
    segments=packing.segments // of_groups,
    rows=packing.rows // of_groups,
    parts=packing.parts // of_groups,
  )


def _take(x: Shaped[Array, "B n"], index: Int[Array, "B k m"]):
  """Entries of each row of x; what lies outside is that at its end."""
  flat = index.reshape(len(x), -1)
  return jnp.take_along_axis(x, flat, axis=1, mode="clip").reshape(index.shape)


def pack(
  values: Shaped[Array, "B G T"], packing: Packing
) -> Shaped[Array, "B R W"]:
  """The samples' tokens as rows; on padding stands any of them."""
  b, g, t = values.shape
  index = packing.segments * t + packing.positions
  return _take(values.reshape(b, g * t), index)


def unpack(
  values: Shaped[Array, "B R W"], packing: Packing, length: int
) -> Shaped[Array, "B G T"]:
  """The inverse of `pack`; 0 on padding.

  Args:
    values: of tokens in rows.
    packing: see `Packing`.
    length: T.
  """
  b, r, w = values.shape
  place, t = packing.rows * w + packing.starts, jnp.arange(length)
  found = _take(values.reshape(b, r * w), place[..., None] + t)
  return jnp.where(t < packing.lengths[..., None], found, 0)


def completion_logprobs(
  lm: LM,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G T"],
  packing: Packing | None = None,
  **options: Any,
) -> tuple[Float[Array, "B G T"], Float[Array, "B G T"]]:
  """`token_logprobs`, computed on packed rows where there is a packing.

  Args:
    lm: see `token_logprobs`; packed, its `extend` must know `segments`.
    params: its parameters.
    prompt_ids: right-padded prompts.
    prompt_mask: True on real prompt tokens.
    ids: completions.
    packing: of these completions, uncut (`parts` = 1), or None.
    **options: `sampling` and `chunk_size` of `token_logprobs`.

  Returns:
    Log-probabilities and entropies; packed, 0 on padding.
  """
  score = logprobs_lib.token_logprobs
  prompts = prompt_ids, prompt_mask
  if packing is None:
    return score(lm, params, *prompts, ids, **options)
  of_rows = score(
    lm,
    params,
    *prompts,
    pack(ids, packing),
    positions=packing.positions,
    segments=packing.segments,
    **options,
  )
  logprobs, entropy = (unpack(x, packing, ids.shape[-1]) for x in of_rows)
  return logprobs, entropy
