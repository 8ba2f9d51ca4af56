"""Programs trace with jax_numpy_rank_promotion=raise."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.objective import Objective
from grpojax.core.step import init_state, make_grpo_step
from grpojax.core.types import Prompts
from grpojax.core.update import UpdateOptions
from grpojax.models import adapters, lora
from grpojax.models.rope import Rope
from grpojax.models.transformer import transformer


def with_adapters(lm):
  params = lm.init(jax.random.key(0))
  adapted = lora.init(params, jax.random.key(1), 2, "layers/(q|v)")
  return lora.adapt(lm, params, 1.0)._replace(init=lambda key: adapted)


GEMMA = dict(
  norm_offset=True,
  post_norms=True,
  qk_norm=True,
  attention_cap=5.0,
  logits_cap=3.0,
  local_layers=(True, False),
  window=2,
  local_rope=Rope(100.0),
  gaps=((9, 11),),
)
OLMO = dict(wide_qk_norm=True, pre_norms=False, post_norms=True)
OLMO |= dict(residual_scale=0.4, embedding_scale=2.0, logits_divisor=2.0)
OLMO["rope"] = Rope(share=0.5, query_beta=0.5, attention_factor=1.2)
MODELS = {
  "plain": transformer,
  "gemma": lambda config: transformer(dataclasses.replace(config, **GEMMA)),
  "olmo": lambda config: transformer(dataclasses.replace(config, **OLMO)),
  "lora": lambda config: with_adapters(transformer(config)),
  "nnx": lambda config: adapters.from_nnx(
    lambda rngs: nnx.Embed(11, 11, rngs=rngs)
  ),
}
STEPS = {
  "cuts": {"sampling": Sampling(0.7, top_k=5, top_p=0.9, min_p=0.01)},
  "kl": {"objective": Objective(beta=0.1, kl="exact", entropy_coef=0.1)},
  "corrected": {
    "objective": Objective(correction="sequence_truncate"),
    "update": UpdateOptions(minibatches=2, micro_batches=2, epochs=2),
  },
}


@pytest.mark.parametrize(
  "model, options",
  [(name, "") for name in MODELS] + [("plain", name) for name in STEPS],
)
def test_a_step_promotes_no_rank(model, options, tiny):
  lm = MODELS[model](tiny.config)
  tx = optax.adamw(1e-3, weight_decay=0.1)
  prompts = Prompts(jnp.ones((4, 3), jnp.int32), jnp.ones((4, 3), bool))
  step = make_grpo_step(
    lm,
    tx,
    lambda samples, targets: jnp.mean(samples.completion_ids, axis=-1),
    group_size=2,
    max_new_tokens=4,
    eos_ids=(0, 1),
    **STEPS.get(options, {}),
  )

  def start(key):
    params = lm.init(key)
    reference = params if options == "kl" else None
    return step(init_state(params, tx, key), prompts, reference)

  with jax.numpy_rank_promotion("raise"):
    jax.eval_shape(start, jax.random.key(0))
