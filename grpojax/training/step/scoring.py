r"""Rewards of a rollout, by functions of text and by a reward model.

    rollout -> texts -> functions in worker processes --+
                   \--> reward model on the devices ----+--> GroupRewards [B, G]

Every process gets all token ids, then decodes and rewards its block of prompts
(`distributed.my_rows`). All processes gather the rewards in batch order.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from grpojax.core import meshes
from grpojax.core import rows as records
from grpojax.core.advantages import WITHIN_GROUPS
from grpojax.data.examples import READ, SOURCE
from grpojax.environments.pool import EnvironmentPool
from grpojax.models import sharding
from grpojax.rewards import conventions, functions, neural
from grpojax.rewards import pool as pool_lib
from grpojax.rewards.pool import Failure, GroupRewards, Pool, Submission
from grpojax.rewards.worker import LARGEST
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenization
from grpojax.training import policies
from grpojax.training.files.sources import ModelFiles
from grpojax.training.settings import mixtures
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes
from grpojax.training.step.batch import aggregation

MODEL = "reward.model"
"""Name of the reward model among the functions, whose names have no dot."""

SHORTEST = 128  # smallest padded length of a reward model's rows, in tokens
ROWS = 8  # sequences per device in a batch of the reward model

Model = Callable[[list[dict[str, Any]], list[list[str]]], np.ndarray]
Texts = list[list[str]]


class RewardPool(NamedTuple):
  """Reward functions, reward model and environment of a run."""

  pool: Pool  # reward functions, in worker processes or in this process
  model: Model | None = None  # `(examples, texts) -> [B, G]`
  model_weight: float = 1.0
  # Function that decides if an answer is correct, per data set; default: first
  judges: Mapping[str, str] = {}
  environment: EnvironmentPool | None = None
  failed_reward: float = math.nan  # if the environment fails; NaN: no reward


def reward_options(settings: TrainSettings) -> dict[str, Any]:
  """Returns the functions' options, with reward.thinking for `READ_ANSWERS`."""
  reward = settings.reward
  readers = set(functions.READ_ANSWERS).intersection(reward.functions)
  thinking = {"thinking": list(reward.thinking)}
  read = {name: thinking | reward.options.get(name, {}) for name in readers}
  return {**reward.options, **read}


def resolve_functions(settings: TrainSettings) -> list[functions.Reward]:
  """Returns the reward functions; ValueError for an unknown function."""
  names = settings.reward.functions
  return functions.resolve_all(names, reward_options(settings))


def check_columns(
  settings: TrainSettings, rewards: Sequence[functions.Reward], split: Any
) -> None:
  """Raises ValueError if a data set's first example lacks a needed column."""
  parts = split.parts or {"": split}
  only = mixtures.scored_by(settings)
  names = settings.reward.functions
  for name, reward in zip(names, rewards, strict=True):
    for source, part in parts.items():
      if not source or source in only.get(functions.label(name), parts):
        example = part.examples[0] | ({SOURCE: source} if source else {})
        if settings.environment.on:
          example = dict.fromkeys(pool_lib.OF_TURNS) | example
        dataset = f"data set {source or settings.data.name!r}"
        conventions.check_columns(name, reward, example, dataset)


def with_step(
  pool: Pool, examples: list[dict[str, Any]], step: int, steps: int
) -> list[dict[str, Any]]:
  """Adds the number of finished steps to examples if a function uses it."""
  if not pool.wants(conventions.STATE):
    return examples
  state = {"global_step": step, "max_steps": steps}  # TRL's names
  return [{**example, conventions.STATE: state} for example in examples]


def _conversation(tokenizer: Any, example: Mapping[str, Any], text: str):
  """Returns prompt and completion as a chat, or (without template) as text."""
  if not tokenizer.chat_template:
    return example["prompt_text"] + text
  prompt = example.get(READ, example["prompt"])
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  return [*prompt, {"role": "assistant", "content": text}]


