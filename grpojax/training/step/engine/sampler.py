"""A sampler whose completions come from vLLM servers.

    run       write weights |      | ask | rewards, update of another step
    servers                 | load |     | sample

Each prompt is a request to one of the servers. A failed request is sent again;
a restarted server first loads the weights.
"""

import atexit
import functools
import itertools
import pathlib
import secrets
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from grpojax.core import decoding, meshes, rows
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.environments.episodes import result
from grpojax.models import huggingface as hf
from grpojax.models import lora
from grpojax.runtime.cli.configs import config_error
from grpojax.runtime.files import run_storage
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenization
from grpojax.training import policies
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes, sampling
from grpojax.training.step.engine import messages, server
from grpojax.training.step.engine.messages import Completion, Request
from grpojax.training.step.engine.server import Server, Weights

REFUSALS = 3  # in a row; the third refusal of a request ends the run
PAUSE = 0.2  # seconds before a request is first repeated
TRIED = 16  # tokens of each completion in `check_logprobs`
TEMPERATURE = 0.7  # of the samples in `check_logprobs`
LARGEST_MISMATCH = 0.1  # nats per token, if the server has the policy's weights

CheckSignals = Callable[[], Any]


# Requests


def reporter() -> Callable[[str], None]:
  """Returns a function that prints each text once, to stderr."""
  return functools.cache(lambda text: print(text, file=sys.stderr, flush=True))


def insist(
  url: str,
  action: Callable[[], Any],
  seconds: float,
  stop: threading.Event,
  report: Callable[[str], None],
  recover: Callable[[], Any] = lambda: None,
) -> Any:
  """Returns the result of an action, which is repeated after failures.

  `report` shows the first failure; `recover` is called before a repetition.
  Raises NoSamples if failures go on for `seconds`, at the last of `REFUSALS`,
  and once `stop` is set.
  """
  refusals = 0
  began = None
  pause = PAUSE
  while not stop.is_set():
    try:
      if began is not None:
        recover()
      return action()
    except server.FAILURES as error:
      now = time.monotonic()
      first = began is None
      began = now if first else began
      refusals = refusals + 1 if isinstance(error, server.Refused) else 0
      why = ""
      if isinstance(error, messages.Invalid):
        why = "sent an invalid answer"
      elif refusals == REFUSALS:
        why = "refused a request"
      elif now - began > seconds:
        why = f"failed for {seconds:g} s (sampling.engine_timeout)"
      if why:
        text = f"a vLLM server {why}: {url}: {error}"
        raise sampling.NoSamples(text) from error
      if first:
        report(f"{url}: {error}; trying again for up to {seconds:g} s")
    stop.wait(pause)
    pause = min(2 * pause, 5.0)
  raise sampling.NoSamples("the samples are no longer needed")


def start(calls: Sequence[Callable[[], Any]]) -> list[futures.Future]:
  """Starts a thread per call; a thread does not delay the program's end."""

  def run(call, future):
    try:
      future.set_result(call())
    except BaseException as error:
      future.set_exception(error)

  results = [futures.Future() for _ in calls]
  for call, future in zip(calls, results, strict=True):
    threading.Thread(target=run, args=(call, future), daemon=True).start()
  return results


def waiting(results: Sequence[futures.Future], check: CheckSignals):
  """Yields until all results are there, and returns them; raises an error."""
  pending = results
  while pending:
    yield ()
    check()
    done, pending = futures.wait(pending, 0.05, futures.FIRST_EXCEPTION)
    for finished in done:
      finished.result()  # raises its error
  return [x.result() for x in results]


def on_all(
  calls: Mapping[str, Callable[[], Any]],
  seconds: float,
  check: CheckSignals,
) -> list[Any]:
  """Calls a function per address, and repeats it after failures."""
  stop = threading.Event()
  common = seconds, stop, reporter()
  repeated = [functools.partial(insist, *x, *common) for x in calls.items()]
  try:
    return result(waiting(start(repeated), check))
  finally:
    stop.set()


def open_servers(
  settings: TrainSettings,
  run: pathlib.Path,
  check: CheckSignals = lambda: None,
) -> list[Server]:
  """Waits for the servers of a run in the directory `run`.

  Raises NoSamples if a server lacks an endpoint or cannot read weights.
  """
  options = settings.sampling
  why = ""
  if distributed.several():
    why = "needs a run of a single process"
  elif not options.engine_weights and run_storage.is_url(
    run_storage.origin(run)
  ):
    why = "cannot read a run on gs://: set sampling.engine_weights"
  if why:
    text = config_error("sampling.engine", options.engine, why)
    raise sampling.NoSamples(text)
  if folder := options.engine_weights:
    try:
      pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
      text = config_error("sampling.engine_weights", folder, str(error))
      raise sampling.NoSamples(text) from None
  adapters = settings.lora.rank > 0
  calls = {
    url: functools.partial(server.opened, url, adapters)
    for url in options.engine
  }
  return on_all(calls, options.engine_timeout, check)


