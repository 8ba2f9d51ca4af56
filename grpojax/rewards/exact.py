"""The reward `exact_answer`, which compares the text after the last "####".

The stripped text must be one of the answer's `spellings`. `exact_ids` computes
the same reward from token ids.
"""

import re
from typing import Any

from grpojax.data.examples import MARK

_NUMBER = re.compile(r"([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)((?:\.[0-9]+)?)")


def spellings(answer: str | int | float) -> tuple[str, str]:
  """Returns a number without and with thousands separators, ("1080", "1,080").

  Other texts, such as "10,80", are stripped and returned twice.
  """
  if isinstance(answer, float) and answer.is_integer():
    answer = int(answer)  # tables store integers as floats if some are missing
  answer = str(answer).strip()
  number = _NUMBER.fullmatch(answer)
  if not number:
    return answer, answer
  sign, digits, decimals = number.groups()
  digits = digits.replace(",", "")
  grouped = ",".join(re.findall("[0-9]{1,3}", digits[::-1]))[::-1]
  return sign + digits + decimals, sign + grouped + decimals


def given_answer(completion: str) -> str | None:
  """Returns a completion's answer in its first spelling, or None."""
  _, mark, tail = completion.rpartition(MARK)
  return (spellings(tail)[0] or None) if mark else None


def exact_answer(
  prompt: str, completion: str, example: dict[str, Any]
) -> float:
  """Returns 1.0 if the text after the last "####" is the answer, else 0.0.

  Both `spellings` of the example's "answer" are right; an empty text is always
  wrong.
  """
  tail = completion.rpartition(MARK)[2].strip() if MARK in completion else ""
  return float(tail != "" and tail in spellings(example["answer"]))
