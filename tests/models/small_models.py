"""Small decoders, random parameters, and programs on several devices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from run_helpers import output_of

from grpojax.core.packing import layout as packing_layout
from grpojax.core.rollout import rollout
from grpojax.core.step import init_state
from grpojax.core.types import Prompts
from grpojax.core.update import UpdateOptions, make_update
from grpojax.models.config import TransformerConfig
from grpojax.models.rope import Rope

OTHER_ROPE = dict(factor=4.0, beta_fast=2.0, attention_factor=1.2)
OTHER_ROPE |= dict(share=0.5, query_beta=0.5, original_length=5)
OTHER_FEATURES = dict(  # of OLMo, Granite, Phi, Ministral and SmolLM
  wide_qk_norm=True,
  pre_norms=False,
  post_norms=True,
  embedding_scale=3.0,
  residual_scale=0.4,
  attention_scale=0.3,
  logits_divisor=0.5,
  rope=Rope(**OTHER_ROPE),
  # The first layer has no rotation, and no window.
  local_layers=(True, False),
  local_rope=Rope(**OTHER_ROPE | {"factor": math.inf, "beta_fast": None}),
)


def config_with(**changes):
  sizes = dict(vocab_size=11, width=8, layers=2, heads=2, kv_heads=1)
  return TransformerConfig(**sizes | dict(head_dim=4, mlp=6) | changes)


def normal(rng, *shape):
  return jnp.asarray(rng.normal(size=shape), jnp.float32)


def random_params(lm, seed=0):
  """Draws normal parameters, so that all parts of a model matter."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lm.init, jax.random.key(0))
  return jax.tree.map(lambda x: normal(rng, *x.shape) / 2, shapes)


def prompts_of(rng, lengths, vocab=11):
  """Draws prompts of these lengths, right-padded."""
  mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
  ids = rng.integers(0, vocab, mask.shape)
  return Prompts(jnp.asarray(ids), jnp.asarray(mask))


def sample(lm, params, prompts, seed=1, **options):
  """Runs a compiled rollout, by default of group size 3."""
  options = dict(group_size=3, max_new_tokens=5, eos_ids=(0,)) | options
  key = jax.random.key(seed)
  run = lambda params: rollout(lm, params, prompts, key, **options)
  return jax.jit(run)(params)


def assert_close(got, want, **tolerances):
  compare = functools.partial(np.testing.assert_allclose, **tolerances)
  jax.tree.map(compare, got, want)


def run_python(devices, *arguments):
  """Runs a program in a process with so many CPU devices."""
  output_of(*arguments, JAX_NUM_CPU_DEVICES=str(devices))


def torch_model(path, kind, noise, **values):
  """Saves a random model of transformers, and returns it."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  config = transformers.AutoConfig.for_model(kind, **values)
  config._attn_implementation = "eager"
  torch.set_num_threads(1)
  torch.manual_seed(0)
  task = "ImageTextToText" if kind == "mistral3" else "CausalLM"
  build = getattr(transformers, f"AutoModelFor{task}").from_config
  model = build(config).float().eval()
  with torch.no_grad():  # initial biases and norms would hide mistakes
    for parameter in model.parameters():
      parameter.add_(noise * torch.randn_like(parameter))
  model.save_pretrained(path)
  return model


def torch_mixture(path, layers):
  """Saves a random mixture of experts of transformers, and returns it."""
  sizes = dict(vocab_size=11, hidden_size=8, head_dim=4, num_experts=5)
  sizes |= dict(num_attention_heads=2, num_key_value_heads=1)
  sizes |= dict(moe_intermediate_size=8, num_experts_per_tok=2)
  options = dict(num_hidden_layers=layers, norm_topk_prob=True)
  return torch_model(path, "qwen3_moe", 0.5, **sizes, **options)


def layout_of(lengths, size, prompts, prompt_size, *parts):
  lengths = np.asarray(lengths)
  prompts = np.asarray(prompts)
  layout = packing_layout.plan(lengths, size, prompts, prompt_size, *parts)
  return jax.tree.map(jnp.asarray, layout)


def descend(lm, params, batch, objective, **options):
  """Returns the step of an update by plain gradient descent, and metrics."""
  tx = optax.sgd(1.0)
  options = UpdateOptions(chunk_size=9, **options)
  update = jax.jit(make_update(lm, tx, objective, options))
  state, metrics = update(init_state(params, tx, jax.random.key(0)), batch)
  return jax.tree.map(jnp.subtract, params, state.params), metrics
