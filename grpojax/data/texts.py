"""Texts for supervised fine-tuning, and their packing into training rows.

A text is a pair (context ids, learned ids); only learned ids are in the loss.

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
  """Returns an example's "solution" or, if it has none, its "answer"."""
  for name in ("solution", "answer"):
    if name in example:
      return str(example[name])
  raise ValueError(f"an example has no solution or answer: {str(example)[:80]}")


def strings(examples: Iterable[dict[str, Any]]) -> Iterator[str]:
  """Yields the prompts and solutions of examples, to train a tokenizer on."""
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
  """Encodes prompts and solutions, which end in an EOS.

  Returns the texts, and the number of texts dropped because they have more than
  `longest` tokens; ValueError if all have. `learn_prompts`: learn prompts too.
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
    wrong = f"all {dropped} texts have more than {longest} tokens"
    raise ValueError(f"{wrong}: use longer rows")
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

  `form` is "document", learned whole, or "dialogue", of which only the answer
  is learned. Options are those of `arithmetic.document`.
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
  """Packed rows: N rows of S tokens, inputs of `LM.extend` with G = 1."""

  ids: Int[np.ndarray, "N S"]
  positions: Int[np.ndarray, "N S"]  # position of each token in its text
  segments: Int[np.ndarray, "N S"]  # number of its text, from 1; 0 is padding
  weights: Float[np.ndarray, "N S"]  # 1 for learned tokens, else 0


def pack(texts: Iterator[Text], rows: int, length: int) -> Iterator[Rows]:
  """Packs whole texts, in order, into batches of `rows` rows.

  Rows have `length` tokens; ValueError for a longer text. A last partial batch
  is dropped. (grain's packing depends on its number of open rows.)
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
        f"a text has {size} tokens, but rows have {length}: use longer rows"
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
