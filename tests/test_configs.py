"""Every config is valid, and traces one GRPO step at its real shapes.

Nothing is allocated: all arrays are shapes. The models' config.json files, in
data/model_configs, are those that their authors published.
"""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

from grpojax.core.mesh import make_mesh
from grpojax.core.types import Prompts
from grpojax.models import huggingface as hf
from grpojax.models import sharding
from grpojax.models.transformer import parameter_shapes, transformer
from grpojax.runtime.cli import config_file
from grpojax.studies import group_size as figure5
from grpojax.training.config import default_config, from_config
from grpojax.training.optimizer import optimizer
from grpojax.training.policy import Policy
from grpojax.training.run import setup
from grpojax.training.settings import batches as batches_lib
from grpojax.training.settings.run import AUTO
from grpojax.training.step import host

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = {path.stem: path for path in sorted(ROOT.glob("configs/*.py"))}
MODELS = pathlib.Path(__file__).parent / "data" / "model_configs"
PARAMETERS = {  # as published
  "Qwen2.5-0.5B-Instruct": 494_032_768,
  "Qwen2.5-1.5B-Instruct": 1_543_714_304,
  "Qwen2.5-7B-Instruct": 7_615_616_512,
  "Qwen3-1.7B": 1_720_574_976,
  "Llama-3.2-1B-Instruct": 1_235_814_400,
  "gemma-3-1b-it": 999_885_952,
  "Qwen2.5-32B-Instruct": 32_763_876_352,
  "Qwen3-30B-A3B": 30_532_122_624,
}
DEVICES = {  # else one
  "figure5": 8,
  "gsm8k_qwen2_5_7b": 8,
  "gsm8k_qwen3_1_7b": 8,
  "gsm8k_qwen2_5_32b": 128,
  "gsm8k_qwen3_30b_a3b": 128,
}

FIGURE5 = ("figure5", "figure5_smollm2")


def training_settings(name):
  config = config_file.load_file(str(CONFIGS[name]), default_config)
  if name in FIGURE5:
    assert figure5.config_errors(config) == []
    largest = config.group_sizes[-1]
    return figure5.train_settings(config, config.budgets[0], largest, 0)
  return from_config(config)


def model_of(settings):
  """The model's config.json; configs for any model get a small one's."""
  file = MODELS / f"{pathlib.Path(settings.model.path).name}.json"
  if not file.is_file():
    file = MODELS / "Qwen2.5-0.5B-Instruct.json"
  return json.loads(file.read_text())


@pytest.mark.slow
def test_every_model_has_a_config():
  paths = [training_settings(name).model.path for name in CONFIGS]
  assert set(PARAMETERS) <= {pathlib.Path(path).name for path in paths}
  assert set(PARAMETERS) == {path.stem for path in MODELS.glob("*.json")}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_number_of_parameters_is_the_published_one(name):
  model = json.loads((MODELS / f"{name}.json").read_text())
  shapes = parameter_shapes(hf.to_transformer_config(model))
  leaves = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
  assert sum(map(math.prod, leaves)) == PARAMETERS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_says_how_to_run_it(name):
  text = CONFIGS[name].read_text().split('"""')[1]
  for word in ("Command:", "Hardware:", "Time:", "Expected:"):
    assert word in text
  assert f"configs/{name}.py" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_valid(name):
  settings = training_settings(name)
  if name not in FIGURE5:
    assert settings.name == name
  # Batches can be cut over the devices that the file speaks of.
  devices = jax.devices()[:1] * DEVICES.get(name, 1)
  mesh = setup.make_mesh(settings, devices)
  batches_lib.check_mesh(settings, mesh)


def policy_of(settings):
  model = model_of(settings)
  eos = model["eos_token_id"]
  return Policy(
    directory=pathlib.Path(),
    lm=transformer(
      hf.to_transformer_config(model),
      dtype=jnp.dtype(settings.model.dtype),
      remat=settings.model.remat,
    ),
    tokenizer=None,
    eos_ids=tuple(eos) if isinstance(eos, list) else (eos,),
    pad_id=0,
  )


# One per family; other configs are long.
FAMILIES = ("arithmetic", "gsm8k", "gsm8k_gemma3_1b", "gsm8k_qwen3_30b_a3b")


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(x, marks=() if x in FAMILIES else pytest.mark.long)
    for x in CONFIGS
  ],
)
def test_a_step_traces_at_its_real_shapes(name):
  settings = training_settings(name)
  policy, tx = policy_of(settings), optimizer(settings)
  params = jax.eval_shape(policy.lm.init, jax.random.key(0))
  state = jax.eval_shape(
    lambda params: setup.first_state(settings, tx, params), params
  )
  b = settings.batch_size
  size = settings.group_size
  assert size != AUTO
  shape = (b, settings.data.max_prompt_length or 256)
  prompts = Prompts(
    jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool)
  )
  mesh = make_mesh(devices=jax.devices()[:1])
  shardings = sharding.shardings(state, mesh)
  programs = host.make_programs(settings, policy, size, tx, shardings)
  samples = jax.eval_shape(programs.sample, params, prompts, state.key)
  t = settings.sampling.max_new_tokens
  assert samples.completion_ids.shape == samples.logprobs.shape == (b, size, t)
  rewards = jax.ShapeDtypeStruct((b, size), jnp.float32)
  ref_params = params if settings.loss.needs_reference else None
  batch, row = jax.eval_shape(
    programs.make_batch, params, samples, rewards, ref_params=ref_params
  )
  new, metrics = jax.eval_shape(programs.update, state, batch)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
    lambda x: (x.shape, x.dtype), state
  )
  assert all(x.shape == () for x in jax.tree.leaves(metrics))
  assert {"loss", "reward_mean", "grad_norm"} <= {*metrics, *row}
