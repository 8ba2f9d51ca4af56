"""Experts recorded in a rollout and replayed in the update (R3)."""

import dataclasses
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core.batch import make_batch
from grpojax.core.decoding import Decoding
from grpojax.core.dynamic_sampling import replace_groups
from grpojax.core.objective import Objective
from grpojax.core.packing import layout as packing_layout
from grpojax.core.packing.packed_logprobs import completion_logprobs
from grpojax.core.rollout import rollout
from grpojax.core.step import init_state, make_grpo_step
from grpojax.core.update import UpdateOptions, make_update
from grpojax.environments import episodes
from grpojax.models import huggingface as hf
from grpojax.models.moe import route
from grpojax.models.transformer import TransformerConfig, transformer

CHUNKS = runpy.run_path(
  str(pathlib.Path(__file__).parents[1] / "core" / "test_chunks.py")
)
KEY = jax.random.key(0)
B, G, V, LAYERS, PER_TOKEN = 3, 4, 11, 3, 2
CONFIG = TransformerConfig(
  vocab_size=V,
  width=8,
  layers=LAYERS,
  heads=2,
  kv_heads=1,
  head_dim=4,
  mlp=6,
  experts=5,
  experts_per_token=PER_TOKEN,
)
PROMPTS, ENVIRONMENT, EOS = map(CHUNKS.get, ("PROMPTS", "ENVIRONMENT", "EOS"))


def parameters(lm, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, jnp.float32),
    jax.eval_shape(lm.init, KEY),
  )


def other_routers(params):
  """Parameters whose routers choose others."""
  layers = params["layers"]
  layers = layers | {"router": -layers["router"][:, ::-1]}
  return params | {"layers": layers}


def sample(lm, params, t_max=16, **options):
  options = {"eos_ids": EOS, "group_size": G, "record_experts": True} | options
  return jax.jit(
    lambda params: rollout(
      lm, params, PROMPTS, KEY, max_new_tokens=t_max, **options
    )
  )(params)


def of_chunks(lm, params, t_max):
  programs = CHUNKS["programs"](lm, t_max, 7, record_experts=True)
  turns = ENVIRONMENT.max_turns
  answer = CHUNKS["of_host"]()
  playing = episodes.play(
    programs, params, PROMPTS, KEY, answer, max_turns=turns
  )
  return episodes.play_together(playing)[0]


WAYS = {
  "token by token": lambda *model: sample(*model, 40),
  "in stages, and fewer rows": lambda *model: sample(
    *model, 112, decoding=Decoding(stages=2), eos_ids=(0,)
  ),
  "an environment of the device": lambda *model: sample(
    *model, 24, environment=ENVIRONMENT
  ),
  "an environment of the host": lambda *model: of_chunks(*model, 24),
}


@pytest.mark.parametrize(
  "way",
  [
    name if "stages" in name else pytest.param(name, marks=pytest.mark.slow)
    for name in WAYS
  ],
)
def test_a_rollout_names_the_experts_of_all_tokens_that_are_read(way):
  """Against one pass of prompt and completion, as if all were a prompt."""
  many = 300 if way == "token by token" else 5  # more than a byte counts
  lm = transformer(dataclasses.replace(CONFIG, experts=many))
  params = parameters(lm)
  samples = WAYS[way](lm, params)
  lengths = np.asarray(samples.completion_mask).sum(axis=-1)
  assert lengths.min() < lengths.max() - 5
  whole = jax.jit(lm.prefill_with_experts)
  size = samples.prompt_ids.shape[1] + samples.completion_ids.shape[2]
  for i, j in np.ndindex(B, G):
    mask = samples.prompt_mask[i]
    n = int(np.sum(mask))
    completion = samples.completion_ids[i, j][: lengths[i, j] - 1]
    ids = np.concatenate([samples.prompt_ids[i][mask], completion])
    padded = jnp.asarray(np.pad(ids, (0, size - len(ids))))
    _, experts = whole(
      params, padded[None], (jnp.arange(size) < len(ids))[None]
    )
    experts = np.asarray(experts[0])
    assert experts.shape == (size, LAYERS * PER_TOKEN)
    dtype = np.uint8 if many == 5 else np.uint16
    assert experts.dtype == samples.experts.dtype == dtype
    np.testing.assert_array_equal(samples.prompt_experts[i][mask], experts[:n])
    np.testing.assert_array_equal(
      samples.experts[i, j][: len(completion)], experts[n : len(ids)]
    )


