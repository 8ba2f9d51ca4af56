"""Unwritable directories and full disks."""

import errno
import fcntl
import os
import pathlib
import re
import shutil

import pytest

from grpojax.runtime.files import disk


def test_checks_change_no_files(tmp_path):
  for path in (tmp_path, tmp_path / "new", tmp_path / "a" / "b" / "c"):
    disk.check_writable(path, "--out")
  (tmp_path / "old.json").write_text("old")
  (tmp_path / "link").symlink_to(tmp_path / "old.json")
  for name in ("new.json", "old.json", "link"):
    disk.check_file(tmp_path / name, "--out")
  assert sorted(os.listdir(tmp_path)) == ["link", "old.json"]
  assert (tmp_path / "link").read_text() == "old"


@pytest.mark.parametrize(
  "check, name, reason",
  [
    (disk.check_writable, "file/below", "Not a directory"),
    (disk.check_writable, "a/" + "x" * 250, "File name too long"),
    (disk.check_writable, "x" * 240, "File name too long"),  # while written
    (disk.check_writable, "dangling", "No such file or directory"),
    (disk.check_writable, "\udcff", "it is no UTF-8 text"),
    (disk.check_writable, "gs://bucket/x.json", "is not a path"),
    (disk.check_file, "pipe", "is no regular file"),
    (disk.check_file, "x" * 250, "File name too long"),  # with its suffix
    (disk.check_file, "", "is a directory"),
    (disk.check_file, "pipe/x", "its directory does not exist"),
  ],
)
def test_unwritable_paths(tmp_path, monkeypatch, check, name, reason):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").touch()
  (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
  os.mkfifo(tmp_path / "pipe")
  before = sorted(tmp_path.iterdir())
  with pytest.raises(ValueError, match=f"--out=.*{reason}"):
    check(pathlib.Path(name), "--out")
  assert sorted(tmp_path.iterdir()) == before


def test_only_errors_of_the_disk_are_messages():
  with pytest.raises(SystemExit, match="error: .*No space left"), disk.errors():
    raise OSError(errno.ENOSPC, "No space left on device")
  with pytest.raises(SystemExit, match="error: gone"), disk.errors():
    raise disk.WriteFailed("gone")
  for other in (FileNotFoundError(errno.ENOENT, "bug"), KeyError("bug")):
    with pytest.raises(type(other)), disk.errors():
      raise other


def test_removal_is_repeated_while_files_appear(tmp_path, monkeypatch):
  remove = shutil.rmtree
  tries = []

  def busy(path, **options):  # fails twice, as if a thread still wrote
    tries.append(path)
    if len(tries) > 2:
      remove(path, **options)

  monkeypatch.setattr(shutil, "rmtree", busy)
  for name in ("1", "2.tmp"):
    (tmp_path / name).mkdir()
  disk.remove_all(tmp_path, "*.tmp", seconds=0.0)
  assert len(os.listdir(tmp_path)) == 2  # it gave up
  disk.remove_all(tmp_path, "*.tmp")
  assert os.listdir(tmp_path) == ["1"]


def unsupported(*args):
  raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
  "module, name, operation",
  [
    (disk, "open", "append to files"),
    (fcntl, "flock", "lock files"),
    (os, "replace", "replace files"),
    (pathlib.Path, "rename", "rename directories"),
  ],
)
def test_missing_operations(tmp_path, monkeypatch, module, name, operation):
  disk.check_keeps_runs(tmp_path / "runs" / "a", "--run_dir")
  monkeypatch.setattr(module, name, unsupported, raising=False)
  start = re.escape(f"--run_dir={tmp_path}/runs/a")
  with pytest.raises(ValueError, match=f"^{start} .* {operation} .Function"):
    disk.check_keeps_runs(tmp_path / "runs" / "a", "--run_dir")
  assert not os.listdir(tmp_path)
