r"""The reward `math_answer`, which compares the final answer of a solution.

Thinking is ignored, and so is text outside <answer> and </answer> if these tags
exist. The answer is the first of these that exists:

1. the last \boxed{...} or \fbox{...} that is closed and not empty;
2. the line after the last "####";
3. the last statement of an answer ("the answer is 5", "Answer: 5", "A: 5" at
   the start of a line), up to the end of its formula, code block or clause;
4. all of the text between <answer> and </answer>;
5. the last number outside of formulas and expressions.

The whole answer counts: "5 or 6" is neither 5 nor 6. Numbers are compared by
exact value and choices by letter (`quantities`), other answers as text and then
by Math-Verify (`symbolic`), which a `Pool` runs in a process with a time limit.

Text is never evaluated. Time is bounded: searches read at most the last
`WINDOW` characters, and try a fixed number of positions.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from grpojax.data.examples import MARK
from grpojax.rewards import quantities
from grpojax.rewards.quantities import LONGEST, NUMBER, spelling

WINDOW = 2**16
"""Number of characters read from the end of a completion."""

THINKING = (
  *("<think>...</think>", "<thinking>...</thinking>"),
  *("<thought>...</thought>", "<reasoning>...</reasoning>"),
  *("<scratchpad>...</scratchpad>", "[THINK]...[/THINK]"),
  *("◁think▷...◁/think▷", "<|begin_of_thought|>...<|end_of_thought|>"),
)
"""Pairs of tags around a model's thinking."""

_ATTEMPTS = 16  # positions that a search tries, from the end
_BARE = re.compile(r"[^\s$]{0,50}")
# Text from the brace that closes a box to the next box of the same answer.
_JOINED = re.compile(
  r"\}(?:[\s$.)*\]\\]{0,6}(?:[,;/|]|,?\s?(?:or|and|maybe))[\s$(*\[\\]{0,6}"
  r"|[ $]{0,4})"
)
# From "answer" to the verb or sign before its value, without negations.
_STATEMENT = re.compile(
  r"""answers?\b
  (?: (?:[*_"\s]|\s\([^()\n0-9]{1,40}\)){0,4}[:=>]
    | [^\n.:=0-9?<>]{0,40}?
      \b(?:is|are|be|equals|was)\b
      (?!\s{1,3}(?:not|that|correct|wrong|incorrect)\b|n't|'):?
    | [*_\#\s]{0,8}\n
    | (?=\s[-$\\(]{0,3}[0-9]))""",
  re.VERBOSE | re.IGNORECASE,
)
_A = re.compile(r"(?:^|\n)[ \t*_#>]{0,8}A[*_]{0,2}:")
# Signs and at most one line break between a statement and its value.
_LEAD = re.compile(
  r"[ \t:=*_\"'>]{0,40}(?:\s{0,9}\n[ \t>]{0,9}(?:[-+*•]\s{1,4})?)?"
  r"[\s:=*_\"'>]{0,40}"
)
_FORMULA = re.compile(
  r"""\$\$(.{1,400}?)\$\$ | \\\[(.{1,400}?)\\\] | \\\((.{1,300}?)\\\)
  | (?<!\\)\$((?:[^$\n\\]|\\.){1,300}?)\$(?![0-9])
  | ```[a-z]{0,12}\n(.{1,400}?)\n?```""",
  re.VERBOSE | re.DOTALL,
)
_ALSO = re.compile(r"\s{0,3}(?:,\s?)?(?:(?:or|and)\s{1,3})?(?=\$|\\\(|[0-9])")
_GOES_ON = re.compile(  # after a formula that is only part of an answer
  r"""\s{0,3}[-+*/^<>=|;]\s?(?=[$\\0-9])
  | \s(?:times|plus|minus|over|to|divided\sby)\s(?=[$\\0-9])
  | \s(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed)\b
  | th\s(?:root|power)\b | (?=\\\()
  | (?:,?\s\(?)(?:or|maybe|possibly|perhaps|alternatively)\s(?=[$\\0-9])""",
  re.VERBOSE,
)
_DELIMITERS = re.compile(r"(?:(?<!\\)\$|\\[()]|\s)+")
_END = re.compile(
  r"[.;?](?=\s|$)(?!\sor\b)|!(?=\s|$)(?!\s?[-+*/=])"  # not in 5! = 120
  r"|\n|<|\s\((?!or\b)|,\s(?=[a-z]{2})(?!(?:and|or|possibly|maybe)\b)"
  r"|,?\s(?:and\snot|because|since|which|that|when|if|as|so|not|but|at|for"
  r"|from|after|with|rather|instead|of\s(?:the|his|her|their|all)\b(?!.*[0-9]))\b"
)
_FIGURE = re.compile(  # a time, ratio, date or number
  rf"""[0-9]{{1,9}}(?:(?::|-|/[0-9]{{1,9}}/)[0-9]{{1,9}}){{1,5}}(?![0-9])
  | (?![-+]\s)(?!(?<=[0-9)}}]\s)[-+])(?:{NUMBER.pattern})""",
  re.VERBOSE,
)
_SPACE = r"[\s$]{0,3}"
_PART_BEFORE = re.compile(  # precedes a number inside an expression or list
  rf"""(?:[0-9A-Za-z_^{{[|!.\\] | [0-9A-Za-z}}]\( | [0-9A-Za-z][:,/-]
  | (?:[+*/^±|]|[^\s]\s?-|(?<![-=|])[<>]|[0-9$],
    |\b(?:or|to|minus|plus|times|root|sqrt|log|ln|sin|cos)
    |\b(?:root|half|third|quarter|percent|%|square|cube|power|log
      |logarithm)\ of
    |\\(?!approx|to\b|quad|implies|therefore|[Rr]ightarrow)[A-Za-z]+){_SPACE})\Z
  """,
  re.VERBOSE,
)
_PART_AFTER = re.compile(
  rf"""(?!(?:st|nd|rd|th|[ck]?m|k?g)\b)[A-Za-z] | [_^{{(!|\\] | :[0-9]
  | ,\s?[0-9]
  | {_SPACE}(?: [-+*/^<>]\s?[0-9A-Za-z\\(] | %\s?[A-Za-z](?![A-Za-z])
    | (?![aAI]\s)[A-Za-z](?![A-Za-z]) | \\(?!text|mathrm|quad|\W)
    | (?:squared|cubed|factorial|times|plus|minus|divided|over|or|to|and\ a
      |pi)\b)
  """,
  re.VERBOSE,
)
_NAMED = re.compile(
  r"(?:^|(?<=[,;]\s)|(?<=[,;])|(?<=\bor\s)|(?<=\band\s))"
  r"\s?(\\?[A-Za-z]{1,12}(?:_\{?\w{1,8}\}?)?'?(?:\(\s?[A-Za-z0-9]\s?\))?)"
  r"\s?(?:=|\\approx)(?!=)\s?"
)
_EXACT = re.compile(r"-?[0-9]+(?:/[0-9]+)?")
_WORDS = re.compile(r"(?:[A-Za-z]{3,}|[Nn]o)(?:[\s-][A-Za-z]+){0,8}")


