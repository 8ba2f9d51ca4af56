"""Unbiased estimates of the errors of gradient estimators.

The estimates need the rewards of a pool of S completions of a prompt, and the
Gram matrix K_ij = s_i.s_j of their scores, the gradients s = grad log pi(Y|x)
with respect to all parameters. The notation is that of
`statistics.u_statistics` (arXiv 2603.01162).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int, Real

from grpojax.core.advantages import dr_grpo, leave_one_out, vanilla
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.types import LM, Params, Prompts
from grpojax.models import lora
from grpojax.statistics.component_estimates import reward_moments
from grpojax.statistics.intervals import t_quantile
from grpojax.statistics.projections import rademacher_like
from grpojax.statistics.u_statistics import Estimators, Moments

_COLUMNS = 2**16  # parameters whose products are summed in float32
_AT_ONCE = 8  # completions whose gradients are computed together

Gram = Float[np.ndarray, "S S"]
Rewards = Real[np.ndarray, "S"]
Numbers = TypeVar("Numbers", bound=tuple)
PromptMeans = tuple[np.ndarray, ...]
"""A number per prompt, [X], and its jackknife replicates: without each of b
blocks, [X, b], and for projected scores without each projection, [X, V]."""


def _logprob_of(lm: LM, sampling: Sampling) -> Callable:
  """Returns a differentiable function for a completion's log-probability."""

  def logprob(params, prompt_ids, prompt_mask, ids, mask):
    logprobs, _ = token_logprobs(
      lm, params, prompt_ids, prompt_mask, ids[None, None], sampling=sampling
    )
    return jnp.sum(jnp.where(mask, logprobs[0, 0], 0.0))

  return logprob


def make_score(lm: LM, sampling: Sampling = Sampling()) -> Callable:
  """Returns a compiled function for exact scores of a prompt's completions.

  `(params, prompt_ids [1, P], prompt_mask [1, P], ids [n, T], mask [n, T]) ->
  scores [n, d]`, with d parameters in the order of `ravel_pytree`. Memory: n
  copies of activations and parameters.
  """
  logprob = _logprob_of(lm, sampling)

  def score(*args):
    return ravel_pytree(jax.grad(logprob)(*args))[0]

  return jax.jit(jax.vmap(score, in_axes=(None, None, None, 0, 0)))


def make_projected_score(lm: LM, sampling: Sampling = Sampling()) -> Callable:
  """Returns a compiled function for projected scores of the layers' matrices.

  `(directions, *arguments of make_score) -> [n, V, d]`, with d outputs of all
  matrices. Let S and T [in, out] be a matrix's gradients for two completions. A
  vector a [in] of independent signs has E[a a^T] = 1, so a S . a T is an
  unbiased estimate of S . T; `random_directions` draws V of them. The product a
  S is the gradient with respect to B in W + A B at A = a, B = 0, so the
  gradient of a whole matrix is never formed. Embeddings and norms are left out.
  """
  logprob = _logprob_of(lm, sampling)

  def score(adapters, params, *args):
    attached = lambda x: logprob(lora.attach(params, x, 1), *args)
    matrices = jax.grad(attached)(adapters)["layers"].values()
    rows = [jnp.moveaxis(x["b"], -2, 0) for x in matrices]  # [V, L, ..., out]
    return jnp.concatenate([x.reshape(len(x), -1) for x in rows], axis=1)

  return jax.jit(jax.vmap(score, in_axes=(None, None, None, None, 0, 0)))


def random_directions(params: Params, key: jax.Array, count: int) -> Params:
  """Draws V = `count` vectors of signs for each matrix of the layers."""
  targets = f"layers/({'|'.join(lora.PROJECTIONS)})"
  layers = lora.init(params, key, count, targets)["layers"]
  signs = rademacher_like(key, layers)
  return {"layers": {k: x | {"a": signs[k]["a"]} for k, x in layers.items()}}


