"""Caching, reporting and timing of XLA's compilations."""

import contextlib
import functools
import hashlib
import pathlib
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from grpojax.runtime.files import disk

LONG = ("sample", "diagnose", "update", "step")  # announced programs
MOST_BYTES = 4 * 2**30  # limit of the cache when a program starts

_listeners: list[Callable[[str], None]] = []


@functools.cache  # JAX's listeners cannot be removed
def seconds() -> list[float]:
  """Returns a list to which every compilation appends its duration."""
  durations = []

  def listen(event: str, duration: float, **about: Any) -> None:
    if "backend_compile" in event:
      durations.append(duration)
    elif "jaxpr_to_mlir" in event:  # event before XLA's compilation
      name = str(about.get("fun_name")).removeprefix("jit(").removesuffix(")")
      if name in LONG:
        for tell in _listeners:
          tell(f"compiling {name}")

  jax.monitoring.register_event_duration_secs_listener(listen)
  return durations


@contextlib.contextmanager
def announced(tell: Callable[[str], None]) -> Iterator[None]:
  """Calls `tell` with a line when a program in `LONG` starts to compile."""
  seconds()
  _listeners.append(tell)
  try:
    yield
  finally:
    _listeners.remove(tell)


@functools.cache
def _warn_once() -> None:
  """Shows JAX's warning about an unusable cache once, not for each program."""
  show = warnings.showwarning
  warned = []

  def show_once(message: Any, *args: Any, **kwargs: Any) -> None:
    _, failed, text = str(message).partition("persistent compilation cache ")
    if not failed:
      show(message, *args, **kwargs)
    elif not warned:
      warned.append(text)
      cache = f"compilation cache {jax.config.jax_compilation_cache_dir}"
      remedy = "repair it, or set JAX_COMPILATION_CACHE_DIR to another"
      text = f"warning: the {cache} cannot be used ({text[:300]}): {remedy}"
      print(text, file=sys.stderr, flush=True)

  warnings.showwarning = show_once


def keep() -> None:
  """Makes JAX store compiled programs in the user's cache, and limits its size.

  JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE=0 take precedence.
  JAX's own size limit is not used: after a kill its lock would stay forever.
  """
  _warn_once()
  config = jax.config
  enabled = config.jax_enable_compilation_cache
  if config.jax_compilation_cache_dir or not enabled:
    return
  # Each CPU type gets a directory: programs depend on the CPU's features.
  features = platform.machine()
  with contextlib.suppress(OSError):
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    features += next((x for x in lines if x.startswith("flags")), "")
  machine = hashlib.sha256(features.encode()).hexdigest()[:12]
  with contextlib.suppress(OSError, RuntimeError):  # no home, or not writable
    path = disk.user_cache() / "xla" / machine
    config.update("jax_compilation_cache_dir", str(path))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = sorted((file.stat().st_atime, file) for file in path.iterdir())
    while sum(file.stat().st_size for _, file in files) > MOST_BYTES:
      files.pop(0)[1].unlink()


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
  """Turns a device's out-of-memory error into a message and exit code 1."""
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
