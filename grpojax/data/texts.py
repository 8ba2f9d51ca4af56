"""Texts for supervised fine-tuning, and their packing into training rows.

A text is a pair (context ids, learned ids); the loss counts the learned ids.

    texts   (ab, cde) (f, gh) (i, j)        rows of 8 tokens
    ids       a b c d e f g h | i j         segments  1 1 1 1 1 2 2 2 | 1 1
    weights   0 0 1 1 1 0 1 1 | 0 1         positions 0 1 2 3 4 0 1 2 | 0 1
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from grpojax.data import arithmetic

Text = tuple[list[int], list[int]]


def solution(example: dict[str, Any]) -> str:
  """Returns an example's "solution", else its "answer"."""
  for name in ("solution", "answer"):
    if name in example:
      return str(example[name])
  raise ValueError(
    f"an example without a solution or an answer: {str(example)[:80]}"
  )


def strings(examples: Iterable[dict[str, Any]]) -> Iterator[str]:
  """Yields all texts of examples, to train a tokenizer on."""
  for example in examples:
    prompt = example["prompt"]
    if isinstance(prompt, str):
      yield prompt
    else:
      yield from (message["content"] for message in prompt)
    yield solution(example)


def encode_examples(
  examples: Iterable[dict[str, Any]],
  encode_prompt: Callable[[Any], list[int]],
  encode: Callable[[str], list[int]],
  *,
  eos_id: int,
  longest: int,
  learn_prompts: bool = False,
) -> tuple[list[Text], int]:
  """Encodes prompts and solutions with an EOS; returns `(texts, dropped)`.

  With `learn_prompts` the loss counts the prompts too. Texts of more than
  `longest` tokens are dropped; ValueError if all are.
  """
  texts = []
  dropped = 0
  for example in examples:
    context = list(encode_prompt(example["prompt"]))
    learned = [*encode(solution(example)), eos_id]
    if len(context) + len(learned) > longest:
      dropped += 1
    elif learn_prompts:
      texts.append(([], [*context, *learned]))
    else:
      texts.append((context, learned))
  if not texts:
    raise ValueError(f"all {dropped} texts have more than {longest} tokens")
  return texts, dropped


def epochs(texts: Sequence[Text], seed: int) -> Iterator[Text]:
  """Yields the texts endlessly, shuffled in each epoch."""
  rng = np.random.default_rng(seed)
  while True:
    for i in rng.permutation(len(texts)):
      yield texts[i]


def arithmetic_texts(
  form: str,
  encode: Callable[[str], list[int]],
  *,
  eos_id: int,
  seed: int,
  **options: Any,
) -> Iterator[Text]:
  """Yields random arithmetic texts endlessly, each with an EOS.

  The loss counts a whole "document", but only the answer of a "dialogue".
  Options are those of `arithmetic.document`.
  """
  rng = np.random.default_rng(seed)
  while True:
    if form == "dialogue":
      prompt, text = arithmetic.dialogue(rng, **options)
    else:
      prompt = ""
      text = arithmetic.document(rng, **options)
    yield (encode(prompt) if prompt else []), [*encode(text), eos_id]


class Rows(NamedTuple):
  """Packed rows as read by `LM.extend`, with groups of a single row."""

  ids: Int[np.ndarray, "N S"]
  positions: Int[np.ndarray, "N S"]  # of tokens in their text
  segments: Int[np.ndarray, "N S"]  # number of the text, from 1; 0 is padding
  weights: Float[np.ndarray, "N S"]  # 1 for learned tokens, else 0


def pack(texts: Iterator[Text], rows: int, length: int) -> Iterator[Rows]:
  """Packs whole texts, in order, into batches of `rows` rows.

  Rows have `length` tokens. A last partial batch is dropped. ValueError for a
  longer text. Not by grain, whose packing depends on its number of open rows.
  """

  def empty():
    shape = (rows, length)
    return Rows(*(np.zeros(shape, np.int32) for _ in range(3)), np.zeros(shape))

  batch = empty()
  row = 0
  used = 0
  segment = 0
  for context, learned in texts:
    size = len(context) + len(learned)
    if size > length:
      raise ValueError(
        f"a text has {size} tokens, but a row {length}: use longer rows"
      )
    if used + size > length:
      row += 1
      used = 0
      segment = 0
      if row == rows:
        yield batch
        batch = empty()
        row = 0
    segment += 1
    span = slice(used, used + size)
    batch.ids[row, span] = [*context, *learned]
    batch.positions[row, span] = np.arange(size)
    batch.segments[row, span] = segment
    # The first token of a text cannot be predicted.
    batch.weights[row, used + max(len(context), 1) : used + size] = 1
    used += size
