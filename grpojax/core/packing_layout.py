"""Where the completions of a batch lie in packed rows, found on the host."""

import math

import jax
import numpy as np
from jaxtyping import Int

from grpojax.core import mesh as mesh_lib
from grpojax.core import micro_batches as parts_lib
from grpojax.core.packing import Packing


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


def _tables(
  lengths: Int[np.ndarray, "N G"],
  rows: Int[np.ndarray, "N G"],
  starts: Int[np.ndarray, "N G"],
  shape: tuple[int, int],
) -> tuple[Int[np.ndarray, "N R W"], Int[np.ndarray, "N R W"]]:
  """The sample and the position of the token in each place of rows [R, W]."""
  n, g = lengths.shape
  segments = np.full((n, *shape), -1, np.int32)
  positions = np.zeros_like(segments)
  # One entry a token of all groups: its sample among all, and its position.
  ends, each = np.cumsum(lengths), lengths.ravel()
  sample = np.repeat(np.arange(n * g), each)
  position = np.arange(len(sample)) - np.repeat(ends - each, each)
  start = starts.ravel()[sample]
  place = sample // g, rows.ravel()[sample], start + position
  segments[place], positions[place] = sample % g, position
  return segments, positions


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
  shortest, longest = lengths.min(), lengths.max()
  if shortest < 0 or longest > length:
    wrong = shortest if shortest < 0 else longest
    raise ValueError(f"a completion has 0 to {length} tokens, not {wrong}")

  # Each part of a group is packed as a group of its own, [B * parts, ...].
  sizes = lengths.reshape(b, -1, parts).swapaxes(1, 2).reshape(b * parts, -1)
  width, count, rows, starts = _smallest(sizes, length)
  if count * width >= sizes.shape[1] * length:
    return None
  segments, positions = _tables(sizes, rows, starts, (count, width))
  part = np.tile(np.arange(parts, dtype=np.int32), b)
  numbers = segments * parts + part[:, None, None]

  def joined(x):  # [B * parts, n, ...] -> [B, n * parts, ...]
    x = x.reshape(b, parts, *x.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(x.reshape(b, -1, *x.shape[3:]))

  return Packing(
    segments=joined(np.where(segments < 0, -1, numbers)),
    positions=joined(positions),
    rows=joined(rows * parts + part[:, None]),
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
