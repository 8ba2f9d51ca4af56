"""One pass over a data set before a run: lengths of prompts, a fingerprint.

A run must not end in the middle because of one prompt, nor go on after a break
with other data: so all examples of a finite data set are read before it starts.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from grpojax.data.arithmetic import ENDLESS

FINGERPRINTED = 256
"""Number of examples in the fingerprint of an endless data set."""

_REPORT_EVERY = 10.0  # seconds between two lines about a long pass


class Survey(NamedTuple):
  """Result of a pass over the examples of a split.

  Attributes:
    fingerprint: SHA-256 of the examples' JSON, in their order.
    lengths: [n], tokens of each prompt, or of an endless data set's first ones.
  """

  fingerprint: str
  lengths: Int[np.ndarray, "n"]


def survey(
  examples: Any,
  encode: Callable[[Any], tuple[str, Sequence[int]]],
  *,
  most: int = ENDLESS,
  cached: Callable[[str], Int[np.ndarray, "n"] | None] = lambda _: None,
  check_signals: Callable[[], None] = lambda: None,
) -> Survey:
  """Reads all examples, or the first `most` of an endless data set.

  Args:
    examples: random access to dicts with a "prompt" (`data.examples`).
    encode: `(prompt) -> (text, ids)`.
    most: examples of an endless data set whose prompts are measured.
    cached: fingerprint -> lengths of a finite data set's prompts, or None where
      they are not known yet.
    check_signals: called for each example; may raise.

  Raises:
    ValueError: a prompt that cannot be encoded, or that has no token.
  """
  total = len(examples)
  endless = total >= ENDLESS
  digest = hashlib.sha256()
  read = min(total, FINGERPRINTED) if endless else total
  for i in _watched(read, "read", check_signals):
    text = json.dumps(examples[i], sort_keys=True, default=str)
    digest.update(text.encode() + b"\n")
  fingerprint = digest.hexdigest()
  lengths = None if endless else cached(fingerprint)
  if lengths is None:
    count = min(total, most) if endless else total
    lengths = np.empty(count, np.int32)
    for i in _watched(count, "measured", check_signals):
      lengths[i] = len(encode(examples[i]["prompt"])[1])
  empty = np.flatnonzero(lengths == 0)
  if len(empty):
    prompt = examples[int(empty[0])]["prompt"]
    raise ValueError(f"example {empty[0]}: a prompt without tokens: {prompt!r}")
  return Survey(fingerprint, lengths)


def _watched(
  count: int, verb: str, check_signals: Callable[[], None]
) -> Iterator[int]:
  """Yields 0, 1, ..., and prints from time to time how far it is."""
  last = time.monotonic()
  for i in range(count):
    check_signals()
    if time.monotonic() - last > _REPORT_EVERY:
      last = time.monotonic()
      print(f"{verb} {i} of {count} prompts", flush=True)
    yield i


def refuse(
  lengths: Int[np.ndarray, "n"], max_prompt_length: int, endless: bool
) -> Int[np.ndarray, "k"] | None:
  """Keeps all examples, and refuses a data set with a prompt that is too long.

  Raises:
    ValueError: there is one; with their number and the longest.
  """
  del endless
  longer = int(np.sum(lengths > max_prompt_length))
  if longer:
    longest = int(np.argmax(lengths))
    raise ValueError(
      f"{longer} of {len(lengths)} prompts have more than "
      f"--config.data.max_prompt_length = {max_prompt_length} tokens (example "
      f"{longest} has {lengths[longest]}), and prompts are never cut: raise "
      "it, or set data.too_long = 'drop'"
    )
  return None


def drop(
  lengths: Int[np.ndarray, "n"], max_prompt_length: int, endless: bool
) -> Int[np.ndarray, "k"] | None:
  """Returns the indices of the examples whose prompts are not too long.

  Raises:
    ValueError: an endless data set, which no pass can end; or none is left.
  """
  if endless:
    raise ValueError(
      "data.too_long = 'drop' reads all examples before a run, but this data "
      "set is endless: use 'refuse'"
    )
  short = np.flatnonzero(lengths <= max_prompt_length)
  if len(lengths) and not len(short):
    raise ValueError(
      f"all {len(lengths)} prompts are longer than "
      f"--config.data.max_prompt_length = {max_prompt_length} tokens: raise it"
    )
  return short


TOO_LONG = {"refuse": refuse, "drop": drop}
"""Treatments of prompts that are too long, before a run: (lengths,
max_prompt_length, True for an endless data set) -> indices of the examples to
use, None for all; ValueError where the run cannot start."""
