"""The steps of any config on random weights, timed; a table of them."""

import dataclasses
import itertools
import time
from typing import Any

from grpojax.aot import programs
from grpojax.aot.report import part_flops, table
from grpojax.benchmarks import clock, limits, subject, workloads
from grpojax.core import mesh as mesh_lib
from grpojax.runtime import device_memory
from grpojax.runtime.cli import config as config_lib
from grpojax.training.config import to_config
from grpojax.training.run import memory, setup
from grpojax.training.settings import batches as batches_lib
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import reference

PARTS = ("rollout", "rewards", "reference", "update")


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
  phases = memory.training(settings, run.model, mesh)
  memory.refuse(phases, device_memory.device_bytes(mesh.local_devices[0]))
  return run


def measure(run: programs.Run, steps: int, warmup: int) -> dict[str, Any]:
  """Times `steps` steps of a config; returns the report that is saved."""
  kind = run.mesh.devices.flat[0].device_kind
  peaks = limits.find(kind, run.mesh.size, run.settings.model.dtype)
  compiled = clock.compilations()
  opened, start = subject.open_subject(run), time.perf_counter()
  if run.settings.reward.on_device:
    batches = subject.data_prompts(opened, warmup + steps)
  else:
    prompts = subject.random_prompts(run)
    batches = itertools.islice(prompts, warmup + steps)
  all_seconds, others = [], []
  for row, seconds in clock.timed(subject.steps(opened, batches)):
    metrics = {part: f"seconds_{part}" for part in PARTS}
    of_step = {p: float(row[m]) for p, m in metrics.items() if m in row}
    all_seconds.append(of_step | {"step": seconds["total"]})
    others.append(seconds["others"])
  timed, others = all_seconds[warmup:], others[warmup:]
  counted = clock.quiet(timed, others)
  median = {part: clock.spread(s[part] for s in counted) for part in counted[0]}
  samples = run.prompts * run.group_size
  sampled = samples * float(row["completion_length_mean"])  # as in all steps
  later = [seconds for when, seconds in compiled if when >= start]
  return {
    "config": config_lib.flatten(to_config(run.settings)),
    "mesh": {axis: run.mesh.shape[axis] for axis in mesh_lib.AXES},
    "machine": peaks._asdict(),
    "prompts": run.prompts,
    "group_size": run.group_size,
    "steps": steps,
    "quiet": sum(share < clock.QUIET for share in others),
    "others_cpu": clock.spread(others),
    "seconds": median,
    "per_step": timed,
    "first_step_seconds": all_seconds[0]["step"],
    "compile_seconds": sum(later),
    "compilations": len(later),
    "tokens_per_step": sampled,
    **_rates(run, peaks, sampled, median),
    "peak_memory_bytes": limits.peak_memory(run.mesh),
    "peak_rss_bytes": clock.peak_rss_mib() * 2**20,
  }


def _rates(
  run: programs.Run,
  peaks: limits.Machine,
  tokens: float,
  seconds: dict[str, dict[str, float]],
) -> dict[str, Any]:
  """Tokens, operations and bytes a second at the median, and of the peak."""
  flops, moved = part_flops(run), limits.least_bytes(run)
  flops["step"], moved["step"] = sum(flops.values()), sum(moved.values())
  median = {part: values["median"] for part, values in seconds.items()}

  def of_peak(amounts, peak):
    return {p: n / median[p] / peak for p, n in amounts.items() if p in median}

  return {
    "flops": flops,
    "least_bytes": moved,
    "flops_of_peak": of_peak(flops, peaks.flops * peaks.count),  # of all
    "least_bytes_of_peak": of_peak(moved, peaks.bandwidth),  # of each device
    "tokens_per_second": of_peak({"rollout": tokens, "step": tokens}, 1),
  }


def lines(report: dict[str, Any]) -> list[str]:
  """Writes a report for people."""
  config, peaks = report["config"], report["machine"]
  seconds = report["seconds"]
  rows = [("seconds", *seconds)]
  for name in ("median", "min", "max"):
    rows.append((name, *(f"{s[name]:.3f}" for s in seconds.values())))
  for title, key, unit, form in (
    ("tokens a second", "tokens_per_second", 1, "{:.0f}"),
    ("GFLOP", "flops", 1e9, "{:.4g}"),
    ("  of peak", "flops_of_peak", 1, "{:.1%}"),
    ("GB at least, a device", "least_bytes", 1e9, "{:.4g}"),
    ("  of peak", "least_bytes_of_peak", 1, "{:.1%}"),
  ):
    amounts = report[key]
    cells = (
      form.format(amounts[p] / unit) if p in amounts else "" for p in seconds
    )
    rows.append((title, *cells))
  memory = report["peak_memory_bytes"] or report["peak_rss_bytes"]
  where = "a device" if report["peak_memory_bytes"] else "of the process"
  return [
    f"{config['model.path']}, {config['model.dtype']}, {peaks['count']} "
    f"{peaks['kind']}: {report['prompts']} prompts x {report['group_size']} "
    f"completions, {config['data.max_prompt_length']} + "
    f"{config['sampling.max_new_tokens']} tokens",
    "",
    *table(rows),
    "",
    f"peak: {peaks['flops'] / 1e9:.4g} GFLOP/s, "
    f"{peaks['bandwidth'] / 1e9:.3g} GB/s a device ({peaks['source']})",
    f"first step {report['first_step_seconds']:.1f} s, of which XLA compiles "
    f"{report['compile_seconds']:.1f} s",
    f"peak memory {memory / 2**30:.2f} GiB {where}",
    f"other processes took {report['others_cpu']['median']:.0%} of the CPUs "
    f"({report['quiet']} of {report['steps']} steps were quiet)",
  ]
