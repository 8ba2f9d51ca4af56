"""Training steps: sampled tokens, diagnosis, transfers and compilation."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import meshes
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.runtime import compilation
from grpojax.runtime.text import tokenization
from grpojax.training import policies
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.step import host, sample_rows
from grpojax.training.step.extensions import diagnosis

pytestmark = pytest.mark.slow
MERGED = [("a", "b"), ("ab", "a"), ("b", "b")]


def of_length(prompt, completion, example):
  return float(len(completion))


def ambiguous_tokenizer():
  """A tokenizer with several tokenizations of a text of a and b."""
  import tokenizers as hf
  from transformers import PreTrainedTokenizerFast

  words = ["<end>", "a", "b", *("".join(pair) for pair in MERGED)]
  vocab = {word: i for i, word in enumerate(words)}
  backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=MERGED))
  backend.decoder = hf.decoders.Fuse()
  return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def test_completions_are_never_tokenized_again(
  tabular, monkeypatch, settings_with, open_step
):
  settings = settings_with(
    batch_size=2,
    group_size=4,
    sampling__max_new_tokens=6,
    optim__micro_batches=1,
    optim__minibatches=2,
    log__samples_every=1,
    log__sample_groups=1,
  )
  tokenizer = ambiguous_tokenizer()
  lm = tabular.lm(1, len(tokenizer))
  params = lm.init(jax.random.key(0)).at[..., 0].set(-9.0)  # EOS is rare
  policy = policies.Policy(pathlib.Path(), lm, tokenizer, (0,), 0, params)
  text, ids = tokenization.encode_prompt(tokenizer, "abab")
  prompts = Prompts(jnp.array([ids] * 2), jnp.ones((2, len(ids)), bool))

  def refuse(*args, **options):
    raise AssertionError("a completion was tokenized")

  for name in ("encode", "__call__", "_encode_plus", "batch_encode_plus"):
    monkeypatch.setattr(type(tokenizer), name, refuse, raising=False)
  examples = [{"prompt_text": text, "answer": "1"}] * 2
  _, state, step = open_step(settings, policy, params, optax.sgd(0.0))
  result = host.take_step(step, state, prompts, examples)
  shown = sample_rows.of_step(settings, policy, result)
  row = result.metrics
  monkeypatch.undo()
  # With a learning rate of 0, the ratio is 1 if the sampled tokens are scored.
  np.testing.assert_allclose([row["ratio_min"], row["ratio_max"]], 1, atol=1e-5)
  # The texts have another tokenization, so the test can fail.
  again = [tokenizer.encode(sample["completion"]) for sample in shown]
  samples = result.drawn.batch.rollout.completion_ids[0].tolist()
  pairs = zip(again, samples, strict=True)
  assert any(ids != sampled[: len(ids)] for ids, sampled in pairs)


def drawn(lm, count):
  """Returns parameters, samples [count, 4, 3] and rewards."""
  params = lm.init(jax.random.key(0))
  prompts = Prompts(jnp.arange(count)[:, None], jnp.ones((count, 1), bool))
  draw = functools.partial(
    rollout, lm, group_size=4, max_new_tokens=3, eos_ids=(0,)
  )
  samples = jax.jit(draw)(params, prompts, jax.random.key(1))
  return params, samples, jax.random.normal(jax.random.key(2), (count, 4))


def test_prompts_with_missing_rewards_are_not_diagnosed(tabular, settings_with):
  settings = settings_with(optim__micro_batches=1, diagnostics__share=0.75)
  lm = tabular.lm(4, 3)
  params, samples, rewards = drawn(lm, 4)
  diagnose = functools.partial(diagnosis.make_diagnose(settings, 1), lm)
  diagnose = jax.jit(diagnose)
  key = jax.random.key(3)
  actual = diagnose(params, samples, rewards.at[1, 2].set(jnp.inf), key)
  order = np.array([0, 2, 3, 1])
  complete = jax.tree.map(lambda x: x[order], (samples, rewards))
  expected = diagnose(params, *complete, key)
  assert jnp.isfinite(actual["c1"])
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-4, err_msg=name)
  few = diagnose(params, samples, rewards.at[:2, 2].set(-jnp.inf), key)
  assert jnp.isnan(few["c1"])


def test_a_diagnosis_does_not_depend_on_micro_batches_and_shards(
  tabular, settings_with
):
  lm = tabular.lm(8, 3)
  params, samples, rewards = drawn(lm, 8)

  def diagnosed(prompts, micro_batches, shards):
    settings = settings_with(
      diagnostics__share=3 / prompts,
      optim__micro_batches=micro_batches,
      advantage="score_weighted",
    )
    diagnose = diagnosis.make_diagnose(settings, shards)
    first = jax.tree.map(lambda x: x[:prompts], (samples, rewards))
    diagnose = jax.jit(functools.partial(diagnose, lm))
    return diagnose(params, *first, jax.random.key(3))

  one = diagnosed(8, 4, 1)
  assert jnp.isfinite(one["own_gradient_mse"])
  for cut in ((1, 8), (2, 4), (8, 1)):
    for name, value in diagnosed(8, *cut).items():
      np.testing.assert_allclose(value, one[name], rtol=1e-4, err_msg=name)
  # The first three prompts are diagnosed.
  np.testing.assert_allclose(diagnosed(3, 1, 1)["c1"], one["c1"], rtol=1e-4)


@pytest.fixture
def stepper(tiny, settings_with, open_step, word_policy):
  """A step of a tiny model: `(prompt length) -> metrics`."""
  rows = 4
  columns = 8
  settings = settings_with(
    batch_size=rows,
    group_size=4,
    sampling__max_new_tokens=8,
    optim__micro_batches=2,
    loss__beta=0.1,
    reward__functions=(f"{__file__}:of_length",),
  )
  policy = word_policy(tiny.lm, (0, 1))
  examples = [{"prompt_text": "", "answer": "1"}] * rows
  rng = np.random.default_rng(0)
  args = settings, policy, tiny.params, optax.adam(1e-3)
  mesh, *held, step = open_step(*args, reference=True)

  def run(length):
    ids = rng.integers(2, 11, (rows, columns)).astype(np.int32)
    prompts = Prompts(ids, np.arange(columns) < np.full((rows, 1), length))
    prompts = meshes.place(prompts_lib.trim(prompts), mesh, "batch")
    held[0], row, *_ = host.take_step(step, held[0], prompts, examples)
    return row

  with jax.set_mesh(mesh):
    yield run


def test_steps_have_no_implicit_transfers_and_compile_by_shape(
  stepper, monkeypatch
):
  shapes = []
  pack = host.plan_packing

  def record(*args):
    packing = pack(*args)
    sizes = jax.tree.map(np.shape, packing), packing and packing.rows.sizes
    shapes.append(str(sizes))
    return packing

  monkeypatch.setattr(host, "plan_packing", record)
  compiled = compilation.seconds()
  stepper(2)
  once = len(compiled)
  assert once >= 3
  with jax.transfer_guard("disallow"):
    rows = [stepper(2) for _ in range(4)]
  assert all(np.isfinite(row["loss"]) for row in rows)
  # Each new shape of packed rows compiles the reference and the update.
  new = set(shapes) - {shapes[0]}
  assert len(compiled) - once == 2 * len(new)
  # The guard works.
  with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
    with jax.transfer_guard("disallow"):
      jnp.ones(3) + np.ones(3)
