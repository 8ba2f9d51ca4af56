"""What a step does beside its programs: nothing is copied or compiled unasked.

The first steps compile what later ones need; which shapes there are is bounded
by `prompts.trim` and `packing_layout`.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Prompts
from grpojax.runtime import compilation
from grpojax.training import policy as policy_lib
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.step import host
from grpojax.training.step import rewards as rewards_lib

B, G, T, P = 4, 4, 8, 8
EXAMPLES = [{"prompt_text": "", "answer": "1"}] * B


@pytest.fixture
def stepper(tiny, settings_with, open_step, words):
  """A step of a tiny model, as `fit` runs it: `(length) -> row`."""
  settings = settings_with(
    batch_size=B,
    group_size=G,
    sampling__max_new_tokens=T,
    optim__micro_batches=2,
    loss__beta=0.1,
    reward__functions=(f"{pathlib.Path(__file__)}:of_length",),
  )
  policy = policy_lib.Policy(pathlib.Path(), tiny.lm, words, (0, 1), 0)
  rng = np.random.default_rng(0)
  with rewards_lib.open_reward_pool(settings) as reward_pool:
    mesh, *held, step = open_step(
      settings, policy, tiny.params, optax.adam(1e-3), reward_pool, True
    )

    def run(length):
      ids = rng.integers(2, 11, (B, P)).astype(np.int32)
      given = Prompts(ids, np.arange(P) < np.full((B, 1), length))
      given = mesh_lib.place(prompts_lib.trim(given), mesh, "batch")
      held[0], row, *_ = step(held[0], given, EXAMPLES, False)
      return row

    with jax.set_mesh(mesh):
      yield run


def of_length(prompt, completion, example):
  return float(len(completion))


@pytest.mark.slow
def test_nothing_is_copied_or_compiled_unasked(stepper, monkeypatch):
  """Copies by `device_put` and `device_get` alone; programs by shapes alone."""
  shapes, pack = [], host.plan_packing

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
  # Rows of another shape are two programs, reference and update.
  new = set(shapes) - {shapes[0]}
  assert len(compiled) - once == 2 * len(new)
  # The guard guards.
  with (
    pytest.raises(Exception, match="Disallowed host-to-device transfer"),
    jax.transfer_guard("disallow"),
  ):
    jnp.ones(3) + np.ones(3)
