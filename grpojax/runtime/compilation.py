"""XLA's compilations: kept for the next start, said, and timed."""

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

import jax

from grpojax.runtime.files import disk

LONG = ("sample", "diagnose", "update", "step")
"""Programs of a training step that take long to compile, by their names."""

MOST_BYTES = 4 * 2**30
"""Size of what is kept; what was not used for longest goes first."""

_told: list[Callable[[str], None]] = []


@functools.cache  # a listener cannot be taken back
def seconds() -> list[float]:
  """Returns a list to which the seconds of each compilation are added."""
  durations = []

  def listen(event: str, duration: float, **about: Any) -> None:
    if "backend_compile" in event:
      durations.append(duration)
    elif "jaxpr_to_mlir" in event:  # XLA is next
      name = str(about.get("fun_name")).removeprefix("jit(").removesuffix(")")
      if name in LONG:
        for tell in _told:
          tell(f"compiling {name}")

  jax.monitoring.register_event_duration_secs_listener(listen)
  return durations


@contextlib.contextmanager
def announced(tell: Callable[[str], None]) -> Iterator[None]:
  """Calls `tell` with a line whenever a long compilation begins."""
  seconds()
  _told.append(tell)
  try:
    yield
  finally:
    _told.remove(tell)


def _machine() -> str:
  """Names this kind of processor: programs for one may not run on another."""
  features = platform.machine()
  with contextlib.suppress(OSError):
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    features += next((x for x in lines if x.startswith("flags")), "")
  return hashlib.sha256(features.encode()).hexdigest()[:12]


def keep() -> None:
  """Keeps compiled programs in the user's cache directory.

  JAX_COMPILATION_CACHE_DIR names another directory, and with
  JAX_ENABLE_COMPILATION_CACHE=0 nothing is kept.
  """
  config = jax.config
  enabled = config.jax_enable_compilation_cache
  if config.jax_compilation_cache_dir or not enabled:
    return
  try:
    path = disk.user_cache() / "xla" / _machine()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
  except (OSError, RuntimeError):  # no home, or none to write to
    return
  if os.access(path, os.W_OK):
    config.update("jax_compilation_cache_dir", str(path))
    config.update("jax_compilation_cache_max_size", MOST_BYTES)


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
  """Turns a device that is out of memory into a message and exit code 1."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    raise SystemExit(
      f"error: out of memory ({str(error)[:200]}): raise "
      "--config.optim.micro_batches, or lower --config.batch_size, "
      "--config.sampling.max_new_tokens or --config.logits_chunk"
    ) from None
