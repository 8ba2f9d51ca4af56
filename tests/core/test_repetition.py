"""The repetition penalty: transformers' own, sampled and scored alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpojax.core.batch import make_batch
from grpojax.core.decoding import Decoding, repetition
from grpojax.core.decoding.sampling import Sampling, transform_logits
from grpojax.core.logprobs import completion_hidden, token_logprobs
from grpojax.core.objective import Objective
from grpojax.core.packing import layout as packing_layout
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.core.update import UpdateOptions

B, G, P, T, VOCAB, EOS = 3, 4, 4, 9, 11, 0
BUDGETS = [[9, 1, 3, 2], [1, 9, 1, 4], [3, 3, 2, 1]]  # so that rows are shared
SAMPLING = Sampling(temperature=0.8, top_k=6, repetition_penalty=1.7)
KEY = jax.random.key(3)


def numpys(logits, context, penalty):
  """The definition, token by token, for one row."""
  logits = np.array(logits, np.float64)
  for token in set(context):
    z = logits[token]
    logits[token] = z / penalty if z > 0 else z * penalty
  return logits


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_it_is_that_of_transformers(penalty):
  torch = pytest.importorskip("torch")
  from transformers import RepetitionPenaltyLogitsProcessor

  rng = np.random.default_rng(0)
  logits = rng.normal(size=(5, VOCAB)).astype(np.float32)
  context = rng.integers(0, VOCAB, (5, 7))
  theirs = RepetitionPenaltyLogitsProcessor(penalty)(
    torch.tensor(context), torch.tensor(logits)
  ).numpy()
  by_hand = [numpys(*row, penalty) for row in zip(logits, context, strict=True)]
  np.testing.assert_allclose(by_hand, theirs, rtol=1e-6)
  context, mask = jnp.asarray(context), jnp.ones((5, 7), bool)
  seen = repetition.in_prompts(context, mask, VOCAB)
  sampling = Sampling(repetition_penalty=penalty)
  ours = transform_logits(jnp.asarray(logits), sampling, seen=seen)
  np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.fixture(scope="module")
def drawn(tiny):
  """Prompts of several lengths, and what is sampled of them."""
  ids = jax.random.randint(jax.random.key(1), (B, P), 1, VOCAB)
  mask = jnp.arange(P) < jnp.array([[4], [1], [3]])
  prompts = Prompts(ids, mask)

  def draw(sampling=SAMPLING):
    run = functools.partial(
      rollout,
      tiny.lm,
      group_size=G,
      max_new_tokens=T,
      eos_ids=(EOS,),
      sampling=sampling,
      budgets=jnp.array(BUDGETS),
    )
    return jax.jit(run)(tiny.params, prompts, KEY)

  return draw, draw()


def raw(tiny, samples):
  """Logits that nothing has been done to."""
  prompts = samples.prompt_ids, samples.prompt_mask

  @jax.jit
  def run():
    hidden, _ = completion_hidden(
      tiny.lm, tiny.params, *prompts, samples.completion_ids
    )
    return tiny.lm.unembed(tiny.params, hidden)

  return np.asarray(run())


def contexts(samples):
  """(b, g, t) and all ids that stand before that token."""
  prompts = np.asarray(samples.prompt_ids), np.asarray(samples.prompt_mask)
  ids, mask = (
    np.asarray(x) for x in (samples.completion_ids, samples.completion_mask)
  )
  for b, g, t in zip(*np.nonzero(mask), strict=True):
    yield (b, g, t), [*prompts[0][b][prompts[1][b]], *ids[b, g, :t]]


@pytest.mark.slow
def test_samples_have_the_probabilities_of_the_definition(tiny, drawn):
  _, samples = drawn
  logits, changed = raw(tiny, samples), 0
  ids = np.asarray(samples.completion_ids)
  logprobs = np.asarray(samples.logprobs)
  for place, context in contexts(samples):
    z = numpys(logits[place], context, SAMPLING.repetition_penalty) / 0.8
    z[z < np.sort(z)[-6]] = -np.inf
    token = ids[place]
    expected = z[token] - np.log(np.exp(z).sum())
    np.testing.assert_allclose(logprobs[place], expected, atol=1e-4)
    changed += token in context
  assert changed > 5  # tokens come again, or the test tests little


@pytest.mark.slow
def test_greedy_decoding_is_penalised(tiny, drawn):
  samples = drawn[0](Sampling(0.0, repetition_penalty=1.7))
  logits = raw(tiny, samples)
  differs, ids = 0, np.asarray(samples.completion_ids)
  for place, context in contexts(samples):
    best = numpys(logits[place], context, 1.7).argmax()
    assert ids[place] == best
    differs += best != logits[place].argmax()
  assert differs


def same(found, expected):
  np.testing.assert_array_equal(found.completion_ids, expected.completion_ids)
  np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.slow  # long enough for stages
def test_stages_and_compaction_change_no_sample(tiny):
  prompts = Prompts(jnp.array([[1, 2], [3, 4]]), jnp.ones((2, 2), bool))
  budgets = jnp.array([[130, 3, 2, 5], [2, 4, 1, 60]])

  def draw(**decoding):
    run = functools.partial(
      rollout,
      tiny.lm,
      group_size=4,
      max_new_tokens=130,
      eos_ids=(VOCAB,),  # never
      sampling=SAMPLING,
      budgets=budgets,
      decoding=Decoding(**decoding),
    )
    return jax.jit(run)(tiny.params, prompts, KEY)

  samples = draw(stages=1, compact=False)
  assert samples.completion_mask.sum(-1).max() > 50
  same(draw(stages=2), samples)


@pytest.mark.slow
def test_the_scorer_agrees_with_the_sampler_packed_or_not(tiny, drawn):
  _, samples = drawn
  lengths = np.asarray(samples.completion_mask.sum(-1))
  prompts = np.asarray(samples.prompt_mask.sum(-1))
  packing = packing_layout.plan(lengths, T, prompts, P)
  assert packing.rows.sample_of_token.shape[1] < B * G  # something shares a row

  @jax.jit
  def score():
    def of(sampling=SAMPLING, packing=None, ref=None):
      return make_batch(
        tiny.lm,
        samples,
        jnp.zeros((B, G)),
        Objective(old_logprobs="trainer"),
        options=UpdateOptions(epochs=2, chunk_size=24),
        sampling=sampling,
        policy_params=tiny.params,
        ref_params=ref,
        packing=packing,
      )

    uncut = of(dataclasses.replace(SAMPLING, top_k=0)).old_logprobs
    plain = dataclasses.replace(SAMPLING, repetition_penalty=1.0)
    plain = of(plain).old_logprobs
    return of(ref=tiny.params), of(packing=packing), uncut, plain

  mask = np.asarray(samples.completion_mask)
  rows, packed, uncut, plain = score()
  sampled = np.asarray(samples.logprobs)[mask]
  for batch in (rows, packed):
    found = np.asarray(batch.old_logprobs)[mask]
    np.testing.assert_allclose(found, sampled, atol=1e-4)
  # The reference is penalised too, but not cut.
  np.testing.assert_allclose(rows.ref_logprobs[mask], uncut[mask], atol=1e-4)
  assert np.abs(np.asarray(plain)[mask] - sampled).max() > 0.1


@pytest.mark.slow
def test_a_penalty_of_nothing_is_refused(tiny, drawn):
  _, samples = drawn
  with pytest.raises(ValueError, match="needs `seen`"):
    transform_logits(jnp.zeros(3), SAMPLING)
  rows = jnp.zeros_like(samples.completion_ids)
  with pytest.raises(ValueError, match="packed rows needs `samples`"):
    token_logprobs(
      tiny.lm,
      tiny.params,
      samples.prompt_ids,
      samples.prompt_mask,
      samples.completion_ids,
      sampling=SAMPLING,
      positions=rows,
      segments=rows,
    )
