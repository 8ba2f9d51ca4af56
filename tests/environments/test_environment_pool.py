"""Pools of workers: failures, replays, instances and random numbers."""

import os
import pathlib
import random
import resource

import numpy as np
import pytest

from grpojax.environments import tools
from grpojax.environments.pool import EnvironmentPool, check_replay
from grpojax.environments.protocol import Step
from grpojax.environments.replay import seeded

USER = str(pathlib.Path(__file__).with_name("user_environments.py"))
DRAWING = str(pathlib.Path(USER).with_name("drawing_environments.py"))
EXAMPLE = {"answer": "7", "offset": 1}


def ask(pool, *actions, state=None, seed=5):
  calls = [("step", state, action, EXAMPLE, seed) for action in actions]
  return pool.collect(pool.submit(calls))


def counted(action):
  return Step(f"1: {action}", state={"count": 1}, info={"n": 1.0})


@pytest.fixture(scope="module", params=[0, 2])
def pool(request):
  with EnvironmentPool(USER, workers=request.param, timeout=30) as made:
    yield made


def test_answers_are_in_order(pool):
  reset = pool.collect(pool.submit([("reset", EXAMPLE, np.uint32(3))]))
  assert reset == [Step()] and pool.tools == [] == ask(pool)
  actions = [str(i) for i in range(40)]
  assert ask(pool, *actions) == [*map(counted, actions)]
  (step,) = ask(pool, "c", state={"count": 1})
  assert step.observation == "2: c"


@pytest.mark.parametrize(
  "action, reason",
  [
    ("raise", "raised RuntimeError: no idea (user_environments.py:"),
    ("leave", "raised SystemExit: bye"),
    ("none", "returned None: write `return Step("),
  ],
)
def test_a_step_that_fails_costs_its_own_episode(pool, action, reason):
  before, failed, after = ask(pool, "4", action, "5")
  assert (before, after) == (counted("4"), counted("5"))
  assert isinstance(failed, str) and failed.startswith(reason)


def test_answers_of_any_text_arrive(pool):
  odd = ["a", "\x01" * 150_000]
  assert ask(pool, *odd) == [*map(counted, odd)]
  assert ask(pool, "\ud800")[0].observation == "1: ?"
  state = {"count": 4}
  changed, plain = ask(pool, "changes", "x", state=state)
  assert (changed.observation, plain.observation) == ("0: changes", "5: x")
  assert state == {"count": 4} and "answer" in EXAMPLE
  with pytest.raises(ValueError, match="only JSON.*object"):
    pool.submit([("step", None, "a", {"x": object()}, 0)])


def play(pool, actions, seed=3, steps=None):
  """Returns the steps of an episode."""
  steps = steps or pool.collect(pool.submit([("reset", EXAMPLE, seed)]))
  for action in actions:
    steps = [*steps, *ask(pool, action, state=steps[-1].state, seed=seed)]
  return steps


def without_times(steps):
  return [step if isinstance(step, str) else step[:4] for step in steps]


@pytest.mark.slow
def test_episodes_continue_after_their_worker_was_killed():
  actions = ["a" * 300_000, "b", "c", "stop"]
  with EnvironmentPool(f"{USER}:Game") as pool:
    expected = without_times(play(pool, actions))
  assert [x[1] for x in expected] == [0, 0.5, 1, 1.5, 2]
  assert [x[2] for x in expected] == [False] * 4 + [True]
  with EnvironmentPool(f"{USER}:Game", workers=2) as pool:
    steps = play(pool, actions[:2])
    for _ in range(2):  # both workers die
      lost = ask(pool, "exit", "exit", state=steps[-1].state, seed=3)
      assert lost == ["ended its process with code 3"] * 2
    assert without_times(play(pool, actions[2:], steps=steps)) == expected
    # Any worker can repeat the second step.
    again = ask(pool, *["b"] * 5, state=steps[1].state, seed=3)
    assert without_times(again) == [expected[2]] * 5


