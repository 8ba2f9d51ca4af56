"""Downloads from the Hub, and their errors."""

import errno
import os
import pathlib
import shutil
import signal
import threading

import hub_server
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import logging

from grpojax.models import huggingface as hf
from grpojax.runtime.files import hub
from grpojax.runtime.processes import interrupts

ID = "org/tiny-1.5B"
NAME = hub.Name(ID)
OLD = huggingface_hub.__version__.startswith("1.")
COMMIT = hub_server.COMMIT
LATER = "b" * 40
TOKEN = "hf_" + "s3cret" * 5
FILES = {
  "config.json": b'{"model_type": "qwen2"}',
  "tokenizer.json": b"{}",
  "model-00001-of-00002.safetensors": b"1" * 1000,
  "model-00002-of-00002.safetensors": b"2" * 1000,
  "model.safetensors.index.json": b"[]",
}
NEVER = {
  "pytorch_model.bin": b"pickle",
  "modeling_tiny.py": b"code",
  "onnx/model.safetensors": b"again",
  "README.md": b"# tiny",
}


@pytest.fixture
def served(tmp_path, monkeypatch):
  server = hub_server.Hub()
  server.add(ID, FILES | NEVER)
  with hub_server.client_of(server, tmp_path / "cache", monkeypatch):
    yield server


def names_in(directory):
  return {p.name for p in directory.rglob("*") if p.is_file()}


def test_names_of_repositories():
  assert hub.parse("Qwen/Qwen2.5-0.5B") == ("Qwen/Qwen2.5-0.5B", "main")
  assert hub.parse(pathlib.Path("a/b@v1.0")) == ("a/b", "v1.0")
  assert hub.parse("a/b@refs/pr/1") == ("a/b", "refs/pr/1")
  for text in (
    *("arithmetic-instruct", "a/b/c", "./a/b", "/a/b", "../b", "a/..", ""),
    *("gs://a/b", "a/b@../../x", "a/b@", "a/b--c", "a/b c", "ä/b", "a/b\n"),
  ):
    assert hub.parse(text) is None


def test_requested_files_are_fetched_once(served, capsys):
  shape = hub.fetch(NAME, hub.CONFIG)
  assert names_in(shape) == {"config.json"} and shape.name == COMMIT
  texts = hub.fetch(NAME, hub.TEXTS)
  assert names_in(texts) == {"config.json", "tokenizer.json"}
  whole = hub.fetch(NAME, hub.WHOLE)
  assert shape == texts == whole and names_in(whole) == set(FILES)
  for name, content in FILES.items():
    assert (whole / name).read_bytes() == content
  assert sorted(served.fetched()) == sorted(FILES)
  before = len(served.log)
  assert hub.fetch(hub.Name(ID, COMMIT), hub.WHOLE) == whole
  assert len(served.log) == before or OLD  # no request for a commit
  assert capsys.readouterr() == ("", "")
  assert set(hf.COMPANIONS) <= set(hub.WHOLE)


def test_branches_move_but_commits_do_not(served, monkeypatch):
  assert hub.commit(NAME) == COMMIT
  served.add(ID, FILES | {"config.json": b"new"}, LATER)
  served.heads[f"models/{ID}"]["v2"] = LATER
  assert hub.commit(NAME) == hub.commit(hub.Name(ID, "v2")) == LATER
  old, new = (hub.fetch(hub.Name(ID, c), hub.CONFIG) for c in (COMMIT, LATER))
  assert (old / "config.json").read_bytes() == FILES["config.json"]
  assert (new / "config.json").read_bytes() == b"new"
  before = len(served.log)
  assert hub.commit(hub.Name("org/never", COMMIT)) == COMMIT
  assert len(served.log) == before


def refused(text, files=hub.WHOLE, name=NAME):
  with pytest.raises(ValueError, match=text) as error:
    hub.fetch(name, files)
  message = str(error.value)
  assert "\n" not in message and TOKEN not in message
  assert "Request ID" not in message and "/resolve/" not in message
  return message


