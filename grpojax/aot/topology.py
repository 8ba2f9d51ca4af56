"""Machines to compile for: TPUs and GPUs that need not be there, and CPUs."""

import math
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from grpojax.aot.chips import CHIPS, POOL, Chip


class Machine(NamedTuple):
  """Devices that programs are compiled for, and what they are."""

  name: str
  chip: Chip
  devices: list[jax.Device]


LARGEST = 9216  # chips, of a pod of tpu7x
MOST_SLICES = 64
LARGEST_NODE = 8  # GPUs that a switch joins

# XLA:GPU's description of a device, as a protobuf's text (openxla/xla,
# xla/backends/gpu/target_config/specs); no GPU is asked.
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
device_description_str: "{name}"
"""
_HOPPER = {
  "cores": 132,
  "units": 128,
  "clock": 1.98,
  "l2_cache": 50 * 2**20,
  "shared_memory": 233472,
  "shared_memory_optin": 232448,
  "capability": 9,
}
_GPUS = {
  "a100": {
    "name": "NVIDIA A100-SXM4-80GB",
    "cores": 108,
    "units": 64,
    "clock": 1.41,
    "l2_cache": 40 * 2**20,
    "shared_memory": 167936,
    "shared_memory_optin": 166912,
    "capability": 8,
  },
  "h100": {"name": "NVIDIA H100 80GB HBM3"} | _HOPPER,
  "h200": {"name": "NVIDIA H200 141GB HBM3e"} | _HOPPER,
}
# What libtpu would ask of the machine that it runs on.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it uses no device
}


def parse(name: str) -> tuple[str, int]:
  """Returns the chip and the number of chips: ("v5e", 4) of "v5e:2x2".

  "v5e:4x4*2" are two slices of 16 chips.

  Raises:
    ValueError: an unknown chip, or no shape.
  """
  chip, _, shape = name.partition(":")
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
    one = "node" if chip in _GPUS else "slice"
    raise ValueError(f"--topology={name}: no {one} has more than {largest}")
  slices = int(slices or 1)
  if slices > MOST_SLICES:  # libtpu ends the process
    raise ValueError(f"--topology={name}: at most {MOST_SLICES} slices")
  return chip, count * slices


def _options(name: str) -> dict[str, Any]:
  """Options of libtpu for one slice, or several."""
  kind, _, shape = name.partition(":")
  shape, _, slices = shape.partition("*")
  sizes = tuple(map(int, shape.split("x")))
  options = {"num_slices": int(slices)} if slices else {}
  if kind == "v4":  # a TPU VM shows the two cores of a chip as one device
    options["chip_config_name"] = "megacore"
  if 1 in sizes[:2]:  # a part of a host, which has 2 x 2 chips
    options["chips_per_host_bounds"] = (*(min(n, 2) for n in sizes[:2]), 1)
  return options


def _gpus(kind: str, count: int) -> Any:
  """Describes so many GPUs of a node."""
  chip = CHIPS[kind]
  description = _GPU.format(
    memory=round(chip.hbm_bytes / POOL),
    bandwidth=round(chip.hbm_bandwidth),
    **_GPUS[kind],
  )
  return topologies.get_topology_desc(
    platform="cuda",
    topology_name=kind,
    target_config=description,
    topology=f"1x1x{count}",
  )


def _slice(name: str) -> Any:
  """Describes slices of TPU."""
  for key, value in _ENVIRONMENT.items():
    os.environ.setdefault(key, value)
  return topologies.get_topology_desc(
    platform="tpu", topology_name=name.partition("*")[0], **_options(name)
  )


def machine(name: str) -> Machine:
  """Returns a machine by its name.

  For a CPU it sets the number of devices, before JAX is used for anything else.

  Raises:
    ValueError: no such machine, or JAX's plugin for it is missing.
  """
  kind, count = parse(name)
  jax.config.update("jax_platforms", "cpu")
  if kind == "cpu":
    jax.config.update("jax_num_cpu_devices", count)
    return Machine(name, CHIPS[kind], jax.devices())
  is_gpu = kind in _GPUS
  try:
    topology = _gpus(kind, count) if is_gpu else _slice(name)
  except Exception as error:  # JaxRuntimeError, of several kinds
    absent = "libtpu", "PJRT", "TPU support not installed", "cuda"
    if is_gpu and any(word in str(error) for word in absent):
      of_jax = f"jax-cuda13-plugin=={jax.__version__}"
      of_jax += f" jax-cuda13-pjrt=={jax.__version__}"
      remedy = f"it needs pip install --no-deps {of_jax} (no GPU is needed)"
    elif any(word in str(error) for word in absent):
      remedy = "it needs libtpu: pip install 'jax[tpu]' (no TPU is needed)"
    else:
      remedy = "no such machine"
    raise ValueError(
      f"--topology={name}: {remedy}: {str(error).splitlines()[0]}"
    ) from None
  return Machine(name, CHIPS[kind], list(topology.devices))
