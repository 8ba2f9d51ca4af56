r"""Right or wrong by the answer of a solution: the reward `math_answer`.

The answer is looked for in this order; the first place that has one decides:

1. the last complete \boxed{...} or \fbox{...} that is not empty;
2. the text after the last "####", up to the end of its line;
3. the last statement of an answer: "the answer is 5", "Answer: 5", "A: 5" at
   the start of a line, "<answer>5</answer>". The first number of its sentence
   counts ("the answer is 5 apples, not 7"), after an equals sign if any;
4. the last number.

1 and 2 are taken whole, so "\boxed{5 or 6}" is neither 5 nor 6, and of 3 and 4
"5 or 6" is neither by the rules of `alternatives`. A box that was
not closed (truncated) is none; its number may be found by rule 4. A number that
is plainly denied ("is not 5", "isn't 5 or 6", ", not 5") is nowhere an answer,
by the rules of `denials`. "The answer is not ..." is no statement, so that
another one or rule 4 decides. Answers are equal by the rules of `quantities`.

Nothing is evaluated, and the time is bounded: only the last `WINDOW` characters
are read, with a bounded number of attempts to find each kind of statement.
"""

import re
from collections.abc import Iterator
from typing import Any

from grpojax.data.examples import MARK
from grpojax.rewards import alternatives, denials, quantities
from grpojax.rewards.quantities import LONGEST
from grpojax.rewards.quantities import equal as equal

WINDOW = 2**16
"""Characters at the end of a completion that are read."""

_ATTEMPTS = 16  # places of each kind that are looked at, from the end
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s$]{0,50}")
# From "answer" to what it is, on one line.
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
_NOT = re.compile(
  r"""(?:[a-z]{2,12}ly\s{1,3})?not\s{1,3}(?:sure|certain|clear
    |(?:(?:simply|equal|to|the|an?)\s{1,3}){0,3}[-$\\(]{0,3}[0-9])""",
  re.VERBOSE | re.IGNORECASE,
)
_UNEQUAL = re.compile(r"\\neq?(?![A-Za-z])")
_LEAD = re.compile(r"[\s:=*_\"'>]{1,40}")
_LATEX = re.compile(r"\$([^$\n]{1,200})\$(?![0-9])|\\\((.{1,200}?)\\\)")
_END = re.compile(
  r"[.;?](?=\s|$)|!(?=\s|$)(?!\s?[-+*/=])"  # 5! = 120 goes on
  r"|,\s|\n|<|\s\(|\*\*|\b(?:because|since)\b"
)
_POINT = re.compile(r"[(\[][^()\[\]\n]{1,100}[)\]]")
_RANGE = r"[0-9]{1,9}(?:(?::|-|/[0-9]{1,9}/)[0-9]{1,9}){1,5}"
_TOKEN = re.compile(
  rf"(?<![0-9.,A-Za-z]){_RANGE}(?![0-9]) | (?:{quantities.NUMBER.pattern})",
  re.VERBOSE,
)


def find_answer(text: str) -> str | None:
  """Finds the part of a solution that gives its answer; None if none does."""
  text = text[-WINDOW:]
  for find in (_boxed, _marked):
    answer = find(text)
    if answer is not None:
      return answer
  text, denied = denials.remove(text)
  return _stated(text, denied) or _last_number(text)


def given_answer(completion: str) -> str | None:
  """Reads the answer that a completion gives, in one spelling: to count votes.

  Completions that give the same answer are equally right by `math_answer`.
  """
  answer = find_answer(completion)
  return None if answer is None else quantities.canonical(answer)


def reference_answer(example: dict[str, Any]) -> str:
  """Reads an "answer": an answer, or a solution with a box or a "####"."""
  reference = str(example["answer"])
  if MARK in reference or "boxed" in reference:
    return find_answer(reference) or reference
  return reference


def math_answer(prompt: str, completion: str, example: dict[str, Any]) -> float:
  """1.0 if the completion's answer equals `reference_answer`, else 0.0."""
  expected = quantities.canonical(reference_answer(example))
  return float(expected is not None and given_answer(completion) == expected)


