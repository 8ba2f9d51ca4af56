import ast
import pickle
import subprocess
import sys

import numpy as np
import pytest

from grpojax.data import arithmetic
from grpojax.data.examples import SPLITS


def value(expression):
  """An independent evaluator: Python's own parser, on sums and products."""

  def visit(node):
    if isinstance(node, ast.Constant):
      return node.value
    left, right = visit(node.left), visit(node.right)
    return left * right if isinstance(node.op, ast.Mult) else left + right

  return visit(ast.parse(expression, mode="eval").body)


def test_examples_are_sums_of_the_documented_form():
  examples = arithmetic.load("train", seed=3)
  expressions = [examples[i]["prompt"] for i in range(400)]
  products = 0
  operations = []
  for expression in expressions:
    first, *rest = expression.split("+")
    if "*" in first:
      products += 1
      first, factor = first.split("*")
      assert 2 <= int(factor) <= 9
    for number in [first, *rest]:
      assert 10 <= int(number) <= 99
    operations.append(expression.count("+") + expression.count("*"))
  assert 150 < products < 250  # five standard deviations around a half
  counts = np.bincount(operations, minlength=5)
  assert counts[:2].sum() == 0 and len(counts) == 5
  assert counts[2:].min() > 90  # uniform: 133 each, 4.5 standard deviations


def test_answers_are_the_values():
  for split in SPLITS:
    examples = arithmetic.load(split, difficulty=(1, 6), size=100)
    for i in range(len(examples)):
      example = examples[i]
      assert int(example["answer"]) == value(example["prompt"])


def test_splits_are_disjoint_for_small_problems_and_any_seed():
  seen = {}
  for split in SPLITS:
    seen[split] = set()
    for seed in range(3):
      examples = arithmetic.load(split, seed=seed, difficulty=1)
      seen[split] |= {examples[i]["prompt"] for i in range(700)}
  assert not seen["train"] & seen["test"]
  # 2100 draws of products meet most of the 720, a tenth of which is held out.
  held_out = [e for e in seen["test"] if "*" in e]
  trained = [e for e in seen["train"] if "*" in e]
  assert 50 < len(held_out) < 100
  assert len(trained) > 4 * len(held_out)


def test_known_examples():
  # Golden: another machine, process or library version must draw these.
  examples = arithmetic.load("train", seed=0)
  assert examples[0] == {"prompt": "88*9+59", "answer": "851"}
  assert examples[2**31 - 2] == {"prompt": "83+88+99+53+58", "answer": "381"}
  test = arithmetic.load("test", seed=0, size=10)
  assert test[0] == {"prompt": "79*6+48+98", "answer": "620"}


def test_examples_do_not_depend_on_process_order_or_size():
  code = (
    "from grpojax.data import arithmetic as a;"
    "e = a.load('train', seed=5, size=9); print([e[i] for i in range(9)])"
  )
  other = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  examples = arithmetic.load("train", seed=5)
  backwards = [examples[i] for i in reversed(range(9))][::-1]
  assert other.stdout.strip() == str(backwards)
  again = pickle.loads(pickle.dumps(examples))
  assert [again[np.int64(i)] for i in range(9)] == backwards


def test_seeds_splits_and_indices_differ():
  draws = [
    arithmetic.load(split, seed=seed, difficulty=4)[i]["prompt"]
    for split in SPLITS
    for seed in (0, 1, 2**32)
    for i in range(20)
  ]
  assert len(set(draws)) == len(draws)


def test_length_and_bounds():
  assert len(arithmetic.load("train")) == 2**31 - 1
  examples = arithmetic.load("test", size=2)
  assert len(examples) == 2
  assert len(list(examples)) == 2  # the old iteration protocol stops
  for index in (2, -1):
    with pytest.raises(IndexError, match="of 2"):
      examples[index]


def test_solutions():
  assert arithmetic.solution("23*4+17+85") == (
    "20*4=80\n3*4=12\n80+12=92\n92+17=109\n109+85=194\n#### 194"
  )
  assert arithmetic.solution("20*4+5") == "20*4=80\n80+5=85\n#### 85"
  assert arithmetic.solution("10+20") == "10+20=30\n#### 30"
  assert arithmetic.hasty("23*4+17+85") == "#### 194"


@pytest.mark.parametrize(
  "expression", ["", "1-2", "1+2*3", "2*3*4", "__import__('os')", "1+", "１+2"]
)
def test_other_expressions_are_refused(expression):
  with pytest.raises(ValueError, match="is not a sum"):
    arithmetic.solution(expression)


def test_a_document_has_one_author_and_training_problems():
  rng = np.random.default_rng(0)
  hasty_documents = 0
  lengths = set()
  for _ in range(300):
    document = arithmetic.document(rng, hasty=0.3)
    assert document.endswith("\n\n")
    problems = document[:-2].split("\n\n")
    lengths.add(len(problems))
    authors = set()
    for problem in problems:
      expression, text = problem.split("\n", 1)
      assert arithmetic.split_of(expression) == "train"
      authors.add(text.startswith("####"))
      expected = arithmetic.hasty if True in authors else arithmetic.solution
      assert text == expected(expression)
    assert len(authors) == 1
    hasty_documents += authors.pop()
  assert lengths == {1, 2, 3, 4}
  assert 50 < hasty_documents < 130  # five standard deviations around 90


def test_a_dialogue_asks_and_answers():
  rng = np.random.default_rng(0)
  for probability, author in (
    (0.0, arithmetic.solution),
    (1.0, arithmetic.hasty),
  ):
    prompt, completion = arithmetic.dialogue(
      rng, hasty=probability, difficulty=3
    )
    assert prompt.startswith("Q: ") and prompt.endswith("\nA: ")
    assert completion == author(prompt[3:-4])


@pytest.mark.parametrize(
  "difficulty", [0, (3, 2), (0, 2), (1, 2, 3), 10**9, (2, 10**9)]
)
def test_bad_difficulty_is_refused(difficulty):
  with pytest.raises(ValueError, match="difficulty is a number of operations"):
    arithmetic.load("train", difficulty=difficulty)


def test_other_bad_arguments_are_refused():
  with pytest.raises(ValueError, match="unknown split 'valid'.*train.*test"):
    arithmetic.load("valid")
  with pytest.raises(ValueError, match="seed must not be negative"):
    arithmetic.load("train", seed=-1)
  with pytest.raises(ValueError, match="size = 0"):
    arithmetic.load("train", size=0)


def test_held_out_problems_are_not_endless():
  """All of them are encoded before a run."""
  assert len(arithmetic.load("train")) == arithmetic.ENDLESS
  assert len(arithmetic.load("test", size=100_000)) == 100_000
  for size in (100_001, 10**9, arithmetic.ENDLESS):
    with pytest.raises(
      ValueError, match=f"eval.num_prompts = {size}: .*100000"
    ):
      arithmetic.load("test", size=size)
  with pytest.raises(ValueError, match="probability"):
    arithmetic.document(np.random.default_rng(0), hasty=1.5)
