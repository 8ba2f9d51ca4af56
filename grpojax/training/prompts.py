"""A config's data set as batches of prompts in the policy's format."""

import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from grpojax.core.types import Prompts
from grpojax.data import arithmetic, gsm8k, jsonl, pipeline
from grpojax.rewards import exact_ids
from grpojax.runtime import config as config_lib
from grpojax.runtime import tokenizer as tokenizer_lib
from grpojax.training import validation
from grpojax.training.policy import Policy

DATASETS = {"arithmetic": arithmetic, "gsm8k": gsm8k, "jsonl": jsonl}
Batches = Iterator[tuple[Prompts, list[dict[str, Any]]]]


class Problems(NamedTuple):
  """The problems of one split whose prompts fit.

  Attributes:
    examples: random access to them.
    dropped: how many do not fit; 0 where they are refused (data.too_long).
  """

  examples: Any
  dropped: int


def load_split(data: ConfigDict, split: str, **settings: Any) -> Any:
  """A data set's problems, as random access to dicts.

  Args:
    data: a config's section, with name, path and options.
    split: "train" or "test".
    **settings: other keyword arguments of the data set's load.

  Raises:
    ValueError: the data set cannot be read, or does not have these options.
  """
  if data.name not in DATASETS:
    names = ", ".join(DATASETS)
    raise ValueError(f"data.name = {data.name!r}: use one of {names}")
  load, options = DATASETS[data.name].load, data.options.to_dict()
  known = inspect.signature(load).parameters
  if data.path and "path" not in known:
    raise ValueError(f"data.path: the data set {data.name} has no files")
  own = [name for name in known if name not in ("split", "path", "seed")]
  unknown = [name for name in options if name not in own]
  if unknown:
    raise ValueError(
      f"data.options.{unknown[0]}: the data set {data.name} has no such "
      f"option; it takes {', '.join(own)}"
    )
  options |= {"path": data.path} if data.path else {}
  return load(split, **(options | settings))


def load_examples(config: ConfigDict, split: str) -> Any:
  """All problems of a split.

  Args:
    config: the run's.
    split: "train", seeded by the run's seed, or "test", of which the first
      `eval.num_prompts` are read, whatever the seed.

  Raises:
    ValueError: as `load_split`.
  """
  if split == "train":
    return load_split(config.data, split, seed=config.seed)
  return load_split(config.data, split, size=config.eval.num_prompts)


def _encode(config: ConfigDict, policy: Policy):
  data = config.data
  return functools.partial(
    tokenizer_lib.encode_prompt,
    policy.tokenizer,
    template=data.template,
    system_prompt=data.system_prompt,
    template_options=data.template_options.to_dict(),
  )


def problems(config: ConfigDict, policy: Policy, split: str) -> Problems:
  """The problems of a split; with data.too_long = "drop" those that fit.

  Raises:
    ValueError: as `load_examples` and `pipeline.fitting`.
  """
  examples = load_examples(config, split)
  if config.data.too_long == "refuse":  # when one is met
    return Problems(examples, 0)
  encode, limit = _encode(config, policy), config.data.max_prompt_length
  return Problems(*pipeline.fitting(examples, encode, limit))


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
  """One pass over held-out problems, in their order."""
  return prompt_batches(
    config,
    policy,
    examples,
    batch_size=config.eval.batch_size,
    shuffle=False,
    repeat=False,
  )


def group_sizes(config: ConfigDict) -> list[int]:
  """All the group sizes that the run may use."""
  return validation.group_sizes(config_lib.flatten(config))


def samples_per_step(config: ConfigDict) -> int:
  """N = B G, the same at every step."""
  auto = config.group_size == validation.AUTO
  first = config.auto_group_size.start if auto else config.group_size
  return config.batch_size * first


def training_batches(
  config: ConfigDict, policy: Policy, examples, group_size: int, start: int = 0
) -> Batches:
  """The run's prompts from number `start` on, with targets for its reward."""
  target = None
  if config.reward.on_device:
    target, _ = device_reward(config, policy)
  return prompt_batches(
    config,
    policy,
    examples,
    batch_size=samples_per_step(config) // group_size,
    target=target,
    seed=config.seed,
    start=start,
  )


def device_reward(config: ConfigDict, policy: Policy):
  """`(target, reward)`: the reward on ids, see `rewards.exact_ids`."""
  (name,) = config.reward.functions
  return getattr(exact_ids, f"{name}_ids")(policy.tokenizer, policy.eos_ids)
