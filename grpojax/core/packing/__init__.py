"""A batch computed without most of its padding: which token lies where.

Completions have any length up to T, and of rows of T tokens most may be
padding. So each real token has three addresses, and every computation takes
the one that wastes least:

    samples [G, T]        rows [K, W]           tokens [N]

    a a a - - -           b b b b b c           b b b b b c a a a d d
    b b b b b -     ->    a a a d d -     ->
    c - - - - -
    d d - - - -

    loss, weights,        attention             all that is done to each token
    metrics                                     by itself: norms, MLP, logits

A row has completions of one prompt, each of them whole. A token keeps its
position and attends to its prompt and its own completion alone (`positions` and
`segments` of `LM.extend`), so that its log-probability is the same.

A batch is computed in micro-batches, each of some rows. These lie with their
prompts on one device: nothing crosses devices. What devices and minibatches
take as a whole is a *bundle* of prompts: all prompts of a device or, with
several minibatches, for which prompts are drawn anew, each prompt. The rows of
each bundle are *split*, and a micro-batch has one split of some bundles. A
prompt is computed in every split that has rows of it: these are its *copies*.
Four prompts on two devices, in two micro-batches of two rows on each device:

                             micro-batch 0      micro-batch 1
    bundle 0 (prompts 0, 1)  rows of 0 and 0    rows of 0 and 1
    bundle 1 (prompts 2, 3)  rows of 2 and 3    rows of 3 and 3

    prompt_of_copy           [0, -], [0, 1]     [0, 1], [1, -]  in their bundle
    prompt_of_row            [0, 0], [0, 1]     [0, 1], [0, 0]  in their split

`packing_layout.plan` makes this on the host, where lengths are known, in few
different sizes, each of which is a program to compile. The rest is jitted with
the packing as an argument: `split` and `join` here, from [B, G, T] to
micro-batches and back, `packed_logprobs` from samples to rows and back, and
`flat_tokens` from rows to tokens and back.
"""

import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from grpojax.core.packing import micro_batches as micro_batches_lib
from grpojax.core.types import OF_PROMPTS, Batch


class Sizes(NamedTuple):
  """Sizes of a micro-batch that are compiled, besides those of its arrays.

  Attributes:
    devices: Number of devices that its rows lie on.
    bundles: Number of bundles that it has a split of, on all devices.
    tokens: Number of completion tokens that each device has room for.
    prompt_tokens: Number of prompt tokens that each device has room for.
  """

  devices: int
  bundles: int
  tokens: int
  prompt_tokens: int


@typing.no_type_check
@struct.dataclass
class Rows:
  """Packed rows: of all splits, or of one micro-batch.

  Attributes:
    prompt_of_row: Prompt of each row, counted among those of its split; in a
      micro-batch, among those on its device.
    sample_of_token: Sample of each token, 0 to G - 1; -1 on padding.
    position_of_token: Position of each token in its completion; 0 on padding.
    sizes: Sizes of each micro-batch.
  """

  prompt_of_row: Int[Array, "*splits K"]
  sample_of_token: Int[Array, "*splits K W"]
  position_of_token: Int[Array, "*splits K W"]
  sizes: Sizes = struct.field(pytree_node=False)


