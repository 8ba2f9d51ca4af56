"""Completions of a batch packed into few rows, and unpacked again.

Completions have any length up to T, and as rows of T tokens most of what is
computed may be padding. Packed, several of a prompt share a row of W tokens:

    samples [G, T]          rows [3, W]
    a a a - - -             b b b b b c
    b b b b b -     ->      a a a d d -
    c - - - - -
    d d - - - -

A part of a batch (a micro-batch) has some rows, the prompts that these are of,
and all samples of the prompts, of which those elsewhere are masked:

    prompts [B, P], samples [B, G, T]  ->  [U, P], [U, G, T] and rows [K, W]

A sample is whole in one row of one part. Losses, weights and metrics are of
samples and know nothing of rows: log-probabilities are unpacked to [U, G, T].

Each token keeps its position, and attends to its prompt and within its own
completion alone (`positions` and `segments` of `LM.extend`), so that its
log-probability is the same. A prompt is computed once in a part, whose rows
share its keys and values. What is done to each token by itself is done to real
tokens only (`flat_tokens`), where the model has `forward` (`packed_logprobs`).

All sizes are from few, for each is a program to compile. The layout is made on
the host, where the lengths are known (`packing_layout.plan`); all here is
jitted with it as an argument.
"""

import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from grpojax.core import micro_batches as parts_lib
from grpojax.core.types import OF_PROMPTS, Batch


class Part(NamedTuple):
  """What is compiled of a part besides the sizes of its arrays.

  Attributes:
    devices: over which its rows lie.
    regions: of which it has a block each, over all devices.
    tokens: real tokens of completions that a device has room for.
    prompt_tokens: likewise, of prompts.
  """

  devices: int
  regions: int
  tokens: int
  prompt_tokens: int


@typing.no_type_check
@struct.dataclass
class Rows:
  """What lies where in rows: of all blocks, or of a part.

  Attributes:
    owners: the prompt of each row, of the block's or of the part's on a device.
    segments: the sample, 0 to G - 1, that a token is of; -1 on padding.
    positions: of each token in its completion; 0 on padding.
    part: the same for all.
  """

  owners: Int[Array, "*blocks K"]
  segments: Int[Array, "*blocks K W"]
  positions: Int[Array, "*blocks K W"]
  part: Part = struct.field(pytree_node=False)


@typing.no_type_check
@struct.dataclass
class Packing:
  """The regions of a batch, and the blocks of each.

  A region is some prompts that follow each other, as many as others are; its
  rows are cut into blocks. A part has one block of each of some regions. What
  is cut or reordered by regions (over devices, into minibatches) keeps them
  together.

  Attributes:
    prompts: of each block, counted within the region; what is left over of U is
      any.
    entries: the entry of `prompts` that has each sample, counted within the
      region; beyond them for those without tokens.
    rows: of each block, [regions, blocks, K, ...].
  """

  prompts: Int[Array, "regions blocks U"]
  entries: Int[Array, "B G"]
  rows: Rows

  def parts(self) -> int:
    """How many there are."""
    regions, blocks, _ = self.prompts.shape
    return regions // self.rows.part.regions * blocks

  def packed(self) -> Bool[Array, "B G"]:
    """Which samples are in a row; nothing is computed of the others."""
    _, blocks, u = self.prompts.shape
    return self.entries < blocks * u


def _regroup(tree: PyTree, packing: Packing) -> PyTree:
  """[B, ...] -> [regions, blocks, U, ...], for the prompts of each block."""
  shape = packing.prompts.shape
  index = packing.prompts.reshape(shape[0], -1)

  def leaf(x):
    regions = x.reshape(shape[0], -1, *x.shape[1:])
    taken = jax.vmap(lambda region, of: region[of])(regions, index)
    return taken.reshape(*shape, *x.shape[1:])

  return jax.tree.map(leaf, tree)


def _here(packing: Packing) -> Bool[Array, "regions blocks U G"]:
  """Whether a sample is in a block."""
  _, blocks, u = packing.prompts.shape
  entry = jnp.arange(blocks * u).reshape(blocks, u, 1)
  return _regroup(packing.entries, packing) == entry


