"""Real text from scratch: a tokenizer, SFT and GRPO on GSM8K, on two CPU cores.

    python -m grpojax.studies.gsm8k --config.data.path=DIR
                                    [--config.key=value ...] [--run_dir=RUN]

DIR has GSM8K's train.jsonl and test.jsonl (arXiv 2110.14168). A byte-level BPE
is trained on the training set, a decoder of a million parameters on those of
its texts that fit into a row (see `grpojax.sft`), then GRPO goes on from there
on the shortest training problems (see `grpojax.train`). What is measured,
before and after GRPO: the reward of samples on these training problems, the
same ones for both, and greedy accuracy on the shortest held-out problems. RUN,
by default runs/gsm8k, gets

    texts/            the problems of SFT: the training set, without the notes
                      of the calculator, <<48/2=24>>
    prompts/          the problems of GRPO: the shortest of both splits
    sft/              the model after SFT, and its loss curve
    grpo/             the training run; grpo/model is the final model
    before.json, after.json   rewards on the training problems
    curve.csv         one row a step of GRPO: reward, accuracy
    summary.json
    gsm8k.png

The same command resumes at the stage, and in GRPO at the step, where it ended.
"""

import json
import pathlib
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.data import gsm8k
from grpojax.data.examples import SPLITS
from grpojax.runtime.cli.config import below, config_error
from grpojax.runtime.cli.settings import changed, section, setting, to_config
from grpojax.runtime.files import records
from grpojax.runtime.terminal import pictures
from grpojax.statistics.intervals import mean_interval, paired_difference
from grpojax.studies import run as study
from grpojax.training import policy as policy_lib
from grpojax.training.config import SETTINGS as TRAIN_SETTINGS
from grpojax.training.config import from_config
from grpojax.training.data import prompts, splits
from grpojax.training.evaluation import evaluation
from grpojax.training.run import fit, run_directory
from grpojax.training.settings.run import TrainSettings
from grpojax.training.sft import sft, sft_config
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step import sampling as sampling_lib

PROGRAM = "python -m grpojax.studies.gsm8k"
_NOTE = re.compile(r"<<[^<>]*>>")


FLAGS = study.FLAGS
SETTINGS = section(
  "the study",
  name=setting("gsm8k", "name of the study; its directory is runs/NAME"),
  prompts=setting(
    256,
    "training problems of GRPO, the shortest; an interval needs 2",
    within="[2, inf)",
  ),
  samples=setting(
    16,
    "completions of each, before and after; an interval needs 2",
    within="[2, inf)",
  ),
  data=section(
    "the data", path=setting("", "directory of train.jsonl and test.jsonl")
  ),
  sft=changed(
    sft_config.SETTINGS,
    {
      "name": "sft",
      "steps": 1000,
      "format": "dialogue",
      "rows": 20,
      "row_length": 128,
      "log_every": 10,
      "data.name": "gsm8k",
      "tokenizer": "bpe",
      "vocab_size": 2048,
      "model.heads": 2,
      "model.kv_heads": 2,
    },
  ),
  train=changed(
    TRAIN_SETTINGS,
    {
      "name": "grpo",
      "steps": 160,
      "batch_size": 16,
      "group_size": 16,
      "data.name": "gsm8k",
      "data.max_prompt_length": 96,
      "sampling.max_new_tokens": 72,
      "sampling.temperature": 0.7,
      "logits_chunk": 24,
      "reward.functions": ("math_answer",),
      "optim.learning_rate": 1.5e-4,
      "optim.micro_batches": 4,
      "eval.every": 20,
      "eval.num_prompts": 256,
      "checkpoint.every": 20,
      "log.every": 5,
      "log.samples_every": 20,
      "log.trackers": (),
    },
  ),
)
"""A run of less than twenty minutes on two cores."""


def default_config() -> ConfigDict:
  """Makes the config of the embedded study."""
  return to_config(SETTINGS)


def sft_run(config: ConfigDict, directory: pathlib.Path) -> ConfigDict:
  """Makes the config of supervised fine-tuning."""
  run = config.sft.copy_and_resolve_references()
  with run.unlocked():
    run.data.path = str(directory / "texts")
  return run.lock()


def grpo_run(config: ConfigDict, directory: pathlib.Path) -> TrainSettings:
  """Makes the settings of GRPO, from the model of SFT."""
  run = config.train.copy_and_resolve_references()
  with run.unlocked():
    run.model.path = str(directory / "sft")
    run.data.path = str(directory / "prompts")
  return from_config(run.lock())


