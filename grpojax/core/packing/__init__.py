"""A batch computed without most of its padding: which token lies where.

Each real token has three addresses, and every computation takes the one that
wastes least:

    samples [G, T]        rows [K, W]           tokens [N]

    a a a - - -           b b b b b c           b b b b b c a a a d d
    b b b b b -     ->    a a a d d -     ->
    c - - - - -
    d d - - - -

    loss, weights,        attention             all that is done to each token
    metrics                                     by itself: norms, MLP, logits

A row has whole completions of one prompt. A token keeps its position and
attends to its prompt and its own completion alone (`positions` and `segments`
of `LM.extend`), so that its log-probability is the same.

Unpacked micro-batches are equal parts of the prompts and, where these are too
few, of the groups as well. Four prompts of four samples in eight:

    prompt 0   a b a b      micro-batches a, c, e, g have samples 0 and 2,
    prompt 1   c d c d      b, d, f, h samples 1 and 3
    prompt 2   e f e f
    prompt 3   g h g h

Packed ones have some rows each, with their prompts on one device. Devices and
minibatches take whole *bundles* of prompts: all prompts of a device or, with
several minibatches, which are drawn from the prompts, each prompt. The rows of
each bundle are *split*, and a micro-batch has one split of some bundles. A
prompt is computed in every split that has rows of it: these are its *copies*.
Four prompts on two devices, in two micro-batches of two rows on each device:

                             micro-batch 0      micro-batch 1
    bundle 0 (prompts 0, 1)  rows of 0 and 0    rows of 0 and 1
    bundle 1 (prompts 2, 3)  rows of 2 and 3    rows of 3 and 3

    prompt_of_copy           [0, -], [0, 1]     [0, 1], [1, -]  in their bundle
    prompt_of_row            [0, 0], [0, 1]     [0, 1], [0, 0]  in their split

`layout.plan` makes a packing on the host, in few different sizes, each of which
is a program to compile. The rest is jitted with the packing as an argument:
`split` and `join`, from [B, G, T] to micro-batches and back, `packed_logprobs`
from samples to rows and back, `flat_tokens` from rows to tokens and back.
"""

import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from grpojax.core.packing.micro_batches import cuts, split_rows


class Sizes(NamedTuple):
  """Sizes of a micro-batch that are compiled, besides those of its arrays."""

  devices: int  # number of devices that its rows lie on
  bundles: int  # number of bundles that it has a split of, on all devices
  tokens: int  # number of completion tokens that each device has room for
  prompt_tokens: int  # number of prompt tokens that each device has room for
  samples: int  # number of samples of an unpacked one, which is not smaller


@typing.no_type_check
@struct.dataclass
class Rows:
  """Packed rows: of all splits, or of one micro-batch."""

  # Prompt of each row, among those of its split (or, in a micro-batch, device).
  prompt_of_row: Int[Array, "*splits K"]
  sample_of_token: Int[Array, "*splits K W"]  # 0 to G - 1; -1 on padding
  position_of_token: Int[Array, "*splits K W"]  # 0 on padding
  sizes: Sizes = struct.field(pytree_node=False)  # of each micro-batch


@typing.no_type_check
@struct.dataclass
class Packing:
  """The rows of a batch, by bundles and their splits.

  The first axis of all arrays is cut and reordered with that of the batch.

  Attributes:
    prompt_of_copy: Prompt of each copy, counted within the bundle; any prompt
      if a split has fewer than U.
    copy_of_sample: Copy with which each sample is computed, counted within the
      bundle; splits * U for a sample without tokens.
    rows: Rows of each split, [bundles, splits, K, ...].
  """

  prompt_of_copy: Int[Array, "bundles splits U"]
  copy_of_sample: Int[Array, "B G"]
  rows: Rows

  def micro_batches(self) -> int:
    """Number of micro-batches."""
    bundles, splits, _ = self.prompt_of_copy.shape
    return bundles // self.rows.sizes.bundles * splits

  def packed(self) -> Bool[Array, "B G"]:
    """True for samples in a row; nothing is computed of the others."""
    _, splits, u = self.prompt_of_copy.shape
    return self.copy_of_sample < splits * u


