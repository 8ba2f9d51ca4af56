"""Requests to a vLLM server over HTTP, and its weights."""

import functools
import http.client
import json
import pathlib
import threading
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from grpojax.runtime.terminal import screen
from grpojax.training.step.engine import messages

LARGEST = 2**30  # bytes of an answer
INITIAL = "default"  # version of a new server's weights

ADAPTERS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WHOLE = (
  messages.GENERATE,  # its completions name the version of their weights
  *("/pause", "/collective_rpc", "/resume", "/update_weight_version"),
  "/weight_info",
)

# Servers are in the same network: without a proxy, and without redirections,
# which would turn a POST into a GET.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
  urllib.request.HTTPHandler,
  urllib.request.HTTPSHandler,
  urllib.request.HTTPErrorProcessor,
  urllib.request.HTTPDefaultErrorHandler,
):
  _OPENER.add_handler(_handler())


class Unanswered(Exception):
  """Raised if a server cannot be reached, or fails: the request is repeated."""


class Refused(Exception):
  """Raised if a server refuses a request, with its reason."""


FAILURES = Unanswered, Refused, messages.Stale, messages.Invalid


class Server(NamedTuple):
  """A vLLM server."""

  url: str
  path: str  # endpoint that samples
  base: str  # name of the base model
  lock: threading.Lock


class Weights(NamedTuple):
  """Weights in a directory shared with the servers."""

  version: str  # also the name of an adapter
  directory: pathlib.Path
  is_adapter: bool


def call(url: str, path: str, value: Any = None, timeout: float = 60) -> bytes:
  """Sends a GET request, or a POST with a JSON `value`; returns the answer."""
  data = None if value is None else json.dumps(value).encode()
  headers = {"Content-Type": "application/json"}
  request = urllib.request.Request(url + path, data, headers)
  until = time.monotonic() + timeout
  try:
    try:
      with _OPENER.open(request, timeout=timeout) as answer:
        return _text(answer, until)
    except urllib.error.HTTPError as error:
      with error:
        reason = error.read(500).decode(errors="replace")
      reason = screen.printable(" ".join(reason.split()))
      kind = Refused if error.code < 500 and error.code != 429 else Unanswered
      raise kind(f"{path}: HTTP {error.code}: {reason}") from None
  except (OSError, http.client.HTTPException) as error:
    why = getattr(error, "reason", None) or error
    why = screen.printable(" ".join(str(why).split()))
    raise Unanswered(f"{path}: {why}") from None


def _text(answer: http.client.HTTPResponse, until: float) -> bytes:
  """Reads an answer; raises OSError if it ends early, or later than `until`."""
  text = bytearray()
  while part := answer.read1(2**20):
    text += part
    if len(text) > LARGEST:
      raise messages.Invalid(f"more than {LARGEST} bytes")
    if time.monotonic() > until:
      raise TimeoutError("timed out")
  if answer.length:
    raise ConnectionError(f"{answer.length} bytes are missing")
  return bytes(text)


def opened(url: str, adapters: bool) -> Server:
  """Returns a server.

  Raises Refused if it lacks an endpoint, or if adapters would be added to the
  weights of another run.
  """
  api = messages.parse(call(url, "/openapi.json"))
  paths = messages.field(api, "paths", dict)
  path = messages.GENERATE
  if adapters and path not in paths:
    path = messages.COMPLETIONS
  missing = {*(ADAPTERS if adapters else WHOLE), path} - set(paths)
  if missing:
    text = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (adapters)"
    if not adapters:
      text = "--enable-scale-out and VLLM_SERVER_DEV_MODE=1 (all weights)"
    raise Refused(
      f"has no {', '.join(sorted(missing))}: start vLLM with {text}; see "
      "docs/engines.md"
    )
  if adapters and "/weight_info" in paths and _version(url) != INITIAL:
    raise Refused("has weights of another run: start vLLM again")
  for name, parent in _models(url).items():
    if not parent:
      return Server(url, path, name, threading.Lock())
  raise messages.Invalid("/v1/models names no base model")


def _models(url: str) -> dict[str, Any]:
  """Maps the names of a server's models to their base models, if any."""
  models = messages.parse(call(url, "/v1/models"))
  rows = messages.field(models, "data", list)
  return {messages.field(row, "id", str): row.get("parent") for row in rows}


def _version(url: str) -> str:
  """Returns the version of the base model's weights."""
  info = messages.parse(call(url, "/weight_info"))
  return messages.field(info, "weight_version", str)


def has(at: Server, weights: Weights) -> bool:
  """Returns True if a server serves the weights."""
  if weights.is_adapter:
    return weights.version in _models(at.url)
  return _version(at.url) == weights.version


def load(at: Server, weights: Weights, timeout: float) -> None:
  """Loads the weights, unless the server has them already."""
  if has(at, weights):
    return
  post = functools.partial(call, at.url, timeout=timeout)
  path = str(weights.directory)
  if weights.is_adapter:
    adapter = {"lora_name": weights.version, "lora_path": path}
    post("/v1/load_lora_adapter", adapter)
    return
  # Requests wait while the server is paused.
  reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
  post("/pause?mode=wait", {})
  post("/collective_rpc", reload)
  # The version comes last: without it, the weights are loaded again.
  post("/resume", {})
  post("/update_weight_version", {"new_version": weights.version})


def unload(at: Server, weights: Weights) -> None:
  """Unloads an unused adapter, if the server has it."""
  if weights.is_adapter and has(at, weights):
    call(at.url, "/v1/unload_lora_adapter", {"lora_name": weights.version})
