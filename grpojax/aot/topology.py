"""Describes machines to compile for: CPUs, TPUs and GPUs, attached or not."""

import math
import os
import re
from importlib import metadata
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from grpojax.aot.chips import CHIPS, POOL, Chip


class Machine(NamedTuple):
  """Devices for which programs are compiled."""

  name: str
  chip: Chip
  devices: list[jax.Device]


LARGEST = 9216  # chips in a pod of tpu7x
MOST_SLICES = 64
LARGEST_NODE = 8  # GPUs behind a switch

# Description of a GPU (openxla/xla, xla/backends/gpu/target_config/specs).
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_memory_optin}
  cuda_compute_capability {{ major: {capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "NVIDIA {name}"
"""
_COLUMNS = (
  "name capability cores units clock l2_cache shared_memory shared_memory_optin"
).split()
_HOPPER = (9, 132, 128, 1.98, 50 * 2**20, 233472, 232448)
_GPUS = {
  "a100": ("A100-SXM4-80GB", 8, 108, 64, 1.41, 40 * 2**20, 167936, 166912),
  "h100": ("H100 80GB HBM3", *_HOPPER),
  "h200": ("H200 141GB HBM3e", *_HOPPER),
}
# Without these, libtpu queries the machine on which it runs.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # devices are not used
}


def parse(name: str) -> tuple[str, int]:
  """Returns the chip and the number of chips: ("v5e", 4) for "v5e:2x2".

  "v5e:4x4*2" are two slices of 16. ValueError for an unknown chip or shape.
  """
  chip, _, shape = name.partition(":")
  # CPUs and GPUs have a number, v5e and v6e a 2D mesh, other TPUs a 3D one.
  flat = dict.fromkeys(("cpu", *_GPUS), 1)
  axes = ({"v5e": 2, "v6e": 2} | flat).get(chip, 3)
  number = "[1-9][0-9]*"
  slices = "" if chip in flat else rf"(\*{number})?"
  if chip not in CHIPS or not re.fullmatch(
    number + f"x{number}" * (axes - 1) + slices, shape
  ):
    raise ValueError(
      f"--topology={name}: give a chip ({', '.join(sorted(CHIPS))}) and a "
      "shape: v5e:2x2, v6e:4x4, v4:2x2x1, v5p:2x2x2, tpu7x:2x2x1, h100:8 or "
      "cpu:8; v5e:4x4*2 are two slices"
    )
  shape, _, slices = shape.partition("*")
  count = math.prod(map(int, shape.split("x")))
  largest = LARGEST_NODE if chip in _GPUS else LARGEST
  if count > largest:
    kind = "node" if chip in _GPUS else "slice"
    raise ValueError(f"--topology={name}: a {kind} has at most {largest} chips")
  slices = int(slices or 1)
  if slices > MOST_SLICES:  # more would make libtpu end the process
    raise ValueError(f"--topology={name}: use at most {MOST_SLICES} slices")
  return chip, count * slices


def _gpus(kind: str, count: int) -> dict[str, Any]:
  figures = dict(zip(_COLUMNS, _GPUS[kind], strict=True))
  figures["memory"] = round(CHIPS[kind].hbm_bytes / POOL)
  figures["bandwidth"] = round(CHIPS[kind].hbm_bandwidth)
  return {
    "platform": "cuda",
    "topology_name": kind,
    "target_config": _GPU.format(**figures),
    "topology": f"1x1x{count}",
  }


def _slices(name: str) -> dict[str, Any]:
  """Describes one slice of TPUs, or several, for libtpu."""
  for key, value in _ENVIRONMENT.items():
    os.environ.setdefault(key, value)
  topology, _, slices = name.partition("*")
  kind, _, shape = topology.partition(":")
  x, y = map(int, shape.split("x")[:2])
  options = {"platform": "tpu", "topology_name": topology}
  if slices:
    options["num_slices"] = int(slices)
  if kind == "v4":  # the two cores of a chip are a single device
    options["chip_config_name"] = "megacore"
  if 1 in (x, y):  # part of a host, which has 2 x 2 chips
    options["chips_per_host_bounds"] = (min(x, 2), min(y, 2), 1)
  return options


def libtpu_warning(name: str) -> str:
  """Warns if the installed libtpu is not the one JAX pins; "" if it is."""
  if name.startswith(("cpu", *_GPUS)):
    return ""
  version = metadata.version("libtpu")
  pins = re.findall(r"libtpu==([\d.]*\d)", " ".join(metadata.requires("jax")))
  if all(f"{version}.".startswith(f"{pin}.") for pin in pins):
    return ""
  return f"libtpu is {version}: figures may differ from JAX's own, {pins[0]}"


def machine(name: str) -> Machine:
  """Returns a machine by name; ValueError if unknown or without JAX plugin.

  For a CPU, call it before any other use of JAX: it sets the number of devices.
  """
  kind, count = parse(name)
  jax.config.update("jax_platforms", "cpu")
  if kind == "cpu":
    jax.config.update("jax_num_cpu_devices", count)
    return Machine(name, CHIPS[kind], jax.devices())
  is_gpu = kind in _GPUS
  try:
    options = _gpus(kind, count) if is_gpu else _slices(name)
    topology = topologies.get_topology_desc(**options)
  except Exception as error:  # JaxRuntimeError, of several kinds
    version = jax.__version__
    message = str(error)
    remedy = "it needs libtpu: pip install 'jax[tpu]' (no TPU is needed)"
    if is_gpu:
      remedy = (
        f"it needs pip install --no-deps jax-cuda13-plugin=={version}"
        f" jax-cuda13-pjrt=={version} (no GPU is needed)"
      )
    absent = "libtpu", "PJRT", "TPU support not installed", "cuda"
    if not any(word in message for word in absent):
      remedy = "no such machine"
    text = f"--topology={name}: {remedy}: {message.splitlines()[0]}"
    raise ValueError(text) from None
  return Machine(name, CHIPS[kind], list(topology.devices))
