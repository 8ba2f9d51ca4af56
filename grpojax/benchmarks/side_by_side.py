"""The steps of a workload, timed; the JSON line of a comparison with others."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from grpojax.aot import programs
from grpojax.benchmarks import clock, subject, workloads
from grpojax.core.types import Prompts
from grpojax.models import hf
from grpojax.runtime import checkpoint, command_line, records
from grpojax.runtime import config as config_lib
from grpojax.training import (
  batch_sizes,
  fit,
  from_config,
  reference,
  run_directory,
  run_storage,
  scoring,
  start,
  tracking,
)
from grpojax.training.progress import Progress

PARTS = {
  "rollout": "seconds_rollout",
  "ref_logprobs": "seconds_reference",
  "update": "seconds_update",
}
"""What a comparison calls a part, and the metric of a step."""


def _model_directory() -> pathlib.Path | None:
  """PEERS_MODEL_DIR: the weights that the others are timed with."""
  given = os.environ.get("PEERS_MODEL_DIR")
  if not given:
    return None
  if not os.path.isdir(given):
    raise ValueError(
      f"PEERS_MODEL_DIR={given} is no directory: give one, or unset it and the "
      "weights are drawn"
    )
  theirs, ours = (
    vars(hf.to_transformer_config(x))
    for x in (hf.read_config(given), workloads.MODEL)
  )
  wrong = [f"{k}={v}, not {ours[k]}" for k, v in theirs.items() if v != ours[k]]
  if wrong:
    raise ValueError(
      f"PEERS_MODEL_DIR={given} is another model than all are timed with "
      f"({', '.join(wrong)}): give that one, or unset it and the weights are "
      "drawn"
    )
  return pathlib.Path(given)


@contextlib.contextmanager
def open_workload(name: str, config: ConfigDict) -> Iterator[subject.Subject]:
  """A workload's run, with its weights.

  Args:
    name: of `workloads.WORKLOADS`.
    config: of `workloads.config_of`, perhaps with changes of how it computes.

  Raises:
    ValueError: changes that do not fit the devices or the batch, or no such
      weights.
  """
  stored = _model_directory()
  with tempfile.TemporaryDirectory() as directory:
    file = pathlib.Path(directory, "config.json")
    file.write_text(json.dumps(workloads.MODEL))
    config.model.path = str(stored or file)
    mesh = from_config.mesh(config)
    batch_sizes.check(config, mesh)
    reference.check(config.model.reference, mesh)
    run = programs.open_run(config, mesh)
    subject.check_memory(run)
    yield subject.open_subject(run, stored)


def _batches(workload: workloads.Workload, count: int) -> Iterator[Prompts]:
  for step, ids in enumerate(workloads.prompt_ids(workload, count)):
    yield subject.whole_prompts(ids, workloads.lengths(workload, step))


def default_job(config: ConfigDict) -> subject.Rows:
  """The steps of a training run, as `train` takes them.

  Without its evaluations and checkpoints, but with its data, rewards, records.
  """
  with contextlib.ExitStack() as stack:
    temporary = stack.enter_context(tempfile.TemporaryDirectory())
    directory = pathlib.Path(temporary)
    with command_line.usage_errors():
      checked = start.check(config, directory, lambda: None)
    checkpointer = stack.enter_context(
      checkpoint.open_checkpointer(run_storage.checkpoints(directory))
    )
    reward_pool = stack.enter_context(
      scoring.open_reward_pool(checked.config, checked.reward_model)
    )
    stack.enter_context(jax.set_mesh(checked.mesh))
    run, state, tx = start.start(directory, checked, checkpointer, reward_pool)
    run = tracking.tracked(run, -1, stack)
    args = state, tx, Progress(), lambda together=False: None
    for _ in fit.remaining_steps(run, *args):
      yield records.read_jsonl(run.file(run_directory.METRICS))[-1]


def _steps(name: str, config: ConfigDict, count: int, stack) -> subject.Rows:
  if name == workloads.ARITHMETIC:
    return default_job(config)
  with command_line.usage_errors():
    opened = stack.enter_context(open_workload(name, config))
  batches = _batches(workloads.WORKLOADS[name], count)
  return subject.host_steps(opened, batches, lambda prompts: prompts.targets)


def _parts(row: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
  """Seconds by part; what is none of them is rewards, text and records."""
  parts = {name: float(row[metric]) for name, metric in PARTS.items()}
  other = seconds["total"] - sum(parts.values())
  return seconds | parts | {"score_other": other}


def measure(
  name: str, config: ConfigDict, steps: int, warmup: int
) -> dict[str, Any]:
  """Times a workload; what is printed meanwhile goes to standard error.

  Args:
    name: of `workloads.NAMES`.
    config: of `workloads.config_of`, perhaps with changes of how it computes.
    steps: that are timed.
    warmup: steps before them.

  Returns:
    The report, with the keys of every library of the comparison.

  Raises:
    SystemExit: with a message, for changes that do not fit the devices or the
      batch.
  """
  config.steps = warmup + steps
  compiled, found = clock.compilations(), []
  with (
    contextlib.redirect_stdout(sys.stderr),
    contextlib.ExitStack() as stack,
  ):
    rows = _steps(name, config, warmup + steps, stack)
    began = time.perf_counter()
    before = 0
    for row, seconds in clock.timed(rows):
      new, before = len(compiled) - before, len(compiled)
      found.append((row, _parts(row, seconds) | {"compilations": new}))
  total = sum(seconds["total"] for _, seconds in found[:warmup])
  return report(name, config, found, warmup, compiled, (began, began + total))


def _tokens(name: str, config: ConfigDict, rows: Sequence[dict[str, Any]]):
  """Tokens and the longest completion of each step; whether as planned.

  No completion is longer than planned (`budgets`), so where the sums agree each
  of them is as long as planned.
  """
  samples = config.batch_size * config.group_size
  sums = [round(float(r["completion_length_mean"]) * samples) for r in rows]
  longest = [int(r["completion_length_max"]) for r in rows]
  if name == workloads.ARITHMETIC:
    return sums, longest, None  # they are what the policy makes them
  workload = workloads.WORKLOADS[name]
  planned = [
    int(workloads.lengths(workload, i).sum()) for i in range(len(rows))
  ]
  return sums, longest, sums == planned


def _variant(name: str, config: ConfigDict) -> str:
  """The settings that are not the workload's own."""
  default = config_lib.flatten(workloads.config_of(name))
  return " ".join(
    f"{key}={value}"
    for key, value in config_lib.flatten(config).items()
    if value != default.get(key) and key not in ("model.path", "steps")
  )


