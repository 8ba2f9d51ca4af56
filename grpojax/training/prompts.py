"""A config's data set as batches of prompts in the policy's format."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from grpojax.core.types import Prompts
from grpojax.data import datasets, pipeline
from grpojax.rewards import exact_ids
from grpojax.runtime import config as config_lib
from grpojax.runtime import tokenizer as tokenizer_lib
from grpojax.training import group_sizes
from grpojax.training.policy import Policy

Batches = Iterator[tuple[Prompts, list[dict[str, Any]]]]


class Split(NamedTuple):
  """The examples of one split whose prompts fit.

  Attributes:
    examples: random access to them.
    dropped: how many do not fit; 0 where they are refused (data.too_long).
  """

  examples: Any
  dropped: int


def load_examples(config: ConfigDict, split: str) -> Any:
  """All examples of a split.

  Args:
    config: the run's.
    split: "train", seeded by the run's seed, or "test", of which the first
      `eval.num_prompts` are read, whatever the seed.

  Raises:
    ValueError: as `datasets.load`.
  """
  settings = {
    "train": {"seed": config.seed},
    "test": {"size": config.eval.num_prompts},
  }
  data = config.data
  options = data.options.to_dict()
  return datasets.load(data.name, split, data.path, options, **settings[split])


def _encode(config: ConfigDict, policy: Policy):
  data = config.data
  return functools.partial(
    tokenizer_lib.encode_prompt,
    policy.tokenizer,
    template=data.template,
    system_prompt=data.system_prompt,
    template_options=data.template_options.to_dict(),
    special_tokens=data.special_tokens,
  )


def load_split(config: ConfigDict, policy: Policy, split: str) -> Split:
  """The examples of a split, without those that `data.too_long` drops.

  Raises:
    ValueError: as `load_examples` and `pipeline.fitting`.
  """
  examples, encode = load_examples(config, split), _encode(config, policy)
  choose = pipeline.TOO_LONG[config.data.too_long]
  return Split(*choose(examples, encode, config.data.max_prompt_length))


def prompt_batches(
  config: ConfigDict, policy: Policy, examples, **options: Any
) -> Batches:
  """Batches of prompts in the policy's format, see `pipeline`."""
  return pipeline.prompt_batches(
    examples,
    _encode(config, policy),
    max_prompt_length=config.data.max_prompt_length,
    pad_id=policy.pad_id,
    **options,
  )


def held_out(config: ConfigDict, policy: Policy, examples) -> Batches:
  """One pass over held-out examples, in their order."""
  return prompt_batches(
    config,
    policy,
    examples,
    batch_size=config.eval.batch_size,
    shuffle=False,
    repeat=False,
  )


def training_batches(
  config: ConfigDict, policy: Policy, examples, group_size: int, start: int = 0
) -> Batches:
  """The run's prompts from number `start` on, with targets for its reward."""
  samples = group_sizes.samples_per_step(config_lib.flatten(config))
  target = None
  if config.reward.on_device:
    target, _ = device_reward(config, policy)
  return prompt_batches(
    config,
    policy,
    examples,
    batch_size=samples // group_size,
    target=target,
    seed=config.seed,
    start=start,
  )


def device_reward(config: ConfigDict, policy: Policy):
  """`(target, reward)`: the reward on ids, see `rewards.exact_ids`."""
  (name,) = config.reward.functions
  return exact_ids.ON_DEVICE[name](policy.tokenizer, policy.eos_ids)
