"""A contextual bandit with exact objective, optimum and gradient noise.

X prompts share d parameters: pi_theta(y | x) is proportional to
exp(phi(x, y) . theta) over V one-token completions. The objective is

  J(theta) = E_x E_{y ~ pi_theta(. | x)}[Z],
  Z = r(x, y) - beta log(pi_theta(y | x) / pi_ref(y | x)),

where x is uniform, and so is the reference policy (theta = 0). The penalty
keeps every probability positive at the optimum, and Z still varies there,
because there are fewer parameters than logits. Numpy functions compute in
float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy  # loads scipy.optimize on first use
from jaxtyping import Array, Float

from grpojax.core.objective import Objective
from grpojax.core.step import make_grpo_step
from grpojax.core.types import LM, Prefix, Prompts
from grpojax.statistics import u_statistics

Vector = Float[np.ndarray, "d"]
Vectors = Float[np.ndarray, "*n d"]
Matrix = Float[np.ndarray, "d d"]


class Problem(NamedTuple):
  """Features phi, rewards r (0 or 1), and penalty weight beta per nat."""

  features: Float[np.ndarray, "X V d"]
  rewards: Float[np.ndarray, "X V"]
  beta: float


def make_problem(
  seed: int, prompts: int, vocab: int, dims: int, spread: float, beta: float
) -> Problem:
  """Draws normal features, and rewards 1 or 0 by the sign of normal numbers.

  Each is a term shared by all prompts, plus `spread` times a prompt's own.
  """
  rng = np.random.default_rng(seed)

  def draw(*shape):
    by_prompt = rng.normal(size=(prompts, *shape))
    return rng.normal(size=shape) + spread * by_prompt

  return Problem(draw(vocab, dims), (draw(vocab) > 0).astype(float), beta)


def log_ratios(problem: Problem, theta: Vectors) -> Float[np.ndarray, "*n X V"]:
  """Returns the log-ratios log(pi_theta / pi_ref), in nats."""
  logits = np.einsum("xvd,...d->...xv", problem.features, theta)
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).mean(-1, keepdims=True))


def objective(problem: Problem, theta: Vectors) -> Float[np.ndarray, "*n"]:
  """Returns the objective J(theta), in units of the reward."""
  ratio = log_ratios(problem, theta)
  rewards = problem.rewards - problem.beta * ratio
  mean = np.mean(np.exp(ratio) * rewards, axis=(-2, -1))  # pi = exp(ratio) / V
  return np.asarray(mean)


def population(problem: Problem, theta: Vector) -> tuple[np.ndarray, ...]:
  """Returns each completion's probability, score and penalised reward Z.

  Their shapes are [X, V], [X, V, d] and [X, V].
  """
  ratio = log_ratios(problem, theta)
  probabilities = np.exp(ratio) / ratio.shape[-1]
  mean = np.einsum("xv,xvd->xd", probabilities, problem.features)
  scores = problem.features - mean[:, None]
  return probabilities, scores, problem.rewards - problem.beta * ratio


def derivatives(problem: Problem, theta: Vector) -> tuple[Vector, Matrix]:
  """Returns gradient E[s Z] and Hessian E[s s^T (Z - V(x) - beta)] of J.

  The gradient of Z is -beta s; the gradient of s is -E[s s^T | x] for every y.
  """
  p, s, z = population(problem, theta)
  value = np.sum(p * z, -1, keepdims=True)
  gradient = np.einsum("xv,xvd->xd", p * z, s).mean(0)
  weight = p * (z - value - problem.beta)
  return gradient, np.einsum("xv,xvd,xve->xde", weight, s, s).mean(0)


def optimum(problem: Problem, start: Vector) -> Vector:
  """Finds theta*, the maximum of J, from `start`."""
  return scipy.optimize.minimize(
    lambda theta: -objective(problem, theta),
    start,
    jac=lambda theta: -derivatives(problem, theta)[0],
    hess=lambda theta: -derivatives(problem, theta)[1],
    method="trust-exact",
    # Short steps: far out the policy is deterministic, and J flat.
    options={"gtol": 1e-12, "initial_trust_radius": 0.9, "max_trust_radius": 1},
  ).x


def gradient_noise(
  problem: Problem, theta: Vector, group_size: int, num_samples: int
) -> u_statistics.Estimators:
  """Returns the covariance [d, d] of a step's gradient, for each estimator.

  It is (Cov_x g(x) + E_x Cov(estimator | x)) / B for B = num_samples /
  group_size prompts, drawn with replacement (arXiv 2603.01162, Proposition 3,
  whose remainder is exact here).
  """
  p, s, z = map(jnp.asarray, population(problem, theta))
  gradients = np.asarray(u_statistics.policy_gradient(p, s, z), float)
  between = np.cov(gradients.T, bias=True)
  covariance = jax.vmap(u_statistics.covariance, in_axes=(0, 0, 0, None))

  def step_covariance(within):
    mean = np.asarray(within, float).mean(0)
    return (between + mean) * (group_size / num_samples)

  return jax.tree.map(step_covariance, covariance(p, s, z, group_size))


def policy(problem: Problem) -> LM:
  """Wraps the softmax policy as a language model of one-token completions.

  A prompt is its index x. The parameters are theta [d], initially zero.
  """
  features = jnp.asarray(problem.features, jnp.float32)

  def prefill(params, prompt_ids, prompt_mask):
    logits = features[prompt_ids[:, 0]] @ params
    return Prefix(logits, prompt_mask.sum(-1), state=())

  def extend(params, prefix, ids, cache=None, positions=None, segments=None):
    logits = prefix.last_hidden[:, None, None]
    return jnp.broadcast_to(logits, (*ids.shape, logits.shape[-1])), cache

  return LM(
    init=lambda key: jnp.zeros(features.shape[-1]),
    prefill=prefill,
    extend=extend,
    unembed=lambda params, hidden: hidden,
    init_cache=lambda b, g, t: (),
  )


def values(
  problem: Problem, theta: Float[Array, "d"], ids: Array
) -> Float[Array, "B"]:
  """Returns V(x) = E[Z | x] for the prompts `ids`; jittable."""
  logits = jnp.asarray(problem.features, jnp.float32)[ids] @ theta
  logprobs = jax.nn.log_softmax(logits)
  ratio = logprobs + jnp.log(logits.shape[-1])
  rewards = jnp.asarray(problem.rewards, jnp.float32)[ids]
  rewards -= problem.beta * ratio
  return jnp.sum(jnp.exp(logprobs) * rewards, -1)


def make_step(
  problem: Problem,
  estimator: str,
  group_size: int,
  tx: optax.GradientTransformation,
) -> Callable:
  """Returns a GRPO step on the bandit, `step(state, prompts, ref_params)`.

  `estimator` is the advantage "vanilla" or "leave_one_out", or "oracle", which
  is vanilla after subtracting V(x) from the rewards.
  """
  lm = policy(problem)
  table = jnp.asarray(problem.rewards, jnp.float32)
  oracle = estimator == "oracle"

  def reward(samples, targets):
    rewards = table[samples.prompt_ids, samples.completion_ids[..., 0]]
    return rewards - targets[:, None] if oracle else rewards

  run = make_grpo_step(
    lm,
    tx,
    reward,
    group_size=group_size,
    max_new_tokens=1,
    eos_ids=(0,),
    objective=Objective(
      advantage="vanilla" if oracle else estimator,
      weighting="fixed_length",
      kl="k1",
      kl_placement="reward",
      beta=problem.beta,
    ),
  )

  def step(state, prompts: Prompts, ref_params):
    value = values(problem, state.params, prompts.prompt_ids[:, 0])
    return run(state, prompts.replace(targets=value), ref_params)

  return step
