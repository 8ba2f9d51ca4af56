"""Plans a batch's packing on the host, from the lengths of its samples.

For each width, completions are put into rows (`first_fit`), and the rows of a
bundle are spread over the fewest splits that are small enough (`_spread`,
`_shape`). The cheapest width becomes the `Packing` (`_packing`). `packing`
explains the terms.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from grpojax.core.meshes import row_shards
from grpojax.core.packing import Packing, Rows, Sizes
from grpojax.core.packing.micro_batches import cuts


def size_of(most: int, steps: int) -> int:
  """Returns the smallest compiled size that is at least `most`.

  Sizes are 1 to 2 `steps`, then `steps` per doubling: for 2 they are 1, 2, 3,
  4, 6, 8, 12, 16, 24, ... More steps mean less padding, but more programs.
  """
  most = max(most, 1)
  # Sizes between 2**k and 2**(k + 1) are multiples of 2**k / steps.
  step = 2 ** max(0, (most - 1).bit_length() - steps.bit_length())
  return step * -(-most // step)


def first_fit(
  lengths: Int[np.ndarray, "B G"], width: int
) -> tuple[Int[np.ndarray, "B G"], Int[np.ndarray, "B G"]]:
  """Puts each sample into the first row with room for it, the longest first.

  The number of rows is at most 11/9 of the optimum plus one (Johnson 1973).
  Returns the row and the start of each sample.
  """
  prompts = np.arange(len(lengths))
  rows, starts, used = (np.zeros(lengths.shape, np.int32) for _ in range(3))
  # The next longest sample of every prompt at once: `sample` is [B].
  for sample in np.argsort(-lengths, axis=-1, kind="stable").T:
    length = lengths[prompts, sample]
    # argmax of booleans is the first row with room.
    row = np.argmax(used + length[:, None] <= width, axis=-1)
    rows[prompts, sample], starts[prompts, sample] = row, used[prompts, row]
    used[prompts, row] += length
  return rows, starts


class _Batch(NamedTuple):
  """Lengths of a batch's completions and prompts, and its number of bundles."""

  lengths: Int[np.ndarray, "B G"]
  length: int  # T
  prompt_lengths: Int[np.ndarray, "B"]
  prompt_length: int  # P
  bundles: int


class _Spread(NamedTuple):
  """Rows of each bundle, G per prompt; rows without tokens are unused."""

  row_of_sample: Int[np.ndarray, "B G"]  # among the rows of its prompt
  start_of_sample: Int[np.ndarray, "B G"]
  tokens_of_row: Int[np.ndarray, "bundles rows"]
  split_of_row: Int[np.ndarray, "bundles rows"]
  place_of_row: Int[np.ndarray, "bundles rows"]  # in its split
  has_prompt: Bool[np.ndarray, "bundles splits prompts"]


def _spread(batch: _Batch, width: int, splits: int) -> _Spread:
  """Spreads each bundle's rows over splits with about equal token counts."""
  b, g = batch.lengths.shape
  row_of_sample, start_of_sample = first_fit(batch.lengths, width)
  tokens = np.zeros((b, g), np.int64)
  # `tokens[...] += lengths` would count one sample of each row only.
  np.add.at(tokens, (np.arange(b)[:, None], row_of_sample), batch.lengths)
  tokens = tokens.reshape(batch.bundles, -1)
  # Splits divide the bundle's tokens equally; a row goes to the split of its
  # middle token.
  ends = np.cumsum(tokens, axis=1)
  split = (2 * ends - tokens) * splits // np.maximum(2 * ends[:, -1:], 1)
  split = np.minimum(split, splits - 1)
  has_row = split[:, None] == np.arange(splits)[:, None]
  has_row &= (tokens > 0)[:, None]  # [bundles, splits, rows]
  # A row's place is the number of rows before it in its split.
  place = np.sum(np.where(has_row, np.cumsum(has_row, axis=2) - 1, 0), axis=1)
  has_prompt = has_row.reshape(batch.bundles, splits, -1, g).any(axis=-1)
  return _Spread(
    row_of_sample, start_of_sample, tokens, split, place, has_prompt
  )


class _Shape(NamedTuple):
  """Compiled sizes of a packing."""

  width: int  # W
  splits: int  # per bundle
  bundles: int  # per micro-batch and device
  rows: int  # K, per split
  copies: int  # U, per split
  tokens: int  # room for completion tokens, per device
  prompt_tokens: int  # room for prompt tokens, per device


