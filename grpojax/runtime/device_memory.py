"""Memory of accelerators and of the host."""

import os
import pathlib

import jax

_CGROUP_LIMITS = (  # of the two versions of control groups
  "sys/fs/cgroup/memory.max",
  "sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text()
  except OSError:  # another kernel
    return ""


def host_bytes(root: str | os.PathLike = "/") -> int:
  """Returns the bytes that processes of this machine, or container, may use.

  Physical memory, or less where a control group says so, and swap space, of
  which others use some. `root` is a directory that has `proc` and `sys`.
  """
  root = pathlib.Path(root)
  memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  for name in _CGROUP_LIMITS:
    limit = _read(root / name).strip()
    if limit.isdecimal():  # or "max"
      memory = min(memory, int(limit))
  for line in _read(root / "proc/meminfo").splitlines():
    if line.startswith("SwapTotal:"):
      memory += int(line.split()[1]) * 1024
  return memory


def device_bytes(device: jax.Device) -> int | None:
  """Returns the bytes that a device has for arrays; None if not known.

  The devices of a CPU share the memory of the host.
  """
  limit = (device.memory_stats() or {}).get("bytes_limit")
  if limit:
    return limit
  if device.platform != "cpu":
    return None
  return host_bytes() // jax.local_device_count("cpu")
