"""Compilations: said, timed, and kept."""

import fcntl
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from grpojax.runtime import compilation


def test_long_programs_are_said_and_all_are_timed():
  def update(x):
    return x + 1

  lines, seconds = [], compilation.seconds()
  with compilation.announced(lines.append):
    before = len(seconds)
    jax.jit(update)(jnp.ones(3))
    jax.jit(lambda x: x * 3)(jnp.ones(5))  # no program of a step
  jax.jit(update)(jnp.ones(4))
  assert lines == ["compiling update"]
  assert len(seconds) >= before + 3 and min(seconds) >= 0


def kept(tmp_path, **environment):
  """The directory of compiled programs of a fresh process, and its warnings.

  It compiles two programs. The directory is relative to `tmp_path`.
  """
  names = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
  clean = {k: v for k, v in os.environ.items() if k not in names}
  program = (
    "import jax; from grpojax.runtime import compilation; compilation.keep();"
    "print(jax.config.jax_compilation_cache_dir);"
    "print(jax.jit(lambda x: x + 1)(1) + jax.jit(lambda x: x * 3)(2))"
  )
  clean["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  done = subprocess.run(
    [sys.executable, "-c", program],
    env=clean | {"HOME": str(tmp_path)} | environment,
    capture_output=True,
    text=True,
    check=True,
  )
  path, result = done.stdout.split()
  assert result == "8"
  return path.removeprefix(f"{tmp_path}/"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
  "environment, expected",
  [
    ({}, ".cache/grpojax/xla/"),
    ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, "None"),
    ({"JAX_COMPILATION_CACHE_DIR": "/tmp"}, "/tmp"),
  ],
)
def test_programs_are_kept_unless_one_says_no(environment, expected, tmp_path):
  path, said = kept(tmp_path, **environment)
  assert path.startswith(expected) and not said


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME"]
)
def test_a_directory_that_cannot_be_made_is_one_line(name, tmp_path):
  (tmp_path / "file").touch()
  _, said = kept(tmp_path, **{name: str(tmp_path / "file")})
  assert said.startswith("warning: compiled programs in ")
  assert said.endswith("COMPILATION_CACHE_DIR to another\n")
  assert said.count("\n") == 1


@pytest.mark.slow
def test_damaged_and_locked_programs_are_one_line_and_others_are_kept(tmp_path):
  path = tmp_path / kept(tmp_path)[0]
  first, *others = sorted(path.glob("*-cache"))
  assert others
  for file in path.iterdir():
    os.truncate(file, file.stat().st_size // 2)
  _, said = kept(tmp_path)  # each of them
  assert said.startswith("warning: ") and said.count("\n") == 1
  first.unlink()
  for file in path.glob("*-atime"):  # as a kill leaves them
    file.unlink()
  with open(path / ".lockfile", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    _, said = kept(tmp_path)
  assert "could not be acquired" not in said
  assert first.exists()


def test_a_start_leaves_what_was_used_last(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setattr(compilation, "MOST_BYTES", 25)
  values = {"jax_compilation_cache_dir": None}
  config = types.SimpleNamespace(**values, jax_enable_compilation_cache=True)
  config.update = lambda name, value: values.update({name: value})
  monkeypatch.setattr(compilation.jax, "config", config)
  compilation.keep()
  path = pathlib.Path(values["jax_compilation_cache_dir"])
  for time, name in enumerate(["old", "new", "newest"]):
    (path / name).write_bytes(bytes(10))
    os.utime(path / name, (time, 9 - time))
  compilation.keep()
  assert sorted(os.listdir(path)) == ["new", "newest"]
