"""A config's data set as batches of prompts in the policy's format."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Prompts
from grpojax.data import datasets, pipeline, survey
from grpojax.data.arithmetic import ENDLESS
from grpojax.data.mixture import Mixture, Part
from grpojax.models import hf
from grpojax.rewards import exact_ids
from grpojax.runtime import config as config_lib
from grpojax.runtime import records
from grpojax.runtime import tokenizer as tokenizer_lib
from grpojax.training import group_sizes, mixtures, sources
from grpojax.training.policy import Policy

Batches = Iterator[tuple[Prompts, list[dict[str, Any]]]]

MEASURED = 4096
"""Prompts of an endless data set that are read before a run starts, at most."""


class Split(NamedTuple):
  """The examples of one split whose prompts fit.

  Attributes:
    examples: random access to them.
    dropped: how many do not fit; 0 where they are refused (data.too_long).
    survey: of all examples.
    key: of what the survey's lengths depend on, see `save_lengths`.
    parts: of a mixture, the same of each data set, by its name.
  """

  examples: Any
  dropped: int
  survey: survey.Survey
  key: str
  parts: dict[str, Any] = {}


def load_examples(config: ConfigDict, split: str) -> Any:
  """All examples of a split.

  Args:
    config: the run's.
    split: "train", seeded by the run's seed, or "test", of which the first
      `eval.num_prompts` are read, whatever the seed.

  Returns:
    Random access to them; a `Mixture` where data.mixture names several data
    sets, of each of which there are `eval.num_prompts` held-out ones.

  Raises:
    ValueError: as `datasets.load`.
  """
  settings = {
    "train": {"seed": config.seed},
    "test": {"size": config.eval.num_prompts},
  }
  data, parts = config.data, []

  def load(name, path, options):
    options = sources.data_options(config, name, path, options)
    return datasets.load(name, split, path, options, **settings[split])

  for name, source in mixtures.sources(config).items():
    try:
      some = load(source.name, source.path, source.options)
    except ValueError as error:
      part = f"--config.{mixtures.SECTION}.{name}"
      why = str(error).replace("--config.data.", f"{part}.")
      raise ValueError(f"{part}: {why}") from error
    parts.append(Part(name, source.weight, some))
  if parts:
    return Mixture(parts)
  return load(data.name, data.path, data.options.to_dict())


def encoder(config: ConfigDict, policy: Policy):
  """`(prompt) -> (text, ids)`: prompts in the policy's format."""
  data = config.data
  return functools.partial(
    tokenizer_lib.encode_prompt,
    policy.tokenizer,
    template=data.template,
    system_prompt=data.system_prompt,
    template_options=data.template_options.to_dict(),
    special_tokens=data.special_tokens,
  )


def load_split(
  config: ConfigDict,
  policy: Policy,
  split: str,
  cache: pathlib.Path | None = None,
  poll: Callable[[], None] = lambda: None,
) -> Split:
  """The examples of a split, all of which have been read and do fit.

  Args:
    config: the run's.
    policy: its tokenizer measures the prompts.
    split: "train" or "test".
    cache: a file of `save_lengths`, which may be missing.
    poll: called between examples; may raise.

  Raises:
    ValueError: as `load_examples` and `survey.survey`, or prompts that are too
      long (data.too_long).
  """
  examples = load_examples(config, split)
  args = config, policy, cache, poll
  if isinstance(examples, Mixture):
    return _fitting_parts(*args, examples, split)
  return _fitting(*args, examples, split)


def _fitting_parts(
  config, policy, cache, poll, mixture: Mixture, split: str
) -> Split:
  """The examples of a mixture that fit; see `load_split`."""
  found = {
    part.name: _fitting(
      config, policy, cache, poll, part.examples, f"{split} {part.name}"
    )
    for part in mixture.parts
  }
  parts = [p._replace(examples=found[p.name].examples) for p in mixture.parts]
  prints = {name: one.survey.fingerprint for name, one in found.items()}
  lengths = np.concatenate([one.survey.lengths for one in found.values()])
  return Split(
    Mixture(parts),
    sum(one.dropped for one in found.values()),
    survey.Survey(
      hashlib.sha256(json.dumps(prints).encode()).hexdigest(), lengths
    ),
    "",
    found,
  )


def _fitting(config, policy, cache, poll, examples, name: str) -> Split:
  """The examples of one data set that fit; see `load_split`."""
  encode, digest = encoder(config, policy), _digest(config, policy)
  found = survey.survey(
    examples,
    encode,
    most=min(_prompts_of_run(config), MEASURED),
    cached=lambda f: _saved_lengths(cache, name, f"{f} {digest}"),
    poll=poll,
  )
  choose = survey.TOO_LONG[config.data.too_long]
  limit, endless = config.data.max_prompt_length, len(examples) >= ENDLESS
  try:
    kept = choose(found.lengths, limit, endless)
  except ValueError as error:
    raise ValueError(f"{name} split: {error}") from error
  key = f"{found.fingerprint} {digest}"
  if kept is None:
    return Split(examples, 0, found, key)
  dropped = len(examples) - len(kept)
  return Split(pipeline.Subset(examples, kept), dropped, found, key)


