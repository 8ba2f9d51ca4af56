"""Each family against transformers, on random checkpoints.

Run as a program, it prints the largest differences of each checkpoint.
"""

import collections
import pathlib
import tempfile
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from small_models import torch_model

from grpojax.core.types import Tokens
from grpojax.models import huggingface as hf

V = 61
PLAIN = dict(rope_type="default", rope_theta=500.0)
PARTIAL = dict(PLAIN, partial_rotary_factor=0.5)
LINEAR = dict(rope_type="linear", rope_theta=100.0, factor=3.0)
LLAMA3 = dict(PLAIN, rope_type="llama3", factor=8.0)
LLAMA3 |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 16
GEMMA3_ROPES = dict(
  full_attention=dict(LINEAR, rope_theta=900.0, factor=8.0),
  sliding_attention=dict(PLAIN, rope_theta=30.0),
)
YARN = dict(PLAIN, rope_type="yarn", factor=4.0, beta_fast=4.0)
YARN["original_max_position_embeddings"] = 8
OLMO3_ROPES = dict(
  full_attention=dict(YARN, attention_factor=1.3),
  sliding_attention=PLAIN,
)
MINISTRAL3 = dict(YARN, mscale=1.0, mscale_all_dim=0.5)
MINISTRAL3 |= dict(llama_4_scaling_beta=0.5, original_max_position_embeddings=5)
LONGROPE = dict(PLAIN, rope_type="longrope", partial_rotary_factor=0.75)
LONGROPE |= dict(short_factor=[1.0, 1.5, 3.0], long_factor=[2.0, 3.0, 4.0])
GRANITE = dict(embedding_multiplier=3.0, attention_multiplier=0.3)
GRANITE |= dict(residual_multiplier=0.4, logits_scaling=0.5)
HYBRID = dict(layer_types=["full_attention"] * 2, num_local_experts=0)
HYBRID |= dict(shared_intermediate_size=12, mamba_n_heads=4)
VISION = dict(model_type="pixtral", hidden_size=16, intermediate_size=8)
VISION |= dict(num_hidden_layers=1, num_attention_heads=2, head_dim=8)
VISION |= dict(image_size=28, patch_size=14)
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
  "qwen3_5": (
    "qwen3_5_text",
    dict(TIED, num_hidden_layers=4, head_dim=8, rope_parameters=PARTIAL)
    | dict(linear_num_key_heads=2, linear_num_value_heads=4)
    | dict(linear_key_head_dim=6, linear_value_head_dim=5)
    # A token's output may be almost 0, and its norm increases rounding errors.
    | dict(rms_norm_eps=0.01),
  ),
  "qwen3_5_biases_untied": (
    "qwen3_5_text",
    # transformers adds a share of 0.25 to the dict.
    dict(BIASES | UNTIED, head_dim=16, rope_parameters=dict(PLAIN))
    | dict(layer_types=["full_attention", "linear_attention"])
    | dict(linear_num_key_heads=1, linear_num_value_heads=3)
    | dict(linear_conv_kernel_dim=3, rms_norm_eps=0.01),
  ),
  "qwen3_moe_top2": (
    "qwen3_moe",
    dict(EXPERTS, num_experts_per_tok=2, norm_topk_prob=True),
  ),
  "qwen3_moe_top1_window_tied": (
    "qwen3_moe",
    EXPERTS | WINDOW_4 | BIASES | TIED | dict(num_experts_per_tok=1),
  ),
  "qwen2_yarn": ("qwen2", dict(rope_parameters=dict(YARN, truncate=False))),
  "gemma": ("gemma", dict(BIASES, head_dim=8)),
  "gemma_untied": ("gemma", dict(UNTIED, head_dim=6, num_key_value_heads=4)),
  "smollm3": (  # more layers than are unrolled
    "smollm3",
    dict(num_hidden_layers=9, no_rope_layer_interval=3, vocab_size=V + 1),
  ),
  "smollm3_window_biases": (
    "smollm3",
    dict(BIASES | WINDOW_3 | UNTIED, no_rope_layer_interval=2, mlp_bias=True),
  ),
  "smollm3_local_rope": (
    "smollm3",
    dict(WINDOW_4, no_rope_layers=[1, 0], layer_types=KINDS),
  ),
  "olmo2": ("olmo2", BIASES),
  "olmo2_tied": ("olmo2", dict(TIED, num_key_value_heads=1)),
  "olmo3": (
    "olmo3",
    dict(layer_types=KINDS, sliding_window=4, rope_parameters=OLMO3_ROPES),
  ),
  "granite": ("granite", GRANITE | TIED),
  "granite_biases": (
    "granite",
    dict(GRANITE | BIASES, mlp_bias=True, vocab_size=V + 1),
  ),
  "granitemoehybrid": (
    "granitemoehybrid",
    dict(GRANITE | HYBRID | TIED, position_embedding_type="rope"),
  ),
  "granitemoehybrid_nope_biases": (
    "granitemoehybrid",
    GRANITE | HYBRID | BIASES,
  ),
  "ministral": (
    "ministral",
    dict(layer_types=KINDS, sliding_window=3, head_dim=6),
  ),
  "ministral3": ("ministral3", dict(rope_parameters=MINISTRAL3, head_dim=8)),
  "mistral3": ("mistral3", dict(rope_parameters=MINISTRAL3, head_dim=6)),
  "phi3": ("phi3", dict(sliding_window=4)),
  "phi3_longrope_tied": (
    "phi3",
    dict(TIED, rope_parameters=LONGROPE, hidden_size=32)
    | dict(max_position_embeddings=64, original_max_position_embeddings=16),
  ),
  "mixtral_top2": ("mixtral", dict(num_local_experts=3)),
  "mixtral_top1_window_tied": (
    "mixtral",
    dict(TIED, num_local_experts=4, num_experts_per_tok=1, sliding_window=4),
  ),
}
MIXTRAL_NAMES = (  # of transformers 5's modules, and of stored weights
  (".mlp.", ".block_sparse_moe."),
  ("gate_proj", "w1"),
  ("up_proj", "w3"),
  ("down_proj", "w2"),
)
# One checkpoint of each family, and every feature.
MARKS = {"qwen3": ()} | dict.fromkeys(
  "gemma2 qwen2_window llama3 llama_linear_biases mistral_window gemma3 "
  "qwen3_moe_top2 qwen2_yarn gemma smollm3 olmo3 granite_biases "
  "granitemoehybrid ministral mistral3 phi3_longrope_tied mixtral_top2 "
  "qwen3_5".split(),
  pytest.mark.slow,
)
# With biases, norms, windows, experts and joined matrices; compilation is slow.
WITH_GRADIENTS = (
  *("llama_linear_biases", "gemma3", "qwen3_moe_top2"),
  *("olmo3", "phi3_longrope_tied", "qwen3_5"),
)
P = 7
G = 2
T = 6
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
  if kind == "mistral3":
    text = values | {"model_type": "ministral3"}
    values = dict(text_config=text, vision_config=VISION, **UNTIED)
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
    if parameter.grad is None:  # of images
      continue
    name = name.replace("language_model.", "")
    module, _, kind = name.rpartition(".")
    grad = parameter.grad.numpy()
    if not module.endswith("experts"):  # stacked in memory
      grads[name] = grad
      continue
    for i, matrix in enumerate(grad):
      names = kind.removesuffix("_proj").split("_")  # gate and up, or down
      for name, part in zip(names, np.split(matrix, len(names)), strict=True):
        grads[f"{module}.{i}.{name}_proj.weight"] = part
  if model.config.model_type == "mixtral":
    for old, new in MIXTRAL_NAMES:
      grads = {name.replace(old, new): x for name, x in grads.items()}
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
  arrays = flatten_dict(tree, sep="/")
  hf_config = hf.read_config(path)
  leaves = hf.layout(hf_config)
  parts = collections.defaultdict(list)
  for path in hf.FAMILIES[hf_config["model_type"]].KEYS:
    if path not in arrays:
      continue
    leaf = leaves[path]
    array = np.asarray(arrays[path])
    array = array.reshape(-1, *array.shape[leaf.stacked :])
    for name, x in zip(leaf.names, array, strict=True):
      parts[name].append(x.T if leaf.transposed else x)
  return {name: np.concatenate(x) for name, x in parts.items()}


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
    if ".vision_tower." in key or ".multi_modal_projector." in key:
      continue
    np.testing.assert_array_equal(
      read[key.replace("language_model.", "")], tensor
    )


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
    whole=whole.reshape(3 * G, T, -1),
    cached=cached.reshape(3 * G, T, -1),
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
