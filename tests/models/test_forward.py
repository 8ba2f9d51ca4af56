"""Prompts and completions in one pass over the layers: `LM.forward`.

That its values and gradients are transformers' is tested in test_families.py.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from small_models import config_with, prompts_of, random_params

from grpojax.core.logprobs import completion_hidden
from grpojax.core.mesh import AXES
from grpojax.models import layer_stacks
from grpojax.models.config import TransformerConfig
from grpojax.models.rope import Rope
from grpojax.models.transformer import last_layers, transformer

RNG = np.random.default_rng(0)
CONFIG = config_with(  # all that a layer may have, but experts
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
BATCH = PROMPTS.prompt_ids, PROMPTS.prompt_mask, IDS
# Two completions a row, as they are packed.
PACKED = dict(
  positions=jnp.broadcast_to(jnp.array([0, 1, 0, 1, 2, 3]), IDS.shape),
  segments=jnp.broadcast_to(jnp.array([0, 0, 1, 1, 1, 1]), IDS.shape),
)


PARAMS = random_params(transformer(CONFIG))


def with_gradient(lm, params=PARAMS, of=lambda params: params):

  def total(params):
    hidden, _ = completion_hidden(lm, of(params), *BATCH, **PACKED)
    return jnp.sum(jnp.sin(hidden)), hidden

  grads, hidden = jax.jit(jax.grad(total, has_aux=True))(params)
  return hidden, grads


def assert_same(got, want):
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * (1 + np.abs(b).max()))


@pytest.fixture(scope="module")
def apart():
  return with_gradient(transformer(CONFIG)._replace(forward=None))


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat",
  [
    pytest.param(name, marks=() if name == "selective" else pytest.mark.long)
    for name in layer_stacks.REMAT
  ],
)
def test_one_pass_is_prefill_and_extend(apart, remat):
  assert_same(with_gradient(transformer(CONFIG, remat=remat)), apart)


@pytest.mark.slow
def test_layers_in_a_scan_and_in_several_stacks(apart, monkeypatch):
  """As in a deep model; the stacks' windows stay theirs."""
  monkeypatch.setattr(layer_stacks, "SHALLOW", 0)
  moving, merge = last_layers(PARAMS, 1)
  hidden, grads = with_gradient(transformer(CONFIG), moving, merge)
  want = apart[0], {name: apart[1][name] for name in grads}
  want[1]["layers"] = jax.tree.map(lambda x: x[1:], apart[1]["layers"])
  assert_same((hidden, grads), want)


@pytest.mark.slow
@pytest.mark.skipif(
  jax.__version_info__ < (0, 8), reason="constrains on meshes of devices only"
)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_layer_is_gathered_twice_in_a_gradient(remat):
  """Forward and backward: not for prompts and completions apart."""
  lm = transformer(CONFIG, remat=remat)
  types = (AxisType.Auto,) * len(AXES)
  mesh = AbstractMesh((1, 4, 1, 1), AXES, axis_types=types)

  def total(params):
    return jnp.sum(completion_hidden(lm, params, *BATCH)[0])

  with jax.sharding.use_abstract_mesh(mesh):
    jaxpr = jax.make_jaxpr(jax.grad(total))(PARAMS)
  # Of the two matrices [D, F]; the third is the gradient's.
  text = re.sub(r"\s+", " ", str(jaxpr))
  whole = r"f32\[8,6\] = sharding_constraint\[(?:(?! = ).)*spec=P\(None, None\)"
  assert len(re.findall(whole, text)) == 2 * 3


@pytest.mark.slow
def test_depth_decides_whether_layers_are_written_out():
  """A program must not grow with the depth of a deep model."""

  def size(layers):
    config = TransformerConfig(11, 8, layers, 2, 1, 4, 6)
    lm = transformer(config)
    params = jax.eval_shape(lm.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda p: lm.forward(p, *BATCH))(params)
    return str(jaxpr).count("dot_general")

  shallow = layer_stacks.SHALLOW
  one, two = size(1), size(2)  # norms outside the layers have products too
  assert size(shallow) - one == (shallow - 1) * (two - one) > 0
  assert size(shallow + 1) == size(30) == one


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="remat='half': use one of none, att"):
    transformer(CONFIG, remat="half")
