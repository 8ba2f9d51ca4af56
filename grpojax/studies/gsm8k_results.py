"""Tables, summary and picture of the study `gsm8k`."""

import json
import pathlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from grpojax.runtime import pictures, records
from grpojax.statistics.intervals import mean_interval, paired_difference
from grpojax.studies import run as study
from grpojax.training import run_directory


def moving_average(values, width: int):
  """Means of `width` successive values, with Student's 95% intervals.

  Args:
    values: one a step.
    width: steps that are averaged, at least 2.

  Returns:
    (indices of the windows' middles, means, lows, highs), arrays.
  """
  values = np.asarray(values, np.float32)
  windows = np.lib.stride_tricks.sliding_window_view(values, width)
  intervals = [mean_interval(window) for window in windows]
  middles = np.arange(len(windows)) + (width - 1) / 2
  return middles, *np.array(intervals, np.float64).T


def summarize(
  config: ConfigDict, directory: pathlib.Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """The numbers of the study, and one row a step of GRPO."""
  stages = {
    name: json.loads((directory / f"{name}.json").read_text())
    for name in ("before", "after", "sft/sft", "grpo/summary")
  }
  rows = records.read_jsonl(directory / "grpo" / run_directory.METRICS)
  tested = {row["step"]: row for row in rows if "accuracy" in row}
  curve = [
    {
      "step": row["step"],
      "reward": row["reward_mean"],
      "completion_length": row["completion_length_mean"],
      "entropy": row["entropy"],
      "accuracy": tested.get(row["step"], {}).get("accuracy"),
    }
    for row in rows
    if "reward_mean" in row
  ]
  rewards = [np.array(stages[n]["rewards"]) for n in ("before", "after")]
  grpo, losses = stages["grpo/summary"], stages["sft/sft"]["losses"]
  summary = {
    "sft_loss": [losses[0]["loss"], losses[-1]["loss"]],
    "prompts": len(rewards[0]),
    "samples": config.samples,
  }
  for name, values in zip(("before", "after"), rewards, strict=True):
    summary[f"reward_{name}"] = list(mean_interval(values))
    summary[f"solved_{name}"] = float(np.mean(values > 0))
    held_out = grpo[f"accuracy_{name}"], *grpo[f"accuracy_{name}_interval"]
    summary[f"held_out_{name}"] = held_out
  summary["reward_difference"] = paired_difference(*rewards[::-1])._asdict()
  summary["held_out_problems"] = grpo["eval_prompts"]
  summary["seconds"] = {
    "sft": stages["sft/sft"]["seconds"],
    "before": stages["before"]["seconds"],
    "grpo": grpo["train_seconds"],
    "after": stages["after"]["seconds"],
  }
  return summary, curve


def _interval(numbers) -> str:
  return "{:.1%} [{:.1%}, {:.1%}]".format(*numbers)


def lines(summary: dict[str, Any]) -> list[str]:
  """What is printed at the end."""
  difference = summary["reward_difference"]
  text = [
    "SFT: loss {:.2f} -> {:.2f} nats a token".format(*summary["sft_loss"]),
    f"reward on the {summary['prompts']} training problems of GRPO, "
    f"{summary['samples']} samples each:",
  ]
  for when in ("before", "after"):
    text.append(
      f"  {when:6} {_interval(summary[f'reward_{when}'])}; "
      f"{summary[f'solved_{when}']:.1%} of the problems solved at least once"
    )
  text.append(
    "  difference "
    + _interval([difference[k] for k in ("difference", "low", "high")])
    + f", p = {difference['p_value']:.2g}"
  )
  text.append(
    f"greedy accuracy on {summary['held_out_problems']} held-out problems:"
  )
  for when in ("before", "after"):
    text.append(f"  {when:6} {_interval(summary[f'held_out_{when}'])}")
  spent = (f"{k} {records.duration(v)}" for k, v in summary["seconds"].items())
  text.append("seconds: " + ", ".join(spent))
  return text


def picture(directory: pathlib.Path, summary, curve, path) -> None:
  """SFT loss; reward along GRPO, and before and after; held-out accuracy."""
  figure, ((loss, reward, held_out),) = study.new_figure(1, 3, 4.5)
  losses = json.loads((directory / "sft" / "sft.json").read_text())["losses"]
  loss.plot([r["step"] for r in losses], [r["loss"] for r in losses])
  loss.set(title="SFT: loss", xlabel="step", ylabel="nats a token")
  steps = np.array([row["step"] for row in curve])
  values = [row["reward"] for row in curve]
  reward.plot(steps, values, ".", alpha=0.3, label="a step's samples")
  width = min(max(len(steps) // 10, 2), len(steps))
  if width > 1:
    middles, means, low, high = moving_average(values, width)
    middles = steps[0] + middles
    reward.plot(middles, means, label=f"mean of {width} steps, 95%")
    reward.fill_between(middles, low, high, alpha=0.3)
  ends = np.array([summary["reward_before"], summary["reward_after"]])
  reward.errorbar(
    [0, steps[-1]],
    ends[:, 0],
    np.abs(ends[:, 1:].T - ends[:, 0]),
    fmt="ko",
    capsize=4,
    label="all problems, before and after",
  )
  reward.set(title="GRPO: reward on training problems", xlabel="step")
  reward.legend(fontsize=8)
  rows = records.read_jsonl(directory / "grpo" / run_directory.METRICS)
  rows = [row for row in rows if "accuracy" in row]
  at = [row["step"] for row in rows]
  held_out.plot(at, [row["accuracy"] for row in rows], marker=".")
  bounds = ([row[f"accuracy_{k}"] for row in rows] for k in ("low", "high"))
  held_out.fill_between(at, *bounds, alpha=0.25)
  held_out.set(title="held-out problems: greedy accuracy, 95%", xlabel="step")
  for axes in (loss, reward, held_out):
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
  pictures.save_figure(figure, path)


def write(config: ConfigDict, directory: pathlib.Path) -> None:
  """Writes curve.csv, summary.json and gsm8k.png, and prints the result."""
  summary, curve = summarize(config, directory)
  study.write_csv(directory / "curve.csv", curve)
  records.write_json(directory / "summary.json", summary)
  picture(directory, summary, curve, directory / "gsm8k.png")
  print(*lines(summary), sep="\n")
  print(f"tables and picture are in {directory}/")
