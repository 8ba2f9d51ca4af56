"""Runs the programs of `train` on random weights and prompts.

Completions never end by chance: the EOS is an id outside the vocabulary, or has
probability 0.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from grpojax.aot import programs
from grpojax.benchmarks import workloads
from grpojax.core import meshes
from grpojax.core.random_keys import seed_key
from grpojax.core.types import LM, Params, Prompts
from grpojax.models import lora
from grpojax.runtime.text import tokenization
from grpojax.training.run import setup
from grpojax.training.step import device, host, reference, scoring
from grpojax.training.step.extension import Inputs

Rows = Iterator[dict[str, Any]]


def word_tokenizer(vocab_size: int) -> Any:
  """Returns a tokenizer whose token i is the word `workloads.word(i)`."""
  import tokenizers

  vocab = {workloads.word(i): i for i in range(vocab_size)}
  model = tokenizers.models.WordLevel(vocab, unk_token="<pad>")
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return tokenization.import_transformers().PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
  )


def _random(lm: LM, shapes: PyTree, key: Array) -> Params:
  def init(key):
    params = lm.init(key)
    return jax.tree.map(lambda x, s: x.astype(s.dtype), params, shapes)

  shardings = jax.tree.map(lambda x: x.sharding, shapes)
  return jax.jit(init, out_shardings=shardings)(key)


def with_arrays(run: programs.Run) -> programs.Run:
  """Draws the weights of a run, and creates its first state and reference."""
  settings = run.settings
  policy = run.policy
  model = policy.shape
  if settings.reward.on_device:  # the device step needs ids in the vocabulary
    gaps = tuple((i, i + 1) for i in policy.eos_ids)
    endless = dataclasses.replace(model, gaps=gaps)
    policy = policy._replace(lm=programs.decoder(settings, endless, run.mesh))
  else:
    policy = policy._replace(eos_ids=(model.vocab_size,))
  if policy.tokenizer is None:
    policy = policy._replace(tokenizer=word_tokenizer(model.vocab_size))
  key = seed_key(settings.seed)
  shapes = run.state.params if policy.frozen is None else policy.frozen
  params = _random(policy.lm, shapes, key)
  if policy.frozen is not None:
    policy = policy._replace(frozen=params)
    params = lora.init(shapes, key, settings.lora.rank, settings.lora.targets)
  shardings = jax.tree.map(lambda x: x.sharding, run.state)
  ref_params = run.ref_params
  if policy.teacher:
    ref_params = _random(policy.teacher.lm, ref_params, key)
  elif ref_params:
    ref_params = jax.tree.map(jnp.copy, params)
  if ref_params:
    ref_params = reference.to_memory(ref_params, settings.model.reference)
  tx = setup.optimizer(settings)
  first_state = lambda params: setup.first_state(settings, tx, params)
  state = jax.jit(first_state, out_shardings=shardings)(params)
  return run._replace(policy=policy, state=state, ref_params=ref_params)


def random_prompts(run: programs.Run) -> Iterator[Prompts]:
  """Yields prompts of the configured length with uniform ids."""
  rng = np.random.default_rng(run.settings.seed)
  vocab = run.policy.shape.vocab_size
  shape = run.prompts, run.settings.data.max_prompt_length
  while True:
    yield whole_prompts(rng.integers(0, vocab, shape).astype(np.int32))


def whole_prompts(ids: Int[np.ndarray, "B P"], targets: Any = None) -> Prompts:
  """Returns prompts without padding."""
  return Prompts(ids, np.ones(ids.shape, bool), targets)


def steps(
  run: programs.Run,
  batches: Iterable[Prompts],
  budgets: Callable[[Prompts], Array] | None = None,
) -> Rows:
  """Yields the metrics of steps with the reward `workloads.count_a`.

  `run` has arrays (`with_arrays`). With reward.on_device the config's reward is
  used. `budgets` returns the largest lengths of a batch's completions; see
  `step.sampling.sampler_program`.
  """
  settings = run.settings
  shardings = jax.tree.map(lambda x: x.sharding, run.state)
  inputs = Inputs(
    *(settings, run.policy, setup.optimizer(settings), shardings, run.mesh),
    ref_params=run.ref_params,
  )
  examples = [{"prompt_text": ""}] * run.prompts
  state = run.state
  with contextlib.ExitStack() as stack:
    if settings.reward.on_device:
      step = device.make_device_step(inputs, {}, run.group_size)
    else:
      pool = stack.enter_context(scoring.open_reward_pool(settings))
      opened = host.open_step(
        inputs._replace(reward_pool=pool), {}, run.group_size, budgets
      )
      step = functools.partial(host.take_step, opened)
    stack.enter_context(jax.set_mesh(run.mesh))
    for prompts in batches:
      prompts = meshes.place(prompts, run.mesh, "batch")
      result = step(state, prompts, examples)
      state = result.state
      yield result.metrics
