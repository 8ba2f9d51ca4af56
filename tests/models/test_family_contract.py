"""Rules for a family's module, as the comment beside hf.FAMILIES has them."""

import jax
import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict
from small_models import assert_close

from grpojax.core import mesh as mesh_lib
from grpojax.models import huggingface as hf
from grpojax.models import lora, passes, sharding
from grpojax.models.config import init, parameter_shapes
from grpojax.models.transformer import transformer

BASE = dict(vocab_size=8, hidden_size=4, num_hidden_layers=2, head_dim=2)
BASE |= dict(num_attention_heads=2, num_key_value_heads=1, intermediate_size=6)
BIASES = {"attention_bias": True}
EXPERTS = dict(moe_intermediate_size=6, num_experts=3, num_experts_per_tok=2)
UNTIED = {"tie_word_embeddings": False}
# All that a family may have: biases, experts and a head of its own.
EXAMPLES = {
  "llama": BIASES | UNTIED | {"mlp_bias": True},
  "qwen2": UNTIED,
  "qwen3": BIASES | UNTIED,
  "mistral": UNTIED,
  "gemma2": BIASES | UNTIED,
  "gemma3_text": BIASES | UNTIED,
  "qwen3_moe": BIASES | UNTIED | EXPERTS,
}
ROW = 40  # tokens, over a window and several blocks of a kernel
LABELS = {"architectures": ["XForSequenceClassification"], "num_labels": 1}


def config_of(kind, **changes):
  return {"model_type": kind} | BASE | EXAMPLES[kind] | changes


def test_every_family_has_an_example():
  assert EXAMPLES.keys() == hf.FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("labels", [{}, LABELS], ids=["head", "score"])
@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_family_fulfils_its_contract(kind, labels):
  family = hf.FAMILIES[kind]
  hf_config = config_of(kind, **labels)
  config = hf.to_transformer_config(hf_config)
  shapes = flatten_dict(parameter_shapes(config), sep="/")
  output = "score" if labels else "head"
  assert {"embed", output, "layers/q", "layers/attn_norm"} <= shapes.keys()

  # A name in the file, by layer and expert where the parameter is.
  assert shapes.keys() <= family.KEYS.keys()
  for path, leaf in hf.layout(hf_config).items():
    in_layers, of_experts = path.startswith("layers/"), "/expert_" in path
    assert leaf.stacked == in_layers + of_experts, path
    assert len(leaf.names) == len(set(leaf.names))
    # Stored as PyTorch's Linear, but for the embedding.
    is_matrix = len(leaf.shape) - leaf.stacked == 2
    assert leaf.transposed == (is_matrix and path != "embed"), path
  names = [name for x in hf.layout(hf_config).values() for name in x.names]
  assert len(names) == len(set(names))

  # A rule: what is no norm, output bias or score is cut.
  mesh = jax.sharding.AbstractMesh((1, 1, 1, 1), mesh_lib.AXES)
  for path, shape in shapes.items():
    whole = path.endswith(("norm", "/o_bias", "/down_bias", "score"))
    assert any(sharding.spec_for(path, shape, mesh)) != whole, path

  # An initialiser: vectors are constant, matrices are drawn.
  params = flatten_dict(init(config, jax.random.key(0)), sep="/")
  assert {path: x.shape for path, x in params.items()} == shapes
  for path, x in params.items():
    is_vector = x.ndim - path.startswith("layers/") == 1
    norm_scale = 0 if config.norm_offset else 1
    if is_vector:
      assert (x == (norm_scale if "norm" in path else 0)).all(), path
    else:
      assert 0.002 < float(jnp.std(x)) < 0.05, path

  # What LoRA adapts is there, and adapters have rules of their own.
  abstract = hf.abstract_params(hf_config)
  targets = f"layers/({'|'.join(lora.PROJECTIONS)})"
  adaptable = lora.targets_of(abstract, targets)
  absent = {"gate", "up", "down"} if config.experts else set(lora.EXPERTS)
  expected = set(lora.PROJECTIONS) - absent
  assert adaptable.keys() == {f"layers/{name}" for name in expected}
  adapters = lora.init(abstract, jax.random.key(0), 2, "|".join(adaptable))
  for path, x in flatten_dict(adapters, sep="/").items():
    assert any(sharding.spec_for(path, x.shape, mesh)), path


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_family_refuses_what_it_does_not_read(kind):
  read = lambda **changes: hf.to_transformer_config(config_of(kind, **changes))
  with pytest.raises(ValueError, match="residual_multiplier=2.0"):
    read(residual_multiplier=2.0)
  for key, value in getattr(hf.FAMILIES[kind], "FIXED", {}).items():
    read(**{key: value})
    with pytest.raises(ValueError, match=f"config.json has {key}="):
      read(**{key: "another"})
  for key in getattr(hf.FAMILIES[kind], "UNUSED", ()):
    assert read(**{key: 7}) == read(), key


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "896", True, [8]])
def test_sizes_that_are_none(value):
  names = "vocab_size hidden_size num_hidden_layers num_attention_heads"
  names = [*names.split(), "intermediate_size"]
  if value is not None:  # as good as absent
    names += ["head_dim", "num_experts"]
  for key in names:
    with pytest.raises(ValueError, match=f"config.json has {key}="):
      hf.to_transformer_config(config_of("qwen3_moe", **{key: value}))


@pytest.mark.slow
def test_kernels_attend_as_a_family_says(monkeypatch):
  """With gemma2's scale, cap and windows; no other family has more."""
  monkeypatch.setattr(passes, "WHOLE", 16)
  changes = {"hidden_size": 8, "head_dim": 4, "vocab_size": 32}
  changes["sliding_window"] = 19
  config = hf.to_transformer_config(config_of("gemma2", **changes))
  params = jax.tree.map(lambda x: 3 * x, init(config, jax.random.key(0)))
  ids = jax.random.randint(jax.random.key(1), (1, 2, ROW), 0, 32)
  mask = jnp.arange(ROW)[None] < 33

  def total(params, attention):
    lm = transformer(config, attention=attention)
    hidden = lm.forward(params, ids[:, 0], mask, ids).hidden
    return jnp.sum(jnp.sin(lm.unembed(params, hidden)))

  gradient = jax.jit(jax.value_and_grad(total), static_argnums=1)
  expected, got = gradient(params, "plain"), gradient(params, "kernel")
  assert_close(got, expected, rtol=2e-3, atol=2e-3)
