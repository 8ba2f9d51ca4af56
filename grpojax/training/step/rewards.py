r"""Rewards of a rollout: functions of text, and a reward model.

    rollout -> texts -> functions in worker processes --+
                   \--> reward model on the devices ----+--> GroupRewards [B, G]

Each process of a run decodes and rewards its own block of the prompts
(`distributed.my_rows`), whole groups, whichever devices sampled them: ids are
few, so every process gets all of them. The rewards are then gathered: all
processes know all of them, in the order of the batch.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from grpojax.core import mesh as mesh_lib
from grpojax.core.advantages import WITHIN_GROUPS
from grpojax.data.examples import READ, SOURCE
from grpojax.environments.pool import EnvironmentPool
from grpojax.models import sharding
from grpojax.rewards import conventions, functions, groups, neural
from grpojax.rewards import pool as pool_lib
from grpojax.rewards.conventions import STATE
from grpojax.rewards.groups import GroupRewards
from grpojax.rewards.pool import Failure, Pool, Submission
from grpojax.rewards.worker import LARGEST
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.training import policy as policy_lib
from grpojax.training.data import mixtures
from grpojax.training.policy import Policy
from grpojax.training.run import hub_pins
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step import episodes
from grpojax.training.step.batch import aggregation
from grpojax.training.step.episodes import Sampled

# The reward model's name among the functions'. It has a point, which the names
# of functions have not.
MODEL = "reward.model"

SHORTEST = 128  # tokens that a reward model's rows are padded to, at least
ROWS = 8  # sequences that each device reads at once

Model = Callable[[list[dict[str, Any]], list[list[str]]], np.ndarray]
Texts = list[list[str]]


class RewardPool(NamedTuple):
  """Functions and model that compute rewards.

  Attributes:
    pool: Reward functions, in worker processes or in this one.
    model: `(examples, texts) -> [B, G]`, a reward model; None for none.
    model_weight: Weight of its rewards in the sum.
    judges: Name of the function that says what a right answer is, by data set
      of a mixture; the first one where an example's is not there.
    environment: Environment of the trajectories, or None.
    failed_reward: Reward of a trajectory whose environment fails; NaN is none.
  """

  pool: Pool
  model: Model | None = None
  model_weight: float = 1.0
  judges: Mapping[str, str] = {}
  environment: EnvironmentPool | None = None
  failed_reward: float = math.nan


def reward_options(settings: TrainSettings) -> dict[str, Any]:
  """Returns the functions' keyword arguments, with `reward.thinking`."""
  reward = settings.reward
  readers = set(functions.READ_ANSWERS).intersection(reward.functions)
  thinking = {"thinking": list(reward.thinking)}
  read = {name: thinking | reward.options.get(name, {}) for name in readers}
  return {**reward.options, **read}


def resolve_functions(settings: TrainSettings) -> list[functions.Reward]:
  """Returns the reward functions; ValueError for one that does not exist."""
  return functions.resolve_all(
    settings.reward.functions, reward_options(settings)
  )


def check_columns(
  settings: TrainSettings, rewards: Sequence[functions.Reward], split: Any
) -> None:
  """Raises ValueError where data lack a column that a function asks for.

  The first example of each data set of `split`, a `splits.Split`, is looked at.
  """
  parts, only = split.parts or {"": split}, mixtures.scored_by(settings)
  names = settings.reward.functions
  for name, reward in zip(names, rewards, strict=True):
    for source, part in parts.items():
      if not source or source in only.get(functions.label(name), parts):
        example = part.examples[0] | ({SOURCE: source} if source else {})
        if settings.environment.on:
          example = dict.fromkeys(groups.OF_TURNS) | example
        where = f"data set {source or settings.data.name!r}"
        conventions.check_columns(name, reward, example, where)


def with_step(
  pool: Pool, examples: list[dict[str, Any]], step: int, steps: int
) -> list[dict[str, Any]]:
  """Adds to examples that `step` of `steps` are done, if a function asks."""
  if not pool.wants(STATE):
    return examples
  state = {"global_step": step, "max_steps": steps}  # TRL's names
  return [{**example, STATE: state} for example in examples]


