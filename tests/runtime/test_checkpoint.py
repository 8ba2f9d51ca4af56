"""Checkpoints: exactness, kills, damage, wrong configs."""

import contextlib
import gc
import logging
import os
import pathlib
import random
import resource
import shutil
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from run_helpers import start

from grpojax.core.types import TrainState
from grpojax.runtime import checkpoint
from grpojax.runtime.checkpoint import stored_arrays
from grpojax.runtime.files import disk
from grpojax.runtime.processes import distributed, interrupts

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def _state(step: int, size: int = 64) -> TrainState:
  """Returns a state of 12 bytes x size that depends only on the step."""
  values = np.random.default_rng(step).standard_normal(size, np.float32)
  params = {"layers": {"q": jnp.array(values)}, "b": jnp.ones(3, jnp.bfloat16)}
  opt_state = jax.tree.map(lambda x: x + step, TX.init(params))
  key = jax.random.key(step, impl="rbg")
  counts = [jnp.int32(n) for n in (step, 32 * step, 0)]
  return TrainState(params, opt_state, key, *counts)


def _assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  assert a.key.dtype == b.key.dtype
  leaves = [jax.tree.leaves(stored_arrays.without_keys(x)) for x in (a, b)]
  for x, y in zip(*leaves, strict=True):
    x = np.asarray(x)
    y = np.asarray(y)
    assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


def _saved(folder: pathlib.Path, *steps: int) -> pathlib.Path:
  """Creates a directory with checkpoints of these steps."""
  with checkpoint.open_checkpointer(folder) as checkpointer:
    for step in steps:
      checkpoint.save(checkpointer, step, _state(step))
  return folder


def _assert_resumes(folder, step, size=64, readonly=False) -> None:
  with checkpoint.open_checkpointer(folder, readonly=readonly) as checkpointer:
    assert checkpoint.latest_step(checkpointer) == step
    restored = checkpoint.restore(checkpointer, _state(0, size))
    _assert_same(restored, _state(step, size))


def test_round_trip_keeps_the_newest_and_skips_nothing(tmp_path):
  folder = tmp_path / "checkpoints"
  with checkpoint.open_checkpointer(folder, keep=2) as ckptr:
    assert checkpoint.latest_step(ckptr) is None
    for step in (1, 2, 3, 7):
      checkpoint.save(ckptr, step, _state(step))
    checkpoint.save(ckptr, 7, _state(1))  # exists, so it stays
  abstract = jax.eval_shape(lambda: _state(0))
  with checkpoint.open_checkpointer(folder, keep=2) as ckptr:
    assert checkpoint.steps(ckptr) == checkpoint.complete(folder) == [3, 7]
    _assert_same(checkpoint.restore(ckptr, abstract), _state(7))
    _assert_same(checkpoint.restore(ckptr, _state(0), 3), _state(3))
    with pytest.raises(ValueError, match=r"step 2, only \[3, 7\]"):
      checkpoint.restore(ckptr, abstract, 2)


def test_saved_arrays_may_be_donated_at_once(tmp_path):
  state = _state(1, 300_000)
  expected = _state(1, 300_000)
  spoil = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
  with checkpoint.open_checkpointer(tmp_path) as ckptr:
    checkpoint.save(ckptr, 1, state)
    params = jax.tree.map(spoil, state.params)
    checkpoint.wait(ckptr)
    state = state.replace(params=params)
    _assert_same(checkpoint.restore(ckptr, state), expected)


def test_another_model_is_refused_by_name(tmp_path):
  state = _state(1)
  with checkpoint.open_checkpointer(_saved(tmp_path, 1)) as ckptr:
    text = r"(?s)mu/b: bfloat16.3. -> .none.*layers/q: float32.64. -> float32"
    with pytest.raises(ValueError, match=text):
      checkpoint.restore(ckptr, _state(1, 65).replace(opt_state=()))
    other = jax.random.key(1, impl="threefry2x32")
    with pytest.raises(ValueError, match="set JAX_DEFAULT_PRNG_IMPL to"):
      checkpoint.restore(ckptr, state.replace(key=other))
    like = jax.eval_shape(lambda: state.params)
    loaded = checkpoint.restore_policy(ckptr, like)
    _assert_same(state.replace(params=loaded), state)
    like["b"] = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    message = r"params/b: bfloat16\[3\] -> bfloat16"
    with pytest.raises(ValueError, match=message):
      checkpoint.restore_policy(ckptr, like)


