"""Run directories in buckets, on fsspec's file system in memory.

tests/test_buckets.py has whole runs on stand-ins for gs:// and s3://.
"""

import json
import pathlib
import shutil
import threading
import uuid

import fsspec
import pytest

from grpojax.runtime import bucket, disk

CHECKPOINT = "checkpoints/2/_CHECKPOINT_METADATA"


@pytest.fixture
def url():
  return f"memory://bucket-{uuid.uuid4().hex}/runs/a"


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
  monkeypatch.setattr(bucket, "BEAT", 0.04)
  monkeypatch.setattr(bucket, "LEASE", 0.4)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  bucket.local.cache_clear()


def opened(url, **changes):
  settings = {"by_orbax": (), "is_main": True, "several": False} | changes
  return bucket.opened(url, **settings)


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


def test_an_error_does_not_lose_what_was_written(url):
  with pytest.raises(RuntimeError), opened(url) as (local, _):
    write(local, metrics="1")
    raise RuntimeError
  assert names(url) == ["metrics"]


def test_a_whole_thing_is_seen_only_when_all_of_it_is_there(url, monkeypatch):
  fs, root = fsspec.core.url_to_fs(url)
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


def test_a_part_of_a_checkpoint_is_none(url):
  fs, root = fsspec.core.url_to_fs(url)
  steps = "checkpoints/2/state/d", "checkpoints/3/state/d"
  for name in ("config.json", CHECKPOINT, *steps):
    fs.pipe_file(f"{root}/{name}", b"0")
  with opened(url, by_orbax=("checkpoints",)) as (local, _):
    found = [str(x.relative_to(local)) for x in local.rglob("*")]
    assert "checkpoints/2/state/d" in found and CHECKPOINT in found
    assert not any("checkpoints/3" in name for name in found)


def checkpoint(local, step, *names):
  path = local / "checkpoints" / str(step)
  path.mkdir(parents=True)
  for name in names or ("_CHECKPOINT_METADATA", "data"):
    (path / name).write_text(str(step))


@pytest.fixture
def with_checkpoint(url):
  with opened(url) as (local, _):
    write(local, **{"config.json": "{}"})
    checkpoint(local, 2)
  return url


def steps(url):
  return {x.split("/")[1] for x in names(url) if x.startswith("checkpoints")}


def test_there_is_always_a_checkpoint(with_checkpoint, monkeypatch):
  url = with_checkpoint
  fs, _ = fsspec.core.url_to_fs(url)
  with opened(url) as (local, sync):
    (local / "checkpoints" / "2" / "_CHECKPOINT_METADATA").unlink()
    (local / "checkpoints" / "2" / "data").unlink()
    checkpoint(local, 4)
    with monkeypatch.context() as killed:
      killed.setattr(type(fs), "put_file", None)
      with pytest.raises(disk.WriteFailed):
        sync()
    assert steps(url) == {"2"}
    sync()
    assert steps(url) == {"4"}


def test_a_checkpoint_that_is_being_removed_is_none(with_checkpoint):
  url = with_checkpoint
  with opened(url) as (local, sync):
    (local / "checkpoints" / "2" / "data").unlink()  # its account comes later
    checkpoint(local, 4)
    sync()
    assert steps(url) == {"4"}


def test_what_a_cut_upload_left_is_removed(with_checkpoint):
  fs, root = fsspec.core.url_to_fs(with_checkpoint)
  fs.pipe_file(f"{root}/checkpoints/3/data", b"0")
  with opened(with_checkpoint, by_orbax=("checkpoints",)) as (local, _):
    assert not (local / "checkpoints" / "3").exists()
  assert steps(with_checkpoint) == {"2"}


def test_checkpoints_without_a_config_are_somebody_elses(url):
  fs, root = fsspec.core.url_to_fs(url)
  fs.pipe_file(f"{root}/checkpoints/100/data", b"0")
  with pytest.raises(ValueError, match="is not a run"):
    with opened(url, by_orbax=("checkpoints",)):
      pass
  here = bucket._Bucket(url, fs, root, ("checkpoints",), True, None, {})
  with pytest.raises(ValueError, match="is not a run"):
    bucket._find_run(here)  # where they are not copied


