"""Trial of a stranger's tokenizer in a process with limited time and memory.

A chat template is a program (Jinja's sandbox limits neither time nor memory),
and a tokenizer.json can make texts longer. So both are tried on small chats in
a process: this file, which imports nothing of grpojax.
"""

import functools
import itertools
import json
import os
import resource
import subprocess
import sys
from typing import Any

SECONDS = 10  # of a CPU
MEMORY = 2**32  # bytes of data
_LONGEST = 10**6  # characters of a small chat as text, and its tokens
_TOO_MUCH = 3  # exit code
_TEXTS = {"system": "Add.", "user": "1 + 1? Solve x = 2.", "assistant": "2"}
_CHATS = (["user"], ["system", "user"], ["user", "assistant", "user"])


@functools.lru_cache(maxsize=64)
def check(template: str, file: str, changed: int) -> None:
  """Raises ValueError for a chat template or a tokenizer.json without end.

  Either may be missing. A file is tried again when the time `changed` differs.
  """
  del changed
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
      f"{file}, or its chat template, does not come to an end with a small "
      f"chat in {SECONDS} s, {MEMORY / 2**30:g} GiB and {_LONGEST} characters: "
      "do not use this model, or replace these files"
    )


def _environment() -> Any:
  # As that of transformers.
  from jinja2 import ext, sandbox

  class Generation(ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  def refuse(message):
    raise ValueError(message)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, ext.loopcontrols],
  )
  environment.filters["tojson"] = lambda value, **options: json.dumps(value)
  environment.globals |= {"raise_exception": refuse, "strftime_now": str}
  return environment


def main() -> None:
  """Answers the request on the standard input by the exit code."""
  request = json.load(sys.stdin)
  seconds, memory = request["limits"]
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  for limit, value in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_DATA, memory),
  ):
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
  encode = str
  if os.path.isfile(request["file"]):
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(request["file"])
    encode = lambda text: backend.encode(text).ids
  template = _environment().from_string(request["template"])
  for roles, prompts in itertools.product(_CHATS, (True, False)):
    messages = [{"role": role, "content": _TEXTS[role]} for role in roles]
    try:
      text = template.render(messages=messages, add_generation_prompt=prompts)
      if max(map(len, (text, encode(text), encode("1 + 1")))) > _LONGEST:
        raise MemoryError
    except MemoryError:
      sys.exit(_TOO_MUCH)
    except BaseException:  # a template's error, or a panic of Rust
      continue


if __name__ == "__main__":
  main()
