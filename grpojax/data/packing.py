"""Texts packed into training rows, kept apart by segment ids.

Whole texts in their order, so that the same texts make the same rows for ever
(the embedded models can be made again). Grain's packing puts each text where it
fits first, which depends on how many rows it has open.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Rows(NamedTuple):
  """Packed rows, as `LM.extend` reads them (one group of one row a prompt).

  Attributes:
    ids: tokens.
    positions: of each token within its own text.
    segments: which text of the row a token belongs to, from 1; 0 is padding.
    weights: 1 where the token is learned, 0 where it is only read.
  """

  ids: Int[np.ndarray, "N S"]
  positions: Int[np.ndarray, "N S"]
  segments: Int[np.ndarray, "N S"]
  weights: Float[np.ndarray, "N S"]


def pack(
  texts: Iterator[tuple[list[int], list[int]]], rows: int, length: int
) -> Iterator[Rows]:
  """Fills rows with whole texts, in order.

  Args:
    texts: pairs (context ids, learned ids); a text is the two together.
    rows: N, rows a batch.
    length: S, tokens a row.

  Yields:
    `Rows`, for as long as there are texts; a last partial batch is dropped.

  Raises:
    ValueError: a text longer than a row.
  """

  def empty():
    shape = (rows, length)
    return Rows(*(np.zeros(shape, np.int32) for _ in range(3)), np.zeros(shape))

  batch, row, used, segment = empty(), 0, 0, 0
  for context, learned in texts:
    size = len(context) + len(learned)
    if size > length:
      raise ValueError(
        f"a text of {size} tokens is longer than a row: {length}"
      )
    if used + size > length:
      row, used, segment = row + 1, 0, 0
      if row == rows:
        yield batch
        batch, row = empty(), 0
    segment += 1
    span = slice(used, used + size)
    batch.ids[row, span] = [*context, *learned]
    batch.positions[row, span] = np.arange(size)
    batch.segments[row, span] = segment
    # The first token of all has nothing before it to be predicted from.
    batch.weights[row, used + max(len(context), 1) : used + size] = 1
    used += size
