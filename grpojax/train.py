"""Trains a language model with GRPO.

    python -m grpojax.train [--config=configs/x.py] [--config.key=value ...]
                            [--run_dir=DIR]

The default config is configs/arithmetic.py, or configs/own_model.py if you set
--config.model.path. The run directory, by default runs/NAME_OF_CONFIG, gets

    config.json         resolved configuration
    changes.jsonl       settings changed on resume
    lengths.npz         numbers of tokens of all prompts
    metrics.jsonl       a line per step and per evaluation
    samples.jsonl       groups of completions with their rewards
    rewards.jsonl       counts of each reward per step (with reward.on_device
                        this file and samples.jsonl are not written)
    evaluations.jsonl   which held-out answers were right
    failures.jsonl      failed rewards with their completions
    tensorboard/        metrics for TensorBoard (log.trackers)
    trackers.json       ids of the run in other trackers
    checkpoints/        newest training states, saved by Orbax
    model/              trained model in Hugging Face format
    report.html         all results, for a browser
    summary.json        accuracy before and after, seconds, steps, best group
                        size
    profile/            trace of some steps (profile.steps)

DIR may be gs://BUCKET/DIR (see `grpojax.runtime.files.run_storage`).

The same command resumes a run; it leaves a finished run unchanged. A resumed
run accepts new values of settings that do not affect past steps: steps (more
steps extend a finished run), log.*, eval.*, checkpoint.*, stop.*, profile.*,
data.too_long, reward.workers, reward.timeout, mesh.*, optim.micro_batches,
optim.packing, model.remat, model.reference and others (docs/resume.md).
After SIGTERM a run saves and exits with code 75. Conditions `stop.*` can end a
useless run, which saves, prints the reason and exits with code 1.
`stop.no_improvement` finishes a run once its held-out accuracy stops rising.
"""

import contextlib
import math
import os
import pathlib
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import jax

from grpojax.models import huggingface as hf
from grpojax.runtime import compilation
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records, run_storage
from grpojax.runtime.processes import distributed, interrupts
from grpojax.training.config import SETTINGS, from_config, parse_job
from grpojax.training.evaluation import evaluation
from grpojax.training.files import run_directory, sources
from grpojax.training.run import fit
from grpojax.training.settings.run import TrainSettings

FLAGS = {
  "run_dir": setting(
    "", 'run directory, a path or gs://BUCKET/DIR; "" = runs/NAME'
  ),
  **distributed.FLAGS,
}

REAL = "gsm8k_qwen2_5_0_5b"  # config suggested after a bundled model's run
REAL_ON_CPU = "smollm2"


def _gain(settings: TrainSettings, summary: dict[str, Any]) -> list[str]:
  """Returns lines on the gain in accuracy and reward, and on failures."""
  lines = []
  for when in ("before", "after"):
    low, high = summary[f"accuracy_{when}_interval"]
    accuracy = summary[f"accuracy_{when}"]
    reward = summary.get(f"reward_{when}")
    line = f"accuracy {when:6} {accuracy:6.1%}  [{low:.1%}, {high:.1%}]"
    ends = summary.get(f"reward_{when}_interval")
    if settings.environment.on and ends:
      value = evaluation.text(evaluation.REWARD, reward, *ends)
      line = f"return {when:6} {value}  {line}"
    elif reward is None:
      line += f"  ({evaluation.UNSCORED})"
    elif abs(reward - accuracy) > 1e-6:
      line += f"  mean reward {reward:.3g} (right: 1 or more)"
    lines.append(line)
  prompts = summary["eval_prompts"]
  lines[-1] += f"  (greedy, {prompts} held-out prompts, 95% intervals)"
  if summary.get("best_accuracy", 0) > summary["accuracy_after"]:
    lines.append(
      f"accuracy best   {summary['best_accuracy']:6.1%}  after step "
      f"{summary['best_step']}, chosen on these prompts"
    )
  for name, before in summary.items():
    if name.endswith("/accuracy_before"):
      data_set = name.rpartition("/")[0]
      after = summary[f"{data_set}/accuracy_after"]
      lines.append(f"  {data_set}: {before:.1%} -> {after:.1%}")
  if "optimal_group_size" in summary:
    lines.append(group_size_line(summary))
  for name, count in summary["steps_with"].items():
    if count:
      lines.append(f"steps with {name.replace('_', ' ')}: {count}")
  if summary["failed_rewards"]:
    lines.append(f"failed rewards: {summary['failed_rewards']}")
  return lines


