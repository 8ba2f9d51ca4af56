"""A sampler whose completions come from vLLM servers.

    run       write weights |      | ask | rewards, update of another step
    servers                 | load |     | sample

Each prompt is one request to one server. A failed request is sent again, also
to a server that was started again, which first loads the weights.
"""

import atexit
import functools
import itertools
import pathlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from grpojax.core import decoding, meshes, rows
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.models import huggingface as hf
from grpojax.models import lora
from grpojax.runtime.files import run_storage
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenization
from grpojax.training import policies
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes, sampling
from grpojax.training.step.engine import messages, server
from grpojax.training.step.engine.messages import Completion, Request
from grpojax.training.step.engine.server import Server, Weights

REFUSALS = 3  # of a request in a row; the last one ends the run
PAUSE = 0.2  # seconds before a request is first repeated
TRIED = 16  # tokens of each completion in `check_logprobs`
TEMPERATURE = 0.7  # of the samples in `check_logprobs`
LARGEST_MISMATCH = 0.1  # nats per token, if the server has the policy's weights

CheckSignals = Callable[[], Any]


class Engine(NamedTuple):
  """Servers, and what their completions must be."""

  servers: Sequence[Server]
  vocabulary: messages.Vocabulary
  seconds: float  # of failures in a row, after which the run stops
  locks: Sequence[threading.Lock]  # one thread at a time loads a server


# Requests


def insist(
  action: Callable[[], Any],
  seconds: float,
  stop: threading.Event,
  recover: Callable[[], Any] = lambda: None,
) -> Any:
  """Returns the result of an action, which is repeated after failures.

  `recover` is called before a repetition. Raises NoSamples if failures go on
  for `seconds`, at the last of `REFUSALS`, and once `stop` is set.
  """
  refusals = 0
  began = None
  pause = PAUSE
  while not stop.is_set():
    try:
      if began is not None:
        recover()
      return action()
    except messages.Invalid as error:
      text = f"a vLLM server sent an invalid answer: {error}"
      raise sampling.NoSamples(text) from error
    except (server.Refused, server.Unanswered, messages.Stale) as error:
      now = time.monotonic()
      began = now if began is None else began
      refusals = refusals + 1 if isinstance(error, server.Refused) else 0
      if refusals == REFUSALS:
        text = f"a vLLM server refused a request: {error}"
        raise sampling.NoSamples(text) from error
      if now - began > seconds:
        text = f"vLLM failed for {seconds:g} s (sampling.engine_timeout)"
        raise sampling.NoSamples(f"{text}: {error}") from error
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


def waiting(results: Sequence[futures.Future], check: CheckSignals) -> Iterator:
  """Yields at least once, and until all results are there or one failed."""
  yield ()
  while True:
    check()
    options = {"timeout": 0.05, "return_when": futures.FIRST_EXCEPTION}
    done, pending = futures.wait(results, **options)
    for result in done:
      result.result()  # raises its error
    if not pending:
      return
    yield ()


def on_all(
  calls: Sequence[Callable[[], Any]], seconds: float, check: CheckSignals
) -> list[Any]:
  """Returns the results of calls, each of them repeated after failures."""
  stop = threading.Event()
  insisting = [functools.partial(insist, x, seconds, stop) for x in calls]
  results = start(insisting)
  try:
    for _ in waiting(results, check):
      pass
  finally:
    stop.set()
  return [result.result() for result in results]


def open_servers(
  settings: TrainSettings, check: CheckSignals = lambda: None
) -> list[Server]:
  """Waits for the servers; raises NoSamples if one lacks an endpoint."""
  options = settings.sampling
  calls = [
    functools.partial(server.opened, url, settings.lora.rank > 0)
    for url in options.engine
  ]
  return on_all(calls, options.engine_timeout, check)


