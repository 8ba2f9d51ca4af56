"""A tokenizer tried in a process of its own: its files are of strangers.

A chat template is a program (in Jinja's sandbox, which keeps it from all but
time and memory), and a tokenizer.json can make a text as long as it likes. So
before either is used here, it sets and encodes small chats in a process whose
time and memory are limited. What goes wrong there but for these is said where
a prompt is set.

This file is that process's program, too, which imports nothing of grpojax.
"""

import functools
import json
import os
import resource
import subprocess
import sys
from typing import Any

SECONDS = 10
"""Seconds of a CPU that the trial may take."""

MEMORY = 2**32
"""Bytes of data that it may have."""

_LONGEST = 10**6  # characters of a small chat as text, and its tokens
_TOO_MUCH = 3  # exit code
_USER = {"role": "user", "content": "What is 1 + 1? Solve x = 2."}
_SYSTEM = {"role": "system", "content": "Answer."}
_ANSWER = {"role": "assistant", "content": "2"}
_CHATS = ([_USER], [_SYSTEM, _USER], [_USER, _ANSWER, _USER])


@functools.lru_cache(maxsize=64)
def check(template: str, file: str, state: tuple[int, ...]) -> None:
  """Refuses a tokenizer that takes too long or too much memory.

  Args:
    template: chat template; "" where there is none.
    file: path of a tokenizer.json, which may be missing.
    state: size and time of the file; a file that changes is tried anew.

  Raises:
    ValueError: it does.
  """
  del state
  request = {"template": template, "file": file, "limits": (SECONDS, MEMORY)}
  try:
    code = subprocess.run(
      # -P: modules are looked for where Python has them, nowhere else.
      [sys.executable, "-P", __file__],
      input=json.dumps(request).encode(),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
      start_new_session=True,  # Ctrl-C does not reach it
      timeout=10 * SECONDS,  # where others have the CPUs
    ).returncode
  except subprocess.TimeoutExpired:
    code = _TOO_MUCH
  if code < 0 or code == _TOO_MUCH:
    raise ValueError(
      "the chat template or the tokenizer.json does not come to an end with a "
      f"small chat within {SECONDS} s, {MEMORY // 2**30} GiB and {_LONGEST} "
      "characters: do not use this model, or replace these files"
    )


def _environment() -> Any:
  """Returns Jinja's environment of chat templates, as transformers has it."""
  from jinja2 import ext, sandbox

  class Generation(ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, ext.loopcontrols],
  )
  environment.filters["tojson"] = lambda value, **options: json.dumps(value)
  environment.globals["raise_exception"] = _raise
  environment.globals["strftime_now"] = str
  return environment


def _raise(message: str) -> None:
  raise ValueError(message)


def _try(text: str, encode: Any) -> None:
  if len(text) > _LONGEST or len(encode(text)) > _LONGEST:
    raise MemoryError


def main() -> None:
  """Tries what the standard input asks for; the exit code is the answer."""
  request = json.load(sys.stdin)
  seconds, memory = request["limits"]
  for limit, value in (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_DATA, memory),
  ):
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, hard))
  encode = str
  try:
    if os.path.isfile(request["file"]):
      import tokenizers

      backend = tokenizers.Tokenizer.from_file(request["file"])
      encode = lambda text: backend.encode(text).ids
    _try(_USER["content"], encode)
    template = _environment().from_string(request["template"])
  except MemoryError:
    sys.exit(_TOO_MUCH)
  except Exception:
    return
  for messages in _CHATS:
    for prompts in (True, False):
      try:
        text = template.render(messages=messages, add_generation_prompt=prompts)
        _try(text, encode)
      except MemoryError:
        sys.exit(_TOO_MUCH)
      except BaseException:  # also a panic of Rust
        pass


if __name__ == "__main__":
  main()
