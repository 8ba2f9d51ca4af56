"""Fixtures for tests of steps and runs."""

import contextlib
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from grpojax import train
from grpojax.core import meshes
from grpojax.core.types import Rollout
from grpojax.models import huggingface as hf
from grpojax.models import sharding
from grpojax.runtime.files import records
from grpojax.training.policies import Policy
from grpojax.training.run import setup
from grpojax.training.step import host, scoring
from grpojax.training.step.extension import Inputs
from grpojax.training.step.extensions import open_extensions


class Words:
  """A tokenizer that prints ids as numbers."""

  all_special_ids = ()

  def decode(self, ids, **_):
    return " ".join(map(str, ids))


@pytest.fixture
def word_policy():
  """`(lm, eos_ids) -> Policy` with the tokenizer `Words`."""
  return lambda lm, eos_ids=(0,): Policy(
    pathlib.Path(), lm, Words(), eos_ids, 0
  )


@pytest.fixture
def one_device():
  return meshes.make_mesh(devices=jax.devices()[:1])


@pytest.fixture
def samples_of():
  """`(mask [B, G, T], finished) -> Rollout` for prompts of one token."""

  def samples_of(mask, finished=True):
    mask = jnp.asarray(mask, bool)
    rows = jnp.ones((mask.shape[0], 1), bool)
    return Rollout(
      prompt_ids=rows.astype(jnp.int32),
      prompt_mask=rows,
      completion_ids=jnp.ones(mask.shape, jnp.int32),
      completion_mask=mask,
      logprobs=jnp.zeros(mask.shape),
      finished=jnp.broadcast_to(jnp.asarray(finished, bool), mask.shape[:2]),
    )

  return samples_of


@pytest.fixture
def write_data(tmp_path):
  """`(folder, **rows)`: writes the JSON lines of each split."""

  def write_data(folder=".", **rows_of_splits):
    (tmp_path / folder).mkdir(exist_ok=True)
    for split, rows in rows_of_splits.items():
      text = "".join(json.dumps(row) + "\n" for row in rows)
      (tmp_path / folder / f"{split}.jsonl").write_text(text)
    return str(tmp_path / folder)

  return write_data


@pytest.fixture(scope="session")
def classifier(toy_model, tmp_path_factory):
  """A reward model with the toy model's body and tokenizer."""
  folder = tmp_path_factory.mktemp("reward_model")
  source = shutil.copytree(toy_model, folder / "source")
  kind = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
  config = json.loads((source / "config.json").read_text()) | kind
  (source / "config.json").write_text(json.dumps(config))
  head = jax.random.normal(jax.random.key(0), (16, 1))
  params = hf.load_params(toy_model) | {"score": head}
  hf.save(folder / "classifier", params, source)
  return folder / "classifier"


@pytest.fixture
def train_toy(toy_task, toy_model, tmp_path):
  """`(name, **settings) -> rows of metrics.jsonl` of a run on the toy task."""

  def train_toy(name="run", **settings):
    words = toy_task.arguments(toy_model, **settings)
    train.main([*words, f"--run_dir={tmp_path / name}"])
    return records.read_jsonl(tmp_path / name / "metrics.jsonl")

  return train_toy


SHORT = {"steps": 2, "eval.every": 2, "checkpoint.every": 1, "batch_size": 4}
SHORT |= {"eval.num_prompts": 4, "log.samples_every": 1}


@pytest.fixture
def train_short(train_toy):
  """`train_toy` with the settings `SHORT` by default."""
  return lambda name="run", **changes: train_toy(name, **SHORT | changes)


@pytest.fixture
def open_step():
  """`(settings, policy, params, tx, reference) -> (mesh, state, Step)`."""
  pools = contextlib.ExitStack()

  def open_step(settings, policy, params, tx, reference=False):
    pool = pools.enter_context(scoring.open_reward_pool(settings))
    mesh = setup.make_mesh(settings)
    first = lambda params: setup.first_state(settings, tx, params)
    whole = ((r".*", PartitionSpec()),)  # for any parameter names
    rules = {} if mesh.size > 1 else {"rules": whole}
    shardings = sharding.shardings(jax.eval_shape(first, params), mesh, **rules)
    state = jax.jit(first, out_shardings=shardings)(params)
    if reference:
      copy = jax.tree.map(jnp.copy, params)
      reference = jax.device_put(copy, shardings.params)
    inputs = Inputs(
      settings, policy, tx, shardings, mesh, reference or None, pool
    )
    extensions = open_extensions(inputs)
    return mesh, state, host.open_step(inputs, extensions, settings.group_size)

  with pools:
    yield open_step