def find_answer(text: str) -> str | None:
  """Returns the answer in the text of a solution; None if there is none."""
  text = text[-WINDOW:]
  _, tagged, inside = text.rpartition("<answer>")
  if tagged:
    text = inside.partition("</answer>")[0]
  if answer := _boxed(text):
    return answer
  _, mark, tail = text.rpartition(MARK)
  line = tail.lstrip()[: LONGEST + 1].partition("\n")[0].strip()
  if mark and (answer := _stated(line) or line):
    return answer
  return _stated(text) or (text.strip() if tagged else _last_number(text))


def given_answer(
  completion: str, prompt: str = "", thinking: Sequence[str] = THINKING
) -> str | None:
  """Returns the `spelling` of the answer after the thinking, or None.

  None without an answer, or if the thinking (which the prompt may open) is
  never closed. Completions with equal results get equal rewards by
  `math_answer`.
  """
  text = completion
  for pair in thinking:
    opens, _, closes = pair.partition("...")
    if not (opens and closes):
      raise ValueError(
        f"thinking has {pair!r}: give pairs of tags as OPENING...CLOSING"
      )
    _, closed, after = text.rpartition(closes)
    if opens in after or not closed and prompt.rstrip().endswith(opens):
      return None
    text = after
  answer = find_answer(text)
  return None if answer is None else spelling(answer)


def math_answer(
  prompt: str,
  completion: str,
  example: dict[str, Any],
  *,
  thinking: Sequence[str] = THINKING,
) -> float:
  """Returns 1.0 if the completion's answer equals the example's, else 0.0.

  The example's "answer" may be a solution with a box or a "####". Text between
  the tags of a pair "OPENING...CLOSING" in `thinking` is ignored.
  """
  reference = str(example["answer"])
  if MARK in reference or "boxed" in reference:
    reference = find_answer(reference) or reference
  expected = spelling(reference)
  answer = given_answer(completion, prompt, thinking)
  if answer is None or expected is None:
    return 0.0
  return float(equal(answer, expected))


math_verify = math_answer


