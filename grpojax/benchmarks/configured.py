"""Times the steps of any config on random weights and formats a table."""

import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp

from grpojax.aot import chips, programs
from grpojax.aot.report import part_flops, table
from grpojax.benchmarks import clock, subject, workloads
from grpojax.core import meshes
from grpojax.runtime.cli import command_line, configs
from grpojax.training.config import to_config
from grpojax.training.run import memory, setup
from grpojax.training.settings import batches
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import reference

PARTS = {
  part: f"seconds_{part}"
  for part in ("rollout", "rewards", "reference", "update")
}


def measure_flops(dtype: Any, size: int = 2048) -> float:
  """Measures the FLOP/s of a square matrix product: the fastest of several."""
  product = jax.jit(lambda x: x @ x)
  x = jnp.full((size, size), 1 / size, dtype)  # x @ x = x
  seconds = []
  jax.block_until_ready(product(x))  # compiles
  for _ in range(7):
    start = time.perf_counter()
    x = jax.block_until_ready(product(x))
    seconds.append(time.perf_counter() - start)
  return 2 * size**3 / min(seconds)


def peak_flops(kind: str, count: int, dtype: Any) -> tuple[float, str]:
  """Returns the FLOP/s of each of `count` devices, and the source of the rate.

  `kind` is their `device_kind`. The rate of an unknown kind is measured.
  """
  chip = chips.of_kind(kind)
  if chip:
    return chip.flops, f"bfloat16, {chip.source}"
  # CPU devices share the cores that a single device used in the measurement.
  flops = measure_flops(dtype) / (count if kind == "cpu" else 1)
  return flops, f"measured, {dtype}"


def open_run(settings: TrainSettings) -> programs.Run:
  """Opens a run as shapes; the benchmark's reward replaces host rewards."""
  if settings.reward.on_device:
    return open_shapes(settings)
  options = {"options": {}, "workers": 0, "model": ""}
  options |= {"functions": (workloads.REWARD,), "weights": (1.0,)}
  replace = dataclasses.replace
  settings = replace(settings, reward=replace(settings.reward, **options))
  # The benchmark's rewards need no resampling.
  filter_groups = replace(settings.filter_groups, enable=False)
  # Random prompts do not belong to a data set.
  data = replace(settings.data, mixture={})
  return open_shapes(replace(settings, filter_groups=filter_groups, data=data))


def open_shapes(settings: TrainSettings) -> programs.Run:
  """Opens a run without its arrays; ValueError if memory is too small."""
  mesh = setup.make_mesh(settings)
  batches.check_mesh(settings, mesh)
  reference.check_memory(settings.model.reference, mesh)
  run = programs.open_run(settings, mesh)
  policy = run.policy
  teacher = policy.teacher and policy.teacher.shape
  memory.refuse(memory.training(settings, policy.shape, mesh, teacher))
  return run


def measure(run: programs.Run, steps: int, warmup: int) -> dict[str, Any]:
  """Times `steps` steps of a config; returns the report to save."""
  kind = run.mesh.devices.flat[0].device_kind
  peak, source = peak_flops(kind, run.mesh.size, run.settings.model.dtype)
  opened = subject.with_arrays(run)
  prompts = subject.random_prompts(run)
  parts = PARTS
  if run.settings.reward.on_device:  # a step is one program, and needs targets
    prompts = programs.data_prompts(run, opened.policy)
    parts = {}
  with command_line.usage_errors():  # read the data before compiling
    by_step = list(itertools.islice(prompts, warmup + steps))
  rows = subject.steps(opened, by_step)
  all_steps = clock.timed(rows, warmup + steps, parts)
  compiled = [seconds for step in all_steps for seconds in step.compiled]
  later = all_steps[warmup:]
  counted, quiet = clock.quiet(later)
  keys = {part: part for part in parts} | {"step": "total"}
  seconds = {
    part: clock.spread(s.seconds[key] for s in counted)
    for part, key in keys.items()
  }
  median = {part: x["median"] for part, x in seconds.items()}
  samples = run.prompts * run.group_size
  lengths = [float(step.row["completion_length_mean"]) for step in all_steps]
  sampled = samples * min(lengths)  # lengths are the same in all steps
  flops = part_flops(run)
  flops["step"] = sum(flops.values())
  stats = [device.memory_stats() or {} for device in run.mesh.local_devices]
  memory = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
  return {
    "config": configs.flatten(to_config(run.settings)),
    "mesh": {axis: run.mesh.shape[axis] for axis in meshes.AXES},
    "machine": {
      "kind": kind,
      "count": run.mesh.size,
      "flops": peak,
      "source": source,
    },
    "prompts": run.prompts,
    "group_size": run.group_size,
    "steps": steps,
    "quiet": quiet,
    "others_cpu": clock.spread(s.seconds["others"] for s in later),
    "seconds": seconds,
    "per_step": [
      {part: step.seconds[key] for part, key in keys.items()} for step in later
    ],
    "first_step_seconds": all_steps[0].seconds["total"],
    "compile_seconds": sum(compiled),
    "compilations": len(compiled),
    "tokens_per_step": sampled,
    "flops": flops,
    "flops_of_peak": {
      p: n / median[p] / (peak * run.mesh.size)
      for p, n in flops.items()
      if p in median
    },
    "tokens_per_second": {
      p: sampled / median[p] for p in ("rollout", "step") if p in median
    },
    "peak_memory_bytes": max(memory, default=None),  # largest of all devices
    "peak_rss_bytes": clock.peak_rss_mib() * 2**20,
  }


def lines(report: dict[str, Any]) -> list[str]:
  """Formats a report as text."""
  config = report["config"]
  machine = report["machine"]
  seconds = report["seconds"]
  rows = [("seconds", *seconds)]
  for name in ("median", "min", "max"):
    rows.append((name, *(f"{s[name]:.3f}" for s in seconds.values())))
  for title, key, unit, form in (
    ("tokens per second", "tokens_per_second", 1, "{:.0f}"),
    ("GFLOP", "flops", 1e9, "{:.4g}"),
    ("  of peak", "flops_of_peak", 1, "{:.1%}"),
  ):
    amounts = report[key]
    cells = (
      form.format(amounts[p] / unit) if p in amounts else "" for p in seconds
    )
    rows.append((title, *cells))
  memory = report["peak_memory_bytes"] or report["peak_rss_bytes"]
  owner = "per device" if report["peak_memory_bytes"] else "of the process"
  return [
    f"{config['model.path']}, {config['model.dtype']}, {machine['count']} "
    f"{machine['kind']}: {report['prompts']} prompts x {report['group_size']} "
    f"completions, {config['data.max_prompt_length']} + "
    f"{config['sampling.max_new_tokens']} tokens",
    "",
    *table(rows),
    "",
    f"peak: {machine['flops'] / 1e9:.4g} GFLOP/s per device "
    f"({machine['source']})",
    f"first step {report['first_step_seconds']:.1f} s, compilation "
    f"{report['compile_seconds']:.1f} s",
    f"peak memory {memory / 2**30:.2f} GiB {owner}",
    f"other processes used {report['others_cpu']['median']:.0%} of the CPUs "
    f"({report['quiet']} of {report['steps']} steps were quiet)",
  ]
