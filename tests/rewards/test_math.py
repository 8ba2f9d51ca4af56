import json
import pathlib

import pytest

from grpojax.rewards import math
from grpojax.rewards.pool import Pool

# Labelled by hand: is the completion right? Where "miss" is set math_answer
# disagrees with the label; those are limits, kept so that the figure is honest.
FILE = pathlib.Path(__file__).parents[1] / "data" / "math_answers.jsonl"
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]


def test_hand_labelled():
  assert len(CASES) >= 150
  for case in CASES:
    value = math.math_answer("", case["completion"], case)
    assert value == (case["right"] != case.get("miss", False)), case
  misses = [case for case in CASES if case.get("miss")]
  assert len(misses) / len(CASES) < 0.06
  # Wrong completions that are rewarded teach a model to be wrong.
  assert all(case["right"] for case in misses)


@pytest.mark.parametrize(
  "text, expected",
  [
    (r"\boxed{1} #### 2 The answer is 3. 4", "1"),
    ("#### 2\nThe answer is 3. 4", "2"),
    ("The answer is 3. 4", "3"),
    ("3 4", "4"),
    (r"\boxed{ } #### 2", "2"),
    ("####\nThe answer is 3.", "The answer is 3."),
    (r"\boxed{5", "5"),
    ("no number", None),
  ],
)
def test_the_first_kind_of_place_decides(text, expected):
  assert math.find_answer(text) == expected


DENIALS = {
  None: [
    *("The answer is not 5", "The answer is **not** $5$."),
    *("The answer is not equal to 5 apples.", "The answer is (not 5)"),
    *("The answer is neither 5 nor 6.", "The answer is not 0 or 5"),
    *("The answer isn't 5", "The answer isn’t 5", "The answer cannot be -5"),
    *("Answer: not 5", "<answer>not 5</answer>", "#### not 5"),
    *(r"\boxed{not 5}", r"The answer is not \boxed{5}."),
    *("The answer is definitely not 5", "NaN", "#### NaN"),
  ],
  "5": [
    *(r"It is \boxed{5}, not $\boxed{6}$.", r"\boxed{5 \text{ (not 6)}}"),
    *("#### 5 (not 6)", "#### 5 (not 6 apples)", "#### 5, not 6"),
    *("#### 5 rather than 6", "The answer is 5, not 6"),
    *("The answer is 5 (not 6)", "The answer is 5 instead of 6"),
    *("The answer is not 6 but 5", "The answer is not 6, but 5."),
    *("answer: not sure, maybe 5", "The answer is knot 5"),
    "The answer is nothing but 5",
  ],
  "6": [
    *(r"It is not \boxed{5} but \boxed{6}.", "#### not 5 but 6"),
    "The answer is definitely not 5. It is 6",
    "The answer is 4. Wait, the answer is not 4. It is 6",
    "The answer is 6. So the answer is not 4.",
  ],
  "xneq5": [
    r"\boxed{x \neq 5}",
    "The answer is x ≠ 5",
  ],
  "notpossible": [
    "Answer: not possible",
  ],
}
"""Answers, and texts that give them."""


def test_what_is_denied_is_no_answer():
  for expected, texts in DENIALS.items():
    for text in texts:
      assert math.given_answer(text) == expected, text


LABELS = [
  *("Students playing neither", "The people who did not", "Total not eaten"),
  *("Therefore, the number of students that like neither", "Those who don't"),
  *("2 is even and 3 is not", "Number of people who cannot", "- Neither"),
  *("- Cannot", "Never", "Not", "P(not 6)", "Numbers n where f(n) is not 0"),
]


@pytest.mark.parametrize("label", LABELS)
def test_a_label_that_ends_with_a_negation_denies_nothing(label):
  for before in (": ", ":\n", ":\n\n", "\n\n", " = ", " are "):
    for answer in ("18", "**18**", "$18$", r"$\boxed{18}$", r"$$\boxed{18}$$"):
      for after in ("", ".", "\n"):
        text = label + before + answer + after
        assert math.given_answer(text) == "18", text


DENIED = [
  *("20 - 5 = 15", "20 - 5", "20 / 5 = 4", "10/2 + 1", "3 * 5", "5 1/2"),
  *(r"$3 \times 5$", "1/2 of 30", "20% of 90", "5 apples and 3 oranges"),
  *("5 for 3 people", "5 hours 30 minutes", "10-15", "10 to 15", "5", "5.5"),
  *("15 apples", "1,500", "$15$", "**15**", r"\(15\)", "the 15 that he had"),
]
"""Of an expression that is denied no part may become the answer."""


@pytest.mark.parametrize(
  "after", [". It is 18.", ". We add 3, giving 18", " but 18", ", but 18."]
)
@pytest.mark.parametrize(
  "verb", ["is not", "is not simply", "isn't", "is definitely not"]
)
def test_what_is_denied_leaves_no_rest(verb, after):
  for denied in DENIED:
    text = f"The answer {verb} {denied}{after}"
    assert math.given_answer(text) == "18", text


