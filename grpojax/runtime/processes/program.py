"""Start of a program: what could end it from outside, before it has begun.

The package calls `begin` where Python runs one of its programs, before that
imports anything. So nothing is imported here but Python's own modules.
"""

import io
import os
import select
import signal
import sys
import types
from typing import Any

from grpojax.runtime.processes import interrupts


class _Output(io.FileIO):
  """Standard output or error: where it cannot be written, it goes nowhere.

  Its reader may have gone away (`| head`), or its disk be full.
  """

  def write(self, data: Any) -> int:
    try:
      while (written := super().write(data)) is None:
        # Some other program has left the terminal so that it does not block.
        select.select([], [self], [])
      return written
    except OSError as error:
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, self.fileno())
      os.close(nowhere)
      if self.fileno() == 1:
        reason = f"cannot be written ({error.strerror}): going on without it"
        print(f"the standard output {reason}", file=sys.stderr)
      return memoryview(data).nbytes


class _Buffer(io.BufferedWriter):
  """Buffer of an output that stays open.

  User code may wrap `sys.stdout.buffer` anew, and the wrapper that it replaces
  closes its buffer when it is collected.
  """

  def close(self) -> None:
    self.flush()


def _open_outputs() -> None:
  """Opens the standard streams so that no line that is printed ends a program.

  Characters that an output cannot encode are escaped. Streams that were closed
  lead nowhere: the next file would get their numbers, and their lines.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
  sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)
  for number, name in ((1, "stdout"), (2, "stderr")):
    file = _Buffer(_Output(number, "w", closefd=False))
    encoding = getattr(getattr(sys, name), "encoding", "utf-8")
    text = io.TextIOWrapper(
      file, encoding, "backslashreplace", line_buffering=True
    )
    setattr(sys, name, text)
    setattr(sys, f"__{name}__", text)


def _is_at_work(frame: types.FrameType | None) -> bool:
  """Returns True in the `main` of a program, False while that is imported."""
  while frame:
    file = os.path.basename(frame.f_code.co_filename)
    # That of __main__.py imports a program before it calls its main.
    if frame.f_code.co_name == "main" and file != "__main__.py":
      return True
    frame = frame.f_back
  return False


def _on_ctrl_c(number: int, frame: types.FrameType | None) -> None:
  """Ends a program that is still being imported; raises KeyboardInterrupt.

  Modules in C crash, or raise something else, where one comes in their import.
  """
  if not _is_at_work(frame):
    print("interrupted", file=sys.stderr)
    interrupts.end(interrupts.INTERRUPTED)
  raise KeyboardInterrupt


def show_error(kind: type, error: BaseException, traceback: Any) -> None:
  """Shows how a program ends: by Ctrl-C in a word, else as Python does it."""
  if not issubclass(kind, KeyboardInterrupt):
    return sys.__excepthook__(kind, error, traceback)
  print("interrupted", file=sys.stderr)
  interrupts.end(interrupts.INTERRUPTED)


def _show_ignored(ignored: Any) -> None:
  """Shows exceptions that Python ignores, but those of a load that is over.

  Where a checkpoint is damaged, TensorStore's threads and Orbax's tasks come to
  their end after the error that is said.
  """
  text = f"{ignored.object} {ignored.exc_value}"
  if "Event loop is closed" not in text and "_read_array" not in text:
    sys.__unraisablehook__(ignored)


def begin() -> None:
  """Makes this process one of our programs."""
  _open_outputs()
  sys.excepthook, sys.unraisablehook = show_error, _show_ignored
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _on_ctrl_c)
