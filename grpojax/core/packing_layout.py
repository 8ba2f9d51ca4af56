"""Where the completions of a batch lie in packed rows, found on the host."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from grpojax.core import mesh as mesh_lib
from grpojax.core import micro_batches as parts_lib
from grpojax.core.packing import Packing, Rows


def row_counts(group_size: int) -> list[int]:
  """Rows that a subgroup may have: 1, 4, 16, ... and G.

  Twice and thrice as many between these saved 1 to 4% of the tokens (8% where
  prompts are few), and compiled nearly twice as many programs as lengths grew.
  """
  powers = (4**k for k in range(group_size.bit_length()))
  return sorted({n for n in powers if n < group_size} | {group_size})


def subgroup_count(most: int, multiple: int) -> int:
  """The least number of subgroups that is compiled and not below `most`.

  Up to eight times `multiple` all multiples of it, then those in steps of an
  eighth to a quarter: 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...
  """
  needed = -(-most // multiple)
  step = 2 ** max(0, (max(needed, 1) - 1).bit_length() - 3)
  return multiple * step * max(1, -(-needed // step))


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


class _Shape(NamedTuple):
  """Rows of one length, in subgroups of so many, and the tokens computed.

  Of two with as many tokens the shorter rows, for attention is quadratic in
  them, and then the fewer subgroups.
  """

  tokens: int
  width: int
  subgroups: int
  rows: int


class _Sizes(NamedTuple):
  """Of a batch; see `layout`."""

  group_size: int
  prompt_length: int
  whole: int
  blocks: int
  together: int
  micro_batches: int


def _shapes(
  needed: Int[np.ndarray, "B"], width: int, sizes: _Sizes
) -> Iterator[_Shape]:
  """What groups that need so many rows of a length could be cut into."""
  blocks, together = sizes.blocks, sizes.together
  parts = sizes.micro_batches
  # Quarters of `parts`: with every number in between, counts would be any.
  quarters = (-(-parts * k // 4) for k in (1, 2, 3, 4))
  multiples = {n // math.gcd(n, together) for n in quarters}
  for rows in row_counts(sizes.group_size):
    of_block = np.sum(np.reshape(-(-needed // rows), (blocks, -1)), axis=1)
    most = int(of_block.max())
    for subgroups in {subgroup_count(most, n) for n in multiples}:
      tokens = blocks * subgroups * (sizes.prompt_length + rows * width)
      cut_up = tokens, sizes.whole, together * subgroups, parts
      if parts_lib.packed_parts(*cut_up):
        yield _Shape(tokens, width, subgroups, rows)


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
  lengths: Int[np.ndarray, "B G"],
  length: int,
  prompt_length: int = 0,
  blocks: int = 1,
  together: int = 1,
  micro_batches: int = 1,
) -> Packing | None:
  """Cuts groups into subgroups, and packs their completions, on the host.

  A function of the lengths alone, so that a resumed run computes the same.

  Args:
    lengths: of the completions, in tokens; 0 for those that nobody needs.
    length: T.
    prompt_length: P, computed again for each subgroup.
    blocks: C, see `Packing`; divides B.
    together: blocks of a minibatch on a device; divides C.
    micro_batches: of a minibatch as it is; the packed one has as many at most,
      see `micro_batches.packed_parts`.

  Returns:
    Where they lie, as numpy arrays; None where prompts and rows of T, one a
    completion, are as few tokens.

  Raises:
    ValueError: lengths outside 0 to T.
  """
  lengths = np.asarray(lengths, np.int32)
  b, g = lengths.shape
  shortest, longest = lengths.min(), lengths.max()
  if shortest < 0 or longest > length:
    wrong = shortest if shortest < 0 else longest
    raise ValueError(f"a completion has 0 to {length} tokens, not {wrong}")

  whole = b * (prompt_length + g * length)
  sizes = _Sizes(g, prompt_length, whole, blocks, together, micro_batches)
  places, shapes = {}, []
  for width in (w for w in row_lengths(length) if w >= longest):
    places[width] = first_fit(lengths, width)
    needed = 1 + np.max(np.where(lengths > 0, places[width][0], -1), axis=1)
    shapes += _shapes(needed, width, sizes)
  best = min(shapes, default=None)
  if best is None or best.tokens >= whole:
    return None
  return _in_subgroups(lengths, *places[best.width], best, blocks)


def _in_subgroups(
  lengths: Int[np.ndarray, "B G"],
  rows: Int[np.ndarray, "B G"],
  starts: Int[np.ndarray, "B G"],
  shape: _Shape,
  blocks: int,
) -> Packing:
  """Each `shape.rows` rows that follow each other become a subgroup."""
  b, g = lengths.shape
  here = lengths > 0
  of_prompt = rows // shape.rows
  count = np.max(np.where(here, of_prompt + 1, 0), axis=1).reshape(blocks, -1)
  first = np.reshape(np.cumsum(count, axis=1) - count, (b, 1))
  subgroups = np.where(here, first + of_prompt, shape.subgroups)

  prompt, sample = np.nonzero(here)
  block, within = np.divmod(prompt, b // blocks)
  at = block, subgroups[here]
  prompts = np.zeros((blocks, shape.subgroups), np.int32)
  prompts[at] = within

  def spread(x):  # [B, G] -> [C M, G], each where its subgroup is
    found = np.zeros((blocks, shape.subgroups, g), np.int32)
    found[*at, sample] = x[here]
    return found.reshape(-1, g)

  of_rows = spread(lengths), spread(rows % shape.rows), spread(starts)
  segments, positions = _tables(*of_rows, (shape.rows, shape.width))
  lengths, rows, starts = of_rows
  found = Rows(segments, positions, rows, starts, lengths)
  return Packing(
    prompts=prompts,
    subgroups=subgroups.astype(np.int32),
    rows=jax.tree.map(lambda x: x.reshape(*prompts.shape, *x.shape[1:]), found),
  )


def plan(
  lengths: Int[np.ndarray, "B G"],
  length: int,
  prompt_length: int = 0,
  minibatches: int = 1,
  micro_batches: int = 1,
) -> Packing | None:
  """`layout`, for a batch that `make_batch` and `make_update` cut up.

  The subgroups are of all prompts that a device has. Where there are several
  minibatches, into which prompts are drawn, each prompt has as many subgroups.

  Args:
    lengths: see `layout`.
    length: see `layout`.
    prompt_length: see `layout`.
    minibatches: see `make_update`.
    micro_batches: see `make_update`.

  Returns:
    See `layout`. None also where the mesh in context cuts groups, for rows
    would have to cross devices.

  Raises:
    ValueError: see `layout` and `micro_batches.cuts`.
  """
  b, g = lengths.shape
  parts_lib.cuts(b // minibatches, g, micro_batches)
  shards = mesh_lib.row_shards(jax.sharding.get_abstract_mesh())
  if b % (minibatches * shards):
    return None
  blocks = shards if minibatches == 1 else b
  # Blocks of a minibatch on a device, whose subgroups become micro-batches.
  together = blocks // (minibatches * shards)
  return layout(lengths, length, prompt_length, blocks, together, micro_batches)