@typing.no_type_check
@struct.dataclass
class Packing:
  """The rows of a batch, by bundles and their splits.

  The first axis of all arrays is cut and reordered with that of the batch, over
  devices and into minibatches.

  Attributes:
    prompt_of_copy: Prompt of each copy, counted within the bundle. U is the
      same for all splits; any prompt stands where one has fewer.
    copy_of_sample: Copy beside which each sample is computed, counted within
      the bundle; splits * U for a sample without tokens.
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


def _to_micro_batches(tree: PyTree, packing: Packing) -> PyTree:
  """[bundles, splits, n, ...] -> [micro-batches, bundles of one * n, ...].

  Bundles are divided as rows are (`micro_batches.split_rows`), strided.
  """
  count = len(packing.prompt_of_copy) // packing.rows.sizes.bundles

  def leaf(x):
    x = jnp.swapaxes(micro_batches_lib.split_rows(x, count), 1, 2)
    return x.reshape(packing.micro_batches(), -1, *x.shape[4:])

  return jax.tree.map(leaf, tree)


def split(
  prompts: PyTree[Shaped[Array, "B ..."]],
  samples: PyTree[Shaped[Array, "B G ..."]],
  packing: Packing,
) -> tuple[PyTree, PyTree, Bool[Array, "micro_batches U G"], Rows]:
  """Splits a batch into micro-batches, the first axis of all that is returned.

  Args:
    prompts: Arrays of prompts.
    samples: Arrays of samples.
    packing: Packing of the batch.

  Returns:
    The arrays of prompts and of samples for the U copies of prompts in each
    micro-batch, a mask of the samples that are in its rows (others of these
    prompts are elsewhere), and its rows.
  """
  (bundles, splits, u), rows = packing.prompt_of_copy.shape, packing.rows
  prompt_of_copy = packing.prompt_of_copy.reshape(bundles, -1)

  def by_split(x):  # [B, ...] -> [bundles, splits, U, ...]
    x = x.reshape(bundles, -1, *x.shape[1:])
    x = jax.vmap(lambda bundle, index: bundle[index])(x, prompt_of_copy)
    return x.reshape(bundles, splits, u, *x.shape[2:])

  of_batch = prompts, samples, packing.copy_of_sample
  prompts, samples, copy_of_sample = jax.tree.map(by_split, of_batch)
  in_rows = copy_of_sample == jnp.arange(splits * u).reshape(splits, u, 1)
  # A micro-batch has every count-th bundle, those of a device side by side: the
  # prompts of its rows are counted on through them.
  count = bundles // rows.sizes.bundles
  on_device = rows.sizes.bundles // rows.sizes.devices
  bundle = jnp.arange(bundles)[:, None, None] // count % on_device
  rows = rows.replace(prompt_of_row=rows.prompt_of_row + u * bundle)
  return _to_micro_batches((prompts, samples, in_rows, rows), packing)


def join(
  values: Shaped[Array, "micro_batches U G T"], packing: Packing
) -> Shaped[Array, "B G T"]:
  """Takes each sample's values from its micro-batch; 0 without tokens."""
  (b, g), t = packing.copy_of_sample.shape, values.shape[-1]
  bundles, splits, u = packing.prompt_of_copy.shape
  # The inverse of `_to_micro_batches`, then each sample from its copy.
  x = values.reshape(-1, splits, packing.rows.sizes.bundles, u, g, t)
  x = jnp.moveaxis(x, 2, 0).reshape(bundles, splits * u, g, t)
  index = packing.copy_of_sample.reshape(bundles, -1, g, 1)
  x = jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)
  return x.reshape(b, g, t)


def split_batch(
  batch: Batch, weights: Float[Array, "B G T"]
) -> tuple[Batch, Float[Array, "micro_batches U G T"]]:
  """Splits a batch with a packing, and its token weights, as `split` does.

  What the loss says of a token depends on its sample alone, and its weight is
  known: sums over the real tokens stay what they are.

  Returns:
    The batch, whose `packing` are now the rows of each micro-batch, and whose
    mask is of the samples in them; and the weights.
  """
  samples = {f: x for f, x in vars(batch).items() if f != "packing"}
  prompts = {f: samples.pop(f) for f in OF_PROMPTS}
  prompts, (samples, weights), in_rows, rows = split(
    prompts, (samples, weights), batch.packing
  )
  samples["completion_mask"] &= in_rows[..., None]
  return Batch(**prompts, **samples, packing=rows), weights


def size(tokens: int, padded: int) -> float:
  """Returns the size of a micro-batch, in tokens of an unpacked batch.

  Queries, keys and values are in rows, padding and all, and other hidden states
  of tokens alone. Of what is held for the backward pass, the rows are a third
  in most models, and two thirds where heads are wider than hidden states (as in
  Qwen3-0.6B): that is counted. An LM without `forward` holds all of it in rows.

  Args:
    tokens: Number of tokens that there is room for.
    padded: Number of tokens of its rows and its prompts, padding included.
  """
  return (tokens + 2 * padded) / 3


def check_parts(
  packing: Packing,
  shape: tuple[int, int, int],
  prompt_length: int,
  micro_batches: int,
) -> None:
  """Refuses micro-batches that are larger than those of the unpacked batch.

  Args:
    packing: Packing of the batch.
    shape: B, G and T.
    prompt_length: P.
    micro_batches: Number of micro-batches of the unpacked batch.

  Raises:
    ValueError: they are larger.
  """
  (b, g, t), rows, count = shape, packing.rows, packing.micro_batches()
  room = rows.sizes.tokens + rows.sizes.prompt_tokens
  copies = packing.prompt_of_copy.size
  padded = rows.sample_of_token.size + copies * prompt_length
  packed_size = size(count * rows.sizes.devices * room, padded)
  if packed_size * micro_batches > b * (prompt_length + g * t) * count:
    raise ValueError(
      f"packed in {count} micro-batches, each is larger than one of "
      f"{micro_batches} of the batch as it is: make the packing for as many "
      "(see packing_layout.plan)"
    )