def _shape(batch: _Batch, spread: _Spread, width: int, bundles: int) -> _Shape:
  """Returns the smallest sizes that fit every choice of `bundles` bundles."""
  splits, prompts = spread.has_prompt.shape[1:]
  tokens_of_split = np.zeros((batch.bundles, splits), np.int64)
  rows_of_split = np.zeros_like(tokens_of_split)
  index = np.arange(batch.bundles)[:, None], spread.split_of_row
  np.add.at(tokens_of_split, index, spread.tokens_of_row)
  np.add.at(rows_of_split, index, spread.tokens_of_row > 0)
  # Every set of bundles may share a micro-batch, so the largest must fit.
  largest = lambda sizes: int(np.sort(sizes, axis=None)[-bundles:].sum())
  tokens = size_of(largest(tokens_of_split), 2)
  # Choose K as if rows were 4/5, 2/3 or 1/2 full: K follows from the tokens, so
  # that fewer pairs (rows, tokens) are compiled.
  most = max(1, int(rows_of_split.max()))
  counts = (-(-tokens * k // (4 * width * bundles)) for k in (5, 6, 8))
  rows = next((n for n in counts if n >= most), size_of(most, 2))
  # Most splits need no more rows than an equal share of the samples.
  samples = batch.lengths.size // (batch.bundles * splits)
  copies = size_of(int(spread.has_prompt.sum(axis=-1).max()), 1)
  copies = min(copies, prompts)
  # Room for 3/4 of the padded prompts if their real tokens fit, else for all.
  lengths = batch.prompt_lengths.reshape(batch.bundles, 1, -1)
  prompt_tokens = np.where(spread.has_prompt, lengths, 0).sum(axis=-1)
  padded = max(1, bundles * copies * batch.prompt_length)
  three_quarters = -(-padded * 3 // 4)
  fits = largest(prompt_tokens) <= three_quarters
  return _Shape(
    width=width,
    splits=splits,
    bundles=bundles,
    rows=max(most, min(rows, samples)),
    copies=copies,
    tokens=tokens,
    prompt_tokens=three_quarters if fits else padded,
  )


def _cheapest(
  batch: _Batch, ways: list[tuple[int, int]], largest: float
) -> tuple[_Shape, _Spread] | None:
  """Finds the cheapest width, each with the fewest micro-batches that fit.

  `ways` are pairs (splits per bundle, bundles per micro-batch and device), the
  fewest micro-batches first. `largest` limits the tokens of a micro-batch on a
  device. Returns None if no width costs less than the unpacked batch.
  """
  b, g = batch.lengths.shape
  p = batch.prompt_length
  t = batch.length

  def cost_of(tokens: int, rows: int, width: int, prompts: int) -> float:
    # Assume that attention to T + P keys costs half a token's other work.
    pairs = rows * width * (width + p) + prompts * p * p
    return tokens + pairs / (2 * (t + p))

  lowest = cost_of(b * (p + g * t), rows=b * g, width=t, prompts=b)
  cheapest = None
  for width in sorted({-(-t // k) for k in (4, 2, 1)}):
    if width < batch.lengths.max():
      continue
    for splits, bundles in ways:
      spread = _spread(batch, width, splits)
      shape = _shape(batch, spread, width, bundles)
      room = shape.tokens + shape.prompt_tokens
      padded = bundles * (shape.rows * width + shape.copies * p)
      # In the backward pass only queries, keys and values are padded. They take
      # a third of the memory in most models, but two thirds, as assumed here,
      # if heads are wider than hidden states.
      if (room + 2 * padded) / 3 > largest:
        continue
      count = batch.bundles * splits
      tokens = count // bundles * room
      rows = count * shape.rows
      cost = cost_of(tokens, rows, width, prompts=count * shape.copies)
      if cost < lowest:
        cheapest = (shape, spread)
        lowest = cost
      # The first way that fits has the fewest micro-batches.
      break
  return cheapest


def _packing(
  batch: _Batch, shape: _Shape, spread: _Spread, sizes: Sizes
) -> Packing:
  """Returns the arrays of a packing with the sizes of `shape`."""
  lengths = batch.lengths
  b, g = lengths.shape
  bundles = batch.bundles
  # The copies of a split are its prompts in their order.
  copy_of_prompt = np.cumsum(spread.has_prompt, axis=-1) - 1
  prompt_of_copy = np.zeros((bundles, shape.splits, shape.copies), np.int32)
  bundle, split, prompt = np.nonzero(spread.has_prompt)
  copy = copy_of_prompt[bundle, split, prompt]
  prompt_of_copy[bundle, split, copy] = prompt

  # Arrays over the samples that have tokens.
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

  # Arrays over the tokens of these samples; `index` is a token's sample.
  length = lengths[prompt, sample]
  start = spread.start_of_sample[prompt, sample]
  index = np.repeat(np.arange(len(length)), length)
  # Tokens are listed by sample: `before` counts tokens of earlier samples.
  before = np.cumsum(length) - length
  position = np.arange(len(index)) - before[index]
  at = bundle[index], split[index], place[index], start[index] + position
  sample_of_token = np.full((*prompt_of_row.shape, shape.width), -1, np.int32)
  sample_of_token[at] = sample[index]
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

  It depends only on lengths and mesh, so a resumed run makes the same plan.
  Completions have 0 to T = `length` tokens (0 leaves a sample out), prompts 0
  to P = `prompt_length`. `micro_batches` is the number per unpacked minibatch;
  packed micro-batches are as few as possible without being larger. Returns
  numpy arrays, or None if packing does not cost less, no micro-batch is small
  enough, or the mesh in context shards groups. ValueError if the batch cannot
  be divided (`micro_batches.cuts`).
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
    bundles = devices
    # A device's prompts are one bundle, so only its rows are divided.
    ways = [(n, 1) for n in counts]
  else:  # divide the prompts first, and their rows if there are too few prompts
    bundles = b
    on_device = b // (minibatches * devices)
    prompt_cuts = {n: math.gcd(n, on_device) for n in counts}
    ways = [(n // prompt_cuts[n], on_device // prompt_cuts[n]) for n in counts]
  batch = _Batch(lengths, length, prompts, prompt_length, bundles)
  # On each device a micro-batch may be as large as an unpacked one.
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
