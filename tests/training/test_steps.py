"""Token in, token out: what was sampled is what is scored and learned from."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import mesh as mesh_lib
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.runtime.text import tokenizer as tokenizers
from grpojax.training import policy as policy_lib
from grpojax.training.config import from_config
from grpojax.training.step import diagnosis
from grpojax.training.step import rewards as rewards_lib
from grpojax.training.step.batch import plan_packing

B, G, T = 2, 4, 6
MERGED = [("a", "b"), ("ab", "a"), ("b", "b")]


def ambiguous_tokenizer():
  """Texts of a and b have many tokenizations; sampling finds any of them."""
  import tokenizers as hf
  from transformers import PreTrainedTokenizerFast

  words = ["<end>", "a", "b", *("".join(pair) for pair in MERGED)]
  vocab = {word: i for i, word in enumerate(words)}
  backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=MERGED))
  backend.decoder = hf.decoders.Fuse()
  return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.mark.slow
def test_completions_are_never_tokenized_again(
  tabular, monkeypatch, settings_with, open_step
):
  settings = settings_with(
    batch_size=B,
    group_size=G,
    sampling__max_new_tokens=T,
    optim__micro_batches=1,
    optim__minibatches=2,
    log__samples_every=1,
    log__sample_groups=1,
  )
  tokenizer = ambiguous_tokenizer()
  vocab = len(tokenizer)
  lm = tabular.lm(1, vocab)
  params = lm.init(jax.random.key(0)).at[..., 0].set(-9.0)  # EOS is rare
  policy = policy_lib.Policy(pathlib.Path(), lm, tokenizer, (0,), 0, params)
  text, ids = tokenizers.encode_prompt(tokenizer, "abab")
  prompts = Prompts(jnp.array([ids] * B), jnp.ones((B, len(ids)), bool))

  def refuse(*args, **options):
    raise AssertionError("a completion was tokenized")

  for name in ("encode", "__call__", "_encode_plus", "batch_encode_plus"):
    monkeypatch.setattr(type(tokenizer), name, refuse, raising=False)
  seen = []
  decode = policy_lib.decode

  def spy(policy, samples, *rows):
    seen.append(jax.device_get(samples))
    return decode(policy, samples, *rows)

  monkeypatch.setattr(policy_lib, "decode", spy)
  examples = [{"prompt_text": text, "answer": "1"}] * B
  with rewards_lib.open_reward_pool(settings) as reward_pool:
    _, state, step = open_step(
      settings, policy, params, optax.sgd(0.0), reward_pool
    )
    _, row, shown, *_ = step(state, prompts, examples, False)
  monkeypatch.undo()
  # Two updates that change nothing: were other tokens scored than were sampled,
  # the ratio to the sampler's probabilities would not be 1.
  np.testing.assert_allclose([row["ratio_min"], row["ratio_max"]], 1, atol=1e-5)
  # The test can fail: their texts have another tokenization.
  (samples,) = seen
  again = [tokenizer.encode(sample["completion"]) for sample in shown]
  assert any(
    ids != sampled[: len(ids)].tolist()
    for ids, sampled in zip(again, samples.completion_ids[0], strict=True)
  )


def drawn(lm, count):
  """Parameters, and four samples of three tokens with rewards a prompt."""
  params = lm.init(jax.random.key(0))
  prompts = Prompts(jnp.arange(count)[:, None], jnp.ones((count, 1), bool))
  draw = functools.partial(
    rollout, lm, group_size=4, max_new_tokens=3, eos_ids=(0,)
  )
  samples = jax.jit(draw)(params, prompts, jax.random.key(1))
  return params, samples, jax.random.normal(jax.random.key(2), (count, 4))


@pytest.mark.slow
def test_prompts_without_all_their_rewards_are_not_diagnosed(
  tabular, settings_with
):
  settings = settings_with(optim__micro_batches=1, diagnostics__share=0.75)
  lm = tabular.lm(4, 3)
  params, samples, rewards = drawn(lm, 4)
  diagnose = functools.partial(diagnosis.make_diagnose(settings, 1), lm)
  diagnose = jax.jit(diagnose)
  key = jax.random.key(3)
  found = diagnose(params, samples, rewards.at[1, 2].set(jnp.inf), key)
  order = np.array([0, 2, 3, 1])
  complete = jax.tree.map(lambda x: x[order], (samples, rewards))
  expected = diagnose(params, *complete, key)
  assert jnp.isfinite(found["c1"])
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)
  few = diagnose(params, samples, rewards.at[:2, 2].set(-jnp.inf), key)
  assert jnp.isnan(few["c1"])  # which the automatic group size passes over


@pytest.mark.slow
def test_a_diagnosis_does_not_depend_on_how_the_work_is_cut(
  tabular, settings_with
):
  lm = tabular.lm(8, 3)
  params, samples, rewards = drawn(lm, 8)

  def diagnosed(prompts, micro_batches, shards):
    changes = {"optim__micro_batches": micro_batches}
    changes |= {"advantage": "score_weighted"}
    settings = settings_with(diagnostics__share=3 / prompts, **changes)
    diagnose = diagnosis.make_diagnose(settings, shards)
    some = jax.tree.map(lambda x: x[:prompts], (samples, rewards))
    return jax.jit(functools.partial(diagnose, lm))(
      params, *some, jax.random.key(3)
    )

  one = diagnosed(8, 4, 1)
  assert jnp.isfinite(one["own_gradient_mse"])
  for cut in ((1, 8), (2, 4), (8, 1)):
    for name, value in diagnosed(8, *cut).items():
      np.testing.assert_allclose(value, one[name], rtol=1e-4, err_msg=name)
  # It is that of the first three.
  np.testing.assert_allclose(diagnosed(3, 1, 1)["c1"], one["c1"], rtol=1e-4)


def test_what_has_a_reward_is_packed(config_with, samples_of):
  mesh = mesh_lib.make_mesh(devices=jax.devices()[:1])
  lengths = np.array([[6, 1, 2, 2], [1, 6, 1, 1]])
  samples = samples_of(np.arange(T) < lengths[..., None])
  rewards = np.zeros((B, G), np.float32)
  rewards[0, 0] = np.nan  # 6 tokens that nobody learns from
  config = config_with(optim__micro_batches=1)
  plan = lambda: plan_packing(from_config(config), samples, rewards, mesh)
  with jax.set_mesh(mesh):
    found = plan()
    counts = np.unique(found.rows.sample_of_token, return_counts=True)
    np.testing.assert_array_equal(counts[0], [-1, 0, 1, 2, 3])
    assert counts[1][1:].sum() == lengths.sum() - 6
    nowhere = found.prompt_of_copy.size
    assert found.copy_of_sample[0, 0] == nowhere
    assert found.micro_batches() == 1
    config.optim.micro_batches = 8  # no part of packed rows is as small
    assert plan() is None
    config.optim.micro_batches, config.optim.packing = 1, False
    assert plan() is None
