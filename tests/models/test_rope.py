"""Rotary tables against transformers, and texts too long for longrope."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import config_with, normal

from grpojax.models import huggingface as hf
from grpojax.models.rope import NO_ROTATION, Rope, rope_tables, rotate
from grpojax.models.transformer import transformer

BASE = dict(vocab_size=61, hidden_size=256, num_hidden_layers=2)
BASE |= dict(num_attention_heads=2, num_key_value_heads=2, intermediate_size=8)
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
OLMO3 = dict(YARN, factor=8.0, attention_factor=1.2079441541679836)
OLMO3 |= dict(beta_fast=32.0, beta_slow=1.0, rope_type="yarn")
OLMO3["original_max_position_embeddings"] = 8192
MINISTRAL3 = dict(YARN, factor=16.0, beta_fast=32.0, beta_slow=1.0)
MINISTRAL3 |= dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
MINISTRAL3 |= dict(original_max_position_embeddings=16384, rope_theta=1e6)
LONGROPE = dict(type="longrope", short_factor=[1.0 + i / 9 for i in range(48)])
LONGROPE["long_factor"] = [2.0] * 48
# (model_type, keys of config.json): as documented by Qwen, and as on the Hub
TABLES = {
  "qwen2.5": ("qwen2", dict(rope_scaling=YARN | {"type": "yarn"})),
  "qwen3": ("qwen3", dict(rope_scaling=YARN | {"rope_type": "yarn"})),
  "transformers5": (
    "qwen3",
    dict(rope_parameters=YARN | {"rope_type": "yarn", "rope_theta": 1e6}),
  ),
  "untruncated": (
    "llama",
    dict(rope_scaling=dict(YARN, type="yarn", truncate=False, beta_slow=2)),
  ),
  "mscale": (
    "llama",
    dict(rope_scaling=dict(YARN, type="yarn", mscale=0.7, mscale_all_dim=1.2)),
  ),
  "olmo3": ("olmo3", dict(rope_scaling=OLMO3, rope_theta=5e5)),
  "ministral3": (
    "ministral3",
    dict(rope_parameters=MINISTRAL3 | {"type": "yarn"}),
  ),
  "phi4_mini": (
    "phi3",
    dict(rope_scaling=LONGROPE, partial_rotary_factor=0.75)
    | dict(max_position_embeddings=131072),
  ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_equal_those_of_transformers(name):
  transformers = pytest.importorskip("transformers")
  utils = pytest.importorskip("transformers.modeling_rope_utils")
  kind, changes = TABLES[name]
  hf_config = {"model_type": kind} | BASE | {"rope_theta": 1e6} | changes
  rope = hf.to_transformer_config(hf_config).rope
  theirs = transformers.AutoConfig.for_model(**hf_config)
  layer_type = "full_attention" if kind == "olmo3" else None
  rope_type = "longrope" if kind == "phi3" else "yarn"
  compute = utils.ROPE_INIT_FUNCTIONS[rope_type]
  frequency, factor = compute(theirs, "cpu", layer_type=layer_type)
  positions = np.array([0, 1, 7, 4000])
  angle = positions[:, None] * frequency.numpy()[None]
  ours = rope_tables(jnp.asarray(positions), 128, rope)
  np.testing.assert_allclose(
    ours.cos[:3], np.cos(angle[:3]) * factor, atol=1e-6
  )
  np.testing.assert_allclose(
    ours.sin[:3], np.sin(angle[:3]) * factor, atol=1e-6
  )
  # Angles are rounded in float32.
  np.testing.assert_allclose(ours.cos, np.cos(angle) * factor, atol=1e-3)


def test_queries_are_scaled_by_position():
  rope = Rope(query_beta=0.1, original_length=4)
  scale = rope_tables(jnp.array([0, 3, 4, 11, 16]), 8, rope).query_scale
  expected = 1 + 0.1 * np.log([1, 1, 2, 3, 5])
  np.testing.assert_allclose(scale, expected, rtol=1e-6)


def test_channels_outside_of_the_share_and_layers_without_rope_stay():
  x = normal(np.random.default_rng(0), 1, 1, 5, 2, 8)
  positions = jnp.arange(5)[None, None]
  y = rotate(x, rope_tables(positions, 8, Rope(share=0.5)))
  np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
  assert (y[:, :, 1:, :, :4] != x[:, :, 1:, :, :4]).any(axis=(3, 4)).all()
  y = rotate(x, rope_tables(positions, 8, NO_ROTATION))
  np.testing.assert_array_equal(y, x)


def test_longrope_refuses_long_rollouts():
  rope = Rope(longest=12, divisors=(1.0, 1.0))
  lm = transformer(config_with(rope=rope))
  params = jax.eval_shape(lm.init, jax.random.key(0))
  prepare = lambda n: jax.eval_shape(
    lambda x: lm.prepared(x, longest=n)[1], params
  )
  prepare(12)
  with pytest.raises(ValueError, match="13 positions, .* only 12"):
    prepare(13)
