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

The layout is made on the host, where the lengths are known (`plan`); `pack` and
`unpack` are jitted with it as an argument. Only groups are packed, never
different prompts: the rows of a prompt share its keys and values.
"""

import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, Shaped

from grpojax.core import logprobs as logprobs_lib
from grpojax.core import mesh as mesh_lib
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


def row_counts(group_size: int) -> list[int]:
  """The numbers of rows that groups are packed into: 1, 2, 3, 4, 6, 8, ..."""
  powers = [2**k for k in range(group_size.bit_length())]
  counts = {n for k in powers for n in (k, 3 * k // 2) if n < group_size}
  return sorted(counts | {group_size})


def row_lengths(length: int) -> list[int]:
  """Tokens that a row may have: a quarter, a half, all of T (rounded up)."""
  return sorted({-(-length // k) for k in (4, 2, 1)})


def first_fit(
  lengths: Int[np.ndarray, "N G"], width: int
) -> tuple[Int[np.ndarray, "N G"], Int[np.ndarray, "N G"]]:
  """Each sample into the first row with room for it, the longest first.

  First fit decreasing needs at most 11/9 of the fewest rows possible, and one
  (Johnson 1973).

  Args:
    lengths: of the samples of each group, at most `width`.
    width: tokens of a row.

  Returns:
    The row and the start of each sample.
  """
  groups = np.arange(len(lengths))
  rows, starts, used = (np.zeros(lengths.shape, np.int32) for _ in range(3))
  for sample in np.argsort(-lengths, axis=-1, kind="stable").T:
    size = lengths[groups, sample]
    row = np.argmax(used + size[:, None] <= width, axis=-1)
    rows[groups, sample], starts[groups, sample] = row, used[groups, row]
    used[groups, row] += size
  return rows, starts


def _smallest(lengths: Int[np.ndarray, "N G"], length: int):
  """Rows and their length, and samples' places, of the fewest tokens in all.

  Of two with as many tokens the shorter rows: attention is quadratic in them.
  """
  found = []
  for width in row_lengths(length):
    if width >= lengths.max():
      rows, starts = first_fit(lengths, width)
      needed = 1 + np.max(rows)
      count = min(n for n in row_counts(lengths.shape[1]) if n >= needed)
      found.append((count * width, width, count, rows, starts))
  return min(found, key=lambda candidate: candidate[:2])[1:]


def layout(
  lengths: Int[np.ndarray, "B G"], length: int, parts: int = 1
) -> Packing | None:
  """Packs the completions of each group, on the host.

  Args:
    lengths: of the completions, in tokens; 0 for those that nobody needs.
    length: T.
    parts: that groups are cut into, see `Packing`; divides G.

  Returns:
    Where they lie, as numpy arrays; None where rows of T, one a completion, are
    as few tokens.

  Raises:
    ValueError: lengths outside 0 to T, or parts that do not divide G.
  """
  lengths = np.asarray(lengths, np.int32)
  b, g = lengths.shape
  if g % parts:
    raise ValueError(f"groups of {g} cannot be packed in {parts} equal parts")
  if lengths.min() < 0 or lengths.max() > length:
    raise ValueError(f"completions have 0 to {length} tokens, not {lengths}")

  def by_part(x):  # [B, G] -> [B * parts, G / parts]
    return x.reshape(b, -1, parts).swapaxes(1, 2).reshape(b * parts, -1)

  def joined(x):  # [B * parts, n, ...] -> [B, n * parts, ...]
    x = x.reshape(b, parts, *x.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(x.reshape(b, -1, *x.shape[3:]))

  sizes = by_part(lengths)
  width, count, rows, starts = _smallest(sizes, length)
  if count * width >= sizes.shape[1] * length:
    return None
  segments = np.full((b * parts, count, width), -1, np.int32)
  positions = np.zeros_like(segments)
  # One entry a token: its sample, among those of all groups, and its position.
  sample = np.repeat(np.arange(sizes.size), sizes.ravel())
  position = np.arange(sample.size) - np.repeat(
    np.cumsum(sizes) - sizes.ravel(), sizes.ravel()
  )
  place = (
    sample // sizes.shape[1],
    rows.ravel()[sample],
    starts.ravel()[sample] + position,
  )
  numbers = by_part(np.tile(np.arange(g, dtype=np.int32), (b, 1)))
  segments[place], positions[place] = numbers.ravel()[sample], position
  part = np.arange(b * parts, dtype=np.int32)[:, None] % parts
  return Packing(
    segments=joined(segments),
    positions=joined(positions),
    rows=joined(rows * parts + part),
    starts=joined(starts),
    lengths=lengths,
    parts=parts,
  )


def plan(
  lengths: Int[np.ndarray, "B G"],
  length: int,
  minibatches: int = 1,
  micro_batches: int = 1,
) -> Packing | None:
  """`layout`, for a batch that `make_batch` and `make_update` cut up.

  Args:
    lengths: see `layout`.
    length: see `layout`.
    minibatches: see `make_update`.
    micro_batches: see `make_update`.

  Returns:
    See `layout`. None also where the mesh in context cuts groups, for rows
    would have to cross devices.

  Raises:
    ValueError: see `layout` and `micro_batches.cuts`.
  """
  b, g = lengths.shape
  mesh = jax.sharding.get_abstract_mesh()
  parts = 1
  cuts = (b, minibatches * micro_batches), (b // minibatches, micro_batches)
  for prompts, wanted in cuts:
    of_prompts, of_groups = parts_lib.cuts(prompts, g, wanted)
    shape = prompts // of_prompts, g // of_groups
    spec = mesh_lib.activation_spec(mesh, shape, ("batch", "group"))
    if spec[1] is not None:
      return None
    parts = math.lcm(parts, of_groups)
  return layout(lengths, length, parts)


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
      f"{of_groups}: make the packing with as many (see packing.plan)"
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
  prompt_mask: Array,
  ids: Int[Array, "B G T"],
  packing: Packing | None = None,
  **options: Any,
) -> tuple[Float[Array, "B G T"], Float[Array, "B G T"]]:
  """`token_logprobs`, computed on packed rows where there is a packing.

  Args:
    lm: see `token_logprobs`; packed, its `extend` must know `segments`.
    params: see `token_logprobs`.
    prompt_ids: see `token_logprobs`.
    prompt_mask: see `token_logprobs`.
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
