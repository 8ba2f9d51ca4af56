r"""Numbers that a text denies: 6 in "5, not 6", in "not 6 but 5", "6 is wrong".

Only what is plainly denied is: a number, or an expression of numbers, directly
after the negation, in the same line, with nothing but its unit behind it in its
clause; or directly before what refuses it ("6? No", "6. No, that's wrong"). In
"The answer is not 20% of 90" no number is denied, since taking 20% away would
make an answer of 90. Neither is anything denied by a label ("Students who do
not: 5", "neither 5"), by "do not 5", in a question or after an "if".

No expression here repeats without a bound, and what is denied is read in one
way only (an atomic group), so the time is linear.
"""

import re

from grpojax.rewards import quantities

GONE = "\0"
"""Character that `remove` puts in place of a denial, except before "but"."""

_WORD = r"(?:not|never|no\ longer|neither(?=[^.:\n]{1,60}\bnor\b))"
# After "is"; "isn't" (which asks where it begins a sentence); after a number, a
# stop or "and", or at the beginning: elsewhere "not" may end a label.
_NEGATION = rf"""(?:
  (?P<verb>(?:\b(?:is|was|be|equals?)|['’]s)[ \t*_]{{1,4}})
    (?:(?:[a-z]{{2,12}}ly|also|still)[ \t]{{1,3}})?
      (?:{_WORD}|(?<!be\ )anything\ but|far\ from|(?:other|different)\ than
        |different\ from|unlikely\ to\ be)
  | (?P<short>(?<=[^.:!?\n]\ )(?:(?:is|was|ai)n['’]t | never\ is
    | (?:cannot | (?:ca|could|would|should|must|wo)n['’]t
      | (?:can|could|would|should|must|may|might|will)\ (?:not|never))
      \ (?:possibly\ |really\ )?be
    | does(?:n['’]t|\ not)\ equal))
  | (?: (?<![^.,;:!?#<>(){{}}\[\]*$%"'0-9])[ \t*_]{{0,3}}
    | \b(?:and|or|but)[ \t])\b(?:{_WORD}|nor)
  | \b(?:rather\ than|instead\ of|ruled?\ out
    | (?:do(?:\ not|n['’]t)\ (?:think|believe|suppose)|doubt|wrong\ to\ (?:say
      |think)|false\ that|not\ true\ that|not\ the\ case\ that)
      \ (?:that\ )?(?:it|this|that|the\ (?:[a-z]{{1,10}}\ )?(?:answer|result))
      (?:['’]s|\ (?:is|was|equals|(?:would|should|could)\ be)))
)\b[ \t*_"']{{1,6}}(?:(?:equal|to|simply|really|actually|the|an?|number|value
  |answer)[ \t*_"']{{1,4}}){{0,4}}"""
_FIGURE = (
  r"[-−+$£€\\([]{0,4}(?:f?box(?:ed)?\{)?"
  r"[0-9]{1,60}(?:[.,/:][0-9]{1,60}){0,9}(?:[ ][0-9]{1,9}/[0-9]{1,9})?"
  r"(?:\$|\\\)|%|\}){0,2}"
)
# "is not 0 - 18" may be a label and its answer, so a dash joins without spaces.
_OPERATOR = r"(?:[-−–]|[ ]?(?:[+*/×÷·^]|\\times|\\cdot|\\div)[ ]?)"
_EXPRESSION = rf"""{_FIGURE}(?:
  (?:{_OPERATOR}{_FIGURE}){{1,9}}(?:\s?=\s?{_FIGURE})?
  | (?:[ ]n?or[ ]{_FIGURE}){{1,5}})?"""
_UNIT = r"(?:[ ](?!(?:but|because|since|as|so)\b)[a-z]{1,20}){0,3}"
_END = r"""(?:(?P<but>[ \t*"']{0,4},?\ but\b(?:\ rather\b)?)
  | (?=[ ]?(?:[;!)\]}<\n*"'—]|[.,](?![0-9])|\Z|(?:because|since|as)\b)))"""
