"""Trajectories of several turns: their sampled tokens, and credit per turn.

A trajectory is a completion with an environment's observations between turns:

    ids    a a a a  o o  b b  o  c c c        a, b, c sampled; o observations
    turns  0 0 0 0 -1 -1 1 1 -1  2 2 2

The model reads all tokens; only the sampled ones are its policy's actions. Let
r_ik be the reward after turn k of sample i, and R_ik = r_ik + r_i,k+1 + ... (0
after the end):

| credit         | advantage of turn k of sample i                             |
|----------------|-------------------------------------------------------------|
| `trajectory`   | the objective's advantage of R_i0, the same for all turns   |
| `turn`         | R_ik - mean_{j != i} R_jk                                   |
| `turn_reached` | R_ik - mean of R_jk over j != i with a turn k; R_ik if none |

All are unbiased for the gradient of E[R_0] with a `leave_one_out` advantage and
weights that do not depend on the trajectory (`fixed_length`, `sequence_sum`).
With other weightings the three means differ: by O(1 / N) with `token_mean` (N =
B G), and always with `sequence_mean` (docs/theory.md, "Several turns").
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from grpojax.core.group_axis import minus_others, present
from grpojax.core.objective import Objective
from grpojax.core.types import Prompts, Rollout

CREDITS = ("trajectory", "turn", "turn_reached")


class Segment(NamedTuple):
  """A turn's sampled tokens, or an observation.

  Attributes:
    ids: Token ids, at least one.
    logprobs: Rollout log-probability of each id; None for an observation.
    reward: Reward after the turn; 0 for an observation.
  """

  ids: Sequence[int]
  logprobs: Sequence[float] | None = None
  reward: float = 0.0


def check_credit(credit: str, objective: Objective, has_turns: bool) -> None:
  """Raises ValueError if `credit` cannot be used with the objective."""
  if credit not in CREDITS:
    raise ValueError(f"credit = {credit!r}: use one of {', '.join(CREDITS)}")
  if credit == "trajectory":
    return
  wrong = {
    "there are no turns: give an environment, or a rollout that has "
    "Rollout.turns": not has_turns,
    "needs the leave-one-out baseline: use advantage = 'leave_one_out'": (
      objective.advantage != "leave_one_out"
    ),
    "a KL penalty in the reward belongs to whole trajectories: use "
    "kl_placement = 'loss'": objective.kl_in_reward,
    objective.one_advantage_for: objective.one_advantage_for,
  }
  for message, is_wrong in wrong.items():
    if is_wrong:
      raise ValueError(f"credit = {credit!r}: {message}")


def turn_advantages(
  rewards: Float[Array, "B G K"], rollout: Rollout, credit: str
) -> Float[Array, "B G T"]:
  """Returns the advantage of each sampled token (module table), 0 elsewhere.

  Trajectories with a nonfinite reward are left out. Tokens of turns from K on
  get nan, so that no update uses them. ValueError if G < 2.
  """
  if rewards.shape[1] < 2:
    raise ValueError(
      f"credit = {credit!r} compares the samples of a group: G = "
      f"{rewards.shape[1]} must be at least 2"
    )
  # A sum is finite only if all rewards are: [B, G, 1].
  complete = present(jnp.sum(rewards, axis=-1, keepdims=True))
  rewards = jnp.where(complete, rewards, jnp.nan)
  # Sums from each turn to the last, [B, G, K].
  to_go = jnp.flip(jnp.cumsum(jnp.flip(rewards, -1), axis=-1), -1)
  turns = jnp.max(rollout.turns, axis=-1, keepdims=True) + 1
  reached = jnp.arange(rewards.shape[-1]) < turns
  if credit == "turn":
    # After its end a trajectory has 0, or nan if one of its rewards is missing.
    to_go = jnp.where(reached | ~complete, to_go, 0.0)
  else:
    to_go = jnp.where(reached, to_go, jnp.nan)  # left out of the mean
  to_go = jnp.swapaxes(to_go, 1, 2)  # [B, K, G]
  # Each turn is compared with the same turn of the group's other samples.
  advantages = minus_others(to_go)
  if credit == "turn_reached":
    # If no other sample has this turn, the baseline is 0, not the advantage.
    count = jnp.sum(present(to_go), axis=-1, keepdims=True)
    alone = present(to_go) & (count == 1)
    advantages = jnp.where(alone, to_go, advantages)
  # Look up each token's turn: 0 stands in for -1, and K or more gives nan.
  token_advantages = jnp.take_along_axis(
    jnp.swapaxes(advantages, 1, 2),
    jnp.maximum(rollout.turns, 0),
    axis=-1,
    mode="fill",
    fill_value=jnp.nan,
  )
  return jnp.where(rollout.sampled, token_advantages, 0.0)


def trajectories(
  prompts: Prompts,
  segments: Sequence[Sequence[Any]],
  *,
  length: int | None = None,
  pad_id: int = 0,
  finished: Any = None,
) -> Rollout:
  """Converts trajectories sampled elsewhere to a rollout for `make_batch`.

  Args:
    prompts: B prompts, each shared by the G trajectories of its group.
    segments: Segments of each trajectory, in order: [B][G][any number]. The
      last segment must be sampled.
    length: T, tokens per row; None is the longest trajectory.
    pad_id: Id after the end of a trajectory.
    finished: Booleans [B, G], False if cut off; None is True for all.

  Raises:
    ValueError: groups of different sizes, invalid segments (log-probabilities
      may exceed 0 by 1e-4), a trajectory longer than `length`, or an
      observation at its end.
  """
  b = len(prompts.prompt_ids)
  sizes = {len(group) for group in segments}
  if len(segments) != b or len(sizes) != 1 or 0 in sizes:
    raise ValueError(
      f"segments must be [B][G][...] for B = {b} prompts and an equal G, not "
      f"{len(segments)} groups of {sorted(sizes)}"
    )
  (g,) = sizes
  rows = [
    _row(trajectory, f"segments[{i}][{j}]")
    for i, group in enumerate(segments)
    for j, trajectory in enumerate(group)
  ]
  longest = max(len(ids) for ids, *_ in rows)
  t = longest if length is None else length
  if not isinstance(t, int) or longest > t:
    raise ValueError(
      f"length = {t!r}: must be an int of at least {longest} tokens, or None"
    )
  # Pad the trajectories, samples of all groups in one axis.
  ids = np.full((b * g, t), pad_id, np.int32)
  turns = np.full((b * g, t), -1, np.int32)
  logprobs = np.zeros((b * g, t), np.float32)
  rewards = np.zeros((b * g, max(len(row[3]) for row in rows)), np.float32)
  lengths = np.array([len(row[0]) for row in rows])
  for i, row in enumerate(rows):
    for array, values in zip((ids, turns, logprobs, rewards), row, strict=True):
      array[i, : len(values)] = values
  if finished is None:
    finished = np.ones((b, g), bool)
  elif np.shape(finished) != (b, g):
    raise ValueError(
      f"finished must have shape {(b, g)} (B, G), not {np.shape(finished)}"
    )
  mask = np.arange(t) < lengths[:, None]
  return Rollout(
    prompt_ids=jnp.asarray(prompts.prompt_ids),
    prompt_mask=jnp.asarray(prompts.prompt_mask),
    completion_ids=jnp.asarray(ids.reshape(b, g, t)),
    completion_mask=jnp.asarray(mask.reshape(b, g, t)),
    logprobs=jnp.asarray(logprobs.reshape(b, g, t)),
    finished=jnp.asarray(finished, bool),
    turns=jnp.asarray(turns.reshape(b, g, t)),
    turn_rewards=jnp.asarray(rewards.reshape(b, g, -1)),
  )


def _array(value: Any) -> np.ndarray:
  """Returns the value as an array; an array of None if numpy cannot read it."""
  try:
    return np.asarray(value)
  except (OverflowError, TypeError, ValueError):
    return np.asarray(None)


def _row(segments: Any, where: str):
  """Returns a trajectory's ids, turns, log-probabilities and turn rewards."""
  ids = []
  turns = []
  logprobs = []
  rewards = []
  if isinstance(segments, Segment) or not all(
    isinstance(segment, Segment) for segment in segments
  ):
    raise ValueError(
      f"{where} must be a list of Segment(...), not {segments!r}"
    )
  if not segments or segments[-1].logprobs is None:
    raise ValueError(
      f"{where} must end with a sampled segment: leave out the observation "
      "after the last turn"
    )
  for i, segment in enumerate(segments):
    new, reward = _array(segment.ids), _array(segment.reward)
    is_list = new.ndim == 1 and new.size and new.dtype.kind in "iu"
    if not is_list or not 0 <= new.min() <= new.max() < 2**31:
      raise ValueError(
        f"{where}[{i}].ids must be a non-empty list of token ids, not "
        f"{segment.ids!r}"
      )
    if reward.dtype.kind not in "biuf" or reward.ndim:
      raise ValueError(
        f"{where}[{i}].reward must be a number, not {segment.reward!r}"
      )
    ids.extend(new)
    # An observation has no turn, log-probabilities or reward.
    if segment.logprobs is None:
      if segment.reward:
        raise ValueError(
          f"{where}[{i}] is an observation: give its reward to a turn"
        )
      turns.extend([-1] * len(new))
      logprobs.extend([0.0] * len(new))
      continue
    logps = _array(segment.logprobs)
    if (
      logps.shape != new.shape
      or logps.dtype.kind not in "iuf"
      or not np.isfinite(logps).all()
      or logps.max() > 1e-4  # an engine's rounding
    ):
      raise ValueError(
        f"{where}[{i}].logprobs must be {len(new)} log-probabilities (per id), "
        f"finite and at most 0, not {segment.logprobs!r}"
      )
    # A turn's number is the number of rewards so far.
    turns.extend([len(rewards)] * len(new))
    logprobs.extend(np.minimum(logps, 0.0))
    rewards.append(segment.reward)
  return ids, turns, logprobs, rewards