def test_errors_name_a_remedy(served, monkeypatch):
  def full(*_, **__):
    assert logging.get_verbosity() == logging.ERROR
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setenv("HF_TOKEN", TOKEN)
  refused("no such path here, and the Hub.*hf auth", name=hub.Name("runs/x"))
  refused("no revision 'v9'", name=hub.Name(ID, "v9"))
  refused("is not a name on the Hub", name=hub.Name("../x"))
  served.gated.add(ID)
  refused("is gated: accept its terms at https://huggingface.co/org/tiny-1.5B")
  served.gated.clear()
  served.tokens[ID] = "another"
  refused("if it is private, give its token with `hf auth login` or HF_TOKEN")
  served.tokens[ID] = TOKEN
  assert hub.commit(NAME) == COMMIT and TOKEN in served.seen
  shutil.rmtree(constants.HF_HUB_CACHE)
  with monkeypatch.context() as patch:
    patch.setattr("huggingface_hub.file_download.http_get", full)
    refused(r"cannot be stored in .*cache \(No space left on .*\).*HF_HOME")
  for served.status in (403, 429, 500):
    refused(f"(answered {served.status}; try again|cannot be reached)")


def test_without_a_network(served, monkeypatch):
  hub.fetch(NAME, hub.TEXTS)
  before = len(served.log)
  with monkeypatch.context() as patch:
    patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.commit(NAME) == COMMIT  # the last known commit
    texts = hub.fetch(NAME, hub.TEXTS)
    assert names_in(texts) == {"config.json", "tokenizer.json"}
    refused("http://127.0.0.1:9 cannot be reached", name=hub.Name("org/other"))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  huggingface_hub.close_session()  # which was online
  assert names_in(hub.fetch(NAME, hub.TEXTS)) >= {"config.json"}
  if not OLD:  # old versions accept partial downloads
    refused("incomplete in .*HF_HUB_OFFLINE.*hf download")
  refused("HF_HUB_OFFLINE", name=hub.Name("org/other"))
  assert len(served.log) == before
  monkeypatch.undo()
  huggingface_hub.close_session()


def test_an_interrupted_download_is_continued(served, monkeypatch):
  cut = "model-00002-of-00002.safetensors"
  monkeypatch.setattr("time.sleep", lambda _: None)
  served.broken[cut] = 100
  refused("was cut off .*the same command continues it")
  assert served.broken.pop(cut) < 100
  before = len(served.log)
  assert names_in(hub.fetch(NAME, hub.WHOLE)) == set(FILES)
  again = [p for m, p in served.log[before:] if "/resolve/" in p and m == "GET"]
  assert {p.rpartition("/")[2] for p in again} == {cut}


def test_progress_is_printed_line_by_line(served, monkeypatch, capsys):
  served.add(ID, {"model.safetensors": b"x" * 2_000_000})
  monkeypatch.setattr(hub, "SAY_EVERY", 0.0)
  hub.fetch(NAME, hub.WHOLE)
  printed, errors = capsys.readouterr()
  first, *_, last = printed.splitlines()
  assert first.startswith(f"downloading {ID} to ") and not errors
  assert last.endswith(": 2 MB of 2 MB")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_at_once(number, served, monkeypatch):
  served.add(ID, {"model.safetensors": b"x" * 2_000_000})
  handled = []
  old = signal.signal(number, lambda *_: handled.append(number))
  sent = threading.Event()

  def display(*_, flush):
    if not sent.is_set() and served.fetched():
      sent.set()
      os.kill(os.getpid(), number)

  monkeypatch.setattr(hub, "print", display, raising=False)
  monkeypatch.setattr(hub, "SAY_EVERY", 0.0)
  monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
  try:
    with pytest.raises(interrupts.Left, match="was interrupted"):
      hub.fetch(NAME, hub.WHOLE)
  finally:
    signal.signal(number, old)
  assert handled == [number]  # by the previous handler
