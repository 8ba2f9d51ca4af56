"""User reward functions, some of which misbehave."""

import ctypes
import os
import re
import sys
import threading
import time


class Unspeakable:
  def __str__(self):
    raise GeneratorExit


DEEDS = {
  "none": lambda: None,
  "text": lambda: "1.0",
  "leave": lambda: sys.exit("bye"),
  "sleep": lambda: time.sleep(600),
  # In C code that holds the interpreter's lock.
  "hang": lambda: re.fullmatch("(a*)*b", "a" * 60),
  "exit": lambda: os._exit(3),
  "crash": lambda: ctypes.string_at(0),
  "memory": lambda: len(bytearray(2**40)),
  "jax": lambda: float("jax" in sys.modules or "numpy" in sys.modules),
}


def behave(prompt, completion, example, *, scale=1.0):
  """Returns the completion as a number, or does what it says."""
  if completion in DEEDS:
    return DEEDS[completion]()
  if completion == "raise":
    raise RuntimeError("no idea\nreally")
  if completion == "base":
    raise GeneratorExit(Unspeakable())
  if completion == "loop":
    try:
      while True:
        pass
    except Exception:
      return 1.0
  if completion == "fork":  # the child keeps the pipes open
    if os.fork():
      os._exit(4)
    time.sleep(600)
  if completion == "pipes":
    print("[1.0, null]", flush=True)
    os.write(1, b"[1.0, null]\n")
    return float(len(sys.stdin.read()))
  if completion == "closes":
    sys.stdin.close()
    sys.stdout.close()
    sys.stderr.close()
    return 5.0
  if completion.startswith("later"):  # writes during the next job
    threading.Timer(0.05, lambda: print("[1.0, null]", flush=True)).start()
    return 6.0
  if completion.startswith("garbage"):
    for file in range(3, 64):
      try:
        os.write(file, b'[1.0, null]\n["x", 1.0, null]\n\xff\n{"half')
      except OSError:
        pass
    return float(completion[7:])
  if completion.startswith("twice"):  # a forked child returns too
    _, value, wait = completion.split()
    if not os.fork():
      time.sleep(float(wait))
      return -1.0
    return float(value)
  if completion.startswith("touch"):
    open(completion[6:], "w").close()
    return 1.0
  if completion.startswith("slow"):
    time.sleep(0.1)
    return float(completion[4:])
  return scale * float(completion)


def length_of_prompt(prompt, completion, example):
  return len(prompt) + example.get("bonus", 0)


def changes(prompt, completion, example):
  """Modifies its example."""
  example["seen"].append(completion)
  return len(example["seen"])


def changes_all(prompts, completions, seen, **kwargs):
  """Modifies its columns, in TRL's convention."""
  for column in seen:
    column.append(0)
  return [len(column) for column in seen]
