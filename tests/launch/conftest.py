"""Stand-ins for programs of clusters, found first on the PATH."""

import os
import pathlib
import subprocess
import sys
import time
import types

import pytest


def program(directory: pathlib.Path, name: str, text: str) -> None:
  """Writes an executable; the default interpreter is Python."""
  directory.mkdir(exist_ok=True)
  path = directory / name
  shebang = "" if text.startswith("#!") else f"#!{sys.executable} -S\n"
  path.write_text(shebang + text)
  path.chmod(0o755)


def environment(directory: pathlib.Path, **more: str) -> dict[str, str]:
  """Returns this process's environment, with a directory first on the PATH."""
  path = f"{directory}{os.pathsep}{os.environ['PATH']}"
  return os.environ | {"PATH": path} | more


def run(*command, **options) -> subprocess.CompletedProcess:
  """Runs a command for at most half a minute; input and output are text."""
  options |= {"text": True, "capture_output": True, "timeout": 30}
  return subprocess.run(list(map(str, command)), **options)


def wait_until(condition, seconds=20):
  limit = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < limit
    time.sleep(0.01)


@pytest.fixture(scope="session")
def stand_ins():
  return types.SimpleNamespace(
    program=program, environment=environment, run=run, wait_until=wait_until
  )