@pytest.mark.parametrize("kind", [PermissionError, FileNotFoundError])
def test_what_the_bucket_refuses_at_the_end_is_kept(
  url, kind, monkeypatch, capsys
):
  fs, _ = fsspec.core.url_to_fs(url)

  def refuse(*args):
    raise kind("the token has expired")

  monkeypatch.setattr(type(fs), "put_file", refuse)
  for error in (None, SystemExit(75), KeyError("of a step")):
    wanted = type(error) if isinstance(error, KeyError) else disk.WriteFailed
    with pytest.raises(wanted), opened(url) as (local, _):
      write(local, metrics="1")
      if error:
        raise error
    said = capsys.readouterr().err
    assert f"what could not be copied is in {local}" in said
    assert (local / "metrics").read_text() == "1"
    shutil.rmtree(local)


def test_a_lock_that_is_gone_is_lost(url):
  fs, root = fsspec.core.url_to_fs(url)
  with pytest.raises(disk.WriteFailed, match="was removed"):
    with opened(url) as (local, _):
      fs.rm_file(f"{root}/.lock")
      threading.Event().wait(10 * bucket.BEAT)
      write(local, metrics="1")
  assert names(url) == []


def test_a_run_that_trains_can_be_read(with_checkpoint, monkeypatch):
  fs, root = fsspec.core.url_to_fs(with_checkpoint)
  real, left = type(fs).get_file, [2]

  def vanish(self, *args):
    if left[0]:
      left[0] -= 1
      raise FileNotFoundError("removed meanwhile")
    return real(self, *args)

  monkeypatch.setattr(type(fs), "get_file", vanish)
  assert (bucket.local(with_checkpoint) / "checkpoints/2/data").is_file()


def test_one_process_a_directory(url, capsys):
  with opened(url):
    with pytest.raises(ValueError, match="is in use by process .* on "):
      with opened(url):
        pass
    with opened(url, is_main=False):
      pass  # of the same run
  with opened(url):  # it has been let go of
    assert names(url) == [".lock"]
  assert names(url) == []


def test_a_lock_of_a_process_that_was_killed_is_taken_over(url, capsys):
  fs, root = fsspec.core.url_to_fs(url)
  fs.pipe_file(f"{root}/.lock", json.dumps({"token": "gone"}).encode())
  with opened(url):
    assert "gone" not in read(url, ".lock")
  assert "waiting" in capsys.readouterr().err
  assert names(url) == []


def test_who_was_taken_over_writes_no_more(url):
  fs, root = fsspec.core.url_to_fs(url)
  with pytest.raises(disk.WriteFailed, match="taken over"):
    with opened(url) as (local, sync):
      write(local, metrics="1")
      sync()
      fs.pipe_file(f"{root}/.lock", json.dumps({"token": "other"}).encode())
      threading.Event().wait(10 * bucket.BEAT)
      write(local, metrics="2")
      sync()
  assert read(url, "metrics") == "1"
  assert "other" in read(url, ".lock")  # not removed


def test_lazily(url, monkeypatch, capsys):
  with opened(url) as (local, sync):
    write(local, metrics="1")
    sync(lazily=True)
    assert names(url) == [".lock"]
    monkeypatch.setattr(bucket, "PUSH", 0.0)
    sync(lazily=True)
    assert names(url) == [".lock", "metrics"]
    fs, _ = fsspec.core.url_to_fs(url)

    def refuse(*args):
      raise OSError("no network")

    with monkeypatch.context() as broken:
      broken.setattr(type(fs), "put_file", refuse)
      write(local, metrics="2")
      sync(lazily=True)
      assert "no network; trying again" in capsys.readouterr().err
      with pytest.raises(disk.WriteFailed, match="cannot be written.*no net"):
        sync()
  assert read(url, "metrics") == "2"