def _prompts_of_run(config: ConfigDict) -> int:
  """Prompts that a run takes at most."""
  leaves = config_lib.flatten(config)
  samples = group_sizes.samples_per_step(leaves)
  batches = config.steps
  if config.filter_groups.enable:
    batches *= config.filter_groups.max_num_gen_batches
  return batches * max(
    samples // size for size in group_sizes.group_sizes(leaves)
  )


def _digest(config: ConfigDict, policy: Policy) -> str:
  """Of all but the examples that decides how long prompts are."""
  digest = hashlib.sha256()
  for name in hf.COMPANIONS:
    file = policy.directory / name
    digest.update(file.read_bytes() if file.is_file() else b"")
  limits = ("max_prompt_length", "too_long")
  settings = {k: v for k, v in config.data.to_dict().items() if k not in limits}
  digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
  return digest.hexdigest()


def save_lengths(file: pathlib.Path, splits: dict[str, Split]) -> None:
  """Keeps the lengths of all prompts for `load_split`, by what they depend on.

  Args:
    file: a .npz file, written whole or not at all.
    splits: by their names.
  """
  each = {}
  for split, whole in splits.items():
    each |= {f"{split} {part}": one for part, one in whole.parts.items()}
    each |= {} if whole.parts else {split: whole}
  arrays = {name: one.survey.lengths for name, one in each.items()}
  arrays |= {f"{name} key": np.array(one.key) for name, one in each.items()}
  with records.replacing(file) as temporary, open(temporary, "wb") as whole:
    np.savez(whole, **arrays)


def _saved_lengths(file: pathlib.Path | None, split: str, key: str):
  if file is None or not file.is_file():
    return None
  try:
    with np.load(file, allow_pickle=False) as arrays:
      if str(arrays[f"{split} key"]) == key:
        return arrays[split]
  except Exception:  # zipfile and NumPy raise many kinds
    pass  # it is only a cache
  return None


def prompt_batches(
  config: ConfigDict, policy: Policy, examples, **options: Any
) -> Batches:
  """Batches of prompts in the policy's format, see `pipeline`."""
  return pipeline.prompt_batches(
    examples,
    encoder(config, policy),
    max_prompt_length=config.data.max_prompt_length,
    pad_id=policy.pad_id,
    **options,
  )


def trim(prompts: Prompts) -> Prompts:
  """Cuts padding that all prompts of a batch share, on the host.

  Args:
    prompts: numpy arrays of `data.max_prompt_length` tokens.

  Returns:
    The shortest of a quarter, a half, three quarters and all of that length
    (rounded up) which holds them: each size is a program to compile.
  """
  limit = prompts.prompt_ids.shape[1]
  longest = np.sum(prompts.prompt_mask, axis=-1).max()
  size = min(n for k in range(1, 5) if (n := -(-limit * k // 4)) >= longest)
  return prompts.replace(
    prompt_ids=prompts.prompt_ids[:, :size],
    prompt_mask=prompts.prompt_mask[:, :size],
  )


def held_out(config: ConfigDict, policy: Policy, examples) -> Batches:
  """One pass over held-out examples, in their order, each batch trimmed."""
  batches = prompt_batches(
    config,
    policy,
    examples,
    batch_size=config.eval.batch_size,
    shuffle=False,
    repeat=False,
  )
  return ((trim(prompts), batch) for prompts, batch in batches)


def take(
  batches: Batches, count: int, mesh: jax.sharding.Mesh
) -> tuple[Prompts, list[dict[str, Any]]]:
  """The next batches as one, trimmed, on a mesh.

  Args:
    batches: of equal size.
    count: of them.
    mesh: of training.

  Raises:
    ValueError: as `pipeline.prompt_batches`.
  """
  some = [next(batches) for _ in range(count)]
  prompts = some[0][0]
  if count > 1:
    of_all = [prompts for prompts, _ in some]
    prompts = jax.tree.map(lambda *x: np.concatenate(x), *of_all)
  examples = [example for _, batch in some for example in batch]
  return mesh_lib.place(trim(prompts), mesh, "batch"), examples


def training_batches(
  config: ConfigDict,
  policy: Policy,
  examples,
  group_size: int,
  start: int = 0,
  parts: int = 1,
) -> Batches:
  """The run's prompts from number `start` on, with targets for its reward.

  Each batch has one of `parts` equal parts of a step's prompts.
  """
  samples = group_sizes.samples_per_step(config_lib.flatten(config))
  target = None
  if config.reward.on_device:
    target, _ = device_reward(config, policy)
  return prompt_batches(
    config,
    policy,
    examples,
    batch_size=samples // group_size // parts,
    target=target,
    seed=config.seed,
    start=start,
  )


def prompts_of(
  config: ConfigDict, policy: Policy, examples, indices: Sequence[int]
) -> tuple[Prompts, list[dict[str, Any]]]:
  """A batch of chosen examples; see `pipeline.prompts_of`."""
  return pipeline.prompts_of(
    examples,
    indices,
    encoder(config, policy),
    max_prompt_length=config.data.max_prompt_length,
    pad_id=policy.pad_id,
  )


def device_reward(config: ConfigDict, policy: Policy):
  """`(target, reward)`: the reward on ids, see `rewards.exact_ids`."""
  (name,) = config.reward.functions
  return exact_ids.ON_DEVICE[name](policy.tokenizer, policy.eos_ids)
