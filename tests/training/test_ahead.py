"""sampling.ahead = 1: each step is sampled before the previous update."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from run_helpers import python

from grpojax.core import meshes
from grpojax.core.types import Prompts
from grpojax.data.examples import READ
from grpojax.training.step import host, scoring
from grpojax.training.step import pending as pending_lib
from grpojax.training.step.draws import Timer, draw

pytestmark = pytest.mark.slow
B = 4
G = 4
STEPS = 6


def of_ids(prompt, completion, example):
  """Counts the example's number in the completion."""
  return float(completion.split().count(example["answer"]))


@pytest.fixture
def opened(tiny, settings_with, open_step, word_policy):
  """State, step and batches of a tiny model; half of the devices sample."""
  half = jax.device_count() // 2
  settings = settings_with(
    mesh__fsdp=half or 1,
    mesh__sampling_devices=half,
    batch_size=B,
    group_size=G,
    sampling__ahead=1,
    sampling__max_new_tokens=6,
    loss__correction="sequence_truncate",
    loss__beta=0.1,
    optim__micro_batches=2,
    reward__functions=(f"{__file__}:of_ids",),
  )
  policy = word_policy(tiny.lm, (0, 1))
  rng = np.random.default_rng(0)
  args = settings, policy, tiny.params, optax.adam(0.05)
  mesh, state, step = open_step(*args, reference=True)
  batches = []
  for _ in range(STEPS):
    ids = rng.integers(2, 11, (B, 3)).astype(np.int32)
    prompts = meshes.place(Prompts(ids, ids >= 0), mesh, "batch")
    answers = map(str, rng.integers(2, 11, B))
    examples = [{"prompt_text": "", "answer": x} for x in answers]
    batches.append((prompts, examples))
  with jax.set_mesh(mesh):
    yield state, step, batches


def test_steps_ahead_equal_a_loop_that_samples_with_older_parameters(opened):
  state, step, batches = opened
  copy = lambda params: jax.tree.map(jnp.copy, params)
  by_hand = copy(state)
  older = None
  expected = []
  for s, (prompts, examples) in enumerate(batches):
    now = copy(by_hand.params)
    key = jax.random.fold_in(by_hand.key, s)
    params = now if older is None else older
    drawing = draw(step.source, params, prompts, examples, key, Timer())
    by_hand = by_hand.replace(pending=drawing.collect())
    by_hand, row, *_ = host.take_step(step, by_hand, prompts, examples)
    older = now
    expected.append(row)
  rows = []
  for batch, upcoming in itertools.zip_longest(batches, batches[1:]):
    state, row, *_ = host.take_step(step, state, *batch, upcoming=upcoming)
    rows.append(row)
  assert state.pending is None
  jax.tree.map(np.testing.assert_array_equal, state.params, by_hand.params)
  means = [[row["reward_mean"] for row in x] for x in (rows, expected)]
  assert means[0] == means[1]
  samples = [row["rollout_effective_samples"] for row in rows]
  # The first parameters sample the first two steps.
  assert samples[0] == pytest.approx(1, abs=1e-4) and max(samples[1:]) < 0.999


def test_steps_ahead_on_separate_devices_equal_the_loop():
  words = "--numprocesses=0 -p no:cacheprovider -m slow -k loop_that".split()
  words = ["-m", "pytest", __file__, *words]
  output = python(*words, JAX_NUM_CPU_DEVICES="8").stdout
  assert "1 passed" in output, output[-3000:]


def test_rewards_ahead_are_computed_during_the_update(opened, monkeypatch):
  state, step, batches = opened
  events = []
  gathered = []
  gather = meshes.whole

  def recording(name, function):
    return lambda *args: events.append(name) or function(*args)

  def whole(tree):  # gathering new arrays after the update would wait for it
    leaves = [x for x in jax.tree.leaves(tree) if np.ndim(x) > 1]
    new = [x for x in leaves if not any(x is y for y in gathered)]
    if "update" in events and new:
      events.append("gather")
    gathered.extend(leaves)
    return gather(tree)

  monkeypatch.setattr(meshes, "whole", whole)
  collect = recording("rewards", scoring.collect_rewards)
  monkeypatch.setattr(scoring, "collect_rewards", collect)
  step = step._replace(update=recording("update", step.update))
  host.take_step(step, state, *batches[0], upcoming=batches[1])
  assert events == ["rewards", "update", "rewards"]


def test_a_pending_rollout_is_restored_with_rewards_and_prompts(opened):
  state, step, batches = opened
  result = host.take_step(step, state, *batches[0], upcoming=batches[1])
  state = result.state
  pending = state.pending
  failures = [[[] for _ in range(G)] for _ in range(B)]
  failures[1][2] = [scoring.Failure("of/ids", "why", "p", "\u00e9\ud83d")]
  names = ["of_ids/n", "n", "n.npy", "\ud83d", "n\0"]
  extras = {x: np.full((B, G), i or np.nan) for i, x in enumerate(names)}
  pending = pending._replace(
    rewards=pending.rewards._replace(failures=failures, extras=extras),
    examples=[{"prompt_text": x} for x in ("a", "\u00e4", "", "\n")],
  )
  mesh = step.inputs.mesh
  before = pending_lib.to_stored(state.replace(pending=pending), mesh)
  assert before.pending.dtype == np.uint8
  # A slightly longer rollout has the same size, and so the same programs.
  longer = pending._replace(examples=[{READ: ["a"]}, *pending.examples[1:]])
  longer = pending_lib.to_stored(state.replace(pending=longer), mesh)
  assert longer.pending.shape == before.pending.shape
  after = pending_lib.from_stored(before, mesh).pending
  assert after.examples == pending.examples
  assert after.rewards.failures == failures
  jax.tree.map(
    np.testing.assert_array_equal,
    (after.rollout, after.rewards._replace(failures=0)),
    (pending.rollout, pending.rewards._replace(failures=0)),
  )
