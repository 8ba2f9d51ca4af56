"""Writes invented run directories for the tests of reports."""

import json
import math
import random

HOSTILE = (
  "</script><script>window.hacked = 1</script>",
  "<img src=x onerror='window.hacked = 1'>",
  "\x1b[31mred\x1b[0m \x07",
  "\u202edlrow olleh\u202c \u200f",
  "a & b &lt; c \u2028 next \u2029 end",
  "<!-- <script> -->",
  "]]> '\"` ${window.hacked = 1} {{x}} @@DATA@@",
  "\ud800 half a pair",
)
"""Texts with effects if they were not treated as text."""


def _lines(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _step(rng, step, steps, better):
  done = 1 - math.exp(-3 * step / steps)
  row = {
    "step": step,
    "reward_mean": 0.1 + 0.8 * done * better + rng.gauss(0, 0.05),
    "reward_std": 0.4,
    "completion_length_mean": 20 + 30 * done + rng.gauss(0, 2),
    "truncated": max(0.0, 0.1 - 0.1 * done),
    "zero_variance_groups": done * 0.6,
    "entropy": 0.5 - 0.4 * done,
    "kl": 0.02 * done,
    "loss": rng.gauss(0, 0.1),
    "grad_norm": abs(rng.gauss(0.3, 0.1)) + 20 * (rng.random() < 0.01),
    "clip_fraction_low": 0.01,
    "seconds_rollout": 0.4,
    "seconds_rewards": 0.01,
    "seconds_update": 0.8,
    "seconds_step": 1.25 + 8 * (step == 1),
    "tokens_per_second": 900 + rng.gauss(0, 40),
    "train_seconds": 1.25 * step,
  }
  if step % 10 == 1:
    size = 6 + 4 * done
    row |= {"optimal_group_size": size, "optimal_group_size_low": size / 2}
    row |= {"optimal_group_size_high": 2 * size, "c3": 3.6}
    row |= {"c1": 0.1 + 0.1 * done, "c1_se": 0.02}
  return row


def _evaluation(rng, step, steps, better):
  share = 0.1 + 0.85 * (1 - math.exp(-3 * step / steps)) * better
  right = "".join("01"[rng.random() < share] for _ in range(60))
  mean = right.count("1") / 60
  row = {"step": step, "accuracy": mean, "prompts": 60}
  row |= {"accuracy_low": max(mean - 0.1, 0), "accuracy_high": mean + 0.05}
  return row, {"step": step, "problems": "asked", "right": right}


def _samples(rng, step):
  rows = []
  for i, text in enumerate(HOSTILE):
    group, number = divmod(i, 4)
    right = float(number % 2)
    words = [text[i : i + 3] for i in range(0, len(text), 3)] + ["<|end|>"]
    row = {"step": step, "group": group, "answer": "7", "completion": text}
    row |= {"prompt": f"{HOSTILE[group]} prompt {group}\n"}
    row |= {"reward": right, "advantage": right - 0.5}
    row |= {"rewards": {"exact_answer": right, "format": 0.5}}
    row |= {"truncated": number == 3, "tokens": words}
    for name in ("logprobs", "ref_logprobs"):
      row[name] = [-rng.random() * 3 for _ in words]
    rows.append(row)
  return rows


def make_run(path, seed=0, steps=60, better=1.0):
  """Writes the files of a run from a seed."""
  rng = random.Random(seed)
  path.mkdir(parents=True)
  metrics = []
  answers = []
  counts = []
  samples = []
  for step in range(steps + 1):
    if step:
      metrics.append(_step(rng, step, steps, better))
      high = round(64 * min(max(metrics[-1]["reward_mean"], 0), 1))
      pairs = [[0.0, 64 - high], [1.0, high]]
      counts.append({"step": step, "counts": pairs})
    if step % 10 == 0:
      row, right = _evaluation(rng, step, steps, better)
      metrics.append(row)
      answers.append(right)
      samples += _samples(rng, step) if step else []
  _lines(path / "metrics.jsonl", metrics)
  _lines(path / "evaluations.jsonl", answers)
  _lines(path / "rewards.jsonl", counts)
  _lines(path / "samples.jsonl", samples)
  failure = {"step": 3, "function": HOSTILE[0], "reason": HOSTILE[1]}
  failure |= {"prompt": HOSTILE[1], "completion": HOSTILE[-1]}
  _lines(path / "failures.jsonl", [failure])
  settings = {"name": "made-up", "seed": seed, "steps": steps}
  settings |= {"model": {"path": HOSTILE[0]}}
  (path / "config.json").write_text(json.dumps(settings))
  return path
