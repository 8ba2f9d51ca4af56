"""Small policies of which everything is known."""

import numpy as np
import pytest


def draw_population(seed, prompts, completions, dims):
  """Probabilities, scores and rewards of prompts that share parameters."""
  rng = np.random.default_rng(seed)
  shape = prompts, completions
  features, logits = rng.normal(size=(*shape, dims)), rng.normal(size=shape)
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  scores = features - np.einsum("xm,xmd->xd", p, features)[:, None]
  return p, scores, rng.normal(size=shape)


@pytest.fixture
def population():
  return draw_population
