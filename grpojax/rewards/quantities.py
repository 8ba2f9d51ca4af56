r"""Canonical spellings of numbers, choices and words in answers.

Equal numbers have the same spelling ("1,234.50 dollars", `\$1234.5` and
"2469/2" become "2469/2"), and so do equal choices ("(B)" and "B) Paris" become
"B"). Other answers keep their text without the markup around it.

A number may have a sign, a currency, thousands separators, decimals, a power of
ten (1.5e3, 1.5 \times 10^3) or a scale (5 million); be a fraction (3/4,
\frac{3}{4}, ¾) or a mixed number (1 1/2, 1\frac{1}{2}); and have a unit: words
of `_UNITS`, or a plural noun ("5 red apples"). Units are ignored, and a percent
sign is a unit: 50% is 50 and not 1/2, as in the answers of GSM8K and MATH. A
letter is a unit only inside \text{}.

The time is bounded: numbers have at most 60 digits and two-digit exponents,
answers at most `LONGEST` characters. Text is never evaluated.
"""

import functools
import re
from collections.abc import Collection
from fractions import Fraction

LONGEST = 500  # maximum length of an answer, in characters

_DIGITS = r"""(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,20}|[0-9]{1,60})
  (?:\.[0-9]{1,60})?|\.[0-9]{1,60})"""
