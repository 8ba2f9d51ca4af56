"""Batch of an update: completions with advantages from their groups."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Real

from grpojax.core import losses
from grpojax.core import packing as packing_lib
from grpojax.core import turns as turns_lib
from grpojax.core.advantages.weighted_baselines import sample_weights
from grpojax.core.arguments import check_read_prompts, read_rewards
from grpojax.core.binding import bind
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.group_axis import present
from grpojax.core.logprobs import TokenLogprobs
from grpojax.core.losses.truncation import TRUNCATED
from grpojax.core.mesh import constrain
from grpojax.core.objective import Objective, advantage_fn
from grpojax.core.packing import Packing, packed_logprobs
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
  """Computes the advantages and log-probabilities that an update needs.

  Args:
    lm: Model.
    rollout: Completions.
    rewards: Numbers [B, G], one per completion; of a rollout with turns also
      [B, G, K], one after each turn, 0 after the end. Completions whose reward
      is not finite take no part in baselines or the loss, nor do those of a row
      without prompt tokens.
    objective: Objective of the update. An advantage function of your own gets
      the arrays of `sample_weights` that it has parameters for.
    options: Options of the update, with the micro-batches of this pass too. A
      single update is on-policy and keeps no old log-probabilities.
    sampling: Distribution that the rollout was sampled from.
    policy_params: Policy that sampled, for objective.old_logprobs = "trainer"
      with several updates: one more forward pass.
    ref_params: Reference policy, or None. Its log-probabilities are at the
      temperature of `sampling` without its cuts, see `core.losses.kl`.
    ref_lm: Model of `ref_params` if it is another one (a teacher).
    ref_prompts: Prompts of any length for the reference alone, say with a hint.
    packing: Packed rows (`packing.layout.plan`), here and in the update.
    prompt_weights: Weights of the prompts in the loss, KL term included.
    credit: Rewards that a turn learns from, one of `turns.CREDITS`.

  Raises:
    ValueError: A penalty without a reference, old log-probabilities without the
      policy that sampled, or wrong arrays (`core.arguments`).
  """
  turns_lib.check_credit(credit, objective, rollout.turns is not None)
  if objective.router_replay:
    _check_experts(lm, rollout)
  else:
    rollout = rollout.replace(experts=None, prompt_experts=None)
  rewards = _read_rewards(rewards, rollout, credit)
  recomputes = objective.old_logprobs == "trainer" and not options.on_policy
  if recomputes and policy_params is None:
    raise ValueError(
      "old_logprobs = 'trainer' computes the log-probabilities of the policy "
      "that sampled: give policy_params"
    )
  logprobs = functools.partial(_rollout_logprobs, options)
  old_logprobs, reference = rollout.logprobs, TokenLogprobs(None, None)
  if recomputes:
    old_logprobs = logprobs(
      rollout, packing, lm, policy_params, sampling
    ).logprobs
  if ref_params is not None:
    # A reference is another model, whose routers choose for themselves.
    behind = rollout.replace(experts=None, prompt_experts=None)
    rows = packing
    if ref_prompts is not None:
      behind, rows = _with_prompts(behind, packing, ref_prompts)
    reference = logprobs(
      behind,
      rows,
      ref_lm or lm,
      ref_params,
      sampling.uncut,
      with_hidden=objective.has_exact_kl,
    )
  if objective.kl_in_reward:
    if reference.logprobs is None:
      raise ValueError(
        "kl_placement = 'reward' needs ref_params, the reference policy"
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
    sample_weights=prompt_weights,
    experts=rollout.experts,
    prompt_experts=rollout.prompt_experts,
    ref_hidden=reference.hidden,
  )


def _check_experts(lm: LM, rollout: Rollout) -> None:
  """Raises ValueError for a rollout that does not name experts of the model."""
  if lm.forward_with_load is None:
    raise ValueError(
      "router_replay = True replays experts, and the model has none (no "
      "LM.forward_with_load): use False"
    )
  recorded = rollout.experts, rollout.prompt_experts
  if any(x is None for x in recorded):
    raise ValueError(
      "router_replay = True: the rollout has no experts; record them by "
      "rollout(..., record_experts=True), of a model that has any"
    )
  of_tokens = rollout.completion_ids, rollout.prompt_ids
  leads = [x.shape[:-1] for x in recorded]
  integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in recorded)
  same = len({x.shape[-1] for x in recorded}) == 1
  if leads != [x.shape for x in of_tokens] or not integers or not same:
    raise ValueError(
      "router_replay = True: experts and prompt_experts are integers [B, G, T, "
      "X] and [B, P, X], not "
      + " and ".join(f"{x.dtype} {x.shape}" for x in recorded)
    )


def _read_rewards(rewards: Any, rollout: Rollout, credit: str) -> Array:
  """Rewards [B, G]; [B, G, K] where each turn is learned from by itself."""
  shape = rollout.finished.shape
  of_turns = rollout.turns is not None and jnp.ndim(rewards) == 3
  if credit != "trajectory" and not of_turns:
    raise ValueError(
      f"credit = {credit!r} needs a reward after each turn, [B, G, K], not "
      f"rewards of shape {jnp.shape(rewards)}"
    )
  if of_turns:
    shape = *shape, jnp.shape(rewards)[-1]
  rewards = read_rewards(rewards, shape, "make_batch")
  sums = of_turns and credit == "trajectory"
  return jnp.sum(rewards, axis=-1) if sums else rewards


def _advantages(
  rollout: Rollout,
  rewards: Real[Array, "B G *k"],
  objective: Objective,
  credit: str,
) -> tuple[Float[Array, "B G *t"], Bool[Array, "B G"]]:
  """Advantages of completions or tokens, and the completions in the loss."""
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
    advantages = turns_lib.turn_advantages(rewards, rollout, credit)
  if objective.advantage_clip:
    bound = objective.advantage_clip
    advantages = jnp.clip(advantages, -bound, bound)
  return advantages, in_loss & present(totals)


def _with_prompts(
  rollout: Rollout, packing: Packing | None, prompts: Prompts
) -> tuple[Rollout, Packing | None]:
  """Completions after other prompts, and rows with room for these."""
  ids, mask = prompts.prompt_ids, prompts.prompt_mask
  if ids.shape[0] != rollout.prompt_ids.shape[0]:
    raise ValueError(
      f"ref_prompts are {ids.shape[0]} for {rollout.prompt_ids.shape[0]} "
      "prompts of the rollout"
    )
  rollout = rollout.replace(prompt_ids=ids, prompt_mask=mask)
  if packing is None:
    return rollout, None
  sizes, copies = packing.rows.sizes, packing.prompt_of_copy.shape[-1]
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
  """Log-probabilities of a rollout's tokens, micro-batch by micro-batch."""

  def of_micro_batch(part):
    (prompt_ids, prompt_mask, of_prompts), ((ids, experts), rows) = part
    ids, experts, rows = jax.tree.map(
      lambda x: constrain(x, "batch", "group"), (ids, experts, rows)
    )
    replayed = None
    if experts is not None:
      replayed = constrain(of_prompts, "batch"), experts
    scored = packed_logprobs.completion_logprobs(
      lm,
      params,
      constrain(prompt_ids, "batch"),
      constrain(prompt_mask, "batch"),
      ids,
      rows,
      sampling=sampling,
      chunk_size=options.chunk_size,
      replayed=replayed,
    )
    hidden = scored.hidden if with_hidden else None
    return TokenLogprobs(scored.logprobs, None, hidden=hidden)

  check_read_prompts(lm, params, rollout.prompt_ids, rollout.prompt_mask)
  prompts = rollout.prompt_ids, rollout.prompt_mask, rollout.prompt_experts
  samples = rollout.completion_ids, rollout.experts
  count = options.minibatches * options.micro_batches
  prompts, samples, _, rows = packing_lib.split(
    prompts, samples, packing, count
  )
  shape = rollout.finished.shape
  return jax.tree.map(
    lambda x: packing_lib.join(x, packing, shape),
    jax.lax.map(of_micro_batch, (prompts, (samples, rows))),
  )
