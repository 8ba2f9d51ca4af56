"""The reward `exact_answer`: compares the text after the last "####".

The stripped text must be one of the answer's spellings: a whole or decimal
number with or without thousands separators ("1080", "1,080"), any other answer
as it is. `exact_ids` computes the same reward on token ids.
"""

import re
from typing import Any

from grpojax.data.examples import MARK

_NUMBER = re.compile(r"([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)((?:\.[0-9]+)?)")


def spellings(answer: str | int | float) -> tuple[str, str]:
  """Returns an answer without and with separators: ("1080", "1,080").

  Other texts, also with separators in other places ("10,80"), come twice,
  stripped. A whole float is written as "5": a column with a gap is all floats.
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
  """Reads a completion's answer, in one spelling, to count votes; None without.

  Completions with the same answer are equally right by `exact_answer`.
  """
  _, mark, tail = completion.rpartition(MARK)
  return (spellings(tail)[0] or None) if mark else None


def exact_answer(
  prompt: str, completion: str, example: dict[str, Any]
) -> float:
  """1.0 if the text after the completion's last "####" is the answer, else 0.0.

  Any of the `spellings` of the example's "answer" is right; no text is wrong,
  even if the answer is empty.
  """
  tail = completion.rpartition(MARK)[2].strip() if MARK in completion else ""
  return float(tail != "" and tail in spellings(example["answer"]))
