import decimal
import fractions
import json
import os
import pathlib
import signal
import time

import numpy as np
import pytest
from run_helpers import start

from grpojax.rewards import worker
from grpojax.rewards.pool import Failure, Pool, all_failures, submit_groups
from grpojax.runtime.processes import workers

USER = str(pathlib.Path(__file__).with_name("user_rewards.py"))
BEHAVE = f"{USER}:behave"
PROMPT = f"{USER}:length_of_prompt"


def send(pool, *completions):
  """Submits completions of different prompts."""
  return pool.submit([[("p", c, {"answer": "7"})] for c in completions], 1)


def compute(pool, *completions):
  return pool.collect([send(pool, *completions)])


def reasons(result):
  return [x.reason for (failures,) in result.failures for x in failures]


def same(array, values):
  np.testing.assert_array_equal(array[:, 0], np.array(values, float))


@pytest.fixture(scope="module", params=[0, 2])
def pool(request):
  options = {"behave": {"scale": 2.0}}
  settings = {"weights": (10, 100), "workers": request.param, "timeout": 30}
  with Pool([BEHAVE, PROMPT], options, **settings) as pool:
    yield pool


def test_results_are_in_order(pool):
  result = compute(pool, *map(str, range(40)), "none")
  same(result.rewards, [*(20 * i + 100 for i in range(40)), 100])
  same(result.values["behave"], [*range(0, 80, 2), None])
  same(result.values["length_of_prompt"], [1] * 41)
  assert not result.failed.any() and reasons(result) == []
  assert compute(pool).rewards.shape == (0, 1)
  first = send(pool, *"12345")
  second = send(pool, *"678")
  same(pool.collect([second]).values["behave"], [12, 14, 16])
  same(pool.collect([first]).values["behave"], [2, 4, 6, 8, 10])


@pytest.mark.parametrize(
  "completion, reason",
  [
    ("raise", "raised RuntimeError: no idea\nreally (user_rewards.py:"),
    ("leave", "raised SystemExit: bye"),
    ("base", "raised GeneratorExit: (its message cannot be shown)"),
    ("text", "returned str, which is not a number"),
    ("nan", "returned nan"),
    ("-inf", "returned -inf"),
    ("1e15", "returned 2e+15, more than 1e+15"),
    ("4e14", "is 8e+15, more than 1e+15"),  # the weighted sum
    ("five", "raised ValueError"),
  ],
)
def test_failures_are_reported_and_isolated(pool, completion, reason):
  result = compute(pool, completion, "4")
  same(result.rewards, [None, 180])
  same(result.values["length_of_prompt"], [1, 1])
  same(result.failed, [1, 0])
  [[failure]], _ = result.failures
  name = "weighted sum" if reason.startswith("is ") else "behave"
  assert failure._replace(reason="") == Failure(name, "", "p", completion)
  assert failure.reason.startswith(reason)


def test_rewards_of_any_numeric_type():
  half = (np.array([[0.5]]), np.float16(0.5), decimal.Decimal("0.5"))
  for value in (*half, fractions.Fraction(1, 2)):
    assert worker._outcome(value) == (0.5, None, {}), value
    numbers = worker._outcome({"score": 1, "more": value}).extras
    assert numbers == {"more": 0.5}, value
  assert worker._outcome(10**400).error == "returned inf"
  assert worker._outcome({"score": 1, "more": 10**400}) == (1.0, None, {})
  text = np.array(["0.5"])
  for value in ("0.5", b"0.5", text, {0.5}, [0.5], np.zeros(2), 0.5j):
    value, error, _ = worker._outcome(value)
    assert value is None and "not a number" in error


@pytest.mark.parametrize("workers", [0, 1])
def test_changes_of_an_example_are_not_shared(workers):
  example = {"seen": []}  # the list is in all examples of the prompt
  group = [("p", str(i), dict(example)) for i in range(3)]
  functions = [f"{USER}:changes", f"{USER}:changes_all"]
  with Pool(functions, workers=workers) as pool:
    result = pool.collect([pool.submit([group], 3)])
  assert [x.tolist() for x in result.values.values()] == [[[1, 1, 1]]] * 2
  assert example == {"seen": []}


