"""The steps of any config on random weights, timed; a table of them.

Peaks of devices are those of the table of chips, or measured where it lacks a
device.
"""

import dataclasses
import itertools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpojax.aot import chips, programs
from grpojax.aot.report import part_flops, table
from grpojax.benchmarks import clock, subject, workloads
from grpojax.core import mesh as mesh_lib
from grpojax.runtime.cli import config as config_lib
from grpojax.training.config import to_config
from grpojax.training.run import memory, setup
from grpojax.training.settings import batches as batches_lib
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import reference

PARTS = {
  part: f"seconds_{part}"
  for part in ("rollout", "rewards", "reference", "update")
}
_SIZE = 2048  # rows and columns of the product that is measured
_REPEATS = 7


class Machine(NamedTuple):
  """Devices of one kind, and the peak of one of them.

  Attributes:
    kind: Kind of the devices.
    count: Number of devices.
    flops: Rate of matrix products, FLOP/s.
    source: Source of the rate.
  """

  kind: str
  count: int
  flops: float
  source: str


def measure_flops(dtype: Any, size: int = _SIZE) -> float:
  """Measures the FLOP/s of a square matrix product: the fastest of several."""
  product = jax.jit(lambda x: x @ x)
  x, seconds = jnp.full((size, size), 1 / size, dtype), []  # its own square
  jax.block_until_ready(product(x))  # compiles
  for _ in range(_REPEATS):
    start = time.perf_counter()
    x = jax.block_until_ready(product(x))
    seconds.append(time.perf_counter() - start)
  return 2 * size**3 / min(seconds)


def find_machine(kind: str, count: int, dtype: Any) -> Machine:
  """Returns the peak of `count` devices of a `device_kind`."""
  chip = chips.of_kind(kind)
  if chip:
    flops = chips.device(chip).flops
    return Machine(kind, count, flops, f"bfloat16, {chip.source}")
  # One device of a CPU can have all its cores, which the others share.
  flops = measure_flops(dtype) / (count if kind == "cpu" else 1)
  return Machine(kind, count, flops, f"measured, {dtype}")


def peak_memory(mesh: jax.sharding.Mesh) -> int | None:
  """Most bytes that a device of this process held; None if it does not say."""
  stats = [device.memory_stats() or {} for device in mesh.local_devices]
  peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  return max(peaks, default=None)


def open_run(settings: TrainSettings) -> programs.Run:
  """Opens a run as shapes, with a reward that any text has.

  Raises ValueError for what would end a training run before its first step.
  """
  if settings.reward.on_device:
    return open_shapes(settings)
  reward = dataclasses.replace(
    settings.reward,
    functions=(workloads.REWARD,),
    weights=(1.0,),
    options={},
    workers=0,
    model="",
  )
  # How often a group of such rewards varies says nothing: a step draws once.
  filter_groups = dataclasses.replace(settings.filter_groups, enable=False)
  # Prompts are made up, and of no part.
  data = dataclasses.replace(settings.data, mixture={})
  return open_shapes(
    dataclasses.replace(
      settings, reward=reward, filter_groups=filter_groups, data=data
    )
  )


def open_shapes(settings: TrainSettings) -> programs.Run:
  """Opens a run as shapes; ValueError where it does not fit the devices."""
  mesh = setup.make_mesh(settings)
  batches_lib.check_mesh(settings, mesh)
  reference.check_memory(settings.model.reference, mesh)
  run = programs.open_run(settings, mesh)
  teacher = programs.teacher_shape(settings)
  memory.refuse(memory.training(settings, run.model, mesh, teacher))
  return run


