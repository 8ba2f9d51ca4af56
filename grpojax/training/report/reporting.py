"""Records, tracks and prints the metrics of a training run.

Metrics are named by the code that computes them: `rollout`, `update` and the
losses in `core`, `statistics.diagnostics`, `advantage_errors`, `training.step`,
`training.settings.mixtures`, `training.run.fit`, and `evaluation.numbers`.
`reports.metric_groups` gives titles to some of them.
"""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grpojax.core.types import Params, TrainState
from grpojax.models import huggingface as hf
from grpojax.reports import comparisons, curves
from grpojax.rewards.pool import Failure, all_failures
from grpojax.runtime import checkpoint
from grpojax.runtime.cli import configs
from grpojax.runtime.files import records
from grpojax.runtime.processes import distributed
from grpojax.runtime.terminal import screen, trackers
from grpojax.training import policies
from grpojax.training.config import to_config
from grpojax.training.data import prompts, splits
from grpojax.training.evaluation import best, evaluation
from grpojax.training.files import run_directory
from grpojax.training.report import run_report
from grpojax.training.report.progress import Progress, troubles
from grpojax.training.settings.run import AUTO, TrainSettings
from grpojax.training.step import sample_rows
from grpojax.training.step.draws import Source
from grpojax.training.step.extension import StepResult
from grpojax.training.step.run import Run

KEPT_FAILURES = 20  # per step, in failures.jsonl
REWARD = "held_out_reward"  # metric of evaluations

SHOWN = (
  "reward_mean",
  "group_acceptance",  # with dynamic sampling
  "completion_length_mean",
  "truncated",
  "zero_variance_groups",
  "entropy",
  "kl",  # with loss.beta
  "grad_norm",
  "tokens_per_second",
)


class Eta(NamedTuple):
  """Measured durations of steps and pauses, to predict the remaining time."""

  steps: int = -1  # number of timed steps; the first is slow and not counted
  seconds: float = 0.0  # seconds of timed steps, without compilation
  pauses: int = 0  # number of timed pauses between steps
  paused: float = 0.0  # seconds of pauses: evaluations, saving, ...

  def after_step(self, seconds: float) -> "Eta":
    """Adds the duration of a step."""
    total = self.seconds + seconds if self.steps >= 0 else 0.0
    return self._replace(steps=self.steps + 1, seconds=total)

  def after_pause(self, seconds: float) -> "Eta":
    """Adds the duration of a pause between two steps."""
    return self._replace(pauses=self.pauses + 1, paused=self.paused + seconds)


def step_line(settings: TrainSettings, row: Mapping[str, Any], eta: Eta) -> str:
  """Returns a progress line: a step's metrics and the remaining time."""
  step = row["step"]
  steps = settings.steps
  words = [f"step {step:>{len(str(steps))}}/{steps}"]
  # With several reward functions a row has the mean of each.
  rewards = [n for n in row if re.fullmatch("rewards/.*/mean", n)]
  shown = [SHOWN[0], *rewards, *SHOWN[1:]]
  for name in filter(row.__contains__, shown):
    value = curves.without_rounding(name, float(row[name]))
    words.append(f"{name} {value:.3g}")
  if "optimal_group_size" in row:
    best = [row[f"optimal_group_size{s}"] for s in ("", "_low", "_high")]
    words.append("best_group_size {:.0f} [{:.0f}, {:.0f}]".format(*best))
  if row["seconds_compile"] >= 1:
    words.append(f"compiled {row['seconds_compile']:.0f} s")
  if eta.steps > 0:
    seconds = eta.seconds / eta.steps
    pause = eta.paused / max(eta.pauses, 1)
    left = records.duration((steps - step) * (seconds + pause))
    words += [f"{seconds:.2f} s/step", f"{left} left"]
  return "  ".join([*words, *map("! {}".format, troubles(row))])


def _append(run: Run, name: str, row: dict[str, Any]) -> None:
  """Appends a row to a file of the run, in the main process only."""
  if distributed.is_main():
    run.check_directory()
    if name == run_directory.METRICS and not run.file(name).exists():
      print(
        f"warning: {run.file(name)} was removed: rows before step "
        f"{row['step']} are lost",
        flush=True,
      )
    records.append_jsonl(run.file(name), row)


def _ids(run: Run) -> dict[str, str]:
  """Reads the run's id in each tracker; ValueError for a damaged file."""
  file = run.file(run_directory.TRACKED)
  if not file.exists():
    return {}
  ids = records.json_object(file.read_bytes())
  if ids is None:
    raise ValueError(
      f"{file} cannot be read: remove it to start new runs in the trackers"
    )
  return {str(name): str(value) for name, value in ids.items()}


