"""Rollouts by vLLM servers: requests, answers, weights, failures."""

import functools
import json
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import refusal, rows_of
from vllm_stub import serving

from grpojax import train
from grpojax.core import meshes
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.logprobs import token_logprobs
from grpojax.core.types import Prompts
from grpojax.environments.episodes import result
from grpojax.runtime.processes import distributed
from grpojax.training import policies
from grpojax.training.step import sampling
from grpojax.training.step.engine import messages, sampler, server

V = 8
VOCABULARY = messages.Vocabulary(np.arange(V) < 7, (1,))
CUT = Sampling(0.7, top_k=5, top_p=0.9)
REQUEST = messages.Request([3, 4], 2, 3, 10, CUT)

# Requests and answers.


def test_a_request_names_all_parameters():
  body = messages.body(REQUEST, VOCABULARY, messages.GENERATE, "step")
  assert body["token_ids"] == [3, 4] and body["model"] == "step"
  options = body["sampling_params"]
  expected = dict(n=2, max_tokens=3, seed=10, temperature=0.7, top_k=5)
  expected |= dict(top_p=0.9, min_p=0.0, stop_token_ids=[1], logprobs=0)
  expected |= dict(repetition_penalty=1.0, logit_bias={"7": -100.0})
  assert expected.items() <= options.items()
  body = messages.body(REQUEST, VOCABULARY, messages.COMPLETIONS, "step")
  assert expected.items() <= body.items()
  assert body["prompt"] == [3, 4] and body["return_token_ids"]


def choice(index=0, ids=(5, 1), values=(-0.5, -0.25), version="v"):
  content = [{"logprob": x} for x in values]
  spans = [{"version": version, "start": 0, "end": 2}]
  own = {"index": index, "token_ids": list(ids), "weight_versions": spans}
  return own | {"logprobs": {"content": content}}


def read(*choices, **fields):
  answer = {"choices": list(choices), **fields}
  answer = messages.parse(json.dumps(answer).encode())
  return messages.read(
    answer, REQUEST, VOCABULARY, messages.GENERATE, "model", "v"
  )


def test_answers_are_read_in_the_order_of_their_numbers():
  cut = choice(ids=(2, 3, 4), values=(-1, 0, 1e-7))
  completions = read(choice(1), cut, model="model")
  assert completions[0] == ([2, 3, 4], [-1.0, 0.0, 0.0])
  assert completions[1] == ([5, 1], [-0.5, -0.25])


@pytest.mark.parametrize(
  "changes, text",
  [
    ({"index": 1}, "numbered"),
    ({"index": "0"}, "no int"),
    ({"ids": (7, 1)}, "7 is no id"),
    ({"ids": (-1, 1)}, "-1 is no id"),
    ({"ids": (8, 1)}, "8 is no id"),
    ({"ids": (True, 1)}, "True is no id"),
    ({"ids": (5.0, 1)}, "5.0 is no id"),
    ({"ids": (5, 6)}, "has 2 tokens, not 3: it must end"),
    ({"ids": (1, 5)}, "has 2 tokens, not 1"),
    ({"ids": (2, 3, 4, 1)}, "has 4 tokens"),
    ({"values": (-0.5,)}, "2 tokens have 1 log-prob"),
    ({"values": (-0.5, 0.1)}, "0.1 is no log-prob"),
    ({"values": (-0.5, "x")}, "'logprob' is no"),
    ({"values": (-0.5, float("nan"))}, "nan is no log-prob"),
    ({"values": (-0.5, float("-inf"))}, "-inf is no log-prob"),
    ({"values": (-0.5, -1e300)}, "-1e.300 is no log-prob"),
    ({"values": (-0.5, -(10**400))}, "0 is no log-prob"),
  ],
)
def test_unusable_answers_are_refused(changes, text):
  with pytest.raises(messages.Invalid, match=text):
    read(choice(**changes), choice(1))


