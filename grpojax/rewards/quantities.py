r"""One spelling for everything that means the same answer.

"1,234.50 dollars", "$1234.5$" and "2469/2" are one number; two answers are
equal where their canonical spellings are the same text. So equality is exact
(rational arithmetic, no rounding) and an equivalence: votes can be counted.

What counts as a number, alone in its text: a sign (also Unicode's), digits with
or without thousands separators, decimals, fractions (3/4, \frac{3}{4}, ¾),
mixed numbers (1 1/2, 1\frac{1}{2}), powers of ten (1.5e3, 1.5 \times 10^3), and
scales (5 million); after an equals sign (x = 5), among words (about 5 apples,
5 cm^2) and currency signs. Units do not count, and a percent sign is a unit:
50% is 50 and not 1/2, as in the references of GSM8K and MATH. Two numbers are
no number ("5 or 6", "10-15", "2:30"), neither are symbols ("5x", "2\pi", "x>5")
nor separators in odd places ("12,34", "1.234,5"). All these are compared as
text, without case, spaces and LaTeX's wrappers; lists (1/2, 3) item by item.
NaN is no answer.

Nothing is evaluated. No expression here repeats without a bound, texts of more
than `LONGEST` characters are no answers, and numbers have at most 60 digits
and exponents of two, so hostile text costs no more than other text.
"""

import functools
import re
from fractions import Fraction

LONGEST = 500
"""Longest answer that is read, in characters."""

_DIGITS = r"""(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,20} | [0-9]{1,60})
  (?:\.[0-9]{1,60})? | \.[0-9]{1,60})"""
NUMBER = re.compile(
  rf"""(?<![0-9A-Za-z_.,^])(?P<sign>(?<![)])[-+])?(?:[$£€¥₹]\s?(?P<inner>-)?)?
  (?:(?P<whole>[0-9]{{1,60}})\s{{1,3}}(?:and\s{{1,3}})?
      (?P<num>[0-9]{{1,60}})\s?/\s?(?P<den>[0-9]{{1,60}})
    | \(?(?P<top>-?{_DIGITS})\)?\s?/\s?\(?(?P<bottom>-?{_DIGITS})\)?
    | (?P<digits>{_DIGITS})
      (?:[eE](?P<exponent>[-+]?[0-9]{{1,2}})
        | \s?\*\s?10\^\(?(?P<power>[-+]?[0-9]{{1,2}})\)?)?
      (?:\s?(?P<scale>hundred|thousand|million|billion|trillion)\b)?
    )(?![0-9]|[.,/][0-9]|[eE][-+]?[0-9])""",
  re.VERBOSE,
)
"""Finds numbers in a text that is `clean`; `value` reads them."""
_POWER = re.compile(r"(?P<sign>[-+])?10\^(?P<power>[-+]?[0-9]{1,2})")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}
_SCALES["trillion"] = 12

