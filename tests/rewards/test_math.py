import json
import pathlib

import pytest

from grpojax.rewards import math
from grpojax.rewards.pool import Pool

# Hand-labelled completions. "miss" marks known errors of math_answer, which
# stay in the file so that the error rate is honest.
FILE = pathlib.Path(__file__).parents[1] / "data" / "math_answers.jsonl"
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]


def test_hand_labelled_completions():
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
    (r"\boxed{1}\boxed{2}", "1, 2"),
    (r"\fbox{1}\fbox{2}", "1, 2"),
    ("####\nThe answer is 3.", "3"),
    (r"\boxed{5", None),
    (r"<answer>1</answer> \boxed{2}", "1"),
    (r"<answer>It is \boxed{1}</answer> 2", r"1"),
    ("no number", None),
  ],
)
def test_kinds_of_answers_are_tried_in_order(text, expected):
  assert math.find_answer(text) == expected


GIVE_42 = r"""
The answer is:\n- 42 | The answer is:\n\[\n42\n\] | The answer is\n$$\n42\n$$ |
The answer is:\n```\n42\n``` | The answer is:\n\n**42** | **Answer:** 42 |
Answer:\n\n42 | The final answer is \(42\). | The answer is $42$ apples. | The
answer is \$42. | The answer is `42`. | The answer is "42". | answer 42 | A: 42
| So boxed{42}. | \boxed 42 | \fbox{42} | \boxed{\underline{42}} |
\boxed{\emph{42}} | \boxed{\textcolor{blue}{42}} | $\boxed{x = 42}$ | #### 42
clips | #### The answer is 42 | <answer> 42 | <answer>\boxed{42}</answer> 41 |
The answer is 42 dollars every day at the market. | It is 6*7=42 | She has 42
red marbles (6*7) left | => 42 | The total is $42.00 | <think>the answer is
41</think> 42 | <think>a</think>41<think>b</think>42 | <thinking>so
41</thinking>The answer is 42. | <reasoning>41</reasoning><answer>42</answer> |
[THINK]41[/THINK]42 | <
begin_of_thought|>41<|end_of_thought|><|begin_of_solution|>42<|end_of_solution|>
"""

NOT_42 = r"""
<think> maybe \boxed{42} | <think>42 | <think>42</think> | <think>a</think> 42
<think> | <reasoning>42 | <answer>41</answer> 42 | <answer>42 or 43</answer> |
The answer is:\n-42 | The answer is: - 42 | The answer is $42$ or $43$. | The
answer is $43$, $42$. | \boxed{43} or \boxed{42} | \boxed{42}, \boxed{43} |
\boxed{42, 43} | \boxed{42 | $42\sqrt{2}$ | 4\sqrt{42} | $42\pi$ | x_42 | x^{42}
| \frac{1}{42} | 42/5 | 42! | log 42 | f(42) | (2, 42) | 2^{42} | 50 - 42 | 2
\cdot 42 | 42^2 | 42 - t | 42 x | \pm 42 | x \ge 42 | x ≠ 42 | \angle 42 | 42\%x
| 1e42 | 42:30 | 10-42 | the square root of 42 | 42 cubed | 42 or 43 | 42 and a
half | 3 + 42i | 20% of 42 | The answer is the square root of 42 | The answer is
42 cubed | The answer is $42\pi$ | The answer is not 42, it is 43. | The answer
is:\n\[\nx^{42}\n\]
"""


CHOOSE_FIVE = r"""
The answer is either 5 or 2. | The answer is x = 5 or x = 2. | The answer is
**5** or **2**. | The answer is $x=5$ or $x=2$. | The answer is 2, 3 or 5 | It
is \boxed{2} or \boxed{5}. | $\boxed{2}$ or $\boxed{5}$. | The answer is 5 or
the answer is 2. | It is 2 or 5. | The answers are 2 and 5. | <answer>5</answer>
or <answer>2</answer> | The answer is between 2 and 5. | The answer is 5 vs 2. |
The answer is 5 (or maybe 2). | The answer is 5, possibly 2. | The answer is 5;
or 2. | Answer: 5 / 2 / 7 | \boxed{5} (or \boxed{2}) | The answer is 2 and/or 5.
| The answer is $5 or $2. | The answer is $5 or 2$. | The answer is $5$ million
| The answer is $5$/$4$ | The answer is $5$ times $2$ | The answer is $5$
squared | The answer is $5$th root of 2 | The answer is $x$ < $5$ | The answer
is $5$; $6$ | The answer is $5$ to $6$ | The answer is $5$ (alternatively $6$) |
The answer is \(5\)\(6\) | \boxed{6} / \boxed{5} | \boxed{6}; \boxed{5} |
\boxed{6}, maybe \boxed{5}
"""