def test_answers_need_all_choices_of_the_requested_weights():
  with pytest.raises(messages.Invalid, match="numbered"):
    read(choice())
  with pytest.raises(messages.Invalid, match="not JSON"):
    messages.parse(b"[" * 100_000)
  with pytest.raises(messages.Stale, match="of weights {'old'}, not 'v'"):
    read(choice(), choice(1, version="old"))
  with pytest.raises(messages.Stale, match="by 'old', not 'model'"):
    read(choice(), choice(1), model="old")


# Repetition.


def insist(outcomes, seconds=10.0, stop=None):
  events = []

  def action():
    outcome = outcomes[min(len(events), len(outcomes) - 1)]
    events.append("action")
    if isinstance(outcome, Exception):
      raise outcome
    return outcome

  recovered = []
  recover = lambda: recovered.append(len(events))
  stop = stop or threading.Event()
  reports = []
  common = seconds, stop, reports.append
  samples = sampler.insist("http://h", action, *common, recover)
  assert reports == ["http://h: gone; trying again for up to 10 s"]
  return samples, recovered


def test_failed_requests_are_repeated_after_a_recovery(monkeypatch):
  monkeypatch.setattr(sampler, "PAUSE", 0.0)
  gone, no = server.Unanswered("gone"), server.Refused("no")
  outcomes = [gone, no, no, messages.Stale("old"), no, 5]
  assert insist(outcomes) == (5, [1, 2, 3, 4, 5])
  with pytest.raises(
    sampling.NoSamples, match="refused a request: http://h: no"
  ):
    insist([gone, no, no, no, 5])
  with pytest.raises(sampling.NoSamples, match="failed for 0 s.*: gone"):
    insist([gone, gone, gone], seconds=0.0)
  with pytest.raises(sampling.NoSamples, match="invalid answer: http://h: odd"):
    insist([messages.Invalid("odd"), 5])
  stop = threading.Event()
  stop.set()
  with pytest.raises(sampling.NoSamples, match="no longer needed"):
    insist([5], stop=stop)


# Servers.


ANSWERS = {
  b"200 OK\r\nContent-Length: 9\r\n\r\n{}": "7 bytes are missing",
  b"200 OK\r\n\r\n" + b" " * 200: "more than 100 bytes",
  b"302 Found\r\nLocation: /v1/models\r\n\r\n": "HTTP 302: $",
  b"404 No\r\n\r\n<p>\n\x1b": r"/v1/x: HTTP 404: <p> \\x1b$",
  b"500 No\r\nTransfer-Encoding: chunked\r\n\r\nff\r\na": "IncompleteRead",
  b"500 No\r\nContent-Length: 9\r\n\r\n...": "timed out",
  b"200 OK\r\n\r\n...": "timed out",
}


