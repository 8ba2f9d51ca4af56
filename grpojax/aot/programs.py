"""Lowers the programs of a training run on shapes alone."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from grpojax.aot import chips
from grpojax.core import meshes, rows
from grpojax.core.random_keys import seed_key
from grpojax.core.types import LM, Prompts, TrainState
from grpojax.models import huggingface as hf
from grpojax.models import lora, sharding
from grpojax.models.config import TransformerConfig
from grpojax.models.transformer import transformer
from grpojax.runtime.cli.configs import config_error
from grpojax.runtime.files import gguf_directory, hub
from grpojax.training import policies
from grpojax.training.data import prompts, splits
from grpojax.training.files import sources
from grpojax.training.policies import Policy
from grpojax.training.run import memory, setup
from grpojax.training.settings import batches
from grpojax.training.settings.run import AUTO, Facts, TrainSettings, completed
from grpojax.training.step import device, host, sampling
from grpojax.training.step.batch import aggregation, make_batch_program
from grpojax.training.step.extension import Inputs
from grpojax.training.step.extensions import moving_reference


class Run(NamedTuple):
  """Training run with shapes in place of arrays."""

  settings: TrainSettings
  policy: Policy  # with abstract parameters
  mesh: Mesh  # for training
  state: TrainState  # abstract, with shardings
  ref_params: PyTree | None  # of the reference; {}: the model without adapters
  group_size: int  # completions per prompt, G
  prompts: int  # prompts per step, B


def read_model(path: str, ignore_keys: Sequence[str] = ()) -> dict[str, Any]:
  """Reads a model's config.json; `path` names the model or the file itself.

  ValueError if the file is missing or does not describe a model.
  """
  if not os.path.isfile(path) or gguf_directory.is_named(path):
    path = sources.find_model(path, hub.CONFIG)
  return hf.read_config(path, ignore_keys)


def decoder(
  settings: TrainSettings, model: TransformerConfig, mesh: Mesh
) -> LM:
  """Returns the functions of a model for the devices of a mesh."""
  options = settings.model
  return transformer(
    model,
    dtype=jnp.dtype(options.dtype),
    remat=options.remat,
    attention=options.attention,
    platform=mesh.devices.flat[0].platform,
  )


def _policy(
  settings: TrainSettings, hf_config: dict[str, Any], mesh: Mesh
) -> Policy:
  """Returns the policy with the model's functions, without a tokenizer."""
  model = hf.to_transformer_config(hf_config)
  eos = hf_config.get("eos_token_id")
  eos = [i for i in (eos if isinstance(eos, list) else [eos]) if type(i) is int]
  return Policy(
    None,
    decoder(settings, model, mesh),
    tokenizer=None,
    eos_ids=tuple(eos) or (0,),  # only their number affects the program
    pad_id=0,
    shape=model,
    vmappable=not model.experts,
  )


def _rows(x: PyTree, mesh: Mesh, *names: str | None) -> PyTree:
  """Returns shapes of rows with the shardings of `core.meshes.constrain`."""

  def laid_out(x):
    sharding = meshes.activation_sharding(mesh, x.shape, *names)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(laid_out, x)


def open_run(settings: TrainSettings, mesh: Mesh) -> Run:
  """Opens a run like `training.run.start`, but without weights and data.

  ValueError if the settings do not suit the model or, with reward.on_device,
  the data cannot be read.
  """
  ignore_keys = settings.model.ignore_keys
  hf_config = read_model(sources.policy_path(settings), ignore_keys)
  policy = _policy(settings, hf_config, mesh)
  chip = chips.of_kind(mesh.devices.flat[0].device_kind)
  limit = chip and chips.pool_bytes(chip)
  chunk = memory.logits_chunk(policy.shape, limit)
  settings = completed(settings, Facts(logits_chunk=chunk))
  # Device rewards and stop strings need the tokenizer.
  if settings.reward.on_device or settings.sampling.stop:
    policy = setup.open_policy(settings)._replace(lm=policy.lm)
  setup.check_model(settings, policy.lm)
  adapted = settings.lora.rank > 0
  dtype = settings.model.dtype if adapted else "float32"
  whole = hf.abstract_params(hf_config, jnp.dtype(dtype))
  params = sharding.placed(whole, mesh)
  ref_params = None
  if settings.model.teacher:
    path = sources.recorded(settings, settings.model.teacher)
    teacher_config = read_model(path, ignore_keys)
    teacher = _policy(settings, teacher_config, mesh)
    policy = policy._replace(teacher=teacher)
    frozen = jnp.dtype(settings.model.dtype)
    teacher_params = hf.abstract_params(teacher_config, frozen)
    ref_params = sharding.placed(teacher_params, mesh)
  elif settings.loss.needs_reference:
    ref_params = {} if adapted else params
  if adapted:
    adapters = lora.abstract(whole, settings.lora.rank, settings.lora.targets)
    scale = settings.lora.alpha / settings.lora.rank
    policy = policy._replace(frozen=params, lora_scale=scale)
    params = sharding.placed(adapters, mesh)
    if moving_reference.follows_policy(settings):
      ref_params = params
  tx = setup.optimizer(settings)
  state = jax.eval_shape(lambda p: setup.first_state(settings, tx, p), params)
  auto = settings.group_size == AUTO
  group_size = settings.auto_group_size.start if auto else settings.group_size
  run = Run(
    settings=settings,
    policy=policy,
    mesh=mesh,
    state=sharding.placed(state, mesh),
    ref_params=ref_params,
    group_size=group_size,
    prompts=batches.samples_per_step(settings) // group_size,
  )
  if not settings.data.max_prompt_length:
    remedy = "prompts are not read here: give the longest length in tokens"
    raise ValueError(config_error("data.max_prompt_length", 0, remedy))
  if settings.reward.on_device:
    _device_prompts(run)  # raises if the data cannot be read
  return run