_DENIED = re.compile(
  rf"{_NEGATION}(?P<denied>(?>{_EXPRESSION})){_UNIT}{_END}",
  re.VERBOSE | re.IGNORECASE,
)
_CLOSED = r"(?=\s{0,3}(?:[.,;:!\n]|\Z|because|since|as\b))"
_FALSE = r"""(?:wrong|incorrect|false|impossible|a\ mistake
  |not\ (?:right|correct|possible|(?:the|my)\ (?:[a-z]{1,10}\ )?answer))"""
_ISNT = rf"""(?:(?:\ (?:is|was)|['’]s)\ {_FALSE} | \ (?:(?:is|was)n['’]t
  |(?:cannot|can['’]t)\ be)\ (?:right|correct|possible|the\ answer)){_CLOSED}"""
_REFUSAL = rf"""(?:
    (?: \?\ (?:no|nope|not\ at\ all) | [.!?]\ (?:wrong|incorrect)
      | [.!]\ (?:hmm|wait|actually|oops|sorry),?\ no)(?=[,.!;]|\s{{0,3}}\Z)
  | \ ?\((?:wrong|incorrect)\) | ,\ no,?\ wait | [.!]\ scratch\ that
  | ,\ (?:which|but\ that){_ISNT}
  | [.!?]\ (?:(?:no|wait|hmm|but|actually|oops|sorry),?\ ){{0,2}}
    (?:that|this|it){_ISNT})"""
_WORDS = re.compile(r"\bno|annot|n['’]t|wrong|false|rrect|possib|cratch|stake")
# Alone, or "the answer 6": in "so question 6 is wrong" it may be the answer.
_REFUSED = re.compile(
  rf"""(?<![0-9.,/:A-Za-z])(?:
    (?P<asked>(?>{_EXPRESSION}))[*_"]{{0,2}}{_UNIT}{_REFUSAL}
    | (?:(?<![^\n])|(?<=[.!?:;,\#]\ )|(?<=\bso\ )|(?<=\bbut\ )
       |(?<=\bthus\ )|(?<=\bhence\ )|(?<=\banswer\ )|(?<=\banswer\ of\ ))
      (?P<false>(?>{_EXPRESSION}))[*_"]{{0,2}}{_ISNT})""",
  re.VERBOSE | re.IGNORECASE,
)
_AFTER_BOX = re.compile(
  rf"[$)\]*]{{0,4}}(?:{_REFUSAL}|{_ISNT})", re.VERBOSE | re.IGNORECASE
)
_BEFORE_BOX = re.compile(
  rf"{_NEGATION}[$ (\\\[]{{0,4}}\Z", re.VERBOSE | re.IGNORECASE
)
_SUPPOSED = re.compile(
  r"\b(?:if|suppose|assume|unless|whether)\b[^.,;!?\n]{0,60}\Z", re.IGNORECASE
)


def remove(text: str) -> tuple[str, set[str | None]]:
  """Takes the denials out of a text.

  Returns:
    The text, with "is `GONE`." for "isn't 6." and "is 5" for "is not 6 but 5",
    and the denied expressions as `quantities.canonical` spells them.
  """
  denied = set()

  def gone(match: re.Match) -> str:
    start = match.start()
    if _SUPPOSED.search(text, max(start - 60, 0), start):
      return match[0]
    denied.add(quantities.canonical(match["denied"]))
    verb = match["verb"] or ("is " if match["short"] else "")
    return verb if match["but"] else verb + GONE

  def refused(match: re.Match) -> str:
    denied.add(quantities.canonical(match["asked"] or match["false"]))
    return GONE

  text = _DENIED.sub(gone, text)
  if _WORDS.search(text.lower()):  # nothing else refuses
    text = _REFUSED.sub(refused, text)
  return text, denied


def without(answer: str) -> str:
  """Returns 5 of "5 (not 6)" and of "not 6 but 5"; nothing of "not 5"."""
  rest, denied = remove(answer)
  if not denied:
    return answer
  return rest.replace(f"({GONE})", "").replace(GONE, "").strip(" ,;")


def follows(text: str) -> bool:
  """True where what follows a box refuses it, as " is wrong" does."""
  return bool(_AFTER_BOX.match(text))


def precedes(text: str, place: int) -> bool:
  """True where a text denies what stands at a place of it, as in "not 6"."""
  return bool(_BEFORE_BOX.search(text, max(place - 60, 0), place))
