"""Shared fixtures: small policies, settings and devices.

The option --jaxtyping-packages in pyproject.toml checks shapes and dtypes of
annotated functions in all tests.
"""

import functools
import gc
import os
import pathlib
import signal
import sys
import tempfile
import types

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh

from grpojax.core.types import LM, Prefix
from grpojax.models.transformer import transformer
from grpojax.runtime.processes import interrupts

HERE = pathlib.Path(__file__).parent
HELPERS = "aot core models statistics training translation".split()
sys.path += [str(HERE), *(str(HERE / folder) for folder in HELPERS)]
from small_models import config_with as decoder_config  # noqa: E402
from small_models import random_params  # noqa: E402
from toy_fixtures import toy, toy_model, toy_run, toy_task  # noqa: E402, F401

LONG = (
  "test_meshes.py test_processes.py test_mesh_programs.py test_environments.py "
  "test_sharding.py test_train.py test_advantages.py test_interrupted.py "
  "test_environment.py test_rollout.py test_forward.py test_families.py "
  "test_ahead.py test_adapters.py"
).split()


def pytest_configure(config):
  """Caches compiled programs per session and disables most optimizations.

  Settings are environment variables, for processes of xdist and of tests.
  JAX_COMPILATION_CACHE_DIR keeps programs for the next session;
  JAX_DISABLE_MOST_OPTIMIZATIONS=0 tests optimized programs.
  """
  gc.set_threshold(100_000, 50, 100)  # tracing makes many small objects
  if "PYTEST_XDIST_WORKER" in os.environ:
    return  # inherits the environment
  path = os.environ.get("JAX_COMPILATION_CACHE_DIR")
  if not path:
    directory = tempfile.TemporaryDirectory(prefix="compiled-")
    config.add_cleanup(directory.cleanup)
    path = directory.name
  name = "JAX_DISABLE_MOST_OPTIMIZATIONS"
  cheap = os.environ.get(name, "1").lower() not in ("0", "false")
  settings = {
    "jax_compilation_cache_dir": path,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_disable_most_optimizations": cheap,
  }
  for name, value in settings.items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)
  # Halves XLA's work. An unknown flag would end the process.
  if cheap and jax.__version_info__ < (0, 11):
    # Overwritten, because a device count would change the tests.
    os.environ["XLA_FLAGS"] = (
      "--xla_cpu_use_fusion_emitters=0 --xla_cpu_parallel_codegen_split_count=1"
    )


@pytest.fixture
def interpreted(monkeypatch):
  """Runs kernels on the CPU, by Pallas's interpreter."""
  from jax.experimental import pallas as pl  # slow imports
  from jax.experimental.pallas import tpu as pltpu

  call = functools.partial(pl.pallas_call, interpret=True)
  monkeypatch.setattr(pl, "pallas_call", call)
  # The interpreter has no memory spaces.
  monkeypatch.setattr(pltpu, "HBM", jax.ShapeDtypeStruct)


@pytest.fixture
def h100():
  """Sets the GPU for lowered kernels, which JAX needs since 0.11."""
  if jax.__version_info__ < (0, 11):
    yield
    return
  device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
    yield


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
  """Runs long files first, to balance processes.

  A case marked long is not slow, even if its function is.
  """
  items.sort(key=lambda item: item.path.name not in LONG)
  for item in items:
    if item.get_closest_marker("long"):
      item.own_markers[:] = [m for m in item.own_markers if m.name != "slow"]


@pytest.fixture
def ctrl_c():
  """Enables Ctrl-C, which shells disable for background jobs."""
  with interrupts.handled(signal.default_int_handler, signal.SIGINT):
    yield


@pytest.fixture(scope="session")
def tiny():
  """A decoder of width 16 with large random weights."""
  sizes = {"width": 16, "heads": 4, "kv_heads": 2, "mlp": 24}
  config = decoder_config(**sizes, qkv_bias=True, tied=False)
  lm = transformer(config)
  params = random_params(lm)
  return types.SimpleNamespace(config=config, lm=lm, params=params)


def tabular_lm(kinds, vocab):
  """A Markov chain: prompt kind and last token determine the next distribution.

  A prompt's kind is its first id. Parameters are logits [kinds, 1 + vocab,
  vocab]: row 0 is for the first token, row 1 + i for the token after i.
  """
  rows = kinds * (1 + vocab)

  def prefill(params, prompt_ids, prompt_mask):
    kind = prompt_ids[:, 0] % kinds * (1 + vocab)
    hidden = jax.nn.one_hot(kind, rows)
    return Prefix(hidden, prompt_mask.sum(-1), state=kind)

  def extend(params, prefix, ids, cache=None, positions=None, segments=None):
    row = prefix.state[:, None, None] + 1 + ids
    return jax.nn.one_hot(row, rows), cache

  return LM(
    init=lambda key: jax.random.normal(key, (kinds, 1 + vocab, vocab)),
    prefill=prefill,
    extend=extend,
    unembed=lambda params, hidden: hidden @ params.reshape(rows, vocab),
    init_cache=lambda b, g, t: (),
    grow_cache=lambda cache, slots: cache,
    map_rows=jax.tree.map,
  )


def tabular_log_table(table):
  """Log-probabilities of the chain in float64."""
  table = np.asarray(table, np.float64)
  table = table - table.max(-1, keepdims=True)
  return table - np.log(np.exp(table).sum(-1, keepdims=True))


def tabular_rows(kinds, ids):
  """Index of each token's distribution, [B, G, T]."""
  ids = np.asarray(ids)
  before = np.concatenate([np.zeros_like(ids[..., :1]), 1 + ids], -1)[..., :-1]
  return np.broadcast_to(np.asarray(kinds)[:, None, None], ids.shape), before


@pytest.fixture(scope="session")
def tabular():
  """Functions of a tabular policy with closed forms."""
  return types.SimpleNamespace(
    lm=tabular_lm, log_table=tabular_log_table, rows=tabular_rows
  )


@pytest.fixture(scope="session")
def config_with():
  """A training config with changes: optim__b2=0.9 for optim.b2 = 0.9.

  Prompts have up to 32 tokens.
  """
  from grpojax.training.config import default_config

  def changed(**changes):
    config = default_config()
    changes = {"data__max_prompt_length": 32} | changes
    with config.unlocked():
      config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
      )
    return config

  return changed


@pytest.fixture(scope="session")
def settings_with(config_with):
  """Checked settings of a training run; changes as in `config_with`."""
  from grpojax.training.config import from_config

  return lambda **changes: from_config(config_with(**changes))


@pytest.fixture
def float64():
  """64-bit arrays by default, for a test."""
  before = jax.config.read("jax_enable_x64")
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", before)