LOOK = '<tool_call>{"name": "look", "arguments": {"number": %d}}</tool_call>'


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
  "name, count, good, stop, bad, reward",
  [
    ("HeldGame", 600, "go", "stop", "raise", None),
    ("Held", 6, LOOK % 1, "bye", LOOK % 13, 2 / 8),
  ],
)
def test_each_instance_is_made_and_closed_once(
  name, count, good, stop, bad, reward, workers, tmp_path
):
  """Episodes end, fail, are cut off, or remain when the pool closes."""
  log = tmp_path / "log"
  settings = {"options": {"log": str(log)}, "workers": workers}
  seen = lambda: [log.read_text().split().count(x) for x in ("reset", "close")]
  with EnvironmentPool(f"{USER}:{name}", **settings) as pool:
    ask_all = lambda calls: pool.collect(pool.submit(calls))
    steps = ask_all([("reset", {}, seed) for seed in range(count)])
    for _ in range(2):
      calls = [("step", x.state, good, {}, i) for i, x in enumerate(steps)]
      steps = ask_all(calls)
    assert seen() == [count, 0]
    states = [step.state for step in steps]
    ended, failed, cut, broken = ask_all(
      [
        ("step", states[0], stop, {}, 0),
        ("step", states[1], bad, {}, 1),
        ("end", states[2], {}, 2),
        ("reset", {"broken": True}, 9),
      ]
    )
    assert ended.done and cut.done and cut.reward == reward
    assert isinstance(failed, str) and broken.startswith("raised RuntimeError")
    assert seen() == [count + 1, 4]
    check_replay(pool, {}, 0)
    with pytest.raises(ValueError, match="cannot begin: it raised RuntimeErr"):
      check_replay(pool, {"broken": True}, 0)
    resets, closes = seen()
    assert resets - count - 1 == closes - 4 > 4  # it closes its instances
  assert seen() == [resets, resets]


def test_a_replay_that_differs_fails_the_episode():
  options = {"luck": True}  # its replies have the process id
  with EnvironmentPool(f"{USER}:Game", options=options, workers=1) as pool:
    steps = play(pool, ["a", "b"])
    ask(pool, "exit", state=steps[-1].state, seed=3)
    last = play(pool, ["c"], steps=steps)[-1]
  assert last.startswith("answers differently when its actions are played")


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_have_their_own_seed_unless_the_reset_is_random(workers):
  with EnvironmentPool(f"{USER}:Game", workers=workers) as pool:
    (first,) = play(pool, [], seed=0)
    answers = [
      ask(pool, "a", state=first.state, seed=i)[0][0] for i in range(9)
    ]
    assert len({*answers}) > 4
    assert answers[4] == play(pool, ["a"], seed=4)[-1].observation
  with EnvironmentPool(f"{USER}:OldGame", workers=workers) as pool:
    (first,) = play(pool, [], seed=0)
    expected = play(pool, ["a", "b"], seed=0)[-1]
    for seed in range(4):
      (step,) = ask(pool, "a", state=first.state, seed=seed)
      (last,) = ask(pool, "b", state=step.state, seed=seed)
      assert last.observation == expected.observation


CALL = '<tool_call>{"name": "%s", "arguments": {%s}}</tool_call>'


def played(name, workers, seed=5):
  """Returns the steps of an episode, after `check_replay`."""
  tools = [f"{DRAWING}:dice"] if name == "dice" else []
  turn = CALL % (("dice", '"sides": 6') if tools else ("look", ""))
  path = "" if tools else f"{DRAWING}{name}"
  with EnvironmentPool(path, tools, workers=workers) as pool:
    return without_times(check_replay(pool, {}, seed, actions=[turn] * 3))


