"""A server on loopback with the part of vLLM's API that grpojax uses."""

import contextlib
import functools
import http.server
import json
import pathlib
import shutil
import threading

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.models import huggingface as hf

ADAPTERS = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
WHOLE = "/pause /resume /collective_rpc /update_weight_version /weight_info"
ENDPOINTS = [*ADAPTERS, *WHOLE.split(), "/v1/completions"]
ENDPOINTS += ["/inference/v1/generate"]


class Stub:
  """A served model; tests change its behaviour and read its log."""

  def __init__(self, model):
    self.model = pathlib.Path(model)
    self.endpoints = list(ENDPOINTS)
    self.raw = False  # log-probabilities of temperature 1
    self.alter = lambda answer: answer  # changes each answer with samples
    self.deaths = 0  # number of requests for samples after which it restarts
    self.log = []  # path and value of each request
    self.restart()

  def restart(self):
    """Forgets all weights that were loaded."""
    self.version = "default"
    self.params = {"base": hf.load_params(self.model)}

  def paths(self):
    return [path for path, _ in self.log]

  def adapted(self, folder):
    """The base model with a peft adapter merged."""
    config = json.loads((folder / "adapter_config.json").read_text())
    merged = folder.with_name(f"{folder.name}.merged")
    shutil.copytree(self.model, merged)
    (merged / "checksums.json").unlink(missing_ok=True)
    tensors = load_file(merged / "model.safetensors")
    adapter = load_file(folder / "adapter_model.safetensors")
    for name, b in adapter.items():
      if name.endswith("lora_B.weight"):
        a = adapter[name.replace("lora_B", "lora_A")]
        target = name.removeprefix("base_model.model.").replace(".lora_B", "")
        tensors[target] += config["lora_alpha"] / config["r"] * b @ a
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    params = hf.load_params(merged)
    shutil.rmtree(merged)
    return params

  def answer(self, path, value):
    if path == "/openapi.json":
      return {"paths": dict.fromkeys(self.endpoints)}
    if path == "/v1/models":
      parents = {"base": None}
      rows = [{"id": x, "parent": parents.get(x, "base")} for x in self.params]
      return {"data": rows}
    if path == "/weight_info":
      return {"weight_version": self.version}
    if path == "/v1/load_lora_adapter":
      folder = pathlib.Path(value["lora_path"])
      self.params[value["lora_name"]] = self.adapted(folder)
    elif path == "/v1/unload_lora_adapter":
      del self.params[value["lora_name"]]
    elif path == "/collective_rpc":
      self.params["base"] = hf.load_params(value["kwargs"]["weights_path"])
    elif path == "/update_weight_version":
      self.version = value["new_version"]
    elif path.endswith(("/generate", "/completions")):
      return self.alter(self.sampled(path, value))
    return {}

  def sampled(self, path, value):
    options = value.get("sampling_params", value)
    ids = np.array([value.get("token_ids") or value["prompt"]], np.int32)
    prompts = Prompts(ids, np.ones(ids.shape, bool))
    cut = Sampling(
      *(options[x] for x in "temperature top_k top_p min_p".split())
    )
    run = program(self.model, options["n"], options["max_tokens"], cut)
    params = self.params[value["model"]]
    key = jax.random.key(options["seed"] // options["n"])
    samples, raw = jax.device_get(run(params, prompts, key))
    choices = []
    for j in range(options["n"]):
      mask = samples.completion_mask[0, j]
      logprobs = (raw if self.raw else samples.logprobs)[0, j][mask].tolist()
      choice = {
        "index": j,
        "token_ids": samples.completion_ids[0, j][mask].tolist(),
      }
      if "sampling_params" in value:
        content = [{"logprob": x} for x in logprobs]
        span = {"version": self.version, "start": 0, "end": len(logprobs)}
        choice |= {"logprobs": {"content": content}, "weight_versions": [span]}
      else:
        choice["logprobs"] = {"token_logprobs": logprobs}
      choices.append(choice)
    model = {} if "sampling_params" in value else {"model": value["model"]}
    return {"choices": choices[::-1], **model}


@functools.cache
def program(model, n, length, cut):
  lm = hf.load(str(model))[0]
  options = {
    "group_size": n,
    "max_new_tokens": length,
    "eos_ids": EOS[str(model)],
  }

  @jax.jit
  def run(params, prompts, key):
    samples = rollout(lm, params, prompts, key, sampling=cut, **options)
    tokens = prompts.prompt_ids, prompts.prompt_mask, samples.completion_ids
    return samples, token_logprobs(lm, params, *tokens)[0]

  return run


EOS = {}


@contextlib.contextmanager
def serving(model, eos_ids):
  """Yields a stub and its address."""
  EOS[str(model)] = eos_ids
  stub = Stub(model)
  lock = threading.Lock()

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      path = self.path.partition("?")[0]
      length = int(self.headers.get("Content-Length") or 0)
      value = json.loads(self.rfile.read(length)) if length else None
      with lock:
        stub.log.append((path, value))
        samples = path.endswith(("/generate", "/completions"))
        if samples and stub.deaths:
          stub.deaths -= 1
          if not stub.deaths:
            stub.restart()
          return  # the connection ends without an answer
        if path not in ["/openapi.json", "/v1/models", *stub.endpoints]:
          return self.send(404, b"no such endpoint")
        model = samples and value["model"]
        if samples and model not in stub.params:
          return self.send(404, f"The model {model} does not exist".encode())
        self.send(200, json.dumps(stub.answer(path, value)).encode())

    do_GET = do_POST

    def send(self, code, text):
      self.send_response(code)
      self.send_header("Content-Length", str(len(text)))
      self.end_headers()
      self.wfile.write(text)

    def log_message(self, *_):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
      yield stub, f"http://127.0.0.1:{server.server_port}"
    finally:
      server.shutdown()
      thread.join()