@pytest.mark.slow
def test_lost_workers_are_replaced():
  bad = {
    "sleep": "no result after 1 s",
    "hang": "no result after 1 s",
    "exit": "ended its process with code 3",
    "crash": "ended its process by SIGSEGV",
    "fork": "no result after 1 s",
    "memory": "raised MemoryError",
  }
  mixed = [c for i, name in enumerate(bad) for c in (str(i), name)]
  with Pool([PROMPT, BEHAVE], workers=2, timeout=1) as pool:
    result = compute(pool, *mixed)
  same(result.values["length_of_prompt"], [1] * 12)
  same(result.rewards, [x for i in range(6) for x in (1 + i, None)])
  failures = all_failures(result)
  assert [x.completion for x in failures] == [*bad]
  for failure in failures:
    assert failure.function == "behave"
    assert failure.reason.startswith(bad[failure.completion])


def test_time_is_limited_without_workers():
  def others(*_):
    raise AssertionError

  before = signal.signal(signal.SIGALRM, others)
  try:
    with Pool([PROMPT, BEHAVE], timeout=0.2) as pool:
      result = compute(pool, "1", "sleep", "2", "hang", "loop", "3")
      assert signal.getsignal(signal.SIGALRM) is others
      assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
  finally:
    signal.signal(signal.SIGALRM, before)
  same(result.rewards, [2, None, 3, None, None, 4])
  same(result.values["length_of_prompt"], [1] * 6)
  assert reasons(result) == ["no result after 0.2 s"] * 3


def test_workers_do_not_load_jax_and_pass_any_text():
  text = 'quote " \\ \n line \u2028 é \ud800 ' + "x" * 300_000
  example = {"answer": "7", "bonus": np.int64(2), "ids": np.arange(3)}
  built_in = ("exact_answer", "math_answer", "format", "unfinished")
  items = [("p", "jax", {"answer": "7"}), ("p", "pipes", {"answer": "7"})]
  items = [[item] for item in [*items, (text, "3", example)]]
  with Pool([BEHAVE, PROMPT, *built_in], workers=1) as pool:
    result = pool.collect([pool.submit(items, 1)])
    with pytest.raises(ValueError, match="only JSON.*object"):
      pool.submit([[("", "", {"x": object()})]], 1)
  same(result.values["behave"], [0, 0, 3])
  assert result.values["length_of_prompt"][2] == len(text) + 2


def test_forks_and_prints_do_not_shift_rewards():
  odd = ["twice 1 0", "twice 2 0.05", "slow3", "garbage4", "closes", "later"]
  odd += ["slow7", *["twice 8 0", "9"] * 10, "twice 8 0.02", "slow9"]
  expected = [1, 2, 3, 4, 5, 6, 7, *[8, 9] * 10, 8, 9]
  with Pool([BEHAVE, PROMPT], workers=1, timeout=30) as pool:
    same(compute(pool, *odd).values["behave"], expected)
    same(compute(pool, "1", "2").values["behave"], [1, 2])


def test_only_well_formed_answers_with_the_id_count():
  outcomes = [(1.0, None, {}), (0.5, None, {"acc": 0.5}), (None, "raised", {})]
  good = [json.dumps(["me", x]).encode() for x in outcomes]
  bad = [b'["you", [1.0, null, {}]]', b"[1.0, null]", b'["me", 1.0]']
  bad += [b'["me", [1.0, null]]', b'["me", [1.0, null, {"acc": "1"}]]']
  bad += [b'["me", [1.0, null, []]]', b'["me", [[], null, {}]]']
  bad += [b'["me", [1.0, 3, {}]]', b"", b"\xff", b"[" * 10**5]
  read = workers.read_answers(bad + good + bad, "me", worker.parse)
  assert read == outcomes


def test_neighbouring_jobs_have_different_prompts():
  """Otherwise a single bad example could make the pool give up a batch."""
  examples = [{"prompt_text": p, "answer": ""} for p in "abc"]
  ones = np.ones((3, 4), np.int32)
  with Pool([BEHAVE]) as pool:
    texts = [["1"] * 4] * 3
    sent = submit_groups(pool, examples, texts, ones, ones > 0, 8)
  items = [item for job in sent.jobs for item in job.content[1]]
  assert "".join(prompt for prompt, _, _ in items) == "abc" * 4


