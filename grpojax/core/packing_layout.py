"""Where the completions of a batch lie in packed rows, found on the host."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from grpojax.core import mesh as mesh_lib
from grpojax.core import micro_batches as parts_lib
from grpojax.core import packing
from grpojax.core.packing import Packing, Part, Rows


def row_lengths(length: int) -> list[int]:
  """Tokens that a row may have: a quarter, a half, all of T (rounded up)."""
  return sorted({-(-length // k) for k in (4, 2, 1)})


def size_of(most: int, steps: int) -> int:
  """The least size that is compiled and not below `most`.

  All up to 2 `steps`, then so many in each doubling: of 4 they are 1, 2, ...,
  8, 10, 12, 14, 16, 20, 24, 28, 32, 40, ...
  """
  most = max(most, 1)
  step = 2 ** max(0, (most - 1).bit_length() - steps.bit_length())
  return step * -(-most // step)


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


class _Batch(NamedTuple):
  """What is packed.

  Attributes:
    lengths: of the completions.
    length: T.
    prompts: lengths of the prompts.
    prompt_length: P.
    regions: of as many prompts each, whose rows share blocks.
  """

  lengths: Int[np.ndarray, "B G"]
  length: int
  prompts: Int[np.ndarray, "B"]
  prompt_length: int
  regions: int


class _Cut(NamedTuple):
  """The rows of each region, cut into blocks; a prompt's follow each other.

  Attributes:
    tokens: of each row that a prompt may have; 0 where it has no such row.
    block: of the region, that each row is in.
    place: of the row in its block.
    there: whether a prompt of the region has a row in a block.
  """

  tokens: Int[np.ndarray, "regions rows"]
  block: Int[np.ndarray, "regions rows"]
  place: Int[np.ndarray, "regions rows"]
  there: Bool[np.ndarray, "regions blocks prompts"]


def _cut(batch: _Batch, rows: Int[np.ndarray, "B G"], blocks: int) -> _Cut:
  """Cuts the rows of each region into blocks of about as many tokens."""
  b, g = rows.shape
  tokens = np.zeros((b, g), np.int64)
  np.add.at(tokens, (np.arange(b)[:, None], rows), batch.lengths)
  tokens = tokens.reshape(batch.regions, -1)
  ends = np.cumsum(tokens, axis=1)
  # The middle of a row says which block it is in.
  block = (2 * ends - tokens) * blocks // np.maximum(2 * ends[:, -1:], 1)
  block = np.minimum(block, blocks - 1)
  here = block[:, None] == np.arange(blocks)[:, None]
  here &= (tokens > 0)[:, None]  # [regions, blocks, rows]
  place = np.sum(np.where(here, np.cumsum(here, axis=2) - 1, 0), axis=1)
  there = here.reshape(*here.shape[:2], -1, g).any(axis=-1)
  return _Cut(tokens, block, place, there)


class _Shape(NamedTuple):
  """Sizes that are compiled.

  Attributes:
    width: W.
    blocks: of a region.
    together: regions that a part has a block of, on a device.
    rows: K, of a block.
    prompts: U, of a block.
    tokens: of completions, that a part has room for on a device.
    prompt_tokens: likewise, of prompts.
  """

  width: int
  blocks: int
  together: int
  rows: int
  prompts: int
  tokens: int
  prompt_tokens: int


def _most(values: Int[np.ndarray, "*any"], count: int) -> int:
  """What so many of the values sum to at most."""
  return int(np.sort(values, axis=None)[-count:].sum())


def _shape(batch: _Batch, cut: _Cut, width: int, together: int) -> _Shape:
  """The sizes of parts that have a block of so many regions on a device."""
  regions, blocks, candidates = cut.there.shape
  of_block, rows = np.zeros((2, regions, blocks), np.int64)
  index = np.arange(regions)[:, None], cut.block
  np.add.at(of_block, index, cut.tokens)
  np.add.at(rows, index, cut.tokens > 0)
  tokens = size_of(_most(of_block, together), 4)
  # A row is four fifths, two thirds or half full: rows and tokens grow
  # together then, and fewer pairs of them are compiled.
  counts = (-(-tokens * k // (4 * width * together)) for k in (5, 6, 8))
  most = max(1, int(rows.max()))
  count = next((n for n in counts if n >= most), size_of(most, 4))
  samples = batch.lengths.size // (regions * blocks)
  prompts = min(size_of(int(cut.there.sum(axis=-1).max()), 2), candidates)
  lengths = batch.prompts.reshape(regions, 1, -1)
  real = _most(np.where(cut.there, lengths, 0).sum(axis=-1), together)
  whole = max(1, together * prompts * batch.prompt_length)
  half = -(-whole // 2)
  return _Shape(
    width=width,
    blocks=blocks,
    together=together,
    rows=max(most, min(count, samples)),
    prompts=prompts,
    tokens=tokens,
    prompt_tokens=half if real <= half else whole,
  )


def _size(batch: _Batch, s: _Shape) -> float:
  """How large a part is on a device."""
  places = s.together * (s.rows * s.width + s.prompts * batch.prompt_length)
  return packing.size(s.tokens + s.prompt_tokens, places)


def _cost(
  batch: _Batch, real: int, rows: tuple[int, int], prompts: int
) -> float:
  """Tokens, and what attention does to places that are padding too.

  Attention to as many keys as there may be is taken for half of what else is
  done to a token: it is less in wide models, and more in narrow ones.

  Args:
    batch: see `_Batch`.
    real: tokens.
    rows: of completions, and tokens of each.
    prompts: rows of P tokens.
  """
  (count, width), p = rows, batch.prompt_length
  pairs = count * width * (width + p) + prompts * p * p
  return real + pairs / (2 * (batch.length + p))


def _shapes(
  batch: _Batch, cuts: list[tuple[int, int]], largest: float
) -> Iterator[tuple[float, _Shape]]:
  """The shapes of each width, in as few parts as are not too large.

  Args:
    batch: see `_Batch`.
    cuts: blocks of a region, and regions of a part on a device; the fewest
      parts first.
    largest: size that a part may have on a device.
  """
  for width in row_lengths(batch.length):
    if width < batch.lengths.max():
      continue
    rows, _ = first_fit(batch.lengths, width)
    found = (
      _shape(batch, _cut(batch, rows, blocks), width, together)
      for blocks, together in cuts
    )
    fitting = (s for s in found if _size(batch, s) <= largest)
    for s in itertools.islice(fitting, 1):
      blocks = batch.regions * s.blocks
      real = blocks // s.together * (s.tokens + s.prompt_tokens)
      rows = blocks * s.rows, s.width
      yield _cost(batch, real, rows, blocks * s.prompts), s


def _packed(batch: _Batch, s: _Shape, devices: int) -> Packing:
  """The tables of a shape."""
  lengths, (b, g) = batch.lengths, batch.lengths.shape
  rows, starts = first_fit(lengths, s.width)
  cut = _cut(batch, rows, s.blocks)
  own = np.cumsum(cut.there, axis=-1) - 1  # of each prompt, in a block
  per_region = b // batch.regions
  prompts = np.zeros((batch.regions, s.blocks, s.prompts), np.int32)
  region, block, prompt = np.nonzero(cut.there)
  prompts[region, block, own[region, block, prompt]] = prompt

  # Of each sample that has tokens, and of each token of all of them.
  prompt, sample = np.nonzero(lengths)
  region, prompt_there = np.divmod(prompt, per_region)
  row = prompt_there * g + rows[prompt, sample]
  block, place = cut.block[region, row], cut.place[region, row]
  u = own[region, block, prompt_there]
  entries = np.full((b, g), s.blocks * s.prompts, np.int32)
  entries[prompt, sample] = block * s.prompts + u
  block = region * s.blocks + block
  blocks = batch.regions * s.blocks
  owners = np.zeros((blocks, s.rows), np.int32)
  owners[block, place] = u
  segments = np.full((blocks, s.rows, s.width), -1, np.int32)
  positions = np.zeros_like(segments)
  each = lengths[prompt, sample]
  of = np.repeat(np.arange(len(each)), each)
  position = np.arange(len(of)) - np.repeat(np.cumsum(each) - each, each)
  at = block[of], place[of], starts[prompt, sample][of] + position
  segments[at], positions[at] = sample[of], position
  part = Part(
    devices=devices,
    regions=devices * s.together,
    tokens=s.tokens,
    prompt_tokens=s.prompt_tokens,
  )
  tables = (
    x.reshape(batch.regions, s.blocks, *x.shape[1:])
    for x in (owners, segments, positions)
  )
  return Packing(prompts, entries, Rows(*tables, part))


def plan(
  lengths: Int[np.ndarray, "B G"],
  length: int,
  prompts: Int[np.ndarray, "B"],
  prompt_length: int,
  minibatches: int = 1,
  micro_batches: int = 1,
) -> Packing | None:
  """Packs the completions of a batch, and cuts it into parts, on the host.

  A function of the lengths alone, so that a resumed run computes the same. The
  prompts of a device are a region, whose rows are cut into the blocks that are
  its parts. Where there are several minibatches, into which prompts are drawn,
  each prompt is a region, and a part has blocks of several. There are as few
  parts as are not larger than those of the batch as it is.

  Args:
    lengths: of the completions, in tokens; 0 for those that nobody needs.
    length: T.
    prompts: lengths of the prompts.
    prompt_length: P.
    minibatches: see `make_update`.
    micro_batches: see `make_update`; the packed batch has as many parts, or
      fewer.

  Returns:
    Where the tokens lie, as numpy arrays. None where the batch as it is costs
    no more, where no part would be small enough, and where the mesh in context
    cuts groups, for rows would have to cross devices.

  Raises:
    ValueError: lengths outside 0 to T or to P, and see `micro_batches.cuts`.
  """
  lengths = np.asarray(lengths, np.int32)
  prompts = np.asarray(prompts, np.int32)
  _check_lengths("completion", lengths, length)
  _check_lengths("prompt", prompts, prompt_length)
  b, g = lengths.shape
  parts_lib.cuts(b // minibatches, g, micro_batches)
  devices = mesh_lib.row_shards(jax.sharding.get_abstract_mesh())
  if b % (minibatches * devices):
    return None
  parts = [n for n in range(1, micro_batches + 1) if micro_batches % n == 0]
  if minibatches == 1:
    regions, cuts = devices, [(n, 1) for n in parts]
  else:
    regions, on_device = b, b // (minibatches * devices)
    of_prompts = {n: math.gcd(n, on_device) for n in parts}
    cuts = [(n // of_prompts[n], on_device // of_prompts[n]) for n in parts]
  batch = _Batch(lengths, length, prompts, prompt_length, regions)
  whole = b * (prompt_length + g * length)
  largest = whole / (devices * minibatches * micro_batches)
  best = min(_shapes(batch, cuts, largest), default=None)
  if best is None or best[0] >= _cost(batch, whole, (b * g, length), b):
    return None
  return _packed(batch, best[1], devices)


def _check_lengths(of: str, lengths: Int[np.ndarray, "*any"], most: int):
  shortest, longest = lengths.min(), lengths.max()
  if shortest < 0 or longest > most:
    wrong = shortest if shortest < 0 else longest
    raise ValueError(f"a {of} has 0 to {most} tokens, not {wrong}")
