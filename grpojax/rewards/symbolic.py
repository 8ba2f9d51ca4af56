r"""Right or wrong with symbols: "x(x+1)" is "x^2+x", the reward `math_verify`.

Needs Math-Verify: pip install 'grpojax[math]'. It simplifies expressions and
may take forever; use it with worker processes, whose time is limited.
"""

import logging
from typing import Any

import math_verify as library

from grpojax.rewards import math, quantities

_CONFIG = library.LatexExtractionConfig()

# It warns that its own time limits are off; those of the workers are on.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """1.0 if the completion's answer is equivalent to the reference, else 0.0.

  The answer is found as in `math.math_answer`, and is right if that says so;
  otherwise Math-Verify decides. Only its grammar of LaTeX is used, which builds
  expressions: its parser of plain expressions would have Python evaluate them.
  (SymPy evaluates numbers, tokens of digits and a point.)
  """
  if math.math_answer(prompt, completion, example):
    return 1.0
  answer = math.find_answer(completion)
  expected = math.reference_answer(example)
  if None in map(quantities.canonical, (answer or "", expected)):
    return 0.0
  if max(len(answer), len(expected)) > quantities.LONGEST:
    return 0.0
  if quantities.number(answer) is not None:
    if quantities.number(expected) is not None:
      return 0.0  # two different numbers
  return float(
    library.verify(_parse(expected), _parse(answer), timeout_seconds=None)
  )


def _parse(answer: str) -> list[Any]:
  return library.parse(
    f"\\boxed{{{answer}}}",
    extraction_config=[_CONFIG],
    fallback_mode="no_fallback",  # no text, which sympy might evaluate
    parsing_timeout=None,
  )


_parse("x")  # its tables are built now, not in the time of a completion
