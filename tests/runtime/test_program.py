"""Start of a program: outputs, locale, Ctrl-C."""

import os
import subprocess
import sys

import pytest

BEGIN = "from grpojax.runtime.processes import interrupts; interrupts.begin()\n"


def start(code, shell="exec", **environment):
  """Starts Python as one of our programs is."""
  return subprocess.Popen(
    ["sh", "-c", f'{shell} "$@"', "sh", sys.executable, "-c", BEGIN + code],
    env=os.environ | environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize("both", [False, True])
def test_a_reader_that_goes_away_does_not_end_the_program(both, tmp_path):
  lines = [
    "import pathlib, sys",
    "for step in range(5):",
    "  print('step', step)",
    "  print('so', step, file=sys.stderr)",
    "  sys.stdin.readline()",
    f"pathlib.Path({str(tmp_path / 'done')!r}).touch()",
  ]
  process = start("\n".join(lines))
  assert process.stdout.readline() == "step 0\n"
  assert process.stderr.readline() == "so 0\n"
  process.stdout.close()
  if both:
    process.stderr.close()
  process.stdin.write("\n" * 5)
  process.stdin.close()
  assert process.wait(60) == 0 and (tmp_path / "done").exists()
  if not both:
    said = process.stderr.read().splitlines()
    assert said[0].startswith("the standard output cannot be written (Broken")
    assert said[1:] == [f"so {step}" for step in range(1, 5)]


def test_closed_streams_lead_nowhere(tmp_path):
  lines = [
    "import os, sys",
    f"with open({str(tmp_path / 'file')!r}, 'w') as file:",
    "  print('out')",
    "  print('error', file=sys.stderr)",
    "  os.write(1, b'from C'), os.write(2, b'from C')",
    "  assert file.fileno() > 2 and not sys.stdin.read()",
  ]
  process = start("\n".join(lines), "exec <&- >&- 2>&-; exec")
  assert process.wait(60) == 0 and (tmp_path / "file").read_text() == ""


def test_user_code_may_wrap_close_and_restore_the_outputs():
  lines = [
    "import gc, io, sys",
    "names = ('stdout', 'stderr')",
    "for name in names * 2:  # as two files of a user may do it",
    "  buffer = getattr(sys, name).buffer",
    "  setattr(sys, name, io.TextIOWrapper(buffer, encoding='utf-8'))",
    "gc.collect()",
    "print('out', flush=True)",
    "print('error', file=sys.stderr, flush=True)",
    "sys.stdout.close()",
    "print('still', flush=True)",
    "for name in names:",
    "  setattr(sys, name, getattr(sys, f'__{name}__'))",
    "print('restored \\udcff \\u20ac')",  # which an output cannot show
    "print('restored', file=sys.stderr)",
  ]
  process = start("\n".join(lines), PYTHONIOENCODING="ascii")
  output, error = process.communicate(timeout=60)
  assert output == "out\nstill\nrestored \\udcff \\u20ac\n"
  assert error == "error\nrestored\n"


@pytest.mark.parametrize("name, said", [("main", "put away\n"), ("_load", "")])
def test_ctrl_c_ends_a_program_at_once_until_it_works(name, said, ctrl_c):
  lines = [
    "import os, signal",
    f"def {name}():",
    "  try:",
    "    os.kill(os.getpid(), signal.SIGINT)",
    "  finally:",
    "    print('put away')",
    f"{name}()",
  ]
  process = start("\n".join(lines))
  assert process.communicate(timeout=60) == (said, "interrupted\n")
  assert process.returncode == 130
