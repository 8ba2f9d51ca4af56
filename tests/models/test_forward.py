"""The decoder's passes over its layers, above all `LM.forward`.

test_families.py compares values and gradients with transformers.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from small_models import config_with, prompts_of, random_params

from grpojax.core.logprobs import completion_hidden
from grpojax.core.meshes import AXES
from grpojax.core.types import Tokens
from grpojax.models import layer_stacks
from grpojax.models.config import TransformerConfig
from grpojax.models.rope import Rope
from grpojax.models.transformer import last_layers, transformer

RNG = np.random.default_rng(0)
CONFIG = config_with(  # every feature of a layer except experts
  qkv_bias=True,
  o_bias=True,
  mlp_bias=True,
  qk_norm=True,
  norm_offset=True,
  post_norms=True,
  attention_cap=2.0,
  local_layers=(True, False),
  window=3,
  local_rope=Rope(theta=30.0),
)
PROMPTS = prompts_of(RNG, (5, 2))
IDS = jnp.asarray(RNG.integers(0, 11, (2, 2, 6)))
BATCH = Tokens(PROMPTS.prompt_ids, PROMPTS.prompt_mask, IDS)
# Two completions per row.
PACKED = BATCH.replace(
  positions=jnp.broadcast_to(jnp.array([0, 1, 0, 1, 2, 3]), IDS.shape),
  segments=jnp.broadcast_to(jnp.array([0, 0, 1, 1, 1, 1]), IDS.shape),
)
PARAMS = random_params(transformer(CONFIG))


def with_gradient(lm, params=PARAMS, merge=lambda params: params):
  def total(params):
    hidden, _ = completion_hidden(lm, merge(params), PACKED)
    return jnp.sum(jnp.sin(hidden)), hidden

  grads, hidden = jax.jit(jax.grad(total, has_aux=True))(params)
  return hidden, grads


def assert_same(got, want):
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * (1 + np.abs(b).max()))


@pytest.fixture(scope="module")
def two_passes():
  return with_gradient(transformer(CONFIG)._replace(forward=None))


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat",
  [
    pytest.param(name, marks=() if name == "selective" else pytest.mark.long)
    for name in layer_stacks.REMAT
  ],
)
def test_forward_equals_prefill_and_extend(two_passes, remat):
  assert_same(with_gradient(transformer(CONFIG, remat=remat)), two_passes)


@pytest.mark.slow
def test_layers_in_a_scan_and_in_several_stacks(two_passes, monkeypatch):
  monkeypatch.setattr(layer_stacks, "SHALLOW", 0)
  moving, merge = last_layers(PARAMS, 1)
  hidden, grads = with_gradient(transformer(CONFIG), moving, merge)
  whole = two_passes[1]
  want = two_passes[0], {name: whole[name] for name in grads}
  want[1]["layers"] = jax.tree.map(lambda x: x[1:], whole["layers"])
  assert_same((hidden, grads), want)


@pytest.mark.slow
@pytest.mark.skipif(
  jax.__version_info__ < (0, 8), reason="constrains on meshes of devices only"
)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_layer_is_gathered_twice_in_a_gradient(remat):
  """Once forward and once backward, for prompts and completions together."""
  lm = transformer(CONFIG, remat=remat)
  types = (AxisType.Auto,) * len(AXES)
  mesh = AbstractMesh((1, 4, 1, 1), AXES, axis_types=types)

  def total(params):
    return jnp.sum(completion_hidden(lm, params, BATCH)[0])

  with jax.sharding.use_abstract_mesh(mesh):
    jaxpr = jax.make_jaxpr(jax.grad(total))(PARAMS)
  # Two matrices [D, F] and a gradient.
  text = re.sub(r"\s+", " ", str(jaxpr))
  whole = r"f32\[8,6\] = sharding_constraint\[(?:(?! = ).)*spec=P\(None, None\)"
  assert len(re.findall(whole, text)) == 2 * 3


@pytest.mark.slow
def test_only_shallow_models_are_unrolled():
  def size(layers):
    config = TransformerConfig(11, 8, layers, 2, 1, 4, 6)
    lm = transformer(config)
    params = jax.eval_shape(lm.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda p: lm.forward(p, BATCH))(params)
    return str(jaxpr).count("dot_general")

  shallow = layer_stacks.SHALLOW
  one = size(1)
  two = size(2)
  assert size(shallow) - one == (shallow - 1) * (two - one) > 0
  assert size(shallow + 1) == size(30) == one


def products(config, remat):
  lm = transformer(config, remat=remat)
  params = jax.eval_shape(lm.init, jax.random.key(0))

  def total(params):
    prefix = lm.prefill(params, BATCH.prompt_ids, BATCH.prompt_mask)
    return jnp.sin(lm.extend(params, prefix, IDS)[0]).mean()

  return str(jax.make_jaxpr(jax.grad(total))(params)).count("dot_gen")


@pytest.mark.slow
def test_each_policy_recomputes_more_than_the_one_before(tiny):
  each = [products(tiny.config, remat) for remat in layer_stacks.REMAT]
  none, attention, selective, full = each
  assert none < attention < selective < full
  # A post-norm needs no product again.
  post_norms = dataclasses.replace(tiny.config, post_norms=True)
  assert products(post_norms, "attention") == attention


def test_packed_decoding_and_an_unknown_remat_are_refused(tiny):
  prompts = BATCH.prompt_ids, BATCH.prompt_mask
  prefix = jax.jit(tiny.lm.prefill)(tiny.params, *prompts)
  cache = tiny.lm.init_cache(2, 2, 6)
  with pytest.raises(ValueError, match="no segments .for training"):
    tiny.lm.extend(tiny.params, prefix, IDS, cache, segments=IDS)
  with pytest.raises(ValueError, match="remat='half': use one of none, att"):
    transformer(CONFIG, remat="half")


def test_gpus_decode_without_stacks_of_layers(tiny):
  """Otherwise XLA:GPU would copy layers out of their stack."""
  config = dataclasses.replace(tiny.config, layers=layer_stacks.SHALLOW + 1)
  for platform, stacks in {"gpu": config.layers, "tpu": 1}.items():
    lm = transformer(config, platform=platform)
    prepare = lambda key, lm=lm: lm.prepared(lm.init(key), longest=9)[1]
    params = jax.eval_shape(prepare, jax.random.key(0))
    assert len(layer_stacks.stacks(params)) == stacks
