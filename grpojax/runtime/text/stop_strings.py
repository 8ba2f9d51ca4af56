"""Automaton that finds stop strings in a sequence of token ids."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpojax.core.ends import StopTable
from grpojax.runtime.text import tokenization

MOST_BYTES = 2**28  # limit of an automaton during construction

# Bytes by the characters that represent them in byte-level BPE (GPT-2).
_PLAIN = [i for i in range(256) if chr(i).isprintable() and i != 32]
_OTHERS = [i for i in range(256) if i not in _PLAIN]
BYTES = {chr(i): i for i in _PLAIN}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def token_bytes(tokenizer: Any, count: int) -> list[bytes]:
  """Returns the bytes that each of `count` tokens appends to a text."""
  decode = functools.partial(tokenization.decode, tokenizer)
  # Some tokenizers omit the first token's space, so pairs are decoded.
  alone = ((i, decode([i])) for i in range(count))
  first, before = next(x for x in alone if x[1] and "\ufffd" not in x[1])
  pieces = tokenizer.convert_ids_to_tokens([*range(count)])
  texts = [decode([first, i]) for i in range(count)]

  def appended(piece, text):
    if "\ufffd" in text:  # the token ends inside a character
      if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(byte[1])
      if all(x in BYTES for x in piece):
        return bytes(BYTES[x] for x in piece)
    return text.removeprefix(before).encode()

  return [*map(appended, pieces, texts)]


def build(tokenizer: Any, strings: Sequence[str], count: int) -> StopTable:
  """Builds Aho and Corasick's (1975) automaton of stop strings for tokens.

  Its states are the strings' prefixes, in bytes; the bytes of a token lead to
  the next. ValueError if no tokens write a string or the table is too large.
  """
  # A string that contains another string is never completed first.
  ends = {x.encode() for x in strings}
  ends = [x for x in ends if not any(y in x for y in ends - {x})]
  length = sum(map(len, ends))
  size = max(length * count * 4, sum(len(x) ** 2 for x in ends))
  if size > MOST_BYTES:
    raise ValueError(
      f"have {length} bytes, which take {size / 2**20:.0f} MiB with {count} "
      f"tokens (limit: {MOST_BYTES >> 20} MiB): use fewer or shorter strings"
    )
  # States are the proper prefixes, the empty one first, then whole strings.
  begins = {x[:i] for x in ends for i in range(len(x))}
  begins = sorted(begins, key=lambda x: (len(x), x))
  numbers = {x: i for i, x in enumerate([*begins, *ends])}
  # For each state, the bytes that extend it and the longer states they give.
  children = [[] for _ in numbers]
  for text in [*begins[1:], *ends]:
    children[numbers[text[:-1]]].append((text[-1], numbers[text]))
  after = np.zeros((len(numbers), 256), np.int32)
  suffix = [0] * len(numbers)  # the longest other state that is a suffix
  # Shorter states come first, so the row of a state's suffix is complete. Bytes
  # that do not extend the state have the suffix's transitions.
  for state in range(len(begins)):
    after[state] = after[suffix[state]]
    for byte, child in children[state]:
      suffix[child] = int(after[state, byte])
      after[state, byte] = child
  # A completed string stays completed, whatever follows.
  after[len(begins) :] = np.arange(len(begins), len(numbers))[:, None]
  table = _token_table(after, token_bytes(tokenizer, count))
  # Tokens with equal columns form a class, which has a single column.
  groups = {}
  for token, column in enumerate(np.ascontiguousarray(table.T)):
    groups.setdefault(column.tobytes(), []).append(token)
  columns = table[:, [tokens[0] for tokens in groups.values()]]
  classes = np.zeros(count, np.int32)
  for number, tokens in enumerate(groups.values()):
    classes[tokens] = number
  # Find the states reachable by whole tokens: some occur only inside tokens.
  reached = set()
  new = {0}
  while new:
    reached |= new
    new = {*np.unique(columns[[*new]]).tolist()} - reached
  for end in ends:
    if numbers[end] not in reached and len(ends) == 1:
      raise ValueError(
        f"have {end.decode()!r}, which no tokens of the model write: remove it"
      )
    elif numbers[end] not in reached:
      # Raises, unless another string always ends earlier.
      build(tokenizer, [end.decode()], count)
  # All completed strings become one last state, which needs no row.
  columns = np.minimum(columns[: len(begins)], len(begins))
  small = lambda x: x.astype(np.min_scalar_type(x.max()))
  return StopTable(tuple(strings), small(classes), small(columns))


def _token_table(
  after: Int[np.ndarray, "S 256"], texts: Sequence[bytes]
) -> Int[np.ndarray, "S V"]:
  """Returns the next state for each state and token."""
  lengths = np.array([*map(len, texts)])
  starts = np.cumsum(lengths) - lengths
  flat = np.frombuffer(b"".join(texts), np.uint8)
  # From every state, follow the bytes of every token: byte i in step i.
  states = np.arange(len(after), dtype=np.int32)
  table = np.repeat(states[:, None], len(texts), 1)
  for i in range(max(lengths)):
    longer = np.flatnonzero(lengths > i)
    table[:, longer] = after[table[:, longer], flat[starts[longer] + i]]
  return table
