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


@pytest.mark.slow
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


DENY_FIVE = r"""
The answer is not 5. | 5 is wrong. | I don't think it is 5. | I do not think
it's 5. | I don't believe the answer is 5. | it can't be 5 | It can not be 5.
| It cannot possibly be 5. | It couldn't be 5. | The answer can't be 5. | 6
rather than 5 | The answer is 5? No. | 5? No, that is too small. | The answer
is 5? No, wait. | The answer is 5. No, that's wrong. | The answer is 5. Wait,
that's not right. | The answer is 5. Scratch that. | Is it 5? No. | Could it
be 5? No, it could not. | The answer is definitely not 5. | The answer must
not be 5. | 5 is incorrect. | 5 is not the answer. | 5 is not correct. | 5
isn't right. | The answer 5 is wrong. | The answer of 5 is incorrect. | It
would be wrong to say that the answer is 5. | It is false that the answer is
5. | The answer is anything but 5. | The answer is far from 5. | The answer
won't be 5. | The answer is no longer 5. | The answer never is 5. | The answer
shouldn't be 5. | The answer should not be 5. | The answer would not be 5. |
The answer was not 5. | The answer is other than 5. | It is not the case that
the answer is 5. | I doubt that the answer is 5. | The answer isn't 5. | We
can rule out 5. | 5 cannot be the answer. | 5 can't be right. | No, not 5. |
The answer ain't 5. | The answer is unlikely to be 5. | The answer is
different from 5. | \boxed{5} is wrong. | \boxed{5} is not the answer. | I
don't think it is \boxed{5}. | It can't be \boxed{5}. | The answer is not
\boxed{5}. | \boxed{5}? No. | The answer is 5, which is wrong. | The answer is
5 (wrong). | The answer is 5, no wait. | No, the answer is not 5. | So it is
certainly not 5. | It's not 5. | It is not the number 5. | It is definitely
not equal to 5. | The result isn't 5. | The result can't possibly be 5. | The
answer can never be 5. | This is never 5. | Nope, 5 is wrong. | So 5 is wrong.
| Hence 5 is not correct. | But 5 isn't the answer. | The answer is 5. Hmm,
no. | The answer is 5. Actually no. | The answer is 5. Wrong! | The answer is
5. Oops, that is incorrect. | The answer is 5. Wait, no. | The answer is 5.
That can't be right. | The answer is 5? That's wrong. | The answer is 5? Nope.
| 5? Not at all. | 5? Wrong. | Not 5. | No: 5 is false. | The answer is
\boxed{5}. Wait, that's wrong. | $\boxed{5}$ is incorrect. | I don't think the
answer is $\boxed{5}$. | The answer isn't $5$. | The answer is **not** **5**.
"""

CHOOSE_FIVE = r"""
x=2 or x=5, so the answer is 2 or 5 | The answer is 2 or 5. | The answer is 5
or 2. | The answer is either 5 or 2. | The answer is 5 or maybe 2. | The
answer is 5, or 2. | The answer is x = 5 or x = 2. | The answer is x=2 or x=5
| The answer is $5$ or $2$. | The answer is **5** or **2**. | The answer is
$x=5$ or $x=2$. | The answer is 5/2 or 5. | The answer is 2, 3 or 5 | The
answer could be 5 or 2. | \boxed{5} or \boxed{2} | \boxed{2} or \boxed{5} | It
is \boxed{2} or \boxed{5}. | Either \boxed{2} or \boxed{5}. | $\boxed{2}$ or
$\boxed{5}$. | The answer is 5 or the answer is 2. | The answer is 2 or the
answer is 5. | It is 2 or 5. | so 2 or 5 | Answer: 5/2 or 5 | Answers: 2, 5 |
The answers are 2 and 5. | The possible answers are 5 or 2. | <answer>5 or
2</answer> | <answer>5</answer> or <answer>2</answer> | The answer is between
2 and 5. | The answer is 2 to 5. | The answer is one of 2 and 5. | The answer
is 5 vs 2. | The answer is 5 (or 2). | The answer is 5 (or maybe 2). | The
answer is 5, possibly 2. | The answer is 5; or 2. | Answer: 5 / 2 / 7 | The
answer is either 2 or 5. | Maybe 2, maybe 5. | It's 2, or 5. | \boxed{2}, or
\boxed{5} | \boxed{5} (or \boxed{2}) | The answer is 5, alternatively 2. | The
answer is 2 and/or 5. | The answer is 5, 2 or 3. | The answer is $5$, $2$ or
$3$. | The answer is 5 or, alternatively, 2. | The answer is $5 or $2. | The
answer is $5 or 2 dollars. | The answer is 5 or 2 apples. | The answer is $5 or
2$.
"""

