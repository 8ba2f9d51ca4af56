"""Low-rank adapters, against merged weights and the peft library."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import normal, prompts_of

from grpojax.core.logprobs import completion_hidden
from grpojax.core.types import Rollout, Tokens
from grpojax.models import huggingface as hf
from grpojax.models import lora
from grpojax.models.layer_stacks import last_layers
from grpojax.models.transformer import transformer
from grpojax.statistics.projections import score_projections

CONFIG = dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"])
CONFIG |= dict(vocab_size=31, hidden_size=16, num_hidden_layers=2)
CONFIG |= dict(num_attention_heads=4, num_key_value_heads=2)
CONFIG |= dict(intermediate_size=24, tie_word_embeddings=True, dtype="float32")
MIXTURE = CONFIG | dict(architectures=["Qwen3MoeForCausalLM"])
MIXTURE |= dict(model_type="qwen3_moe", head_dim=4, moe_intermediate_size=24)
MIXTURE |= dict(num_experts=5, num_experts_per_tok=2, norm_topk_prob=True)
ALPHA = 5.0
RANK = 2
SCALE = ALPHA / RANK
TARGETS = "layers/(q|k|v|o|.*gate|.*up|.*down)"
RNG = np.random.default_rng(2)
PROMPTS = prompts_of(RNG, (5, 3), 31)
IDS = jnp.asarray(RNG.integers(0, 31, (2, 3, 4)))
BATCH = PROMPTS.prompt_ids, PROMPTS.prompt_mask, IDS


def noise(tree, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: normal(rng, *x.shape) / 3, tree)


@pytest.fixture(
  scope="module",
  params=[
    pytest.param(CONFIG, id="dense"),
    pytest.param(MIXTURE, id="experts", marks=pytest.mark.slow),
  ],
)
def model(tmp_path_factory, request):
  """A checkpoint, its functions and weights, and random adapters."""
  path = tmp_path_factory.mktemp("lora")
  (path / "config.json").write_text(json.dumps(request.param))
  base = noise(hf.abstract_params(request.param), seed=0)
  config = hf.to_transformer_config(request.param)
  hf.save(path / "base", base, path)
  fresh = lora.init(base, jax.random.key(0), RANK, TARGETS)
  return types.SimpleNamespace(
    path=path / "base",
    config=config,
    lm=transformer(config),
    base=base,
    fresh=fresh,
    trained=noise(fresh, seed=1),
  )


def score(lm, params):
  """Returns the logits of completions, [B, G, T, V]."""
  return lm.unembed(params, completion_hidden(lm, params, Tokens(*BATCH))[0])


logits = jax.jit(score, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def adapted_score(lm, base, adapters):
  return score(lora.adapt(lm, base, SCALE), adapters)


def adapted_logits(model, adapters):
  # The base is an argument, as in training.
  return adapted_score(model.lm, model.base, adapters)


@pytest.mark.slow
def test_adapters_have_forward_mode_derivatives(model):

  @functools.partial(jax.jit, static_argnums=2)
  def run(base, adapters, attention):
    sampled = jnp.ones(IDS.shape, bool)
    logprobs = jnp.zeros(IDS.shape)
    finished = sampled[..., 0]
    lm = transformer(model.config, attention=attention)
    return score_projections(
      lora.adapt(lm, base, SCALE),
      adapters,
      Rollout(*BATCH, sampled, logprobs, finished),
      jax.random.key(1),
      tangents=1,
      vectorized=not model.config.experts,
    )

  by_kernels, plain = (
    run(model.base, model.trained, name) for name in ("auto", "plain")
  )
  assert np.abs(plain).max() > 1e-2
  np.testing.assert_allclose(by_kernels, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_without_and_with_fresh_adapters_the_model_is_the_base(model):
  assert lora.merge_lazily(model.base, {}, SCALE) == model.base
  assert lora.adapt(model.lm._replace(forward=None), {}, 1.0).forward is None
  want = logits(model.lm, model.base)
  np.testing.assert_array_equal(adapted_logits(model, {}), want)
  np.testing.assert_array_equal(adapted_logits(model, model.fresh), want)
  layers = model.fresh["layers"]
  a = layers["expert_down" if model.config.experts else "down"]["a"]
  assert a.shape[-2:] == (24, 2)
  assert 0.8 * 24**-0.5 < jnp.abs(a).max() <= 24**-0.5


def merge(model):
  whole = lora.merge_lazily(model.base, model.trained, SCALE)
  layers = {name: x[:] for name, x in whole["layers"].items()}
  return whole | {"layers": layers}


@pytest.mark.slow
def test_gradients_follow_from_merged_weights_by_the_chain_rule(model):
  """For W + s A B they are s dW B^T and s A^T dW."""

  def gradient(logits_of, params):
    loss = lambda params: jnp.sum(jnp.sin(logits_of(params)))
    return jax.jit(jax.grad(loss))(params)

  adapters = gradient(lambda x: adapted_logits(model, x), model.trained)
  whole = gradient(lambda x: logits(model.lm, x), merge(model))
  for name, x in model.trained["layers"].items():
    dw = SCALE * whole["layers"][name]
    for side, expected in {
      "a": dw @ x["b"].swapaxes(-1, -2),
      "b": x["a"].swapaxes(-1, -2) @ dw,
    }.items():
      actual = adapters["layers"][name][side]
      scale = float(jnp.abs(expected).max())
      np.testing.assert_allclose(actual, expected, atol=1e-4 * scale)


@pytest.mark.parametrize(
  "config, rank, targets, message",
  [
    (CONFIG, 0, "layers/q", "rank=0 must be 1 or more"),
    (
      CONFIG,
      2,
      "q",
      "lora.targets = 'q': they match nothing; choose from layers/d",
    ),
    (CONFIG, 2, "layers/.*norm", "layers/attn_norm, layers/mlp_norm, not proj"),
    (CONFIG, 2, "layers/q(_bias)?", "match layers/q_bias, not projections"),
    (CONFIG, 2, "layers/(q", "unterminated subpattern"),
    (MIXTURE, 2, "layers/up", "choose from layers/expert_down, "),
  ],
)
def test_bad_targets_are_refused(config, rank, targets, message):
  base = hf.abstract_params(config)
  with pytest.raises(ValueError) as error:
    lora.init(base, jax.random.key(0), rank, targets)
  assert message in str(error.value)


def theirs(torch_model):
  """Returns the logits of a torch model for unpadded rows."""
  torch = pytest.importorskip("torch")
  out = []
  for prompt, mask, group in zip(*BATCH, strict=True):
    prompt = np.broadcast_to(prompt[mask], (len(group), mask.sum()))
    rows = torch.tensor(np.concatenate([prompt, group], axis=1))
    with torch.no_grad():
      logits = torch_model.eval()(rows).logits
    out.append(logits[:, mask.sum() - 1 : -1])
  return np.stack(out)


@pytest.mark.slow
def test_adapters_of_the_last_layers_can_be_separated(model):
  moving, merge = last_layers(model.trained, 1)
  assert moving["layers"]["q"]["a"].shape[0] == 1
  stacks = lora.attach(model.base, merge(moving), SCALE)["layers"]
  whole = lora.attach(model.base, model.trained, SCALE)["layers"]
  again = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)
  assert len(stacks) == 2
  assert jax.tree.all(jax.tree.map(np.array_equal, again, whole))


@pytest.mark.slow
def test_peft_and_transformers_read_saved_adapters(model, tmp_path):
  pytest.importorskip("torch")
  peft = pytest.importorskip("peft")
  transformers = pytest.importorskip("transformers")
  load = transformers.AutoModelForCausalLM.from_pretrained
  want = adapted_logits(model, model.trained)
  assert jnp.abs(want - logits(model.lm, model.base)).max() > 0.5
  np.testing.assert_allclose(logits(model.lm, merge(model)), want, atol=2e-4)
  hf_config = hf.read_config(model.path)
  lora.save_peft(tmp_path / "adapter", model.trained, hf_config, ALPHA, "base")
  base = load(model.path)
  adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
  np.testing.assert_allclose(theirs(adapted), want, atol=2e-4)
  hf.save(tmp_path / "merged", merge(model), model.path)
  merged = load(tmp_path / "merged")
  np.testing.assert_allclose(theirs(merged), want, atol=2e-4)


def test_adapters_that_peft_would_skip_are_refused(tmp_path):
  targets = "layers/(q|expert_(gate|up))"
  partial = lora.abstract(hf.abstract_params(MIXTURE), RANK, targets)
  joined = CONFIG | {"model_type": "phi3"}
  qwen3_5 = MIXTURE | {"model_type": "qwen3_5_moe_text", "head_dim": 8}
  qwen3_5["full_attention_interval"] = 2
  for hf_config, adapters, message in (
    (MIXTURE, partial, "of expert_gate and expert_up alone"),
    (MIXTURE, {}, "no adapters to save"),
    (qwen3_5, {"layers": {"expert_down": {}}}, "expert_down in Qwen3.5"),
    (joined, {"layers": {"q": {}, "up": {}, "o": {}}}, "of q, up: the base"),
  ):
    with pytest.raises(ValueError, match=message):
      lora.save_peft(tmp_path / "none", adapters, hf_config, ALPHA, "base")
