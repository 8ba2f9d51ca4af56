"""Batches of prompts in the policy's format."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from grpojax.core import meshes
from grpojax.core.types import Prompts
from grpojax.data import pipeline
from grpojax.environments import conventions
from grpojax.rewards import exact_ids
from grpojax.runtime.text import tokenization
from grpojax.training.policies import Policy
from grpojax.training.settings import batches
from grpojax.training.settings.run import TrainSettings

Batches = Iterator[tuple[Prompts, list[dict[str, Any]]]]


def template_options(settings: TrainSettings, policy: Policy) -> dict[str, Any]:
  """Returns arguments of the chat template, including the tools, if any."""
  options = dict(settings.data.template_options)
  env = settings.environment
  if not env.on:
    return options
  tools = conventions.resolve(
    env.path, env.tools, env.options, env.tool_format, env.action
  ).tools
  if tools and "tools" not in str(policy.tokenizer.chat_template or ""):
    raise ValueError(
      "environment: this model's chat template, if any, ignores tools: use a "
      "model that calls tools, or an environment with `step` and no tools"
    )
  return options | ({"tools": tools} if tools else {})


def encoder(settings: TrainSettings, policy: Policy):
  """Returns `(prompt) -> (text, ids)`, which formats and tokenizes a prompt."""
  data = settings.data
  return functools.partial(
    tokenization.encode_prompt,
    policy.tokenizer,
    template=data.template,
    system_prompt=data.system_prompt,
    template_options=template_options(settings, policy),
    special_tokens=data.special_tokens,
  )


def prompt_batches(
  settings: TrainSettings, policy: Policy, examples, **options: Any
) -> Batches:
  """Yields batches of prompts, formatted and tokenized for the policy."""
  return pipeline.prompt_batches(
    examples,
    encoder(settings, policy),
    max_prompt_length=settings.data.max_prompt_length,
    pad_id=policy.pad_id,
    **options,
  )


def trim(prompts: Prompts) -> Prompts:
  """Removes padding shared by all prompts of a batch, on the host.

  The new length is 1/4, 1/2, 3/4 or all of the old length (rounded up), so that
  at most four sizes are compiled.
  """
  limit = prompts.prompt_ids.shape[1]
  longest = np.sum(prompts.prompt_mask, axis=-1).max()
  # -(-limit * k // 4) is k quarters of the old length, rounded up.
  size = min(n for k in range(1, 5) if (n := -(-limit * k // 4)) >= longest)
  return prompts.replace(
    prompt_ids=prompts.prompt_ids[:, :size],
    prompt_mask=prompts.prompt_mask[:, :size],
  )


def held_out(settings: TrainSettings, policy: Policy, examples) -> Batches:
  """Returns trimmed batches that contain each held-out example once."""
  size = settings.eval.batch_size
  untrimmed = prompt_batches(
    settings, policy, examples, batch_size=size, shuffle=False, repeat=False
  )
  return ((trim(prompts), batch) for prompts, batch in untrimmed)


def take(
  stream: Batches, count: int, mesh: jax.sharding.Mesh
) -> tuple[Prompts, list[dict[str, Any]]]:
  """Joins the next `count` batches, trims them and places them on a mesh."""
  prompts, examples = zip(*(next(stream) for _ in range(count)), strict=True)
  joined = jax.tree.map(lambda *x: np.concatenate(x), *prompts)
  flat = [*itertools.chain(*examples)]
  return meshes.place(trim(joined), mesh, "batch"), flat


def training_batches(
  settings: TrainSettings,
  policy: Policy,
  examples,
  group_size: int,
  start: int = 0,
  parts: int = 1,
) -> Batches:
  """Returns batches of 1/`parts` of a step's prompts, beginning at `start`."""
  samples = batches.samples_per_step(settings)
  target = None
  if settings.reward.on_device:
    target, _ = device_reward(settings, policy)
  return prompt_batches(
    settings,
    policy,
    examples,
    batch_size=samples // group_size // parts,
    target=target,
    seed=settings.seed,
    start=start,
  )


def prompts_of(
  settings: TrainSettings, policy: Policy, examples, indices: Sequence[int]
) -> tuple[Prompts, list[dict[str, Any]]]:
  """Returns a batch of the examples at `indices`."""
  encode = encoder(settings, policy)
  limit = settings.data.max_prompt_length
  rows = [pipeline.row(examples[int(i)], encode, limit) for i in indices]
  return pipeline.collate(rows, limit, policy.pad_id)


def device_reward(settings: TrainSettings, policy: Policy):
  """Returns the functions `(target, reward)` of the on-device reward."""
  (name,) = settings.reward.functions
  return exact_ids.ON_DEVICE[name](policy.tokenizer, policy.eos_ids)
