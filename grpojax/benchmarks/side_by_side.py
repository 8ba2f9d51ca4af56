"""Times the steps of a workload, for a comparison with other libraries."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax

from grpojax.benchmarks import clock, configured, subject, workloads
from grpojax.runtime.cli import command_line, configs
from grpojax.training.config import to_config
from grpojax.training.settings.run import TrainSettings

PARTS = {
  "rollout": "seconds_rollout",
  "ref_logprobs": "seconds_reference",
  "update": "seconds_update",
}
"""Timed parts of a step, and their metrics."""


def _rows(name: str, settings: TrainSettings, count: int) -> subject.Rows:
  workload = workloads.WORKLOADS[name]
  with command_line.usage_errors(), tempfile.TemporaryDirectory() as directory:
    file = pathlib.Path(directory, "config.json")
    file.write_text(json.dumps(workload.model))
    model = dataclasses.replace(settings.model, path=str(file))
    settings = dataclasses.replace(settings, model=model)
    opened = subject.with_arrays(configured.open_shapes(settings))
  prompts = workloads.prompt_ids(workload, count)
  batches = (
    subject.whole_prompts(ids, workloads.lengths(workload, step))
    for step, ids in enumerate(prompts)
  )
  return subject.steps(opened, batches, lambda prompts: prompts.targets)


def measure(
  name: str, settings: TrainSettings, steps: int, warmup: int
) -> dict[str, Any]:
  """Times `steps` steps after `warmup` steps; returns the comparison's report.

  `settings` are the workload's (`workloads.config_of`), perhaps changed. Output
  goes to standard error. SystemExit if the settings do not fit the devices or
  the batch.
  """
  settings = dataclasses.replace(settings, steps=warmup + steps)
  with contextlib.redirect_stdout(sys.stderr):
    rows = _rows(name, settings, warmup + steps)
    timed = clock.timed(rows, warmup + steps, PARTS)
  for step in timed:  # the remaining time is for rewards, text and records
    in_parts = sum(step.seconds[part] for part in PARTS)
    step.seconds["score_other"] = step.seconds["total"] - in_parts
  return report(name, settings, timed, warmup)


def report(
  name: str, settings: TrainSettings, timed: Sequence[clock.Step], warmup: int
) -> dict[str, Any]:
  """Returns the comparison's report; `timed` starts with the warm-up steps."""
  samples = settings.batch_size * settings.group_size

  def tokens(step: clock.Step) -> int:
    return round(float(step.row["completion_length_mean"]) * samples)

  # Like the warm-up, steps that compile new shapes of packed rows do not count.
  later = timed[warmup:]
  steady = [step for step in later if not step.compiled] or later
  counted, quiet = clock.quiet(steady)

  def spread(value: Callable[[clock.Step], float]) -> dict[str, float]:
    return clock.spread(map(value, counted))

  default = configs.flatten(workloads.config_of(name))
  default |= {"model.path": settings.model.path, "steps": settings.steps}
  flat = configs.flatten(to_config(settings))
  changes = [f"{k}={x}" for k, x in flat.items() if x != default.get(k)]
  # No length exceeds its plan, so equal sums mean equal lengths.
  lengths = functools.partial(workloads.lengths, workloads.WORKLOADS[name])
  planned = all(tokens(x) == int(lengths(x.number).sum()) for x in timed)
  versions = {}
  for package in ("grpojax", "jax", "jaxlib", "flax", "optax"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  parts = sorted({*timed[0].seconds} - {"others"})
  during = [seconds for step in timed[:warmup] for seconds in step.compiled]
  return {
    "peer": "grpojax",
    "variant": " ".join(changes) or "default",
    "workload": name,
    "steps": len(steady),
    "quiet": quiet,
    "others_cpu": spread(lambda step: step.seconds["others"]),
    "seconds": {p: spread(lambda step, p=p: step.seconds[p]) for p in parts},
    "per_step": {
      step.number: {p: round(v, 3) for p, v in step.seconds.items()}
      | {"compilations": len(step.compiled)}
      for step in steady
    },
    "first_step_s": round(timed[0].seconds["total"], 3),
    "warmup_s": [round(step.seconds["total"], 3) for step in timed[:warmup]],
    "tokens_per_step": spread(tokens),
    "longest": spread(lambda step: int(step.row["completion_length_max"])),
    "gen_tokens_per_s": spread(lambda x: tokens(x) / x.seconds["rollout"]),
    "step_tokens_per_s": spread(lambda x: tokens(x) / x.seconds["total"]),
    "lengths_as_planned": planned,
    "peak_rss_mib": clock.peak_rss_mib(),
    "versions": versions,
    "compile_s": round(sum(during), 3),
    "compilations_warmup": len(during),
    "compilations_later": sum(len(step.compiled) for step in later),
    "rewards": [round(float(step.row["reward_mean"]), 3) for step in timed],
    "dtype": settings.model.dtype,
    "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}",
  }