def tracked(run: Run, step: int, stack: contextlib.ExitStack) -> Run:
  """Opens a run's trackers in the main process; the stack closes them.

  `step` is the step of the run's checkpoint, or -1. ValueError if a tracker
  cannot be opened.
  """
  opened: dict[str, trackers.Tracker] = {}

  def open_here() -> None:
    ids = _ids(run)
    config = configs.flatten(to_config(run.settings))
    tracked_run = trackers.TrackedRun(
      run.directory, run.settings.name, config, step
    )
    names = run.settings.log.trackers
    by_name, new = trackers.open_all(names, tracked_run, ids)
    opened.update(by_name)
    if new != ids and new:
      records.write_json(run.file(run_directory.TRACKED), ids | new)

  distributed.on_main(open_here)
  stack.callback(trackers.close_all, opened)
  return run._replace(track=functools.partial(trackers.log_all, opened))


def record(run: Run, row: dict[str, Any]) -> None:
  """Writes a row to metrics.jsonl and to the trackers."""
  _append(run, run_directory.METRICS, row)
  run.track(row["step"], row)


def evaluations(run: Run, step: int) -> list[dict[str, Any]]:
  """Returns evaluations recorded at `step` on the current number of prompts."""
  key = step, len(run.held_out.examples)
  return [
    row
    for row in records.read_jsonl(run.file(run_directory.METRICS))
    if "accuracy" in row and (row.get("step"), row.get("prompts")) == key
  ]


def evaluate_held_out(
  run: Run, params: Params, step: int, check_signals: Callable[[], None]
) -> dict[str, Any]:
  """Evaluates greedily on held-out prompts; records and returns the metrics.

  `check_signals` is called meanwhile; if it raises, no metrics are recorded.
  """
  settings = run.settings
  source = Source(
    run.policy, run.greedy, run.reward_pool, run.mesh, check_signals
  )
  result = evaluation.evaluate(
    settings,
    source,
    params,
    prompts.held_out(settings, run.policy, run.held_out.examples),
    step,
    screen.progress(len(run.held_out.examples), settings.log.every),
  )
  values = evaluation.per_prompt(result, graded=settings.environment.on)
  returns = values.pop(evaluation.REWARD, None)
  row = {"step": step} | evaluation.numbers(values)
  row |= {"prompts": len(result.rewards)}
  if np.isfinite(result.rewards).any():
    row[REWARD] = float(np.nanmean(result.rewards))
  row["held_out_length"] = float(np.mean(result.lengths))
  if returns is not None:
    ends = evaluation.estimate(returns)[1:]
    row |= dict(zip((f"{REWARD}_low", f"{REWARD}_high"), ends, strict=True))
  each = evaluation.by_data_set(settings, result, values)
  for name, part in each.items():
    row |= {f"{name}/{k}": x for k, x in evaluation.numbers(part).items()}
  record(run, row)
  right = {"step": step} | evaluation.outcomes(result, values["accuracy"])
  right["samples"] = _first_samples(result, settings.eval.samples)
  _append(run, run_directory.EVALUATIONS, right)
  log_failures(run, step, result.failures)
  print(_held_out_line(settings, row), flush=True)
  for name, part in each.items():
    print(f"  {name}:", *evaluation.lines(part), flush=True)
  if step in (0, settings.steps):
    for sample in right["samples"]:
      _show(**sample)
  return row


def _held_out_line(settings: TrainSettings, row: dict[str, Any]) -> str:
  accuracy, reward = (
    [row.get(f"{name}{end}") for end in ("", "_low", "_high")]
    for name in ("accuracy", REWARD)
  )
  right = evaluation.text("accuracy", *accuracy)
  if reward[0] is None:
    right += f"  ({evaluation.UNSCORED})"
  after = f" after {row['step']} steps: "
  if reward[1] is None:
    return f"held-out greedy accuracy{after}{right}"
  if settings.environment.on:
    value = evaluation.text(evaluation.REWARD, *reward)
    return f"held-out mean return{after}{value}  accuracy {right}"
  mean = f"mean reward {reward[0]:.3g} (right: 1 or more)"
  return f"held-out greedy accuracy{after}{right}  {mean}"


def _first_samples(result: evaluation.Evaluation, count: int) -> list[dict]:
  rows = zip(result.examples, result.texts, result.rewards, strict=True)
  return [
    {
      "prompt": example["prompt_text"],
      "completion": texts[0],
      "reward": float(rewards[0]) if np.isfinite(rewards[0]) else None,
    }
    for example, texts, rewards in itertools.islice(rows, count)
  ]


def warn_of_shortcut(baseline: dict[str, Any], row: dict[str, Any]) -> None:
  """Warns if rewards rise and completions get shorter, but all are wrong."""
  names = REWARD, "held_out_length"
  if row["accuracy"] or not all(n in x for n in names for x in (baseline, row)):
    return
  (reward, length), (new_reward, new_length) = (
    [x[name] for name in names] for x in (baseline, row)
  )
  if new_reward > reward and new_length < length / 2:
    print(
      f"warning: the mean reward rose from {reward:.3g} to {new_reward:.3g}, "
      f"while completions shrank from {length:.0f} to {new_length:.0f} tokens "
      "and none is right: does the reward pay for short answers? See "
      f"{run_directory.SAMPLES}",
      flush=True,
    )


def _show(prompt: str, completion: str, reward: float | None) -> None:
  text = screen.printable(prompt + completion).rstrip()
  print("\n".join(f"    | {line}" for line in text.splitlines()))
  print(f"    | -> reward {math.nan if reward is None else reward:g}")


