"""What supervised fine-tuning reads: texts as pairs of ids.

A text is a pair (context ids, learned ids): the context is read only, the rest
is what the loss counts. `packing` puts texts into rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from grpojax.data import arithmetic

Text = tuple[list[int], list[int]]


def solution(example: dict[str, Any]) -> str:
  """The completion that an example teaches: its "solution", or its "answer".

  Raises:
    ValueError: it has neither.
  """
  for name in ("solution", "answer"):
    if name in example:
      return str(example[name])
  raise ValueError(
    f"an example without a solution or an answer: {str(example)[:80]}"
  )


def strings(examples: Iterable[dict[str, Any]]) -> Iterator[str]:
  """All that is written in examples, to train a tokenizer on."""
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
  """Examples as texts: the prompt, the solution and an EOS.

  Args:
    examples: dicts with a "prompt" and a "solution" (else an "answer").
    encode_prompt: a prompt, text or chat messages, to ids.
    encode: a text to ids.
    eos_id: ends every text.
    longest: texts of more tokens are left out.
    learn_prompts: whether the loss counts the prompts too.

  Returns:
    The texts, and how many were left out.

  Raises:
    ValueError: all are too long, or there are none.
  """
  texts, dropped = [], 0
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
    raise ValueError(
      f"no text to learn: {dropped} are of more than {longest} tokens"
      if dropped
      else "no text to learn: no examples"
    )
  return texts, dropped


def epochs(texts: Sequence[Text], seed: int) -> Iterator[Text]:
  """The texts without end, each epoch in an order of its own."""
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
  difficulty: tuple[int, int],
  hasty: float,
  forget: tuple[float, float] = (0.0, 0.0),
) -> Iterator[Text]:
  """Arithmetic texts without end, each drawn anew.

  Args:
    form: "document", learned whole, or "dialogue", of which only the answer is.
    encode: a text to ids.
    eos_id: ends every text.
    seed: of all draws.
    difficulty: see `arithmetic.sample`.
    hasty: see `arithmetic.document`.
    forget: likewise.
  """
  rng = np.random.default_rng(seed)
  options = {"difficulty": difficulty, "hasty": hasty, "forget": forget}
  while True:
    prompt, text = "", ""
    if form == "dialogue":
      prompt, text = arithmetic.dialogue(rng, **options)
    else:
      text = arithmetic.document(rng, most=3, **options)
    yield (encode(prompt) if prompt else []), [*encode(text), eos_id]