def open_model(
  settings: TrainSettings, files: ModelFiles | None, mesh: jax.sharding.Mesh
) -> Model | None:
  """Loads the reward model, if any, onto a mesh.

  Texts beyond the policy's limits are cut at their start. data.special_tokens
  applies, so that a completion cannot end its turn and continue as the user.
  ValueError unless the model is a sequence classifier with one label.
  """
  if files is None:
    return None
  longest = settings.data.max_prompt_length
  new_tokens = settings.sampling.max_new_tokens
  policies.check_positions(files, longest, new_tokens)
  dtype = jnp.dtype(settings.model.dtype)
  lm, params = neural.load(
    files.with_weights(),
    ignore_keys=files.ignore_keys,
    dtype=dtype,
    param_dtype=dtype,
    shardings=functools.partial(sharding.shardings, mesh=mesh),
  )
  tokenizer = files.tokenizer
  encode = functools.partial(
    tokenization.encode_conversation,
    tokenizer,
    special_tokens=settings.data.special_tokens,
    date=settings.data.template_options.get("date_string"),
  )
  # Each length compiles a program, so lengths double. The last one leaves room
  # for the markers of turns.
  lengths = [SHORTEST]
  while lengths[-1] < longest + new_tokens + SHORTEST:
    lengths.append(2 * lengths[-1])
  rows = ROWS * meshes.row_shards(mesh)
  reward_model = neural.make_reward_model(
    lm,
    params,
    encode,
    lengths=lengths,
    batch_size=rows,
    sharding=meshes.batch_sharding(mesh, rows),
  )

  def model(examples, texts):
    conversations = [
      _conversation(tokenizer, example, text)
      for example, group in zip(examples, texts, strict=True)
      for text in group
    ]
    return reward_model(conversations).reshape(len(examples), -1)

  return model


@contextlib.contextmanager
def open_reward_pool(
  settings: TrainSettings, model: Model | None = None
) -> Iterator[RewardPool]:
  """Runs reward functions and environment; ends their processes on exit."""
  reward = settings.reward
  environment = None
  with contextlib.ExitStack() as stack:
    if settings.environment.on:
      environment = stack.enter_context(episodes.open_pool(settings))
    pool = Pool(
      reward.functions,
      reward_options(settings),
      reward.weights,
      reward.workers,
      reward.timeout,
      sources=mixtures.scored_by(settings),
    )
    yield RewardPool(
      stack.enter_context(pool),
      model,
      reward.model_weight,
      mixtures.judges(settings),
      environment,
      settings.environment.failed_reward,
    )


class PendingRewards(NamedTuple):
  """Part of a batch whose rewards are being computed."""

  prompts: int  # number of prompts in all processes
  texts: Texts  # completions of this process's prompts
  pending: Submission
  transcripts: list[list[episodes.Transcript]] | None = None  # as in `Sampled`


def submit_rollout(
  policy: policies.Policy,
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  sampled: episodes.Sampled,
) -> PendingRewards:
  """Decodes this process's completions and submits them to the functions.

  This runs on the host alone, since the devices may be sampling the next part.
  Rows of the rollout beyond the examples are padding.
  """
  rollout = sampled.rollout.replace(**meshes.fetch(sampled.read))
  rows = distributed.my_rows(len(examples))
  texts = policies.decode(policy, rollout, rows)
  pending = pool_lib.submit_groups(
    reward_pool.pool,
    examples[rows],
    texts,
    rollout.completion_mask[rows].sum(-1),
    rollout.finished[rows],
    rollout.completion_mask.shape[-1],
    rollout.completion_ids[rows],
    sampled.transcripts,
  )
  return PendingRewards(len(examples), texts, pending, sampled.transcripts)


def collect_rewards(
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  parts: Sequence[PendingRewards],
  check_signals: Callable[[], None],
  every_text: bool = False,
) -> tuple[Texts, GroupRewards]:
  """Waits for a batch's rewards; returns completions [B][G] and rewards.

  The rewards cover all processes; the completions cover only this process,
  unless `every_text` is True or there is a reward model.
  """
  texts = own_texts = [group for part in parts for group in part.texts]
  sizes = [part.prompts for part in parts]
  # The devices run the reward model while the workers run the functions.
  if every_text or reward_pool.model:
    texts = gather_rows(texts, sizes)
  by_model = reward_pool.model(examples, texts) if reward_pool.model else None
  with distributed.agreed():
    pending = [part.pending for part in parts]
    rewards = reward_pool.pool.collect(pending, check_signals)
    if reward_pool.environment is not None:
      transcripts = [x for part in parts for x in part.transcripts]
      failed = reward_pool.failed_reward
      rewards = fail_episodes(rewards, transcripts, own_texts, failed)
  rewards = _gather_rewards(rewards, sizes)
  if by_model is not None:
    rewards = add_model(reward_pool, rewards, by_model, examples, texts)
  return texts, rewards


