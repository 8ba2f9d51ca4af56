"""The examples of docs/environments.md, run with the other libraries."""

import importlib
import json
import os
import subprocess
import sys
import threading
import time

import docs_blocks
import pytest

from grpojax.environments.pool import EnvironmentPool, check_replay

PAGE = docs_blocks.DOCS / "environments.md"


@pytest.fixture
def directory(tmp_path, monkeypatch):
  """A working directory with the page's files."""
  docs_blocks.write_files(PAGE, tmp_path)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
  return tmp_path


@pytest.fixture
def server(directory):
  """The address of a server of OpenEnv's template environment."""
  http_server = pytest.importorskip("openenv.core.env_server.http_server")
  uvicorn = pytest.importorskip("uvicorn")
  words = [sys.executable, "-m", "openenv.cli", "init", "my_env"]
  subprocess.run(words, check=True, env=os.environ | {"PATH": ""})
  models = importlib.import_module("my_env.models")
  module = importlib.import_module("my_env.server.my_env_environment")
  types = module.MyEnvironment, models.MyAction, models.MyObservation
  app = http_server.create_fastapi_app(*types, max_concurrent_envs=8)
  server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
  thread = threading.Thread(target=server.run)
  thread.start()
  while not server.started and thread.is_alive():
    time.sleep(0.01)
  port = server.servers[0].sockets[0].getsockname()[1]
  yield f"http://127.0.0.1:{port}"
  server.should_exit = True
  thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_client_of_openenv(workers, server):
  options = {"url": server}
  with EnvironmentPool("echo.py:Echo", [], options, workers=workers) as pool:
    first, *_, last = check_replay(pool, {"answer": "1"}, 7, actions=["hello"])
    assert '"echoed_message": "My Env environment ready!"' in first.observation
    assert '"echoed_message": "a longer' in last.observation
    (reset,) = pool.collect(pool.submit([("reset", {}, 7)]))
    calls = [("step", reset.state, "hello", {}, seed) for seed in (7, 8)]
    for step in pool.collect(pool.submit(calls)):
      assert (round(step.reward, 3), step.done) == (0.5, False)


@pytest.mark.slow
def test_a_taskset_of_verifiers(directory):
  pytest.importorskip("verifiers.v1")
  words = [sys.executable, "tasks.py"]
  rows = subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout
  rows = [json.loads(row) for row in rows.splitlines()]
  reward = importlib.import_module("tasks").reward
  assert [row["prompt"].split()[1] for row in rows][:2] == ["spam", "eggs"]
  for text, right in [("maps\n", 1.0), ("spam", 0.0)]:
    assert reward(rows[0]["prompt"], text, rows[0]) == right
  assert reward(rows[1]["prompt"], "sgge", rows[1]) == 1.0