GIVE_FIVE = r"""
The answer is 5 rather than 6. | The answer is 5 instead of 6. | The answer is
6? No, the answer is 5. | The answer is 6. Wait, that's wrong. The answer is 5.
| Is it 5? Yes. | The answer is 5. Is that right? Yes. | The answer is 5,
because it cannot be 6. | 5 is the answer. | The answer is \boxed{5}, or five. |
\boxed{6} is wrong. So it is \boxed{5}. | \boxed{6}? No, \boxed{5}. | Two or
three steps give 5. | The answer is 5 for 1 or 2 people. | x = 2 or x = 5, but x
> 3, so the answer is 5. | The answer is 5. (Not 6.) | The answer is 5. Wait,
let me check: 2+3 = 5. Yes. | The wrong answer is 6 and the right answer is 5. |
The answer is not only 5. | Wrong answers: 5 | The answer is 5 wrong questions.
| He can't be older than 5. So 5. | He can choose 2 or 3 of them, so 2 + 3 = 5.
| The answer is 5 (2 or 3 are too few). | Answer: 5 (five) | Answer: 5, not 6 or
7. | Answer: 5, as 2 + 3 = 5. | Answer: 5. That's not 6. | The answer is 5.
Check: 5 * 2 = 10, not 12. | She answered number 5. That's wrong answer number
5. | x = 5 or, equivalently, 10/2 = 5. | \boxed{2} for a or b, and \boxed{5} |
\boxed{5} is right, 6 is wrong. | The answer is 5 and not 6. | The answer is
$5$! | The answer is $5$ to the nearest cent. | The answer is $20$/$4$. |
\boxed{5} \boxed{5} | The answer is $5$ - and not 6.
"""


@pytest.mark.parametrize(
  "phrases, answer, right",
  [
    (GIVE_42, "42", True),
    (NOT_42, "42", False),
    pytest.param(GIVE_FIVE, "5", True, marks=pytest.mark.slow),
    pytest.param(CHOOSE_FIVE, "5", False, marks=pytest.mark.slow),
  ],
)
def test_answers_in_phrases_and_formulas(phrases, answer, right):
  for text in " ".join(phrases.split()).split(" | "):
    text = text.replace("\\n", "\n")
    assert math.math_answer("", text, {"answer": answer}) == right, text


def test_the_prompt_may_open_the_thinking():
  for prompt, text, answer in (
    ("Q <think>\n", "41</think>42", "42"),
    ("Q <think>\n", "42", None),
    ("Q <think>\n\n</think>\n\n", "42", "42"),
    ("Is <think> a tag?", "42", "42"),
  ):
    assert math.given_answer(text, prompt) == answer
  other = math.given_answer("<a>41</a><think>\n42", thinking=["<a>...</a>"])
  assert other == "42"


def test_nan_equals_no_answer():
  for answer in ("NaN", "nan", float("nan")):
    for text in ("#### NaN", "#### 5", "none"):
      assert math.math_answer("", text, {"answer": answer}) == 0.0


def test_votes_are_counted_by_value():
  for texts, vote in (
    ("#### 1,234.50|\\boxed{\\$1234.5}|A: 2469/2|1234 1/2", "2469/2"),
    (r"\boxed{B}|Answer: (B)|Answer: B) Paris|#### option B", "B"),
    (r"\boxed{x + 1}|\boxed{x+1}|The answer is $x + 1$.", "x+1"),
  ):
    assert {math.given_answer(text) for text in texts.split("|")} == {vote}


def test_references_may_be_solutions_and_numbers():
  for answer in ("2+3=5\n#### 5", r"so \boxed{5}", 5, 5.0, "5"):
    assert math.math_answer("", "A: 5", {"answer": answer}) == 1.0
    assert math.math_answer("", "A: 6", {"answer": answer}) == 0.0


UNITS = [  # repeated in hostile texts
  *("\\boxed", "\\boxed{", "{", "}", "\\boxed{}", "\\frac", "\\frac{", "\\("),
  *("\\frac{\\frac{1", "9", "1,", "123,", "1 ", "1/", "-", "-9", "answer"),
  *("answer ", "answer is ", "answer: ", "answer is not ", "A:", "\nA: ", "$"),
  *("####", "#### ", "\n", " ", "(", "(,", "1e9", "1:1", "1.", "x=", "**", "½"),
  *("5 or ", "$5$, ", "5, 6, ", "\\boxed{5} or ", "\\text{", "\\text{5} "),
  *("\\", "1 and ", "apple ", "answer is \\(1", "answer is [1", "x "),
  *("answer (aaaaaaaaa", "10^9*", "a^1", "1 million ", "answer" + " x" * 18),
  *("<think>", "</think>", "<answer>", "```\n", "answer is:\n- ", "a/", "5 a "),
  *("5 red ", "\\text{ cm}", " cm", "x = ", "'", "\\textcolor{a}{", "1\\, "),
]


@pytest.mark.parametrize(
  "units", [UNITS[::9], pytest.param(UNITS, marks=pytest.mark.slow)]
)
def test_hostile_text_takes_no_time(units):
  """In quadratic time it would exceed the time limit of the workers."""
  texts = [UNITS[0] * 10**6]
  for unit in units:
    many = unit * (math.WINDOW // len(unit))
    few = unit * (450 // len(unit))
    texts += ["\\boxed{" + many, f"\\boxed{{{few}}}", f"#### {few}"]
    texts += ["answer is " + many, f"{many}5"]
  example = {"answer": "7777777"}
  with Pool(["math_answer"], workers=1, timeout=30) as pool:
    sent = pool.submit([[("", text, example)] for text in texts], 1)
    assert (pool.collect([sent]).rewards == 0.0).all()


def test_only_the_last_characters_are_read():
  assert math.given_answer("7" + " " * (math.WINDOW - 2)) == "7"
  assert math.given_answer("7" + " " * math.WINDOW) is None