def ask(
  at: Server,
  weights: Weights,
  request: Request,
  vocabulary: messages.Vocabulary,
  seconds: float,
  stop: threading.Event,
  report: Callable[[str], None],
) -> list[Completion]:
  """Asks a server for completions, and repeats a failed request."""
  model = weights.version if weights.is_adapter else at.base
  version = server.INITIAL if weights.is_adapter else weights.version
  body = messages.body(request, vocabulary, at.path, model)

  def send() -> list[Completion]:
    answer = messages.parse(server.call(at.url, at.path, body, seconds))
    return messages.read(answer, request, vocabulary, at.path, model, version)

  def recover() -> None:
    with at.lock:  # the first thread loads the weights for all
      server.load(at, weights, seconds)

  return insist(at.url, send, seconds, stop, report, recover)


# Weights


def publisher(
  settings: TrainSettings,
  policy: policies.Policy,
  directory: pathlib.Path,
  run: pathlib.Path,
  servers: Sequence[Server],
) -> Callable[[Params, CheckSignals], Weights]:
  """Returns a function to load parameters into all servers.

  It writes parameters of `run` below `directory` and loads them, once, and
  returns when they are loaded, so they may be donated later. All earlier
  requests must have ended.
  """
  # A server caches adapters and prompts by name, so each run has new names.
  # Other runs may write to the same directory, also with the same name.
  origin = str(run_storage.origin(run.absolute()))
  owner = f"{settings.name}-{zlib.crc32(origin.encode()):08x}"
  prefix = f"{owner}-{secrets.token_hex(4)}"
  seconds = settings.sampling.engine_timeout
  numbers = itertools.count(1)
  last: list[tuple[Array, Weights]] = []

  def remove(versions: str) -> None:
    for old in directory.glob(versions):
      shutil.rmtree(old, ignore_errors=True)

  remove(f"{owner}-{'[0-9a-f]' * 8}-*")  # left by a killed run
  atexit.register(remove, f"{prefix}-*")

  def call_all(function, check, *args):
    calls = {at.url: functools.partial(function, at, *args) for at in servers}
    on_all(calls, seconds, check)

  def publish(params: Params, check: CheckSignals) -> Weights:
    leaf = jax.tree.leaves(params)[0]
    if last and last[0][0] is leaf:
      return last[0][1]
    version = f"{prefix}-{next(numbers)}"
    path = directory / version
    weights = Weights(version, path, policy.frozen is not None)
    files = policy.files
    if weights.is_adapter:
      base = str(files.directory)
      lora.save_peft(path, params, files.config, settings.lora.alpha, base)
    else:
      options = settings.model
      dtype = {"dtype": options.dtype, "ignore_keys": options.ignore_keys}
      hf.save(path, params, files.directory, **dtype)
    call_all(server.load, check, weights, seconds)
    if last:
      _, old = last.pop()
      call_all(server.unload, check, old)
      remove(old.version)
    last.append((leaf, weights))
    return weights

  return publish


# Samples


def vocabulary_of(policy: policies.Policy) -> messages.Vocabulary:
  """Returns the policy's ids with a token, and its EOS ids."""
  known = np.ones(policy.shape.vocab_size, bool)
  ends = policy.eos_ids
  for first, stop in tokenization.gaps(policy.tokenizer, len(known), ends):
    known[first:stop] = False
  return messages.Vocabulary(known, tuple(ends))


def seeds(key: Array, first_prompt: Array | int, count: int, size: int):
  """Returns a seed per prompt; vLLM adds 0, ..., `size` - 1 for its samples."""
  keys = decoding.sample_keys(key, (count, 1), first_prompt)[:, 0]
  bits = meshes.fetch(jax.vmap(jax.random.bits)(keys))
  return [int(x) * size for x in bits]


def rollout_of(
  policy: policies.Policy,
  prompts: Prompts,
  groups: Sequence[Sequence[Completion]],
  length: int,
) -> Rollout:
  """Returns the rollout of B groups of G completions, with T = `length`."""
  samples = [completion for group in groups for completion in group]
  size = len(groups), len(groups[0])
  lengths = np.reshape([len(x.ids) for x in samples], size)
  mask = np.arange(length) < lengths[..., None]
  ids = np.full(mask.shape, policy.pad_id, np.int32)
  ids[mask] = [token for x in samples for token in x.ids]
  logprobs = np.zeros(mask.shape, np.float32)
  logprobs[mask] = [value for x in samples for value in x.logprobs]
  ended = [bool(x.ids) and x.ids[-1] in policy.eos_ids for x in samples]
  return Rollout(
    prompt_ids=prompts.prompt_ids,
    prompt_mask=prompts.prompt_mask,
    completion_ids=ids,
    completion_mask=mask,
    logprobs=logprobs,
    finished=np.reshape(ended, size),
  )


