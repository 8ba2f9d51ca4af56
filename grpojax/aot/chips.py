"""Peak rates of the accelerators for which programs can be compiled."""

from typing import Any, NamedTuple


class Chip(NamedTuple):
  """Peak rates and memory of an XLA device: a chip, or a core of a TPU7x."""

  flops: float  # of bf16 matrix products, FLOP/s
  hbm_bytes: int  # of main memory; a TPU's runtime takes some of it
  hbm_bandwidth: float  # of main memory, bytes/s
  link_bandwidth: float  # to the next chip of a ring, one way, bytes/s
  source: str  # pages with these figures
  pool: float = 1.0  # share of `hbm_bytes` taken by JAX by default
  clock: float | None = None  # cycles/s of a core, for XLA:TPU's estimates
  cores: int = 1  # number of cores


_BOOK = (
  "https://jax-ml.github.io/scaling-book/tpus (ICI one-way bandwidth a link)"
)
_GOOGLE = "https://docs.cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

POOL = 0.95
"""Largest XLA_PYTHON_CLIENT_MEM_FRACTION that leaves CUDA enough memory."""


def _tpu(
  *per_chip: int | float, page: str, devices: int = 1, **more: Any
) -> Chip:
  """Returns a device of a chip: FLOP/s, memory in GiB and two bandwidths."""
  flops, gib, *rates = (x / devices for x in per_chip)
  source = f"{_GOOGLE}{page}; {_BOOK}"
  return Chip(flops, int(gib * 2**30), *rates, source, **more)


def _gpu(flops: float, memory: int, *rates: float, page: str) -> Chip:
  source = f"{_NVIDIA}{page}"
  return Chip(flops, int(POOL * memory), *rates, source, pool=0.75 / POOL)


# A TPU's clock follows from `flops`: 4 matrix units of 128 x 128 products per
# cycle (v6e: 256 x 256; v4 and v5p: in each of two cores).
CHIPS: dict[str, Chip] = {
  # The two cores act as a single device (megacore).
  "v4": _tpu(275e12, 32, 1200e9, 45e9, page="v4", clock=1.05e9, cores=2),
  # Google's page has 400 GB/s for 4 ports in both directions.
  "v5e": _tpu(197e12, 16, 819e9, 45e9, page="v5e", clock=1.5e9),
  # 96 GiB, minus the system's share; 1200 GB/s over 6 links, both directions.
  "v5p": _tpu(459e12, 95, 2765e9, 90e9, page="v5p", clock=1.75e9, cores=2),
  # 800 GB/s over 4 ports, both directions.
  "v6e": _tpu(918e12, 32, 1638e9, 90e9, page="v6e", clock=1.75e9),
  # 1200 GB/s over 6 links in both directions are 100 GB/s each; for other chips
  # the book gives 9/10 of such a rate. A chip's two devices share its links.
  "tpu7x": _tpu(2307e12, 192, 7380e9, 90e9, page="tpu7x", devices=2),
  # NVLink: 900 GB/s in both directions, through a switch. Products are dense;
  # data sheets print twice the rate, with sparsity. JAX takes .75 of the memory
  # or XLA_PYTHON_CLIENT_MEM_FRACTION of it, up to `POOL`.
  "a100": _gpu(312e12, 85_100_068_864, 2039e9, 300e9, page="a100 (SXM, 80 GB)"),
  "h100": _gpu(989e12, 84_942_979_072, 3352e9, 450e9, page="h100 (SXM)"),
  "h200": _gpu(989e12, 151_397_597_184, 4800e9, 450e9, page="h200 (SXM)"),
  # Invented, for trials on virtual CPU devices: its times are meaningless.
  "cpu": Chip(1e12, 16 * 2**30, 50e9, 10e9, "nominal: no CPU was measured"),
}

KINDS: dict[str, str] = {
  "TPU v4": "v4",
  "TPU v5 lite": "v5e",
  "TPU v5": "v5p",
  "TPU v6 lite": "v6e",
  "TPU7x": "tpu7x",
  "NVIDIA A100-SXM4-80GB": "a100",
  "NVIDIA H100": "h100",
  "NVIDIA H200": "h200",
}
"""Chips by prefix of `jax.Device.device_kind`; the longest match counts."""


def of_kind(kind: str) -> Chip | None:
  """Returns the chip of a `jax.Device`'s `device_kind`; None if unknown."""
  names = [name for name in KINDS if kind.startswith(name)]
  if not names or "PCIe" in kind or "NVL" in kind:  # variants with other rates
    return None
  return CHIPS[KINDS[max(names, key=len)]]


def pool_bytes(chip: Chip) -> int:
  """Returns the bytes that JAX allocates by default per XLA device."""
  return int(chip.pool * chip.hbm_bytes)
