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
def fs(url):
  return fsspec.core.url_to_fs(url)[0]


@pytest.fixture
def put(url, fs):
  """Writes files of the bucket: put(NAME=TEXT), with __ for a slash."""
  root = fsspec.core.url_to_fs(url)[1]

  def put(**files):
    for name, text in files.items():
      fs.pipe_file(f"{root}/{name.replace('__', '/')}", text.encode())

  return put


def write(directory, **files):
  for name, text in files.items():
    path = directory / name.replace("__", "/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def names(url):
  fs, root = fsspec.core.url_to_fs(url)
  return sorted(x[len(root) + 1 :] for x in fs.find(root))


def read(url, name):
  fs, root = fsspec.core.url_to_fs(url)
  return fs.cat_file(f"{root}/{name}").decode()


def refuse(kind, text):
  def refuse(*args):
    raise kind(text)

  return refuse


def test_files_are_uploaded_and_copied_again(url):
  with opened(url) as (first, sync):
    write(first, metrics="1\n", model__weights="w", _tmp="0")
    write(first, **{"config.json": "{}", ".hidden": "no"})
    sync()
    assert read(url, "metrics") == "1\n"
    (first / "_tmp").unlink()
    write(first, metrics="1\n2\n")
  assert not first.exists()
  assert names(url) == ["config.json", "metrics", "model/weights"]
  with opened(url) as (second, sync):
    assert (second / "metrics").read_text() == "1\n2\n"
    assert (second / "model" / "weights").read_text() == "w"
    assert names(url)[0] == ".lock" and len(names(url)) == 4


def test_files_that_validate_others_are_uploaded_last(url, fs, monkeypatch):
  root = fsspec.core.url_to_fs(url)[1]
  done = []
  for method in ("put_file", "rm_file"):
    real = getattr(type(fs), method)

    def spy(self, *args, _real=real, _method=method):
      done.append((_method, args[-1][len(root) + 1 :]))
      return _real(self, *args)

    monkeypatch.setattr(type(fs), method, spy)
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


def test_checkpoints_stay_on_gs(url, put):
  checkpoint = "checkpoints/2/_CHECKPOINT_METADATA"
  put(**{"config.json": "{}", checkpoint: "{}"})
  with opened(url) as (local, _):
    assert not (local / "checkpoints").exists()
    assert str(run_storage.checkpoints(local)) == f"{url}/checkpoints"
    assert str(run_storage.reference(local)) == f"{url}/reference_params"
  assert names(url) == [checkpoint, "config.json"]
  assert str(run_storage.origin(local)) == str(local)  # not a copy any more


def test_other_directories_are_not_copied(url, fs, put, monkeypatch):
  with pytest.raises(ValueError, match="no model and no run at"):
    run_storage.local(url)
  put(checkpoints__100__data="terabytes")
  monkeypatch.setattr(type(fs), "get_file", None)
  with pytest.raises(ValueError, match="has files but no"), opened(url):
    pass


@pytest.mark.parametrize("kind", [PermissionError, FileNotFoundError])
@pytest.mark.parametrize("error", [None, SystemExit(75), KeyError("bug")])
def test_files_stay_if_the_upload_fails(
  url, fs, kind, error, monkeypatch, capsys
):
  monkeypatch.setattr(type(fs), "put_file", refuse(kind, "expired token"))
  with pytest.raises(disk.WriteFailed), opened(url) as (local, _):
    write(local, metrics="1")
    if error:
      raise error
  printed = capsys.readouterr().err
  assert f"files that could not be uploaded are in {local}" in printed
  assert (local / "metrics").read_text() == "1"
  shutil.rmtree(local)
  assert names(url) == []


def test_a_directory_has_one_process(url, put, monkeypatch):
  text = rf"^{url} is in use by process {os.getpid()} on .* gcloud storage rm"
  with opened(url):
    with pytest.raises(ValueError, match=rf"{text} {url}/\.lock$"):
      with opened(url):
        pass
    with monkeypatch.context() as other:  # another process of the same run
      other.setattr(distributed, "is_main", lambda: False)
      with opened(url):
        pass
    assert names(url) == [".lock"]
  assert names(url) == []
  with opened(url):
    put(**{".lock": json.dumps({"pid": "another"})})
  assert "another" in read(url, ".lock")


@pytest.mark.parametrize("method", ["pipe_file", "find", "put_file"])
def test_sigterm_leaves_no_lock(method, url, fs, monkeypatch):
  """During the lock's creation, the download, or the last upload."""
  real = getattr(type(fs), method)

  def interrupted(*args, **options):
    signal.raise_signal(signal.SIGTERM)
    return real(*args, **options)

  before = signal.getsignal(signal.SIGTERM)
  with monkeypatch.context() as patch, pytest.raises(interrupts.Left):
    patch.setattr(type(fs), method, interrupted)
    with opened(url) as (local, _):
      assert method == "put_file"
      write(local, metrics="1", samples="2")
  assert names(url) == ["metrics", "samples"] * (method == "put_file")
  assert signal.getsignal(signal.SIGTERM) == before


def test_lazy_uploads_wait_and_are_tried_again(url, fs, monkeypatch, capsys):
  with opened(url) as (local, sync):
    write(local, metrics="1")
    sync(lazily=True)
    assert names(url) == [".lock"]
    monkeypatch.setattr(run_storage, "PUSH", 0.0)
    sync(lazily=True)
    assert names(url) == [".lock", "metrics"]
    with monkeypatch.context() as broken:
      broken.setattr(type(fs), "put_file", refuse(OSError, "no network"))
      write(local, metrics="2")
      sync(lazily=True)
      assert "no network; trying again" in capsys.readouterr().err
      with pytest.raises(disk.WriteFailed, match="cannot be written.*no net"):
        sync()
  assert read(url, "metrics") == "2"


def test_names_outside_of_the_directory_are_refused(url, fs, monkeypatch):
  root = fsspec.core.url_to_fs(url)[1]
  paths = [f"{root}//tmp/x", f"{root}/config.json"]
  monkeypatch.setattr(type(fs), "find", lambda *_: paths)
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


def test_errors_name_the_bucket(url):
  with pytest.raises(ValueError, match=f"^{url}/x is wrong$"):
    with opened(url) as (local, _):
      write(local, **{"config.json": "{}"})
      raise ValueError(f"{local}/x is wrong")
  assert names(url) == ["config.json"]


def test_only_changed_files_are_downloaded_again(url, fs, put, monkeypatch):
  put(**{"config.json": "{}", "pytorch_model.bin": "pickle"}, old="0", log="1")
  copied = []
  real = type(fs).get_file

  def spy(self, path, *args):
    copied.append(path.rpartition("/")[2])
    return real(self, path, *args)

  monkeypatch.setattr(type(fs), "get_file", spy)
  copy = run_storage.local(url)
  assert sorted(copied) == ["config.json", "log", "old"]
  fs.rm_file(f"{fsspec.core.url_to_fs(url)[1]}/old")
  put(new="more", log="2")
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
