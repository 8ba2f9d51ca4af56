"""How a run directory is opened."""

import errno
import tempfile

import pytest

from grpojax.training import opening


def test_a_directory_that_is_not_shared_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(opening, "SEEN_WITHIN", 0)
  with pytest.raises(ValueError, match="storage that all of them share"):
    opening._check_shared(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  opening._check_shared(tmp_path)


def test_one_that_may_not_write_there_says_so(tmp_path, monkeypatch):
  def refuse(*args, **options):
    raise OSError(errno.EROFS, "Read-only file system")

  (tmp_path / "config.json").write_text("{}")
  monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
  with pytest.raises(ValueError, match="cannot be written: Read-only file"):
    opening._check_shared(tmp_path)


def test_code_that_was_edited_is_other_code(tmp_path):
  (tmp_path / "core").mkdir()
  file = tmp_path / "core" / "step.py"
  file.write_text("x = 1\n")
  before = opening._code(tmp_path)
  file.write_text("x = 2\n")
  assert before.startswith("core/step.py: ")
  assert opening._code(tmp_path) not in ("", before)
  assert "training/opening.py: crc32 " in opening._code()