def _parts(tree: PyTree, packing: Packing) -> PyTree:
  """[regions, blocks, n, ...] -> [parts, regions n / parts, ...]."""
  count = len(packing.prompts) // packing.rows.part.regions

  def leaf(x):
    x = jnp.swapaxes(parts_lib.split_rows(x, count), 1, 2)
    return x.reshape(packing.parts(), -1, *x.shape[4:])

  return jax.tree.map(leaf, tree)


def _rows_of_parts(packing: Packing) -> Rows:
  """The rows of each part, [parts, n, ...]."""
  rows, (regions, _, u) = packing.rows, packing.prompts.shape
  count = regions // rows.part.regions
  # A part has each count-th region; those of a device follow each other.
  on_device = rows.part.regions // rows.part.devices
  region = jnp.arange(regions)[:, None, None] // count % on_device
  return _parts(rows.replace(owners=rows.owners + u * region), packing)


def split(
  prompts: PyTree[Shaped[Array, "B ..."]],
  samples: PyTree[Shaped[Array, "B G ..."]],
  packing: Packing,
) -> tuple[PyTree, PyTree, Bool[Array, "parts U G"], Rows]:
  """The parts of a batch.

  Args:
    prompts: what is of prompts.
    samples: what is of samples.
    packing: of the batch.

  Returns:
    Both for the prompts of each part, [parts, U, ...], which samples are in the
    part, and its rows [parts, K, ...].
  """
  given = *_regroup((prompts, samples), packing), _here(packing)
  return *_parts(given, packing), _rows_of_parts(packing)


def join(
  values: Shaped[Array, "parts U G T"], packing: Packing
) -> Shaped[Array, "B G T"]:
  """Each sample's values from the part that it is in; 0 without tokens."""
  (b, g), t = packing.entries.shape, values.shape[-1]
  regions, blocks, u = packing.prompts.shape
  of_part = packing.rows.part.regions
  found = values.reshape(-1, blocks, of_part, u, g, t)
  found = jnp.moveaxis(found, 2, 0)  # the inverse of `_parts`
  found = jnp.take_along_axis(
    found.reshape(regions, -1, g, t),
    packing.entries.reshape(regions, -1, g, 1),
    axis=1,
    mode="fill",
    fill_value=0,
  )
  return found.reshape(b, g, t)


def split_batch(
  batch: Batch, weights: Float[Array, "B G T"]
) -> tuple[Batch, Float[Array, "parts U G T"]]:
  """The parts of a batch, whose `packing` are their rows; its token weights.

  What the loss says of a token depends on its sample alone, and its weight is
  known: sums over the real tokens stay what they are.
  """
  fields = {f: x for f, x in vars(batch).items() if f != "packing"}
  prompts = {f: fields.pop(f) for f in OF_PROMPTS}
  given = prompts, (fields, weights), batch.packing
  prompts, (fields, weights), here, rows = split(*given)
  fields["completion_mask"] &= here[..., None]
  return Batch(**prompts, **fields, packing=rows), weights


def size(tokens: int, places: int) -> float:
  """How large a part is, in tokens of a batch as it is.

  Queries, keys and values are in rows, padding and all, and other hidden states
  of tokens alone. Of what is held for the backward pass, the rows are a third
  in most models, and two thirds where heads are wider than hidden states (as in
  Qwen3-0.6B): that is counted. An LM without `forward` holds all of it in rows.

  Args:
    tokens: that it has room for.
    places: of its rows and of its prompts, padding included.
  """
  return (tokens + 2 * places) / 3


def check_parts(
  packing: Packing,
  unpacked: tuple[int, int, int],
  prompt_length: int,
  parts: int,
) -> None:
  """Refuses a layout whose parts are larger than those of the batch as it is.

  Args:
    packing: of the batch.
    unpacked: B, G and T.
    prompt_length: P.
    parts: micro-batches of the batch as it is.

  Raises:
    ValueError: they are.
  """
  b, g, t = unpacked
  part, found = packing.rows.part, packing.parts()
  places = packing.rows.segments.size + packing.prompts.size * prompt_length
  tokens = found * part.devices * (part.tokens + part.prompt_tokens)
  whole = b * (prompt_length + g * t)
  if size(tokens, places) * parts > whole * found:
    raise ValueError(
      f"packed in {found} micro-batches, each is larger than one of {parts} "
      "of the batch as it is: make the packing for as many (see "
      "packing_layout.plan)"
    )