def measure(run: programs.Run, steps: int, warmup: int) -> dict[str, Any]:
  """Times `steps` steps of a config; returns the report that is saved."""
  kind = run.mesh.devices.flat[0].device_kind
  machine = find_machine(kind, run.mesh.size, run.settings.model.dtype)
  opened = subject.open_subject(run)
  if run.settings.reward.on_device:
    batches = subject.data_prompts(opened, warmup + steps)
  else:
    prompts = subject.random_prompts(run)
    batches = itertools.islice(prompts, warmup + steps)
  parts = {} if run.settings.reward.on_device else PARTS  # else one program
  rows = subject.steps(opened, batches)
  all_steps = clock.timed(rows, warmup + steps, parts)
  timed = [
    {part: step.seconds[part] for part in parts}
    | {"step": step.seconds["total"]}
    for step in all_steps[warmup:]
  ]
  others = [step.seconds["others"] for step in all_steps[warmup:]]
  compiled = [seconds for step in all_steps for seconds in step.compiled]
  counted = clock.quiet(timed, others)
  median = {part: clock.spread(s[part] for s in counted) for part in counted[0]}
  samples = run.prompts * run.group_size
  lengths = [float(step.row["completion_length_mean"]) for step in all_steps]
  sampled = samples * min(lengths)  # the same in all steps
  return {
    "config": config_lib.flatten(to_config(run.settings)),
    "mesh": {axis: run.mesh.shape[axis] for axis in mesh_lib.AXES},
    "machine": machine._asdict(),
    "prompts": run.prompts,
    "group_size": run.group_size,
    "steps": steps,
    "quiet": sum(share < clock.QUIET for share in others),
    "others_cpu": clock.spread(others),
    "seconds": median,
    "per_step": timed,
    "first_step_seconds": all_steps[0].seconds["total"],
    "compile_seconds": sum(compiled),
    "compilations": len(compiled),
    "tokens_per_step": sampled,
    **_rates(run, machine, sampled, median),
    "peak_memory_bytes": peak_memory(run.mesh),
    "peak_rss_bytes": clock.peak_rss_mib() * 2**20,
  }


def _rates(
  run: programs.Run,
  machine: Machine,
  tokens: float,
  seconds: dict[str, dict[str, float]],
) -> dict[str, Any]:
  """Tokens and operations a second at the median; these also of the peak."""
  flops = part_flops(run)
  flops["step"] = sum(flops.values())
  median = {part: values["median"] for part, values in seconds.items()}
  peak = machine.flops * machine.count
  return {
    "flops": flops,
    "flops_of_peak": {
      p: n / median[p] / peak for p, n in flops.items() if p in median
    },
    "tokens_per_second": {
      p: tokens / median[p] for p in ("rollout", "step") if p in median
    },
  }


def lines(report: dict[str, Any]) -> list[str]:
  """Writes a report for people."""
  config, machine = report["config"], report["machine"]
  seconds = report["seconds"]
  rows = [("seconds", *seconds)]
  for name in ("median", "min", "max"):
    rows.append((name, *(f"{s[name]:.3f}" for s in seconds.values())))
  for title, key, unit, form in (
    ("tokens a second", "tokens_per_second", 1, "{:.0f}"),
    ("GFLOP", "flops", 1e9, "{:.4g}"),
    ("  of peak", "flops_of_peak", 1, "{:.1%}"),
  ):
    amounts = report[key]
    cells = (
      form.format(amounts[p] / unit) if p in amounts else "" for p in seconds
    )
    rows.append((title, *cells))
  memory = report["peak_memory_bytes"] or report["peak_rss_bytes"]
  where = "a device" if report["peak_memory_bytes"] else "of the process"
  return [
    f"{config['model.path']}, {config['model.dtype']}, {machine['count']} "
    f"{machine['kind']}: {report['prompts']} prompts x {report['group_size']} "
    f"completions, {config['data.max_prompt_length']} + "
    f"{config['sampling.max_new_tokens']} tokens",
    "",
    *table(rows),
    "",
    f"peak: {machine['flops'] / 1e9:.4g} GFLOP/s a device "
    f"({machine['source']})",
    f"first step {report['first_step_seconds']:.1f} s, of which XLA compiles "
    f"{report['compile_seconds']:.1f} s",
    f"peak memory {memory / 2**30:.2f} GiB {where}",
    f"other processes took {report['others_cpu']['median']:.0%} of the CPUs "
    f"({report['quiet']} of {report['steps']} steps were quiet)",
  ]
