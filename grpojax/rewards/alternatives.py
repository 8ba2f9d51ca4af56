r"""Answers that leave a choice: "5 or 2", "\boxed{5} or \boxed{2}".

Who names several numbers gives none of them, so that guessing is not rewarded.
One number in two spellings is no choice ("0.5 or 1/2"), neither are two units
("5 hours or 300 minutes"), nor "5 or more".

No expression here repeats without a bound, so the time is linear.
"""

import re

from grpojax.rewards import quantities

# From one number to the next: the unit of the first, and "or".
_BETWEEN = re.compile(
  r"""(?P<unit>%?(?:\s?[A-Za-z]{1,20}){0,3}?)[\s,;.(*$]{0,4}
  \b(?:or|vs\.?|versus|possibly|maybe|perhaps|alternatively)\b
  (?:,?\s(?:maybe|possibly|perhaps|even|else|alternatively),?)?
  [\s*_(]{1,6}(?P<sign>[$£€]?)[\s*_$(]{0,6}(?:[A-Za-z]\s?=\s?)?""",
  re.VERBOSE | re.IGNORECASE,
)
_SIGNS = "$£€"
_UNIT = re.compile(r"%|\s?(?:[A-Za-z]{1,20})?")
_GOES_ON = re.compile(
  r"\s?(?:(?:of|times|squared|cubed|more|less|fewer)\b|[-+*/^(]\s?[0-9A-Za-z])"
)
_MORE = re.compile(r"\$?,\s[\s*_$(]{0,6}")  # 5, 6 or 7
_END = re.compile(r"[.!?](?=\s|\Z)|\n|<")
_EARLIER = re.compile(
  r"""(?:boxed\s?\{|\#\#\#\#|answers?>|answers?[^\n.]{0,12}?(?:\bis\b|:))
  [\s*_$\\(]{0,6}(?P<other>[^\n<]{1,60}?)(?:</answer>)?[\s$}\\)*.,]{0,6}
  \b(?:or|vs\.?|versus)\b[\s$\\(\[*:,]{0,6}
  (?:(?:maybe|possibly|the|my|final|correct|even)\s|<){0,3}\Z""",
  re.VERBOSE | re.IGNORECASE,
)


def stated(text: str, number: re.Pattern) -> str | None:
  """Returns the choice that the sentence at a text's beginning gives, if any.

  `number` finds a number in a text that is `quantities.clean`.
  """
  text = quantities.clean(text)
  if end := _END.search(text):
    text = text[: end.start()]
  first = last = number.search(text)
  while last and (comma := _MORE.match(text, last.end())):
    if not (further := number.match(text, comma.end())):
      break
    last = further
  second = last and after(text, last, number)
  return text[first.start() : second.end()] if second else None


def earlier(text: str, place: int, answer: str) -> str | None:
  """Returns the choice of an answer at a place and one that came before it."""
  match = _EARLIER.search(text, max(place - 120, 0), place)
  if not match or quantities.equal(match["other"], answer):
    return None
  return f"{match['other']} or {answer}"


def after(text: str, first: re.Match, number: re.Pattern) -> re.Match | None:
  """Returns the other number of a choice, if one begins with this number."""
  between = _BETWEEN.match(text, first.end())
  second = between and number.match(text, between.end())
  if not second or _GOES_ON.match(text, second.end()):  # 5, or 1/2 of 10
    return None
  rest = _UNIT.match(text, second.end())
  units = (
    _unit(first[0][0], between["unit"], text[first.end()]),
    _unit(between["sign"], rest[0], text[second.end() :][:1]),
  )
  converted = units[0] != units[1] and (all(units) or "%" in units)
  same = converted or quantities.equal(first[0], second[0])
  return None if same else second


def _unit(sign: str, word: str, closing: str) -> str:
  """Unit of a number: "$" of "$5" and "5 dollars", none of LaTeX's "$5$"."""
  if word.strip().lower() in ("dollar", "dollars"):
    return "$"
  return word.strip() or (sign if sign in _SIGNS and closing != "$" else "")
