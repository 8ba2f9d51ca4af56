"""Decoders with linear layers: their states in decoding and in training.

test_families.py compares them with transformers.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy
from small_models import (
  assert_close,
  config_with,
  prompts_of,
  random_params,
  run_python,
  sample,
)

from grpojax.core import meshes
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.types import Tokens
from grpojax.models import huggingface as hf
from grpojax.models import layer_stacks, lora, sharding
from grpojax.models.gated_delta import Sizes
from grpojax.models.rope import Rope
from grpojax.models.transformer import last_layers, transformer

RNG = np.random.default_rng(0)
CONFIG = config_with(
  layers=2,
  kv_heads=2,
  qk_norm=True,
  norm_offset=True,
  attention_gate=True,
  rope=Rope(share=0.5),
  linear=Sizes(key_heads=2, value_heads=4, key_dim=4, value_dim=3),
  linear_layers=(True, False),
)
EXPERTS = dataclasses.replace(
  CONFIG,
  layers=6,
  linear_layers=(True, False, True) * 2,
  experts=5,
  experts_per_token=2,
  normalize_experts=True,
  shared_mlp=7,
)
LM = transformer(CONFIG)
PARAMS = random_params(LM)
PROMPTS = prompts_of(RNG, (5, 2))
IDS = jnp.asarray(RNG.integers(0, 11, (2, 3, 6)))
TOKENS = Tokens(PROMPTS.prompt_ids, PROMPTS.prompt_mask, IDS)


def scored(lm, params, ids):
  batch = PROMPTS.prompt_ids, PROMPTS.prompt_mask, ids
  return token_logprobs(lm, params, *batch)[0]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_sampled_logprobs_are_the_trainers(platform, interpreted):
  config = CONFIG
  if platform == "tpu":  # whose kernel needs whole lanes
    sizes = Sizes(key_heads=1, value_heads=2, key_dim=128, value_dim=128)
    config = dataclasses.replace(CONFIG, linear=sizes)
  lm = transformer(config, platform=platform)
  params = random_params(lm)
  drawn = sample(lm, params, PROMPTS, max_new_tokens=20)
  want = jax.jit(scored, static_argnums=0)(lm, params, drawn.completion_ids)
  got = np.where(drawn.completion_mask, drawn.logprobs, want)
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert drawn.completion_mask.sum() > 40


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("shallow", [0, 8])
def test_experts_are_recorded_and_replayed(monkeypatch, shallow, platform):
  monkeypatch.setattr(layer_stacks, "SHALLOW", shallow)
  lm = transformer(EXPERTS, platform=platform)
  params = random_params(lm)
  drawn = sample(lm.recording(), params, PROMPTS, max_new_tokens=9)
  real = drawn.completion_mask
  assert drawn.experts.shape[-1] == 12

  def errors(experts, prompt_experts):
    recorded = dict(experts=experts, prompt_experts=prompt_experts)
    tokens = drawn.tokens.replace(**recorded)
    first, hidden, _ = lm.forward(params, tokens)
    first = jnp.broadcast_to(first[:, None, None], hidden[:, :, :1].shape)
    hidden = jnp.concatenate([first, hidden[:, :, :-1]], axis=2)
    logp = jax.nn.log_softmax(lm.unembed(params, hidden))
    ids = drawn.completion_ids[..., None]
    logp = jnp.take_along_axis(logp, ids, axis=-1)[..., 0]
    return np.abs(np.where(real, logp - drawn.logprobs, 0))

  recorded = drawn.experts, drawn.prompt_experts
  assert errors(None, None).max() < 1e-4
  assert errors(*recorded).max() < 1e-4
  # Those of another layer make a difference.
  assert errors(*(jnp.roll(x, 2, axis=-1) for x in recorded)).mean() > 0.01


def decode(params, cache, ids, positions):
  lm, params = LM.prepared(params, longest=20)
  prefix = lm.prefill(params, PROMPTS.prompt_ids, PROMPTS.prompt_mask)
  return lm.extend(params, prefix, ids, cache, positions)[:2]


@pytest.mark.slow
def test_tokens_without_a_position_leave_the_cache_unchanged():
  run = jax.jit(decode)
  cache = LM.prepared(PARAMS, longest=20)[0].init_cache(2, 3, 12)
  at = jnp.broadcast_to(jnp.arange(6), IDS.shape)
  _, cache = run(PARAMS, cache, IDS, at)
  unread = jnp.where(jnp.arange(3)[:, None] == 1, -1, at[..., :1] + 6)
  hidden, later = run(PARAMS, cache, IDS[..., :1], unread)
  for old, new in zip(*map(jax.tree.leaves, (cache, later)), strict=True):
    np.testing.assert_array_equal(old[:, :, 1], new[:, :, 1])
    assert (old[:, :, 0] != new[:, :, 0]).any()
  # An observation of four tokens, and padding after it.
  ids = IDS.at[..., 4:].set(0)
  padded = jnp.where(at < 4, at + 6, -1)
  _, several = run(PARAMS, cache, ids, padded)
  one = cache
  for t in range(4):
    one = run(PARAMS, one, ids[..., t : t + 1], at[..., t : t + 1] + 6)[1]
  assert_close(several, one, atol=1e-4)


def assert_near(got, want):
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4 * (1 + np.abs(b).max()))


def gradient(lm, params=PARAMS, merge=lambda params: params):
  total = lambda params: jnp.sum(jnp.sin(scored(lm, merge(params), IDS)))
  return jax.jit(jax.value_and_grad(total))(params)


@pytest.mark.slow
@pytest.mark.parametrize("remat", layer_stacks.REMAT)
def test_a_scan_over_periods_changes_nothing(monkeypatch, remat):
  deep = dict(layers=4, linear_layers=(True, False, True, False))
  config = dataclasses.replace(CONFIG, **deep)
  lm = transformer(config)
  params = random_params(lm)
  want = gradient(lm._replace(forward=None, prepare=None), params)
  monkeypatch.setattr(layer_stacks, "SHALLOW", 0)
  lm = transformer(config, remat=remat)
  assert_near(gradient(lm, params), want)
  last, merge = last_layers(params, 2)
  want[1]["layers"] = jax.tree.map(
    lambda x: x[len(x) // 2 :], want[1]["layers"]
  )
  want = want[0], {name: want[1][name] for name in last}
  assert_near(gradient(lm, last, merge), want)
  with pytest.raises(ValueError, match="do not consist of whole periods"):
    last_layers(params, 1)


@pytest.mark.slow
def test_rollouts_in_8_bits():
  formats = dict(weights_dtype="int8", cache_dtype="int8")
  _, prepared = LM.prepared(PARAMS, longest=20, **formats)
  layer = prepared["layers"][0][0]
  small = {name for name, x in layer.items() if x.dtype == jnp.int8}
  assert small == {"gate", "up", "down", "linear_qkv", "linear_z", "linear_o"}
  drawn = sample(LM, PARAMS, PROMPTS, sampling=Sampling(**formats))
  want = scored(LM, PARAMS, drawn.completion_ids)
  error = np.where(drawn.completion_mask, drawn.logprobs - want, 0)
  assert 1e-3 < np.abs(error).mean() < 0.1


def test_the_text_part_of_a_model_of_images(tmp_path):
  text = {"model_type": "qwen3_5_text", "vocab_size": 11, "hidden_size": 8}
  text |= dict(intermediate_size=6, num_hidden_layers=4, head_dim=8)
  text |= dict(num_attention_heads=2, num_key_value_heads=1)
  text |= dict(linear_num_key_heads=1, linear_num_value_heads=2)
  source, plain, both = (tmp_path / name for name in ("source", "text", "both"))
  source.mkdir()
  (source / "config.json").write_text(json.dumps(text))
  params = random_params(transformer(hf.to_transformer_config(text)))
  hf.save(plain, params, source)
  stored = numpy.load_file(plain / hf.weights.SINGLE)
  prefix = lambda name: name.replace("model.", "model.language_model.", 1)
  stored = {prefix(name): x for name, x in stored.items()}
  stored |= dict.fromkeys(("mtp.fc.weight", "model.visual.x"), np.ones(2))
  both.mkdir()
  numpy.save_file(stored, both / hf.weights.SINGLE)
  nested = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
  nested |= dict(architectures=["Qwen3_5ForConditionalGeneration"])
  (both / "config.json").write_text(json.dumps(nested))
  jax.tree.map(np.testing.assert_array_equal, hf.load_params(both), params)
  untyped = {key: x for key, x in text.items() if key != "model_type"}
  assert hf.layout(nested | {"text_config": untyped}) == hf.layout(text)
  for key in ("quantization_config", "another_size"):
    (both / "config.json").write_text(json.dumps(nested | {key: {"x": 1}}))
    with pytest.raises(ValueError, match=f"config.json has {key}"):
      hf.load_params(both)


@pytest.mark.slow
def test_adapters_train_linear_layers():
  adapters = lora.init(
    PARAMS, jax.random.key(0), 2, "layers/linear_(qkv|z|a|b|o)"
  )
  assert set(adapters["layers"]) == set(lora.LINEAR)
  adapters = random_params(LM._replace(init=lambda key: adapters))
  merged = lora.merge_lazily(PARAMS, adapters, 0.5)
  merged["layers"] = {name: x[:] for name, x in merged["layers"].items()}
  lm = lora.adapt(LM, PARAMS, 0.5)
  drawn = sample(lm, adapters, PROMPTS)
  want = sample(LM, merged, PROMPTS)
  np.testing.assert_array_equal(drawn.completion_ids, want.completion_ids)
  got = scored(lm, adapters, drawn.completion_ids)
  np.testing.assert_allclose(drawn.logprobs, want.logprobs, atol=1e-4)
  real = drawn.completion_mask
  np.testing.assert_allclose(
    np.where(real, got, 0), np.where(real, drawn.logprobs, 0), atol=1e-4
  )


def check_mesh(sizes, lm=LM):
  """A rollout and a gradient are those of a single device."""
  params = random_params(lm)
  program = lambda params: (
    gradient(lm, params),
    sample(lm, params, PROMPTS, max_new_tokens=8).logprobs,
  )
  want = program(params)
  mesh = meshes.make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, sharding.shardings(params, mesh))
    got = program(placed)
  assert_near(got, want)


def main():
  check_mesh((1, 1, 1, 2))
  check_mesh((1, 2, 1, 2))
  four = dataclasses.replace(EXPERTS, experts=4)
  check_mesh((1, 1, 2, 2), transformer(four, platform="tpu"))


@pytest.mark.slow
def test_on_four_devices():
  run_python(4, __file__)


if __name__ == "__main__":
  main()
