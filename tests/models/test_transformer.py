"""The decoder's own properties; its logits are compared in test_families.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import prompts_of, sample

from grpojax.models import layer_stacks
from grpojax.models.transformer import transformer

RNG = np.random.default_rng(0)
BATCH = prompts_of(RNG, (4, 2))
PROMPTS, MASK = BATCH.prompt_ids, BATCH.prompt_mask
IDS = jnp.asarray(RNG.integers(0, 11, (2, 3, 5)))


def products(config, remat):
  lm = transformer(config, remat=remat)
  params = jax.eval_shape(lm.init, jax.random.key(0))

  def total(params):
    prefix = lm.prefill(params, PROMPTS, MASK)
    return jnp.sin(lm.extend(params, prefix, IDS)[0]).mean()

  return str(jax.make_jaxpr(jax.grad(total))(params)).count("dot_gen")


@pytest.mark.slow
def test_each_policy_recomputes_more_than_the_one_before(tiny):
  each = [products(tiny.config, remat) for remat in layer_stacks.REMAT]
  none, attention, selective, full = each
  assert none < attention < selective < full


@pytest.mark.slow
def test_no_product_is_computed_again_for_a_post_norm(tiny):
  post_norms = dataclasses.replace(tiny.config, post_norms=True)
  counts = [products(x, "attention") for x in (tiny.config, post_norms)]
  assert counts[0] == counts[1]


def test_the_cache_has_the_asked_dtype(tiny):
  lm = transformer(tiny.config, dtype=jnp.bfloat16)
  cache = jax.eval_shape(lambda: lm.init_cache(2, 3, 7))
  for keys, values, *_ in cache.blocks[0]:
    assert keys.shape == (2, 2, 3, 2, 4, 7) and keys.dtype == jnp.bfloat16
    assert values.shape == (2, 2, 3, 2, 7, 4) and values.dtype == keys.dtype


def test_rows_of_several_completions_are_not_decoded(tiny):
  prefix = jax.jit(tiny.lm.prefill)(tiny.params, PROMPTS, MASK)
  cache = tiny.lm.init_cache(2, 3, 5)
  with pytest.raises(ValueError, match="segments are for training"):
    tiny.lm.extend(tiny.params, prefix, IDS, cache, segments=IDS)


@pytest.mark.long
def test_where_it_decodes_changes_no_sample(tiny):
  """On GPUs no layer is in a stack, so that none is copied out of one."""
  config = dataclasses.replace(tiny.config, layers=layer_stacks.SHALLOW + 1)
  params = transformer(config).init(jax.random.key(0))
  rollouts = {}
  for platform, stacks in {"gpu": config.layers, "tpu": 1}.items():
    lm = transformer(config, platform=platform)
    decoder, _ = lm.prepared(params, longest=9)
    assert len(decoder.init_cache(1, 1, 5).blocks[0]) == stacks
    rollouts[platform] = sample(lm, params, BATCH, group_size=2)
  written_out, scanned = rollouts["gpu"], rollouts["tpu"]
  ids = written_out.completion_ids, scanned.completion_ids
  np.testing.assert_array_equal(*ids)
  np.testing.assert_allclose(written_out.logprobs, scanned.logprobs, atol=1e-5)