NUMBER = re.compile(
  rf"""(?P<sign>[-+]\s?|(?:negative|minus)\s)?(?:[$£€¥₹]\s?(?P<inner>-)?)?
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
"""A number in a text without LaTeX commands; `_value` reads a match."""
_SCALES = dict(hundred=2, thousand=3, million=6, billion=9, trillion=12)
_ABOUT = re.compile(
  r"(?:(?:about|approximately|exactly|only|just|around|~|\\approx)\s{0,3})"
)

_CHARACTERS = str.maketrans(
  {
    **dict.fromkeys("−‐‑‒–—﹣－", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2007\t\r\n~", " "),
    **dict.fromkeys("\u2009\u202f\u2008\u200a\u200b\u2060\ufeff`", ""),
    **{"⁄": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot "},
    **{"√": r"\sqrt", "π": r"\pi ", "²": "^2", "³": "^3", "°": r"^\circ "},
    **{"¼": " 1/4", "½": " 1/2", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3"},
    **{"⅕": " 1/5", "⅛": " 1/8", "∞": r"\infty ", "≠": r"\ne "},
    **{"≤": r"\le ", "≥": r"\ge ", "≈": r"\approx ", "±": r"\pm "},
    **{"∪": r"\cup ", "∈": r"\in "},
  }
)
_SIZE = re.compile(r"\\(?:left|right|displaystyle|[!])(?![A-Za-z])")
_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\,|\\,)(?=[0-9]{3})")
_AROUND = re.compile(
  r"\\(?:(?:text|math)(?:bf|it|rm|normal|tt|sf)?|underline|emph|mbox|boxed|fbox"
  r"|textcolor\{[^{}]{1,30}\}|color\{[^{}]{1,30}\}|operatorname)\s{0,3}(?=\{)"
)
_TEXT = re.compile(
  r"\\(?:text|math)(?:bf|it|rm|normal)?\{([^{}]{0,200})\}|\\mbox\{([^{}]*)\}"
)
_SCALE_IN_TEXT = re.compile(
  r"\\(?:text|mathrm|mbox)\{\s?((?:hundred|thousand|million|billion|trillion)\b[^{}]*)\}"
)
_FRACTION = re.compile(
  r"\\[dtc]?frac\s{0,3}(?:\{\s?(-?[0-9]{1,60})\s?\}|([0-9]))"
  r"\s{0,3}(?:\{\s?(-?[0-9]{1,60})\s?\}|([0-9]))(?![0-9.])"
)
_POWER = re.compile(
  r"(?<=[0-9])\s{0,3}(?:\\times|\\cdot|\*|x(?=\s?10\s?\^))\s{0,3}10\s?\^\s?"
  r"(?:\{\s?([-+]?[0-9]{1,2})\s?\}|([-+]?[0-9]{1,2}))(?![0-9])"
)
_DEGREES = re.compile(r"\s?\^\s?(?:\\circ|\{\s?\\circ\s?\})(?![A-Za-z])")
_ESCAPED = re.compile(r"\\([$%#&_])")
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|\s+")
_AROUND_SIGN = re.compile(r"\s*([=+*/^(){}\[\]<>|-])\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_CHOICE = re.compile(
  r"""(?:(?:[Oo]ption|[Cc]hoice)\s{1,3})?
  (?: \(([A-J])\)(?:\s.*)? | \[([A-J])\](?:\s.*)?
    | ([A-J])(?:[).:](?:\s.*)?)?)""",
  re.VERBOSE | re.DOTALL,
)
_FURTHER = re.compile(r"(?:\b[A-J]|[(\[][A-J])(?:[).:\]]|\s*\Z)|\bor\b")
_WORD = re.compile(r"[\s/*-]+")
_AFTER = re.compile(  # a possible unit at the end of an expression
  r"""[\s~]{0,3}(?:\\[,;:\ ]){0,4}
  (?:(?:\\(?:text|mathrm|textrm|mbox)\{(?P<text>[^{}]{1,60})\}
  |\s(?P<words>[a-z]{2,20}(?:[\s/][a-z]{2,20}){0,4}))\.?(?:\^\{?[23]\}?)?)\Z""",
  re.VERBOSE,
)
_UNITS = frozenset(
  """% percent percentage dollar cent usd euro pound pence rupee yuan yen rs mm
  cm dm km nm ms kg mg lb lbs oz ml ft in inch foot feet yd yard mi mile meter
  metre centimeter centimetre millimeter millimetre kilometer kilometre gram
  kilogram ounce ton tonne liter litre milliliter gallon quart pint cup mph kph
  hz hr hrs min mins sec secs second minute hour day week month year decade
  century am pm degree degrees celsius fahrenheit radian sq square cubic unit
  units acre joule newton watt volt mole people person child children men man
  women woman student piece item page point time way coin ball card apple book
  game tree fish sheep mice teeth of per a an the each every in left total more
  altogether""".split()
)
_LETTERS = frozenset("mshglLJNWVAKCFdtc")  # units only inside \text{}
_OPERATORS = frozenset(
  """and or not to than less plus minus times over divided by mod root roots
  squared squares cubed cubes factorial pi half halves third quarter quarters
  dozen dozens tens hundreds thousands millions billions pair pairs scores is
  was has does raised power logs sine sines cosine cosines neither nor between
  negative twice thrice double triple without as lakhs crores grosses myriads
  googols factorials reciprocals inverses negatives opposites twos threes fours
  fives sixes sevens eights nines""".split()
)
_PLURAL = re.compile(r"[a-z]{2,18}[a-rt-z]s")
_ORDINAL = re.compile(r"(?:[a-z]*(?:th|rd|lf|eleven|first|second))s?")
_NAME = re.compile(r"[A-Za-z]{3,20}")


def closing(text: str) -> int:
  """Returns the index of the brace that closes text[0]; 0 if it is missing."""
  depth = 0
  for match in _BRACES.finditer(text):
    depth += {"{": 1, "}": -1}.get(match[0], 0)
    if not depth:
      return match.start()
  return 0


def unwrap(text: str) -> str:
  r"""Removes markup around an answer: $, **, \text{}, \underline{}."""
  text = _COMMA.sub(",", _SIZE.sub("", text.translate(_CHARACTERS)))
  before = None
  # Markup may be nested, so layers are removed until none is left.
  while before != text:
    before = text
    text = text.strip()
    marked = text[:1] in ("*", "_") or text.endswith(("**", "_"))
    text = (text.strip("*_ ") if marked else text).rstrip(".,;: ")
    if text[:1] == text[-1:] and text[:1] in ("'", '"'):
      text = text[1:-1]
    for opens, closes in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
      if text.startswith(opens) and text.endswith(closes) and len(text) > 2:
        inside = text[len(opens) : -len(closes)]
        # The first and last $ of "$1$ or $2$" belong to different formulas.
        text = text if opens in inside else inside
    around = _AROUND.match(text)
    if around and closing(text[around.end() :]) == len(text) - around.end() - 1:
      text = text[around.end() + 1 : -1]
  return text


def _without_unit(text: str) -> str:
  r"""Removes units at the end of an expression, also nouns in \text{}."""
  while (after := _AFTER.search(text, max(len(text) - 120, 0))) and (
    _is_unit(after["text"], _LETTERS | _UNITS)
    if after["text"]
    else all(word in _UNITS for word in _WORD.split(after["words"]))
  ):
    before = text[: after.start()]
    if not re.search(r"[0-9\\]", before):
      break
    text = before
  return text


def _is_unit(text: str, known: Collection[str] = _UNITS) -> bool:
  """Returns True if all words are known units or plural nouns."""
  words = [re.sub(r"\^?\{?[23]\}?$", "", w) for w in _WORD.split(text) if w]
  if len(words) > 6 or text and not words:
    return False
  for i, word in enumerate(words):
    last = i + 1 == len(words) or words[i + 1] in _UNITS
    # Short names of units keep their case: "m" is not "M".
    is_known = word in known or word.lower() in _UNITS and len(word) > 2
    other = word.lower() in _OPERATORS or _ORDINAL.fullmatch(word)
    plural = _PLURAL.fullmatch(word.lower()) and len(word) > 3
    adjective = not last and i < 2 and _NAME.fullmatch(word)
    if not is_known and (other or not (plural or adjective)):
      return False
  return True


def _divide(match: re.Match) -> str:
  """Writes a match of `_FRACTION` as "3/4"."""
  top, bottom = match[1] or match[2], match[3] or match[4]
  before = match.string[: match.start()].rstrip()[-1:]
  return f"{' ' if before.isdigit() else ''}{top}/{bottom}"


def figures(text: str) -> str:
  r"""Replaces LaTeX commands in numbers: \frac{3}{4} becomes 3/4."""
  text = _DEGREES.sub(" degrees ", text)
  text = _POWER.sub(lambda m: f"*10^{m[1] or m[2]}", text)
  text = _FRACTION.sub(_divide, text)
  text = _ESCAPED.sub(r"\1", _SCALE_IN_TEXT.sub(r" \1", text))
  return _SPACES.sub(" ", text)


def number(text: str) -> Fraction | None:
  """Returns the value of "1,234.50 dollars"; None if it is not a number."""
  if len(text) > LONGEST:
    return None
  text = figures(text).strip(" $")
  if text[:1] + text[-1:] == "()" and "," not in text:
    text = text[1:-1]
  if about := _ABOUT.match(text):
    text = text[about.end() :]
  match = NUMBER.match(text)
  # 10^3 is read as 1 * 10^3, which `NUMBER` matches.
  if match and match["digits"] == "10" and text[match.end() :][:1] == "^":
    match = NUMBER.match(f"1*{text}")
    text = f"1*{text}"
  if not match:
    return None
  unit = text[match.end() :]
  adjacent = unit[:1].isalpha() or unit[:1] == "\\"
  if adjacent and len(unit.split()[0]) < 2 or not _is_unit(unit.strip()):
    return None
  return _value(match)


def _value(match: re.Match) -> Fraction | None:
  """Returns the value of a match of `NUMBER`; None for a division by zero."""
  groups = match.groupdict()
  whole = Fraction(groups["whole"] or 0)
  if groups["digits"]:
    power = int(groups["exponent"] or groups["power"] or 0)
    power += _SCALES.get(groups["scale"], 0)
    top = _decimal(groups["digits"]) * Fraction(10) ** power
    bottom = 1
  else:
    top = _decimal(groups["num"] or groups["top"])
    bottom = _decimal(groups["den"] or groups["bottom"])
  if not bottom:
    return None
  # Signs before and after a currency cancel out: -$-5.
  negative = (groups["sign"] or "+")[0] != "+"
  sign = -1 if negative != bool(groups["inner"]) else 1
  return sign * (whole + top / bottom)


def _decimal(digits: str) -> Fraction:
  return Fraction(digits.replace(",", ""))


@functools.lru_cache(maxsize=4096)
def spelling(text: str) -> str | None:
  """Returns the canonical spelling of an answer.

  It is "2469/2" for a number, a letter for a choice, and otherwise the text;
  None if the answer is empty, NaN or too long.
  """
  if len(text) > LONGEST:
    return None
  text = _without_unit(unwrap(text))
  size = number(text)
  if size is not None:
    return str(size)
  text = _SPACES.sub(" ", _TEXT.sub(r" \1\2 ", text)).strip()
  choice = _CHOICE.fullmatch(text)
  if choice and not _FURTHER.search(text, choice.end(choice.lastindex) + 1):
    return choice[choice.lastindex]
  return None if text.lower() in ("", "nan") else _AROUND_SIGN.sub(r"\1", text)