def replace_choice(model, experts):
  """Has the routers of a model of transformers take these [L, N, k]."""
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
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradient_are_those_of_transformers(
  torch_mixture, tmp_path, packed
):
  """With the choice of its routers replaced; a reference chooses itself."""
  torch = pytest.importorskip("torch")
  model = torch_mixture(tmp_path, layers=LAYERS)
  lm, params = hf.load(tmp_path)
  samples = sample(lm, other_routers(params))
  lengths = np.asarray(samples.completion_mask).sum(axis=-1)
  prompts = np.asarray(PROMPTS.prompt_mask).sum(axis=-1)
  layout = None
  if packed:
    layout = packing_layout.plan(
      lengths, 16, prompts, PROMPTS.prompt_ids.shape[1], 3, 1
    )
    layout = jax.tree.map(jnp.asarray, layout)
  objective = Objective(
    old_logprobs="trainer", router_replay=True, beta=0.1, kl="k3"
  )
  batch = jax.jit(
    lambda params: make_batch(
      lm,
      samples,
      jnp.zeros((B, G)),
      objective,
      options=UpdateOptions(minibatches=3),
      policy_params=params,
      ref_params=params,
      packing=layout,
    )
  )(params)

  def total(params):
    return jnp.sum(
      jnp.where(
        samples.completion_mask,
        completion_logprobs(
          lm,
          params,
          samples.prompt_ids,
          samples.prompt_mask,
          samples.completion_ids,
          replayed=(batch.prompt_experts, batch.experts),
        ).logprobs,
        0.0,
      )
    )

  gradient = jax.jit(jax.grad(total))(params)["layers"]
  plain = [layer.mlp.gate.forward for layer in model.model.layers]
  for i, j in np.ndindex(B, G):
    p, t = prompts[i], lengths[i, j]
    ids = np.concatenate(
      [samples.prompt_ids[i, :p], samples.completion_ids[i, j, :t]]
    )
    experts = np.concatenate(
      [samples.prompt_experts[i, :p], samples.experts[i, j, :t]]
    )
    by_layer = experts.reshape(-1, LAYERS, PER_TOKEN).swapaxes(0, 1)
    for name in ("ref", "old"):
      for layer, forward in zip(model.model.layers, plain, strict=True):
        layer.mlp.gate.forward = forward
      if name == "old":
        replace_choice(model, by_layer)
      logits = model(torch.tensor(ids[None].astype(np.int64))).logits[0]
      logprobs = torch.log_softmax(logits, -1)[p - 1 : -1]
      theirs = logprobs.gather(1, torch.tensor(ids[p:, None].astype(np.int64)))
      ours = getattr(batch, f"{name}_logprobs")[i, j, :t]
      np.testing.assert_allclose(ours, theirs[:, 0].detach(), atol=1e-4)
      if name == "old":
        theirs.sum().backward()
  for i, layer in enumerate(model.model.layers):
    np.testing.assert_allclose(
      gradient["router"][i].T, layer.mlp.gate.weight.grad, atol=2e-3
    )
    np.testing.assert_allclose(
      gradient["q"][i].T, layer.self_attn.q_proj.weight.grad, atol=2e-3
    )


