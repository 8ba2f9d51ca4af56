"""Right or wrong by the text after the last "####": the reward `exact_answer`.

That text, without the whitespace around it, must be one of the answer's
spellings: for a whole or decimal number with or without thousands separators
("1080", "1,080"), for any other answer the answer itself. `exact_ids` is the
same reward on token ids. Nothing is evaluated: texts are compared.
"""

import re
from typing import Any

from grpojax.data.examples import MARK

_NUMBER = re.compile(r"([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)((?:\.[0-9]+)?)")


def spellings(answer: str | int | float) -> tuple[str, str]:
  """Returns the two texts that count as an answer: without and with separators.

  For "1080" as for "1,080": ("1080", "1,080"). For what is no number, or has
  its separators in other places ("10,80"): twice the answer, stripped. A whole
  float is written as people do, "5": a column with a gap makes floats of all.
  """
  if isinstance(answer, float) and answer.is_integer():
    answer = int(answer)
  answer = str(answer).strip()
  number = _NUMBER.fullmatch(answer)
  if not number:
    return answer, answer
  sign, digits, decimals = number.groups()
  digits = digits.replace(",", "")
  first = len(digits) % 3 or 3
  rest = [digits[i : i + 3] for i in range(first, len(digits), 3)]
  grouped = ",".join([digits[:first], *rest])
  return sign + digits + decimals, sign + grouped + decimals


def given_answer(completion: str) -> str | None:
  """Reads the answer that a completion gives, in one spelling: to count votes.

  Completions that give the same answer are equally right by `exact_answer`.
  None without "####" or text after it.
  """
  _, mark, tail = completion.rpartition(MARK)
  return (spellings(tail)[0] or None) if mark else None


def exact_answer(
  prompt: str, completion: str, example: dict[str, Any]
) -> float:
  """1.0 if the text after the completion's last "####" is the answer, else 0.0.

  The example's "answer" may have either of its `spellings`. No text is no
  answer, also where the data have an empty one.
  """
  tail = completion.rpartition(MARK)[2].strip() if MARK in completion else ""
  return float(tail != "" and tail in spellings(example["answer"]))
