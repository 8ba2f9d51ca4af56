"""The programs of a training run, lowered on shapes alone."""

import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Prompts, TrainState
from grpojax.models import hf, lora, sharding
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer
from grpojax.runtime import config as config_lib
from grpojax.runtime import hub
from grpojax.training import (
  device_step,
  from_config,
  group_sizes,
  host_step,
  loss_settings,
  prompts,
  reference,
  samplers,
  sources,
  splits,
)
from grpojax.training import policy as policy_lib
from grpojax.training.optimizer import optimizer
from grpojax.training.policy import Policy


class Run(NamedTuple):
  """A training run as shapes.

  Attributes:
    config: the run's.
    model: the shape of its model.
    policy: its functions, with abstract parameters.
    mesh: of training.
    state: abstract, with shardings.
    ref_params: abstract, {} with adapters, or None.
    group_size: G.
    prompts: B.
  """

  config: ConfigDict
  model: TransformerConfig
  policy: Policy
  mesh: Mesh
  state: TrainState
  ref_params: PyTree | None
  group_size: int
  prompts: int


def read_model(path: str) -> tuple[pathlib.Path, dict[str, Any]]:
  """A model's directory and its config.json.

  Args:
    path: as `policy.find_model` takes it, or a config.json by itself, of any
      name.

  Raises:
    ValueError: there is none, or it is not of a model.
  """
  file = pathlib.Path(path)
  if file.is_file():
    try:
      hf_config = json.loads(file.read_text())
    except ValueError as error:
      raise ValueError(
        f"--config.model.path = {path!r}: no JSON ({error})"
      ) from None
    if not isinstance(hf_config, dict) or "model_type" not in hf_config:
      raise ValueError(f"--config.model.path = {path!r}: has no model_type")
    return file.parent, hf_config
  directory = policy_lib.find_model(path, hub.CONFIG)
  return directory, hf.read_config(directory)


def _policy(config: ConfigDict, hf_config: dict[str, Any]) -> Policy:
  """The model's functions; it needs no tokenizer, and has none."""
  model = hf.to_transformer_config(hf_config)
  eos = hf_config.get("eos_token_id")
  eos = [i for i in (eos if isinstance(eos, list) else [eos]) if type(i) is int]
  return Policy(
    pathlib.Path(config.model.path),
    transformer(
      model,
      dtype=jnp.dtype(config.model.dtype),
      remat=config.model.remat,
    ),
    tokenizer=None,
    eos_ids=tuple(eos) or (0,),  # how many there are is compiled
    pad_id=0,
    vmappable=not model.experts,
  )


def _rows(x: PyTree, mesh: Mesh, *names: str | None) -> PyTree:
  """Shapes of rows, laid out as `core.mesh.constrain` does."""

  def one(x):
    place = mesh_lib.activation_sharding(mesh, x.shape, *names)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

  return jax.tree.map(one, x)


def open_run(config: ConfigDict, mesh: Mesh) -> Run:
  """What `training.start` opens, without weights, data or tokenizer.

  Raises:
    ValueError: a model or targets of adapters that do not fit; with
      reward.on_device, data that cannot be read.
  """
  _, hf_config = read_model(sources.model(config))
  if config.reward.on_device:  # its reward is one on the tokenizer's ids
    policy = from_config.open_policy(config)
  else:
    policy = _policy(config, hf_config)
    loss_settings.check_model(config.loss.router_aux_coef, policy.lm)
  adapted = config.lora.rank > 0
  dtype = config.model.dtype if adapted else "float32"
  whole = hf.abstract_params(hf_config, jnp.dtype(dtype))
  params, ref_params = sharding.placed(whole, mesh), None
  if from_config.needs_reference(config):
    ref_params = {} if adapted else params
  if adapted:
    adapters = lora.abstract(whole, config.lora.rank, config.lora.targets)
    scale = config.lora.alpha / config.lora.rank
    policy = policy._replace(frozen=params, lora_scale=scale)
    params = sharding.placed(adapters, mesh)
    if reference.follows(config):
      ref_params = params
  tx = optimizer(config)
  state = jax.eval_shape(
    lambda p: from_config.first_state(config, tx, p), params
  )
  leaves = config_lib.flatten(config)
  auto = config.group_size == group_sizes.AUTO
  size = config.auto_group_size.start if auto else config.group_size
  run = Run(
    config,
    hf.to_transformer_config(hf_config),
    policy,
    mesh,
    sharding.placed(state, mesh),
    ref_params,
    size,
    group_sizes.samples_per_step(leaves) // size,
  )
  if config.reward.on_device:
    _device_prompts(run)  # what they are refused for is said here
  return run


