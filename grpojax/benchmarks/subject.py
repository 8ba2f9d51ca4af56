"""A training run on random weights, and its steps by the functions of `train`.

All that a run compiles is that of `python -m grpojax.train`; what is made up
are the weights, the prompts and the reward. Completions never end by chance:
the EOS is an id outside the vocabulary.
"""

import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PyTree

from grpojax.aot import programs
from grpojax.benchmarks import workloads
from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Params, Prompts, TrainState
from grpojax.models import hf, lora
from grpojax.runtime import command_line, device_memory
from grpojax.runtime import tokenizer as tokenizer_lib
from grpojax.training import (
  device_step,
  from_config,
  host_step,
  memory,
  reference,
  scoring,
  splits,
)
from grpojax.training import prompts as prompts_lib
from grpojax.training.optimizer import optimizer
from grpojax.training.policy import Policy

Rows = Iterator[dict[str, Any]]


class Subject(NamedTuple):
  """What is timed.

  Attributes:
    run: its shapes.
    policy: with its frozen weights, if there are any.
    state: before the first step.
    ref_params: as of `host_step.make_host_step`.
    tx: the optimizer.
  """

  run: programs.Run
  policy: Policy
  state: TrainState
  ref_params: Params | None
  tx: optax.GradientTransformation


def word_tokenizer(vocab_size: int) -> Any:
  """A tokenizer of one word a token, `workloads.word`, of any size."""
  import tokenizers

  vocab = {workloads.word(i): i for i in range(vocab_size)}
  model = tokenizers.models.WordLevel(vocab, unk_token="<pad>")
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return tokenizer_lib.import_transformers().PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
  )


def check_memory(run: programs.Run) -> None:
  """Refuses what cannot fit, as a training run does.

  Raises:
    ValueError: the parts, and what to change.
  """
  phases = memory.training(run.config, run.model, run.mesh)
  limit = device_memory.device_bytes(run.mesh.local_devices[0])
  memory.refuse(phases, limit)


def _random(run: programs.Run, shapes: PyTree, key: Array) -> Params:
  """Fresh weights, each where it belongs."""

  def init(key):
    params = run.policy.lm.init(key)
    return jax.tree.map(lambda x, s: x.astype(s.dtype), params, shapes)

  shardings = jax.tree.map(lambda x: x.sharding, shapes)
  return jax.jit(init, out_shardings=shardings)(key)


def open_subject(
  run: programs.Run, weights: pathlib.Path | None = None
) -> Subject:
  """Weights, optimizer state and reference of a run on shapes.

  Args:
    run: from `programs.open_run`.
    weights: a model directory to read them from; None draws them.

  Raises:
    ValueError: weights that do not fit.
  """
  config, policy = run.config, run.policy
  policy = policy._replace(eos_ids=(run.model.vocab_size,))
  if policy.tokenizer is None:
    policy = policy._replace(tokenizer=word_tokenizer(run.model.vocab_size))
  key, shardings = jax.random.key(config.seed), run.state
  shapes = run.state.params if policy.frozen is None else policy.frozen
  if weights is None:
    params = _random(run, shapes, key)
  else:
    params = hf.load_params(
      weights, shardings=jax.tree.map(lambda x: x.sharding, shapes)
    )
  if policy.frozen is not None:
    policy = policy._replace(frozen=params)
    params = lora.init(shapes, key, config.lora.rank, config.lora.targets)
  shardings = jax.tree.map(lambda x: x.sharding, run.state)
  ref_params = run.ref_params
  if ref_params:
    ref_params = jax.tree.map(jnp.copy, params)
    ref_params = reference.stored(ref_params, config.model.reference)
  tx = optimizer(config)
  fresh = jax.jit(
    lambda p: from_config.first_state(config, tx, p), out_shardings=shardings
  )
  return Subject(run, policy, fresh(params), ref_params, tx)


def random_prompts(run: programs.Run) -> Iterator[Prompts]:
  """Prompts of the configured length, whose ids are uniform."""
  rng, vocab = np.random.default_rng(run.config.seed), run.model.vocab_size
  shape = run.prompts, run.config.data.max_prompt_length
  while True:
    yield whole_prompts(rng.integers(0, vocab, shape).astype(np.int32))


def whole_prompts(ids: Int[np.ndarray, "B P"], targets: Any = None) -> Prompts:
  """Prompts without padding."""
  return Prompts(ids, np.ones(ids.shape, bool), targets)


def host_steps(
  subject: Subject,
  batches: Iterable[Prompts],
  budgets: Callable[[Prompts], Array] | None = None,
) -> Rows:
  """Steps with the reward `workloads.count_a`; the metrics of each.

  Args:
    subject: from `open_subject`, of a config whose reward that is.
    batches: the prompts, a step each.
    budgets: see `samplers.sampler_program`.
  """
  run = subject.run
  shardings = jax.tree.map(lambda x: x.sharding, run.state)
  examples = [{"prompt_text": ""}] * run.prompts
  state = subject.state
  with (
    scoring.open_reward_pool(run.config) as reward_pool,
    jax.set_mesh(run.mesh),
  ):
    step = host_step.make_host_step(
      run.config,
      subject.policy,
      run.group_size,
      subject.tx,
      subject.ref_params,
      shardings,
      reward_pool,
      lambda together=False: None,
      budgets,
    )
    for prompts in batches:
      prompts = mesh_lib.place(prompts, run.mesh, "batch")
      state, row, *_ = step(state, prompts, examples, False)
      yield row


def device_steps(subject: Subject, count: int) -> Rows:
  """Steps of a config with reward.on_device, with its prompts and reward."""
  run = subject.run
  config, policy = run.config, subject.policy
  shardings = jax.tree.map(lambda x: x.sharding, run.state)
  examples = splits.load_examples(config, "train")
  batches = prompts_lib.training_batches(
    config, policy, examples, run.group_size
  )
  with command_line.usage_errors():  # before anything compiles
    batches = list(itertools.islice(batches, count))
  state = subject.state
  with jax.set_mesh(run.mesh):
    step = device_step.make_device_step(
      config, policy, run.group_size, subject.tx, subject.ref_params, shardings
    )
    for prompts, given in batches:
      prompts = mesh_lib.place(prompts, run.mesh, "batch")
      state, row, *_ = step(state, prompts, given, False)
      yield row
