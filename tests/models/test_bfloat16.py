"""Errors of bfloat16: gradients, and log-probabilities of samples."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from small_models import config_with, sample

from grpojax.core.logprobs import token_logprobs
from grpojax.core.types import Prompts
from grpojax.models import huggingface as hf
from grpojax.models.config import parameter_shapes
from grpojax.models.moe import route
from grpojax.models.passes import cast
from grpojax.models.transformer import transformer

V = 64
P = 8
# Small residual steps as in real models, so that rounded hidden states matter.
SMALL = config_with(
  vocab_size=V, width=16, layers=3, head_dim=8, mlp=16, qk_norm=True, tied=False
)
BASE = dict(vocab_size=V, hidden_size=64, num_hidden_layers=2)
BASE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
BASE["intermediate_size"] = 128
BIASES = {"attention_bias": True}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 32}
# Every kind of parameter. Tokens use all experts, because a different choice
# would change gradients more than rounding.
EXAMPLES = {
  "llama": BIASES | {"mlp_bias": True},
  "qwen2": {"tie_word_embeddings": True},
  "qwen3": BIASES | {"tie_word_embeddings": True},
  "mistral": {"sliding_window": 32},
  "gemma2": BIASES | GEMMA,
  "gemma3_text": BIASES | GEMMA,
  "olmo3": BIASES | {"sliding_window": 32},
  "granite": {"residual_multiplier": 0.4, "attention_multiplier": 0.2},
  "phi3": {"partial_rotary_factor": 0.5},
  "qwen3_moe": BIASES
  | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 4},
}


def draw(config):
  """Draws weights that are exact in bfloat16."""
  rng = np.random.default_rng(0)
  flat = {}
  for path, shape in flatten_dict(parameter_shapes(config), sep="/").items():
    x = rng.normal(size=shape)
    name = path.split("/")[-1]
    if "norm" in name:
      x = (not config.norm_offset) + 0.2 * x
    elif "bias" in name:
      x = 0.3 * x
    elif name == "head" or (name == "embed" and config.tied):
      x = 2 * x * config.width**-0.5
    elif name != "embed":
      x = x / 2 * shape[-2] ** -0.5
    flat[path] = jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)
  return unflatten_dict(flat, sep="/")


EXPERTS = {"experts": 8, "experts_per_token": 2, "normalize_experts": True}


@pytest.mark.parametrize(
  "experts",
  [
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param(EXPERTS, marks=pytest.mark.long),
  ],
  ids=["dense", "experts"],
)
def test_rollout_and_trainer_agree(experts):
  config = dataclasses.replace(SMALL, **experts)
  lm = transformer(config, dtype=jnp.bfloat16)
  params = draw(config)
  ids = jnp.arange(4 * P).reshape(4, P)
  prompts = Prompts(ids, jnp.ones(ids.shape, bool))
  options = dict(group_size=8, max_new_tokens=16, eos_ids=(V,))
  sampled = sample(lm, params, prompts, 0, **options)
  score = lambda params: token_logprobs(
    lm, params, ids, prompts.prompt_mask, sampled.completion_ids
  )[0]
  difference = np.abs(jax.jit(score)(params) - sampled.logprobs)
  assert difference.mean() < 1e-3, difference.mean()


def test_a_router_multiplies_exactly():
  """Accelerators round float32 factors by default."""
  params = cast({"layers": {"router": jnp.ones((3, 4))}}, jnp.bfloat16)
  assert params["layers"]["router"].dtype == jnp.float32
  run = lambda x, router: route(x, router, 1, True)
  program = jax.make_jaxpr(run)(jnp.ones((2, 3)), jnp.ones((3, 4)))
  assert "HIGHEST" in str(program)


@pytest.mark.parametrize(
  "kind, equal",
  [
    pytest.param(
      *case,
      marks=pytest.mark.slow if case == ("llama", False) else pytest.mark.long,
    )
    for case in itertools.product(EXAMPLES, (True, False))
  ],
)
def test_gradients_of_a_micro_batch(kind, equal):
  """With 32,768 tokens, as in the gsm8k configs."""
  hf_config = {"model_type": kind} | BASE | EXAMPLES[kind]
  config = hf.to_transformer_config(hf_config)
  params = draw(config)
  rng = np.random.default_rng(1)
  ids = jnp.asarray(rng.integers(0, V, (1, 256, 128)))
  prompt = jnp.asarray(rng.integers(0, V, (1, P)))
  advantages = jnp.asarray(rng.normal(size=(1, 256, 1)), jnp.float32)

  def gradient(dtype):
    lm = transformer(config, dtype=dtype, remat="full")

    def loss(params):
      logprobs, _ = token_logprobs(lm, params, prompt, prompt >= 0, ids)
      return jnp.mean(logprobs if equal else logprobs * advantages)

    grads = flatten_dict(jax.jit(jax.grad(loss))(params), sep="/")
    return {path: np.asarray(x, np.float64) for path, x in grads.items()}

  half = gradient(jnp.bfloat16)
  exact = gradient(jnp.float32)
  norm = np.linalg.norm
  for path, x in exact.items():
    # Except for the rotation, a key bias shifts all logits of a query equally:
    # the rounded terms of its gradient cancel (error of a float64 sum: .012).
    limit = 0.015 if path.endswith("k_bias") else 0.01
    error = norm(half[path] - x) / norm(x)
    assert error < limit, (path, error)
