"""Packing: a batch is computed without most of its padding.

Each real token has a place in three layouts, and every computation uses the
layout with the least waste:

    samples [G, T]        rows [K, W]           tokens [N]

    a a a - - -           b b b b b c           b b b b b c a a a d d
    b b b b b -     ->    a a a d d -     ->
    c - - - - -
    d d - - - -

    loss, weights,        attention             computations per token: norms,
    metrics                                     MLP, logits

A row has whole completions of one prompt. A token keeps its position and
attends only to its prompt and its own completion (`positions` and `segments` of
`LM.extend`), so its log-probability stays the same.

Unpacked micro-batches are equal parts of the prompts and, if there are too few
prompts, of the groups as well. Two prompts of four samples, micro-batches a-d:

    prompt 0   a b a b      micro-batches a and c have samples 0 and 2,
    prompt 1   c d c d      b and d samples 1 and 3

Packed micro-batches are made of rows, which stay on the device of their prompt.
A *bundle* is a set of prompts that stay together: all prompts of a device or,
with several minibatches (random subsets of the prompts), a single prompt. Its
rows are divided into *splits*; a micro-batch has one split of each of its
bundles. Each split that has rows of a prompt computes a *copy* of the prompt.
Four prompts on two devices, in two micro-batches of two rows per device:

                             micro-batch 0      micro-batch 1
    bundle 0 (prompts 0, 1)  rows of 0 and 0    rows of 0 and 1
    bundle 1 (prompts 2, 3)  rows of 2 and 3    rows of 3 and 3

    prompt_of_copy           [0, -], [0, 1]     [0, 1], [1, -]  in their bundle
    prompt_of_row            [0, 0], [0, 1]     [0, 1], [0, 0]  in their split

`layout.plan` makes a packing on the host, with few different sizes, because
each size compiles a program. The other functions are jitted with the packing as
an argument: `split` and `join` ([B, G, T] to micro-batches and back),
`packed_logprobs` (samples to rows and back) and `flat_tokens` (rows to tokens
and back).
"""

import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped

from grpojax.core.packing.micro_batches import cuts, split_rows
from grpojax.core.rows import group_shape, map_rows


class Sizes(NamedTuple):
  """Static sizes of a micro-batch, in addition to the shapes of its arrays."""

  devices: int
  bundles: int  # number of bundles, on all devices
  tokens: int  # room for completion tokens, per device
  prompt_tokens: int  # room for prompt tokens, per device
  samples: int  # of an unpacked micro-batch, the upper limit


@typing.no_type_check
@struct.dataclass
class Rows:
  """Packed rows of all splits, or of one micro-batch."""

  # Index of the prompt in the row's split or, in a micro-batch, on its device.
  prompt_of_row: Int[Array, "*splits K"]
  sample_of_token: Int[Array, "*splits K W"]  # 0 to G - 1; -1 on padding
  position_of_token: Int[Array, "*splits K W"]  # 0 on padding
  sizes: Sizes = struct.field(pytree_node=False)  # of each micro-batch


@typing.no_type_check
@struct.dataclass
class Packing:
  """The rows of a batch, by bundle and split.

  The first axis of all arrays is split and reordered like that of the batch.
  """

  # Index of the prompt in its bundle; arbitrary if the split needs no copy.
  prompt_of_copy: Int[Array, "bundles splits U"]
  # Index, in the bundle, of the copy of a sample's prompt; splits * U if empty.
  copy_of_sample: Int[Array, "B G"]
  rows: Rows  # [bundles, splits, K, ...]

  def micro_batches(self) -> int:
    """Number of micro-batches."""
    bundles, splits, _ = self.prompt_of_copy.shape
    return bundles // self.rows.sizes.bundles * splits

  def packed(self) -> Bool[Array, "B G"]:
    """True for samples in a row; other samples are not computed."""
    _, splits, u = self.prompt_of_copy.shape
    return self.copy_of_sample < splits * u


