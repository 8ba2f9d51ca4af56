"""A run with a full disk stops with an error line, and resumes."""

import errno
import functools

import pytest
from orbax.checkpoint._src.path import atomicity
from run_helpers import refusal, rows_of

from grpojax import train
from grpojax.runtime import checkpoint
from grpojax.runtime.files import records

SHORT = {"steps": 6, "checkpoint.every": 2, "eval.every": 6, "eval.samples": 0}


def full(*args):
  raise OSError(errno.ENOSPC, "No space left on device")


def no_room_for_checkpoints(patch):
  end = atomicity.AtomicRenameTemporaryPath.finalize

  async def finalize(self):
    if self.get_final().name == "4":
      full()
    await end(self)

  patch.setattr(atomicity.AtomicRenameTemporaryPath, "finalize", finalize)
  # Steps of a millisecond would end before the save.
  wait = functools.partial(checkpoint.check, timeout=60.0)
  patch.setattr(checkpoint, "check", wait)


def no_room_for_records(patch):
  append = records.append_jsonl

  def append_jsonl(path, row):
    (full if row["step"] == 4 else append)(path, row)

  patch.setattr(records, "append_jsonl", append_jsonl)


@pytest.mark.slow  # two runs
@pytest.mark.parametrize(
  "no_room_for", [no_room_for_checkpoints, no_room_for_records]
)
def test_a_run_resumes_after_a_full_disk(
  no_room_for, toy_task, toy_model, tmp_path, monkeypatch, capfd
):
  run = tmp_path / "run"
  argv = [*toy_task.arguments(toy_model, **SHORT), f"--run_dir={run}"]
  with monkeypatch.context() as patch:
    no_room_for(patch)
    text = refusal(train, *argv)
  assert "No space left on device" in text
  assert f"last good checkpoint is {run}/checkpoints/2" in text
  assert rows_of(run)[-1]["step"] < 6
  files = [path.name for path in (run / "checkpoints").iterdir()]
  assert files == ["2"]
  assert "Traceback" not in capfd.readouterr().err
  train.main(argv)
  assert "resuming after step 2" in capfd.readouterr().out
  assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4, 5, 6]