def test_unfinished_saves_and_deletions_are_ignored_and_removed(tmp_path):
  nothing = checkpoint.open_checkpointer(tmp_path / "nothing", readonly=True)
  with pytest.raises(ValueError, match="no checkpoints"), nothing:
    pass
  folder = _saved(tmp_path, 1, 2)
  torn = folder / "5.orbax-checkpoint-tmp"
  shutil.copytree(folder / "2", torn)
  for file in torn.rglob("manifest.ocdbt"):
    file.unlink()
  shutil.rmtree(folder / "1" / "state")
  (folder / "1" / "_CHECKPOINT_METADATA").unlink()
  _assert_resumes(folder, 2, readonly=True)
  assert torn.exists()  # it may be another process's save
  _assert_resumes(folder, 2)
  assert not torn.exists()
  _assert_resumes(_saved(folder, 3), 3)
  assert sorted(os.listdir(folder)) == ["2", "3"]


# Orbax's threads outlive a failed load and warn when they end.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
  state = _state(1, 3000)
  rng = random.Random(0)
  step = tmp_path / "checkpoints" / "1"
  reference = tmp_path / "reference"
  checkpoint.save_params(reference, state.params)
  refused = {step: set(), reference: set()}
  with checkpoint.open_checkpointer(step.parent) as ckptr:
    checkpoint.save(ckptr, 1, state)
    checkpoint.wait(ckptr)
    for folder, files in refused.items():
      for file in sorted(x for x in folder.rglob("*") if x.is_file()):
        for _ in range(2 if file.stat().st_size else 0):
          whole = file.read_bytes()
          damaged = bytearray(whole)
          damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
          file.write_bytes(damaged)
          try:
            if folder == step:
              _assert_same(checkpoint.restore(ckptr, state), state)
            else:
              loaded = checkpoint.restore_params(reference, state.params)
              _assert_same(state.replace(params=loaded), state)
          except ValueError as error:
            files.add(file.parent.name)
            assert f"{folder} is damaged" in str(error)
            assert "delete that directory" in str(error)
          file.write_bytes(whole)
  assert all({"d", folder.name} <= files for folder, files in refused.items())
  gc.collect()  # while warnings are ignored


def test_swapped_arrays_are_refused_by_name(tmp_path):
  folder = _saved(tmp_path, 1, 2)
  shutil.rmtree(folder / "2" / "state")
  shutil.copytree(folder / "1" / "state", folder / "2" / "state")
  with checkpoint.open_checkpointer(folder) as ckptr:
    with pytest.raises(ValueError, match="layers/q.*changed since they were"):
      checkpoint.restore(ckptr, _state(0))
  shutil.rmtree(folder / "2")  # as the message advises
  _assert_resumes(folder, 1)


def test_notes_are_saved_and_metadata_checked(tmp_path):
  notes = {"baseline": {"accuracy": 0.25}, "data": {"train": [3, "abc"]}}
  with checkpoint.open_checkpointer(tmp_path) as ckptr:
    checkpoint.save(ckptr, 1, _state(1), notes)
    checkpoint.save(ckptr, 2, _state(2))
    checkpoint.wait(ckptr)
    assert checkpoint.read_notes(ckptr, 1) == notes
    assert checkpoint.read_notes(ckptr, 2) == {}
    with pytest.raises(ValueError, match="no checkpoint of step 3"):
      checkpoint.read_notes(ckptr, 3)
  metadata = tmp_path / "1" / "_CHECKPOINT_METADATA"
  metadata.write_text(metadata.read_text().replace("0.25", "0.35"))
  with checkpoint.open_checkpointer(tmp_path, readonly=True) as ckptr:
    with pytest.raises(ValueError, match="damaged.*its notes have changed"):
      checkpoint.read_notes(ckptr, 1)
  for text in ("[]", "null", "", "[" * 10**5):
    metadata.write_text(text)
    with pytest.raises(ValueError, match="1 is damaged .*delete that dir"):
      with checkpoint.open_checkpointer(tmp_path):
        pass