def _prompts(run: Run, mesh: Mesh, parts: int = 1) -> Prompts:
  """Of a step, or of one of the parts in which it is sampled."""
  shape = run.prompts // parts, run.config.data.max_prompt_length
  both = Prompts(
    jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool)
  )
  return _rows(both, mesh, "batch")


def _device_prompts(run: Run) -> Prompts:
  """As the data give them: with what the reward wants to know."""
  examples = splits.load_examples(run.config, "train")
  batches = prompts.training_batches(
    run.config, run.policy, examples, run.group_size
  )
  return _rows(jax.eval_shape(lambda: next(batches)[0]), run.mesh, "batch")


def names(config: ConfigDict) -> tuple[str, ...]:
  """The programs of a step, in their order."""
  if config.reward.on_device:
    return ("step",)
  return ("rollout", "reference", "update")


def lower(run: Run, name: str) -> jax.stages.Lowered:
  """One of the programs of a step, on its mesh.

  Args:
    run: from `open_run`.
    name: of `names`.
  """
  config, policy, state = run.config, run.policy, run.state
  shardings = jax.tree.map(lambda x: x.sharding, state)
  args = config, policy, run.group_size, optimizer(config), shardings
  if name == "step":
    with jax.set_mesh(run.mesh):
      program = device_step.make_device_program(*args)
      given = state, _device_prompts(run), run.ref_params
      return policy_lib.lower(program, *given)
  sample, compare, learn = host_step.make_programs(*args)
  sampling = mesh_lib.sampling_mesh(run.mesh, config.mesh.sampling_tensor)
  parts, key = config.sampling.parts, jax.eval_shape(_key)
  with jax.set_mesh(sampling):
    if name == "rollout":
      numbered = parts > 1 or config.filter_groups.enable
      first = [jax.ShapeDtypeStruct((), jnp.int32)] * numbered
      asked = _prompts(run, sampling, parts)
      given = state.params, asked, key, *first
      if sampling is not run.mesh:
        sample = samplers.laid_out(sample, sampling, *given)
      return policy_lib.lower(sample, *given)
    whole = _prompts(run, sampling)
    samples = jax.eval_shape(sample, state.params, whole, key)
  shape = run.prompts, run.group_size
  rewards = jax.ShapeDtypeStruct(shape, jnp.float32)
  rows, values = _as_rows(samples, run.mesh), None
  if from_config.aggregation(config):
    functions = len(config.reward.functions) + bool(config.reward.model)
    values = jax.ShapeDtypeStruct((functions, *shape), jnp.float32)
    values = _rows(values, run.mesh, None, "batch", "group")
  given = state.params, rows, rewards, run.ref_params
  given = *given, None, state.score_norms, values
  with jax.set_mesh(run.mesh):
    if name == "reference":
      return policy_lib.lower(compare, *given)
    batch, _ = jax.eval_shape(compare, *given)
    return policy_lib.lower(learn, state, _as_rows(batch, run.mesh))


def _key() -> jax.Array:
  return jax.random.key(0)


def _as_rows(tree: Any, mesh: Mesh) -> Any:
  """A rollout or a batch, laid out over a mesh."""
  return mesh_lib.map_rows(lambda x, *names: _rows(x, mesh, *names), tree)
