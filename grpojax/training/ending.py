"""What a run says at its end: what it has gained, and what to do with it."""

import os
import pathlib
import shlex
from typing import Any

from grpojax.models import hf
from grpojax.runtime import records
from grpojax.training import run_directory, sources
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import diagnosis

REAL = "gsm8k_qwen2_5_0_5b"  # the config to go on with from an embedded model


def _gain(summary: dict[str, Any]) -> list[str]:
  """Accuracy before and after, and what went wrong on the way."""
  lines = []
  for when in ("before", "after"):
    low, high = summary[f"accuracy_{when}_interval"]
    lines.append(
      f"accuracy {when:6} {summary[f'accuracy_{when}']:6.1%}  "
      f"[{low:.1%}, {high:.1%}]"
    )
  lines[-1] += (
    f"  (greedy, {summary['eval_prompts']} held-out prompts, 95% intervals)"
  )
  if summary.get("best_accuracy", 0) > summary["accuracy_after"]:
    lines.append(
      f"accuracy best   {summary['best_accuracy']:6.1%}  after step "
      f"{summary['best_step']}, chosen by these prompts"
    )
  for name in summary:
    if name.endswith("/accuracy_before"):
      last = name.removesuffix("before") + "after"
      data_set = name.rpartition("/")[0]
      lines.append(f"  {data_set}: {summary[name]:.1%} -> {summary[last]:.1%}")
  if "optimal_group_size" in summary:
    lines.append(diagnosis.line(summary))
  for name, count in summary["steps_with"].items():
    if count:
      lines.append(f"steps with {name.replace('_', ' ')}: {count}")
  if summary["failed_rewards"]:
    lines.append(f"rewards that failed: {summary['failed_rewards']}")
  return lines


def commands(
  where: str | os.PathLike, settings: TrainSettings
) -> dict[str, str]:
  """What to do with a finished run: words for a shell, by what they do.

  Args:
    where: the run directory or its URL, as it was given.
    settings: the run's.
  """
  where, start = os.fspath(where), sources.model(settings)
  name = os.path.basename(where.rstrip("/")) or "run"
  words = {
    "look at it": ["report", where],
    "evaluate": ["evaluate", f"--model={where}", f"--compare={start}"],
    "ask it": ["chat", f"--model={where}"],
    "export": ["export", f"--model={where}", f"--out={name}-model"],
  }
  if settings.checkpoint.best:
    for what in ("evaluate", "ask it", "export"):
      words[what].append("--best")
  if start in os.listdir(hf.ASSETS):
    words["a real model"] = ["train", f"--config={REAL}"]
  return {
    what: shlex.join(["python", "-m", f"grpojax.{program}", *rest])
    for what, (program, *rest) in words.items()
  }


def lines(
  where: str | os.PathLike,
  directory: pathlib.Path,
  settings: TrainSettings,
  summary: dict[str, Any],
) -> list[str]:
  """What to print when a run has come to its end.

  Args:
    where: the run directory or its URL, as it was given.
    directory: the same, on a disk.
    settings: the run's.
    summary: see `reporting.finish`.
  """
  names = {
    f"{run_directory.MODEL}/": (
      f"of step {summary['model_step']}, Hugging Face format"
    ),
    run_directory.REPORT: "",
    run_directory.CURVE: "",
    run_directory.METRICS: "",
    run_directory.SAMPLES: "",
    run_directory.FAILURES: "rewards that could not be computed",
  }
  there = [
    f"{name} ({what})" if what else name
    for name, what in names.items()
    if (directory / name).exists()
  ]
  steps, seconds = summary["steps"], summary["train_seconds"]
  return [
    *_gain(summary),
    f"{steps} steps in {records.duration(seconds)}; results are in {where}/:",
    f"  {', '.join(there)}",
    *todo(where, settings),
  ]


def todo(where: str | os.PathLike, settings: TrainSettings) -> list[str]:
  """The commands to print; see `commands`."""
  found = commands(where, settings)
  width = max(map(len, found))
  return [f"{what:{width}}  {command}" for what, command in found.items()]
