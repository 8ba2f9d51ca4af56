"""Run directories in buckets, on fsspec's file system in memory.

tests/test_buckets.py has whole runs on stand-ins for gs:// and s3://.
"""

import json
import os
import pathlib
import shutil
import threading
import uuid

import fsspec
import pytest

from grpojax.runtime.files import bucket, disk
from grpojax.runtime.processes import distributed, interrupts

CHECKPOINT = "checkpoints/2/_CHECKPOINT_METADATA"


@pytest.fixture
def url():
  return f"memory://bucket-{uuid.uuid4().hex}/runs/a"


@pytest.fixture
def fs(url):
  return fsspec.core.url_to_fs(url)[0]


@pytest.fixture
def put(url, fs):
  """Writes files of the bucket: put(NAME=TEXT), with __ for a slash."""

  def put(**files):
    for name, text in files.items():
      fs.pipe_file(f"{url}/{name.replace('__', '/')}", text.encode())

  return put


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
  monkeypatch.setattr(bucket, "BEAT", 0.04)
  monkeypatch.setattr(bucket, "LEASE", 0.4)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  bucket.local.cache_clear()


def opened(url):
  return bucket.opened(url, by_orbax=("checkpoints",))


def write(directory, **files):
  for name, text in files.items():
    path = directory / name.replace("__", "/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def names(url):
  fs, root = fsspec.core.url_to_fs(url)
  fs.invalidate_cache()
  return sorted(x[len(root) + 1 :] for x in fs.find(root))


def read(url, name):
  fs, root = fsspec.core.url_to_fs(url)
  return fs.cat_file(f"{root}/{name}").decode()


def refuse(kind, text):
  def refuse(*args):
    raise kind(text)

  return refuse


def test_what_is_written_is_there_the_next_time(url):
  with opened(url) as (first, sync):
    write(first, metrics="1\n", model__weights="w", _tmp="0")
    write(first, **{"config.json": "{}"})
    write(first, **{".hidden": "no", "checkpoints__2.orbax-checkpoint-tmp": ""})
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


def test_a_whole_thing_is_seen_only_when_all_of_it_is_there(
  url, fs, monkeypatch
):
  root = fs._strip_protocol(url)
  done = []
  for method in ("put_file", "rm_file"):
    real = getattr(type(fs), method)

    def spy(self, *args, _real=real, _method=method):
      done.append((_method, args[-1][len(root) + 1 :]))
      return _real(self, *args)

    monkeypatch.setattr(type(fs), method, spy)
  files = {
    "summary.json": "{}",
    "lengths.npz": "0",
    "config.json": "{}",
    "model/a_config.json": "a",
    "model/config.json": "{}",
    "model/z.safetensors": "z",
    CHECKPOINT: "{}",
    "checkpoints/2/state/z": "z",
  }
  with opened(url) as (local, sync):
    for name, text in files.items():
      write(local, **{name: text})
    sync()
    order = [name for method, name in done if method == "put_file"]
    assert sorted(order) == sorted(files)
    assert order[0] == "config.json"
    assert order[-3:] == ["model/config.json", CHECKPOINT, "summary.json"]
    done.clear()
    for name in files:
      (local / name).unlink()
  removed = [name for method, name in done if method == "rm_file"]
  assert removed[:2] == ["summary.json", "model/config.json"]
  # The old checkpoint when all that is new is there; then the lock.
  assert removed[-4:-1] == ["config.json", CHECKPOINT, "checkpoints/2/state/z"]
  assert sorted(removed) == sorted([*files, ".lock"])


def checkpoint(local, step):
  for name in ("_CHECKPOINT_METADATA", "data"):
    write(local, **{f"checkpoints__{step}__{name}": str(step)})


@pytest.fixture
def with_checkpoint(url):
  with opened(url) as (local, _):
    write(local, **{"config.json": "{}"})
    checkpoint(local, 2)
  return url


def steps(url):
  return {x.split("/")[1] for x in names(url) if x.startswith("checkpoints")}


def test_there_is_always_a_whole_checkpoint(with_checkpoint, fs, monkeypatch):
  with opened(with_checkpoint) as (local, sync):
    (local / "checkpoints" / "2" / "data").unlink()
    sync()  # it is just being removed
    assert read(with_checkpoint, "checkpoints/2/data") == "2"
    (local / CHECKPOINT).unlink()
    checkpoint(local, 4)
    with monkeypatch.context() as killed:
      killed.setattr(type(fs), "put_file", None)
      with pytest.raises(disk.WriteFailed):
        sync()
    assert steps(with_checkpoint) == {"2"}
    sync()
    assert steps(with_checkpoint) == {"4"}


def test_a_directory_that_goes_meanwhile_is_no_error(
  with_checkpoint, monkeypatch
):
  scandir = os.scandir

  def late(path):
    if str(path).endswith("checkpoints/2"):
      shutil.rmtree(path)
    return scandir(path)

  with opened(with_checkpoint) as (local, sync):
    checkpoint(local, 4)
    with monkeypatch.context() as patch:
      patch.setattr(os, "scandir", late)
      sync()
    assert steps(with_checkpoint) == {"4"}


def test_a_part_of_a_checkpoint_is_none_and_is_removed(with_checkpoint, put):
  put(checkpoints__3__data="0")
  with opened(with_checkpoint) as (local, _):
    assert (local / CHECKPOINT).exists()
    assert not (local / "checkpoints" / "3").exists()
  assert steps(with_checkpoint) == {"2"}


def test_what_is_no_run_is_not_copied(url, fs, put, monkeypatch):
  with pytest.raises(ValueError, match="there is no model and no run at"):
    bucket.local(url)
  put(checkpoints__100__data="terabytes")
  monkeypatch.setattr(type(fs), "get_file", None)
  with pytest.raises(ValueError, match="no model and no run"), opened(url):
    pass


@pytest.mark.parametrize("kind", [PermissionError, FileNotFoundError])
@pytest.mark.parametrize("error", [None, SystemExit(75), KeyError("bug")])
def test_what_the_bucket_refuses_at_the_end_is_kept(
  url, fs, kind, error, monkeypatch, capsys
):
  monkeypatch.setattr(type(fs), "put_file", refuse(kind, "expired token"))
  with pytest.raises(disk.WriteFailed), opened(url) as (local, _):
    write(local, metrics="1")
    if error:
      raise error
  printed = capsys.readouterr().err
  assert f"what could not be copied is in {local}" in printed
  assert (local / "metrics").read_text() == "1"
  shutil.rmtree(local)


def test_one_process_a_directory(url, monkeypatch):
  with opened(url):
    with pytest.raises(ValueError, match="is in use by process .* on "):
      with opened(url):
        pass
    with monkeypatch.context() as other:  # of the same run
      other.setattr(distributed, "is_main", lambda: False)
      with opened(url):
        pass
    assert names(url) == [".lock"]
  assert names(url) == []


def test_of_two_that_saw_no_lock_one_has_it(url, fs, put, monkeypatch):
  put(**{".lock": json.dumps({"token": "other"})})
  monkeypatch.setattr(type(fs), "cat_file", refuse(FileNotFoundError, "yet"))
  with pytest.raises(ValueError, match="is in use by another process"):
    with opened(url):
      pass


def test_a_lock_of_a_process_that_was_killed_is_taken_over(url, put, capsys):
  put(**{".lock": json.dumps({"token": "gone"})})
  with opened(url):
    assert "gone" not in read(url, ".lock")
  assert "waiting" in capsys.readouterr().err
  assert names(url) == []


@pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
@pytest.mark.parametrize("other", ["", json.dumps({"token": "other"})])
def test_who_was_taken_over_ends(other, url, fs, put, monkeypatch, capsys):
  ended = threading.Event()

  def end(code):
    ended.set()
    raise SystemExit  # ends the thread

  monkeypatch.setattr(interrupts, "end", end)
  with opened(url):
    if other:
      put(**{".lock": other})
    else:  # it has ended since
      fs.rm_file(f"{url}/.lock")
    assert ended.wait(10)
    said = capsys.readouterr().err
    assert "was taken over by another process, or its .lock was removed" in said
  assert names(url) == [".lock"] * bool(other)  # which is not ours


def test_lazily(url, fs, monkeypatch, capsys):
  with opened(url) as (local, sync):
    write(local, metrics="1")
    sync(lazily=True)
    assert names(url) == [".lock"]
    monkeypatch.setattr(bucket, "PUSH", 0.0)
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


def test_names_that_lead_out_of_the_directory(url, fs, monkeypatch):
  root = fs._strip_protocol(url)
  infos = dict.fromkeys([f"{root}//tmp/x", f"{root}/config.json"], {})
  monkeypatch.setattr(type(fs), "find", lambda *_, **__: infos)
  with pytest.raises(ValueError, match="file of the name"), opened(url):
    pass


@pytest.mark.parametrize(
  "wrong, message",
  [
    ("memory://bucket", "give gs://BUCKET/DIR"),
    ("file:///tmp/run", "give gs://BUCKET/DIR"),
    ("gcs://bucket/run", "give gs://BUCKET/DIR|needs pip install"),
    ("nosuch://bucket/run", "nosuch"),
  ],
)
def test_urls_that_are_none(wrong, message):
  with pytest.raises(ValueError, match=message), opened(wrong):
    pass


def test_a_password_in_a_url_is_refused_and_not_repeated():
  with pytest.raises(ValueError, match="://...@bucket/run has a pas") as error:
    bucket.local("s3://KEY:PASS@bucket/run")
  assert "PASS" not in str(error.value) and "KEY:" not in str(error.value)


def test_several_processes_need_a_disk_or_gs(url, monkeypatch):
  monkeypatch.setattr(distributed, "count", lambda: 2)
  with pytest.raises(ValueError, match="mount"), opened(url):
    pass


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setattr(fsspec.core, "url_to_fs", refuse(ImportError, "s3fs"))
  with pytest.raises(ValueError, match="s3:// 'grpojax.s3.'"):
    bucket.local("s3://bucket/run")


def test_what_is_wrong_is_said_of_the_bucket(url):
  with pytest.raises(ValueError, match=f"^{url}/x is wrong$"):
    with opened(url) as (local, _):
      write(local, **{"config.json": "{}"})
      raise ValueError(f"{local}/x is wrong")
  assert names(url) == ["config.json"]  # an error loses nothing


def test_a_copy_to_read_is_made_once(url, fs, put, monkeypatch):
  put(**{"config.json": "{}", "pytorch_model.bin": "pickle"}, old="0")
  copied = []
  real = type(fs).get_file

  def spy(self, path, *args):
    copied.append(path.rpartition("/")[2])
    return real(self, path, *args)

  monkeypatch.setattr(type(fs), "get_file", spy)
  copy = bucket.local(url)
  assert sorted(copied) == ["config.json", "old"]
  fs.rm_file(f"{fs._strip_protocol(url)}/old")
  put(new="more")
  bucket.local.cache_clear()
  copied.clear()
  assert bucket.local(url) == copy
  assert copied == ["new"]
  assert sorted(x.name for x in copy.iterdir()) == ["config.json", "new"]
  pathlib.Path(f"{copy}.json").write_text("damaged")
  bucket.local.cache_clear()
  assert bucket.local(url) == copy and (copy / "new").read_text() == "more"


def test_origin(tmp_path):
  assert str(bucket.origin(tmp_path)) == str(tmp_path)
  (tmp_path / bucket.ORIGIN).write_text("gs://bucket/run")
  assert str(bucket.origin(tmp_path) / "x") == "gs://bucket/run/x"
