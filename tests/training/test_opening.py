"""How a run directory is opened."""

import contextlib
import errno
import tempfile

import pytest

from grpojax.runtime.processes import distributed
from grpojax.runtime.terminal import screen
from grpojax.runtime.text import tokenizer
from grpojax.training.data import splits
from grpojax.training.run import open_run, start


def test_a_directory_that_is_not_shared_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(open_run, "SEEN_WITHIN", 0)
  with pytest.raises(ValueError, match="storage that all of them share"):
    open_run._check_shared(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  open_run._check_shared(tmp_path)


@pytest.mark.parametrize(
  "other, text",
  [
    ("6 examples\nfingerprint a", "7 examples and 6 examples"),
    ("7 examples\nfingerprint b", "fingerprint a and fingerprint b"),
  ],
)
def test_processes_that_read_other_examples_are_refused(
  other, text, tmp_path, settings_with, monkeypatch
):
  split = splits.Split([0] * 7, 0, "a")
  settings = settings_with()
  run = start.Run(settings, tmp_path, None, None, split, split, None)
  monkeypatch.setattr(start, "check", lambda *_: run)
  second = {"the train split": "7 examples\nfingerprint a"}
  second["the test split"] = other
  monkeypatch.setattr(distributed, "gather", lambda own: [own, second])
  with contextlib.ExitStack() as stack:
    with pytest.raises(SystemExit, match=f"differ in the test split: {text}"):
      quiet = screen.Screen()
      open_run.open_all(settings, tmp_path, stack, print, print, quiet)


def test_all_processes_have_the_first_ones_date(
  tmp_path, settings_with, monkeypatch
):
  def on_main(function):
    return "26 Jul 2024" if function is tokenizer.today else function()

  def check(*_):
    raise ValueError(_[-1])

  monkeypatch.setattr(distributed, "on_main", on_main)
  monkeypatch.setattr(start, "check", check)
  with contextlib.ExitStack() as stack:
    with pytest.raises(SystemExit, match="26 Jul 2024"):
      quiet = screen.Screen()
      open_run.open_all(settings_with(), tmp_path, stack, print, print, quiet)


def test_one_that_may_not_write_there_says_so(tmp_path, monkeypatch):
  def refuse(*args, **options):
    raise OSError(errno.EROFS, "Read-only file system")

  (tmp_path / "config.json").write_text("{}")
  monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
  with pytest.raises(ValueError, match="cannot be written: Read-only file"):
    open_run._check_shared(tmp_path)


def test_code_that_was_edited_is_other_code(tmp_path):
  (tmp_path / "core").mkdir()
  file = tmp_path / "core" / "step.py"
  file.write_text("x = 1\n")
  before = open_run._code(tmp_path)
  file.write_text("x = 2\n")
  assert before.startswith("core/step.py: ")
  assert open_run._code(tmp_path) not in ("", before)
  assert "training/run/open_run.py: crc32 " in open_run._code()
