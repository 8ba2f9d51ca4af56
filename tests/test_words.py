"""Habits of prose and code that a program can see, in every file of ours.

They are those of docs/development.md: docstrings that can be read alone, names
that say what a value is, and one word for one thing.
"""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "grpojax").rglob("*.py"))

QUESTION = re.compile(r"(What|Which|Where|How|Whether|Whose|Who|Why|When|If)\b")
# Names that say nothing of their value.
EMPTY = set(
  "found given said some todo how here told kept asked wanted".split()
)
# Words that had another name in this project, or several meanings.
FORMER = {
  "GroupScores": "GroupRewards",
  "scorer": "trainer (log-probabilities) or reward_pool",
  "sampler_logprobs": "rollout_logprobs",
  "monitored": "aux",
  "poll": "check_signals",
  "publish": "sync",
  "KEPT": "SAVED",
  "at_hand": "to_device",
  "put_away": "to_host",
  "hopeless": "stop_reason",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


@functools.cache
def tree(path):
  return ast.parse(path.read_text())


def places(path, nodes):
  return [f"{path.relative_to(ROOT)}:{getattr(n, 'lineno', 1)}" for n in nodes]


def by_file(test):
  ids = lambda path: str(path.relative_to(ROOT))
  return pytest.mark.parametrize("path", FILES, ids=ids)(test)


@by_file
def test_a_docstring_begins_with_a_verb_or_a_noun(path):
  questions = [
    node
    for node in ast.walk(tree(path))
    if isinstance(node, DOCUMENTED)
    and QUESTION.match(ast.get_docstring(node) or "")
  ]
  assert not places(path, questions)


@by_file
def test_a_name_says_what_its_value_is(path):
  empty = [
    node
    for node in ast.walk(tree(path))
    if (isinstance(node, ast.arg) and node.arg in EMPTY)
    or (
      isinstance(node, ast.Name)
      and isinstance(node.ctx, ast.Store)
      and node.id in EMPTY
    )
  ]
  assert not places(path, empty)


@by_file
def test_one_thing_has_one_word(path):
  former = [
    node
    for node in ast.walk(tree(path))
    for name in (
      getattr(node, "id", None),
      getattr(node, "arg", None),
      getattr(node, "name", None),
    )
    if name in FORMER
  ]
  assert not places(path, former), FORMER


@by_file
def test_no_tuple_is_made_to_be_unpacked_in_a_call(path):
  wrong = []
  for function in ast.walk(tree(path)):
    if not isinstance(function, ast.FunctionDef):
      continue
    tuples = {
      target.id
      for node in ast.walk(function)
      if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
      for target in node.targets
      if isinstance(target, ast.Name)
    }
    wrong += [
      node
      for node in ast.walk(function)
      if isinstance(node, ast.Call)
      for argument in node.args
      if isinstance(argument, ast.Starred)
      and isinstance(argument.value, ast.Name)
      and argument.value.id in tuples
    ]
  assert not places(path, wrong), "give them by name"


@by_file
def test_no_list_is_multiplied_by_a_truth(path):
  truths = (ast.Compare, ast.BoolOp)
  wrong = [
    node
    for node in ast.walk(tree(path))
    if isinstance(node, ast.BinOp)
    and isinstance(node.op, ast.Mult)
    and isinstance(node.left, (ast.List, ast.Tuple))
    and (
      isinstance(node.right, truths)
      or (
        isinstance(node.right, ast.Call)
        and getattr(node.right.func, "id", "") == "bool"
      )
      or (
        isinstance(node.right, ast.UnaryOp)
        and isinstance(node.right.op, (ast.Not, ast.Invert))
      )
    )
  ]
  assert not places(path, wrong)
