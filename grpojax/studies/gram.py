"""Inner products of the scores of a pool of completions.

A score is the gradient of a completion's log-probability, s = grad log pi(Y|x),
with respect to all parameters. It is too long to keep many, but every error,
norm and covariance trace of a gradient estimator is a function of the rewards
and of the Gram matrix K_ij = s_i.s_j; see `studies.errors`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int

from grpojax.core.logprobs import token_logprobs
from grpojax.core.sampling import Sampling
from grpojax.core.types import LM, Params, Prompts

_COLUMNS = 2**16  # parameters whose products are summed up in float32


def make_score(lm: LM, sampling: Sampling = Sampling()) -> Callable:
  """Exact scores of several completions of one prompt, as a compiled function.

  Args:
    lm: the model.
    sampling: the distribution that the completions were drawn from.

  Returns:
    `(params, prompt_ids [1, P], prompt_mask [1, P], ids [n, T], mask [n, T]) ->
    scores [n, d]`, d all parameters of the model, in the order of
    `ravel_pytree`. It holds n copies of all activations and parameters.
  """

  def logprob(params, prompt_ids, prompt_mask, ids, mask):
    logprobs, _ = token_logprobs(
      lm, params, prompt_ids, prompt_mask, ids[None, None], sampling=sampling
    )
    return jnp.sum(jnp.where(mask, logprobs[0, 0], 0.0))

  def score(*args):
    return ravel_pytree(jax.grad(logprob)(*args))[0]

  return jax.jit(jax.vmap(score, in_axes=(None, None, None, 0, 0)))


def score_gram(
  score: Callable,
  params: Params,
  prompts: Prompts,
  ids: Int[np.ndarray, "S T"],
  mask: Bool[np.ndarray, "S T"],
  chunk_size: int = 8,
) -> tuple[Float[np.ndarray, "S S"], int]:
  """Inner products of the scores of a pool of completions.

  A pool repeats itself (short answers above all), so the gradient of each
  distinct completion is computed once. Holds d float32 for each of these.

  Args:
    score: from `make_score`.
    params: the model's parameters.
    prompts: one prompt.
    ids: completions of it.
    mask: True on the completions' tokens.
    chunk_size: completions whose gradients are computed at once.

  Returns:
    The Gram matrix, float64, and the number of distinct completions.
  """
  rows, index = np.unique(np.where(mask, ids, -1), axis=0, return_inverse=True)
  count = len(rows)
  padding = -count % chunk_size  # one shape, one program
  rows = np.pad(rows, [(0, padding), (0, 0)], constant_values=-1)
  chunks = [
    np.asarray(
      score(
        params,
        prompts.prompt_ids,
        prompts.prompt_mask,
        np.maximum(part, 0),
        part >= 0,
      )
    )
    for part in np.split(rows, len(rows) // chunk_size)
  ]
  gram = _gram(np.concatenate(chunks)[:count])
  index = index.reshape(-1)  # numpy 2.0 gave it a second axis
  return gram[np.ix_(index, index)], count


def _gram(scores: np.ndarray) -> np.ndarray:
  """All inner products: float32 over a run of columns, float64 over runs."""
  gram = np.zeros((len(scores), len(scores)))
  for start in range(0, scores.shape[1], _COLUMNS):
    part = scores[:, start : start + _COLUMNS]
    gram += part @ part.T
  return gram
