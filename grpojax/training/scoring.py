"""Rewards of a rollout: functions of text, and a reward model.

The functions run in worker processes (`rewards.pool`) while the reward model
runs on the devices.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Rollout
from grpojax.data.examples import SOURCE
from grpojax.models import sharding
from grpojax.rewards import groups, neural
from grpojax.rewards.pool import Failure, Pool
from grpojax.runtime import tokenizer as tokenizer_lib
from grpojax.training import mixtures, sources
from grpojax.training import policy as policy_lib

MODEL = "model"  # the reward model's name among the functions'


SHORTEST = 128  # tokens that a reward model's rows are padded to, at least
ROWS = 8  # sequences that each device scores at once

Model = Callable[[list[dict[str, Any]], list[list[str]]], np.ndarray]


class RewardPool(NamedTuple):
  """What computes rewards.

  Attributes:
    pool: of the functions.
    model: `(examples, texts) -> [B, G]`, a reward model; None is none.
    model_weight: of its rewards.
    judges: the function that says what a right answer is, by data set of a
      mixture; the first one where an example's is not named.
  """

  pool: Pool
  model: Model | None = None
  model_weight: float = 1.0
  judges: Mapping[str, str] = {}


def open_model(config: ConfigDict, mesh: jax.sharding.Mesh) -> Model | None:
  """Loads the config's reward model; None where it has none.

  It reads the prompt and the completion as a chat of two turns where its
  tokenizer has a chat template, else as one text, as the policy wrote it. Of
  what is longer than all that the policy may read and write, it reads the end.
  Names of special tokens in them are what data.special_tokens says, so that no
  completion can end its turn and go on as the user.

  Args:
    config: the run's.
    mesh: where to load it, and to cut its batches over.

  Returns:
    `(examples, texts) -> rewards [B, G]`.

  Raises:
    ValueError: it is no sequence classifier with one label.
  """
  path = sources.reward_model(config)
  if not path:
    return None
  directory = policy_lib.find_model(path)
  lm, params = neural.load(
    directory,
    dtype=jnp.dtype(config.model.dtype),
    param_dtype=jnp.dtype(config.model.dtype),
    shardings=functools.partial(sharding.shardings, mesh=mesh),
  )
  tokenizer = tokenizer_lib.load(directory)
  lengths = [SHORTEST]
  limit = config.data.max_prompt_length + config.sampling.max_new_tokens
  while lengths[-1] < limit + SHORTEST:  # room for turns' markers
    lengths.append(2 * lengths[-1])
  reward_model = neural.make_reward_model(
    lm,
    params,
    functools.partial(
      tokenizer_lib.encode_conversation,
      tokenizer,
      special_tokens=config.data.special_tokens,
      date=config.data.template_options.get("date_string"),
    ),
    lengths=lengths,
    batch_size=(rows := ROWS * mesh_lib.row_shards(mesh)),
    too_long="cut",
    sharding=mesh_lib.batch_sharding(mesh, rows),
  )

  def conversation(example, text):
    if not tokenizer.chat_template:
      return example["prompt_text"] + text
    prompt = example["prompt"]
    if isinstance(prompt, str):
      prompt = [{"role": "user", "content": prompt}]
    return [*prompt, {"role": "assistant", "content": text}]

  def model(examples, texts):
    pairs = zip(examples, texts, strict=True)
    samples = [conversation(e, text) for e, group in pairs for text in group]
    return reward_model(samples).reshape(len(examples), -1)

  return model


@contextlib.contextmanager
def open_reward_pool(
  config: ConfigDict, model: Model | None = None
) -> Iterator[RewardPool]:
  """Starts the config's reward functions, and ends their processes.

  Args:
    config: the run's.
    model: see `RewardPool`.

  Raises:
    ValueError: a function that does not exist, or options that it lacks.
  """
  settings = config.reward
  with Pool(
    settings.functions,
    settings.options.to_dict(),
    settings.weights,
    settings.workers,
    settings.timeout,
    sources=mixtures.scored_by(config),
  ) as pool:
    judges = mixtures.judges(config)
    yield RewardPool(pool, model, settings.model_weight, judges)


def submit(
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
  samples: Rollout,
  rows: slice = slice(None),
) -> groups.Pending:
  """Starts to compute the functions' rewards, and returns at once.

  Nothing is asked of the devices, which may be at the next samples.

  Args:
    reward_pool: from `open_reward_pool`.
    examples: [rows], with their "prompt_text".
    texts: [rows][G] completions.
    samples: the rollout that they are from.
    rows: the prompts of it that they are of.
  """
  names = ("completion_ids", "completion_mask", "finished")
  ids, mask, finished = jax.device_get([getattr(samples, x) for x in names])
  return groups.submit_groups(
    reward_pool.pool,
    examples,
    texts,
    mask[rows].sum(-1),
    finished[rows],
    mask.shape[-1],
    ids[rows],
  )


def with_model(
  reward_pool: RewardPool,
  scores: groups.GroupRewards,
  by_model: Float[np.ndarray, "B G"],
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
) -> groups.GroupRewards:
  """Adds a reward model's rewards, also where all functions abstain.

  Args:
    reward_pool: whose model it is.
    scores: of the functions.
    by_model: what the model says.
    examples: [B], for the failures.
    texts: [B][G] completions, likewise.

  Returns:
    Rewards, nan where there is none; the reward model's values are among those
    of the functions, by the name `MODEL`.
  """
  by_model = by_model.astype(np.float32)
  finite = np.isfinite(by_model)

  def failures(b, g):
    said, prompt = f"returned {by_model[b, g]}", examples[b]["prompt_text"]
    failure = Failure(MODEL, said, prompt, texts[b][g])
    return [*scores.failures[b][g], *[failure] * (not finite[b, g])]

  rows, columns = map(range, by_model.shape)
  by_functions = np.where(np.isnan(scores.rewards), 0, scores.rewards)
  failed = scores.failed | ~finite
  total = by_functions + reward_pool.model_weight * by_model
  return scores._replace(
    rewards=np.where(failed, np.nan, total).astype(np.float32),
    values=scores.values | {MODEL: np.where(finite, by_model, np.nan)},
    failed=failed,
    failures=[[failures(b, g) for g in columns] for b in rows],
  )


def stacked(scores: groups.GroupRewards) -> Float[np.ndarray, "K B G"]:
  """Values of each function, and last of a reward model, before any sum.

  NaN where a function has none, and for all of them where the completion has no
  reward, because one of them failed.
  """
  rewarded = np.isfinite(scores.rewards)
  values = np.stack(list(scores.values.values()))
  return np.where(rewarded, values, np.float32(np.nan))


def correctness(
  reward_pool: RewardPool,
  scores: groups.GroupRewards,
  examples: Sequence[Mapping[str, Any]],
) -> Float[np.ndarray, "B G"]:
  """What the first function says: 1 or more is a right answer.

  In a mixture it is the first of those that score the example's data set.
  """
  first = reward_pool.pool.names[0]
  names = [reward_pool.judges.get(e.get(SOURCE), first) for e in examples]
  return np.stack([scores.values[name][i] for i, name in enumerate(names)])


def metrics(scores: groups.GroupRewards) -> dict[str, int | float]:
  """Scalars for a log.

  `reward_failures`, a count, and where there are several functions
  `reward_NAME` and `reward_NAME_std`, the mean and standard deviation of each
  over the completions that it has a value for; `reward_FUNCTION/NAME`, the mean
  of another number that a function gave.
  """
  row: dict[str, int | float] = {
    "reward_failures": len(groups.all_failures(scores))
  }
  if len(scores.values) > 1:
    for name, values in scores.values.items():
      if not np.isnan(values).all():
        row[f"reward_{name}"] = float(np.nanmean(values))
        row[f"reward_{name}_std"] = float(np.nanstd(values))
  for name, values in scores.extras.items():  # some have it
    row[f"reward_{name}"] = float(np.nanmean(values))
  return row