@pytest.mark.parametrize("normalize", [False, True])
def test_experts_that_a_router_never_chooses_have_a_gradient(normalize):
  """The words of tokens that nobody read name expert 0, whatever it is."""
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
def test_how_a_batch_is_cut_changes_nothing(parts):
  """Packed rows and micro-batches, with routers that would choose others."""
  lm = transformer(CONFIG)
  sampler = parameters(lm)
  policy = other_routers(sampler)
  samples = sample(lm, sampler)
  rewards = jnp.asarray(np.random.default_rng(1).normal(size=(B, G)))
  tx = optax.sgd(1.0)
  lengths = np.asarray(samples.completion_mask).sum(axis=-1)
  prompts = np.asarray(PROMPTS.prompt_mask).sum(axis=-1)
  layout = packing_layout.plan(
    lengths, 16, prompts, PROMPTS.prompt_ids.shape[1], 1, min(parts, 3)
  )

  def descent(packing, parts, **options):
    objective = Objective(**options)
    update = UpdateOptions(micro_batches=parts, chunk_size=9)
    batch = make_batch(
      lm, samples, rewards, objective, options=update, packing=packing
    )
    state = init_state(policy, tx, KEY)
    state, metrics = jax.jit(make_update(lm, tx, objective, update))(
      state, batch
    )
    moved = jax.tree.map(jnp.subtract, policy, state.params)
    return moved, metrics["rollout_mismatch_mean"]

  expected, mismatch = descent(None, 1, router_replay=True)
  layout = jax.tree.map(jnp.asarray, layout) if parts < 12 else None
  actual, also = descent(layout, parts, router_replay=True)
  np.testing.assert_allclose(also, mismatch, rtol=1e-4)
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  _, without = descent(None, 1)
  assert abs(float(without - mismatch)) > 0.01


def test_a_step_replays_what_it_sampled():
  """In bfloat16, where two passes round to other experts now and then."""
  lm = transformer(CONFIG, dtype=jnp.bfloat16)
  params = parameters(lm)
  step = make_grpo_step(
    lm,
    optax.sgd(0.0),
    lambda rollout, targets: jnp.mean(rollout.completion_mask * 1.0, axis=-1),
    objective=Objective(router_replay=True),
    group_size=G,
    max_new_tokens=16,
    eos_ids=EOS,
  )
  _, metrics = jax.jit(step)(init_state(params, optax.sgd(0.0), KEY), PROMPTS)
  assert 0 < metrics["grad_norm"] < np.inf
  assert metrics["rollout_mismatch_max"] < 0.1


def test_groups_are_replaced_with_their_experts():
  """Of prompts of two lengths."""
  lm = transformer(CONFIG)
  samples = sample(lm, parameters(lm), 4)
  short = jax.tree.map(lambda x: x[1:], samples)
  short = short.replace(
    prompt_ids=short.prompt_ids[:, :2],
    prompt_mask=short.prompt_mask[:, :2],
    prompt_experts=short.prompt_experts[:, :2],
  )
  mixed = replace_groups(samples, short, jnp.array([0, -1, -1]))
  for name in ("experts", "prompt_experts"):
    value, whole = getattr(mixed, name), getattr(samples, name)
    np.testing.assert_array_equal(value[1:], whole[1:])
  np.testing.assert_array_equal(mixed.experts[0], samples.experts[1])
  np.testing.assert_array_equal(
    mixed.prompt_experts[0, :2], samples.prompt_experts[1, :2]
  )


def test_nothing_is_recorded_that_nobody_replays(tiny):
  lm = transformer(CONFIG)
  params = parameters(lm)
  samples = jax.eval_shape(
    lambda params: sample(lm, params, record_experts=False), params
  )
  assert samples.experts is None and samples.prompt_experts is None
  with pytest.raises(ValueError, match="record them by rollout"):
    make_batch(lm, samples, np.zeros((B, G)), Objective(router_replay=True))
  with pytest.raises(ValueError, match="needs a model with experts"):
    sample(tiny.lm, tiny.params)
  recorded = sample(lm, params)
  replay = Objective(router_replay=True)
  wrong = recorded.replace(experts=recorded.experts[:, :, 1:])
  with pytest.raises(
    ValueError, match=r"\[B, G, T, X\] .* not uint8 \(3, 4, 15"
  ):
    make_batch(lm, wrong, np.zeros((B, G)), replay)
  other = transformer(dataclasses.replace(CONFIG, layers=2))
  options = {"options": UpdateOptions(minibatches=3), "policy_params": params}
  replay = dataclasses.replace(replay, old_logprobs="trainer")
  with pytest.raises(ValueError, match="6 experts a token .* of 2 layers"):
    make_batch(other, recorded, np.zeros((B, G)), replay, **options)
  with pytest.raises(ValueError, match="replays experts, and the model has no"):
    make_batch(tiny.lm, recorded, np.zeros((B, G)), replay)
  batch = make_batch(lm, recorded, np.zeros((B, G)))
  assert batch.experts is None and batch.prompt_experts is None