def score_gram(
  score: Callable,
  params: Params,
  prompts: Prompts,
  ids: Int[np.ndarray, "S T"],
  mask: Bool[np.ndarray, "S T"],
) -> tuple[Float[np.ndarray, "*V S S"], int]:
  """Returns the scores' Gram matrix and the number of distinct completions.

  The matrix is in float64; projected scores have a matrix per projection.
  `score` comes from `make_score`, or from `make_projected_score` with its
  directions bound. Each distinct completion is scored once and takes 4 d bytes.
  """
  # A row per distinct completion; -1 is padding, so a row determines its mask.
  rows, index = np.unique(np.where(mask, ids, -1), axis=0, return_inverse=True)
  count = len(rows)
  padding = -count % _AT_ONCE  # compiles a single shape
  rows = np.pad(rows, [(0, padding), (0, 0)], constant_values=-1)
  fixed = params, prompts.prompt_ids, prompts.prompt_mask
  chunks = [
    np.asarray(score(*fixed, np.maximum(chunk, 0), chunk >= 0))
    for chunk in np.split(rows, len(rows) // _AT_ONCE)
  ]
  # Projections come first: [n, V, d] becomes [V, n, d], [n, d] is unchanged.
  scores = np.moveaxis(np.concatenate(chunks)[:count], 0, -2)
  # Sums of chunks of columns in float32, added up in float64.
  gram = np.zeros((*scores.shape[:-1], count))
  for start in range(0, scores.shape[-1], _COLUMNS):
    columns = scores[..., start : start + _COLUMNS]
    gram += columns @ columns.swapaxes(-2, -1)
  # The matrix of distinct completions is expanded to all S.
  index = index.reshape(-1)  # numpy 2.0 gave it a second axis
  return gram[..., index[:, None], index], count


def score_moments(gram: Gram, rewards: Rewards) -> Moments:
  """Estimates a prompt's moments without bias, by U-statistics of the pool.

  Closed-form averages over distinct i, j, k, l, which may be negative: ||g||^2
  of K_ik (Z_i - Z_j)(Z_k - Z_l), I sigma^2 of K_ii (Z_j - Z_k)^2 / 2, and
  E||s delta||^2 of K_ii (Z_i - Z_j)(Z_i - Z_k). They need a pool of 4 or more.
  """
  n = len(rewards)
  z = rewards.astype(np.float64)
  norms = np.diag(gram)
  delta_sq, variance = reward_moments(z)
  # Over all samples except i and k: sum, unbiased V^2
  pair = z[:, None] + z
  total = z.sum() - pair
  square = _square(total, (z**2).sum() - z[:, None] ** 2 - z**2, n - 2)
  # (Z_i - V)(Z_k - V), multiplied out, with V and V^2 from other samples
  kernel = z[:, None] * z - pair * total / (n - 2) + square
  # The mean over pairs i != k leaves out the diagonal.
  products = gram * kernel
  gradient_sq = (products.sum() - np.trace(products)) / (n * (n - 1))
  return Moments(
    gradient_sq=gradient_sq,
    oracle_trace=np.mean(norms * delta_sq) - gradient_sq,
    vanilla_trace=np.mean(norms * z**2) - gradient_sq,
    remainder=np.mean(norms * variance) + gradient_sq,
  )


def _square(total, squares, n):
  """Estimates a squared mean without bias, from pairs of distinct samples."""
  return (total**2 - squares) / (n * (n - 1))


def best_baseline(gram: Gram, rewards: Rewards) -> float:
  """Estimates the constant baseline of least error, E[||s||^2 Z] / E||s||^2.

  It is V(x) only if ||s||^2 and Z are uncorrelated (E. Greensmith, P. Bartlett
  and J. Baxter, 2004); 0 if all scores are 0.
  """
  norms = np.diag(gram)
  return float(norms @ rewards / norms.sum()) if norms.any() else 0.0


class ScoreLengths(NamedTuple):
  """Relation between squared score lengths and rewards of a prompt."""

  value: float  # V, the mean reward
  best_baseline: float  # b*; below V/2, vanilla errs less than the oracle
  correlation: float  # of ||s||^2 and Z; if it is 0, b* = V


def score_lengths(gram: Gram, rewards: Rewards) -> ScoreLengths:
  """Estimates `ScoreLengths` from a pool; correlation 0 if undefined."""
  norms = np.diag(gram)
  varied = np.ptp(rewards) > 0 and np.ptp(norms) > 0
  return ScoreLengths(
    value=float(np.mean(rewards)),
    best_baseline=best_baseline(gram, rewards),
    correlation=float(np.corrcoef(norms, rewards)[0, 1]) if varied else 0.0,
  )


def _errors(gram, rewards, group_size, block, baseline) -> np.ndarray:
  """Measures the errors [4] of four estimators; see `group_errors`."""
  blocks = len(rewards) // block
  # The oracle's V is the mean reward of the other blocks, and its square is
  # estimated without bias, too. The expected error is exactly that with the
  # true V, because errors of V multiply mean scores, whose expectation is 0.
  sums = np.stack([rewards, rewards**2]).reshape(2, blocks, block).sum(-1)
  total, second = sums.sum(-1, keepdims=True) - sums
  rest = (blocks - 1) * block
  value = total / rest  # [b]
  excess = value**2 - _square(total, second, rest)
  # The scores' weights in the gradients of each group, [4, groups, G]
  groups = rewards.reshape(-1, group_size)
  weights = [f(jnp.asarray(groups)) for f in (vanilla, leave_one_out, dr_grpo)]
  weights.append(groups - np.repeat(value, block).reshape(groups.shape))
  weights = np.array(weights, np.float64) / group_size
  # Squared lengths need the diagonal blocks [G, G] of the Gram matrix.
  by_group = gram.reshape(*groups.shape, *groups.shape)
  inside = np.einsum("igih->igh", by_group)
  squares = np.einsum("eig,igh,eih->ei", weights, inside, weights).mean(-1)
  mean_scores_sq = inside.mean((1, 2)).reshape(blocks, -1).mean(-1)  # [b]
  squares[3] -= np.mean(excess * mean_scores_sq)
  # Each block estimates g. Products with each score, [S, b], with the mean
  # gradient of each block, [4, b, b], and with the estimates of other blocks
  truth = (rewards - baseline) / block
  onto = (gram * truth).reshape(-1, blocks, block).sum(-1)
  products = weights.reshape(4, -1, 1) * onto
  products = products.reshape(4, blocks, block, blocks).sum(2)
  products *= group_size / block
  truths = (truth[:, None] * onto).reshape(blocks, block, blocks).sum(1)
  # Weights for the mean over ordered pairs of different blocks
  pairs = (1 - np.eye(blocks)) / (blocks * (blocks - 1))
  # ||ghat||^2 - 2 ghat.g + ||g||^2
  mixed = np.sum(products * pairs, (-2, -1))
  return squares - 2 * mixed + np.sum(truths * pairs)


def group_errors(
  gram: Gram,
  rewards: Rewards,
  group_sizes: Sequence[int],
  block: int,
  baseline: float,
) -> Estimators:
  """Measures the mean squared errors [group sizes] of groups of completions.

  The pool is divided into blocks of `block` samples, each block into groups of
  G, so group sizes must divide `block`. A group's error is ||ghat||^2 - 2
  ghat.g + ||g||^2. Estimates from the other blocks replace the unknown g and
  the oracle's V; products of estimates from two blocks replace ||g||^2. So the
  expected result is exactly the mean squared error. Estimates of g subtract
  `baseline` from rewards; it must not depend on the pool.
  """
  rewards = rewards.astype(np.float64)
  errors = [_errors(gram, rewards, g, block, baseline) for g in group_sizes]
  return Estimators(*np.transpose(errors))


def without_blocks(
  estimate: Callable[..., Numbers], gram: Gram, rewards: Rewards, blocks: int
) -> Numbers:
  """Repeats an estimate, each time leaving out one block of samples."""
  by_block = np.arange(len(rewards)).reshape(blocks, -1)
  subsets = [np.delete(by_block, i, axis=0).ravel() for i in range(blocks)]
  return stacked(estimate(gram[np.ix_(k, k)], rewards[k]) for k in subsets)


def stacked(estimates: Iterable[Numbers]) -> Numbers:
  """Stacks the fields of named tuples along a new first axis."""
  estimates = list(estimates)
  return type(estimates[0])(*map(np.array, zip(*estimates, strict=True)))


def mean_over_prompts(
  values: np.ndarray, *replicates: np.ndarray
) -> dict[str, float]:
  """Averages `PromptMeans` over prompts, with standard error and 95% interval.

  A prompt's variance is jackknifed (R. G. Miller, 1974), which for U-statistics
  is never biased downwards (B. Efron and C. Stein, 1981). Blocks and
  projections err independently, so their variances add up; the interval is
  Student's. Its degrees of freedom follow Welch and Satterthwaite, each
  prompt with the smaller of blocks - 1 and projections - 1.
  """
  degrees = [without.shape[-1] - 1 for without in replicates]
  each = zip(replicates, degrees, strict=True)
  # The jackknife of b replicates is (b - 1) / b times their sum of squares,
  # which is b - 1 = `n` times `np.var`.
  variances = sum(np.var(without, axis=-1) * n for without, n in each)
  mean = float(values.mean())
  total = float(variances.sum())
  half = 0.0
  if total:
    joint = int(min(degrees) * total**2 / float(np.sum(variances**2)))
    half = t_quantile(joint) * total**0.5 / len(values)
  return {
    "mean": mean,
    "low": mean - half,
    "high": mean + half,
    "error": total**0.5 / len(values),
  }


def ratio_of_means(above: PromptMeans, below: PromptMeans) -> dict[str, float]:
  """Returns the ratio of two means over prompts, with its delta interval."""
  scale = below[0].mean()
  if scale <= 0:
    return dict.fromkeys(("mean", "low", "high"), float("nan"))
  ratio = above[0].mean() / scale
  # To first order the ratio's error is mean(a - ratio b) / mean(b).
  residuals = (a - ratio * b for a, b in zip(above, below, strict=True))
  residual = mean_over_prompts(*residuals)
  half = (residual["high"] - residual["low"]) / (2 * scale)
  return {"mean": ratio, "low": ratio - half, "high": ratio + half}