def test_forked_children_do_not_continue_the_program(tmp_path):
  """Forks while a file is loaded, and while a function is called."""
  file = tmp_path / "mine.py"
  file.write_text("import os\nos.fork()\ndef reward(*args): return 1.0\n")
  names = [f"{file}:reward", BEHAVE]
  program = start(f"""
    from grpojax.rewards.pool import Pool
    with Pool({names!r}) as pool:
      sent = pool.submit([[("", "twice 3 0.1", {{}})]], 1)
      print(pool.collect([sent]).rewards.item(), flush=True)
  """)
  # The pipes close once the children have ended too.
  assert program.communicate(timeout=60)[0] == "4.0\n"


@pytest.mark.slow
def test_check_signals_can_abandon_rewards(tmp_path):
  """With workers while it waits, without them between completions."""
  began = time.monotonic()
  done = tmp_path / "done"
  calls = []

  def check_signals():
    calls.append(time.monotonic())
    if len(calls) == 3:
      raise InterruptedError

  with Pool([BEHAVE], workers=2, timeout=40) as pool:
    first = send(pool, "sleep", "hang", f"touch {done}")
    with pytest.raises(InterruptedError):
      pool.collect([first], check_signals)
    assert max(np.diff(calls)) < 1
    same(compute(pool, "1", "2", "3").rewards, [1, 2, 3])
    send(pool, *["hang"] * 9)
    time.sleep(0.2)
  assert not done.exists()
  assert time.monotonic() < began + 30
  calls.clear()
  with Pool([BEHAVE]) as pool, pytest.raises(InterruptedError):
    pool.collect([send(pool, *"12345")], check_signals)
  assert len(calls) == 3


@pytest.mark.parametrize(
  "workers", [0, pytest.param(1, marks=pytest.mark.slow)]
)
def test_the_pool_gives_up_a_batch_that_always_hangs(workers):
  with Pool([BEHAVE], workers=workers, timeout=0.1) as pool:
    errors = reasons(compute(pool, *["sleep"] * 30))
    assert errors[: pool.patience] == ["no result after 0.1 s"] * 8
    assert set(errors[8:]) == {"not tried: 8 jobs in a row had no result"}
    if not workers:
      return
    # A result in between resets the count, and so does a new batch.
    mixed = compute(pool, *["exit"] * 5, "1", *["exit"] * 5, "2")
    same(mixed.rewards, [*[None] * 5, 1, *[None] * 5, 2])


def test_a_worker_that_cannot_start_is_an_error(tmp_path, monkeypatch):
  file = tmp_path / "mine.py"
  file.write_text(
    "import os\nif os.environ['PARENT'] != str(os.getpid()):\n"
    "  raise KeyError('here')\ndef reward(prompt, completion, example): pass\n"
  )
  monkeypatch.setenv("PARENT", str(os.getpid()))
  with pytest.raises(
    ValueError, match=r"did not start: .*KeyError: 'here' \(mine.py:3\)"
  ):
    Pool([f"{file}:reward"], workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(which):
  completions = ["hang"] if which == signal.SIGKILL else ["sleep", "hang"] * 4
  program = start(f"""
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it
    from grpojax.rewards.pool import Pool
    with Pool([{BEHAVE!r}], workers=2, timeout=600) as pool:
      batch = pool.submit([[("", c, {{}})] for c in {completions!r}], 1)
      time.sleep(0.5)  # until the workers are busy
      print("ready", flush=True)
      pool.collect([batch])
  """)
  assert program.stdout.readline() == "ready\n"
  os.killpg(program.pid, which)
  # Returns once all workers have closed their pipes.
  _, errors = program.communicate(timeout=60)
  assert program.returncode == -which
  if which == signal.SIGKILL:
    assert errors == ""
    return
  # A single interrupt; it may have come while handling an empty queue.
  assert errors.count("\nKeyboardInterrupt") == 1
  assert errors.count("Traceback") == 1 + errors.count("queue.Empty")
