"""Machines to compile for: slices of TPU that need not be there, and CPUs."""

import math
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from grpojax.aot.chips import CHIPS, Chip


class Machine(NamedTuple):
  """Devices that programs are compiled for, and what they are."""

  name: str
  chip: Chip
  devices: list[jax.Device]


LARGEST = 9216  # chips, of a pod of tpu7x
# What libtpu would ask of the machine that it runs on.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it uses no device
}


def parse(name: str) -> tuple[str, int]:
  """Returns the chip and the number of chips: ("v5e", 4) of "v5e:2x2".

  Raises:
    ValueError: an unknown chip, or no shape.
  """
  chip, _, shape = name.partition(":")
  known = {c for c in CHIPS if c.startswith(("v", "tpu")) or c == "cpu"}
  axes = {"cpu": 1, "v5e": 2, "v6e": 2}.get(chip, 3)
  number = "[1-9][0-9]*"
  if chip not in known or not re.fullmatch(
    number + f"x{number}" * (axes - 1), shape
  ):
    raise ValueError(
      f"--topology={name}: give a chip ({', '.join(sorted(known))}) and a "
      "shape: v5e:2x2, v6e:4x4, v4:2x2x1, v5p:2x2x2, tpu7x:2x2x1 or cpu:8"
    )
  count = math.prod(map(int, shape.split("x")))
  if count > LARGEST:
    raise ValueError(f"--topology={name}: no slice has more than {LARGEST}")
  return chip, count


def _options(name: str) -> dict[str, Any]:
  """Options of libtpu for a slice."""
  kind, _, shape = name.partition(":")
  sizes = tuple(map(int, shape.split("x")))
  options = {}
  if kind == "v4":  # a TPU VM shows the two cores of a chip as one device
    options["chip_config_name"] = "megacore"
  if 1 in sizes[:2]:  # a part of a host, which has 2 x 2 chips
    options["chips_per_host_bounds"] = (*(min(n, 2) for n in sizes[:2]), 1)
  return options


def machine(name: str) -> Machine:
  """Returns a machine by its name.

  For a CPU it sets the number of devices, before JAX is used for anything else.

  Raises:
    ValueError: no such machine, or libtpu is missing.
  """
  kind, count = parse(name)
  jax.config.update("jax_platforms", "cpu")
  if kind == "cpu":
    jax.config.update("jax_num_cpu_devices", count)
    return Machine(name, CHIPS[kind], jax.devices())
  for key, value in _ENVIRONMENT.items():
    os.environ.setdefault(key, value)
  try:
    topology = topologies.get_topology_desc(
      platform="tpu", topology_name=name, **_options(name)
    )
  except Exception as error:  # JaxRuntimeError, of several kinds
    absent = "libtpu", "PJRT", "TPU support not installed"
    if any(word in str(error) for word in absent):
      remedy = "it needs libtpu: pip install 'jax[tpu]' (no TPU is needed)"
    else:
      remedy = "no such slice"
    raise ValueError(
      f"--topology={name}: {remedy}: {str(error).splitlines()[0]}"
    ) from None
  return Machine(name, CHIPS[kind], list(topology.devices))
