"""Reward models, compared with transformers on random checkpoints."""

import json

import jax
import numpy as np
import pytest

from grpojax.models import huggingface as hf
from grpojax.rewards import neural

GEMMA2 = {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 1.0}
GEMMA3 = {"head_dim": 8, "sliding_window": 3}
KINDS = {"qwen2": {}, "gemma2": GEMMA2, "gemma3_text": GEMMA3, "llama": {}}
SIZES = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "intermediate_size": 20}
TEXTS = ["b", "abcabc", "ccba", "abcdefgh", "a" * 9, "hgf"]


def letters(sample):
  """Encodes letters; the template of chats marks each speaker with a 9."""
  if not isinstance(sample, str):
    return letters("".join("|" + m["content"] for m in sample))[1:]
  return [2] + [ord(c) - ord("a") + 10 if c != "|" else 9 for c in sample]


def make_checkpoint(kind, path):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  sizes = SIZES | {"num_key_value_heads": 1, "pad_token_id": 0} | KINDS[kind]
  sizes |= {"attn_implementation": "eager", "num_labels": 1}
  config = transformers.AutoConfig.for_model(kind, **sizes)
  torch.set_num_threads(1)
  torch.manual_seed(0)
  make = transformers.AutoModelForSequenceClassification.from_config
  model = make(config).float().eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.3 * torch.randn_like(parameter))
  model.save_pretrained(path)
  return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rewards_agree_with_transformers(kind, tmp_path):
  model = make_checkpoint(kind, tmp_path / "model")
  import torch

  lm, params = neural.load(tmp_path / "model")
  reward_model = neural.make_reward_model(
    lm, params, letters, lengths=(4, 10), batch_size=2
  )
  rows = [letters(text) for text in TEXTS]
  with torch.no_grad():
    expected = [model(torch.tensor([row])).logits[0, 0].item() for row in rows]
  assert np.std(expected) > 0.1
  np.testing.assert_allclose(reward_model(TEXTS), expected, atol=1e-4)


@pytest.fixture(scope="module")
def last_token():
  """A model whose reward is 100 times the length, plus the last id."""
  from grpojax.core.types import LM, Prefix

  shapes = []

  def prefill(params, ids, mask):
    shapes.append(ids.shape)
    count = mask.sum(-1)
    ends = jax.vmap(lambda row, n: row[n - 1])(ids, count)
    return Prefix((100.0 * count + ends)[:, None], count, state=None)

  lm = LM(None, prefill, None, lambda params, hidden: hidden * params, None)
  return lm, shapes


def make(lm, **options):
  return neural.make_reward_model(lm, 1.0, letters, **options)


def test_a_reward_model_compiles_once_per_length(last_token):
  lm, shapes = last_token
  reward_model = make(lm, lengths=(3, 8), batch_size=3)
  samples = ["a" * n for n in (1, 2, 3, 4, 5, 6, 7)]
  expected = [100 * (n + 1) + 10 for n in (1, 2, 3, 4, 5, 6, 7)]
  shapes.clear()
  for _ in range(2):
    np.testing.assert_array_equal(reward_model(samples), expected)
    np.testing.assert_array_equal(reward_model(samples[::-1]), expected[::-1])
  np.testing.assert_array_equal(reward_model(["b"]), [211])
  assert reward_model([]).shape == (0,)
  assert sorted(shapes) == [(3, 3), (3, 8)]


def test_chats_on_a_mesh_and_long_texts(last_token):
  lm, _ = last_token
  types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((1,), ("data",), axis_types=types)
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  reward_model = make(lm, lengths=(8,), batch_size=8, sharding=rows)
  chat = [("user", "ab"), ("assistant", "cd")]
  chat = [{"role": role, "content": text} for role, text in chat]
  np.testing.assert_array_equal(reward_model([chat, "ab"]), [613, 311])
  reward_model = make(lm, lengths=(4,), batch_size=8)
  np.testing.assert_array_equal(reward_model(["abcde"]), [414])  # reads the end
  with pytest.raises(ValueError, match="no tokens"):
    reward_model([[]])


def test_only_classifiers_with_one_label_are_accepted(tmp_path):
  base = {"model_type": "llama"} | SIZES
  several = {"architectures": ["LlamaForSequenceClassification"]}
  several |= {"id2label": {"0": "a", "1": "b", "2": "c"}}
  for change, message in (({}, "is a language model"), (several, "3 labels")):
    (tmp_path / "config.json").write_text(json.dumps(base | change))
    with pytest.raises(ValueError, match=message):
      neural.load(tmp_path)
  assert hf.to_transformer_config(base | several).labels == 3
