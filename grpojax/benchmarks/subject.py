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
from grpojax.models import huggingface as hf
from grpojax.models import lora
from grpojax.runtime.cli import command_line
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.data import splits
from grpojax.training.optimizer import optimizer
from grpojax.training.policy import Policy
from grpojax.training.run import memory, setup
from grpojax.training.step import device, host, reference
from grpojax.training.step import rewards as rewards_lib

Rows = Iterator[dict[str, Any]]


class Subject(NamedTuple):
  """Run that is timed.

  Attributes:
    run: Shapes of the run.
    policy: Policy with its frozen weights, if there are any.
    state: State before the first step.
    ref_params: Reference, as `host.make_host_step` takes it.
    tx: Optimizer.
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
  """Refuses by a ValueError what cannot fit, as a training run does."""
  memory.refuse(memory.training(run.settings, run.model, run.mesh))


def _random(run: programs.Run, shapes: PyTree, key: Array) -> Params:
  """Fresh weights of these shapes and shardings."""

  def init(key):
    params = run.policy.lm.init(key)
    return jax.tree.map(lambda x, s: x.astype(s.dtype), params, shapes)

  shardings = jax.tree.map(lambda x: x.sharding, shapes)
  return jax.jit(init, out_shardings=shardings)(key)


def open_subject(
  run: programs.Run, weights: pathlib.Path | None = None
) -> Subject:
  """Opens weights, optimizer state and reference of a run on shapes.

  Args:
    run: Run, from `programs.open_run`.
    weights: Model directory to read them from; None draws them.

  Raises:
    ValueError: weights that do not fit.
  """
  settings, policy = run.settings, run.policy
  policy = policy._replace(eos_ids=(run.model.vocab_size,))
  if policy.tokenizer is None:
    policy = policy._replace(tokenizer=word_tokenizer(run.model.vocab_size))
  key = jax.random.key(settings.seed)
  shapes = run.state.params if policy.frozen is None else policy.frozen
  if weights is None:
    params = _random(run, shapes, key)
  else:
    params = hf.load_params(
      weights, shardings=jax.tree.map(lambda x: x.sharding, shapes)
    )
  if policy.frozen is not None:
    policy = policy._replace(frozen=params)
    params = lora.init(shapes, key, settings.lora.rank, settings.lora.targets)
  shardings = jax.tree.map(lambda x: x.sharding, run.state)
  ref_params = run.ref_params
  if ref_params:
    ref_params = jax.tree.map(jnp.copy, params)
    ref_params = reference.to_memory(ref_params, settings.model.reference)
  tx = optimizer(settings)
  fresh = jax.jit(
    lambda p: setup.first_state(settings, tx, p), out_shardings=shardings
  )
  return Subject(run, policy, fresh(params), ref_params, tx)


def random_prompts(run: programs.Run) -> Iterator[Prompts]:
  """Yields prompts of the configured length, whose ids are uniform."""
  rng, vocab = np.random.default_rng(run.settings.seed), run.model.vocab_size
  shape = run.prompts, run.settings.data.max_prompt_length
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
  """Yields the metrics of steps with the reward `workloads.count_a`.

  Args:
    subject: Subject, from `open_subject`, of a config with that reward.
    batches: Prompts of each step.
    budgets: Function from prompts to the greatest lengths of their
      completions, see `step.sampling.sampler_program`.
  """
  run = subject.run
  shardings = jax.tree.map(lambda x: x.sharding, run.state)
  examples = [{"prompt_text": ""}] * run.prompts
  state = subject.state
  with (
    rewards_lib.open_reward_pool(run.settings) as reward_pool,
    jax.set_mesh(run.mesh),
  ):
    step = host.make_host_step(
      run.settings,
      subject.policy,
      run.group_size,
      subject.tx,
      subject.ref_params,
      shardings,
      reward_pool,
      check_signals=lambda together=False: None,
      budgets=budgets,
    )
    for prompts in batches:
      prompts = mesh_lib.place(prompts, run.mesh, "batch")
      result = step(state, prompts, examples)
      state = result.state
      yield result.metrics


def device_steps(subject: Subject, count: int) -> Rows:
  """Yields the metrics of `count` steps of a config with reward.on_device."""
  run = subject.run
  settings, policy = run.settings, subject.policy
  shardings = jax.tree.map(lambda x: x.sharding, run.state)
  examples = splits.load_examples(settings, "train")
  batches = prompts_lib.training_batches(
    settings, policy, examples, run.group_size
  )
  with command_line.usage_errors():  # before anything compiles
    batches = list(itertools.islice(batches, count))
  state = subject.state
  with jax.set_mesh(run.mesh):
    step = device.make_device_step(
      settings,
      policy,
      run.group_size,
      subject.tx,
      subject.ref_params,
      shardings,
    )
    for prompts, examples in batches:
      prompts = mesh_lib.place(prompts, run.mesh, "batch")
      result = step(state, prompts, examples)
      state = result.state
      yield result.metrics