def log_failures(run: Run, step: int, failures: Sequence[Failure]) -> None:
  """Prints the number of failed rewards of a step; records the first ones."""
  if failures:
    print(f"step {step}: {evaluation.failed(failures)}", flush=True)
  for failure in failures[:KEPT_FAILURES]:
    _append(run, run_directory.FAILURES, {"step": step} | failure._asdict())


def log(run: Run, row: dict[str, Any], result: StepResult, eta: Eta) -> None:
  """Records a step's metrics; prints progress and samples when due."""
  settings = run.settings
  step = row["step"]
  if not settings.loss.needs_reference:
    row.pop("kl")
  record(run, row)
  shown = []
  if result.drawn is not None:
    counts = sample_rows.reward_counts(result.drawn.rewards.rewards)
    _append(run, run_directory.REWARDS, {"step": step, "counts": counts})
    if step % settings.log.samples_every == 0:
      shown = sample_rows.of_step(settings, run.policy, result)
  if step % settings.log.every == 0 or step == settings.steps:
    print(step_line(settings, row, eta), flush=True)
  for sample in shown:
    _append(run, run_directory.SAMPLES, {"step": step} | sample)
  if shown:
    _show(shown[0]["prompt"], shown[0]["completion"], shown[0]["reward"])
  if result.drawn is not None:
    log_failures(run, step, all_failures(result.drawn.rewards))


def finish(
  run: Run,
  state: TrainState,
  progress: Progress,
  checkpointer: checkpoint.Checkpointer,
  check_signals: Callable[..., None],
) -> dict[str, Any]:
  """Writes the model, the report and the summary; returns the summary.

  With checkpoint.best, writes the model of the highest held-out accuracy.
  `check_signals` is called first, and may raise.
  """
  run.check_directory()
  check_signals(together=True)
  steps = int(state.step)
  params = state.params
  known = distributed.on_main(lambda: evaluations(run, steps))
  if steps and not known:  # metrics.jsonl was lost
    evaluate_held_out(run, params, steps, check_signals)
  step = best.step(progress.evaluations)
  if step is None or not run.settings.checkpoint.best:
    step = steps
  if step != steps:
    params = checkpoint.restore_policy(checkpointer, params, step)
  model = run.file(run_directory.MODEL)
  if distributed.is_main():  # an earlier start may have been killed here
    run_directory.remove_model(run.directory)
  whole = policies.whole_params(run.policy, params)
  source = run.policy.files.directory
  keys = run.policy.files.ignore_keys
  hf.save(model, whole, source, dtype="float32", ignore_keys=keys)
  return distributed.on_main(lambda: _summarize(run, progress, steps, step))


def _interval(row: Mapping[str, Any], name: str) -> list[float]:
  return [row[f"{name}_low"], row[f"{name}_high"]]


def _summarize(
  run: Run, progress: Progress, steps: int, model_step: int
) -> dict[str, Any]:
  metrics = run.file(run_directory.METRICS)
  summary = {
    "train_seconds": progress.train_seconds,
    "steps": steps,
    "model_step": model_step,
    "eval_prompts": len(run.held_out.examples),
    "dropped_prompts": run.train.dropped + run.held_out.dropped,
    "held_out_in_training": splits.in_training(run.train, run.held_out),
    "failed_rewards": progress.failed_rewards,
    "steps_with": progress.steps_with,
  }
  last = [progress.baseline, *evaluations(run, steps)][-1]
  for when, row in {"before": progress.baseline, "after": last}.items():
    summary[f"accuracy_{when}"] = row["accuracy"]
    summary[f"accuracy_{when}_interval"] = _interval(row, "accuracy")
    summary[f"reward_{when}"] = row.get(REWARD)
    if f"{REWARD}_low" in row:
      summary[f"reward_{when}_interval"] = _interval(row, REWARD)
    for name in row:
      if name.endswith("/accuracy"):
        summary[f"{name}_{when}"] = row[name]
  columns = curves.columns(records.read_jsonl(metrics))
  if progress.diagnoses:
    unknown = math.inf, 1.0, math.inf
    best_size, *interval = comparisons.group_size(columns) or unknown
    summary["optimal_group_size"] = best_size
    summary["optimal_group_size_interval"] = interval
    size = run.settings.group_size
    if size != AUTO:
      error = comparisons.error_of_best(columns, size)
      summary["gradient_error_of_best"] = error
  if row := progress.evaluations.get("best"):
    summary["best_step"] = row["step"]
    summary["best_accuracy"] = row["accuracy"]
    summary["best_accuracy_interval"] = _interval(row, "accuracy")
  model = run.file(run_directory.MODEL)
  saved_step = {"step": model_step, "of_steps": steps}
  records.write_json(model / run_directory.MODEL_STEP, saved_step)
  # The summary marks a finished run, so it is written last.
  run_report.write(run.directory, finished=True)
  records.write_json(run.file(run_directory.SUMMARY), summary)
  return summary
