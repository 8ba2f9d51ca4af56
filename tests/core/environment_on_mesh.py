"""A game on eight devices: equal trajectories, with little communication.

Run with JAX_NUM_CPU_DEVICES=8; test_on_devices.py does.
"""

import functools
import re

import jax
import numpy as np

from grpojax.core.decoding import chunks
from grpojax.core.meshes import make_mesh, place
from grpojax.core.rollout import rollout
from grpojax.environments import higher_lower as game
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer

NUMBERS = 16
TURNS = 3
SHAPE = dict(width=16, layers=2, heads=2, kv_heads=2, head_dim=8, mlp=32)
LM = transformer(TransformerConfig(game.vocab_size(NUMBERS), **SHAPE))
SIZES = {"group_size": 4, "max_new_tokens": 20}  # two stages, and long turns
ENDS = tuple(range(NUMBERS // 2))


def sampled(params, prompts):
  return rollout(
    LM,
    params,
    prompts,
    jax.random.key(1),
    eos_ids=ENDS,
    environment=game.higher_lower(NUMBERS, TURNS),
    **SIZES,
  )


def programs():
  """Returns the programs that begin, decode a chunk, and feed observations."""
  bind = lambda f, **options: jax.jit(functools.partial(f, LM, **options))
  return (
    bind(chunks.begin, eos_ids=ENDS, pad_id=0, **SIZES),
    bind(chunks.decode, tokens=6, eos_ids=ENDS),
    bind(chunks.feed),
  )


def in_chunks(params, prompts, run):
  begin, decode, feed = programs()
  rows = run(begin, params, prompts, jax.random.key(1))
  shape = rows.turn.shape
  none = np.zeros(shape, bool)
  ids = np.full((*shape, 4), NUMBERS)
  rows = run(decode, params, rows, none, none)
  waiting = np.asarray(rows.waiting)
  assert waiting.any() and not waiting.all()
  length = np.where(waiting, 3, 0).astype(np.int32)
  rows = run(feed, params, rows, ids.astype(np.int32), length, waiting)
  return run(decode, params, rows, none, none).samples


NAMES = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"


def sent(compiled):
  """Returns the shapes that devices exchange."""
  pattern = rf"= (\S+) (?:{NAMES})(?:-start)?\("
  return re.findall(pattern, compiled.as_text())


def run_and_read(program, *args):
  """Runs a program, which may exchange only booleans and integers."""
  compiled = program.lower(*args).compile()
  wrong = [x for x in sent(compiled) if not re.match(r"(pred|s32)\[\]", x)]
  assert not wrong, wrong
  return compiled(*args)


def check_same(alone, together):
  close = functools.partial(np.testing.assert_allclose, atol=1e-5)
  jax.tree.map(close, alone, together)


def main():
  params = LM.init(jax.random.key(0))
  prompts = game.prompts(NUMBERS)
  alone = jax.jit(sampled)(params, prompts)
  mesh = make_mesh(data=8)
  with jax.set_mesh(mesh):
    prompts = place(prompts, mesh, "batch")
    compiled = jax.jit(sampled).lower(params, prompts).compile()
    together = compiled(params, prompts)
  check_same(alone, together)
  assert (alone.turns == 2).any()
  # Booleans: whether all rows are done, and whether a turn has ended.
  shapes = sent(compiled)
  assert shapes and all(re.match(r"pred\[\]", x) for x in shapes), shapes
  alone = in_chunks(params, game.prompts(NUMBERS), lambda f, *args: f(*args))
  with jax.set_mesh(mesh):
    together = in_chunks(params, prompts, run_and_read)
  check_same(alone, together)


if __name__ == "__main__":
  main()