def check_logprobs(
  policy: policies.Policy,
  params: Params,
  rollout: Rollout,
  mesh: jax.sharding.Mesh,
) -> None:
  """Compares servers' log-probabilities at `TEMPERATURE` with the policy's.

  Each prompt went to another server. Raises NoSamples if a server has other
  weights, or reports log-probabilities of temperature 1.
  """

  def score(lm, params, *tokens):
    each = [Sampling(TEMPERATURE), Sampling()]
    return [token_logprobs(lm, params, *tokens, sampling=x)[0] for x in each]

  names = "prompt_ids", "prompt_mask", "completion_ids"
  tokens = meshes.place([getattr(rollout, name) for name in names], mesh)
  scores = meshes.fetch(policies.jit(policy, score)(params, *tokens))
  mask = rollout.completion_mask
  counts = np.maximum(mask.sum((1, 2)), 1)  # a prompt may be empty
  gaps = [np.abs(x - rollout.logprobs) * mask for x in scores]
  own, raw = np.array([x.sum((1, 2)) / counts for x in gaps])
  own, raw = own[own.argmax()], raw[own.argmax()]
  if own <= LARGEST_MISMATCH and own <= max(raw, LARGEST_MISMATCH / 10):
    return
  text = (
    f"at temperature {TEMPERATURE} the server's log-probabilities differ from "
    f"the policy's by {own:.3g} nats per token on average"
  )
  if raw < min(own, LARGEST_MISMATCH):
    raise sampling.NoSamples(
      f"{text}, and by {raw:.3g} at temperature 1: start vLLM with "
      "--logprobs-mode processed_logprobs"
    )
  raise sampling.NoSamples(f"{text}: start vLLM with the model of model.path")


def make_sampler(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  directory: pathlib.Path,
  mesh: jax.sharding.Mesh,
  check_signals: CheckSignals = lambda: None,
) -> sampling.Sampler:
  """Returns a sampler; it writes weights below the run's `directory`."""
  options = settings.sampling
  length = options.max_new_tokens
  vocabulary = vocabulary_of(policy)
  servers = open_servers(settings, directory, check_signals)
  path = pathlib.Path(options.engine_weights or directory / "engine")
  publish = publisher(settings, policy, path.absolute(), directory, servers)
  empty = [Completion([], [])] * group_size
  checked = False

  def ask_all(weights, key, first, stop, prompts, length, distribution):
    """Starts a request per prompt; a prompt without tokens pads the batch."""
    ids, mask = meshes.fetch((prompts.prompt_ids, prompts.prompt_mask))
    common = {"vocabulary": vocabulary, "seconds": options.engine_timeout}
    common["report"] = reporter()
    calls = []
    for i, seed in enumerate(seeds(key, first, len(ids), group_size)):
      row = ids[i][mask[i]].tolist()
      request = Request(row, group_size, length, seed, distribution)
      at = servers[i % len(servers)]
      call = functools.partial(ask, at, weights, request, stop=stop, **common)
      calls.append(call if row else lambda: empty)
    return start(calls)

  def sample(params, prompts, examples, key, *first, check_signals=None):
    del examples
    nonlocal checked
    check = check_signals or (lambda: None)
    began = time.perf_counter()
    weights = publish(params, check)
    stop = threading.Event()
    begin = functools.partial(ask_all, weights, key, *(first or (0,)), stop)
    try:
      if not checked:
        # A prompt for each server that the first step asks.
        first_prompts = rows.take(prompts, slice(0, len(servers)))
        asked = begin(first_prompts, TRIED, Sampling(TEMPERATURE))
        groups = result(waiting(asked, check))
        tried = rollout_of(policy, first_prompts, groups, TRIED)
        check_logprobs(policy, params, tried, mesh)
        checked = True
      times = {"sync": time.perf_counter() - began}
      # From the first yield on, the parameters may be donated.
      asked = begin(prompts, length, options.distribution)
      groups = yield from waiting(asked, check)
    finally:
      stop.set()
    rollout = rollout_of(policy, prompts, groups, length)
    return episodes.sampled(rows.place(rollout, mesh), None, times)

  return sample