@pytest.mark.parametrize("ended", ["here", "elsewhere", "by Orbax"])
def test_an_error_of_this_process_is_raised(ended, tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint, "_POLL", 0.02)
  monkeypatch.setattr(checkpoint, "_logged_errors", [])
  codes = []
  monkeypatch.setattr(interrupts, "skip_cleanup_at_exit", codes.append)
  polls = []

  def result(timeout):
    polls.append(timeout)
    if ended == "by Orbax" and timeout:
      raise TimeoutError("its own")
    time.sleep(timeout)
    path = "/orbax/checkpoint" if ended == "here" else "/elsewhere"
    error = OSError("the disk is full")
    info = (type(error), error, None)
    logging.getLogger("absl").handle(
      logging.LogRecord("absl", logging.ERROR, path, 1, "failed", (), info)
    )
    if len(polls) < 4:
      raise TimeoutError

  with checkpoint.open_checkpointer(tmp_path) as ckptr:
    monkeypatch.setattr(distributed, "count", lambda: 2)
    ckptr.in_flight = types.SimpleNamespace(result=result)
    assert not checkpoint.check(ckptr)
    if ended == "elsewhere":
      checkpoint.wait(ckptr)
      assert polls == [0.0, 0.02, 0.02, 0.02]
    else:
      message = {"here": "the disk is full", "by Orbax": "its own"}[ended]
      with pytest.raises(disk.WriteFailed, match=message):
        checkpoint.wait(ckptr)
      assert len(polls) == (1 if ended == "here" else 2)
      assert codes == [1]
      checkpoint.wait(ckptr)  # raises no second time
    monkeypatch.setattr(distributed, "count", lambda: 1)


@contextlib.contextmanager
def _no_file_larger_than(size: int):
  """Simulates a full disk for this process."""
  old = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


INTERRUPTED = """
import os, signal, sys, threading, time
from orbax.checkpoint._src.path import atomicity

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it
end = atomicity.AtomicRenameTemporaryPath.finalize
async def slow(self):
  if self.get_final().name == "1":
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(0.5)
  await end(self)
atomicity.AtomicRenameTemporaryPath.finalize = slow

from grpojax.runtime import checkpoint
from runtime import test_checkpoint
try:
  with checkpoint.open_checkpointer(sys.argv[1]) as ckptr:
    checkpoint.save(ckptr, 1, test_checkpoint._state(1))
    checkpoint.wait(ckptr)
except KeyboardInterrupt:
  sys.exit("interrupted")
"""


@pytest.mark.slow
def test_an_interrupt_while_a_save_is_in_flight(tmp_path):
  program = start(INTERRUPTED, tmp_path)
  assert program.communicate() == ("", "interrupted\n")
  assert program.returncode == 1
  _assert_resumes(tmp_path, 1, readonly=True)


def test_parameters_are_saved_once(tmp_path):
  path = tmp_path / "reference"
  params = _state(1, 3000).params
  stored_arrays.describe(params)  # compiles now, as above
  with _no_file_larger_than(2000):
    with pytest.raises(disk.WriteFailed, match="reference could not be saved"):
      checkpoint.save_params(path, params)
  checkpoint.save_params(path, {"a": jnp.arange(3.0)})
  checkpoint.save_params(path, {"a": jnp.zeros(3)})
  loaded = checkpoint.restore_params(path, {"a": jnp.zeros(3)})
  np.testing.assert_array_equal(loaded["a"], np.arange(3.0))
  with pytest.raises(ValueError, match=r"a: float32\[3\] -> float32\[4\]"):
    checkpoint.restore_params(path, {"a": jnp.zeros(4)})


SIZE = 1_000_000  # 12 MB a checkpoint
# Resumes, then saves as fast as possible until it is killed.
TRAIN = """
import sys
from grpojax.runtime import checkpoint
from runtime.test_checkpoint import SIZE, _assert_same, _state
with checkpoint.open_checkpointer(sys.argv[1]) as ckptr:
  if step := checkpoint.latest_step(ckptr) or 0:
    _assert_same(checkpoint.restore(ckptr, _state(0, SIZE)), _state(step, SIZE))
  while True:
    step += 1
    checkpoint.save(ckptr, step, _state(step, SIZE))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_run_that_resumes(tmp_path):
  clock = random.Random(0)
  previous = 0
  torn = 0
  for _ in range(4):
    child = start(TRAIN, tmp_path)
    try:
      for _ in range(3):  # starts of saves
        line = child.stdout.readline()
        assert line, "the resumed process failed"
      time.sleep(clock.uniform(0, 0.1))
    finally:
      child.kill()
      child.wait()
    torn += any("tmp" in p.name for p in tmp_path.iterdir())
    step = checkpoint.complete(tmp_path)[-1]
    _assert_resumes(tmp_path, step, SIZE, readonly=True)
    # Save k begins only when save k - 1 is complete.
    assert step >= int(line) - 1 > previous
    previous = step
  assert torn, "no kill came during a save"


def test_messages_of_a_failed_load_are_filtered():
  for text, shown in (
    ("<Task coro=<f() defined at /orbax/checkpoint/x.py>", False),
    ("<Future exception=ValueError('[tensorstore_spec=...", False),
    ("<Task coro=<users()>", True),
  ):
    record = logging.makeLogRecord({"name": "asyncio", "msg": text})
    assert bool(logging.getLogger("asyncio").filter(record)) == shown
