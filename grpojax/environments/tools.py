"""Tools that a model calls in its turns: read, run, answered in words.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    llama3   {"name": "add", "parameters": {"a": 1}}; ...
    mistral  [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
             [TOOL_CALLS]add[ARGS]{"a": 1}

Nothing of a model's text is ever evaluated. What is wrong with a call, or a
tool raises, is told to the model in the tool's message.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.environments.protocol import Step
from grpojax.rewards.conventions import nearest
from grpojax.runtime.processes import user_calls
from grpojax.runtime.processes.user_calls import WrongAnswer


class Call(NamedTuple):
  """A call of a tool."""

  name: str
  arguments: dict[str, Any]


def _calls(text: str, key: str = "arguments") -> list[Call | str]:
  """Calls of the JSON of one or of a list, or what is wrong with it."""
  try:
    values, calls = json.loads(text), []
    for value in values if isinstance(values, list) else [values]:
      arguments = value.get(key, {})
      if isinstance(arguments, str):  # JSON in JSON, as OpenAI has it
        arguments = json.loads(arguments)
      if not isinstance(arguments, dict) or not isinstance(value["name"], str):
        raise TypeError
      calls.append(Call(value["name"], arguments))
    return calls
  except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
    return [f'a call is {{"name": ..., "{key}": {{...}}}} in JSON']


def hermes(text: str) -> list[Call | str]:
  """Reads calls of Qwen's and Hermes' models; the last tag may be missing."""
  pieces = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)
  return [call for piece in pieces for call in _calls(piece)]


def llama3(text: str) -> list[Call | str]:
  """Reads calls of Llama 3's models: a turn that is nothing else."""
  text, tag = text.strip(), "<|python_tag|>"
  if not text.startswith(tag) and not re.match(r'\{\s*"name"', text):
    return []
  pieces = re.split(r';\s*(?=\{\s*"name")', text.removeprefix(tag))
  return [call for piece in pieces for call in _calls(piece, "parameters")]


def mistral(text: str) -> list[Call | str]:
  """Reads calls of Mistral's models, of both their forms."""
  calls = []
  for piece in text.split("[TOOL_CALLS]")[1:]:
    name, tag, arguments = piece.partition("[ARGS]")
    if tag:
      name = json.dumps(name.strip())
      piece = f'{{"name": {name}, "arguments": {arguments}}}'
    calls += _calls(piece)
  return calls


TOOL_CALLS = {"hermes": hermes, "llama3": llama3, "mistral": mistral}
"""Readers of a turn's text: its calls in order, each a Call or what is wrong
with it, in words. No calls are an empty list."""


def schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
  """Returns JSON schemas for chat templates; ValueError where one has none."""
  # Loads no JAX, but takes a second: workers do without it.
  from grpojax.runtime.text.tokenizer import import_transformers

  get_json_schema = import_transformers().utils.get_json_schema

  try:
    return [get_json_schema(function) for function in functions]
  except Exception as error:
    raise ValueError(
      f"tools: {error} (write type hints, and all arguments below `Args:`)"
    ) from error


def answer(
  calls: Sequence[Call | str], functions: Mapping[str, Callable[..., Any]]
) -> Step:
  """Runs the calls of a turn in order; without any, the episode has ended."""
  if not calls:
    return Step(done=True)
  messages, errors = [], 0
  for call in calls:
    name = call.name if isinstance(call, Call) else "tool_call"
    run = functools.partial(_run, call, functions)
    content, error = user_calls.call(run, user_calls.message)
    if error is not None:
      errors += 1
      content = f"error: {error}"
    messages.append({"role": "tool", "name": name, "content": content})
  info = {"tool_calls": len(messages), "tool_errors": errors}
  return Step(messages, info=info)


def _run(call: Call | str, functions: Mapping[str, Callable[..., Any]]) -> str:
  if isinstance(call, str):
    raise WrongAnswer(call)
  if call.name not in functions:
    hint = nearest(call.name, list(functions))
    raise WrongAnswer(f"there is no tool {call.name!r:.80}{hint}")
  function = functions[call.name]
  try:
    inspect.signature(function).bind(**call.arguments)
  except TypeError as error:
    raise WrongAnswer(f"the arguments do not fit: {error}") from error
  return str(function(**call.arguments))
