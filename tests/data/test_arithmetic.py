import numpy as np
import pytest

from grpojax.data import arithmetic, drawn
from grpojax.data.arithmetic import forgetful_sum

ALWAYS = (1.0, 1.0)
NEVER = (0.0, 0.0)


def test_examples_have_the_documented_form_and_value():
  examples = arithmetic.load("train", seed=3)
  operations = []
  for i in range(400):
    expression = examples[i]["prompt"]
    assert int(examples[i]["answer"]) == eval(expression)
    first, *rest = expression.split("+")
    first, _, factor = first.partition("*")
    assert not factor or 2 <= int(factor) <= 9
    assert all(10 <= int(number) <= 99 for number in [first, *rest])
    operations.append((len(rest) + bool(factor), bool(factor)))
  counts = np.bincount([count for count, _ in operations], minlength=5)
  assert counts[:2].sum() == 0 and len(counts) == 5
  assert counts[2:].min() > 90  # uniform: 133 each, 4.5 standard deviations
  products = sum(product for _, product in operations)
  assert 150 < products < 250  # five standard deviations around a half


def test_examples_do_not_depend_on_order_or_size():
  examples = arithmetic.load("train", seed=0)
  assert examples[0] == {"prompt": "88*9+59", "answer": "851"}
  assert examples[2**31 - 2] == {"prompt": "83+88+99+53+58", "answer": "381"}
  test = arithmetic.load("test", seed=0, size=10)
  assert test[0] == {"prompt": "79*6+48+98", "answer": "620"}
  backwards = [examples[i] for i in reversed(range(9))][::-1]
  again = arithmetic.load("train", seed=0, size=9)
  assert [again[np.int64(i)] for i in range(9)] == backwards


def test_solutions():
  assert arithmetic.solution("23*4+17+85") == (
    "20*4=80\n3*4=12\n80+12=92\n92+17=109\n109+85=194\n#### 194"
  )
  assert arithmetic.solution("20*4+5") == "20*4=80\n80+5=85\n#### 85"
  assert arithmetic.solution("10+20") == "10+20=30\n#### 30"
  assert arithmetic.hasty("23*4+17+85") == "#### 194"


def test_other_expressions_are_refused():
  for expression in ("", "1-2", "1+2*3", "2*3*4", "f()", "1+", "１+2"):
    with pytest.raises(ValueError, match="is not a sum"):
      arithmetic.solution(expression)


def test_a_document_has_a_single_author_and_training_problems():
  rng = np.random.default_rng(0)
  hasty_documents = 0
  sizes = set()
  for _ in range(300):
    problems = arithmetic.document(rng, hasty=0.3).split("\n\n")
    assert problems.pop() == ""
    sizes.add(len(problems))
    hasty = "\n####" in problems[0] and problems[0].count("\n") == 1
    author = arithmetic.hasty if hasty else arithmetic.solution
    for problem in problems:
      expression, text = problem.split("\n", 1)
      assert drawn.split_of(expression) == "train"
      assert text == author(expression)
    hasty_documents += hasty
  assert sizes == {1, 2, 3}
  assert 50 < hasty_documents < 130  # five standard deviations around 90


@pytest.mark.parametrize(
  "split, options, message",
  [
    *[
      ("train", {"difficulty": x}, "must be a whole number from 1 to 1000")
      for x in (0, (3, 2), (1, 2, 3), (2, 10**9))
    ],
    ("train", {"seed": -1}, "seed must not be negative"),
    ("train", {"size": 0}, "size = 0"),
    ("test", {"size": 100_001}, "eval.num_prompts = 100001: .*100000"),
  ],
)
def test_bad_arguments_are_refused(split, options, message):
  with pytest.raises(ValueError, match=message):
    arithmetic.load(split, **options)


# (a, b): the sum, and the result if all carries are forgotten.
BY_HAND = {
  (48, 37): (85, 75),
  (41, 37): (78, 78),
  (95, 7): (102, 92),
  (90, 20): (110, 110),  # the leftmost column is written in full
  (594, 66): (660, 550),  # the tens make 16 with the carry, 15 without
  (9, 995): (1004, 994),
}


def test_all_carries_or_none_are_forgotten():
  rng = np.random.default_rng(0)
  for (a, b), (right, wrong) in BY_HAND.items():
    assert forgetful_sum(rng, a, b, NEVER) == right
    assert forgetful_sum(rng, a, b, ALWAYS) == wrong
    assert forgetful_sum(rng, b, a, ALWAYS) == wrong


@pytest.mark.parametrize(
  "a, b, rate", [(15, 15, 0.2), (19, 19, 0.2 + 0.6 * 8 / 9)]
)
def test_the_rate_of_forgetting_is_linear_in_the_column_sum(a, b, rate):
  """Column sums of 10 and 18."""
  rng = np.random.default_rng(0)
  n = 2000
  wrong = sum(forgetful_sum(rng, a, b, (0.2, 0.8)) != a + b for _ in range(n))
  assert abs(wrong / n - rate) < 4 * np.sqrt(rate * (1 - rate) / n)


def test_authors_continue_from_their_own_results():
  rng = np.random.default_rng(0)
  mistakes = set()
  for _ in range(50):
    prompt, text = arithmetic.dialogue(rng, hasty=0.0, forget=ALWAYS)
    assert prompt.startswith("Q: ") and prompt.endswith("\nA: ")
    *lines, last = text.split("\n")
    result = ""
    for line in lines:
      left, result = line.split("=")
      if "+" in left:
        a, b = map(int, left.split("+"))
        assert int(result) == forgetful_sum(rng, a, b, ALWAYS)
    assert last == f"#### {result}"
    mistakes.add(text != arithmetic.solution(prompt[3:-4]))
  assert mistakes == {True, False}  # some problems need no carry
