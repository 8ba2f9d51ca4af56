"""Groups of metrics in a report, and their titles."""

import itertools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple


class Group(NamedTuple):
  """Metrics shown together."""

  title: str
  text: str  # advice to the reader
  pattern: str  # regular expression for the whole names of its metrics


GROUPS = (
  Group(
    "Learning",
    "Is the policy getting better, and at what?",
    r"accuracy|held_out_reward|reward_mean|reward_std|rewards_missing|reward_failures",
  ),
  Group(
    "Reward functions",
    "Mean and spread of each function; missing values are left out.",
    r"(rewards|logged)/.*/.*",
  ),
  Group("By data set", "Metrics of each data set of the mixture.", r".*/.*"),
  Group(
    "Groups and prompts",
    "A group whose rewards are all equal teaches nothing.",
    r"zero_variance_groups|group_acceptance|gen_batches|groups_kept"
    r"|group_size|success_rate\w*|prompts_\w+|prompt_weight\w*",
  ),
  Group(
    "Completions",
    "Length, and truncation at the token budget.",
    r"completion_length\w*|held_out_length|truncated|length_penalty\w*",
  ),
  Group(
    "Policy",
    "A collapse of the entropy, or a diverging KL, ends learning.",
    r"entropy\w*|kl|kl_\w+",
  ),
  Group(
    "Update",
    "Loss, gradient and clipping of the optimizer's updates.",
    r"loss|\w*grad_norm|\w*gradient_weight|update_norm|clip_fraction\w*"
    r"|ratio\w*|skipped_updates|learning_rate|\w*_loss",
  ),
  Group(
    "Rollout and trainer",
    "Log-probabilities of the two programs, which should be equal: their "
    "differences, and the effect of the correction.",
    r"rollout_\w+|is_weight\w*|off_policy_masked",
  ),
  Group(
    "Noise of the gradient",
    "The error of a step's gradient, c1 G/N + c2/N + c3/(N (G - 1)), is "
    "smallest at G* = 1 + sqrt(c3/c1). If the estimate of c1 is at most 0, G* "
    "is infinite and not drawn.",
    r"(own_)?(c[123]|gradient_\w+|optimal_group_size)|own_\w+",
  ),
  Group(
    "Speed",
    "Where a step's time goes.",
    r"seconds\w*|tokens_per_second|train_seconds",
  ),
  Group("Other", "", r".*"),
)

TITLES = {
  "accuracy": ("Held-out accuracy", "share of prompts, greedy"),
  "held_out_reward": ("Held-out reward", "mean over prompts, greedy"),
  "reward_mean": ("Reward", "mean over completions"),
  "reward_std": ("Spread of rewards", "standard deviation"),
  "rewards_missing": ("Without reward", "share of completions"),
  "reward_failures": ("Rewards that failed", "count"),
  "zero_variance_groups": ("Groups without variance", "share of groups"),
  "group_acceptance": ("Groups that vary", "share of drawn groups"),
  "gen_batches": ("Batches drawn", "per step"),
  "groups_kept": ("Groups kept", "share of the batch"),
  "group_size": ("Group size", "completions per prompt"),
  "completion_length_mean": ("Length, mean", "tokens"),
  "completion_length_max": ("Length, longest", "tokens"),
  "held_out_length": ("Held-out length", "tokens, greedy"),
  "length_penalty_mean": ("Length penalty", "mean over completions"),
  "truncated": ("Truncated", "share of completions"),
  "entropy": ("Entropy", "nats per token"),
  "entropy_coefficient": ("Entropy coefficient", ""),
  "kl": ("KL to the reference", "k3 or exact, nats per token"),
  "loss": ("Loss", ""),
  "grad_norm": ("Gradient norm", "before clipping"),
  "update_norm": ("Update norm", ""),
  "clip_fraction_low": ("Clipped below", "share of tokens"),
  "clip_fraction_high": ("Clipped above", "share of tokens"),
  "ratio_min": ("Smallest ratio", "new / old policy"),
  "ratio_max": ("Largest ratio", "new / old policy"),
  "skipped_updates": ("Skipped updates", "gradients not finite"),
  "rollout_kl": ("KL, rollout to trainer", "k3, nats per token"),
  "rollout_mismatch_mean": ("Mismatch, mean", "nats per token"),
  "rollout_mismatch_max": ("Mismatch, largest", "nats per token"),
  "rollout_effective_samples": ("Effective samples", "share"),
  "optimal_group_size": ("Best group size G*", "completions per prompt"),
  "gradient_snr": ("Signal to noise", "of a step's gradient"),
  "gradient_mse": ("Error of the gradient", "squared length"),
  "gradient_sq": ("Gradient", "squared length"),
  "seconds_step": ("A step", "seconds"),
  "seconds_compile": ("Compilation", "seconds"),
  "seconds_rollout": ("Sampling", "seconds"),
  "seconds_sync": ("Weights to engines", "seconds"),
  "seconds_rewards": ("Rewards", "seconds"),
  "seconds_reference": ("Comparison and reference", "seconds"),
  "seconds_diagnosis": ("Diagnosis", "seconds"),
  "seconds_update": ("Update", "seconds"),
  "tokens_per_second": ("Tokens sampled", "per second"),
  "train_seconds": ("Time", "seconds since the start"),
}

COMPARED = (
  "reward_mean completion_length_mean truncated zero_variance_groups entropy"
  " kl grad_norm seconds_step"
).split()
"""Metrics of steps for which differences between runs are shown."""


def part_of(name: str) -> int:
  """Returns the index in `GROUPS` of a metric's group."""
  patterns = enumerate(group.pattern for group in GROUPS)
  return next(i for i, pattern in patterns if re.fullmatch(pattern, name))


def layout(names: Iterable[str]) -> list[dict[str, Any]]:
  """Returns the groups of these metrics, in order, with titles and units."""
  rank = {name: i for i, name in enumerate(TITLES)}
  place = lambda name: (part_of(name), rank.get(name, len(rank)), name)
  groups = []
  for i, members in itertools.groupby(sorted(set(names), key=place), part_of):
    metrics = []
    for name in members:
      title, unit = TITLES.get(name, (name, ""))
      metrics.append({"name": name, "title": title, "unit": unit})
    title, text, _ = GROUPS[i]
    groups.append({"title": title, "text": text, "metrics": metrics})
  return groups
