"""A game on eight devices: the same trajectories, and next to nothing sent.

Run with JAX_NUM_CPU_DEVICES=8; test_on_devices.py does.
"""

import re

import jax
import numpy as np

from grpojax.core.mesh import make_mesh, place
from grpojax.core.rollout import rollout
from grpojax.environments import higher_lower as game
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer

NUMBERS, TURNS = 16, 3
LM = transformer(
  TransformerConfig(
    vocab_size=game.vocab_size(NUMBERS),
    width=16,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=8,
    mlp=32,
  )
)


def sampled(params, prompts):
  return rollout(
    LM,
    params,
    prompts,
    jax.random.key(1),
    group_size=4,
    max_new_tokens=20,  # two stages, and turns of several tokens
    eos_ids=range(NUMBERS // 2),
    environment=game.higher_lower(NUMBERS, TURNS),
  )


def main():
  params, prompts = LM.init(jax.random.key(0)), game.prompts(NUMBERS)
  alone = jax.jit(sampled)(params, prompts)
  mesh = make_mesh(data=8)
  with jax.set_mesh(mesh):
    prompts = place(prompts, mesh, "batch")
    compiled = jax.jit(sampled).lower(params, prompts).compile()
    together = compiled(params, prompts)
  for x, y in zip(
    jax.tree.leaves(alone), jax.tree.leaves(together), strict=True
  ):
    np.testing.assert_allclose(x, y, atol=1e-5)
  assert (alone.turns == 2).any()
  # Whether all are done, and whether a turn has ended; no rows.
  names = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
  sent = re.findall(rf"= (\S+) (?:{names})(?:-start)?\(", compiled.as_text())
  assert sent and all(re.match(r"pred\[\]", x) for x in sent), sent


if __name__ == "__main__":
  main()
