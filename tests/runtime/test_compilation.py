"""Reports, times and cache of compilations."""

import os
import pathlib
import re
import subprocess
import sys
import types
from time import monotonic

import filelock
import jax
import jax.numpy as jnp
import pytest

from grpojax.runtime import compilation


def test_long_programs_are_reported_and_all_are_timed():
  def update(x):
    return x + 1

  lines = []
  seconds = compilation.seconds()
  with compilation.announced(lines.append):
    before = len(seconds)
    jax.jit(update)(jnp.ones(3))
    jax.jit(lambda x: x * 3)(jnp.ones(5))
  jax.jit(update)(jnp.ones(4))
  assert lines == ["compiling update"]
  assert len(seconds) >= before + 3 and min(seconds) >= 0


def is_one_warning(text):
  form = "warning: the compilation cache .*JAX_COMPILATION_CACHE_DIR to another"
  return re.fullmatch(f"{form}\n", text)


def compile_two(tmp_path, **environment):
  """Compiles two programs in a process; returns its cache and its warnings."""
  names = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
  clean = {k: v for k, v in os.environ.items() if k not in names}
  program = (
    "import jax; from grpojax.runtime import compilation; compilation.keep();"
    "print(jax.config.jax_compilation_cache_dir);"
    "print(jax.jit(lambda x: x + 1)(1) + jax.jit(lambda x: x * 3)(2));"
    "print(jax.config.jax_enable_compilation_cache)"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    env=clean | {"HOME": str(tmp_path)} | environment,
    capture_output=True,
    text=True,
    check=True,
  )
  path, result, is_used = done.stdout.split()
  assert result == "8"
  if "could not be acquired" in done.stderr:
    assert is_used == "False"  # or each program would wait for the lock
  return path.removeprefix(f"{tmp_path}/"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
  "environment, expected",
  [
    ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, "None"),
    ({"JAX_COMPILATION_CACHE_DIR": "/tmp"}, "/tmp"),
    ({"JAX_COMPILATION_CACHE_DIR": __file__}, __file__),  # no directory
    ({"XDG_CACHE_HOME": __file__}, f"{__file__}/grpojax/xla/"),
  ],
)
def test_the_cache_can_be_moved_and_disabled(environment, expected, tmp_path):
  path, warnings = compile_two(tmp_path, **environment)
  assert path.startswith(expected)
  assert is_one_warning(warnings) if __file__ in path else not warnings


@pytest.mark.slow
def test_damaged_programs_are_one_warning(tmp_path):
  path, warnings = compile_two(tmp_path)
  assert path.startswith(".cache/grpojax/xla/") and not warnings
  files = [*(tmp_path / path).iterdir()]
  assert len(files) > 1
  for file in files:
    os.truncate(file, file.stat().st_size // 2)
  assert is_one_warning(compile_two(tmp_path)[1])


@pytest.mark.slow
def test_a_locked_cache_is_given_up_after_one_wait(tmp_path):
  began = monotonic()
  places = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
  with filelock.FileLock(tmp_path / ".lockfile"):
    options = {"JAX_COMPILATION_CACHE_MAX_SIZE": "1000000000"}
    _, warnings = compile_two(tmp_path, **places, **options)
  assert "could not be acquired" in warnings and is_one_warning(warnings)
  assert monotonic() - began > 10
  assert not [*tmp_path.glob("*-cache")]
  compile_two(tmp_path, **places)
  assert len([*tmp_path.glob("*-cache")]) > 1  # also of short compilations


def test_the_oldest_programs_are_deleted(tmp_path, monkeypatch):
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
