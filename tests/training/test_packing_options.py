"""Packing changes no training step, with random settings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core.advantages import ADVANTAGES
from grpojax.core.losses import WEIGHTINGS
from grpojax.core.losses.kl import PLACEMENTS
from grpojax.core.losses.rollout_correction import CORRECTIONS
from grpojax.core.losses.surrogates import RATIOS, SURROGATES
from grpojax.core.losses.truncation import TRUNCATED
from grpojax.core.objective import OLD_LOGPROBS
from grpojax.core.types import Rollout
from grpojax.core.update import make_update
from grpojax.training.config import from_config
from grpojax.training.run import setup
from grpojax.training.step import batch as batch_lib

B, G, P, T, V = 4, 6, 3, 16, 11
CHOICES = {
  "advantage": ADVANTAGES,
  "loss.surrogate": SURROGATES,
  "loss.ratio": RATIOS,
  "loss.weighting": WEIGHTINGS,
  "loss.truncated": TRUNCATED,
  "loss.correction": CORRECTIONS,
  "loss.off_policy_threshold": (0.0, 0.3),
  "loss.old_logprobs": OLD_LOGPROBS,
  "loss.beta": (0.0, 0.1),
  "loss.kl_placement": PLACEMENTS,
  "loss.kl": ("k1", "k2", "k3"),
  "loss.advantage_clip": (0.0, 0.5),
  "loss.dual_clip": (0.0, 3.0),
  "loss.top_entropy_quantile": (1.0, 0.4),
  "loss.entropy_coef": (0.0, 0.05),
  "loss.entropy_target": (0.0, 1.0),
  "optim.epochs": (1, 2),
  "optim.minibatches": (1, 2),
  "optim.micro_batches": (1, 2, 3),
  "optim.max_grad_norm": (0.1, 1.0),
  "sampling.temperature": (1.0, 0.7),
}


def draw_settings(config_with, rng):
  """Draws random settings without conflicts."""
  for _ in range(500):
    drawn = {k: list(v)[rng.integers(len(v))] for k, v in CHOICES.items()}
    sizes = {"batch_size": B, "group_size": G, "sampling.max_new_tokens": T}
    config = config_with(**drawn, **sizes, optim__packing=True)
    try:
      return drawn, from_config(config)
    except ValueError:
      continue
  raise AssertionError("all draws have conflicts")


def draw_samples(rng):
  lengths = np.minimum(rng.geometric(0.3, (B, G)), T)
  mask = np.arange(T) < lengths[..., None]
  logprobs = np.where(mask, -rng.uniform(1, 4, mask.shape), 0.0)
  return Rollout(
    prompt_ids=jnp.asarray(rng.integers(0, V, (B, P))),
    prompt_mask=jnp.arange(P) < jnp.array([[3], [1], [2], [3]]),
    completion_ids=jnp.asarray(rng.integers(0, V, (B, G, T))),
    completion_mask=jnp.asarray(mask),
    logprobs=jnp.asarray(logprobs, jnp.float32),
    finished=jnp.asarray(rng.uniform(size=(B, G)) < 0.8),
  )


def step(settings, lm, samples, rewards, packing):
  """Returns a step's change of parameters, metrics and advantages."""
  params, tx = lm.init(jax.random.key(5)), optax.sgd(0.1)
  ref_params = None
  if settings.loss.needs_reference:
    ref_params = jax.tree.map(lambda x: 0.9 * x, params)
  make_batch = batch_lib.make_batch_program(settings)
  make_batch = jax.jit(make_batch, static_argnums=0)
  options = {"ref_params": ref_params, "packing": packing}
  batch, _ = make_batch(lm, params, samples, rewards, **options)
  state = setup.first_state(settings, tx, params)
  options = settings.optim.update, settings.sampling.distribution
  update = make_update(lm, tx, settings.loss, *options)
  state, metrics = jax.jit(update)(state, batch)
  moved = jax.tree.map(jnp.subtract, state.params, params)
  return moved, metrics, batch.advantages


@pytest.mark.slow
@pytest.mark.parametrize(
  "seed", [0, *(pytest.param(i, marks=pytest.mark.long) for i in (1, 2, 3))]
)
def test_packed_and_unpacked_steps_are_equal(seed, tabular, config_with):
  rng = np.random.default_rng(seed)
  drawn, settings = draw_settings(config_with, rng)
  samples = draw_samples(rng)
  rewards = rng.integers(0, 2, (B, G)).astype(np.float32)
  rewards[0, 2] = np.nan
  lm = tabular.lm(V, V)
  mesh = setup.make_mesh(settings, jax.devices()[:1])
  with jax.set_mesh(mesh):
    packing = batch_lib.plan_packing(settings, samples, rewards, mesh)
    assert packing is not None, drawn
    packed = step(settings, lm, samples, jnp.asarray(rewards), packing)
    plain = step(settings, lm, samples, jnp.asarray(rewards), None)
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain[0]))
  assert 0 < scale < np.inf, drawn
  for a, b in zip(*map(jax.tree.leaves, (packed[0], plain[0])), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale, err_msg=drawn)
  np.testing.assert_allclose(packed[2], plain[2], 1e-5, 1e-6, err_msg=drawn)
  assert packed[1].keys() == plain[1].keys()
  for name, value in plain[1].items():
    text = f"{name} of {drawn}"
    np.testing.assert_allclose(packed[1][name], value, 1e-4, 1e-6, err_msg=text)


IN_REWARD = {"loss.beta": 0.1, "loss.kl": "k1", "loss.kl_placement": "reward"}


@pytest.mark.parametrize(
  "changes, expected",
  [
    ({}, [1, 1, 0]),
    ({"loss.truncated": "mask"}, [1, 0, 0]),
    ({"loss.truncated": "drop"}, [1, 0, 0]),
    ({"loss.truncated": "mask", "loss.beta": 0.1}, [1, 0, 0]),
    # The penalty of a masked completion is part of the baseline.
    (IN_REWARD | {"loss.truncated": "mask"}, [1, 1, 0]),
    (IN_REWARD | {"loss.truncated": "drop"}, [1, 0, 0]),
  ],
)
def test_unused_completions_are_not_packed(
  changes, expected, settings_with, samples_of, one_device, monkeypatch
):
  planned = []
  plan = lambda lengths, *_: planned.append(lengths)
  monkeypatch.setattr(batch_lib.packing_layout, "plan", plan)
  samples = samples_of(np.ones((1, 3, 2)), [[True, False, True]])
  rewards = np.array([[1.0, 0.0, np.nan]], np.float32)
  settings = settings_with(**changes)
  batch_lib.plan_packing(settings, samples, rewards, one_device)
  off = settings_with(**changes, optim__packing=False)
  assert batch_lib.plan_packing(off, samples, rewards, one_device) is None
  np.testing.assert_array_equal(planned, [[2 * np.array(expected)]])
