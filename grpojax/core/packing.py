"""Completions of a group packed into few rows, and unpacked again.

Completions have any length up to T, and as rows of T tokens most of what is
computed may be padding. Packed, several of them share a row:

    samples [G, T]          rows [R, W]
    a a a - - -             b b b b b c
    b b b b b -     ->      a a a d d -
    c - - - - -
    d d - - - -

All groups have equally many rows, and some need more than others. So a group
is cut into subgroups of R rows first, as many as it needs, each of which has
the prompt and some of the samples:

    prompts [B, P], samples [B, G, T]  ->  [N, P], [N, G, T]  ->  rows [N, R, W]

A sample keeps its place g among the G and is whole in one subgroup; in the
others of its prompt it is masked. Losses, weights and metrics are of samples
and know nothing of rows: log-probabilities are unpacked to [N, G, T].

Each token keeps its position, and attends to its prompt and within its own
completion alone (`positions` and `segments` of `LM.extend`), so that its
log-probability is the same. N, R and W are from few sizes, for each is a
program to compile. The layout is made on the host, where the lengths are known
(`packing_layout.plan`); all here is jitted with it as an argument. Different
prompts never share a row: the rows of a prompt share its keys and values.
"""

import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from grpojax.core import logprobs as logprobs_lib
from grpojax.core import micro_batches as parts_lib
from grpojax.core.types import LM, Batch, Params


@typing.no_type_check
@struct.dataclass
class Rows:
  """Where each completion token lies: R rows of W tokens a subgroup.

  Attributes:
    segments: the sample, 0 to G - 1, that a token is of; -1 on padding.
    positions: of each token in its completion; 0 on padding.
    rows: the row that each sample is in.
    starts: where it begins there.
    lengths: of each sample; those without tokens are nowhere.
  """

  segments: Int[Array, "N R W"]
  positions: Int[Array, "N R W"]
  rows: Int[Array, "N G"]
  starts: Int[Array, "N G"]
  lengths: Int[Array, "N G"]


@typing.no_type_check
@struct.dataclass
class Packing:
  """Subgroups of the groups of a batch, and the rows of each.

  A batch has C blocks of B / C prompts that follow each other, and each block
  has M subgroups, of its own prompts: what is cut or reordered by blocks (over
  devices, into minibatches) keeps them together. N = C M in all.

  Attributes:
    prompts: of each subgroup, counted within the block.
    subgroups: which one each sample is in, counted within the block; M, and so
      none, for those without tokens.
    rows: of each subgroup, [C, M, ...].
  """

  prompts: Int[Array, "C M"]
  subgroups: Int[Array, "B G"]
  rows: Rows


def regroup(
  tree: PyTree[Shaped[Array, "B ..."]], packing: Packing
) -> PyTree[Shaped[Array, "N ..."]]:
  """What is of prompts or of their samples, for each subgroup."""
  c, m = packing.prompts.shape

  def leaf(x):
    blocks = x.reshape(c, -1, *x.shape[1:])
    taken = jax.vmap(lambda block, of: block[of])(blocks, packing.prompts)
    return taken.reshape(c * m, *x.shape[1:])

  return jax.tree.map(leaf, tree)