@pytest.mark.parametrize("sent", ANSWERS)
def test_answers_that_end_early_late_or_elsewhere(sent, monkeypatch):
  monkeypatch.setattr(server, "LARGEST", 100)
  text = ANSWERS[sent]

  def answer(listening):
    with listening.accept()[0] as connection:
      connection.recv(1000)
      connection.sendall(b"HTTP/1.1 " + sent)
      while "timed out" in text and not over.wait(0.02):
        connection.sendall(b"." * sent.startswith(b"200"))
      # Closing with unread bytes would reset the connection.
      connection.shutdown(socket.SHUT_WR)
      while connection.recv(1000):
        pass

  over = threading.Event()
  with socket.create_server(("127.0.0.1", 0)) as listening:
    thread = threading.Thread(target=answer, args=(listening,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
      seconds = 0.2 if text == "timed out" else 30.0
      with pytest.raises(server.FAILURES, match=text):
        server.call(url, "/v1/x", {}, seconds)
    finally:
      over.set()
      thread.join(30.0)


def test_several_processes_are_refused(monkeypatch, settings_with, tmp_path):
  monkeypatch.setattr(distributed, "several", lambda: True)
  settings = settings_with(
    sampling__engine=("http://127.0.0.1:9",),
    sampling__engine_timeout=0.1,
    loss__correction="token_truncate",
  )
  text = "sampling.engine = .*: needs a run of a single process"
  with pytest.raises(sampling.NoSamples, match=text):
    sampler.open_servers(settings, tmp_path)


WRONG = "http://[::1 http://..:80 http://a:b@h:80 http://h:x http://h\0:80"


def test_addresses_are_hosts_and_ports(settings_with):
  def settings(*urls):
    settings_with(sampling__engine=urls, loss__correction="token_truncate")

  settings("http://h", "https://a-b.c:8000", "http://[::1]:80")
  wrong = [*WRONG.split(), "http://" + 64 * "a", "file:///x", "", "h:80"]
  for urls in [*((url,) for url in wrong), ("http://h", "http://h")]:
    with pytest.raises(ValueError, match="must be different addresses"):
      settings(*urls)


def test_a_directory_for_weights_must_be_writable(settings_with, tmp_path):
  (tmp_path / "file").touch()
  settings = settings_with(
    sampling__engine=("http://127.0.0.1:9",),
    sampling__engine_weights=str(tmp_path / "file"),
    loss__correction="token_truncate",
  )
  with pytest.raises(sampling.NoSamples, match="engine_weights = .* exists"):
    sampler.open_servers(settings, tmp_path)


@pytest.fixture(scope="module")
def policy(toy_model):
  return policies.load_policy(str(toy_model))


@pytest.fixture
def stub(toy_model, policy, monkeypatch):
  monkeypatch.setattr(sampler, "PAUSE", 0.01)
  with serving(toy_model, policy.eos_ids) as (stub, url):
    stub.url = url
    yield stub


@pytest.fixture
def open_sampler(stub, policy, toy_model, settings_with, tmp_path, one_device):
  """`(**settings) -> (sampler, params, prompts)`; groups of 3, 6 tokens."""

  def open_sampler(**changes):
    changes = {"sampling__engine_timeout": 5.0} | changes
    changes = {"sampling__engine": (stub.url,)} | changes
    settings = settings_with(
      sampling__max_new_tokens=6,
      loss__correction="token_truncate",
      model__path=str(toy_model),
      **changes,
    )
    own = policy
    if settings.lora.rank:
      options = vars(settings.lora)
      own = policies.with_adapters(policy, jax.random.key(1), **options)
      noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(2), x.shape)
      own = own._replace(params=jax.tree.map(noise, own.params))
    ids = np.arange(8, dtype=np.int32).reshape(4, 2) + 3
    mask = np.array([[True, True], [True, False], [True, True], [False] * 2])
    prompts = meshes.place(Prompts(ids, mask), one_device, "batch")
    run = sampler.make_sampler(settings, own, 3, tmp_path, one_device)
    return functools.partial(run, check_signals=lambda: None), own, prompts

  return open_sampler


def draw(run, policy, prompts, key=3, params=None):
  params = policy.params if params is None else params
  return result(run(params, prompts, [], jax.random.key(key), jnp.int32(0)))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("generate", [True, False])
def test_samples_have_the_log_probabilities_of_the_policy(
  stub, open_sampler, one_device, rank, generate
):
  if not generate:
    stub.endpoints.remove(messages.GENERATE)
    if not rank:
      with pytest.raises(sampling.NoSamples, match="--enable-scale-out and"):
        open_sampler()
      return
  temperature = {"sampling__temperature": 0.8}
  run, own, prompts = open_sampler(lora__rank=rank, **temperature)
  sampled = draw(run, own, prompts)
  samples = jax.device_get(sampled.rollout)
  score = lambda lm, params, *x: token_logprobs(
    lm, params, *x, sampling=Sampling(0.8)
  )
  tokens = prompts.prompt_ids, prompts.prompt_mask, samples.completion_ids
  expected = policies.jit(own, score)(own.params, *tokens)[0]
  mask = samples.completion_mask
  assert mask[:3, :, 0].all() and not mask[3].any()
  np.testing.assert_allclose(samples.logprobs[mask], expected[mask], atol=1e-5)
  assert not samples.logprobs[~mask].any()
  last = np.take_along_axis(
    samples.completion_ids, mask.sum(-1, keepdims=True) - 1, axis=-1
  )[..., 0]
  ended = np.isin(last, own.eos_ids) & mask.any(-1)
  np.testing.assert_array_equal(samples.finished, ended)
  assert sampled.seconds["sync"] > 0
  # The same key repeats the samples; another one does not.
  again = jax.device_get(draw(run, own, prompts).rollout)
  np.testing.assert_array_equal(again.completion_ids, samples.completion_ids)
  other = jax.device_get(draw(run, own, prompts, key=4).rollout)
  assert (other.completion_ids != samples.completion_ids).any()


@pytest.mark.slow
def test_prompts_are_dealt_out_to_servers(stub, open_sampler, policy):
  expected = draw(*open_sampler(lora__rank=2)).rollout
  with serving(stub.model, policy.eos_ids) as (other, url):
    run, own, prompts = open_sampler(
      lora__rank=2, sampling__engine=(stub.url, url)
    )
    other.raw = True
    with pytest.raises(sampling.NoSamples, match="--logprobs-mode processed"):
      draw(run, own, prompts)
    other.raw = False
    draw(run, own, prompts)
    stub.log.clear()
    other.log.clear()
    samples = draw(run, own, prompts).rollout
    jax.tree.map(np.testing.assert_array_equal, samples, expected)
    # The last prompt is empty.
    requests = [x.paths().count(messages.GENERATE) for x in (stub, other)]
    assert requests == [2, 1]
    newer = jax.tree.map(lambda x: 1.1 * x, own.params)
    draw(run, own, prompts, params=newer)
    assert list(other.params) == ["base", list(stub.params)[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_weights_are_loaded_once_per_version(
  stub, open_sampler, tmp_path, rank
):
  others = tmp_path / "engine" / "arithmetic-01234567-89abcdef-1"
  others.mkdir(parents=True)
  run, own, prompts = open_sampler(lora__rank=rank)
  assert others.exists()  # of a run with the same name
  others.rmdir()
  load = "/v1/load_lora_adapter" if rank else "/collective_rpc"
  newer = jax.tree.map(lambda x: 1.1 * x, own.params)
  first = draw(run, own, prompts).rollout
  draw(run, own, prompts, key=5)
  assert stub.paths().count(load) == 1
  folders = list((tmp_path / "engine").iterdir())
  second = draw(run, own, prompts, params=newer).rollout
  assert stub.paths().count(load) == 2
  assert np.abs(first.logprobs - second.logprobs).max() > 1e-3
  # One version is left on the disk and in the server.
  (folder,) = (tmp_path / "engine").iterdir()
  assert [folder] != folders
  if rank:
    assert list(stub.params) == ["base", folder.name]
  else:
    assert stub.version == folder.name
    whole = "/pause /collective_rpc /resume /update_weight_version".split()
    assert [x for x in stub.paths() if x in whole] == 2 * whole


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_server_that_restarts_is_asked_the_same_again(
  stub, open_sampler, rank, deaths
):
  run, own, prompts = open_sampler(lora__rank=rank)
  expected = jax.device_get(draw(run, own, prompts).rollout)
  stub.deaths = deaths
  again = jax.device_get(draw(run, own, prompts).rollout)
  assert stub.deaths == 0
  jax.tree.map(np.testing.assert_array_equal, again, expected)


@pytest.mark.slow
def test_wrong_log_probabilities_are_refused_at_the_start(stub, open_sampler):
  stub.raw = True
  run, own, prompts = open_sampler()
  with pytest.raises(sampling.NoSamples, match="--logprobs-mode processed"):
    draw(run, own, prompts)

  def far(answer):
    for x in answer["choices"]:
      for token in x["logprobs"]["content"]:
        token["logprob"] -= 3.0
    return answer

  stub.raw = False
  stub.alter = far
  with pytest.raises(sampling.NoSamples, match="with the model of model.path"):
    draw(run, own, prompts)


@pytest.mark.slow
def test_a_server_that_stays_away_or_lacks_endpoints_is_named(
  stub, open_sampler
):
  stub.endpoints.remove("/weight_info")
  with pytest.raises(sampling.NoSamples, match="has no /weight_info: start"):
    open_sampler()
  stub.endpoints.append("/weight_info")
  stub.version = "other-3"
  with pytest.raises(sampling.NoSamples, match="has weights of another run"):
    open_sampler(lora__rank=2)
  run, own, prompts = open_sampler(sampling__engine_timeout=0.5)
  draw(run, own, prompts)
  stub.deaths = 10**6
  with pytest.raises(sampling.NoSamples, match="failed for 0.5 s .*engine_tim"):
    draw(run, own, prompts)


# Runs.

ENGINE = {"loss.correction": "token_truncate", "steps": 3, "eval.every": 3}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_samples_by_an_engine(stub, train_short, tmp_path, ahead, rank):
  settings = ENGINE | {"sampling.engine": stub.url, "lora.rank": rank}
  parts = {"sampling.parts": 2, "reward.workers": 1} if rank else {}
  settings |= parts | {"sampling.ahead": ahead}
  if ahead:  # small changes of the policy
    settings["optim.learning_rate"] = 1e-4
  train_short(**settings)
  rows = rows_of(tmp_path / "run")
  assert len(rows) == 3
  # Ahead of its last step a run samples nothing.
  assert all(row["seconds_sync"] >= 0 for row in rows[: 3 - ahead])
  assert rows[0]["rollout_mismatch_mean"] < 1e-5
  assert rows[2]["rollout_mismatch_mean"] < (1e-2 if ahead else 1e-5)


@pytest.mark.slow
def test_a_run_stops_beyond_the_bound_and_resumes(
  stub, train_short, tmp_path, capsys
):
  settings = ENGINE | {"sampling.engine": stub.url}
  before = stub.alter

  def off(answer):
    for x in answer["choices"]:
      for token in x["logprobs"]["content"]:
        token["logprob"] -= 0.05
    return answer

  stub.alter = off
  with pytest.raises(SystemExit, match="engine and trainer differed by more"):
    train_short(**settings)
  stub.alter = before
  with serving(stub.model, policies.load_policy(str(stub.model)).eos_ids) as (
    _,
    other,
  ):
    train_short(**settings | {"sampling.engine": other})
  assert len(rows_of(tmp_path / "run")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_without_an_answer_stops_and_resumes(
  stub, train_short, tmp_path, monkeypatch, ahead
):
  monkeypatch.setattr(sampler, "PAUSE", 0.01)
  settings = ENGINE | {"sampling.engine": stub.url, "sampling.ahead": ahead}
  settings |= {"sampling.engine_timeout": 0.5}
  settings["optim.learning_rate"] = 1e-4

  def die(answer):
    if sum(x.endswith("/generate") for x in stub.paths()) == 12:
      stub.deaths = 10**6
    return answer

  stub.alter = die
  with pytest.raises(SystemExit, match="server failed for 0.5 s"):
    train_short(**settings)
  done = len(rows_of(tmp_path / "run"))
  assert 1 <= done < 3
  stub.deaths = 0
  stub.alter = lambda answer: answer
  train_short(**settings)
  assert len(rows_of(tmp_path / "run")) == 3


@pytest.mark.slow
def test_a_missing_server_is_refused_before_the_run_starts(
  toy_task, toy_model, tmp_path
):
  words = toy_task.arguments(toy_model, **ENGINE)
  words += ["--config.sampling.engine=http://127.0.0.1:9"]
  words += ["--config.sampling.engine_timeout=0.1", f"--run_dir={tmp_path}/run"]
  assert "server failed for 0.1 s" in refusal(train, *words)
  assert not (tmp_path / "run").exists()
