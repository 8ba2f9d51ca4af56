"""GRPO in a single file: each part is a call of a public function.

    python -m grpojax.examples.grpo_in_one_file [STEPS]

The bundled model `arithmetic-careless` writes every step of a sum, but often
forgets to carry. Rewards are computed in Python, between two jitted functions
for sampling and learning:

    prompts [B, P] -- rollout --> completions [B, G, T]
                   -- reward, on the host --> rewards [B, G]
                   -- leave_one_out --> advantages [B, G]
                   -- token_logprobs, grpo_loss --> loss and its gradient
                   -- optax --> parameters

`grpojax.make_grpo_step` compiles all of it together, with more options; a test
compares the two. `grpojax.train` adds data, checkpoints, evaluation, packing of
short completions and a report. See also `grpojax/core/step.py`.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

import grpojax
from grpojax.data import arithmetic
from grpojax.rewards.exact import exact_answer
from grpojax.runtime.text import tokenization
from grpojax.training import policies
from grpojax.training.policies import Policy

MODEL = "arithmetic-careless"
BATCH_SIZE = 16  # B, prompts per step
GROUP_SIZE = 8  # G, completions per prompt
PROMPT_TOKENS = 32  # P, prompts are padded to this length
COMPLETION_TOKENS = 64  # T, longer completions are cut off
LEARNING_RATE = 1.5e-4


def make_prompts(
  policy: Policy, examples: Sequence[dict[str, str]]
) -> grpojax.Prompts:
  """Tokenizes problems and pads them on the right, [B, P]."""
  ids = np.full((len(examples), PROMPT_TOKENS), policy.pad_id, np.int32)
  mask = np.zeros(ids.shape, bool)
  for row, example in enumerate(examples):
    text = f"Q: {example['prompt']}\nA: "
    tokens = tokenization.encode_text(policy.tokenizer, text)
    ids[row, : len(tokens)] = tokens
    mask[row, : len(tokens)] = True
  return grpojax.Prompts(ids, mask)


def compute_rewards(
  policy: Policy,
  samples: grpojax.Rollout,
  examples: Sequence[dict[str, str]],
) -> np.ndarray:
  """Returns rewards [B, G]: 1 for a right final answer, else 0."""
  groups = zip(policies.decode(policy, samples), examples, strict=True)
  rewards = [
    [exact_answer("", x, example) for x in texts] for texts, example in groups
  ]
  return np.array(rewards, np.float32)


def make_sample(policy: Policy) -> Callable[..., grpojax.Rollout]:
  """Returns the jitted function `(params, prompts, key) -> completions`."""
  sample = functools.partial(
    grpojax.rollout,
    policy.lm,
    group_size=GROUP_SIZE,
    max_new_tokens=COMPLETION_TOKENS,
    eos_ids=policy.ends,
    pad_id=policy.pad_id,
  )
  return jax.jit(sample)


def make_learn(
  lm: grpojax.LM, tx: optax.GradientTransformation
) -> Callable[..., tuple[Any, Any]]:
  """Returns the jitted update of the policy.

  It is `(params, opt_state, samples, rewards) -> (params, opt_state)`.
  """

  def loss_fn(params, samples, advantages):
    logprobs, _ = grpojax.token_logprobs(
      lm,
      params,
      samples.prompt_ids,
      samples.prompt_mask,
      samples.completion_ids,
    )
    mask = samples.completion_mask
    weights = grpojax.losses.token_mean(mask)  # they sum to 1 over all tokens
    # The policy itself sampled, so all ratios are 1.
    loss, _ = grpojax.losses.grpo_loss(logprobs, advantages, weights, mask)
    return loss

  @jax.jit
  def learn(params, opt_state, samples, rewards):
    # Subtract from each reward the mean of its group's other rewards.
    advantages = grpojax.advantages.leave_one_out(rewards)
    grads = jax.grad(loss_fn)(params, samples, advantages)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return learn


def main(steps: int = 40) -> None:
  """Trains for `steps` steps and prints the share of right answers."""
  policy = policies.load_policy(MODEL)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
  sample = make_sample(policy)
  learn = make_learn(policy.lm, tx)
  params = policy.params
  opt_state = tx.init(params)
  key = jax.random.key(0)
  train = arithmetic.load("train")
  held_out = [*arithmetic.load("test", size=BATCH_SIZE)]

  def sample_and_score(params, examples, step):
    prompts = make_prompts(policy, examples)
    samples = sample(params, prompts, jax.random.fold_in(key, step))
    return samples, compute_rewards(policy, samples, examples)

  _, before = sample_and_score(params, held_out, steps)
  for step in range(steps):
    start = time.monotonic()
    first = step * BATCH_SIZE
    examples = [train[first + i] for i in range(BATCH_SIZE)]
    samples, rewards = sample_and_score(params, examples, step)
    params, opt_state = learn(params, opt_state, samples, rewards)
    seconds = time.monotonic() - start
    print(f"step {step}: {rewards.mean():.0%} right, {seconds:.1f} s")
  _, after = sample_and_score(params, held_out, steps)
  print(f"held out: {before.mean():.0%} -> {after.mean():.0%} right")


if __name__ == "__main__":
  main(*map(int, sys.argv[1:]))