_CHARACTERS = str.maketrans(
  {
    **dict.fromkeys("−‐‑‒–—﹣－", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2007\t\r\n~", " "),
    **dict.fromkeys("\u2009\u202f\u2008\u200a\u200b\u2060\ufeff`", ""),
    **{"⁄": "/", "×": "*", "·": "*", "⋅": "*", "√": "sqrt", "π": "pi "},
    **{"¼": " 1/4", "½": " 1/2", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3"},
    **{"⅕": " 1/5", "⅛": " 1/8", "²": "^2", "³": "^3", "°": " degrees"},
    **{"∞": "\\infty", "≤": "\\le ", "≥": "\\ge ", "≠": "\\neq "},
    **{"≈": "="},
  }
)
_ITEM = r"(?:\{([^{}]{1,200})\}|([0-9a-zA-Z]))"
_FRACTION = re.compile(rf"\\[dtc]?frac\s{{0,3}}{_ITEM}\s{{0,3}}{_ITEM}")
_SPACING = re.compile(
  r"\\(?:[,!;: ]|(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|fbox"
  r"|boxed|operatorname|displaystyle|left|right|quad|qquad|bf|rm)(?![A-Za-z]))"
)
_PARENTHESES = re.compile(r"\([^(),]{1,500}\)")
_SIGN = re.compile(r"^([-+])\s{1,9}")
_VARIABLE = re.compile(r"[A-Za-z](?![A-Za-z])")
_INVISIBLE = re.compile(r"[\s\\$]")
_SIMPLE = re.compile(r"[-+]?[0-9]{1,60}")
_WORD = re.compile(r"[^\s()/.,:;?'\"%$£€¥₹¢+*-]{1,20}")
_EXPONENT = re.compile(r"(?<=[A-Za-z])\^-?[0-9]")
_UNITS = frozenset("mgshLltJNWVAKCF")  # of one letter; others are variables
_OTHER = frozenset("or and not half pi sqrt to between than plus minus".split())
_NEGATIVE = re.compile(r"\b(?:negative|minus)\s(?=[0-9])")
_SEVERAL = re.compile(r",\s?\\?[A-Za-z]|;|\b(?:or|and)\b")


def clean(text: str) -> str:
  r"""Text without what only formats: LaTeX's wrappers, markup, odd spaces.

  \frac{3}{4} becomes 3/4 and 5\text{ cm} becomes 5 cm; other commands stay.
  """
  text = text.translate(_CHARACTERS)
  if "\\" in text or "{" in text:
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    text = _FRACTION.sub(_divide, text)
    text = _SPACING.sub(" ", text)
    text = text.replace("^{\\circ}", " degrees").replace("^\\circ", " degrees")
    text = text.replace("\\times", "*").replace("\\cdot", "*")
    text = text.replace("\\approx", "=").replace("\\div", "/")
    text = text.replace("\\geq", "\\ge").replace("\\leq", "\\le")
    for character in "$%#&_()[]{}":
      text = text.replace(f"\\{character}", character)
    text = text.replace("{", "").replace("}", "")
  return _NEGATIVE.sub("-", text).replace("**", "").strip()


def _divide(match: re.Match) -> str:
  parts = [match[1] or match[2], match[3] or match[4]]
  top, bottom = (
    part if part.isalnum() or NUMBER.fullmatch(part) else f"({part})"
    for part in map(str.strip, parts)
  )
  before = match.string[match.start() - 1 : match.start()]
  mixed = " " if before.isdigit() else ""
  return f"{mixed}{top}/{bottom}"


def value(match: re.Match) -> Fraction | None:
  """Reads a match of `NUMBER`; None for a division by zero."""
  groups = match.groupdict()
  if groups["whole"]:
    top, bottom = Fraction(groups["num"]), Fraction(groups["den"])
    whole = Fraction(groups["whole"])
  elif groups["top"]:
    top, bottom = map(_decimal, (groups["top"], groups["bottom"]))
    whole = Fraction(0)
  else:
    power = int(groups["exponent"] or groups["power"] or 0)
    power += _SCALES.get(groups["scale"], 0)
    top, bottom = _decimal(groups["digits"]) * Fraction(10) ** power, 1
    whole = Fraction(0)
  if not bottom:
    return None
  negative = ((groups["sign"] or "").startswith("-")) != bool(groups["inner"])
  return (whole + top / bottom) * (-1 if negative else 1)


def _decimal(digits: str) -> Fraction:
  return Fraction(digits.replace(",", ""))


def number(text: str) -> Fraction | None:
  """Reads an answer alone ("x = 1,234.50 dollars"); None if not one number."""
  text = text.strip()
  if _SIMPLE.fullmatch(text):
    return Fraction(text)
  if len(text) > LONGEST:
    return None
  text = clean(text).strip("*_'\" ").rstrip(".,;: ")
  if _PARENTHESES.fullmatch(text):
    text = text[1:-1].strip()
  if "=" in text:
    left, _, text = text.rpartition("=")
    text = text.strip()
    if left.endswith(("!", "<", ">")) or _SEVERAL.search(left):
      return None
  text = _SIGN.sub(r"\1", text)
  if power := _POWER.fullmatch(text):
    size = Fraction(10) ** int(power["power"])
    return -size if power["sign"] == "-" else size
  units = _EXPONENT.sub("", text)
  match = NUMBER.search(units)
  if not match:
    return None
  before, after = units[: match.start()], units[match.end() :]
  if before.endswith("-") or not _only_words(before) or not _only_words(after):
    return None
  # A letter that follows directly is a variable, or a unit of two and more.
  if _VARIABLE.match(after):
    return None
  return value(match)


def _only_words(text: str) -> bool:
  """True where there are only words and punctuation: no symbol, no digit."""
  if "*" in text or "+" in text:
    return False
  words = _WORD.findall(text)
  return all(
    word.isalpha()
    and word.lower() not in _OTHER
    and (len(word) > 1 or word in _UNITS or not word.isascii())
    for word in words
  )


@functools.lru_cache(maxsize=4096)
def canonical(text: str) -> str | None:
  """Returns the one spelling of all answers equal to this; None if none.

  A reduced fraction such as "2469/2" for a number, otherwise text.
  """
  text = text.strip()
  if len(text) > LONGEST:
    return None
  size = number(text)
  if size is not None:
    return str(size)
  text = clean(text).strip("*_'\" ").rstrip(".;: ")
  text = text.replace("\\infty", "infinity")
  pair, inside = text[:1] + text[-1:], text[1:-1]
  if pair in ("()", "[]", "(]", "[)") and 0 < inside.count(",") < 20:
    items = [canonical(item) or "" for item in inside.split(",")]
    return pair[0] + ",".join(items) + pair[1]
  left, equals, right = text.partition("=")
  if equals and len(left.strip()) <= 2 and "=" not in right:
    text = right  # y = 2x + 1
  text = _INVISIBLE.sub("", text).lower()
  if len(text) == 3 and pair == "()":
    text = text[1:-1]  # a choice: (B)
  return text if text and text != "nan" else None


def equal(first: str, second: str) -> bool:
  """True where two answers are the same number, or else the same text."""
  spelling = canonical(first)
  return spelling is not None and spelling == canonical(second)
