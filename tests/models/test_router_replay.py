"""Experts recorded in a rollout and replayed in the update (R3)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environment_helpers import (
  ENVIRONMENT,
  EOS,
  PROMPTS,
  host_answers,
  play,
  programs,
)
from small_models import (
  assert_close,
  config_with,
  descend,
  layout_of,
  random_params,
  torch_mixture,
)
from small_models import sample as sample_of

from grpojax.core.batch import make_batch
from grpojax.core.objective import Objective
from grpojax.core.packing.packed_logprobs import completion_logprobs
from grpojax.core.update import UpdateOptions
from grpojax.models import huggingface as hf
from grpojax.models.moe import route
from grpojax.models.transformer import transformer

KEY = jax.random.key(0)
B = 3
G = 4
LAYERS = 3
PER_TOKEN = 2
CONFIG = config_with(layers=LAYERS, experts=5, experts_per_token=PER_TOKEN)
PROMPT_LENGTHS = np.asarray(PROMPTS.prompt_mask).sum(axis=-1)
PROMPT_SIZE = PROMPTS.prompt_ids.shape[1]


def other_routers(params):
  layers = params["layers"]
  layers = layers | {"router": -layers["router"][:, ::-1]}
  return params | {"layers": layers}


def sample(lm, params, t_max=16, **options):
  options = {"eos_ids": EOS, "group_size": G} | options
  lm = lm.recording()
  return sample_of(lm, params, PROMPTS, 0, max_new_tokens=t_max, **options)


def lengths_of(samples):
  return np.asarray(samples.completion_mask).sum(axis=-1)


WAYS = {
  "token by token": lambda *model: sample(*model, 40),
  "in shrinking batches": lambda *model: sample(*model, 112, eos_ids=(0,)),
  "an environment of the device": lambda *model: sample(
    *model, 24, environment=ENVIRONMENT
  ),
  "an environment of the host": lambda lm, params: play(
    programs(lm.recording(), 24, 7), params, host_answers()
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_rollouts_record_the_experts_of_all_tokens(way):
  """Compares with `prefill` of prompt and completion."""
  many = 300 if way == "token by token" else 5  # more than a byte holds
  lm = transformer(dataclasses.replace(CONFIG, experts=many))
  params = random_params(lm)
  samples = WAYS[way](lm, params)
  lengths = lengths_of(samples)
  assert lengths.min() < lengths.max() - 5
  whole = jax.jit(functools.partial(lm.prefill, record=True))
  size = samples.prompt_ids.shape[1] + samples.completion_ids.shape[2]
  for i, j in np.ndindex(B, G):
    mask = samples.prompt_mask[i]
    n = int(np.sum(mask))
    completion = samples.completion_ids[i, j][: lengths[i, j] - 1]
    ids = np.concatenate([samples.prompt_ids[i][mask], completion])
    padded = jnp.asarray(np.pad(ids, (0, size - len(ids))))[None]
    prefix = whole(params, padded, (jnp.arange(size) < len(ids))[None])
    experts = np.asarray(prefix.experts[0])
    assert experts.shape == (size, LAYERS * PER_TOKEN)
    dtype = np.uint8 if many == 5 else np.uint16
    assert experts.dtype == samples.experts.dtype == dtype
    np.testing.assert_array_equal(samples.prompt_experts[i][mask], experts[:n])
    np.testing.assert_array_equal(
      samples.experts[i, j][: len(completion)], experts[n : len(ids)]
    )


def replace_choice(model, experts):
  """Makes the routers of a transformers model choose experts [L, N, k]."""
  import torch

  for layer, chosen in zip(model.model.layers, experts, strict=True):
    router = layer.mlp.gate
    plain = router.forward
    chosen = torch.tensor(np.asarray(chosen, np.int64))

    def forward(x, plain=plain, chosen=chosen):
      logits, scores, _ = plain(x)
      probs = torch.softmax(logits, dim=-1, dtype=torch.float)
      weights = probs.gather(1, chosen)
      weights = weights / weights.sum(-1, keepdim=True)
      return logits, weights.to(scores.dtype), chosen

    router.forward = forward


@pytest.mark.slow
def test_replay_agrees_with_transformers(tmp_path):
  """Rows are packed; the reference chooses its own experts."""
  torch = pytest.importorskip("torch")
  model = torch_mixture(tmp_path, layers=LAYERS)
  lm, params = hf.load(tmp_path)
  samples = sample(lm, other_routers(params))
  lengths = lengths_of(samples)
  layout = layout_of(lengths, 16, PROMPT_LENGTHS, PROMPT_SIZE, 3, 1)
  objective = Objective(
    old_logprobs="trainer", router_replay=True, beta=0.1, kl="k3"
  )
  options = {"options": UpdateOptions(minibatches=3), "packing": layout}
  prepare = lambda params: make_batch(
    *(lm, samples, jnp.zeros((B, G)), objective),
    **options,
    policy_params=params,
    ref_params=params,
  )
  batch = jax.jit(prepare)(params)

  def total(params):
    scores = completion_logprobs(lm, params, samples.tokens)
    return jnp.sum(jnp.where(samples.completion_mask, scores.logprobs, 0.0))

  gradient = jax.jit(jax.grad(total))(params)["layers"]
  plain = [layer.mlp.gate.forward for layer in model.model.layers]
  for i, j in np.ndindex(B, G):
    p = PROMPT_LENGTHS[i]
    t = lengths[i, j]
    both = lambda prompts, rows, i=i, j=j, p=p, t=t: np.concatenate(
      [prompts[i, :p], rows[i, j, :t]]
    ).astype(np.int64)
    ids = both(samples.prompt_ids, samples.completion_ids)
    experts = both(samples.prompt_experts, samples.experts)
    by_layer = experts.reshape(-1, LAYERS, PER_TOKEN).swapaxes(0, 1)
    for name in ("ref", "old"):
      for layer, forward in zip(model.model.layers, plain, strict=True):
        layer.mlp.gate.forward = forward
      if name == "old":
        replace_choice(model, by_layer)
      logits = model(torch.tensor(ids[None])).logits[0]
      logprobs = torch.log_softmax(logits, -1)[p - 1 : -1]
      theirs = logprobs.gather(1, torch.tensor(ids[p:, None]))
      ours = getattr(batch, f"{name}_logprobs")[i, j, :t]
      np.testing.assert_allclose(ours, theirs[:, 0].detach(), atol=1e-4)
      if name == "old":
        theirs.sum().backward()
  for i, layer in enumerate(model.model.layers):
    theirs = {"router": layer.mlp.gate, "q": layer.self_attn.q_proj}
    for name, module in theirs.items():
      got = gradient[name][i].T
      want = module.weight.grad
      np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize("normalize", [False, True])
def test_replayed_experts_of_probability_0_have_finite_gradients(normalize):
  """Tokens that were not read have expert 0."""
  router = jnp.array([[0.0, 110.0, 110.0]])
  replayed = jnp.array([[0, 0]], jnp.uint8)

  def weights(router):
    return route(jnp.ones((1, 1)), router, 2, normalize, replayed)[0]

  expected = 0.5 if normalize else np.exp(-110.0) / 2
  np.testing.assert_allclose(weights(router), [[expected] * 2], atol=1e-30)
  gradient = jax.jit(jax.grad(lambda router: weights(router)[0, 0]))(router)
  assert jnp.isfinite(gradient).all()


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 12])
def test_packing_and_micro_batches_replay_the_same_experts(parts):
  """The policy's routers would choose other experts."""
  lm = transformer(CONFIG)
  sampler = random_params(lm)
  policy = other_routers(sampler)
  samples = sample(lm, sampler)
  rewards = jnp.asarray(np.random.default_rng(1).normal(size=(B, G)))
  layout = None
  if parts < 12:
    lengths = lengths_of(samples)
    layout = layout_of(lengths, 16, PROMPT_LENGTHS, PROMPT_SIZE, 1, parts)

  def descent(packing, parts, **options):
    objective = Objective(**options)
    batch = make_batch(lm, samples, rewards, objective, packing=packing)
    moved, metrics = descend(lm, policy, batch, objective, micro_batches=parts)
    return moved, metrics["rollout_mismatch_mean"]

  expected, mismatch = descent(None, 1, router_replay=True)
  actual, also = descent(layout, parts, router_replay=True)
  np.testing.assert_allclose(also, mismatch, rtol=1e-4)
  assert_close(actual, expected, atol=1e-5)
  _, without = descent(None, 1)
  assert abs(float(without - mismatch)) > 0.01


def test_wrong_experts_are_refused(tiny):
  lm = transformer(CONFIG)
  params = random_params(lm)
  replay = Objective(router_replay=True)
  recorded = sample(lm, params)
  nothing = recorded.replace(experts=None)
  cut = recorded.replace(experts=recorded.experts[:, :, 1:])
  other = transformer(dataclasses.replace(CONFIG, layers=2))
  trainer = dataclasses.replace(replay, old_logprobs="trainer")
  by_trainer = dict(options=UpdateOptions(minibatches=3), policy_params=params)
  for args, options, message in (
    ((lm, nothing, replay), {}, "record them with rollout"),
    ((lm, cut, replay), {}, r"\[B, G, T, X\] .* not uint8 \(3, 4, 15"),
    ((other, recorded, trainer), by_trainer, "6 experts per token .* 2 layers"),
    ((tiny.lm, recorded, replay), {}, "needs a model with experts"),
  ):
    model, samples, objective = args
    with pytest.raises(ValueError, match=message):
      make_batch(model, samples, np.zeros((B, G)), objective, **options)
  with pytest.raises(ValueError, match="only a model with experts"):
    sample(tiny.lm, tiny.params)