def check_servers(
  settings: TrainSettings,
  run: pathlib.Path,
  check_signals: CheckSignals = lambda: None,
) -> None:
  """Checks the servers, and that they can read weights; raises NoSamples."""
  addresses = ", ".join(settings.sampling.engine)
  if distributed.several():
    raise sampling.NoSamples(
      f"sampling.engine = {addresses}: needs a run of a single process"
    )
  url = run_storage.origin(run)
  if not settings.sampling.engine_weights and run_storage.is_url(url):
    raise sampling.NoSamples(
      f"{url} is no directory that servers can read: set "
      "sampling.engine_weights to a shared one"
    )
  open_servers(settings, check_signals)


def ask(
  engine: Engine, weights: Weights, number: int, request: Request, stop
) -> list[Completion]:
  """Asks server `number` for completions, and repeats a failed request."""
  at = engine.servers[number]
  model = weights.version if weights.is_adapter else at.base
  body = messages.body(request, engine.vocabulary, at.path, model)

  def send() -> list[Completion]:
    text = server.call(at.url, at.path, body, engine.seconds)
    answer = messages.parse(text)
    version = None if weights.is_adapter else weights.version
    return messages.read(
      answer, request, engine.vocabulary, at.path, model, version
    )

  def recover() -> None:
    with engine.locks[number]:
      server.load(at.url, weights, engine.seconds)

  return insist(send, engine.seconds, stop, recover)


# Weights


def publisher(
  settings: TrainSettings,
  policy: policies.Policy,
  directory: pathlib.Path,
  engine: Engine,
) -> Callable[[Params, CheckSignals], Weights]:
  """Returns a function that makes all servers serve parameters.

  It writes and loads parameters once, and returns when they are loaded, so the
  parameters may be donated later. All earlier requests must have ended.
  """
  # A server keeps adapters and cached prompts by name, so no run reuses one.
  prefix = f"{settings.name}-{secrets.token_hex(4)}"
  numbers = itertools.count(1)

  def remove(versions: str) -> None:
    for old in directory.glob(versions):
      shutil.rmtree(old, ignore_errors=True)

  remove(f"{settings.name}-{'[0-9a-f]' * 8}-*")  # left by a killed run
  atexit.register(remove, f"{prefix}-*")
  last: list[tuple[Array, Weights]] = []

  def publish(params: Params, check: CheckSignals) -> Weights:
    leaf = jax.tree.leaves(params)[0]
    if last and last[0][0] is leaf:
      return last[0][1]
    version = f"{prefix}-{next(numbers)}"
    path = directory / version
    weights = Weights(version, path, policy.frozen is not None)
    write(settings, policy, params, path)
    seconds = engine.seconds
    urls = [at.url for at in engine.servers]
    loads = [functools.partial(server.load, x, weights, seconds) for x in urls]
    on_all(loads, seconds, check)
    if last:
      _, old = last.pop()
      unloads = [functools.partial(server.unload, url, old) for url in urls]
      on_all(unloads, seconds, check)
      shutil.rmtree(old.directory, ignore_errors=True)
    last.append((leaf, weights))
    return weights

  return publish


def write(
  settings: TrainSettings,
  policy: policies.Policy,
  params: Params,
  path: pathlib.Path,
) -> None:
  """Writes parameters to a new directory: adapters for peft, or all weights."""
  files = policy.files
  if policy.frozen is not None:
    base = str(files.directory)
    lora.save_peft(path, params, files.config, settings.lora.alpha, base)
    return
  hf.save(
    path,
    params,
    files.directory,
    dtype=settings.model.dtype,
    ignore_keys=settings.model.ignore_keys,
  )


# Samples