@pytest.mark.parametrize(
  "text",
  ["18, not {}", "So it's 18, not {}.", "#### 18, not {}", "18 (not {})"],
)
def test_a_number_and_not_another(text):
  expressions = ["5 + 3", "5 + 3 = 8", "15-17", "5 apples", "$5$", "5 or 6"]
  for denied in expressions:
    assert math.given_answer(text.format(denied)) == "18", denied


@pytest.mark.parametrize(
  "text, expected",
  [
    ("Is the answer not 18?", "18"),
    ("Isn't it 18?", "18"),
    (r"Isn't the answer \boxed{18}?", "18"),
    ("Why not 5?", "5"),
    ("The answer cannot be anything but 7", "7"),
    ("The answer is not only 5.", "5"),
    ("The answer isn't exactly 5.", "5"),
    ("If the answer were not 7, there would be a contradiction.", "7"),
    ("Suppose the answer is not 7; contradiction.", "7"),
    ("If 3 are sold, he has 18, not 15", "18"),
    ("The answer is 18 ≠ 15.", "18"),
    ("The answer is x = 18 ≠ 15.", "18"),
    ("Answer: not more than 18. We see 3 cases.", "18"),
    ("Answer: not 5 apples and 3 oranges. It is 18.", "18"),
    ("The answer is 18. The answer is not 15, because 20 - 5 misses 3.", "18"),
    ("The answer is 4. Wait, the answer isn't 4. It is 6", "6"),
    ("The answer is 4 kg. Wait, the answer is not 4 kg. It is 6 kg.", "6"),
    ("The answer is not 15, but 18, because 3 are added to 15.", "18"),
    ("The answer is anything but 8; it's 7", "7"),
    ("It is neither 15, nor 16. It is 18, and not 17.", "18"),
    ("#### (3,4), not 5", "(3,4)"),
    # A negation in a label.
    ("#### neither 5", "5"),
    ("Like neither 5", "5"),
    ("those who are not 5", "5"),
    ("He did not 5", "5"),
    ("The probability of not 6 is 5", "5"),
    ("Number of n where f(n) is not 0 - 18", "18"),
    ("Count of those that do not $\\boxed{5}$", "5"),
  ],
)
def test_only_what_is_clearly_denied_is_denied(text, expected):
  assert math.given_answer(text) == expected


def test_nan_is_no_reference():
  for answer in ("NaN", "nan", float("nan")):
    for text in ("#### NaN", "#### 5", "none"):
      assert math.math_answer("", text, {"answer": answer}) == 0.0


def test_votes_for_the_same_answer_are_the_same_text():
  texts = ["#### 1,234.50", r"\boxed{\$1234.5}", "A: 2469/2", "1234 1/2"]
  assert {math.given_answer(text) for text in texts} == {"2469/2"}


def test_a_reference_may_be_a_solution_or_a_number():
  for answer in ("2+3=5\n#### 5", r"so \boxed{5}", 5, 5.0, "5"):
    assert math.math_answer("", "A: 5", {"answer": answer}) == 1.0
    assert math.math_answer("", "A: 6", {"answer": answer}) == 0.0


UNITS = [
  *("\\boxed", "\\boxed{", "{", "}", "\\boxed{}", "\\frac", "\\frac{", "\\("),
  *(
    "\\frac{\\frac{1",
    "9",
    "1,",
    "123,",
    "1 ",
    "1/",
    "-",
    "-9",
    "answer",
    "\\",
  ),
  *("answer ", "answer is ", "answer: ", "answer is not ", "A:", "\nA: ", "$"),
  *("####", "#### ", "\n", " ", "(", "(,", "1e9", "1:1", "1.", "x=", "**", "½"),
  *("not ", "not 1 or ", "n't 1", "not the the ", "not $(1", "not 1/2"),
  *(
    "is not 1 ",
    "is not 1 a a a ",
    "isn't 1+1",
    "suppose is not 5, ",
    "5 not ",
  ),
  *("is certainly ", "neither ", ", not 1-", "is not " + "1" * 60 + "/"),
  *("is not " + "1/" * 30 + "x ", "is not " + "1-----" * 20 + "x "),
  *("1 and ", "apple ", "answer is \\(1", "answer is [1", "answer*****", "x "),
  *("answer (aaaaaaaaa", "10^9*", "a^1", "1 million ", "answer" + " x" * 18),
]


def test_hostile_text_takes_no_time():
  """A text whose time grew with its square would take many minutes.

  The workers' limit, generous as it is, tells: it would be a failure.
  """
  texts = [UNITS[0] * 10**6]
  for unit in UNITS:
    many = unit * (math.WINDOW // len(unit))
    few = unit * (450 // len(unit))
    texts += [many, "\\boxed{" + many, f"\\boxed{{{few}}}", f"#### {few}"]
    texts += ["answer is " + many, f"{many}5"]
  example = {"answer": "7777777"}  # too long a one, and no text would be read
  with Pool(["math_answer"], workers=1, timeout=30) as pool:
    sent = pool.submit([[("", text, example)] for text in texts], 1)
    assert (pool.collect([sent]).rewards == 0.0).all()


def test_only_the_end_of_a_text_is_read():
  assert math.given_answer("7" + " " * (math.WINDOW - 2)) == "7"
  assert math.given_answer("7" + " " * math.WINDOW) is None
