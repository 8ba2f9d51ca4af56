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


def test_processes_that_read_other_examples_are_refused(monkeypatch):
  def checked(count, fingerprint):
    split = splits.Split(["?"] * count, 0, fingerprint)
    return start.Checked(None, None, None, split, split, None)

  said = []
  tell = lambda own: said.append(own) or said
  monkeypatch.setattr(distributed, "gather", tell)
  for _ in range(2):
    open_run._check_data(checked(7, "a"))
  with pytest.raises(ValueError, match="differ in the train split: 7 examples"):
    open_run._check_data(checked(8, "a"))
  said.pop()
  with pytest.raises(ValueError, match="0 and 2 differ in the train split"):
    open_run._check_data(checked(7, "b"))


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