def _prompts(run: Run, mesh: Mesh, parts: int = 1) -> Prompts:
  """Returns the shapes of a step's prompts, divided into `parts` chunks."""
  shape = run.prompts // parts, run.settings.data.max_prompt_length
  ids = jax.ShapeDtypeStruct(shape, jnp.int32)
  mask = jax.ShapeDtypeStruct(shape, bool)
  return _rows(Prompts(ids, mask), mesh, "batch")


def data_prompts(run: Run, policy: Policy) -> Iterator[Prompts]:
  """Yields the prompts of each step, with the targets of reward.on_device."""
  examples = splits.load_examples(run.settings, "train")
  for batch, _ in prompts.training_batches(
    run.settings, policy, examples, run.group_size
  ):
    yield batch


def _device_prompts(run: Run) -> Prompts:
  stream = data_prompts(run, run.policy)
  return _rows(jax.eval_shape(lambda: next(stream)), run.mesh, "batch")


def lower(run: Run, name: str) -> jax.stages.Lowered:
  """Lowers the program `name` of a step on its mesh.

  Names are "step" with reward.on_device, else "rollout", "reference", "update".
  """
  settings = run.settings
  state = run.state
  policy = run.policy
  shardings = jax.tree.map(lambda x: x.sharding, state)
  inputs = Inputs(
    settings, policy, setup.optimizer(settings), shardings, run.mesh
  )
  if name == "step":
    with jax.set_mesh(run.mesh):
      program = device.step_program(inputs, run.group_size)
      prompts_of_step = _device_prompts(run)
      return policies.lower(program, state, prompts_of_step, run.ref_params)
  sampling_mesh = meshes.sampling_mesh(run.mesh, settings.mesh.sampling_tensor)
  key = jax.eval_shape(lambda: seed_key(0))
  distribution = settings.sampling.distribution
  sampled_by = policies.sampled_by(policy, settings.loss)
  sample = sampling.sampler_program(
    settings, sampled_by, run.group_size, distribution
  )
  with jax.set_mesh(sampling_mesh):
    if name == "rollout":
      parts = settings.sampling.parts
      first_prompt = jax.ShapeDtypeStruct((), jnp.int32)
      prompts_of_part = _prompts(run, sampling_mesh, parts)
      arguments = state.params, prompts_of_part, key, first_prompt
      if sampling_mesh is not run.mesh:
        sample = sampling.with_result_shardings(
          sample, sampling_mesh, *arguments
        )
      return policies.lower(sample, *arguments)
    whole = _prompts(run, sampling_mesh)
    samples = jax.eval_shape(sample, state.params, whole, key)
  shape = run.prompts, run.group_size
  values = None  # of each reward function, if they are normalised
  if aggregation(settings.reward):
    functions = len(settings.reward.functions) + bool(settings.reward.model)
    values = jax.ShapeDtypeStruct((functions, *shape), jnp.float32)
    values = _rows(values, run.mesh, None, "batch", "group")
  rewards = jax.ShapeDtypeStruct(shape, jnp.float32)
  arguments = state.params, _as_rows(samples, run.mesh), rewards
  options = dict.fromkeys(("packing", "scale", "prompt_weights"))
  options |= {"ref_params": run.ref_params, "values": values}
  ref_lm = policy.teacher and policy.teacher.lm
  make_batch = policies.jit(policy, make_batch_program(settings, ref_lm))
  with jax.set_mesh(run.mesh):
    if name == "reference":
      return policies.lower(make_batch, *arguments, **options)
    batch, _ = jax.eval_shape(make_batch, *arguments, **options)
    batch = _as_rows(batch, run.mesh)
    ref_params = run.ref_params if settings.loss.has_exact_kl else None
    return policies.lower(host.update_program(inputs), state, batch, ref_params)


def _as_rows(tree: Any, mesh: Mesh) -> Any:
  """Returns the shapes of a rollout or a batch, laid out over a mesh."""
  return rows.map_rows(lambda x, *names: _rows(x, mesh, *names), tree)
