"""Reads and runs the tool calls in a model's turns, in three formats.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    llama3   {"name": "add", "parameters": {"a": 1}}; ...
    mistral  [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
             [TOOL_CALLS]add[ARGS]{"a": 1}

The model's text is never evaluated. If a call is invalid or a tool fails, the
model reads the error as the tool's message.
"""

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from grpojax.environments.protocol import Step
from grpojax.runtime.processes import user_calls
from grpojax.runtime.processes.user_calls import WrongAnswer, nearest


class Call(NamedTuple):
  """A tool call."""

  name: str
  arguments: dict[str, Any]


def _calls(text: str, key: str = "arguments") -> list[Call | str]:
  """Parses a call or list of calls; [error message] if the JSON is invalid."""
  try:
    values = json.loads(text)
    calls = []
    for value in values if isinstance(values, list) else [values]:
      arguments = value.get(key, {})
      if isinstance(arguments, str):  # OpenAI writes JSON in a string
        arguments = json.loads(arguments)
      if not isinstance(arguments, dict) or not isinstance(value["name"], str):
        raise TypeError
      calls.append(Call(value["name"], arguments))
    return calls
  except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
    return [f'a call must be JSON: {{"name": ..., "{key}": {{...}}}}']


def _without_thinking(text: str) -> str:
  """Removes <think>...</think> from a turn's text; a tag may be missing."""
  text = re.sub(r"<think>.*?(</think>|\Z)", "", text, flags=re.DOTALL)
  return text.rpartition("</think>")[2]


def hermes(text: str) -> list[Call | str]:
  """Reads calls of Qwen and Hermes models; </tool_call> may be missing."""
  text = _without_thinking(text)
  pieces = re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)
  return [call for piece in pieces for call in _calls(piece)]


def llama3(text: str) -> list[Call | str]:
  """Reads calls of Llama 3 models, from a turn that begins with a call."""
  text = _without_thinking(text).strip()
  tag = "<|python_tag|>"
  if not text.startswith(tag) and not re.match(r'\{\s*"name"', text):
    return []
  pieces = re.split(r';\s*(?=\{\s*"name")', text.removeprefix(tag))
  return [call for piece in pieces for call in _calls(piece, "parameters")]


def mistral(text: str) -> list[Call | str]:
  """Reads calls of Mistral models: JSON lists, or NAME[ARGS] and JSON."""
  calls = []
  for piece in _without_thinking(text).split("[TOOL_CALLS]")[1:]:
    name, tag, arguments = piece.partition("[ARGS]")
    if tag:
      name = json.dumps(name.strip())
      piece = f'{{"name": {name}, "arguments": {arguments}}}'
    calls += _calls(piece)
  return calls


_MADE_UP = {"integer": 1, "number": 1.0, "boolean": True, "array": []}


def made_up(schema: Mapping[str, Any], tool_format: str) -> str:
  """Returns a turn that calls a tool with made-up arguments of valid types."""
  function = schema["function"]
  arguments = {}
  parameters = function["parameters"]
  for name in parameters.get("required", ()):
    about = parameters["properties"][name]
    kind = about.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    arguments[name] = about.get("enum", [_MADE_UP.get(kind, "1")])[0]
  key = "parameters" if tool_format == "llama3" else "arguments"
  call = json.dumps({"name": function["name"], key: arguments})
  marks = {"hermes": ("<tool_call>", "</tool_call>"), "llama3": ("", "")}
  before, after = marks.get(tool_format, ("[TOOL_CALLS] [", "]"))
  return before + call + after


TOOL_CALLS = {"hermes": hermes, "llama3": llama3, "mistral": mistral}
"""Functions that read a turn's calls, with error messages for invalid ones."""

# Maximum characters of all results of a turn. With up to 6 bytes per character
# in JSON they fit into an observation.
_LONGEST = 2**17


def schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
  """Returns JSON schemas of tools; ValueError if one lacks documentation."""
  # The import takes a second, and workers do not need transformers.
  from grpojax.runtime.text.tokenization import import_transformers

  get_json_schema = import_transformers().utils.get_json_schema

  try:
    return [get_json_schema(function) for function in functions]
  except Exception as error:
    raise ValueError(
      f"tools: {error} (add type hints, and list all arguments under `Args:`)"
    ) from error


def answer(
  calls: Sequence[Call | str], functions: Mapping[str, Callable[..., Any]]
) -> Step:
  """Runs a turn's calls in order; a turn without calls ends the episode."""
  if not calls:
    return Step(done=True)
  messages = []
  errors = 0
  longest = _LONGEST // len(calls)
  for call in calls:
    name = call.name if isinstance(call, Call) else "tool_call"
    run = functools.partial(_run, call, functions)
    text, error = user_calls.call(run, user_calls.message)
    if error is not None:
      errors += 1
      text = f"error: {error}"
    if isinstance(text, type):
      raise WrongAnswer(
        f"called the tool {name!r}, whose result of type {text.__name__} has a"
        " different text in each process: return text, a number, or a list or"
        " dict of them"
      )
    messages.append({"role": "tool", "name": name, "content": text[:longest]})
  info = {"tool_calls": len(messages), "tool_errors": errors}
  return Step(messages, info=info)


def has_text(value: Any) -> bool:
  """Returns True if a value has the same text in every process."""
  if isinstance(value, Mapping):
    return all(map(has_text, [*value, *value.values()]))
  if isinstance(value, list | tuple):
    return all(map(has_text, value))
  if isinstance(value, set | frozenset):
    return False  # the order depends on the process
  return isinstance(value, str) or " at 0x" not in str(value)


_event_loop = functools.cache(asyncio.Runner)


def awaited(value: Any) -> Any:
  """Awaits coroutines (on one event loop, as in TRL); returns other values."""
  return _event_loop().run(value) if inspect.iscoroutine(value) else value


def _run(
  call: Call | str, functions: Mapping[str, Callable[..., Any]]
) -> str | type:
  """Runs a tool; returns the result's text, or its type if processes differ."""
  if isinstance(call, str):
    raise WrongAnswer(call)
  if call.name not in functions:
    hint = nearest(call.name, list(functions))
    raise WrongAnswer(f"there is no tool {call.name!r:.80}{hint}")
  function = functions[call.name]
  try:
    inspect.signature(function).bind(**call.arguments)
  except TypeError as error:
    raise WrongAnswer(f"wrong arguments: {error}") from error
  result = awaited(function(**call.arguments))
  return str(result) if has_text(result) else type(result)