def split(
  prompts: PyTree[Shaped[Array, "B ..."]],
  samples: PyTree[Shaped[Array, "B G ..."]],
  packing: Packing | None,
  count: int = 1,
) -> tuple[PyTree, PyTree, Bool[Array, "n U G"] | None, Rows | None]:
  """Splits a batch into `count` micro-batches, the first axis of the results.

  Packed, there may be fewer. Their arrays are of the U copies of prompts in
  each, with a mask of the samples in its rows, and the rows; else mask and rows
  are None. ValueError if the batch cannot be divided so (`micro_batches.cuts`),
  or the packing's micro-batches may be larger than unpacked ones.
  """
  b, g = jax.tree.leaves(samples)[0].shape[:2]
  if packing is not None:
    if packing.rows.sizes.samples * count > b * g:
      raise ValueError(
        f"packed in {packing.micro_batches()} micro-batches, each may be "
        f"larger than one of {count} of the batch as it is: plan it for as "
        "many (see packing.layout.plan)"
      )
    return _split_packed(prompts, samples, packing)
  of_prompts, of_groups = cuts(b, g, count)

  def split_groups(x):
    x = split_rows(x, of_prompts)
    x = x.reshape(*x.shape[:2], -1, of_groups, *x.shape[3:])
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(-1, *x.shape[2:])

  def repeat(x):  # once for each part of their group
    return jnp.repeat(x, of_groups, axis=0)

  samples = jax.tree.map(split_groups, samples)
  prompts = jax.tree.map(repeat, split_rows(prompts, of_prompts))
  return prompts, samples, None, None


def _split_packed(prompts, samples, packing: Packing):
  """Splits a batch as its packing says."""
  (bundles, splits, u), rows = packing.prompt_of_copy.shape, packing.rows
  prompt_of_copy = packing.prompt_of_copy.reshape(bundles, -1)
  count = bundles // rows.sizes.bundles

  def by_split(x):  # [B, ...] -> [bundles, splits, U, ...]
    x = x.reshape(bundles, -1, *x.shape[1:])
    x = jax.vmap(lambda bundle, index: bundle[index])(x, prompt_of_copy)
    return x.reshape(bundles, splits, u, *x.shape[2:])

  def to_micro_batches(x):  # -> [micro-batches, bundles of one * U, ...]
    x = jnp.swapaxes(split_rows(x, count), 1, 2)
    return x.reshape(packing.micro_batches(), -1, *x.shape[4:])

  of_batch = prompts, samples, packing.copy_of_sample
  prompts, samples, copy_of_sample = jax.tree.map(by_split, of_batch)
  in_rows = copy_of_sample == jnp.arange(splits * u).reshape(splits, u, 1)
  # A micro-batch has every count-th bundle, those of a device side by side, and
  # counts the prompts of its rows through them.
  on_device = rows.sizes.bundles // rows.sizes.devices
  bundle = jnp.arange(bundles)[:, None, None] // count % on_device
  rows = rows.replace(prompt_of_row=rows.prompt_of_row + u * bundle)
  return jax.tree.map(to_micro_batches, (prompts, samples, in_rows, rows))


def join(
  values: Shaped[Array, "n U _ T *more"],
  packing: Packing | None,
  shape: tuple[int, int],
) -> Shaped[Array, "B G T *more"]:
  """Joins values of micro-batches into [B, G, ...]; 0 of samples in no row."""
  (b, g), (_, u, samples, *of_sample) = shape, values.shape
  if packing is None:
    x = values.reshape(b // u, g // samples, u, samples, *of_sample)
    return jnp.moveaxis(x, (2, 0, 3, 1), range(4)).reshape(b, g, *of_sample)
  bundles, splits, u = packing.prompt_of_copy.shape
  # The inverse of `to_micro_batches`, then each sample from its copy.
  x = values.reshape(-1, splits, packing.rows.sizes.bundles, u, g, *of_sample)
  x = jnp.moveaxis(x, 2, 0).reshape(bundles, splits * u, g, *of_sample)
  index = packing.copy_of_sample.reshape(bundles, -1, g, *[1] * len(of_sample))
  x = jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)
  return x.reshape(b, g, *of_sample)