def _conversation(tokenizer: Any, example: Mapping[str, Any], text: str):
  """Prompt and completion as a chat, or as one text without a chat template."""
  if not tokenizer.chat_template:
    return example["prompt_text"] + text
  prompt = example.get(READ, example["prompt"])
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  return [*prompt, {"role": "assistant", "content": text}]


def open_model(
  settings: TrainSettings, mesh: jax.sharding.Mesh
) -> Model | None:
  """Loads the reward model onto a mesh; None where there is none.

  Of what is longer than all that the policy may read and write, it reads the
  end. Names of special tokens are what data.special_tokens says, so that no
  completion can end its turn and go on as the user.

  Raises:
    ValueError: It is no sequence classifier with one label.
  """
  path = hub_pins.reward_model(settings)
  if not path:
    return None
  directory = policy_lib.find_model(path)
  keys = settings.model.ignore_keys
  longest = settings.data.max_prompt_length
  new_tokens = settings.sampling.max_new_tokens
  policy_lib.check_positions(directory, longest, new_tokens, keys)
  dtype = jnp.dtype(settings.model.dtype)
  lm, params = neural.load(
    directory,
    ignore_keys=keys,
    dtype=dtype,
    param_dtype=dtype,
    shardings=functools.partial(sharding.shardings, mesh=mesh),
  )
  tokenizer = tokenizer_lib.load(directory)
  # Each length is a program: powers of two, with room for the turns' markers.
  limit = longest + new_tokens
  lengths = [SHORTEST]
  while lengths[-1] < limit + SHORTEST:
    lengths.append(2 * lengths[-1])
  rows = ROWS * mesh_lib.row_shards(mesh)
  reward_model = neural.make_reward_model(
    lm,
    params,
    functools.partial(
      tokenizer_lib.encode_conversation,
      tokenizer,
      special_tokens=settings.data.special_tokens,
      date=settings.data.template_options.get("date_string"),
    ),
    lengths=lengths,
    batch_size=rows,
    sharding=mesh_lib.batch_sharding(mesh, rows),
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
  """Starts the reward functions, and an environment; ends their processes.

  Raises:
    ValueError: A function that does not exist, or options that it lacks.
  """
  reward, environment = settings.reward, None
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
    stack.enter_context(pool)
    judges = mixtures.judges(settings)
    yield RewardPool(
      pool,
      model,
      reward.model_weight,
      judges,
      environment,
      settings.environment.failed_reward,
    )


class PendingRewards(NamedTuple):
  """Part of a batch whose rewards are being computed.

  Attributes:
    prompts: Number of its prompts, in all processes.
    texts: Completions of this process's prompts.
    pending: Rewards of these.
    transcripts: Theirs, of `Sampled`.
  """

  prompts: int
  texts: Texts
  pending: Submission
  transcripts: list[list[episodes.Transcript]] | None = None


def submit_rollout(
  policy: Policy,
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  sampled: Sampled,
) -> PendingRewards:
  """Decodes this process's completions, and sends them to the functions.

  Nothing more is asked of the devices, which may be at the next samples. Of the
  rollout, rows beyond the examples only pad the batch.
  """
  rollout = sampled.rollout.replace(**mesh_lib.fetch(sampled.read))
  own = distributed.my_rows(len(examples))
  texts = policy_lib.decode(policy, rollout, own)
  pending = groups.submit_groups(
    reward_pool.pool,
    examples[own],
    texts,
    rollout.completion_mask[own].sum(-1),
    rollout.finished[own],
    rollout.completion_mask.shape[-1],
    rollout.completion_ids[own],
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
  """Waits for the rewards of all parts of a batch, in all processes.

  Returns:
    Completions [B][G] (of this process, or with `every_text` of all), and the
    rewards.
  """
  texts = own_texts = [group for part in parts for group in part.texts]
  sizes = [part.prompts for part in parts]
  if every_text or reward_pool.model:
    texts = gather_rows(texts, sizes)
  by_model = reward_pool.model(examples, texts) if reward_pool.model else None
  with distributed.agreed():
    pending = [part.pending for part in parts]
    rewards = reward_pool.pool.collect(pending, check_signals)
    if reward_pool.environment is not None:
      transcripts = [x for part in parts for x in part.transcripts]
      rewards = fail_episodes(
        rewards, transcripts, own_texts, reward_pool.failed_reward
      )
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
  """Gives trajectories whose environment failed a `reward`, with the reason.

  Whatever the functions made of them: how far they went is no merit.
  """
  new = _map_arrays(np.copy, rewards)
  failures = [[[*own] for own in group] for group in rewards.failures]
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
  policy: Policy,
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  sampled: Sampled,
  check_signals: Callable[[], None] = lambda: None,
) -> tuple[Texts, GroupRewards]:
  """Returns all texts of a rollout and their rewards."""
  part = submit_rollout(policy, reward_pool, examples, sampled)
  return collect_rewards(
    reward_pool, examples, [part], check_signals, every_text=True
  )


def _batch_order(sizes: Sequence[int]) -> Int[np.ndarray, "B"]:
  """Order of the batch among the rows of one process after another."""
  parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
  by_process = [
    part[distributed.rows_of(process, len(part))]
    for process in range(distributed.count())
    for part in parts
  ]
  return np.argsort(np.concatenate(by_process))


def gather_rows(own: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
  """Gathers rows of JSON's types of all processes, in the batch's order.

  This process has its `own` of one part after another; `sizes` are the parts'
  numbers of prompts in all processes.
  """
  if not distributed.several():
    return list(own)
  rows = [row for rows in distributed.gather(list(own)) for row in rows]
  return [rows[i] for i in _batch_order(sizes)]


def _gather_rewards(
  rewards: GroupRewards, sizes: Sequence[int]
) -> GroupRewards:
  """Gathers the rewards of all processes, from this one's."""
  if not distributed.several():
    return rewards

  def array(rows):  # a process may have no prompt of a short batch
    parsed = np.array(rows, np.float64).reshape(-1, rewards.rewards.shape[1])
    return pool_lib.exact_enough(parsed)

  def parse(fields):
    parsed = _map_arrays(array, GroupRewards(*fields))
    return parsed._replace(
      failed=parsed.failed.astype(bool),
      failures=[
        [[Failure(*failure) for failure in failures] for failures in group]
        for group in parsed.failures
      ],
    )

  fields = distributed.gather(_map_arrays(np.ndarray.tolist, rewards))
  return take_groups(join_groups(map(parse, fields)), _batch_order(sizes))


def _map_arrays(function: Callable[..., Any], *parts: GroupRewards):
  """Calls a function with each array of rewards; functions keep their order."""
  first = parts[0]  # no jax.tree.map, which sorts names
  return first._replace(
    rewards=function(*(part.rewards for part in parts)),
    values={
      name: function(*(part.values[name] for part in parts))
      for name in first.values
    },
    failed=function(*(part.failed for part in parts)),
    extras={
      name: function(*(part.extras[name] for part in parts))
      for name in first.extras
    },
  )


def take_groups(
  rewards: GroupRewards, rows: Int[np.ndarray, "B"]
) -> GroupRewards:
  """Returns the rewards of the groups of these numbers."""
  taken = _map_arrays(lambda x: x[rows], rewards)
  return taken._replace(failures=[rewards.failures[row] for row in rows])


def join_groups(parts: Iterable[GroupRewards]) -> GroupRewards:
  """Joins rewards, one part after another; NaN where one lacks an extra."""
  parts = list(parts)
  names = sorted({name for part in parts for name in part.extras})

  def with_all_extras(part: GroupRewards) -> GroupRewards:
    none = np.full_like(part.rewards, np.nan)
    return part._replace(extras={n: part.extras.get(n, none) for n in names})

  joined = _map_arrays(
    lambda *arrays: np.concatenate(arrays), *map(with_all_extras, parts)
  )
  failures = [group for part in parts for group in part.failures]
  return joined._replace(failures=failures)


def add_model(
  reward_pool: RewardPool,
  rewards: GroupRewards,
  by_model: Float[np.ndarray, "B G"],
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
) -> GroupRewards:
  """Adds a reward model's rewards, also where all functions abstain.

  They are among the values of the functions, by the name `MODEL`; one that is
  not finite, or too large, is a failure of this example and text.
  """
  by_model = by_model.astype(np.float32)
  finite = np.abs(by_model) <= LARGEST
  failures = [[[*failed] for failed in group] for group in rewards.failures]
  for b, g in np.argwhere(~finite).tolist():
    reason, prompt = f"returned {by_model[b, g]}", examples[b]["prompt_text"]
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
  """Stacks the values of each function, and last of a reward model.

  NaN where a function has none, and for all of them where the completion has no
  reward, because one of them failed.
  """
  rewarded = np.isfinite(rewards.rewards)
  values = np.stack(list(rewards.values.values()))
  return np.where(rewarded, values, np.float32(np.nan))


def place_rewards(
  settings: TrainSettings, rewards: GroupRewards, mesh: jax.sharding.Mesh
) -> tuple[Float[jax.Array, "B G"], Float[jax.Array, "K B G"] | None]:
  """Places rewards on a mesh, and each function's where they are aggregated.

  The latter are None where `reward.aggregation` compares nothing but the sum.
  They are `in_float32` if nothing but the group is compared, and `metrics` has
  the mean of what they were.
  """
  values = None
  if aggregation(settings.reward) is not None:
    values = pool_lib.in_float32(stack_values(rewards))
  placed = rewards.rewards.astype(np.float32)
  if settings.loss.advantage in WITHIN_GROUPS:
    placed = pool_lib.in_float32(rewards.rewards)
  return (
    mesh_lib.place(placed, mesh, "batch", "group"),
    mesh_lib.place(values, mesh, None, "batch", "group"),
  )


def correctness(
  reward_pool: RewardPool,
  rewards: GroupRewards,
  examples: Sequence[Mapping[str, Any]],
) -> Float[np.ndarray, "B G"]:
  """Returns the values of the first function: 1 or more is a right answer.

  In a mixture it is the first of those that reward the example's data set.
  """
  first = reward_pool.pool.names[0]
  sources = [e.get(SOURCE) for e in examples]  # a column of any type
  names = [
    reward_pool.judges.get(source, first) if isinstance(source, str) else first
    for source in sources
  ]
  return np.stack([rewards.values[name][i] for i, name in enumerate(names)])


def metrics(rewards: GroupRewards) -> dict[str, int | float]:
  """Returns the metrics of the rewards by function.

  `rewards/NAME/mean` and `rewards/NAME/std` are over the completions that a
  function has a value for; `logged/FUNCTION/NAME` is the mean of another number
  that it returned. Users choose these names, and no other metric has two
  slashes, so that none is overwritten.
  `reward_mean` and `reward_std` are here if the devices have rounded rewards.
  """
  failures = groups.all_failures(rewards)
  row: dict[str, int | float] = {"reward_failures": len(failures)}
  if rewards.rewards.dtype != np.float32:
    row["reward_mean"] = float(np.nanmean(rewards.rewards))
    row["reward_std"] = float(np.nanstd(rewards.rewards))
  if len(rewards.values) > 1:
    for name, values in rewards.values.items():
      if not np.isnan(values).all():
        row[f"rewards/{name}/mean"] = float(np.nanmean(values))
        row[f"rewards/{name}/std"] = float(np.nanstd(values))
  for name, values in rewards.extras.items():  # a number in each is not nan
    row[f"logged/{name}"] = float(np.nanmean(values))
  return row