def equal(answer: str, expected: str) -> bool:
  """Returns True if two answers, both from `spelling`, are equal."""
  answer, expected = _without_names(answer, expected)
  if answer == expected:
    return True
  # Spellings of numbers and words are canonical, so unequal ones differ.
  if all(map(_EXACT.fullmatch, (answer, expected))):
    return False  # different numbers
  if all(map(_WORDS.fullmatch, (answer, expected))):
    same = answer[1:] == expected[1:]
    return same and answer[0].lower() == expected[0].lower()
  if "=" in answer and "=" not in expected:  # 2 + 3 = 5
    sides = [spelling(side) for side in answer.split("=")]
    return all(side is not None and equal(side, expected) for side in sides)
  from grpojax.rewards import symbolic  # slow to import and rarely needed

  return symbolic.equal(answer, expected)


def _without_names(answer: str, expected: str) -> tuple[str, str]:
  """Removes "x =" from one of the answers if the other is no equation."""
  for named, other in ((answer, expected), (expected, answer)):
    names = set(_NAMED.findall(named))
    if len(names) == 1 and "=" not in other and r"\approx" not in other:
      bare = spelling(_NAMED.sub("", named)) or named
      return (bare, other) if named is answer else (other, bare)
  return answer, expected


def _places(text: str, *marks: str) -> Iterator[int]:
  """Yields at most `_ATTEMPTS` positions of marks, beginning at the end."""
  last = {mark: text.rfind(mark) for mark in marks}
  for _ in range(_ATTEMPTS):
    mark = max(last, key=last.__getitem__)
    place = last[mark]
    if place < 0:
      return
    yield place
    last[mark] = text.rfind(mark, 0, place)


def _boxed(text: str) -> str | None:
  """Returns the last box and the boxes joined to it by "or", "and" or ","."""
  answers = []
  later = None
  for place in _places(text, "boxed", "\\fbox"):
    # `start` follows the five letters of "boxed" or the name "\fbox".
    start = place + 5
    part = text[start : start + LONGEST + 2].lstrip()
    end = 0
    if part.startswith("{"):
      end = quantities.closing(part)
      answer = part[1:end].strip()
      end += start + len(text[start : start + LONGEST + 2]) - len(part)
    elif text[place - 1 : place] == "\\":  # \boxed 5
      answer = _BARE.match(part)[0]
    else:
      continue
    if answers:
      # `later` is the start of the following box: boxes are read from the end.
      between = text[end:later] if end <= later < end + 30 else ""
      if not _JOINED.fullmatch(between):
        break
    if answer:
      answers.insert(0, answer)
      later = place if text[place] == "\\" else place - 1  # of its backslash
  return ", ".join(dict.fromkeys(answers)) or None


def _stated(text: str) -> str | None:
  """Returns the answer of the last statement like "the answer is 5"."""
  for place in _places(text, "answer", "Answer", "ANSWER", "A:", "A**:"):
    if text[place + 1] in ":*":
      line = max(text.rfind("\n", 0, place), place - 12, 0)
      match = _A.match(text, line)
    else:
      match = _STATEMENT.match(text, place)
    if match:
      start = match.end() - match[0].endswith("\n")
      if answer := _statement(text[start : start + LONGEST + 100]):
        return answer
  return None


def _statement(text: str) -> str | None:
  """Returns the formulas, code block or clause at the start of a text."""
  text = text.replace("**", "")
  text = text[_LEAD.match(text).end() :]
  formulas = []
  place = 0
  # Several formulas may follow each other: $x$ and $y$.
  while formula := _FORMULA.match(text, place):
    formulas.append(next(filter(None, formula.groups())))
    if goes_on := _GOES_ON.match(text, formula.end()):
      end = _END.search(text, goes_on.end())
      clause = text[: end.start() if end else None]
      return _DELIMITERS.sub(" ", clause).strip()
    also = _ALSO.match(text, formula.end())
    if not also or also.end() == formula.end():
      return ", ".join(formulas)
    place = also.end()
  end = _END.search(text, place)
  clause = text[place : end.start() if end else None].strip()
  if formulas:
    return ", ".join([*formulas, clause])
  # A long clause without a figure is prose and not an answer.
  is_short = len(clause.split()) <= 3 and len(clause) <= 30
  is_answer = is_short or re.search(r"[0-9\\=]", clause)
  return clause if clause and is_answer else None


def _last_number(text: str) -> str | None:
  """Returns the last number outside of expressions, names and lists."""
  place = max(text.rfind(digit) for digit in "0123456789¼½¾")
  if place < 0:
    return None
  # Only the lines around the last digit are searched, backwards.
  for line in reversed(text[max(place - 400, 0) : place + 60].splitlines()):
    line = quantities.figures(quantities.unwrap(line))
    for match in reversed([*_FIGURE.finditer(line)]):
      before = line[max(match.start() - 30, 0) : match.start()]
      part = _PART_BEFORE.search(before) or _PART_AFTER.match(line, match.end())
      if not part:
        return match[0]
  return None
