"""Habits of prose and code that a program can see, in every file of ours.

They are those of docs/development.md: docstrings that can be read alone, names
that say what a value is, and one word for one thing.
"""

import ast
import functools
import pathlib
import re

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


def places(find):
  """Where `find(tree)` finds nodes, in all files."""
  return [
    f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
    for path in FILES
    for node in find(tree(path))
  ]


def test_a_docstring_begins_with_a_verb_or_a_noun():
  def questions(module):
    for node in ast.walk(module):
      if isinstance(node, DOCUMENTED):
        if QUESTION.match(ast.get_docstring(node) or ""):
          yield node

  assert not places(questions)


def _names(module):
  """Names that are given to values, with their nodes."""
  for node in ast.walk(module):
    if isinstance(node, ast.arg):
      yield node.arg, node
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      yield node.id, node
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
      yield node.name, node


def test_a_name_says_what_its_value_is():
  assert not places(lambda m: [x for name, x in _names(m) if name in EMPTY])


def test_one_thing_has_one_word():
  former = lambda m: [x for name, x in _names(m) if name in FORMER]
  assert not places(former), FORMER


def test_no_tuple_is_made_to_be_unpacked_in_a_call():
  def unpacked(module):
    for function in ast.walk(module):
      if not isinstance(function, ast.FunctionDef):
        continue
      tuples = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
      }
      for node in ast.walk(function):
        for argument in node.args if isinstance(node, ast.Call) else ():
          starred = isinstance(argument, ast.Starred)
          if starred and getattr(argument.value, "id", None) in tuples:
            yield node

  assert not places(unpacked), "give them by name"


def test_no_list_is_multiplied_by_a_truth():
  def is_truth(node):
    called = getattr(getattr(node, "func", None), "id", None)
    negated = isinstance(getattr(node, "op", None), (ast.Not, ast.Invert))
    return isinstance(node, (ast.Compare, ast.BoolOp)) or (
      called == "bool" or negated
    )

  def multiplied(module):
    for node in ast.walk(module):
      if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        if isinstance(node.left, (ast.List, ast.Tuple)):
          if is_truth(node.right):
            yield node

  assert not places(multiplied)
