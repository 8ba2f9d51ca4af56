"""Whole runs on gs://, with a local server (training/fake_gcs.py).

Credentials, speed and network failures need a real bucket.
"""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import fsspec
import pytest
from run_helpers import environment, free_port, joined, untimed

from grpojax.runtime.files import records

HERE = pathlib.Path(__file__).parent
SETTINGS = (  # with a reference
  "batch_size=2 group_size=4 diagnostics.every=0 eval.num_prompts=4 "
  "eval.every=100 checkpoint.every=2 loss.beta=0.01"
).split()


@pytest.fixture
def gcs(monkeypatch):
  pytest.importorskip("gcsfs")
  port = free_port()
  program = HERE / "training" / "fake_gcs.py"
  process = subprocess.Popen([sys.executable, program, str(port)])
  url = f"http://127.0.0.1:{port}"
  monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", url)
  monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
  try:
    for _ in range(300):
      with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port)),
      ):
        break
      time.sleep(0.1)
    yield fsspec.filesystem("gs", skip_instance_cache=True)
  finally:
    process.kill()
    process.wait()


@pytest.fixture
def start(tmp_path):
  """Starts the processes of a program."""

  def start(program, *words, count=1):
    devices = {"JAX_NUM_CPU_DEVICES": str(2 // count)}
    command = [sys.executable, "-m", f"grpojax.{program}", *words]
    return [
      subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(XDG_CACHE_HOME=str(tmp_path), **devices),
      )
      for flags in joined(count)
    ]

  return start


@pytest.fixture
def run(start):
  """Runs a program to its end; returns its output."""

  def run(program, *words):
    (process,) = start(program, *words)
    out = process.communicate(timeout=900)[0]
    assert process.returncode == 0, out
    return out

  return run


def words(url, steps=4):
  config = [f"--config.{word}" for word in (f"steps={steps}", *SETTINGS)]
  return [f"--run_dir={url}", *config]


def wait_for(process, text):
  lines = []
  for line in process.stdout:
    lines.append(line)
    if text in line:
      return
  raise AssertionError("".join(lines))


def fetched(fs, name, tmp_path):
  fs.invalidate_cache()
  fs.get_file(f"bucket/runs/a/{name}", str(tmp_path / "fetched"))
  return tmp_path / "fetched"


@pytest.mark.long
def test_an_interrupted_and_killed_run_resumes_from_a_bucket(
  gcs, start, run, tmp_path
):
  url = "gs://bucket/runs/a"
  first, second = start("train", *words(url), count=2)
  wait_for(first, "step 1/4")
  second.send_signal(signal.SIGTERM)
  out = first.communicate(timeout=120)[0], second.communicate(timeout=120)[0]
  assert (first.returncode, second.returncode) == (75, 75), out
  assert "summary.json" not in map(os.path.basename, gcs.find("bucket/runs/a"))
  (killed,) = start("train", *words(url))
  wait_for(killed, "step 3/4")
  while not gcs.exists("bucket/runs/a/checkpoints/2/commit_success.txt"):
    gcs.invalidate_cache()
    time.sleep(0.1)
  killed.kill()
  killed.communicate()
  (refused,) = start("train", *words(url))
  out = refused.communicate(timeout=120)[0]
  assert refused.returncode == 1
  assert f"in use by process {killed.pid} on" in out
  assert out.endswith(f"remove its lock: gcloud storage rm {url}/.lock\n")
  gcs.rm_file("bucket/runs/a/.lock")
  out = run("train", *words(url))
  assert "resuming after step 2" in out and f"are in {url}/" in out
  run("train", *words(tmp_path / "disk"))  # the same run, uninterrupted
  ours, theirs = (
    untimed(row for row in records.read_jsonl(path) if "loss" in row)
    for path in (
      fetched(gcs, "metrics.jsonl", tmp_path),
      tmp_path / "disk" / "metrics.jsonl",
    )
  )
  assert [row["step"] for row in ours] == [1, 2, 3, 4]
  for a, b in zip(ours, theirs, strict=True):
    assert a == pytest.approx(b, rel=1e-4, abs=1e-5, nan_ok=True)
  assert "nothing to do" in run("train", *words(url))
  gcs.invalidate_cache()
  assert "bucket/runs/a/.lock" not in gcs.find("bucket/runs/a")
  page = tmp_path / "page.html"
  run("report", url, f"--out={page}")
  for text in (page, fetched(gcs, "report.html", tmp_path)):
    assert "finished, 4 of 4 steps" in text.read_text()
  out = run("evaluate", f"--model={url}")
  assert "checkpoint of step 4" in out and "4 held-out prompts" in out
  run("export", url, f"--out={tmp_path / 'out'}")
  assert (tmp_path / "out" / "model.safetensors").is_file()
  new = words(tmp_path / "b", steps=0) + ["--config.optim.micro_batches=1"]
  run("train", *new, f"--config.model.path={url}")


@pytest.mark.long
def test_selfcheck_in_a_bucket(gcs, run, tmp_path):
  words = "--shared=gs://bucket/check", "--skip=parity,attention,step"
  out = run("selfcheck", f"--out={tmp_path}", *words)
  assert "the same model" in out
  assert not [x for x in gcs.find("bucket/check") if x.endswith(".lock")]
