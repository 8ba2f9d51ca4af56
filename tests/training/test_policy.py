"""Policies: texts, positions, adapters."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.decoding.sampling import NEGATIVE
from grpojax.core.types import Rollout
from grpojax.models import huggingface as hf
from grpojax.training import policies
from grpojax.training.files.sources import ModelFiles, find_files


def test_a_policy_decodes_texts_without_eos(toy_model):
  policy = policies.load_policy(str(toy_model), "bfloat16")
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(policy.params))
  one = jnp.ones((1, 1), int)
  prefix = jax.eval_shape(policy.lm.prefill, policy.params, one, one > 0)
  assert prefix.last_hidden.dtype == jnp.bfloat16
  assert policy.eos_ids == (1, 99) and policy.pad_id == 0
  ids = policy.tokenizer.encode("12#", add_special_tokens=False)
  completion_ids = np.array([[[*ids, 99], [ids[0], 1, 0, 0]]], np.int32)
  mask = np.array([[[1, 1, 1, 1], [1, 1, 0, 0]]], bool)
  empty = np.zeros((1, 1), np.int32)
  samples = Rollout(
    empty, empty > 0, completion_ids, mask, mask * 0.0, mask.any(-1)
  )
  assert policies.decode(policy, samples) == [["12#", "1"]]


@pytest.fixture
def edited(toy_model, tmp_path):
  """`(file, **changes)` -> the toy model with changes in a JSON file."""

  def edited(name, **changes):
    path = shutil.copytree(toy_model, tmp_path / "source")
    file = path / name
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | changes))
    return path

  return edited


def test_rows_beyond_the_tokenizer_are_never_sampled(
  toy_model, edited, tmp_path
):
  whole = hf.load_params(toy_model)
  ids = jnp.arange(20, 30)[None]
  rows = jnp.full((28, whole["embed"].shape[1]), 9.0)
  padded = whole | {"embed": jnp.concatenate([whole["embed"], rows])}
  hf.save(tmp_path / "model", padded, edited("config.json", vocab_size=128))

  def logits(path):
    policy = policies.load_policy(str(path))
    prefix = policy.lm.prefill(policy.params, ids, ids > 0)
    return policy, policy.lm.unembed(policy.params, prefix.last_hidden)

  policy, actual = logits(tmp_path / "model")
  assert policy.params["embed"].shape[0] == 128
  np.testing.assert_array_equal(actual[:, 100:], np.float32(NEGATIVE))
  _, expected = logits(toy_model)
  np.testing.assert_allclose(actual[:, :100], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  "tokens, rope, outcome",
  [
    (10, None, "fits"),
    (11, None, "refused"),
    (11, {"rope_type": "default"}, "refused"),
    (11, {"rope_type": "linear", "factor": 4.0}, "warned"),
  ],
)
def test_texts_beyond_the_positions_are_refused_or_warned_of(
  tokens, rope, outcome, edited, capsys
):
  changes = {"max_position_embeddings": 40, "rope_scaling": rope}
  path = edited("config.json", **changes)
  message = "exceed the 40 positions"
  if outcome == "refused":
    with pytest.raises(ValueError, match=f"{message}.*lower one"):
      policies.check_positions(ModelFiles(path), 30, tokens)
  else:
    policies.check_positions(ModelFiles(path), 30, tokens)
  assert (message in capsys.readouterr().out) == (outcome == "warned")


def test_texts_that_need_the_long_factors_of_longrope_are_refused(edited):
  factors = dict(short_factor=[1.0] * 4, long_factor=[2.0] * 4)
  lengths = dict(original_max_position_embeddings=40)
  lengths["max_position_embeddings"] = 400
  rope = dict(rope_scaling=dict(factors, type="longrope"))
  path = edited("config.json", model_type="phi3", **lengths, **rope)
  policies.check_positions(ModelFiles(path), 30, 10)
  with pytest.raises(ValueError, match="the 40 positions .* need long_factor"):
    policies.check_positions(ModelFiles(path), 30, 11)


def with_adapters(policy, targets):
  return policies.with_adapters(
    policy, jax.random.key(0), rank=2, alpha=4.0, targets=targets
  )


@pytest.mark.slow
def test_adapters_are_merged_in_float32(toy_model, tmp_path):
  policy = policies.open_policy(find_files(str(toy_model)), "bfloat16")
  policy = policies.with_weights(policy, "bfloat16")
  policy = with_adapters(policy, "layers/(q|down)")
  rng = np.random.default_rng(0)
  small = lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 1e-4, x.dtype)
  params = jax.tree.map(small, policy.params)
  whole = policies.whole_params(policy, params)
  hf.save(tmp_path / "model", whole, policy.files.directory, dtype="float32")
  saved = hf.load_params(tmp_path / "model")
  expected = jax.tree.map(lambda x: np.asarray(x, np.float64), policy.frozen)
  for name, x in params["layers"].items():
    change = 2.0 * np.matmul(np.float64(x["a"]), np.float64(x["b"]))
    assert np.abs(change).max() > 1e-5
    expected["layers"][name] += change
  for a, b in zip(*map(jax.tree.leaves, (saved, expected)), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)


@pytest.mark.slow
def test_frozen_weights_are_an_argument_not_a_constant(toy_model):
  whole = policies.load_policy(str(toy_model))
  policy = with_adapters(whole, "layers/q")
  assert policy.lora_scale == 2.0

  def norm(lm, adapters, ids):
    prefix = lm.prefill(adapters, ids, ids > 0)
    return jnp.linalg.norm(lm.unembed(adapters, prefix.last_hidden))

  run = policies.jit(policy, norm)
  ids = jnp.array([[5, 9, 17]])
  text = run.func.lower(*run.args, policy.params, ids).as_text()
  size = max(x.size for x in jax.tree.leaves(policy.frozen))
  assert "norm" in text.splitlines()[0] and len(text) < 100 * size
  # The same program has another result for other frozen weights.
  other = jax.tree.map(lambda x: 2 * x, policy.frozen)
  result = run.func(other, policy.params, ids)
  assert result != run(policy.params, ids) == run({}, ids)  # b is 0
  expected = policies.jit(whole, norm)(whole.params, ids)
  np.testing.assert_allclose(run(policy.params, ids), expected, rtol=1e-6)
