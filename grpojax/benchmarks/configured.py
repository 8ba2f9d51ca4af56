"""The steps of any config on random weights, timed; a table of them."""

import itertools
import time
from typing import Any

from ml_collections import ConfigDict

from grpojax.aot import programs
from grpojax.aot.report import part_flops
from grpojax.benchmarks import clock, machine, subject, traffic, workloads
from grpojax.core import mesh as mesh_lib
from grpojax.runtime import config as config_lib
from grpojax.training import batch_sizes, from_config, reference

PARTS = ("rollout", "rewards", "reference", "update")


def open_run(config: ConfigDict) -> programs.Run:
  """A config's run as shapes, with a reward that any text has.

  Raises:
    ValueError: what would end a training run before its first step, but for its
      data and rewards.
  """
  if not config.reward.on_device:
    config.reward.functions, config.reward.weights = (workloads.REWARD,), (1.0,)
    config.reward.options = ConfigDict()
    config.reward.workers, config.reward.model = 0, ""
    # How often a group of such rewards varies says nothing: a step draws once.
    config.filter_groups.enable = False
    config.data.mixture = ConfigDict()  # prompts are made up, and of no part
  mesh = from_config.mesh(config)
  batch_sizes.check(config, mesh)
  reference.check(config.model.reference, mesh)
  run = programs.open_run(config, mesh)
  subject.check_memory(run)
  return run


def _steps(opened: subject.Subject, count: int) -> subject.Rows:
  if opened.run.config.reward.on_device:
    return subject.device_steps(opened, count)
  batches = itertools.islice(subject.random_prompts(opened.run), count)
  return subject.host_steps(opened, batches)


def _seconds(row: dict[str, Any], seconds: dict[str, float]):
  """Of the parts that the step's metrics know, and of all."""
  found = {
    part: float(row[f"seconds_{part}"])
    for part in PARTS
    if f"seconds_{part}" in row
  }
  return found | {"step": seconds["total"]}


def measure(run: programs.Run, steps: int, warmup: int) -> dict[str, Any]:
  """Times a config's step.

  Args:
    run: from `open_run`.
    steps: that are timed.
    warmup: steps before them.

  Returns:
    What is saved, in JSON's types.
  """
  kind = run.mesh.devices.flat[0].device_kind
  peaks = machine.find(kind, run.mesh.size, run.config.model.dtype)
  compiled, found = clock.compilations(), []
  opened, began = subject.open_subject(run), time.perf_counter()
  for row, seconds in clock.timed(_steps(opened, warmup + steps)):
    found.append((_seconds(row, seconds), seconds["others"], row))
  rows = [row for _, _, row in found[warmup:]]
  others = [share for _, share, _ in found[warmup:]]
  every = [seconds for seconds, _, _ in found[warmup:]]
  kept = clock.quiet(every, others)
  median = {part: clock.spread(s[part] for s in kept) for part in kept[0]}
  samples = run.prompts * run.group_size
  sampled = samples * float(rows[-1]["completion_length_mean"])
  later = [seconds for when, seconds in compiled if when >= began]
  return {
    "config": config_lib.flatten(run.config),
    "mesh": {axis: run.mesh.shape[axis] for axis in mesh_lib.AXES},
    "machine": peaks._asdict(),
    "prompts": run.prompts,
    "group_size": run.group_size,
    "steps": steps,
    "quiet": sum(share < clock.QUIET for share in others),
    "others_cpu": clock.spread(others),
    "seconds": median,
    "per_step": every,
    "first_step_seconds": found[0][0]["step"],
    "compile_seconds": sum(later),
    "compilations": len(later),
    "tokens_per_step": sampled,
    **_rates(run, peaks, sampled, median),
    "peak_memory_bytes": machine.peak_memory(run.mesh),
    "peak_rss_bytes": clock.peak_rss_mib() * 2**20,
  }


def _rates(
  run: programs.Run,
  peaks: machine.Machine,
  tokens: float,
  seconds: dict[str, dict[str, float]],
) -> dict[str, Any]:
  """Tokens, operations and bytes a second at the median, and of the peak."""
  flops, moved = part_flops(run), traffic.least_bytes(run)
  flops["step"], moved["step"] = sum(flops.values()), sum(moved.values())
  rates = {"flops": flops, "least_bytes": moved}
  tops = {
    "flops": peaks.flops * peaks.count,  # of all devices
    "least_bytes": peaks.bandwidth,  # of each of them
  }
  for name, amounts in list(rates.items()):
    rates[f"{name}_of_peak"] = {
      part: amount / seconds[part]["median"] / tops[name]
      for part, amount in amounts.items()
      if part in seconds
    }
  rates["tokens_per_second"] = {
    part: tokens / seconds[part]["median"]
    for part in ("rollout", "step")
    if part in seconds
  }
  return rates


def lines(found: dict[str, Any]) -> list[str]:
  """A report for people."""
  config, peaks = found["config"], found["machine"]
  every = found["seconds"]
  rows = [("seconds", *every)]
  for name in ("median", "min", "max"):
    rows.append((name, *(f"{s[name]:.3f}" for s in every.values())))

  def row(title, amounts, form):
    cells = (form.format(amounts[p]) if p in amounts else "" for p in every)
    rows.append((title, *cells))

  row("tokens a second", found["tokens_per_second"], "{:.0f}")
  row("GFLOP", {k: v / 1e9 for k, v in found["flops"].items()}, "{:.4g}")
  row("  of peak", found["flops_of_peak"], "{:.1%}")
  moved = {k: v / 1e9 for k, v in found["least_bytes"].items()}
  row("GB at least, a device", moved, "{:.4g}")
  row("  of peak", found["least_bytes_of_peak"], "{:.1%}")
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  table = [
    "  ".join(
      [f"{title:<{widths[0]}}"]
      + [f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True)]
    )
    for title, *cells in rows
  ]
  memory = found["peak_memory_bytes"] or found["peak_rss_bytes"]
  where = "a device" if found["peak_memory_bytes"] else "of the process"
  return [
    f"{config['model.path']}, {config['model.dtype']}, {peaks['count']} "
    f"{peaks['kind']}: {found['prompts']} prompts x {found['group_size']} "
    f"completions, {config['data.max_prompt_length']} + "
    f"{config['sampling.max_new_tokens']} tokens",
    "",
    *table,
    "",
    f"peak: {peaks['flops'] / 1e9:.4g} GFLOP/s, "
    f"{peaks['bandwidth'] / 1e9:.3g} GB/s a device ({peaks['source']})",
    f"first step {found['first_step_seconds']:.1f} s, of which XLA compiles "
    f"{found['compile_seconds']:.1f} s",
    f"peak memory {memory / 2**30:.2f} GiB {where}",
    f"other processes took {found['others_cpu']['median']:.0%} of the CPUs "
    f"({found['quiet']} of {found['steps']} steps were quiet)",
  ]
