"""Several processes give the same results as a single one, and end together.

These are real processes on virtual CPU devices, connected over loopback. Shared
storage and a network need real hosts.
"""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

import jax
import mesh_runs
import numpy as np
import pytest
from run_helpers import environment, joined, untimed

from grpojax.models import huggingface as hf
from grpojax.runtime import checkpoint
from grpojax.runtime.files import records
from grpojax.runtime.processes import distributed

RUNS = pathlib.Path(mesh_runs.__file__)
STEPS = 4
SETTINGS = {
  "steps": STEPS,
  "mesh.data": 2,
  "mesh.fsdp": 4,
  "checkpoint.every": 2,
  "log.samples_every": 1,
}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
  """Returns a function that makes command lines for a shared model."""
  models = tmp_path_factory.mktemp("models")
  model = mesh_runs.make_model(models, **mesh_runs.MODELS["llama"])

  def command_line(changes):
    settings = mesh_runs.SETTINGS | SETTINGS | {"model.path": model} | changes
    text = lambda x: ",".join(map(str, x)) if isinstance(x, tuple) else x
    return [f"--config.{name}={text(x)}" for name, x in settings.items()]

  return command_line


@contextlib.contextmanager
def started(directory, count, words, of_1=()):
  """Starts the processes of a run on 8 devices, and kills them at the end.

  Their output goes to files next to the run directory; `of_1` are additional
  arguments of process 1.
  """
  env = environment(JAX_NUM_CPU_DEVICES=str(8 // count))
  command = [sys.executable, "-m", "grpojax.train", f"--run_dir={directory}"]
  processes = []
  for i, flags in enumerate(joined(count)):
    own = [*flags, *of_1] if i == 1 else flags
    with (
      open(log(directory, i, "out"), "w") as out,
      open(log(directory, i, "err"), "w") as err,
    ):
      command_line = [*command, *words, *own]
      process = subprocess.Popen(command_line, env=env, stdout=out, stderr=err)
      processes.append(process)
  try:
    yield processes
  finally:
    for process in processes:
      process.kill()
      process.wait()


def log(directory, i, kind):
  return pathlib.Path(directory).with_suffix(f".{i}.{kind}")


def printed(directory, i=0, kind="out"):
  """The output of a process without messages of Gloo."""
  lines = log(directory, i, kind).read_text().splitlines(keepends=True)
  # Gloo's threads may split a line.
  return "".join(x for x in lines if "[Gloo]" not in x and "ranks" not in x)


def ended(processes, timeout=240):
  """Waits for processes; returns their exit codes."""
  end = time.monotonic() + timeout
  return [p.wait(max(end - time.monotonic(), 0.1)) for p in processes]


def run(directory, count, words, **options):
  with started(directory, count, words, **options) as processes:
    codes = ended(processes)
  assert codes == [0] * count, "\n".join(
    printed(directory, i, "err")[-3000:] for i in range(count)
  )


def results(directory):
  rows = untimed(records.read_jsonl(directory / "metrics.jsonl"))
  samples, failures = (
    records.read_jsonl(directory / f"{name}.jsonl")
    for name in ("samples", "failures")
  )
  return rows, samples, hf.load_params(directory / "model"), failures


def parted(samples):
  """Splits samples into exact fields and numbers rounded by a mesh."""
  names = [n for n in samples[0] if n.endswith("logprobs") or n == "advantage"]
  # null (text of an environment) becomes nan
  array = lambda x: np.asarray(x, np.float64)
  numbers = [np.hstack([array(row[name]) for name in names]) for row in samples]
  return [
    {k: v for k, v in x.items() if k not in names} for x in samples
  ], numbers


def same(one, other):
  """Samples and failures equal, metrics and parameters to float tolerance."""
  texts, numbers = parted(one[1])
  assert texts and texts == parted(other[1])[0]
  for ours, theirs in zip(numbers, parted(other[1])[1], strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)  # four digits
  assert one[3] == other[3]
  assert len(one[0]) == len(other[0])
  for a, b in zip(one[0], other[0], strict=True):
    assert a.keys() == b.keys()
    for name, value in a.items():
      if value is not None:  # infinite in both
        value = pytest.approx(value, rel=1e-4, abs=1e-5)
      assert b[name] == value, name
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5),
    one[2],
    other[2],
  )