def merged_rows(packing: Packing) -> Rows:
  """The rows of the subgroups of all blocks, [N, ...]."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), packing.rows)


def ungroup(
  values: Shaped[Array, "N G T"], packing: Packing
) -> Shaped[Array, "B G T"]:
  """Each sample's values from the subgroup that it is in; 0 without tokens."""
  c, m = packing.prompts.shape
  (b, g), t = packing.subgroups.shape, values.shape[-1]
  index = packing.subgroups.reshape(c, b // c, g, 1)
  found = jnp.take_along_axis(
    values.reshape(c, m, g, t), index, axis=1, mode="fill", fill_value=0
  )
  return found.reshape(b, g, t)


def regroup_batch(
  batch: Batch, weights: Float[Array, "B G T"]
) -> tuple[Batch, Float[Array, "N G T"]]:
  """A batch of subgroups, whose `packing` are their rows; its token weights.

  What the loss says of a token depends on its sample alone, and its weight is
  known: sums over the real tokens stay what they are.
  """
  rows = merged_rows(batch.packing)
  bare = batch.replace(packing=None)
  taken, weights = regroup((bare, weights), batch.packing)
  mask = taken.completion_mask & (rows.lengths > 0)[..., None]
  return taken.replace(completion_mask=mask, packing=rows), weights


def cuts(
  rows: Rows | None,
  unpacked: tuple[int, int, int],
  prompt_length: int,
  parts: int,
) -> tuple[int, int]:
  """`micro_batches.cuts` of a batch or its packed rows: subgroups stay whole.

  Args:
    rows: of all subgroups, see `merged_rows`; None where nothing is packed.
    unpacked: B, G and T of the batch.
    prompt_length: P.
    parts: micro-batches of the batch as it is.

  Raises:
    ValueError: there is no such cut.
  """
  b, g, t = unpacked
  if rows is None:
    return parts_lib.cuts(b, g, parts)
  n, r, w = rows.segments.shape
  on_device = parts_lib.on_each_device(n)
  tokens, whole = n * (prompt_length + r * w), b * (prompt_length + g * t)
  found = parts_lib.packed_parts(tokens, whole, on_device, parts)
  if found is None:
    raise ValueError(
      f"{n} packed subgroups cannot be cut into {parts} micro-batches, or "
      "fewer that are as small: make the packing for as many (see "
      "packing_layout.plan)"
    )
  return found, 1


def _take(x: Shaped[Array, "N n"], index: Int[Array, "N k m"]):
  """Entries of each row of x; what lies outside is that at its end."""
  flat = index.reshape(len(x), -1)
  return jnp.take_along_axis(x, flat, axis=1, mode="clip").reshape(index.shape)


def pack(values: Shaped[Array, "N G T"], rows: Rows) -> Shaped[Array, "N R W"]:
  """The samples' tokens as rows; on padding stands any of them."""
  b, g, t = values.shape
  index = rows.segments * t + rows.positions
  return _take(values.reshape(b, g * t), index)


def unpack(
  values: Shaped[Array, "N R W"], rows: Rows, length: int
) -> Shaped[Array, "N G T"]:
  """The inverse of `pack`; 0 on padding.

  Args:
    values: of tokens in rows.
    rows: see `Rows`.
    length: T.
  """
  b, r, w = values.shape
  place, t = rows.rows * w + rows.starts, jnp.arange(length)
  found = _take(values.reshape(b, r * w), place[..., None] + t)
  return jnp.where(t < rows.lengths[..., None], found, 0)


def completion_logprobs(
  lm: LM,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G T"],
  rows: Rows | None = None,
  load_weights: tuple[Array, Array] | None = None,
  **options: Any,
) -> tuple[Any, ...]:
  """`token_logprobs`, computed on packed rows where there are such.

  Args:
    lm: see `token_logprobs`; packed, its `extend` must know `segments`.
    params: its parameters.
    prompt_ids: right-padded prompts.
    prompt_mask: True on real prompt tokens.
    ids: completions.
    rows: of these completions, or None.
    load_weights: of prompts and completions, [B, P] and [B, G, T].
    **options: `sampling`, `chunk_size` and `entropy_gradient` of
      `token_logprobs`.

  Returns:
    What `token_logprobs` does, [B, G, T]; packed, 0 on padding.
  """
  score = logprobs_lib.token_logprobs
  prompts = prompt_ids, prompt_mask
  options |= {} if load_weights is None else {"load_weights": load_weights}
  if rows is None:
    return score(lm, params, *prompts, ids, **options)
  if load_weights is not None:
    of_prompts, of_tokens = load_weights
    of_tokens = jnp.where(rows.segments >= 0, pack(of_tokens, rows), 0.0)
    options["load_weights"] = of_prompts, of_tokens
  logprobs, entropy, *load = score(
    lm,
    params,
    *prompts,
    pack(ids, rows),
    positions=rows.positions,
    segments=rows.segments,
    samples=ids,
    **options,
  )
  each = (unpack(x, rows, ids.shape[-1]) for x in (logprobs, entropy))
  return *each, *load
