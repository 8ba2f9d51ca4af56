"""Compilations: said, timed, and kept."""

import os
import subprocess
import sys

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
  """The directory of compiled programs of a fresh process, relative."""
  names = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
  clean = {k: v for k, v in os.environ.items() if k not in names}
  program = (
    "import jax; from grpojax.runtime import compilation; compilation.keep();"
    "print(jax.config.jax_compilation_cache_dir)"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    env=clean | {"HOME": str(tmp_path)} | environment,
    capture_output=True,
    text=True,
    check=True,
  )
  return done.stdout.strip().removeprefix(f"{tmp_path}/")


@pytest.mark.slow
@pytest.mark.parametrize(
  "environment, expected",
  [
    ({}, ".cache/grpojax/xla/"),
    ({"JAX_ENABLE_COMPILATION_CACHE": "0"}, "None"),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ({"JAX_COMPILATION_CACHE_DIR": "/elsewhere"}, "/elsewhere"),
        ({"XDG_CACHE_HOME": "/proc/none"}, "None"),
      )
    ),
  ],
)
def test_programs_are_kept_unless_one_says_no(environment, expected, tmp_path):
  assert kept(tmp_path, **environment).startswith(expected)
