"""The contract of a family's module (hf.FAMILIES)."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from grpojax.core import meshes
from grpojax.models import config_json, lora, sharding
from grpojax.models import huggingface as hf
from grpojax.models.config import init, parameter_shapes

BASE = dict(vocab_size=8, hidden_size=4, num_hidden_layers=2, head_dim=2)
BASE |= dict(num_attention_heads=2, num_key_value_heads=1, intermediate_size=6)
BIASES = {"attention_bias": True}
EXPERTS = dict(moe_intermediate_size=6, num_experts=3, num_experts_per_tok=2)
HYBRID = dict(layer_types=["attention"] * 2, num_local_experts=0)
HYBRID["shared_intermediate_size"] = 6
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=2, head_dim=8)
LINEAR |= dict(full_attention_interval=2)
UNTIED = {"tie_word_embeddings": False}
# With biases, experts and an untied head.
EXAMPLES = {
  "llama": BIASES | UNTIED | {"mlp_bias": True},
  "qwen2": UNTIED,
  "qwen3": BIASES | UNTIED,
  "mistral": UNTIED,
  "ministral": UNTIED,
  "ministral3": UNTIED,
  "gemma": BIASES | UNTIED,
  "gemma2": BIASES | UNTIED,
  "gemma3_text": BIASES | UNTIED,
  "smollm3": BIASES | UNTIED | {"mlp_bias": True},
  "olmo2": BIASES | UNTIED,
  "olmo3": BIASES | UNTIED,
  "granite": BIASES | UNTIED | {"mlp_bias": True},
  "granitemoehybrid": BIASES | UNTIED | HYBRID,
  "phi3": UNTIED,
  "qwen3_moe": BIASES | UNTIED | EXPERTS,
  "mixtral": UNTIED | {"num_local_experts": 3},
  "qwen3_5_text": BIASES | UNTIED | LINEAR,
}
LABELS = {"architectures": ["XForSequenceClassification"], "num_labels": 1}


def config_of(kind, **changes):
  return {"model_type": kind} | BASE | EXAMPLES[kind] | changes


@pytest.mark.slow
@pytest.mark.parametrize("labels", [{}, LABELS], ids=["head", "score"])
@pytest.mark.parametrize("kind", hf.FAMILIES)
def test_a_family_fulfils_its_contract(kind, labels):
  family = hf.FAMILIES[kind]
  hf_config = config_of(kind, **labels)
  config = hf.to_transformer_config(hf_config)
  shapes = flatten_dict(parameter_shapes(config), sep="/")
  output = "score" if labels else "head"
  assert {"embed", output, "layers/q"} <= shapes.keys()
  norms = {"layers/attn_norm", "layers/attn_post_norm"}
  assert norms & shapes.keys()

  # Stored names by layer and expert.
  assert shapes.keys() <= family.KEYS.keys()
  for path, leaf in hf.layout(hf_config).items():
    in_layers = path.startswith("layers/")
    in_experts = "/expert_" in path
    assert leaf.stacked == in_layers + in_experts, path
    assert len(leaf.names) == len(set(leaf.names))
    # Matrices except the embedding are stored like PyTorch's Linear.
    is_matrix = len(leaf.shape) - leaf.stacked == 2
    assert leaf.transposed == (is_matrix and path != "embed"), path
  # A name is that of one array, or of parts that fill a stored matrix.
  parts = collections.defaultdict(list)
  for leaf in hf.layout(hf_config).values():
    parts[leaf.names].append(leaf)
  for leaves in parts.values():
    if len(leaves) == 1:
      assert leaves[0].part is None
      continue
    leaves = sorted(leaves, key=lambda x: x.part)
    first, *ends = np.cumsum([0, *(x.shape[-1] for x in leaves)])
    starts = [first, *ends[:-1]]
    assert [x.part for x in leaves] == [(x, ends[-1]) for x in starts]

  # A sharding rule: all except norms, output biases and score are split.
  mesh = jax.sharding.AbstractMesh((1, 1, 1, 1), meshes.AXES)
  for path, shape in shapes.items():
    whole = path.endswith(("norm", "/o_bias", "/down_bias", "score"))
    assert any(sharding.spec_for(path, shape, mesh)) != whole, path

  # Initial values: vectors are constant, matrices random.
  params = flatten_dict(init(config, jax.random.key(0)), sep="/")
  assert {path: x.shape for path, x in params.items()} == shapes
  for path, x in params.items():
    is_vector = x.ndim - path.startswith("layers/") == 1
    offset = config.norm_offset and path != "layers/linear_norm"
    norm_scale = 0 if offset else 1
    if is_vector:
      assert (x == (norm_scale if "norm" in path else 0)).all(), path
    else:
      assert 0.002 < float(jnp.std(x)) < 0.05, path

  # LoRA's projections exist, and adapters have sharding rules.
  abstract = hf.abstract_params(hf_config)
  targets = f"layers/({'|'.join(lora.PROJECTIONS)})"
  adaptable = lora.targets_of(abstract, targets)
  absent = {"gate", "up", "down"} if config.experts else set(lora.EXPERTS)
  absent |= set() if config.linear else set(lora.LINEAR)
  expected = set(lora.PROJECTIONS) - absent
  assert adaptable.keys() == {f"layers/{name}" for name in expected}
  adapters = lora.init(abstract, jax.random.key(0), 2, "|".join(adaptable))
  for path, x in flatten_dict(adapters, sep="/").items():
    assert any(sharding.spec_for(path, x.shape, mesh)), path


@pytest.mark.parametrize("kind", EXAMPLES)
def test_families_refuse_unknown_keys_and_values(kind):
  read = lambda **changes: hf.to_transformer_config(config_of(kind, **changes))
  with pytest.raises(ValueError, match="mlp_multiplier=2.0"):
    read(mlp_multiplier=2.0)
  _, fixed, _ = config_json._keys(hf.FAMILIES[kind])
  assert fixed["qkv_bias"] == (kind == "qwen2")
  with_norm = ("qwen3", "qwen3_moe", "gemma3_text", "qwen3_5_text")
  assert fixed["use_qk_norm"] == (kind in with_norm)
  for key, value in fixed.items():
    assert read(**{key: value}) == read(), key
    message = "auto_map: " if key == "auto_map" else f"{key}=.*; only"
    with pytest.raises(ValueError, match=f"config.json has {message}"):
      read(**{key: "another"})
  for key in getattr(hf.FAMILIES[kind], "UNUSED", ()):
    assert read(**{key: 7}) == read(), key


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "896", True, [8]])
def test_wrong_sizes_are_refused(value):
  names = "vocab_size hidden_size num_hidden_layers num_attention_heads"
  names = [*names.split(), "intermediate_size"]
  if value is not None:  # None means absent
    names += ["head_dim", "num_experts"]
  for key in names:
    with pytest.raises(ValueError, match=f"config.json has {key}="):
      hf.to_transformer_config(config_of("qwen3_moe", **{key: value}))