def report(
  name: str,
  config: ConfigDict,
  found: Sequence[tuple[dict[str, Any], dict[str, float]]],
  warmup: int,
  compiled: Sequence[tuple[float, float]],
  warm: tuple[float, float],
) -> dict[str, Any]:
  """What is printed; see `measure`.

  Args:
    name: of the workload.
    config: it ran with.
    found: metrics and seconds of each step.
    warmup: steps that do not count.
    compiled: from `clock.compilations`.
    warm: when the first step began and the last of the warm-up ended.
  """
  rows, seconds = zip(*found, strict=True)
  sums, longest, planned = _tokens(name, config, rows)
  steps = list(zip(seconds, sums, longest, strict=True))[warmup:]
  # As the warm-up, steps that compile a shape that there was not before (of
  # packed rows) are no measure of those that follow.
  steps = [step for step in steps if not step[0]["compilations"]] or steps
  others = [s["others"] for s, _, _ in steps]
  kept = clock.quiet(steps, others)
  names = sorted({*seconds[0]} - {"others", "compilations"})
  during = [s for when, s in compiled if warm[0] <= when <= warm[1]]
  return {
    "peer": "grpojax",
    "variant": _variant(name, config) or "default",
    "workload": name,
    "steps": len(steps),
    "quiet": sum(share < clock.QUIET for share in others),
    "others_cpu": clock.spread(s["others"] for s, _, _ in kept),
    "seconds": {n: clock.spread(s[n] for s, _, _ in kept) for n in names},
    "per_step": {
      seconds.index(s): {k: round(v, 3) for k, v in s.items()}
      for s, _, _ in steps
    },
    "first_step_s": round(seconds[0]["total"], 3),
    "warmup_s": [round(s["total"], 3) for s in seconds[:warmup]],
    "tokens_per_step": clock.spread(n for _, n, _ in kept),
    "longest": clock.spread(n for _, _, n in kept),
    "gen_tokens_per_s": clock.spread(n / s["rollout"] for s, n, _ in kept),
    "step_tokens_per_s": clock.spread(n / s["total"] for s, n, _ in kept),
    "lengths_as_planned": planned,
    "peak_rss_mib": clock.peak_rss_mib(),
    "versions": _versions(),
    "compile_s": round(sum(during), 3),
    "compilations_warmup": len(during),
    "compilations_later": sum(when > warm[1] for when, _ in compiled),
    "rewards": [round(float(row["reward_mean"]), 3) for row in rows],
    "dtype": config.model.dtype,
    "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}",
  }


def _versions() -> dict[str, str]:
  found = {}
  for name in ("grpojax", "jax", "jaxlib", "flax", "optax"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found