def fail_episodes(
  rewards: GroupRewards,
  transcripts: Sequence[Sequence[episodes.Transcript]],
  texts: Sequence[Sequence[str]],
  reward: float,
) -> GroupRewards:
  """Sets the reward of trajectories whose environment failed; adds failures."""
  new = records.map_rows(lambda x, *_: np.copy(x), rewards)
  failures = [[[*failed] for failed in group] for group in rewards.failures]
  for b, g in np.ndindex(new.failed.shape):
    row = transcripts[b][g]
    if reason := row["episode_error"]:
      new.failed[b, g], new.rewards[b, g] = math.isnan(reward), reward
      for values in new.values.values():
        values[b, g] = reward
      failure = Failure("environment", reason, row["prompt"], texts[b][g])
      failures[b][g].append(failure)
  return new._replace(failures=failures)


def compute_rewards(
  policy: policies.Policy,
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  sampled: episodes.Sampled,
) -> tuple[Texts, GroupRewards]:
  """Returns all texts of a rollout and their rewards."""
  part = submit_rollout(policy, reward_pool, examples, sampled)
  return collect_rewards(reward_pool, examples, [part], lambda: None, True)


def _batch_order(sizes: Sequence[int]) -> Int[np.ndarray, "B"]:
  """Returns the index of each batch row in the gathered rows."""
  # Each process sends its rows part after part.
  parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
  by_process = [
    part[distributed.rows_of(process, len(part))]
    for process in range(distributed.count())
    for part in parts
  ]
  # The inverse permutation: index of each batch row in the gathered rows.
  return np.argsort(np.concatenate(by_process))