CASES = {
  "dense": "",
  "adapters": "lora.rank=2",
  "sampling on another mesh": (
    "mesh.data=1 mesh.tensor=2 mesh.sampling_tensor=1"
  ),
  "prompts by difficulty": (
    "data.options.size=30 difficulty.priority=spread difficulty.rows=2 "
    "difficulty.importance_weights=True"
  ),
  "auto": (
    "group_size=auto auto_group_size.start=8 auto_group_size.largest=16 "
    "batch_size=8 diagnostics.every=1 optim.micro_batches=2 optim.minibatches=1"
  ),
  "environment": (
    f"environment.path={RUNS} environment.max_turns=3 environment.credit=turn "
    "environment.max_observation=16 reward.functions=environment "
    "sampling.max_new_tokens=96 sampling.parts=2 environment.workers=1 "
    "loss.beta=0.0"
  ),
  "fresh prompts": (
    "filter_groups.enable=True filter_groups.gen_parts=2 loss.truncated=drop "
    f"reward.functions={RUNS}:rare loss.beta=0.1 model.reference_every=1 "
    "model.reference_mix=0.5"
  ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_several_processes_equal_a_single_one(case, words, tmp_path):
  settings = words(dict(x.split("=", 1) for x in CASES[case].split()))
  run(tmp_path / "one", 1, settings)
  one = results(tmp_path / "one")
  for count in (2, 4) if case == "dense" else (2,):
    run(tmp_path / str(count), count, settings)
    same(one, results(tmp_path / str(count)))
    for i in range(1, count):  # only the first process prints
      assert printed(tmp_path / str(count), i) == ""


SLOW = """
import time
from mesh_runs import digits

def slow(prompt, completion, example):
  time.sleep(0.02)
  if len(completion) % 5 == 3:
    raise ValueError("on whichever host it is")
  return digits(prompt, completion, example)
"""
LONG = {"steps": 8, "checkpoint.every": 3, "eval.every": 100}


@pytest.fixture(scope="module")
def slow(words, tmp_path_factory):
  """The command line of a run with steps of a second, and its results."""
  directory = tmp_path_factory.mktemp("slow")
  file = directory / "rewards.py"
  file.write_text(
    f"import sys\nsys.path.insert(0, {str(RUNS.parent)!r})\n{SLOW}"
  )
  settings = words(LONG | {"reward.functions": (f"{file}:slow",)})
  run(directory / "whole", 2, settings)
  whole = results(directory / "whole")
  assert any(row.get("reward_failures") for row in whole[0])
  return settings, whole


def steps_of(directory):
  """The last step in metrics.jsonl so far."""
  with contextlib.suppress(OSError):
    rows = records.read_jsonl(directory / "metrics.jsonl")
    return max((row["step"] for row in rows), default=0)
  return 0


def wait_for(directory, step, processes):
  """Waits until a step is finished or a process has ended."""
  end = time.monotonic() + 240
  while steps_of(directory) < step and time.monotonic() < end:
    if any(p.poll() is not None for p in processes):
      break
    time.sleep(0.02)


TERM = signal.SIGTERM
KILL = signal.SIGKILL


@pytest.mark.parametrize(
  "blows",  # (number of processes, step, signal, process that gets it)
  [
    pytest.param([(2, 2, TERM, 1), (2, 5, KILL, 1)], marks=pytest.mark.slow),
    pytest.param([(2, 2, TERM, 1), (4, 4, TERM, 3)], marks=pytest.mark.long),
    pytest.param([(2, 4, KILL, 1), (2, 6, KILL, 0)], marks=pytest.mark.long),
  ],
)
def test_a_signal_to_one_process_ends_all_and_any_number_resumes(
  slow, blows, tmp_path
):
  settings, whole = slow
  directory = tmp_path / "run"
  for count, after, number, victim in blows:
    with started(directory, count, settings) as processes:
      wait_for(directory, after, processes)
      assert steps_of(directory) >= after, printed(directory, 0, "err")
      processes[victim].send_signal(number)
      codes = ended(processes, distributed.HEARTBEAT + 30)
    if number == TERM:
      assert codes == [75] * count, printed(directory, 0, "err")
      saved = checkpoint.complete(directory / "checkpoints")[-1]
      assert f"saved step {saved}" in printed(directory) and saved >= after
    else:
      assert codes[1 - victim] not in (0, 75)
      err = printed(directory, 1 - victim, "err")
      # Reported by a collective or by JAX.
      assert "of this run is gone" in err or "another task died" in err
  run(directory, 1, settings)
  same(whole, results(directory))


@pytest.mark.slow
def test_processes_with_different_settings_are_refused(words, tmp_path):
  directory = tmp_path / "run"
  of_1 = ["--config.model.path=nowhere"]
  with started(directory, 2, words({}), of_1=of_1) as processes:
    assert ended(processes, 60) == [1, 1]
  for i in range(2):
    err = printed(directory, i, "err")
    assert "processes 0 and 1 differ in configuration" in err
  assert not directory.exists()
