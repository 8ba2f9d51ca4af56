"""A step's rows of samples.jsonl and rewards.jsonl.

Every `log.samples_every` steps the first `log.sample_groups` groups of a batch
are written to samples.jsonl, one row per completion:

    step              as in metrics.jsonl
    group             number of the group in the batch, from 0
    prompt            text that the model read
    completion        text without the EOS; in a trajectory, of the last turn
    turns             only in trajectories, for each turn: "by" (model or
                      environment), "text", number of "tokens", and "reward"
    answer            reference answer of the example, or null
    reward            weighted sum of the functions' rewards, minus the
                      reward.length_penalty if any, or null. The advantage may
                      use another number: see reward.aggregation,
                      loss.kl_placement and loss.truncated
    rewards           reward, or null, of each function by name
    advantage         value in the loss; 0 if the completion is not used
    truncated         True if cut off at the limit of tokens, without an EOS
    tokens            text of each token, the EOS included
    logprobs          rollout log-probability per token, in nats; null, like
                      the fields below, for tokens of an environment
    trainer_logprobs  the same from the training program before the update; only
                      with loss.old_logprobs="trainer" and several updates per
                      step. Null, like ref_logprobs, for samples without a
                      gradient, for which they are not computed
    ref_logprobs      the same from the reference policy, if any

Every step writes a row to rewards.jsonl, whose `counts` are pairs of a reward
and its number of completions, in rising order. More than `BINS` different
rewards are counted in `BINS` equal intervals, each given by its middle.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from grpojax.core import meshes
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenization
from grpojax.training.policies import Policy
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step.draws import Draw
from grpojax.training.step.extension import StepResult

BINS = 32
TRAINING_LOGPROBS = {"trainer_logprobs", "ref_logprobs"}
DIGITS = 4  # decimal places of log-probabilities


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
  """Returns the text of each token, decoded after its predecessor.

  Some tokenizers drop the space before the first token of a text.
  """
  decode = functools.cache(lambda *ids: tokenization.decode(tokenizer, ids))

  def after(before: int, token: int) -> str:
    start = decode(before)
    both = decode(before, token)
    return both[len(start) :] if both.startswith(start) else decode(token)

  first = [decode(token) for token in ids[:1]]
  return first + [after(*pair) for pair in itertools.pairwise(ids)]


def of_step(
  settings: TrainSettings, policy: Policy, result: StepResult
) -> list[dict[str, Any]]:
  """Returns rows of samples.jsonl without "step"; called by all processes."""
  draw = result.drawn.batch
  batch = result.batch
  samples = draw.rollout
  arrays = {
    "ids": samples.completion_ids,
    "mask": samples.completion_mask,
    "finished": samples.finished,
    "advantage": batch.advantages,
    "logprobs": samples.logprobs,
    "ref_logprobs": batch.ref_logprobs,
  }
  if settings.loss.old_logprobs == "trainer":
    arrays["trainer_logprobs"] = batch.old_logprobs
  if batch.packing is not None:
    arrays["packed"] = batch.packing.packed()
  if samples.turns is not None:
    arrays |= {"turns": samples.turns, "turn_rewards": samples.turn_rewards}
  if not settings.log.sample_groups:
    return []
  # All processes take part in the transfer, but only the main one needs rows.
  arrays = meshes.fetch({k: v for k, v in arrays.items() if v is not None})
  if not distributed.is_main():
    return []
  groups = min(settings.log.sample_groups, len(draw.examples))
  return [
    {"group": b} | _row(policy, draw, arrays, b, g)
    for b in range(groups)
    for g in range(arrays["ids"].shape[1])
  ]


def _row(policy: Policy, draw: Draw, arrays, b: int, g: int):
  rewards = draw.rewards
  example = draw.examples[b]
  sample = {name: values[b, g] for name, values in arrays.items()}
  ids, mask = sample["ids"], sample["mask"]
  # The training program leaves out samples without a gradient.
  if not sample.get("packed", True):
    unknown = np.full(mask.shape, np.nan)
    sample |= dict.fromkeys(TRAINING_LOGPROBS & sample.keys(), unknown)
  last_turn = mask
  turns = {}
  if "turns" in sample:
    last_turn = mask & (sample["turns"] == sample["turns"].max())
    turns = {"turns": turns_of(policy.tokenizer, sample)}
    # Tokens of the environment have no log-probabilities.
    for name in sample.keys() & {"logprobs", *TRAINING_LOGPROBS}:
      sample[name] = np.where(sample["turns"] >= 0, sample[name], np.nan)
  text = tokenization.decode_completion(
    policy.tokenizer, ids, last_turn, policy.ends
  )
  return {
    "prompt": example["prompt_text"],
    "completion": text,
    **turns,
    "answer": example.get("answer"),
    "reward": _number(rewards.rewards[b, g]),
    "rewards": {
      name: _number(values[b, g]) for name, values in rewards.values.items()
    },
    "advantage": _numbers(sample["advantage"], mask),
    "truncated": not sample["finished"],
    "tokens": token_texts(policy.tokenizer, ids[mask].tolist()),
  } | {
    name: _numbers(values, mask, DIGITS)
    for name, values in sample.items()
    if name.endswith("logprobs")
  }


def turns_of(tokenizer: Any, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the turns of a trajectory: the texts of model and environment.

  `sample` has a row's "ids", "mask", "turns" and "turn_rewards", and the
  "advantage" of each token if advantages differ between turns.
  """
  mask = sample["mask"]
  ids, turns = sample["ids"][mask], sample["turns"][mask]
  blocks = []
  # Each turn is a block of consecutive tokens with the same turn number.
  for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(turns)) + 1):
    turn = turns[part[0]]
    text = tokenization.decode(tokenizer, ids[part].tolist())
    by = "environment" if turn < 0 else "model"
    blocks.append({"by": by, "text": text, "tokens": len(part)})
    if turn >= 0:
      blocks[-1]["reward"] = _number(sample["turn_rewards"][turn])
      if np.ndim(sample.get("advantage")):
        advantage = sample["advantage"][mask][part[0]]
        blocks[-1]["advantage"] = _number(advantage)
  return blocks


def _number(value: Any, digits: int = 6) -> float | None:
  return round(float(value), digits) if np.isfinite(value) else None


def _numbers(values, mask: np.ndarray, digits: int = 6) -> Any:
  """Rounds a number per completion, or a list of numbers per token."""
  if values.ndim == 0:
    return _number(values, digits)
  return [_number(x, digits) for x in values[mask]]


def reward_counts(
  rewards: Float[np.ndarray, "B G"], bins: int = BINS
) -> list[tuple[float, int]]:
  """Returns each finite reward, or each bin's middle, with its count."""
  finite = rewards[np.isfinite(rewards)].astype(np.float64)
  values, counts = np.unique(finite, return_counts=True)
  if len(values) > bins:
    counts, edges = np.histogram(finite, bins)
    values = (edges[1:] + edges[:-1]) / 2
  return [
    (float(f"{value:.6g}"), count)
    for value, count in zip(values, counts.tolist(), strict=True)
    if count
  ]