def gather_rows(local: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
  """Gathers JSON rows of all processes, in batch order.

  `local` are this process's rows, part after part; `sizes` are the parts'
  numbers of prompts in all processes together.
  """
  rows = [row for rows in distributed.gather(list(local)) for row in rows]
  return [rows[i] for i in _batch_order(sizes)]


def _gather_rewards(
  rewards: GroupRewards, sizes: Sequence[int]
) -> GroupRewards:
  if not distributed.several():
    return rewards

  def array(rows):  # a process may have no rows of a short batch
    parsed = np.array(rows, np.float64).reshape(-1, rewards.rewards.shape[1])
    return pool_lib.exact_enough(parsed)

  def named(columns):
    return {name: array(rows) for name, rows in columns.items()}

  def parse(fields):
    summed, values, failed, failures, extras = fields
    failures = [
      [[Failure(*failure) for failure in sample] for sample in group]
      for group in failures
    ]
    failed = array(failed).astype(bool)
    return GroupRewards(
      array(summed), named(values), failed, failures, named(extras)
    )

  # JSON loses the types of arrays, so `parse` restores them.
  lists = records.map_rows(lambda x, *_: x.tolist(), rewards)
  parts = map(parse, distributed.gather(lists))
  return records.take(join_groups([*parts]), _batch_order(sizes))


def join_groups(parts: Sequence[GroupRewards]) -> GroupRewards:
  """Concatenates parts; logged numbers (`extras`) that a part lacks are NaN."""
  names = sorted({name for part in parts for name in part.extras})

  def with_all_extras(part: GroupRewards) -> GroupRewards:
    none = np.full_like(part.rewards, np.nan)
    return part._replace(extras={n: part.extras.get(n, none) for n in names})

  return records.concatenate([*map(with_all_extras, parts)])


def add_model(
  reward_pool: RewardPool,
  rewards: GroupRewards,
  by_model: Float[np.ndarray, "B G"],
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
) -> GroupRewards:
  """Adds a reward model's rewards, as values of a function `MODEL`.

  If all functions abstain, their sum counts as 0. A reward of the model that is
  not finite or too large is a failure.
  """
  by_model = by_model.astype(np.float32)
  finite = np.abs(by_model) <= LARGEST
  failures = [[[*failed] for failed in group] for group in rewards.failures]
  # Each invalid reward becomes a failure, and its completion has no reward.
  for b, g in np.argwhere(~finite).tolist():
    reason = f"returned {by_model[b, g]}"
    prompt = examples[b]["prompt_text"]
    failures[b][g].append(Failure(MODEL, reason, prompt, texts[b][g]))
  by_functions = np.where(np.isnan(rewards.rewards), 0, rewards.rewards)
  failed = rewards.failed | ~finite
  total = by_functions + reward_pool.model_weight * by_model
  return rewards._replace(
    rewards=pool_lib.exact_enough(np.where(failed, np.nan, total)),
    values=rewards.values | {MODEL: np.where(finite, by_model, np.nan)},
    failed=failed,
    failures=failures,
  )


def stack_values(rewards: GroupRewards) -> Float[np.ndarray, "K B G"]:
  """Stacks the functions' values, with NaN for completions without reward."""
  rewarded = np.isfinite(rewards.rewards)
  values = np.stack(list(rewards.values.values()))
  return np.where(rewarded, values, np.float32(np.nan))


def place_rewards(
  settings: TrainSettings, rewards: GroupRewards, mesh: jax.sharding.Mesh
) -> tuple[Float[jax.Array, "B G"], Float[jax.Array, "K B G"] | None]:
  """Places rewards and values per function (None if summed) on a mesh.

  If advantages only compare rewards within groups, `in_float32` may subtract an
  offset from a group's rewards; `metrics` has the mean of the original ones.
  """
  values = None
  if aggregation(settings.reward) is not None:
    values = pool_lib.in_float32(stack_values(rewards))
  placed = rewards.rewards.astype(np.float32)
  if settings.loss.advantage in WITHIN_GROUPS:
    placed = pool_lib.in_float32(rewards.rewards)
  return (
    meshes.place(placed, mesh, "batch", "group"),
    meshes.place(values, mesh, None, "batch", "group"),
  )


def correctness(
  reward_pool: RewardPool,
  rewards: GroupRewards,
  examples: Sequence[Mapping[str, Any]],
) -> Float[np.ndarray, "B G"]:
  """Returns rewards of each data set's judging function; >= 1 is correct."""
  judges = reward_pool.judges
  rows = []
  for i, example in enumerate(examples):
    # The data set's judge decides; without a judge, the first function does.
    source = example.get(SOURCE)  # a user's column may have any type
    name = judges.get(source) if isinstance(source, str) else None
    rows.append(rewards.values[name or reward_pool.pool.names[0]][i])
  return np.stack(rows)


def metrics(rewards: GroupRewards) -> dict[str, int | float]:
  """Returns the metrics of rewards, in total and per function.

  `rewards/NAME/mean` and `rewards/NAME/std` are over completions with a value;
  `logged/FUNCTION/NAME` is the mean of a number logged by a function. Two
  slashes keep users' names apart from other metrics. `reward_mean` and
  `reward_std` are added if the devices only have shifted or rounded rewards.
  """
  failures = pool_lib.all_failures(rewards)
  row: dict[str, int | float] = {"reward_failures": len(failures)}
  # The devices' metrics of shifted or rounded rewards would be inexact.
  if rewards.rewards.dtype != np.float32:
    row["reward_mean"] = float(np.nanmean(rewards.rewards))
    row["reward_std"] = float(np.nanstd(rewards.rewards))
  if len(rewards.values) > 1:
    for name, values in rewards.values.items():
      if not np.isnan(values).all():
        row[f"rewards/{name}/mean"] = float(np.nanmean(values))
        row[f"rewards/{name}/std"] = float(np.nanstd(values))
  for name, values in rewards.extras.items():
    row[f"logged/{name}"] = float(np.nanmean(values))
  return row
