"""Weights in and out, against transformers on random checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.models import hf

CONFIGS = {
  "qwen2": ("qwen2", {}),
  "qwen2_untied": ("qwen2", {"tie_word_embeddings": False}),
  "llama": ("llama", {"rms_norm_eps": 1e-5}),
  "llama_biases": (
    "llama",
    {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
  ),
  "llama_heads": (
    "llama",
    {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10},
  ),
}


@pytest.fixture(params=CONFIGS)
def checkpoint(request, tmp_path):
  """A random checkpoint made by transformers, and transformers' own model."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  kind, changes = CONFIGS[request.param]
  values = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
  } | changes
  torch.manual_seed(0)
  config = transformers.AutoConfig.for_model(kind, **values)
  model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
  with torch.no_grad():  # zero biases and unit norms would hide mistakes
    for parameter in model.parameters():
      parameter.add_(0.3 * torch.randn_like(parameter))
  model.save_pretrained(tmp_path / "model")
  return tmp_path / "model", model


def their_logits(model, row):
  import torch

  with torch.no_grad():
    return model(torch.tensor([row])).logits[0].numpy()


def test_logits_agree_with_transformers(checkpoint):
  path, model = checkpoint
  lm, params = hf.load(path)
  rng = np.random.default_rng(0)
  lengths, p, g, t = [3, 7, 5], 7, 2, 6
  prompts = rng.integers(0, 61, (3, p))
  mask = np.arange(p) < np.array(lengths)[:, None]
  completions = rng.integers(0, 61, (3, g, t))
  prefix = lm.prefill(params, jnp.asarray(prompts), jnp.asarray(mask))
  hidden, _ = lm.extend(params, prefix, jnp.asarray(completions))
  first = lm.unembed(params, prefix.last_hidden)
  logits = lm.unembed(params, hidden)
  for b, n in enumerate(lengths):
    for i in range(g):
      row = [*prompts[b, :n], *completions[b, i]]
      theirs = their_logits(model, row)
      np.testing.assert_allclose(first[b], theirs[n - 1], atol=1e-4)
      np.testing.assert_allclose(logits[b, i], theirs[n:], atol=1e-4)


def test_cached_decoding_agrees_with_transformers(checkpoint):
  path, model = checkpoint
  lm, params = hf.load(path)
  rng = np.random.default_rng(1)
  prompts = rng.integers(0, 61, (2, 5))
  mask = np.array([[True] * 5, [True] * 2 + [False] * 3])
  completions = rng.integers(0, 61, (2, 3, 4))
  prefix = lm.prefill(params, jnp.asarray(prompts), jnp.asarray(mask))
  cache = lm.init_cache(2, 3, 9)
  extend = jax.jit(lm.extend)
  for t in range(4):
    ids = jnp.asarray(completions[:, :, t : t + 1])
    hidden, cache = extend(params, prefix, ids, cache)
    logits = lm.unembed(params, hidden)
    for b, n in enumerate([5, 2]):
      for i in range(3):
        row = [*prompts[b, :n], *completions[b, i, : t + 1]]
        theirs = their_logits(model, row)[-1]
        np.testing.assert_allclose(logits[b, i, 0], theirs, atol=1e-4)


def test_save_is_bit_exact_and_transformers_reads_it(checkpoint, tmp_path):
  import transformers

  path, model = checkpoint
  params = hf.load_params(path)
  hf.save(tmp_path / "out", params, path)
  again = hf.load_params(tmp_path / "out")
  assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
  read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
  for name, tensor in model.state_dict().items():
    np.testing.assert_array_equal(read.state_dict()[name], tensor)


def test_gradient_agrees_with_transformers(checkpoint):
  import torch

  path, model = checkpoint
  lm, params = hf.load(path)
  row = np.random.default_rng(2).integers(0, 61, 9)
  prompt, completion = row[:4], row[4:]

  def score(params):
    prefix = lm.prefill(
      params, jnp.asarray(prompt)[None], jnp.ones((1, 4), bool)
    )
    hidden, _ = lm.extend(params, prefix, jnp.asarray(completion)[None, None])
    first = prefix.last_hidden[:, None, None]
    logits = lm.unembed(
      params, jnp.concatenate([first, hidden[:, :, :-1]], axis=2)
    )
    logp = jax.nn.log_softmax(logits)[0, 0]
    return jnp.sum(logp[jnp.arange(5), completion])

  logits = model(torch.tensor(row)[None]).logits[0, 3:-1]
  logp = torch.log_softmax(logits, -1)
  logp[torch.arange(5), torch.tensor(completion)].sum().backward()
  ours = jax.grad(score)(params)
  theirs = dict(model.named_parameters())
  for i in range(3):
    want = theirs[f"model.layers.{i}.self_attn.k_proj.weight"].grad.numpy().T
    got = ours["layers"]["k"][i]
    np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())
  want = theirs["model.embed_tokens.weight"].grad.numpy()
  np.testing.assert_allclose(
    ours["embed"], want, atol=1e-3 * np.abs(want).max()
  )


def test_bad_directories_are_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match="no model at .*nowhere"):
    hf.load(tmp_path / "nowhere")
  base = {"model_type": "gpt2", "hidden_size": 8}
  (tmp_path / "config.json").write_text(json.dumps(base))
  with pytest.raises(ValueError, match="'gpt2' is not supported"):
    hf.load(tmp_path)


def test_unsupported_values_and_missing_tensors_are_refused(checkpoint):
  path, _ = checkpoint
  config = json.loads((path / "config.json").read_text())
  deeper = config | {"num_hidden_layers": 4, "layer_types": None}
  (path / "config.json").write_text(json.dumps(deeper))
  with pytest.raises(ValueError, match="missing.*layers.3"):
    hf.load(path)
  scaled = config | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
  (path / "config.json").write_text(json.dumps(scaled))
  with pytest.raises(ValueError, match="yarn"):
    hf.load(path)


def test_a_file_that_is_no_safetensors_is_refused(checkpoint):
  path, _ = checkpoint
  (path / "model.safetensors").write_text("version https://git-lfs")
  with pytest.raises(ValueError, match="not a whole safetensors file"):
    hf.load(path)


def test_a_run_is_resolved_to_its_model(tmp_path):
  (tmp_path / "config.json").write_text('{"name": "arithmetic"}')
  with pytest.raises(ValueError, match="no model at"):
    hf.resolve(tmp_path)
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
  assert hf.resolve(tmp_path) == tmp_path / "model"
  with pytest.raises(ValueError, match="lacks 'num_attention_heads'"):
    hf.to_transformer_config(hf.read_config(tmp_path))
