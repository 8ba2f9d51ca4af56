"""The batch of an update: completions and their group advantages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from grpojax.core import losses, turns
from grpojax.core import packing as packing_lib
from grpojax.core.advantages.weighted_baselines import sample_weights
from grpojax.core.arguments import check_read_prompts, read_rewards
from grpojax.core.binding import bind
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.group_axis import present
from grpojax.core.logprobs import TokenLogprobs
from grpojax.core.losses.truncation import TRUNCATED
from grpojax.core.objective import Objective, advantage_fn
from grpojax.core.packing import Packing, packed_logprobs
from grpojax.core.rows import constrain
from grpojax.core.types import LM, Batch, Params, Prompts, Rollout
from grpojax.core.update import UpdateOptions


def make_batch(
  lm: LM,
  rollout: Rollout,
  rewards: Any,
  objective: Objective = Objective(),
  *,
  options: UpdateOptions = UpdateOptions(),
  sampling: Sampling = Sampling(),
  policy_params: Params | None = None,
  ref_params: Params | None = None,
  ref_lm: LM | None = None,
  ref_prompts: Prompts | None = None,
  packing: Packing | None = None,
  prompt_weights: Array | None = None,
  credit: str = "trajectory",
) -> Batch:
  """Computes the advantages and log-probabilities for an update.

  Args:
    lm: Model.
    rollout: Completions.
    rewards: Rewards [B, G] or, with turns, [B, G, K]: one after each turn, 0
      after the end. Baselines and loss leave out completions whose reward is
      not finite, or whose prompt has no tokens.
    objective: Objective of the update. A custom advantage function gets the
      arrays of `sample_weights` that its parameters name.
    options: Options of the update. Forward passes here use its micro_batches. A
      single update is on-policy and needs no old log-probabilities.
    sampling: Sampling distribution of the rollout.
    policy_params: Parameters of the policy that sampled. Only
      objective.old_logprobs = "trainer" with several updates reads them.
    ref_params: Reference policy, or None. It has the temperature of `sampling`
      without top_k, top_p and min_p, see `core.losses.kl`.
    ref_lm: Model of `ref_params` if it is not `lm` (a teacher).
    ref_prompts: Prompts for the reference alone, of any length, say with hints.
    packing: Packed rows (`packing.layout.plan`), used here and in the update.
    prompt_weights: Weights of the prompts in the loss, KL term included.
    credit: Assignment of rewards to turns, a name in `turns.CREDITS`.

  Raises:
    ValueError: a KL penalty without `ref_params`, old log-probabilities without
      `policy_params`, or invalid arrays (`core.arguments`).
  """
  turns.check_credit(credit, objective, rollout.turns is not None)
  if objective.router_replay:
    _check_experts(lm, rollout)
  else:
    rollout = rollout.replace(experts=None, prompt_experts=None)
  rewards = _read_rewards(rewards, rollout, credit)
  recomputes = objective.old_logprobs == "trainer" and not options.on_policy
  if recomputes and policy_params is None:
    raise ValueError(
      "old_logprobs = 'trainer' needs the parameters that sampled: give "
      "policy_params"
    )
  logprobs = functools.partial(_rollout_logprobs, options)
  old_logprobs = rollout.logprobs
  reference = TokenLogprobs(None, None)
  if recomputes:
    policy = lm, policy_params, sampling
    old_logprobs = logprobs(rollout, packing, *policy).logprobs
  if ref_params is not None:
    # The reference's routers choose experts for themselves.
    ref_rollout = rollout.replace(experts=None, prompt_experts=None)
    rows = packing
    if ref_prompts is not None:
      ref_rollout, rows = _with_prompts(ref_rollout, packing, ref_prompts)
    policy = ref_lm or lm, ref_params, sampling.uncut
    reference = logprobs(ref_rollout, rows, *policy, objective.has_exact_kl)
  if objective.kl_in_reward:
    if reference.logprobs is None:
      raise ValueError(
        "kl_placement = 'reward' needs a reference policy: give ref_params"
      )
    rewards = rewards - objective.kl_in_reward * losses.kl_penalty(
      old_logprobs, reference.logprobs, rollout.sampled
    )
  advantages, in_loss = _advantages(rollout, rewards, objective, credit)
  if prompt_weights is not None:
    prompt_weights = jnp.broadcast_to(prompt_weights[:, None], in_loss.shape)
  return Batch(
    prompt_ids=rollout.prompt_ids,
    prompt_mask=rollout.prompt_mask,
    completion_ids=rollout.completion_ids,
    completion_mask=rollout.sampled & in_loss[..., None],
    advantages=advantages,
    old_logprobs=None if options.on_policy else old_logprobs,
    ref_logprobs=reference.logprobs,
    rollout_logprobs=rollout.logprobs,
    packing=packing,
    weights=prompt_weights,
    experts=rollout.experts,
    prompt_experts=rollout.prompt_experts,
    ref_hidden=reference.hidden,
  )


def _check_experts(lm: LM, rollout: Rollout) -> None:
  """Raises ValueError if the rollout has no valid experts to replay."""
  if not lm.has_experts:
    raise ValueError(
      "router_replay = True needs a model with experts (LM.has_experts): use "
      "False"
    )
  recorded = rollout.experts, rollout.prompt_experts
  if any(x is None for x in recorded):
    raise ValueError(
      "router_replay = True: the rollout has no experts; record them with "
      "rollout(lm.recording(), ...)"
    )
  ids = rollout.completion_ids, rollout.prompt_ids
  leading = [x.shape[:-1] for x in recorded]
  integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in recorded)
  same_width = len({x.shape[-1] for x in recorded}) == 1
  if leading != [x.shape for x in ids] or not integers or not same_width:
    raise ValueError(
      "router_replay = True: experts and prompt_experts must be integers [B, "
      "G, T, X] and [B, P, X], not "
      + " and ".join(f"{x.dtype} {x.shape}" for x in recorded)
    )


def _read_rewards(rewards: Any, rollout: Rollout, credit: str) -> Array:
  """Returns rewards [B, G] or, if each turn has its own credit, [B, G, K]."""
  shape = rollout.finished.shape
  per_turn = rollout.turns is not None and jnp.ndim(rewards) == 3
  if credit != "trajectory" and not per_turn:
    raise ValueError(
      f"credit = {credit!r} needs rewards per turn, [B, G, K], not of shape "
      f"{jnp.shape(rewards)}"
    )
  if per_turn:
    shape = *shape, jnp.shape(rewards)[-1]
  rewards = read_rewards(rewards, shape, "make_batch")
  sums = per_turn and credit == "trajectory"
  return jnp.sum(rewards, axis=-1) if sums else rewards


def _advantages(
  rollout: Rollout,
  rewards: Real[Array, "B G *k"],
  objective: Objective,
  credit: str,
) -> tuple[Float[Array, "B G *t"], Bool[Array, "B G"]]:
  """Returns advantages, and a mask of the completions in the loss."""
  totals = rewards if credit == "trajectory" else jnp.sum(rewards, axis=-1)
  real = jnp.any(rollout.prompt_mask, axis=-1, keepdims=True)
  totals = jnp.where(real, totals, jnp.nan)
  totals, in_loss = TRUNCATED[objective.truncated](totals, rollout.finished)
  if credit == "trajectory":
    advantage = advantage_fn(objective)
    weights = sample_weights(advantage, rollout)
    advantages = bind(advantage, **weights)(totals)
  else:
    rewards = jnp.where(present(totals)[..., None], rewards, jnp.nan)
    advantages = turns.turn_advantages(rewards, rollout, credit)
  if objective.advantage_clip:
    bound = objective.advantage_clip
    advantages = jnp.clip(advantages, -bound, bound)
  return advantages, in_loss & present(totals)


def _with_prompts(
  rollout: Rollout, packing: Packing | None, prompts: Prompts
) -> tuple[Rollout, Packing | None]:
  """Replaces a rollout's prompts; gives the packing room for their tokens."""
  ids = prompts.prompt_ids
  mask = prompts.prompt_mask
  if ids.shape[0] != rollout.prompt_ids.shape[0]:
    raise ValueError(
      f"ref_prompts has {ids.shape[0]} prompts: give one for each of the "
      f"rollout's {rollout.prompt_ids.shape[0]} prompts"
    )
  rollout = rollout.replace(prompt_ids=ids, prompt_mask=mask)
  if packing is None:
    return rollout, None
  sizes = packing.rows.sizes
  copies = packing.prompt_of_copy.shape[-1]
  room = sizes.bundles // sizes.devices * copies * ids.shape[1]
  rows = packing.rows.replace(sizes=sizes._replace(prompt_tokens=room))
  return rollout, packing.replace(rows=rows)


def _rollout_logprobs(
  options: UpdateOptions,
  rollout: Rollout,
  packing: Packing | None,
  lm: LM,
  params: Params,
  sampling: Sampling,
  with_hidden: bool = False,
) -> TokenLogprobs:
  """Computes the log-probabilities of a rollout, a micro-batch at a time."""
  scoring = {"sampling": sampling, "chunk_size": options.chunk_size}

  def score(micro_batch):
    part, rows = micro_batch
    part = constrain(part)
    scored = packed_logprobs.completion_logprobs(
      lm, params, part.tokens, rows, **scoring
    )
    hidden = scored.hidden if with_hidden else None
    return TokenLogprobs(scored.logprobs, None, hidden=hidden)

  check_read_prompts(lm, params, rollout.prompt_ids, rollout.prompt_mask)
  count = options.minibatches * options.micro_batches
  parts, _, rows = packing_lib.split(rollout, packing, count)
  shape = rollout.finished.shape
  return jax.tree.map(
    lambda x: packing_lib.join(x, packing, shape),
    jax.lax.map(score, (parts, rows)),
  )