def _places(text: str, *marks: str) -> Iterator[int]:
  """The last places of any of the marks, from the end."""
  last = {mark: text.rfind(mark) for mark in marks}
  for _ in range(_ATTEMPTS):
    mark = max(last, key=last.__getitem__)
    place = last[mark]
    if place < 0:
      return
    yield place
    last[mark] = text.rfind(mark, 0, place)


def _boxed(text: str) -> str | None:
  for place in _places(text, "\\boxed", "\\fbox"):
    start = place + (6 if text.startswith("\\boxed", place) else 5)
    part = text[start : start + LONGEST + 2].lstrip()
    if not part.startswith("{"):  # \boxed 5
      answer, rest = _BARE.match(part)[0], ""
    else:
      closing = _closing(part)
      answer, rest = part[1:closing].strip(), part[closing + 1 :]
    if denials.precedes(text, place) or denials.follows(rest):
      continue
    if answer := denials.without(answer):
      return alternatives.earlier(text, place, answer) or answer
  return None


def _closing(text: str) -> int:
  """Index of the brace that closes the one at the text's start; 0 if none."""
  depth = 0
  for match in _BRACES.finditer(text):
    depth += {"{": 1, "}": -1}.get(match[0], 0)
    if not depth:
      return match.start()
  return 0


def _marked(text: str) -> str | None:
  head, mark, tail = text.rpartition(MARK)
  if not mark:
    return None
  answer = tail.lstrip()[: LONGEST + 1].partition("\n")[0].strip()
  if answer := denials.without(answer):
    return alternatives.earlier(text, len(head), answer) or answer
  return None


def _stated(text: str, denied: set[str | None]) -> str | None:
  retracts = False
  for place in _places(text, "answer", "Answer", "ANSWER", "A:", "A**:"):
    if text[place + 1] in ":*":
      line = max(text.rfind("\n", 0, place), place - 12, 0)
      match = _A.match(text, line)
    else:
      match = _STATEMENT.match(text, place)
    if match:
      rest = text[match.end() : match.end() + 300]
      answer = _statement(rest)
      if answer:
        # "The answer is 4. Wait, the answer is not 4." What is it, then?
        gone = retracts and quantities.canonical(answer) in denied
        if gone:
          return None
        several = alternatives.stated(rest, _TOKEN)
        return several or alternatives.earlier(text, place, answer) or answer
      retracts = retracts or denials.GONE in rest
  return None


def _statement(text: str) -> str | None:
  """The answer in the sentence that follows "answer is"; None if none."""
  if lead := _LEAD.match(text):
    text = text[lead.end() :]
  if formula := _LATEX.match(text) or _POINT.match(text):
    answer = formula[1] or formula[2] if formula.re is _LATEX else formula[0]
    return None if denials.GONE in answer else answer
  sentence = text
  if end := _END.search(text):
    sentence = text[: end.start()]
  if sentence.startswith(denials.GONE) or _NOT.match(sentence):
    return None
  sentence = sentence.replace(denials.GONE, " ").strip()
  if quantities.number(sentence) is not None:
    return sentence
  cleaned = quantities.clean(sentence)
  if unequal := _UNEQUAL.search(cleaned):
    left = cleaned[: unequal.start()].strip()
    return cleaned if quantities.number(left) is None else left
  if ">" in cleaned:
    return cleaned  # an inequality
  if match := _TOKEN.search(cleaned.rpartition("=")[2]):
    if " " in cleaned or match[0] == cleaned:
      return match[0]
    return sentence  # an expression
  few = 0 < len(sentence.split()) <= 2 and len(sentence) <= 20
  return sentence if few else None


def _last_number(text: str) -> str | None:
  place = max(text.rfind(digit) for digit in "0123456789¼½¾")
  if place < 0:
    return None
  near = quantities.clean(text[max(place - 400, 0) : place + 60])
  numbers = [*_TOKEN.finditer(near)][-2:]
  if numbers and (other := alternatives.after(near, numbers[0], _TOKEN)):
    return near[numbers[0].start() : other.end()]
  return numbers[-1][0] if numbers else None
