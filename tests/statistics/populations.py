"""Small policies with known probabilities, scores and rewards."""

import itertools

import numpy as np

from grpojax.statistics.u_statistics import Estimators


def population(seed, prompts, completions, dims):
  """Draws probabilities, scores and rewards; prompts share parameters."""
  rng = np.random.default_rng(seed)
  shape = prompts, completions
  features = rng.normal(size=(*shape, dims))
  logits = rng.normal(size=shape)
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  scores = features - np.einsum("xm,xmd->xd", p, features)[:, None]
  return p, scores, rng.normal(size=shape)


def all_groups(p, s, z, g):
  """Lists each estimator's gradients [X, groups, d] and chances [X, groups].

  Groups are all sequences of g completions.
  """
  group = np.array(list(itertools.product(range(p.shape[1]), repeat=g)))
  rewards = z[:, group]
  total = rewards.sum(-1, keepdims=True)
  baselines = Estimators(
    vanilla=0 * rewards,
    leave_one_out=(total - rewards) / (g - 1),
    centred=total / g,
    oracle=(p * z).sum(-1)[:, None, None],
  )
  estimates = [
    np.einsum("xng,xngd->xnd", rewards - x, s[:, group]) / g for x in baselines
  ]
  return Estimators(*estimates), p[:, group].prod(-1)
