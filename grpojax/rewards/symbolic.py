"""Equality of symbolic answers by Math-Verify: "x(x+1)" is "x^2+x".

Only Math-Verify's LaTeX grammar is used, because its parser of plain
expressions evaluates them as Python. Answers known to be misread by the grammar
count as unequal.
"""

import functools
import logging
import re
import signal

import math_verify
import sympy
from latex2sympy2_extended import latex2sympy, latex2sympy2

from grpojax.runtime.processes import user_calls

SECONDS = 3.0
"""CPU time limit of a comparison; answers that exceed it count as unequal."""

Expression = sympy.Basic | sympy.MatrixBase

_NORMAL = latex2sympy2.NormalizationConfig(nits=False, boxed="none")
_CASED = latex2sympy2.ConversionConfig(lowercase_symbols=False)
_LATEX = (
  (re.compile(r"\\[dtc]frac"), r"\\frac"),
  (re.compile(r"\\frac\s*([0-9a-z])\s*([0-9a-z])"), r"\\frac{\1}{\2}"),
  (re.compile(r"\\frac\s*([0-9a-z])\s*\{"), r"\\frac{\1}{"),
  (re.compile(r"\\frac\s*(\{[^{}]*\})\s*([0-9a-z])"), r"\\frac\1{\2}"),
  (re.compile(r"\\?(?<![A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
  (re.compile(r"\\sqrt\s*([0-9a-z])"), r"\\sqrt{\1}"),
  (re.compile(r"\^\s*\(([^()]*)\)"), r"^{\1}"),
)
_MISREAD = re.compile(  # parts misread or ignored by the grammar
  r"[-+*/^]\s*\Z|\\[lc]?dots|\.\.\.|[0-9)]\s*_|(?<!_)[0-9]\s+[0-9]|\?|\\frac\s*\{\s*d"
  r"|(?<![A-Za-z\\])[A-Za-z](?:[0-9]|\^\{?-1\}?\s*\()|\\(?:angle|triangle|gcd|lcm)\b"
)
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
_DETERMINANT = r"\begin{vmatrix}"
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_INDEX = re.compile(r"_\{?\s*i|\\(?:sum|prod)")
_WORD = re.compile(r"[A-Za-z]{4,}")
# Towers of powers and large factorials, which a time limit cannot interrupt.
_HUGE = re.compile(
  r"\^\W*[0-9]{4}|\^[{(\s]*[0-9.]+[\s)}]*[\^!]|[0-9]{4}\W*!|!\W*!"
)
_BRACKETS = ("()", "[]", "{}", "(]", "[)")

# Silences the warning that Math-Verify's own time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@functools.lru_cache(maxsize=4096)
def equal(answer: str, expected: str) -> bool:
  """Returns True if Math-Verify finds two answers equivalent."""
  for pattern, replacement in _LATEX:
    answer = pattern.sub(replacement, answer)
    expected = pattern.sub(replacement, expected)
  if not _comparable(answer, expected):
    return False
  verdicts = []
  compare = lambda: verdicts.append(_verify(answer, expected))
  ended = user_calls.in_time(SECONDS, compare, signal.ITIMER_VIRTUAL)
  return ended and any(verdicts)


def _comparable(answer: str, expected: str) -> bool:
  """Returns False if answers differ in form, or are known to be misread."""
  sides = answer, expected
  bare = [_COMMAND.sub(" ", text) for text in sides]
  if any(map(_MISREAD.search, sides)) or any(map(_HUGE.search, sides)):
    return False
  if any(map(_WORD.search, bare)):
    return False  # a word is not a product of its letters
  capitals = [set(re.findall(r"\\?[A-Z]", text)) for text in sides]
  kinds = [(t[:1] + t[-1:]).replace("\\", "{") for t in sides]
  brackets = [kind for kind in kinds if kind in _BRACKETS]
  sizes = {len(_SEPARATOR.findall(text)) for text in sides}
  return (
    capitals[0] == capitals[1]
    and len(set(brackets)) < 2
    and (len(sizes) < 2 or r"\pm" in answer + expected)
    and all(
      answer.count(mark) == expected.count(mark)
      for mark in ("=", "'", r"\prime", r"\\", _DETERMINANT)
    )
  )


def _verify(answer: str, expected: str) -> bool:
  candidate, reference = _parse(answer), _parse(expected)
  if candidate is None or reference is None:
    return False
  if isinstance(candidate, sympy.Eq) and isinstance(reference, sympy.Eq):
    return _same_equation(candidate, reference)
  return math_verify.verify(
    reference, candidate, numeric_precision=30, timeout_seconds=None
  )


def _same_equation(candidate: sympy.Eq, reference: sympy.Eq) -> bool:
  """Returns True for equations that differ only by a constant factor."""
  try:
    first, second = (x.lhs - x.rhs for x in (candidate, reference))
    factor = sympy.simplify(first / second)
  except Exception:  # SymPy raises errors of any type
    return False
  return bool(factor.is_number and factor.is_nonzero)


def _parse(text: str) -> Expression | None:
  """Parses LaTeX to an expression with exact numbers; None if it fails."""
  is_complex = _IMAGINARY.search(text) and not _INDEX.search(text)
  try:
    parsed = latex2sympy(
      text,
      is_real=None if is_complex else True,
      normalization_config=_NORMAL,
      conversion_config=_CASED,
    )
    exact = {x: sympy.Rational(str(x)) for x in parsed.atoms(sympy.Float)}
    if is_complex:
      exact[sympy.Symbol("i")] = sympy.I
    return parsed.xreplace(exact)
  except Exception:  # the grammar raises errors of any type
    return None


_parse("x")  # builds the grammar's tables now, before time is limited
