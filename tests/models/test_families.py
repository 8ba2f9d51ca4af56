"""Each family against transformers, on random checkpoints.

Run as a program, it prints the largest differences of each checkpoint.
"""

import json
import pathlib
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import torch_model

from grpojax.core.types import Tokens
from grpojax.models import huggingface as hf

PLAIN = dict(rope_type="default", rope_theta=500.0)
LINEAR = dict(rope_type="linear", rope_theta=100.0, factor=3.0)
LLAMA3 = dict(PLAIN, rope_type="llama3", factor=8.0)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 16
GEMMA3_ROPES = dict(
  full_attention=dict(LINEAR, rope_theta=900.0, factor=8.0),
  sliding_attention=dict(PLAIN, rope_theta=30.0),
)
TIED = dict(tie_word_embeddings=True)
BIASES = dict(attention_bias=True)
UNTIED = dict(tie_word_embeddings=False)
KINDS = ["sliding_attention", "full_attention"]
NO_CAPS = dict(attn_logit_softcapping=None, final_logit_softcapping=None)
CAPS = dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
EXPERTS = dict(moe_intermediate_size=12, num_experts=4, head_dim=6)
WINDOW_3, WINDOW_4 = (
  dict(use_sliding_window=True, sliding_window=size) for size in (3, 4)
)
CONFIGS = {
  "qwen2_tied": ("qwen2", TIED),
  "qwen2_window": ("qwen2", dict(WINDOW_4, max_window_layers=1)),
  "qwen3": ("qwen3", dict(head_dim=10)),
  "qwen3_biases_window_tied": (
    "qwen3",
    dict(BIASES | WINDOW_3 | TIED, head_dim=4, layer_types=KINDS[::-1]),
  ),
  "llama3": ("llama", dict(rope_parameters=LLAMA3, head_dim=12)),
  "llama_linear_biases": (
    "llama",
    dict(BIASES | TIED, rope_parameters=LINEAR, mlp_bias=True)
    | dict(num_attention_heads=3, num_key_value_heads=1),
  ),
  "mistral_window": ("mistral", dict(sliding_window=4)),
  "mistral_full_tied": ("mistral", dict(TIED, sliding_window=None, head_dim=8)),
  "gemma2": (
    "gemma2",
    dict(CAPS, head_dim=8, sliding_window=4, query_pre_attn_scalar=10),
  ),
  "gemma2_untied_uncapped": (
    "gemma2",
    dict(NO_CAPS | UNTIED | BIASES, head_dim=6, sliding_window=2),
  ),
  "gemma3": (
    "gemma3_text",
    dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=7)
    | dict(layer_types=KINDS, rope_parameters=GEMMA3_ROPES),
  ),
  "gemma3_all_local_untied": (
    "gemma3_text",
    dict(UNTIED, head_dim=6, sliding_window=5, rope_parameters=None)
    | dict(final_logit_softcapping=4.0),
  ),
  "qwen3_moe_top2": (
    "qwen3_moe",
    dict(EXPERTS, num_experts_per_tok=2, norm_topk_prob=True),
  ),
  "qwen3_moe_top1_window_tied": (
    "qwen3_moe",
    EXPERTS | WINDOW_4 | BIASES | TIED | dict(num_experts_per_tok=1),
  ),
}
# One checkpoint of each family, and every feature.
MARKS = {"qwen3": ()} | dict.fromkeys(
  "gemma2 qwen2_window llama3 llama_linear_biases mistral_window gemma3 "
  "qwen3_moe_top2".split(),
  pytest.mark.slow,
)
# With biases, norms, windows and experts; compilation takes long.
WITH_GRADIENTS = ("llama_linear_biases", "gemma3", "qwen3_moe_top2")
P = 7
G = 2
T = 6
V = 61
LENGTHS = np.array([3, 7, 5])
RNG = np.random.default_rng(0)
PROMPTS = RNG.integers(1, V, (3, P))  # torch gives padding no gradient
COMPLETIONS = RNG.integers(1, V, (3, G, T))


def make_checkpoint(name, path):
  """Saves a random model of transformers, and returns it."""
  kind, changes = CONFIGS[name]
  values = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "pad_token_id": 0,
    "rope_parameters": PLAIN,
  } | changes
  return torch_model(path, kind, 0.2, **values)


def theirs(model, with_gradients):
  """Returns logits [length, V] of each row, and gradients or None."""
  import torch

  rows = []
  total = 0.0
  for prompt, n, group in zip(PROMPTS, LENGTHS, COMPLETIONS, strict=True):
    for completion in group:
      ids = torch.tensor([[*prompt[:n], *completion]])
      rows.append(model(ids, use_cache=False).logits[0])
      logp = torch.log_softmax(rows[-1][n - 1 : -1], -1)
      total = total + logp[torch.arange(T), torch.tensor(completion)].sum()
  rows = [row.detach().numpy() for row in rows]
  if not with_gradients:
    return rows, None
  total.backward()
  grads = {}
  for name, parameter in model.named_parameters():
    module, _, kind = name.rpartition(".")
    grad = parameter.grad.numpy()
    if not module.endswith("experts"):  # stacked in memory
      grads[name] = grad
      continue
    for i, matrix in enumerate(grad):
      names = kind.removesuffix("_proj").split("_")  # gate and up, or down
      for name, part in zip(names, np.split(matrix, len(names)), strict=True):
        grads[f"{module}.{i}.{name}_proj.weight"] = part
  return rows, grads