def group_size_line(summary: Mapping[str, Any]) -> str:
  """Returns a line on the best group size; a size of None means infinity."""
  low, high = summary["optimal_group_size_interval"]
  if low == 1 and high in (None, math.inf):
    return (
      "the best group size is unknown because the diagnosis was too noisy: "
      "raise diagnostics.share or diagnostics.tangents"
    )
  best, low, high = (
    "inf" if x is None else f"{x:.1f}"
    for x in (summary["optimal_group_size"], low, high)
  )
  line = f"best group size by gradient noise: {best} [{low}, {high}]"
  if error := summary.get("gradient_error_of_best"):
    line += f"; this run's groups have {error:.2f} times the error of the best"
  return line


def commands(run: str | os.PathLike, settings: TrainSettings) -> dict[str, str]:
  """Returns shell commands that use a finished run, by purpose."""
  run = os.fspath(run)
  start = sources.policy_path(settings)
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
    real = REAL_ON_CPU if jax.default_backend() == "cpu" else REAL
    words["a real model"] = ["train", f"--config={real}"]
  return {
    purpose: shlex.join(["python", "-m", f"grpojax.{program}", *arguments])
    for purpose, (program, *arguments) in words.items()
  }


def final_lines(
  run: str | os.PathLike,
  directory: pathlib.Path,
  settings: TrainSettings,
  summary: dict[str, Any],
) -> list[str]:
  """Returns lines to print at the end of a run.

  `run` is the run's path or URL, `directory` its local copy.
  """
  about = {
    f"{run_directory.MODEL}/": (
      f" (of step {summary['model_step']}, Hugging Face format)"
    ),
    run_directory.REPORT: "",
    run_directory.METRICS: "",
    run_directory.SAMPLES: "",
    run_directory.FAILURES: " (failed rewards)",
  }
  files = [x + about[x] for x in about if (directory / x).exists()]
  duration = records.duration(summary["train_seconds"])
  return [
    *_gain(settings, summary),
    f"{summary['steps']} steps in {duration}; results are in {run}/:",
    f"  {', '.join(files)}",
    *next_steps(run, settings),
  ]


def next_steps(run: str | os.PathLike, settings: TrainSettings) -> list[str]:
  """Returns lines with the commands for a finished run."""
  by_purpose = commands(run, settings)
  width = max(map(len, by_purpose))
  return [f"{name:{width}}  {text}" for name, text in by_purpose.items()]


def main(argv: list[str]) -> None:
  """Runs the program with command line arguments `argv`."""
  with command_line.usage_errors():
    config, flags = parse_job(argv, FLAGS, SETTINGS, __doc__)
    settings = from_config(config)
  compilation.keep()
  run = flags.run_dir or f"runs/{settings.name}"
  join = distributed.joined(
    flags.coordinator, flags.num_processes, flags.process_id
  )
  try:
    with contextlib.ExitStack() as stack:
      with command_line.usage_errors():
        stack.enter_context(join)
        stack.enter_context(disk.errors())
        directory, sync = stack.enter_context(run_storage.opened(run))
      summary = fit.run(settings, directory, sync)
      with command_line.usage_errors():
        distributed.on_main(sync)
      if summary is None:
        print(f"{run} is finished: nothing to do (see summary.json there)")
        lines = next_steps(run, settings)
      else:
        lines = final_lines(run, directory, settings, summary)
      print(*lines, sep="\n")
  except interrupts.Left as why:  # SIGTERM before or after the run
    print(f"{why}; the same command resumes", file=sys.stderr)
    sys.exit(interrupts.EXIT_PREEMPTED)


if __name__ == "__main__":
  main(sys.argv[1:])