def test_names_that_lead_out_of_the_directory(url, monkeypatch):
  fs, root = fsspec.core.url_to_fs(url)
  found = dict.fromkeys([f"{root}//tmp/x", f"{root}/config.json"], {})
  monkeypatch.setattr(type(fs), "find", lambda *_, **__: found)
  with pytest.raises(ValueError, match="file of the name"), opened(url):
    pass


@pytest.mark.parametrize(
  "wrong, message",
  [
    ("memory://bucket", "is a whole bucket"),
    ("nosuch://bucket/run", "nosuch"),
    ("file:///tmp/run", "give a path instead"),
    ("gcs://bucket/run", "give gs:// instead"),
  ],
)
def test_urls_that_are_none(wrong, message):
  with pytest.raises(ValueError, match=message), opened(wrong):
    pass


def test_several_processes_need_a_disk_or_gs(url):
  with pytest.raises(ValueError, match="mount"), opened(url, several=True):
    pass


def test_a_missing_package_is_named(monkeypatch):
  def missing(url):
    raise ImportError("Install s3fs to access S3")

  monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
  with pytest.raises(ValueError, match=r"pip install 'grpojax\[s3\]'"):
    bucket.local("s3://bucket/run")


def test_what_is_wrong_is_said_of_the_bucket(url):
  with pytest.raises(ValueError, match=f"^{url}/x is wrong$"):
    with opened(url) as (local, _):
      raise ValueError(f"{local}/x is wrong")
  with pytest.raises(SystemExit) as left, opened(url):
    raise SystemExit(75)
  assert left.value.code == 75


def test_a_copy_to_read_is_made_once(url, monkeypatch):
  fs, root = fsspec.core.url_to_fs(url)
  fs.pipe_file(f"{root}/config.json", b"{}")
  fs.pipe_file(f"{root}/old", b"0")
  copied = []
  real = type(fs).get_file

  def spy(self, path, *args):
    copied.append(path[len(root) + 1 :])
    return real(self, path, *args)

  monkeypatch.setattr(type(fs), "get_file", spy)
  copy = bucket.local(url)
  assert sorted(copied) == ["config.json", "old"]
  fs.rm_file(f"{root}/old")
  fs.pipe_file(f"{root}/new", b"more")
  bucket.local.cache_clear()
  copied.clear()
  assert bucket.local(url) == copy
  assert copied == ["new"]
  assert sorted(x.name for x in copy.iterdir()) == ["config.json", "new"]
  pathlib.Path(f"{copy}.json").write_text("damaged")
  bucket.local.cache_clear()
  assert bucket.local(url) == copy and (copy / "new").read_text() == "more"


def test_nothing_there(url):
  with pytest.raises(ValueError, match="there is no model and no run at"):
    bucket.local(url)


def test_a_directory_of_something_else_is_not_copied(url, monkeypatch):
  fs, root = fsspec.core.url_to_fs(url)
  fs.pipe_file(f"{root}/data/x.parquet", b"terabytes")
  monkeypatch.setattr(type(fs), "get_file", None)
  with pytest.raises(ValueError, match="is not a run"), opened(url):
    pass
  with pytest.raises(ValueError, match="no model and no run"):
    bucket.local(url)


def test_weights_in_other_formats_are_not_copied(url):
  fs, root = fsspec.core.url_to_fs(url)
  for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
    fs.pipe_file(f"{root}/{name}", b"{}")
  found = sorted(path.name for path in bucket.local(url).iterdir())
  assert found == ["config.json", "model.safetensors"]


def test_origin(tmp_path):
  assert str(bucket.origin(tmp_path)) == str(tmp_path)
  (tmp_path / bucket.ORIGIN).write_text("gs://bucket/run")
  assert str(bucket.origin(tmp_path) / "x") == "gs://bucket/run/x"