def config_errors(config: ConfigDict) -> list[str]:
  """Lists what is wrong with the values of a config."""
  wrong = []
  for check, part in (
    (sft_config.validate, "sft"),
    (from_config, "train"),
  ):
    try:
      check(config[part])
    except ValueError as error:
      wrong.append(below(part, str(error)))
  try:
    for split in SPLITS:
      gsm8k.load(split, path=config.data.path)
  except ValueError as error:
    wrong.append(config_error("data.path", config.data.path, f"{error}"))
  return wrong


def write_problems(config: ConfigDict, directory: pathlib.Path) -> None:
  """Writes the problems of SFT and of GRPO, without the calculator's notes.

  GRPO has the shortest ones (question and solution together, in characters).
  """
  sizes = {"train": config.prompts, "test": config.train.eval.num_prompts}
  for split, size in sizes.items():
    rows = [
      {
        "question": example["prompt"],
        "answer": _NOTE.sub("", example["solution"]),
      }
      for example in gsm8k.load(split, path=config.data.path)
    ]
    shortest = sorted(rows, key=lambda r: len(r["question"] + r["answer"]))
    for name, chosen in (("texts", rows), ("prompts", shortest[:size])):
      (directory / name).mkdir(exist_ok=True)
      text = "".join(json.dumps(row) + "\n" for row in chosen)
      records.write_text(directory / name / f"{split}.jsonl", text)


