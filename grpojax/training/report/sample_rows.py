"""Rows of samples.jsonl and rewards.jsonl for a step.

Every `log.samples_every` steps samples.jsonl gets the first `log.sample_groups`
groups of a step's batch: a row per completion, the rows of a group one after
another.

    step              as in metrics.jsonl
    group             number of the group in the batch, from 0
    prompt            as the model read it
    completion        text without the EOS; of several turns the last one's
    turns             of a trajectory: author ("by": model or environment),
                      "text", number of "tokens", and "reward" after the turn
    answer            of the example, or null
    reward            weighted sum of the functions' rewards, or null. The
                      compared number may differ: see reward.aggregation,
                      loss.kl_placement and loss.truncated
    rewards           of each function, by name; null if it has none
    advantage         in the loss; 0 if the loss does not use it
    truncated         cut off at its budget of tokens, without an EOS
    tokens            texts of the tokens, the EOS among them
    logprobs          of the sampler, a number per token, in nats; null, as all
                      others, for the text of an environment
    trainer_logprobs  of the policy before the update, as the training program
                      computes them; with loss.old_logprobs="trainer" and
                      several updates a step. Null, as those of the reference,
                      if they were not computed because nothing is learned
    ref_logprobs      of the reference policy, if there is one

Every step rewards.jsonl gets `counts`: pairs of a reward and the number of
drawn completions that have it, by rising reward; of more than `BINS` different
rewards, those of `BINS` intervals of equal width, by their middle.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Batch
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.training.policy import Policy
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step.resampling import ResampledBatch

BINS = 32
OTHERS = {"trainer_logprobs", "ref_logprobs"}
DIGITS = 4  # of log-probabilities, after the point


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
  return tokenizer.decode(
    list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
  )


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
  """Texts of tokens, each decoded with the one before it.

  Some tokenizers leave out the space before the first token of a text.
  """
  decode = functools.cache(lambda *tokens: _decoded(tokenizer, tokens))

  def after(before: int, token: int) -> str:
    first, both = decode(before), decode(before, token)
    return both[len(first) :] if both.startswith(first) else decode(token)

  firsts = [decode(token) for token in ids[:1]]
  pairs = zip(ids, ids[1:], strict=False)
  return firsts + [after(before, token) for before, token in pairs]


def of_batch(
  settings: TrainSettings, policy: Policy, filled: ResampledBatch, batch: Batch
) -> list[dict[str, Any]]:
  """Rows of samples.jsonl but for their step; all processes must call this."""
  samples = filled.rollout
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
  arrays = mesh_lib.fetch({k: v for k, v in arrays.items() if v is not None})
  if not distributed.is_main():  # which writes them
    return []
  groups = min(settings.log.sample_groups, len(filled.drawn_groups))
  return [
    {"group": b} | _row(policy, filled, arrays, b, g)
    for b in range(groups)
    for g in range(arrays["ids"].shape[1])
  ]


def _row(policy: Policy, filled: ResampledBatch, arrays, b: int, g: int):
  """One completion of `of_batch`."""
  drawn, place = filled.drawn, filled.drawn_groups[b]
  example = filled.examples[place]
  one = {name: values[b, g] for name, values in arrays.items()}
  ids, mask = one["ids"], one["mask"]
  if not one.get("packed", True):
    none = np.full(mask.shape, np.nan)
    one |= dict.fromkeys(OTHERS & one.keys(), none)
  last, of_turns = mask, {}
  if "turns" in one:
    last = mask & (one["turns"] == one["turns"].max())
    of_turns = {"turns": turns_of(policy.tokenizer, one)}
    for name in one.keys() & {"logprobs", *OTHERS}:
      one[name] = np.where(one["turns"] >= 0, one[name], np.nan)
  text = tokenizer_lib.decode_completion(
    policy.tokenizer, ids, last, policy.ends
  )
  return {
    "prompt": example["prompt_text"],
    "completion": text,
    **of_turns,
    "answer": example.get("answer"),
    "reward": _number(drawn.rewards[place, g]),
    "rewards": {
      name: _number(values[place, g]) for name, values in drawn.values.items()
    },
    "advantage": _numbers(one["advantage"], mask),
    "truncated": not one["finished"],
    "tokens": token_texts(policy.tokenizer, ids[mask].tolist()),
  } | {
    name: _numbers(values, mask, DIGITS)
    for name, values in one.items()
    if name.endswith("logprobs")
  }


def turns_of(tokenizer: Any, one: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns texts of the model and its environment, one after the other.

  `one` has a row's "ids", "mask", "turns" and "turn_rewards", and if turns have
  advantages of their own, the "advantage" of each token.
  """
  ids, turns = one["ids"][one["mask"]], one["turns"][one["mask"]]
  blocks = []
  for part in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(turns)) + 1):
    turn = turns[part[0]]
    text = _decoded(tokenizer, ids[part].tolist())
    by = "environment" if turn < 0 else "model"
    blocks.append({"by": by, "text": text, "tokens": len(part)})
    if turn >= 0:
      blocks[-1]["reward"] = _number(one["turn_rewards"][turn])
      if np.ndim(one.get("advantage")):
        advantage = one["advantage"][one["mask"]][part[0]]
        blocks[-1]["advantage"] = _number(advantage)
  return blocks


def _number(value: Any, digits: int = 6) -> float | None:
  return round(float(value), digits) if np.isfinite(value) else None


def _numbers(values, mask: np.ndarray, digits: int = 6) -> Any:
  """One number of a completion, or a list of those of its tokens."""
  if values.ndim == 0:
    return _number(values, digits)
  return [_number(x, digits) for x in values[mask]]


def reward_counts(
  rewards: Float[np.ndarray, "B G"], bins: int = BINS
) -> list[tuple[float, int]]:
  """Counts how often each finite reward was given (the module has a table)."""
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
