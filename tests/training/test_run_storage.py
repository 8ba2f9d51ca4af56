"""Run directories on gs://, with fsspec's file system in memory."""

import errno
import fcntl
import json
import os
import shutil
import signal
import uuid

import fsspec
import pytest
from fsspec.implementations import dirfs

from grpojax.runtime.files import disk, run_storage
from grpojax.runtime.processes import distributed, interrupts
from grpojax.training.config import default_config, from_config
from grpojax.training.run import open_run

opened = run_storage.opened


@pytest.fixture
def url(monkeypatch, tmp_path):
  url_to_fs = fsspec.core.url_to_fs
  monkeypatch.setattr(
    fsspec.core, "url_to_fs", lambda x: url_to_fs(x.replace("gs:", "memory:"))
  )
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  run_storage._cached_copy.cache_clear()
  return f"gs://bucket-{uuid.uuid4().hex}/runs/a"


@pytest.fixture
def bucket(url):
  """The files of the run in the bucket."""
  fs, path = fsspec.core.url_to_fs(url)
  return dirfs.DirFileSystem(path, fs)


def write(directory, **files):
  for name, text in files.items():
    path = directory / name.replace("__", "/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def names(bucket):
  return sorted(bucket.find(""))


def refuse(kind, text):
  def refuse(*args):
    raise kind(text)

  return refuse


def test_files_are_uploaded_and_copied_again(url, bucket):
  with opened(url) as (first, sync):
    write(first, metrics="1\n", model__weights="w", _tmp="0")
    write(first, **{"config.json": "{}", ".hidden": "no"})
    sync()
    assert bucket.read_text("metrics") == "1\n"
    (first / "_tmp").unlink()
    write(first, metrics="1\n2\n")
  assert not first.exists()
  assert names(bucket) == ["config.json", "metrics", "model/weights"]
  with opened(url) as (second, sync):
    assert (second / "metrics").read_text() == "1\n2\n"
    assert (second / "model" / "weights").read_text() == "w"
    assert names(bucket)[0] == ".lock" and len(names(bucket)) == 4


def test_files_that_validate_others_are_uploaded_last(url, bucket, monkeypatch):
  root = bucket.path
  done = []
  for method in ("put_file", "rm_file"):
    real = getattr(type(bucket.fs), method)

    def spy(self, *args, _real=real, _method=method):
      done.append((_method, args[-1][len(root) + 1 :]))
      return _real(self, *args)

    monkeypatch.setattr(type(bucket.fs), method, spy)
  files = ["summary.json", "lengths.npz", "config.json", "model/a_config.json"]
  files += ["model/config.json", "model/z.safetensors"]
  with opened(url) as (local, sync):
    write(local, **dict.fromkeys(files, "{}"))
    sync()
    order = [name for method, name in done if method == "put_file"]
    assert sorted(order) == sorted(files)
    assert order[0] == "config.json"
    assert order[-2:] == ["model/config.json", "summary.json"]
    done.clear()
    for name in files:
      (local / name).unlink()
  removed = [name for method, name in done if method == "rm_file"]
  assert removed[:2] == ["summary.json", "model/config.json"]
  assert removed[-2:] == ["config.json", ".lock"]
  assert sorted(removed) == sorted([*files, ".lock"])


def test_checkpoints_stay_on_gs(url, bucket):
  checkpoint = "checkpoints/2/_CHECKPOINT_METADATA"
  bucket.pipe({"config.json": b"{}", checkpoint: b"{}"})
  with opened(url) as (local, _):
    assert not (local / "checkpoints").exists()
    assert str(run_storage.checkpoints(local)) == f"{url}/checkpoints"
    assert str(run_storage.reference(local)) == f"{url}/reference_params"
  assert names(bucket) == [checkpoint, "config.json"]
  assert str(run_storage.origin(local)) == str(local)  # not a copy any more


def test_other_directories_are_not_copied(url, bucket, monkeypatch):
  with pytest.raises(ValueError, match="no model and no run at"):
    run_storage.local(url)
  bucket.pipe_file("checkpoints/100/data", b"terabytes")
  monkeypatch.setattr(type(bucket.fs), "get_file", None)
  with pytest.raises(ValueError, match="has files but no"), opened(url):
    pass


@pytest.mark.parametrize("kind", [PermissionError, FileNotFoundError])
@pytest.mark.parametrize("error", [None, SystemExit(75), KeyError("bug")])
def test_files_stay_if_the_upload_fails(
  url, bucket, kind, error, monkeypatch, capsys
):
  monkeypatch.setattr(
    type(bucket.fs), "put_file", refuse(kind, "expired token")
  )
  with pytest.raises(disk.WriteFailed), opened(url) as (local, _):
    write(local, metrics="1")
    if error:
      raise error
  printed = capsys.readouterr().err
  assert f"files that could not be uploaded are in {local}" in printed
  assert (local / "metrics").read_text() == "1"
  shutil.rmtree(local)
  assert names(bucket) == []


def test_a_directory_has_one_process(url, bucket, monkeypatch):
  text = rf"^{url} is in use by process {os.getpid()} on .* gcloud storage rm"
  with opened(url):
    with pytest.raises(ValueError, match=rf"{text} {url}/\.lock$"):
      with opened(url):
        pass
    with monkeypatch.context() as other:  # another process of the same run
      other.setattr(distributed, "is_main", lambda: False)
      with opened(url):
        pass
    assert names(bucket) == [".lock"]
  assert names(bucket) == []
  with opened(url):
    bucket.pipe_file(".lock", json.dumps({"pid": "another"}).encode())
  assert "another" in bucket.read_text(".lock")


@pytest.mark.parametrize("method", ["pipe_file", "find", "put_file"])
def test_sigterm_leaves_no_lock(method, url, bucket, monkeypatch):
  """During the lock's creation, the download, or the last upload."""
  real = getattr(type(bucket.fs), method)

  def interrupted(*args, **options):
    signal.raise_signal(signal.SIGTERM)
    return real(*args, **options)

  before = signal.getsignal(signal.SIGTERM)
  with monkeypatch.context() as patch, pytest.raises(interrupts.Left):
    patch.setattr(type(bucket.fs), method, interrupted)
    with opened(url) as (local, _):
      assert method == "put_file"
      write(local, metrics="1", samples="2")
  assert names(bucket) == ["metrics", "samples"] * (method == "put_file")
  assert signal.getsignal(signal.SIGTERM) == before


def test_lazy_uploads_wait_and_are_tried_again(
  url, bucket, monkeypatch, capsys
):
  with opened(url) as (local, sync):
    write(local, metrics="1")
    sync(lazily=True)
    assert names(bucket) == [".lock"]
    monkeypatch.setattr(run_storage, "PUSH", 0.0)
    sync(lazily=True)
    assert names(bucket) == [".lock", "metrics"]
    with monkeypatch.context() as broken:
      broken.setattr(type(bucket.fs), "put_file", refuse(OSError, "no network"))
      write(local, metrics="2")
      sync(lazily=True)
      assert "no network; trying again" in capsys.readouterr().err
      with pytest.raises(disk.WriteFailed, match="cannot be written.*no net"):
        sync()
  assert bucket.read_text("metrics") == "2"


def test_names_outside_of_the_directory_are_refused(url, bucket, monkeypatch):
  root = bucket.path
  paths = [f"{root}//tmp/x", f"{root}/config.json"]
  monkeypatch.setattr(type(bucket.fs), "find", lambda *_: paths)
  with pytest.raises(ValueError, match="invalid file name"), opened(url):
    pass


@pytest.mark.parametrize(
  "wrong, message",
  [
    ("gs://bucket", "give gs://BUCKET/DIR"),
    ("s3://bucket/run", r"^s3://\.\.\. cannot be used, .*: mount the bucket"),
    # Without the password.
    ("S3://KEY:PASS@bucket/run", r"^S3://\.\.\. cannot"),
  ],
)
def test_other_urls_are_refused(url, wrong, message):
  with pytest.raises(ValueError, match=message), opened(wrong):
    pass
  with pytest.raises(ValueError, match=message):
    run_storage.local(wrong)


def test_errors_name_the_bucket(url, bucket):
  with pytest.raises(ValueError, match=f"^{url}/x is wrong$"):
    with opened(url) as (local, _):
      write(local, **{"config.json": "{}"})
      raise ValueError(f"{local}/x is wrong")
  assert names(bucket) == ["config.json"]


def test_only_changed_files_are_downloaded_again(url, bucket, monkeypatch):
  bucket.pipe({"config.json": b"{}", "pytorch_model.bin": b"pickle"})
  bucket.pipe({"old": b"0", "log": b"1"})
  copied = []
  real = type(bucket.fs).get_file

  def spy(self, path, *args):
    copied.append(path.rpartition("/")[2])
    return real(self, path, *args)

  monkeypatch.setattr(type(bucket.fs), "get_file", spy)
  copy = run_storage.local(url)
  assert sorted(copied) == ["config.json", "log", "old"]
  bucket.rm_file("old")
  bucket.pipe({"new": b"more", "log": b"2"})
  run_storage._cached_copy.cache_clear()
  copied.clear()
  assert run_storage.local(url) == copy
  assert sorted(copied) == ["log", "new"]
  present = {x.name: x.read_text() for x in copy.iterdir()}
  assert present.pop(".origin") == url
  assert present == {"config.json": "{}", "log": "2", "new": "more"}


def test_a_mount_without_locks_is_refused_at_the_start(tmp_path, monkeypatch):
  def flock(file, operation):
    raise OSError(errno.ENOSYS, "Function not implemented")

  monkeypatch.setattr(fcntl, "flock", flock)
  with pytest.raises(ValueError, match="^--run_dir=.*cannot lock files"):
    open_run.settle(from_config(default_config()), tmp_path / "run")
  assert not os.listdir(tmp_path)