def measure(
  config: ConfigDict, run: TrainSettings, model: str
) -> dict[str, Any]:
  """Samples a model's completions of the training problems of GRPO."""
  began = time.perf_counter()
  policy = policy_lib.load_policy(model, run.model.dtype)
  sampling = run.sampling.distribution
  rows = max(run.eval.batch_size // config.samples, 1)
  batches = prompts.prompt_batches(
    run,
    policy,
    splits.load_examples(run, "train"),
    batch_size=rows,
    shuffle=False,
    repeat=False,
  )
  with rewards_lib.open_reward_pool(run) as reward_pool:
    evaluated = evaluation.evaluate(
      policy,
      policy.params,
      sampling_lib.make_sampler(run, policy, config.samples, sampling),
      batches,
      reward_pool,
      jax.random.key(run.seed + 1),
      rows,
    )
  return {
    "rewards": np.mean(evaluated.rewards, axis=1),
    "samples": [
      {"prompt": e["prompt_text"], "completion": t[0], "reward": float(r[0])}
      for e, t, r in zip(
        evaluated.examples[:8], evaluated.texts, evaluated.rewards, strict=False
      )
    ],
    "seconds": time.perf_counter() - began,
  }


def _stages(config: ConfigDict, directory: pathlib.Path) -> None:
  """Makes the stages that are not there yet."""
  if not (directory / "prompts" / "test.jsonl").exists():
    write_problems(config, directory)
  run = grpo_run(config, directory)
  if not (directory / "sft").exists():
    print("1/4 supervised fine-tuning", flush=True)
    sft.run(sft_run(config, directory), directory / "sft", PROGRAM)
  for name, model in (("before", "sft"), ("after", "grpo/model")):
    if name == "after":
      print("3/4 GRPO", flush=True)
      fit.run(run, directory / "grpo")
    path = directory / f"{name}.json"
    if not path.exists():
      print(f"{2 if name == 'before' else 4}/4 reward {name} GRPO", flush=True)
      records.write_json(path, measure(config, run, str(directory / model)))


def moving_average(values, width: int):
  """Means of successive values, with Student's 95% intervals.

  Args:
    values: one a step.
    width: number of steps that are averaged, at least 2.

  Returns:
    (indices of the windows' middles, means, lows, highs), arrays.
  """
  values = np.asarray(values, np.float32)
  windows = np.lib.stride_tricks.sliding_window_view(values, width)
  intervals = [mean_interval(window) for window in windows]
  middles = np.arange(len(windows)) + (width - 1) / 2
  return middles, *np.array(intervals, np.float64).T


def summarize(config: ConfigDict, stages: Mapping[str, Any]) -> dict[str, Any]:
  """Makes the numbers of summary.json from the files of the stages."""
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
  return summary


def _curve(rows) -> list[dict[str, Any]]:
  """Makes the rows of curve.csv, one a step, of those of metrics.jsonl."""
  accuracy = {row["step"]: row["accuracy"] for row in rows if "accuracy" in row}
  return [
    {
      "step": row["step"],
      "reward": row["reward_mean"],
      "completion_length": row["completion_length_mean"],
      "entropy": row["entropy"],
      "accuracy": accuracy.get(row["step"]),
    }
    for row in rows
    if "reward_mean" in row
  ]


def _interval(numbers) -> str:
  return "{:.1%} [{:.1%}, {:.1%}]".format(*numbers)


def lines(summary: dict[str, Any]) -> list[str]:
  """Lines that are printed at the end."""
  difference = summary["reward_difference"]
  bounds = [difference[k] for k in ("difference", "low", "high")]
  spent = (f"{k} {records.duration(v)}" for k, v in summary["seconds"].items())
  return [
    "SFT: loss {:.2f} -> {:.2f} nats a token".format(*summary["sft_loss"]),
    f"reward on the {summary['prompts']} training problems of GRPO, "
    f"{summary['samples']} samples each:",
    *(
      f"  {when:6} {_interval(summary[f'reward_{when}'])}; "
      f"{summary[f'solved_{when}']:.1%} of the problems solved at least once"
      for when in ("before", "after")
    ),
    f"  difference {_interval(bounds)}, p = {difference['p_value']:.2g}",
    f"greedy accuracy on {summary['held_out_problems']} held-out problems:",
    *(
      f"  {when:6} {_interval(summary[f'held_out_{when}'])}"
      for when in ("before", "after")
    ),
    "seconds: " + ", ".join(spent),
  ]


def draw(losses, rows, summary, path: pathlib.Path) -> None:
  """Draws SFT loss; reward along, before and after GRPO; held-out accuracy.

  Args:
    losses: rows of SFT's loss.
    rows: rows of GRPO's metrics.jsonl.
    summary: numbers of `summarize`.
    path: PNG to write.
  """
  figure, ((loss, reward, held_out),) = study.new_figure(1, 3, 4.5)
  loss.plot([r["step"] for r in losses], [r["loss"] for r in losses])
  loss.set(title="SFT: loss", xlabel="step", ylabel="nats a token")
  _draw_reward(reward, _curve(rows), summary)
  evaluated = [row for row in rows if "accuracy" in row]
  at, accuracy, *bounds = (
    [row[name] for row in evaluated]
    for name in ("step", "accuracy", "accuracy_low", "accuracy_high")
  )
  held_out.plot(at, accuracy, marker=".")
  held_out.fill_between(at, *bounds, alpha=0.25)
  held_out.set(title="held-out problems: greedy accuracy, 95%", xlabel="step")
  for axes in (loss, reward, held_out):
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
  pictures.save_figure(figure, path)


def _draw_reward(axes, curve, summary) -> None:
  steps = np.array([row["step"] for row in curve])
  values = [row["reward"] for row in curve]
  axes.plot(steps, values, ".", alpha=0.3, label="a step's samples")
  width = min(max(len(steps) // 10, 2), len(steps))
  if width > 1:
    middles, means, low, high = moving_average(values, width)
    middles = steps[0] + middles
    axes.plot(middles, means, label=f"mean of {width} steps, 95%")
    axes.fill_between(middles, low, high, alpha=0.3)
  ends = np.array([summary["reward_before"], summary["reward_after"]])
  axes.errorbar(
    [0, steps[-1]],
    ends[:, 0],
    np.abs(ends[:, 1:].T - ends[:, 0]),
    fmt="ko",
    capsize=4,
    label="all problems, before and after",
  )
  axes.set(title="GRPO: reward on training problems", xlabel="step")
  axes.legend(fontsize=8)


def write(config: ConfigDict, directory: pathlib.Path) -> None:
  """Writes curve.csv, summary.json and gsm8k.png, and prints the result."""
  stages = {
    name: json.loads((directory / f"{name}.json").read_text())
    for name in ("before", "after", "sft/sft", "grpo/summary")
  }
  rows = records.read_jsonl(directory / "grpo" / run_directory.METRICS)
  summary = summarize(config, stages)
  study.write_csv(directory / "curve.csv", _curve(rows))
  records.write_json(directory / "summary.json", summary)
  losses = stages["sft/sft"]["losses"]
  draw(losses, rows, summary, directory / "gsm8k.png")
  print(*lines(summary), sep="\n")
  print(f"tables and picture are in {directory}/")


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  config, directory = study.open_study(
    argv, PROGRAM, SETTINGS, config_errors, __doc__
  )
  # Before and after run the same programs: they are compiled once.
  jax.config.update("jax_compilation_cache_dir", str(directory / "compiled"))
  with study.resumable():
    _stages(config, directory)
  write(config, directory)


if __name__ == "__main__":
  main(sys.argv[1:])