def vocabulary_of(policy: policies.Policy) -> messages.Vocabulary:
  """Returns the ids that have a token, and those that end a completion."""
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
  prompts: Prompts,
  groups: Sequence[Sequence[Completion]],
  length: int,
  *,
  ends: Sequence[int],
  pad_id: int,
) -> Rollout:
  """Returns the rollout of B groups of G completions, with T = `length`."""
  shape = len(groups), max(map(len, groups)), length
  ids = np.full(shape, pad_id, np.int32)
  logprobs = np.zeros(shape, np.float32)
  lengths = np.zeros(shape[:2], np.int32)
  finished = np.zeros(shape[:2], bool)
  for i, group in enumerate(groups):
    for j, completion in enumerate(group):
      count = len(completion.ids)
      ids[i, j, :count] = completion.ids
      logprobs[i, j, :count] = completion.logprobs
      lengths[i, j] = count
      finished[i, j] = count > 0 and completion.ids[-1] in ends
  return Rollout(
    prompt_ids=prompts.prompt_ids,
    prompt_mask=prompts.prompt_mask,
    completion_ids=ids,
    completion_mask=np.arange(length) < lengths[..., None],
    logprobs=logprobs,
    finished=finished,
  )


def check_logprobs(
  policy: policies.Policy,
  params: Params,
  rollout: Rollout,
  mesh: jax.sharding.Mesh,
) -> None:
  """Compares a server's log-probabilities at `TEMPERATURE` with the policy's.

  Raises NoSamples if they are those of temperature 1, or of other weights.
  """

  def score(lm, params, *tokens):
    each = [Sampling(TEMPERATURE), Sampling()]
    return [token_logprobs(lm, params, *tokens, sampling=x)[0] for x in each]

  names = "prompt_ids", "prompt_mask", "completion_ids"
  tokens = meshes.place([getattr(rollout, name) for name in names], mesh)
  scores = meshes.fetch(policies.jit(policy, score)(params, *tokens))
  mask = rollout.completion_mask
  own, raw = (np.abs(x - rollout.logprobs)[mask].mean() for x in scores)
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
) -> sampling.Sampler:
  """Returns a sampler; it writes weights below the run's `directory`."""
  options = settings.sampling
  length = options.max_new_tokens
  servers = open_servers(settings)
  locks = [threading.Lock() for _ in servers]
  seconds = options.engine_timeout
  engine = Engine(servers, vocabulary_of(policy), seconds, locks)
  directory = pathlib.Path(options.engine_weights or directory / "engine")
  publish = publisher(settings, policy, directory.absolute(), engine)
  empty = [Completion([], [])] * group_size
  checked = []  # versions of weights that passed `check_logprobs`

  def ask_all(weights, key, first, stop, prompts, length, distribution):
    """Starts a request per prompt; a prompt without tokens pads the batch."""
    ids, mask = meshes.fetch((prompts.prompt_ids, prompts.prompt_mask))
    calls = []
    for i, seed in enumerate(seeds(key, first, len(ids), group_size)):
      row = ids[i][mask[i]].tolist()
      request = Request(row, group_size, length, seed, distribution)
      number = i % len(servers)
      call = functools.partial(ask, engine, weights, number, request, stop)
      calls.append(call if row else lambda: empty)
    return start(calls)

  def sample(params, prompts, examples, key, *first, check_signals=None):
    del examples
    check = check_signals or (lambda: None)
    began = time.perf_counter()
    weights = publish(params, check)
    stop = threading.Event()
    number = first[0] if first else 0
    begin = functools.partial(ask_all, weights, key, number, stop)
    tokens = {"ends": policy.eos_ids, "pad_id": policy.pad_id}
    try:
      if not checked:
        one = rows.take(prompts, slice(0, 1))
        tried = begin(one, TRIED, Sampling(TEMPERATURE))
        for _ in waiting(tried, check):
          pass
        groups = [x.result() for x in tried]
        rollout = rollout_of(one, groups, TRIED, **tokens)
        check_logprobs(policy, params, rollout, mesh)
        checked.append(weights.version)
      times = {"sync": time.perf_counter() - began}
      # From the first yield on, the parameters may be donated.
      asked = begin(prompts, length, options.distribution)
      yield from waiting(asked, check)
    finally:
      stop.set()
    groups = [x.result() for x in asked]
    rollout = rollout_of(prompts, groups, length, **tokens)
    return episodes.sampled(rows.place(rollout, mesh), None, times)

  return sample
