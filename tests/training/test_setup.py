"""Settings reach the optimizer, the schedule, the loss and the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.models import lora
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer
from grpojax.runtime.cli.configs import flatten as flat
from grpojax.training import config as config_module
from grpojax.training.config import default_config
from grpojax.training.run import setup
from grpojax.training.run.setup import optimizer

OFF = {
  *(f"filter_groups.{x}" for x in ("metric", "gen_parts", "rescale")),
  "filter_groups.max_num_gen_batches",
  *(f"lora.{x}" for x in ("alpha", "targets")),
  *(f"environment.{x}" for x in ("tool_format", "template", "timeout")),
  *(f"environment.max_{x}" for x in ("turns", "turn_tokens", "observation")),
  *(f"environment.{x}" for x in ("action", "workers", "check")),
  *(f"difficulty.{x}" for x in ("target", "band", "rows", "half_life")),
  *(f"difficulty.{x}" for x in ("uniform", "importance_weights")),
  *(f"model.{x}" for x in ("reference_every", "reference_mix")),
  *(f"loss.{x}" for x in ("kl", "entropy_coef_max", "entropy_coef_delta")),
  *(f"sampling.engine_{x}" for x in ("timeout", "weights")),
}
"""Settings of features that are off in the toy run and have their own tests."""


def test_every_setting_is_read_by_a_training_run(toy_run):
  fields = {config_module.AT_TOP.get(x, x) for x in flat(default_config())}
  assert fields - toy_run.read == OFF


def updates(settings, gradients, start=0.0):
  """Returns the optimizer's updates of one parameter for these gradients."""
  tx = optimizer(settings)
  x = jnp.asarray(start, jnp.float32)
  state = tx.init(x)
  result = []
  step = jax.jit(tx.update)
  for gradient in gradients:
    update, state = step(jnp.asarray(gradient, jnp.float32), state, x)
    result.append(float(update))
  return np.array(result)


@pytest.mark.parametrize(
  "schedule, factor",
  [
    ("constant", lambda t: 1.0 + 0 * t),
    ("linear", lambda t: 1 - t),
    ("cosine", lambda t: (1 + np.cos(np.pi * t)) / 2),
  ],
)
def test_schedules_follow_a_warmup(schedule, factor, settings_with):
  sizes = {"steps": 5, "optim__epochs": 2, "optim__minibatches": 2}
  sizes |= {"optim__learning_rate": 0.01, "optim__warmup_steps": 4}
  settings = settings_with(**sizes, optim__schedule=schedule)
  # With a constant gradient Adam's update is the learning rate.
  rates = -updates(settings, [3.0] * 20)
  warmup = np.arange(1, 5) / 5  # from above 0
  expected = 0.01 * np.concatenate([warmup, factor(np.arange(16) / 16)])
  np.testing.assert_allclose(rates, expected, rtol=1e-3, atol=1e-8)


def test_the_optimizer_is_adamw(settings_with):
  settings = settings_with(
    optim__learning_rate=0.01,
    optim__b1=0.5,
    optim__b2=0.75,
    optim__weight_decay=0.1,
  )
  actual = updates(settings, [1.0, -2.0], start=3.0)
  first = 0.5 * (0.5 * 1.0) + 0.5 * -2.0
  second = 0.75 * (0.25 * 1.0) + 0.25 * 4.0
  adam = (first / (1 - 0.5**2)) / np.sqrt(second / (1 - 0.75**2))
  expected = [-0.01 * (1.0 + 0.1 * 3.0), -0.01 * (adam + 0.1 * 3.0)]
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_norms_and_biases_do_not_decay(settings_with):
  """As in transformers; stacked norms are matrices [L, D]."""
  model = TransformerConfig(
    vocab_size=8, width=4, layers=2, heads=2, kv_heads=1, head_dim=2, mlp=4,
    qkv_bias=True, mlp_bias=True, qk_norm=True, post_norms=True,
    tied=False,
  )  # fmt: skip
  weights = transformer(model).init(jax.random.key(0))
  adapters = lora.init(weights, jax.random.key(0), 2, "layers/(q|down)")
  ones = jax.tree.map(jnp.ones_like, {"whole": weights, "lora": adapters})
  tx = optimizer(settings_with(optim__weight_decay=0.1))
  zeros = jax.tree.map(jnp.zeros_like, ones)
  update, _ = tx.update(zeros, tx.init(ones), ones)
  paths = jax.tree_util.tree_leaves_with_path(update)
  moved = {
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, x in paths
    if np.any(x)
  }
  layer = {f"whole/layers/{x}" for x in "q k v o gate up down".split()}
  adapted = {f"lora/layers/{x}/{y}" for x in ("q", "down") for y in "ab"}
  assert moved == layer | adapted | {"whole/embed", "whole/head"}
  assert len(paths) > len(moved) + 10


def test_adafactor_has_the_rate_and_decay_of_adamw(settings_with):
  settings = settings_with(
    optim__name="adafactor",
    optim__learning_rate=0.01,
    optim__b2=0.25,
    optim__weight_decay=0.1,
  )
  actual = updates(settings, [1.0, -0.5], start=3.0)
  second = 0.25 * 1.0 + 0.75 * 0.25  # b2, since 1 - 2**-0.8 is larger
  expected = [-0.01 * (1.0 + 0.3), -0.01 * (-0.5 / np.sqrt(second) + 0.3)]
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
  "name, value, off",
  [("router_aux_coef", 0.01, 0), ("router_replay", True, False)],
)
def test_losses_of_experts_need_experts(settings_with, name, value, off):
  settings = settings_with(**{f"loss__{name}": value})
  with pytest.raises(ValueError, match=f"loss.{name} = {value}: .* use {off}"):
    setup.open_policy(settings)
