"""Every config is valid, and its step traces at its real shapes.

All arrays are shapes. data/model_configs has the published config.json files.
"""

import dataclasses
import json
import math
import pathlib

import jax
import pytest

from grpojax.aot import programs
from grpojax.core.meshes import make_mesh
from grpojax.models import huggingface as hf
from grpojax.models.transformer import parameter_shapes
from grpojax.runtime.cli import config_file
from grpojax.studies import group_size as figure5
from grpojax.training.config import default_config, from_config
from grpojax.training.run import setup
from grpojax.training.settings import batches

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
  "SmolLM3-3B": 3_075_098_624,
  "Qwen3.5-0.8B": 752_393_024,  # without its vision model
}
DEVICES = {  # default 1
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


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_counts(name):
  model = json.loads((MODELS / f"{name}.json").read_text())
  shapes = parameter_shapes(hf.to_transformer_config(model))
  leaves = jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
  assert sum(map(math.prod, leaves)) == PARAMETERS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_valid(name):
  settings = training_settings(name)
  if name not in FIGURE5:
    assert settings.name == name
  # Batches divide over the devices named in the file.
  devices = jax.devices()[:1] * DEVICES.get(name, 1)
  mesh = setup.make_mesh(settings, devices)
  batches.check_mesh(settings, mesh)


PARTS = ("rollout", "reference", "update")
# One config per family; other configs are long.
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
  file = MODELS / f"{pathlib.Path(settings.model.path).name}.json"
  if not file.is_file():  # a config for any model
    file = MODELS / "Qwen2.5-0.5B-Instruct.json"
  length = settings.data.max_prompt_length or 256
  settings = dataclasses.replace(
    settings,
    model=dataclasses.replace(settings.model, path=str(file)),
    data=dataclasses.replace(settings.data, max_prompt_length=length),
    mesh=dataclasses.replace(settings.mesh, sampling_tensor=0),
  )
  run = programs.open_run(settings, make_mesh(devices=jax.devices()[:1]))
  shapes = {part: programs.lower(run, part).out_info for part in PARTS}
  tokens = settings.sampling.max_new_tokens
  rows = settings.batch_size // settings.sampling.parts
  expected = (rows, settings.group_size, tokens)
  assert shapes["rollout"].logprobs.shape == expected
  state, metrics = shapes["update"]
  shape = lambda x: (x.shape, x.dtype)
  assert jax.tree.map(shape, state) == jax.tree.map(shape, run.state)
  assert all(x.shape == () for x in jax.tree.leaves(metrics))
  assert {"loss", "grad_norm"} <= {*metrics}