GIVE_FIVE = r"""
The answer is 5. | So the answer is 5, not 6. | The answer is 5 rather than 6.
| The answer is 5 instead of 6. | It isn't 6, it's 5. | It can't be 6, so it
is 5. | 6 is wrong. The answer is 5. | 6? No, it is 5. | The answer is 6? No,
the answer is 5. | The answer is 6. Wait, that's wrong. The answer is 5. | I
don't think it is 6. The answer is 5. | I don't think it is 6; it is 5. | Is
it 5? Yes. | The answer is 5. Is that right? Yes. | The answer is 5. That is
not a coincidence. | The answer is 5, since 6 is wrong. | The answer is 5,
because it cannot be 6. | The answer is 5. It can't be 6. | The answer is 5. 6
is not the answer. | There is no other way, so 5. | No, it is 5. | No. The
answer is 5. | So 5 is right. | 5 is the answer. | 5 is correct. | The answer
is 5. No more is needed. | The answer is 5. No one else is left. | The answer
is 5. Note that 0 is not allowed. | The answer is 5 apples. No apples remain.
| She has no apples, so the answer is 5. | He doesn't eat 3, so 5 are left. |
Not all are sold; 5 remain. | There are 10 apples and 5 are not red. The
answer is 5. | I don't know if there is a shortcut, but the answer is 5. | I
think the answer is 5. | I don't think we need more; the answer is 5. | I
doubt that many remain. There are 5. | Without a doubt, the answer is 5. | The
answer is 5 or 10/2. | The answer is 5 (or 5.0). | The answer is 5, or five
apples. | The answer is 5 hours or less. | The answer is 5 or more. | #### 5 |
\boxed{5} | \boxed{5}, not \boxed{6}. | The answer is \boxed{5}, or five. |
\boxed{6} is wrong. So it is \boxed{5}. | I first got \boxed{6}, which is
wrong. Then \boxed{5}. | \boxed{6}? No, \boxed{5}. | \boxed{5}. No other
answer is possible. | #### 5. No more. | The answer is $5$. | The answer is 5
dollars and 0 cents. | Two or three steps give 5. | With 2 or 3 coins she can
pay. The answer is 5. | If it were 6 or 7, it would not fit. So the answer is
5. | The answer is 5 for 1 or 2 people. | x = 2 or x = 5, but x > 3, so the
answer is 5. | x = 2 or x = 5. Since x is odd, the answer is 5. | Either 2 or
5. 2 is wrong. The answer is 5. | It could be 6, but that is wrong. It must be
5. | The answer is 5. (Not 6.) | The answer is 5. Wait, let me check: 2+3 = 5.
Yes. | The answer is 5. Wait, is that correct? 2+3=5. Yes, 5. | What is wrong
with 6? It is even. So 5. | The wrong answer is 6 and the right answer is 5. |
The answer is not only 5. | It is not impossible: 5. | The number of wrong
answers is 5. | He got 5 wrong. | He got 5 wrong answers. | The number of
incorrect answers is 5. | Wrong answers: 5 | Questions answered wrong: 5 | How
many are wrong? 5. | The answer is 5 wrong questions. | So she got 5 questions
wrong. | Number of people who do not think so: 5 | Is the answer 5? Yes, it is
5. | Isn't it 5? It is. | He can't be older than 5. So 5. | It can't be more
than 5. | It cannot be less than 5. | The answer is 5 because not all 6 count.
| There are not 6 but 5. | The answer is 5 since it isn't 6 or 7. | She can't
buy 6, so she buys 5. | They do not have 6; they have 5. | He has no money, so
he needs 5. | No more than 5. | It is no less than 5. | That is not a problem.
We get 5. | This is wrong if x = 6, so x = 5. | It is false that x = 6. So x =
5. | The statement is false for 6 and true for 5. | Since 6 is not prime, the
answer is 5. | 6 is not possible, hence 5. | 6 is impossible. 5 is possible. |
Could it be 6? No, 6 is even. So it is 5. | Is it divisible by 3? No. So the
answer is 5. | Is 10 divisible by 3? No. The answer is 5. | Does 5 divide 12?
No. The smallest is 5. | 2 or 3 hours are not enough. It takes 5. | Each costs
2 or 3 dollars; in total 5. | He can choose 2 or 3 of them, so 2 + 3 = 5. | 1
or 2 or 3 gives 5. | The answer is 5 (2 or 3 are too few). | The answer is 5
when n is 1 or 2. | The answer is 5, or 1/2 of 10. | The answer is 5, or 500%.
| The answer is 5 minutes or 300 seconds. | Answer: 5 (five) | Answer: 5,
which is less than 6. | Answer: 5, not 6 or 7. | Answer: 5, as 2 + 3 = 5. |
Answer: 5, or in words, five. | Answer: 5. The others are wrong. | Answer: 5.
That's not 6. | Answer: 5. It's not possible to do better. | Answer: 5. This
is not the largest. | Answer: 5. No further steps. | Answer: 5. No, really. |
Answer: 5. This is correct. | Answer: 5. That isn't obvious. | Answer: 5; it
was not easy. | The answer is 5. Check: 5 * 2 = 10, not 12. | Therefore,
question 5 is wrong. | So statement 5 is false. | She answered number 5.
That's wrong answer number 5. | The wrong one is number 5. | The answer is
$5.00 or 5 dollars. | The answer is 5.0 or 5 | x = 5 or, equivalently, 10/2 =
5. | The probability that he is wrong is 5 | \boxed{2} for a or b, and
\boxed{5} | \boxed{5} is right, 6 is wrong. | I thought \boxed{6}. That's
wrong. \boxed{5} | The answer is $x = 5$, not $x = 6$. | The answers are not
6; the answer is 5. | The answer is 5 and not 6. | We have 3 apples and 2
pears, so 5. | The answer is 5 and the remainder is 2. | The answer is 5 and
we are done. | The answer is 5, 2 less than 7. | The answer is 5, 6 being too
large. | The answer is $5 or 500 cents. | The answer
is 5 quarters or $1.25. | The answer is 5, or 2 more than last year. | The
answer is 5. If we had used 6, the answer would be wrong. | The answer is
3! - 1 = 5.
"""