@pytest.mark.parametrize("name", ["", ":Guess", ":Tiles", ":Walk", "dice"])
def test_global_random_numbers_depend_only_on_the_sample(name):
  """They are drawn in a constructor, reset, step, tool or reward."""
  # Without workers they differ: the tests' type checks draw from `random`, too.
  assert played(name, 0) != played(name, 0, seed=6)
  first = played(name, 1)
  assert first == played(name, 2)
  observations = {str(step[0]) for step in first[1:4]}
  assert len(observations) == 3  # each turn draws other numbers


def test_seeded_restores_the_global_generators():
  random.seed(1)
  np.random.seed(1)
  state = lambda: (random.getstate(), np.random.get_state()[1].tolist())
  before = state()
  for _ in range(2):
    with pytest.raises(KeyError), seeded(5, "a"):
      numbers = random.random(), np.random.rand()
      raise KeyError
    assert state() == before
  with seeded(5, "a"):
    assert (random.random(), np.random.rand()) == numbers
  with seeded(5, "b"):
    assert (random.random(), np.random.rand()) != numbers


def test_samples_of_a_group_draw_different_numbers():
  with EnvironmentPool(f"{DRAWING}:Tiles") as pool:
    (first,) = play(pool, [], seed=0)
    look = CALL % ("look", "")
    answers = [ask(pool, look, state=first.state, seed=i)[0] for i in range(5)]
    texts = [step.observation[0]["content"].split() for step in answers]
  assert len({tuple(text[-2:]) for text in texts}) == 5
  assert len({tuple(text[:-2]) for text in texts}) == 1


@pytest.mark.parametrize("reward", ["N[0]", "hash('x')"])
def test_check_replay_names_an_answer_that_differs(reward, tmp_path):
  """The reward counts calls, or depends on the process."""
  file = tmp_path / "counting.py"
  code = "N = [0]\ndef step(action):\n  N[0] += 1\n  return {'reward': %s}\n"
  file.write_text(code % reward)
  with EnvironmentPool(str(file), workers=2) as pool:
    with pytest.raises(ValueError, match="the action '1': .* could not resume"):
      check_replay(pool, EXAMPLE, 0)


def test_too_many_open_files_are_explained():
  limits = resource.getrlimit(resource.RLIMIT_NOFILE)
  files = len(os.listdir("/proc/self/fd"))
  resource.setrlimit(resource.RLIMIT_NOFILE, (files + 6, limits[1]))
  try:
    with pytest.raises(
      ValueError, match=f"two of the {files + 6} files .*ulimit -n.*or lower"
    ):
      EnvironmentPool(USER, workers=8)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("workers", [0, 2])
def test_check_replay_can_call_tools(workers, tmp_path):
  """A tool that counts its calls fails only if it is called."""
  file = tmp_path / "counting.py"
  file.write_text(
    "N = [0]\ndef count(by: int) -> int:\n  '''Counts.\n\n  Args:\n    by: n\n"
    "  '''\n  N[0] += by\n  return N[0]\n"
  )
  with EnvironmentPool("", [f"{file}:count"], workers=workers) as pool:
    assert [type(x) for x in check_replay(pool, EXAMPLE, 0)] == [Step, Step]
    actions = [tools.made_up(*pool.tools, "hermes")]
    with pytest.raises(ValueError, match="count.*: .* could not resume"):
      check_replay(pool, EXAMPLE, 0, actions=actions)
  with EnvironmentPool("", [f"{USER}:waits"], workers=workers) as pool:
    actions = [tools.made_up(*pool.tools, "hermes")]
    _, tried, _ = check_replay(pool, EXAMPLE, 0, actions=actions)
    assert tried.info == {"tool_calls": 1, "tool_errors": 0}


def test_workers_load_neither_jax_nor_transformers(tmp_path):
  file = tmp_path / "loaded.py"
  file.write_text(
    "import sys\ndef loaded() -> str:\n  'Says it.'\n"
    "  return str({'jax', 'transformers'} & {*sys.modules})\n"
  )
  with EnvironmentPool("", [f"{file}:loaded"], workers=1) as pool:
    (step,) = ask(pool, CALL % ("loaded", ""))
  assert step.observation[0]["content"] == "set()"
