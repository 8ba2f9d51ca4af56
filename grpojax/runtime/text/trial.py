"""Trial of an untrusted tokenizer in a process with limited time and memory.

A chat template is a program (Jinja's sandbox limits neither time nor memory),
and a tokenizer.json can lengthen texts. So this file runs as a process, which
tries both on small chats. It imports no other module of grpojax.
"""

import functools
import itertools
import json
import os
import resource
import subprocess
import sys
from typing import Any

SECONDS = 10  # limit of CPU time
MEMORY = 2**32  # limit of the process's data, in bytes
_LONGEST = 10**6  # limit of characters or tokens in a small chat
_TOO_MUCH = 3  # exit code beyond a limit
_TEXTS = {"system": "Add.", "user": "1 + 1? Solve x = 2.", "assistant": "2"}
_CHATS = (["user"], ["system", "user"], ["user", "assistant", "user"])


@functools.lru_cache(maxsize=64)
def check(template: str, file: str, changed: int) -> None:
  """Raises ValueError if a chat template or tokenizer.json exceeds the limits.

  The template may be empty, and `file` (tokenizer.json) missing. `changed` is
  the file's modification time, so that a changed file is tried again.
  """
  del changed
  request = {"template": template, "file": file, "limits": (SECONDS, MEMORY)}
  try:
    code = subprocess.run(
      # -P: imports installed modules only.
      [sys.executable, "-P", __file__],
      input=json.dumps(request).encode(),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
      start_new_session=True,  # out of reach of Ctrl-C
      timeout=10 * SECONDS,  # longer, for busy machines
    ).returncode
  except subprocess.TimeoutExpired:
    code = _TOO_MUCH
  if code < 0 or code == _TOO_MUCH:
    raise ValueError(
      f"{file}, or its chat template, does not finish a small chat "
      f"within {SECONDS} s, {MEMORY / 2**30:g} GiB and {_LONGEST} characters: "
      "use another model, or replace these files"
    )


def _environment() -> Any:
  # Has the tags, filters and functions of transformers' environment.
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
  """Reads a request from standard input; its result is the exit code."""
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
    except BaseException:  # a template's error, or a panic in Rust
      continue


if __name__ == "__main__":
  main()