@pytest.mark.slow
@pytest.mark.parametrize("phrases", [DENY_FIVE, CHOOSE_FIVE, GIVE_FIVE])
def test_phrases_that_give_or_take_back_an_answer(phrases):
  right = phrases is GIVE_FIVE
  for text in " ".join(phrases.split()).split(" | "):
    assert (math.given_answer(text) == "5") == right, text


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
  *("5 or ", "5 is wrong ", "5? no", "doubt it is 5 ", "#### 5 or ", "5, 6, "),
  *("is certainly ", "neither ", ", not 1-", "is not " + "1" * 60 + "/"),
  *("is not " + "1/" * 30 + "x ", "is not " + "1-----" * 20 + "x "),
  *("1 and ", "apple ", "answer is \\(1", "answer is [1", "answer*****", "x "),
  *("answer (aaaaaaaaa", "10^9*", "a^1", "1 million ", "answer" + " x" * 18),
]


@pytest.mark.parametrize(
  "units", [UNITS[::9], pytest.param(UNITS, marks=pytest.mark.slow)]
)
def test_hostile_text_takes_no_time(units):
  """A text whose time grew with its square would take many minutes.

  The workers' limit, generous as it is, tells: it would be a failure.
  """
  texts = [UNITS[0] * 10**6]
  for unit in units:
    many = unit * (math.WINDOW // len(unit))
    few = unit * (450 // len(unit))
    texts += ["\\boxed{" + many, f"\\boxed{{{few}}}", f"#### {few}"]
    texts += ["answer is " + many, f"{many}5"]
  example = {"answer": "7777777"}  # too long a one, and no text would be read
  with Pool(["math_answer"], workers=1, timeout=30) as pool:
    sent = pool.submit([[("", text, example)] for text in texts], 1)
    assert (pool.collect([sent]).rewards == 0.0).all()


def test_only_the_end_of_a_text_is_read():
  assert math.given_answer("7" + " " * (math.WINDOW - 2)) == "7"
  assert math.given_answer("7" + " " * math.WINDOW) is None