def split(
  record: Any, packing: Packing | None, count: int = 1
) -> tuple[Any, Bool[Array, "n U G"] | None, Rows | None]:
  """Splits a record's rows into `count` micro-batches, its arrays' first axis.

  Returns the record, a mask of the samples in the micro-batch's rows, and the
  rows. A packing may have fewer micro-batches, with room for U prompts per
  split; a prompt with rows in several splits is copied into each. Without a
  packing, mask and rows are None. ValueError if the batch cannot be divided
  (`micro_batches.cuts`) or packed micro-batches may exceed unpacked ones.
  """
  b, g = group_shape(record)
  if packing is not None:
    if packing.rows.sizes.samples * count > b * g:
      raise ValueError(
        f"the packing's {packing.micro_batches()} micro-batches may be larger "
        f"than {count} unpacked ones: plan it with micro_batches={count} (see "
        "packing.layout.plan)"
      )
    return _split_packed(record, packing)
  prompt_parts, group_parts = cuts(b, g, count)

  def split_field(x, *axes):
    x = split_rows(x, prompt_parts)
    if "group" not in axes:  # each part of a group comes with its prompt
      return jnp.repeat(x, group_parts, axis=0)
    # Sample s of a group goes to part s mod group_parts.
    x = x.reshape(*x.shape[:2], -1, group_parts, *x.shape[3:])
    # -> [prompt_parts, group_parts, U, G / group_parts, ...]
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(-1, *x.shape[2:])

  return map_rows(split_field, record), None, None


def _split_packed(record: Any, packing: Packing):
  """Splits a record into the micro-batches of its packing."""
  bundles, splits, u = packing.prompt_of_copy.shape
  rows = packing.rows
  prompt_of_copy = packing.prompt_of_copy.reshape(bundles, -1)
  count = bundles // rows.sizes.bundles

  def by_split(x):  # [B, ...] -> [bundles, splits, U, ...]
    x = x.reshape(bundles, -1, *x.shape[1:])
    x = jax.vmap(lambda bundle, index: bundle[index])(x, prompt_of_copy)
    return x.reshape(bundles, splits, u, *x.shape[2:])

  def to_micro_batches(x):  # -> [micro-batches, bundles of each * U, ...]
    # [count, bundles of each, splits, U, ...] before the axes are swapped.
    x = jnp.swapaxes(split_rows(x, count), 1, 2)
    return x.reshape(packing.micro_batches(), -1, *x.shape[4:])

  arrays = record, packing.copy_of_sample
  record, copy_of_sample = jax.tree.map(by_split, arrays)
  # A copy comes with its whole group; its split only computes `in_rows`.
  in_rows = copy_of_sample == jnp.arange(splits * u).reshape(splits, u, 1)
  # A micro-batch has every count-th bundle. The bundles of a device are
  # neighbours, so prompts are counted across them.
  on_device = rows.sizes.bundles // rows.sizes.devices
  bundle = jnp.arange(bundles)[:, None, None] // count % on_device
  rows = rows.replace(prompt_of_row=rows.prompt_of_row + u * bundle)
  return jax.tree.map(to_micro_batches, (record, in_rows, rows))


def join(
  values: Shaped[Array, "n U _ T *more"],
  packing: Packing | None,
  shape: tuple[int, int],
) -> Shaped[Array, "B G T *more"]:
  """Joins values of micro-batches into [B, G, ...]; 0 for samples in no row."""
  b, g = shape
  (_, u, samples, *more) = values.shape
  if packing is None:
    # Row r was dealt to part r mod parts, so parts vary fastest in the result.
    x = values.reshape(b // u, g // samples, u, samples, *more)
    return jnp.moveaxis(x, (2, 0, 3, 1), range(4)).reshape(b, g, *more)
  bundles, splits, u = packing.prompt_of_copy.shape
  # Invert `to_micro_batches`, then take each sample from its copy.
  x = values.reshape(-1, splits, packing.rows.sizes.bundles, u, g, *more)
  x = jnp.moveaxis(x, 2, 0).reshape(bundles, splits * u, g, *more)
  index = packing.copy_of_sample.reshape(bundles, -1, g, *[1] * len(more))
  # Samples without a row have an index out of range.
  x = jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)
  return x.reshape(b, g, *more)
