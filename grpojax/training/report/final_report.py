"""Text at the end of a run: its gain, and commands to go on with."""

import math
import os
import pathlib
import shlex
from collections.abc import Mapping
from typing import Any

from grpojax.models import huggingface as hf
from grpojax.runtime.files import records
from grpojax.training.run import hub_pins, run_directory
from grpojax.training.settings.run import TrainSettings

REAL = "gsm8k_qwen2_5_0_5b"  # the config to go on with from an embedded model


def _gain(summary: dict[str, Any]) -> list[str]:
  """Lines of the accuracy before and after, and of trouble on the way."""
  lines = []
  for when in ("before", "after"):
    low, high = summary[f"accuracy_{when}_interval"]
    accuracy = summary[f"accuracy_{when}"]
    reward = summary.get(f"reward_{when}")
    lines.append(f"accuracy {when:6} {accuracy:6.1%}  [{low:.1%}, {high:.1%}]")
    if reward is not None and not math.isclose(reward, accuracy, abs_tol=1e-6):
      lines[-1] += f"  mean reward {reward:.3g} (right: 1 or more)"
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
    lines.append(group_size_line(summary))
  for name, count in summary["steps_with"].items():
    if count:
      lines.append(f"steps with {name.replace('_', ' ')}: {count}")
  if summary["failed_rewards"]:
    lines.append(f"rewards that failed: {summary['failed_rewards']}")
  return lines


def group_size_line(summary: Mapping[str, Any]) -> str:
  """The group size of a summary; infinite bounds are null in a file."""
  low, high = summary["optimal_group_size_interval"]
  best, *interval = (
    "inf" if x is None else f"{x:.1f}"
    for x in (summary["optimal_group_size"], low, high)
  )
  size = f"{best} [{', '.join(interval)}]"
  if low == 1 and high in (None, math.inf):
    return f"the gradient's noise left the best group size open: {size}"
  line = f"the gradient's noise asked for groups of {size}"
  if error := summary.get("gradient_error_of_best"):
    line += (
      f"; this run's have {error:.2f} times their error, by as many samples"
    )
  return line


def commands(run: str | os.PathLike, settings: TrainSettings) -> dict[str, str]:
  """Shell commands to go on with a finished run, by what they do."""
  run, start = os.fspath(run), hub_pins.model(settings)
  name = os.path.basename(run.rstrip("/")) or "run"
  words = {
    "look at it": ["report", run],
    "evaluate": ["evaluate", f"--model={run}", f"--compare={start}"],
    "ask it": ["chat", f"--model={run}"],
    "export": ["export", f"--model={run}", f"--out={name}-model"],
  }
  if settings.checkpoint.best:
    for purpose in ("evaluate", "ask it", "export"):
      words[purpose].append("--best")
  if start in os.listdir(hf.ASSETS):
    words["a real model"] = ["train", f"--config={REAL}"]
  return {
    purpose: shlex.join(["python", "-m", f"grpojax.{program}", *rest])
    for purpose, (program, *rest) in words.items()
  }


def lines(
  run: str | os.PathLike,
  directory: pathlib.Path,
  settings: TrainSettings,
  summary: dict[str, Any],
) -> list[str]:
  """Lines to print when a run has come to its end.

  `run` is the directory or its URL as the user gave it, `directory` on a disk.
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
  files = [
    f"{name} ({about})" if about else name
    for name, about in names.items()
    if (directory / name).exists()
  ]
  steps, seconds = summary["steps"], summary["train_seconds"]
  return [
    *_gain(summary),
    f"{steps} steps in {records.duration(seconds)}; results are in {run}/:",
    f"  {', '.join(files)}",
    *next_steps(run, settings),
  ]


def next_steps(run: str | os.PathLike, settings: TrainSettings) -> list[str]:
  """Lines of the commands to go on with."""
  by_purpose = commands(run, settings)
  width = max(map(len, by_purpose))
  return [f"{name:{width}}  {text}" for name, text in by_purpose.items()]