def ours(path, with_gradients):
  """Returns logits of `forward` and of decoding, and gradients or None."""
  lm, params = hf.load(path)
  mask = jnp.arange(P) < LENGTHS[:, None]
  ids = jnp.asarray(COMPLETIONS)

  def score(params):
    last, hidden, _ = lm.forward(
      params, Tokens(jnp.asarray(PROMPTS), mask, ids)
    )
    first = lm.unembed(params, last)
    logits = lm.unembed(params, hidden)
    before = jnp.broadcast_to(first[:, None, None], logits[:, :, :1].shape)
    before = jnp.concatenate([before, logits[:, :, :-1]], 2)
    logp = jnp.take_along_axis(jax.nn.log_softmax(before), ids[..., None], -1)
    return jnp.sum(logp), (first, logits)

  run = jax.grad(score, has_aux=True) if with_gradients else score
  grads, (first, logits) = jax.jit(run)(params)
  prefix = jax.jit(lm.prefill)(params, jnp.asarray(PROMPTS), mask)
  extend = jax.jit(lm.extend)
  cache = lm.init_cache(3, G, T + 2)
  cached = []
  for t in range(T):
    new = ids[:, :, t : t + 1]
    at = jnp.full_like(new, t)
    hidden, cache, _ = extend(params, prefix, new, cache, at)
    cached.append(lm.unembed(params, hidden))
  grads = grads if with_gradients else None
  return first, logits, jnp.concatenate(cached, 2), grads


def by_their_names(path, tree):
  """Returns arrays by Hugging Face's names and in its layout."""
  values = json.loads((path / "config.json").read_text())
  keys = hf.FAMILIES[values["model_type"]].KEYS
  flat = {}
  for path, array in jax.tree_util.tree_leaves_with_path(tree):
    name, transposed = keys["/".join(key.key for key in path)]
    matrices = name.count("{")
    array = np.asarray(array)
    for index in np.ndindex(array.shape[:matrices]):
      full = name.format(**dict(zip(("layer", "expert"), index, strict=False)))
      flat[full] = array[index].T if transposed else array[index]
  return flat


def check_saving(model, path):
  """Compares a saved model, read by us and by transformers."""
  import transformers

  params = hf.load_params(path)
  out = path.parent / "out"
  hf.save(out, params, path)
  again = hf.load_params(out)
  assert jax.tree.all(jax.tree.map(np.array_equal, params, again))
  read = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
  for key, tensor in model.state_dict().items():
    np.testing.assert_array_equal(read[key], tensor)


def compare(name, with_gradients):
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / "model"
    model = make_checkpoint(name, path)
    check_saving(model, path)
    rows, their_grads = theirs(model, with_gradients)
    *logits, grads = ours(path, with_gradients)
    if with_gradients:
      grads = by_their_names(path, grads)
  first, whole, cached = map(np.asarray, logits)
  return types.SimpleNamespace(
    first=np.repeat(first, G, 0),
    whole=whole.reshape(3 * G, T, V),
    cached=cached.reshape(3 * G, T, V),
    grads=grads,
    their_first=np.stack([row[-T - 1] for row in rows]),
    their_logits=np.stack([row[-T:] for row in rows]),
    their_grads=their_grads,
  )


def gradient_errors(pair):
  """Returns the largest difference of each tensor, relative to its maximum."""
  floor = 1e-3 * max(np.abs(g).max() for g in pair.their_grads.values())
  return {
    name: np.abs(pair.grads[name] - g).max() / max(np.abs(g).max(), floor)
    for name, g in pair.their_grads.items()
  }


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=MARKS.get(name, pytest.mark.long))
    for name in CONFIGS
  ],
)
def test_a_family_agrees_with_transformers(name):
  pair = compare(name, name in WITH_GRADIENTS)
  np.testing.assert_allclose(pair.first, pair.their_first, atol=1e-4)
  np.testing.assert_allclose(pair.whole, pair.their_logits, atol=1e-4)
  np.testing.assert_allclose(pair.cached, pair.their_logits, atol=1e-4)
  if pair.grads is not None:
    assert set(pair.grads) == set(pair.their_grads)
    errors = gradient_errors(pair)
    assert max(errors.values()) < 1e-3, max(errors, key=errors.get)


def table():
  jax.config.update("jax_disable_most_optimizations", True)
  print(f"{'checkpoint':28}{'|logits|':>10}{'logits':>10}{'gradients':>11}")
  for name in CONFIGS:
    pair = compare(name, True)
    differences = [
      np.abs(pair.first - pair.their_first).max(),
      np.abs(pair.whole - pair.their_logits).max(),
      np.abs(pair.cached - pair.their_logits).max(),
    ]
    size = np.abs(pair.their_logits).max()
    worst = max(gradient_errors(pair).values())
    print(f"{name:28}{size:10.3g}{max(differences):10.1e}{worst:11.1e}")


if __name__ == "__main__":
  table()
