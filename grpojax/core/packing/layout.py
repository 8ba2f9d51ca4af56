"""The packing of a batch, planned on the host from the lengths of its texts.

For each width of rows, completions are put into rows (`first_fit`), whose
bundles are spread over as few splits as are small enough (`_spread`, `_shape`);
the cheapest width is written down (`_packing`). The words are `packing`'s.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from grpojax.core.mesh import row_shards
from grpojax.core.packing import Packing, Rows, Sizes
from grpojax.core.packing.micro_batches import cuts


def row_lengths(length: int) -> list[int]:
  """Returns the widths of rows: a quarter, a half, all of T (rounded up)."""
  return sorted({-(-length // k) for k in (4, 2, 1)})


def size_of(most: int, steps: int) -> int:
  """Returns the least size that is compiled and not below `most`.

  All up to 2 `steps`, then so many in each doubling: of 2 they are 1, 2, 3, 4,
  6, 8, 12, 16, 24, ... A finer grid computes less padding and compiles more.
  """
  most = max(most, 1)
  step = 2 ** max(0, (most - 1).bit_length() - steps.bit_length())
  return step * -(-most // step)


def first_fit(
  lengths: Int[np.ndarray, "B G"], width: int
) -> tuple[Int[np.ndarray, "B G"], Int[np.ndarray, "B G"]]:
  """Puts each sample into the first row with room for it, the longest first.

  It needs at most 11/9 of the fewest rows possible, and one (Johnson 1973).
  Returns the row and the start of each sample.
  """
  prompts = np.arange(len(lengths))
  rows, starts, used = (np.zeros(lengths.shape, np.int32) for _ in range(3))
  for sample in np.argsort(-lengths, axis=-1, kind="stable").T:
    length = lengths[prompts, sample]
    row = np.argmax(used + length[:, None] <= width, axis=-1)
    rows[prompts, sample], starts[prompts, sample] = row, used[prompts, row]
    used[prompts, row] += length
  return rows, starts


class _Batch(NamedTuple):
  """Lengths that are packed, and the number of bundles."""

  lengths: Int[np.ndarray, "B G"]
  length: int  # T
  prompt_lengths: Int[np.ndarray, "B"]
  prompt_length: int  # P
  bundles: int


class _Spread(NamedTuple):
  """Rows of each bundle, G a prompt; those without tokens are nowhere."""

  row_of_sample: Int[np.ndarray, "B G"]  # among those of its prompt
  start_of_sample: Int[np.ndarray, "B G"]
  tokens_of_row: Int[np.ndarray, "bundles rows"]
  split_of_row: Int[np.ndarray, "bundles rows"]
  place_of_row: Int[np.ndarray, "bundles rows"]  # in its split
  has_prompt: Bool[np.ndarray, "bundles splits prompts"]


def _spread(batch: _Batch, width: int, splits: int) -> _Spread:
  """Spreads the rows of each bundle over splits of about as many tokens."""
  b, g = batch.lengths.shape
  row_of_sample, start_of_sample = first_fit(batch.lengths, width)
  tokens = np.zeros((b, g), np.int64)
  np.add.at(tokens, (np.arange(b)[:, None], row_of_sample), batch.lengths)
  tokens = tokens.reshape(batch.bundles, -1)
  # The token in the middle of a row decides.
  ends = np.cumsum(tokens, axis=1)
  split = (2 * ends - tokens) * splits // np.maximum(2 * ends[:, -1:], 1)
  split = np.minimum(split, splits - 1)
  has_row = split[:, None] == np.arange(splits)[:, None]
  has_row &= (tokens > 0)[:, None]  # [bundles, splits, rows]
  place = np.sum(np.where(has_row, np.cumsum(has_row, axis=2) - 1, 0), axis=1)
  has_prompt = has_row.reshape(batch.bundles, splits, -1, g).any(axis=-1)
  return _Spread(
    row_of_sample, start_of_sample, tokens, split, place, has_prompt
  )


class _Shape(NamedTuple):
  """Sizes that are compiled."""

  width: int  # W
  splits: int  # of a bundle
  bundles: int  # of a micro-batch, on a device
  rows: int  # K, of a split
  copies: int  # U, of a split
  tokens: int  # of completions, that a device has room for
  prompt_tokens: int  # that a device has room for


def _shape(batch: _Batch, spread: _Spread, width: int, bundles: int) -> _Shape:
  """Finds the least sizes in which any so many bundles have room."""
  splits, prompts = spread.has_prompt.shape[1:]
  tokens_of_split = np.zeros((batch.bundles, splits), np.int64)
  rows_of_split = np.zeros_like(tokens_of_split)
  index = np.arange(batch.bundles)[:, None], spread.split_of_row
  np.add.at(tokens_of_split, index, spread.tokens_of_row)
  np.add.at(rows_of_split, index, spread.tokens_of_row > 0)
  largest = lambda of_split: int(np.sort(of_split, axis=None)[-bundles:].sum())
  tokens = size_of(largest(tokens_of_split), 2)
  # A row is four fifths, two thirds or half full, so that rows and tokens grow
  # together, and fewer pairs of them are compiled.
  most = max(1, int(rows_of_split.max()))
  counts = (-(-tokens * k // (4 * width * bundles)) for k in (5, 6, 8))
  rows = next((n for n in counts if n >= most), size_of(most, 2))
  samples = batch.lengths.size // (batch.bundles * splits)
  copies = size_of(int(spread.has_prompt.sum(axis=-1).max()), 1)
  copies = min(copies, prompts)
  # Prompts have room as padded as they are, or for three quarters of that.
  lengths = batch.prompt_lengths.reshape(batch.bundles, 1, -1)
  prompt_tokens = np.where(spread.has_prompt, lengths, 0).sum(axis=-1)
  padded = max(1, bundles * copies * batch.prompt_length)
  most_of_it = -(-padded * 3 // 4)
  return _Shape(
    width=width,
    splits=splits,
    bundles=bundles,
    rows=max(most, min(rows, samples)),
    copies=copies,
    tokens=tokens,
    prompt_tokens=(
      most_of_it if largest(prompt_tokens) <= most_of_it else padded
    ),
  )


def size(tokens: int, padded: int) -> float:
  """Returns the size of a micro-batch, in tokens of an unpacked batch.

  Queries, keys and values are in `padded` rows, other hidden states of `tokens`
  alone. Rows are a third of the memory for the backward pass in most models,
  and two thirds, which is counted, if heads are wider than hidden states.
  """
  return (tokens + 2 * padded) / 3


def _cost(
  batch: _Batch, tokens: int, rows: int, width: int, prompts: int
) -> float:
  """Returns the cost of tokens and of attention in rows of W or P tokens.

  Attention to all keys counts half of the other work per token.
  """
  p = batch.prompt_length
  pairs = rows * width * (width + p) + prompts * p * p
  return tokens + pairs / (2 * (batch.length + p))


def _cheapest(
  batch: _Batch, ways: list[tuple[int, int]], largest: float
) -> tuple[_Shape, _Spread] | None:
  """Finds the cheapest width, each in as few micro-batches as are allowed.

  `ways` are splits of a bundle and bundles of a micro-batch on a device, the
  fewest micro-batches first, `largest` is its greatest size there. None if no
  width costs less than the batch as it is.
  """
  (b, g), p, t = batch.lengths.shape, batch.prompt_length, batch.length
  lowest = _cost(batch, b * (p + g * t), rows=b * g, width=t, prompts=b)
  cheapest = None
  for width in row_lengths(t):
    if width < batch.lengths.max():
      continue
    for splits, bundles in ways:
      spread = _spread(batch, width, splits)
      shape = _shape(batch, spread, width, bundles)
      room = shape.tokens + shape.prompt_tokens
      padded = shape.rows * width + shape.copies * p
      if size(room, bundles * padded) > largest:
        continue
      count = batch.bundles * splits
      cost = _cost(
        batch,
        tokens=count // bundles * room,
        rows=count * shape.rows,
        width=width,
        prompts=count * shape.copies,
      )
      if cost < lowest:
        cheapest, lowest = (shape, spread), cost
      break
  return cheapest


def _packing(
  batch: _Batch, shape: _Shape, spread: _Spread, sizes: Sizes
) -> Packing:
  """Writes down where all is in the sizes of a shape."""
  lengths, (b, g), bundles = batch.lengths, batch.lengths.shape, batch.bundles
  # The prompts of a split, one after another, are its copies.
  copy_of_prompt = np.cumsum(spread.has_prompt, axis=-1) - 1
  prompt_of_copy = np.zeros((bundles, shape.splits, shape.copies), np.int32)
  bundle, split, prompt = np.nonzero(spread.has_prompt)
  copy = copy_of_prompt[bundle, split, prompt]
  prompt_of_copy[bundle, split, copy] = prompt

  # From here on arrays of the samples that have tokens.
  prompt, sample = np.nonzero(lengths)
  bundle, prompt_in_bundle = np.divmod(prompt, b // bundles)
  row = prompt_in_bundle * g + spread.row_of_sample[prompt, sample]
  split = spread.split_of_row[bundle, row]
  place = spread.place_of_row[bundle, row]
  copy = copy_of_prompt[bundle, split, prompt_in_bundle]
  copy_of_sample = np.full((b, g), shape.splits * shape.copies, np.int32)
  copy_of_sample[prompt, sample] = split * shape.copies + copy
  prompt_of_row = np.zeros((bundles, shape.splits, shape.rows), np.int32)
  prompt_of_row[bundle, split, place] = copy

  # And of their tokens: each with the index of its sample among these.
  length = lengths[prompt, sample]
  start = spread.start_of_sample[prompt, sample]
  of_token = np.repeat(np.arange(len(length)), length)
  before = np.cumsum(length) - length
  position = np.arange(len(of_token)) - before[of_token]
  at = (
    *(x[of_token] for x in (bundle, split, place)),
    start[of_token] + position,
  )
  sample_of_token = np.full((*prompt_of_row.shape, shape.width), -1, np.int32)
  sample_of_token[at] = sample[of_token]
  position_of_token = np.zeros_like(sample_of_token)
  position_of_token[at] = position
  rows = Rows(prompt_of_row, sample_of_token, position_of_token, sizes)
  return Packing(prompt_of_copy, copy_of_sample, rows)


def plan(
  lengths: Int[np.ndarray, "B G"],
  length: int,
  prompts: Int[np.ndarray, "B"],
  prompt_length: int,
  minibatches: int = 1,
  micro_batches: int = 1,
) -> Packing | None:
  """Plans the packing of a batch, on the host.

  A function of the lengths alone, so that a resumed run computes the same.
  Completions have 0 to T = `length` tokens (0 leaves one out), prompts 0 to P =
  `prompt_length`. An unpacked minibatch has `micro_batches`; packed it has as
  few as are not larger than these. Returns a packing of numpy arrays; None if
  the batch as it is costs no more, if no micro-batch would be small enough, or
  if the mesh in context cuts groups. ValueError if the batch cannot be divided
  (`micro_batches.cuts`).
  """
  lengths = np.asarray(lengths, np.int32)
  prompts = np.asarray(prompts, np.int32)
  b, g = lengths.shape
  cuts(b // minibatches, g, micro_batches)
  devices = row_shards(jax.sharding.get_abstract_mesh())
  if b % (minibatches * devices):
    return None
  counts = [n for n in range(1, micro_batches + 1) if micro_batches % n == 0]
  if minibatches == 1:
    bundles, ways = devices, [(n, 1) for n in counts]
  else:  # prompts are divided first, and their rows where these are too few
    bundles, on_device = b, b // (minibatches * devices)
    of_prompts = {n: math.gcd(n, on_device) for n in counts}
    ways = [(n // of_prompts[n], on_device // of_prompts[n]) for n in counts]
  batch = _Batch(lengths, length, prompts, prompt_length, bundles)
  parts = minibatches * micro_batches
  tokens = b * (prompt_length + g * length)
  cheapest = _cheapest(batch, ways, largest=tokens / (devices * parts))
  if cheapest is None:
    return None
  shape, spread = cheapest
  sizes = Sizes(
    devices=devices,
    bundles=devices * shape.bundles,
    tokens=shape.tokens,
    prompt_tokens=shape.prompt_tokens,
    samples=b * g // parts,
  )
  return _packing(batch, shape, spread, sizes)
