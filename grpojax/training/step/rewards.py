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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.data.examples import SOURCE
from grpojax.models import sharding
from grpojax.rewards import conventions, functions, groups, neural
from grpojax.rewards.conventions import STATE
from grpojax.rewards.groups import GroupRewards
from grpojax.rewards.pool import Failure, Pool, Submission, abandon
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.training import policy as policy_lib
from grpojax.training.data import mixtures
from grpojax.training.policy import Policy
from grpojax.training.run import hub_pins
from grpojax.training.settings.run import TrainSettings
from grpojax.training.step.batch import aggregation
from grpojax.training.step.sampling import (
  Sampler,
  join_rollouts,
  split_prompts,
)
from grpojax.training.step.timer import Timer

MODEL = "model"  # the reward model's name among the functions'

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
  """

  pool: Pool
  model: Model | None = None
  model_weight: float = 1.0
  judges: Mapping[str, str] = {}


def resolve_functions(settings: TrainSettings) -> list[functions.Reward]:
  """Returns the reward functions by themselves.

  Raises:
    ValueError: A function that does not exist, or options that it lacks.
  """
  reward = settings.reward
  return functions.resolve_all(reward.functions, reward.options)


def check_columns(
  settings: TrainSettings, rewards: Sequence[functions.Reward], split: Any
) -> None:
  """Checks that the data have the columns that reward functions ask for.

  Args:
    settings: Settings of the run.
    rewards: Functions, from `resolve_functions`.
    split: A `splits.Split`, of which the first example of each data set is
      looked at.

  Raises:
    ValueError: A column is missing.
  """
  parts, only = split.parts or {"": split}, mixtures.scored_by(settings)
  names = settings.reward.functions
  for name, reward in zip(names, rewards, strict=True):
    for source, part in parts.items():
      if not source or source in only.get(functions.label(name), parts):
        example = part.examples[0] | ({SOURCE: source} if source else {})
        where = f"data set {source or settings.data.name!r}"
        conventions.check_columns(name, reward, example, where)


def with_step(
  pool: Pool, examples: list[dict[str, Any]], step: int, steps: int
) -> list[dict[str, Any]]:
  """Adds to examples how far the run is, where a function asks for it.

  Args:
    pool: Reward functions.
    examples: Examples of prompts that are about to be sampled.
    step: Steps done.
    steps: Steps of the run.
  """
  if not pool.wants(STATE):
    return examples
  state = {"global_step": step, "max_steps": steps}  # TRL's names
  return [{**example, STATE: state} for example in examples]


def batches_with_step(
  pool: Pool, batches: Iterable[tuple[Any, Any]], step: int, steps: int
) -> Iterator[tuple[Any, Any]]:
  """Yields batches of prompts whose examples say how far the run is."""
  for prompts, examples in batches:
    yield prompts, with_step(pool, examples, step, steps)


def _conversation(tokenizer: Any, example: Mapping[str, Any], text: str):
  """Prompt and completion as a chat, or as one text without a chat template."""
  if not tokenizer.chat_template:
    return example["prompt_text"] + text
  prompt = example["prompt"]
  if isinstance(prompt, str):
    prompt = [{"role": "user", "content": prompt}]
  return [*prompt, {"role": "assistant", "content": text}]


def open_model(
  settings: TrainSettings, mesh: jax.sharding.Mesh
) -> Model | None:
  """Loads the reward model; None where there is none.

  It reads the prompt and the completion as a chat of two turns where its
  tokenizer has a chat template, else as one text, as the policy wrote it. Of
  what is longer than all that the policy may read and write, it reads the end.
  Names of special tokens in them are what data.special_tokens says, so that no
  completion can end its turn and go on as the user.

  Args:
    settings: Settings of the run.
    mesh: Mesh to load it onto, and to split its batches over.

  Returns:
    `(examples, texts) -> rewards [B, G]`.

  Raises:
    ValueError: It is no sequence classifier with one label.
  """
  path = hub_pins.reward_model(settings)
  if not path:
    return None
  directory = policy_lib.find_model(path)
  dtype = jnp.dtype(settings.model.dtype)
  lm, params = neural.load(
    directory,
    dtype=dtype,
    param_dtype=dtype,
    shardings=functools.partial(sharding.shardings, mesh=mesh),
  )
  tokenizer = tokenizer_lib.load(directory)
  # Each length is a program: powers of two, with room for the turns' markers.
  limit = settings.data.max_prompt_length + settings.sampling.max_new_tokens
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
  """Starts the reward functions, and ends their processes.

  Args:
    settings: Settings of the run.
    model: Reward model, from `open_model`.

  Raises:
    ValueError: A function that does not exist, or options that it lacks.
  """
  reward = settings.reward
  with Pool(
    reward.functions,
    reward.options,
    reward.weights,
    reward.workers,
    reward.timeout,
    sources=mixtures.scored_by(settings),
  ) as pool:
    judges = mixtures.judges(settings)
    yield RewardPool(pool, model, reward.model_weight, judges)


class PendingRewards(NamedTuple):
  """Part of a batch whose rewards are being computed.

  Attributes:
    prompts: Number of its prompts, in all processes.
    texts: Completions of this process's prompts, [own][G].
    pending: Rewards of these.
  """

  prompts: int
  texts: Texts
  pending: Submission


def submit_rollout(
  policy: Policy,
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  rollout: Rollout,
) -> PendingRewards:
  """Decodes this process's completions, and sends them to the functions.

  Nothing more is asked of the devices, which may be at the next samples.

  Args:
    policy: Model, whose tokenizer decodes them.
    reward_pool: Functions.
    examples: Examples of the prompts; the rollout may have more, which only pad
      the batch.
    rollout: Completions that are done; in every process the same part of the
      batch.
  """
  names = ("completion_ids", "completion_mask", "finished")
  on_host = mesh_lib.fetch({name: getattr(rollout, name) for name in names})
  rollout, own = rollout.replace(**on_host), distributed.my_rows(len(examples))
  texts = policy_lib.decode(policy, rollout, own)
  pending = groups.submit_groups(
    reward_pool.pool,
    examples[own],
    texts,
    rollout.completion_mask[own].sum(-1),
    rollout.finished[own],
    rollout.completion_mask.shape[-1],
    rollout.completion_ids[own],
  )
  return PendingRewards(len(examples), texts, pending)


def collect_rewards(
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  parts: Sequence[PendingRewards],
  check_signals: Callable[[], None],
  every_text: bool = False,
) -> tuple[Texts, GroupRewards]:
  """Waits for the rewards of a batch.

  Args:
    reward_pool: Functions and model.
    examples: Examples [B] of the whole batch.
    parts: Parts of the batch, one after another.
    check_signals: Function that is called while it waits; may raise.
    every_text: Return the texts of all processes, not of this one only.

  Returns:
    Completions [B][G] (of several processes, the first has the first ones), and
    the rewards of all of them.
  """
  texts = [group for part in parts for group in part.texts]
  sizes = [part.prompts for part in parts]
  if every_text or reward_pool.model:
    texts = gather_rows(texts, sizes)
  by_model = reward_pool.model(examples, texts) if reward_pool.model else None
  with distributed.agreed():
    pending = [part.pending for part in parts]
    rewards = reward_pool.pool.collect(pending, check_signals)
  rewards = _gather_rewards(rewards, sizes)
  if by_model is not None:
    rewards = add_model(reward_pool, rewards, by_model, examples, texts)
  return texts, rewards


def compute_rewards(
  policy: Policy,
  reward_pool: RewardPool,
  examples: Sequence[dict[str, Any]],
  rollout: Rollout,
  check_signals: Callable[[], None] = lambda: None,
) -> tuple[Texts, GroupRewards]:
  """Returns all texts of a rollout and their rewards."""
  part = submit_rollout(policy, reward_pool, examples, rollout)
  return collect_rewards(
    reward_pool, examples, [part], check_signals, every_text=True
  )


def gather_rows(own: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
  """Gathers every process's rows, in the order of the batch.

  Args:
    own: Rows of this process, of one part after another, of JSON's types.
    sizes: Numbers of prompts of the parts, in all processes.
  """
  if not distributed.several():
    return list(own)
  rows_of_process = list(map(iter, distributed.gather(list(own))))
  return [
    next(rows)
    for size in sizes
    for process, rows in enumerate(rows_of_process)
    for _ in range(size)[distributed.rows_of(process, size)]
  ]


def _gather_rewards(
  rewards: GroupRewards, sizes: Sequence[int]
) -> GroupRewards:
  """Gathers the rewards of all processes, from this one's."""
  if not distributed.several():
    return rewards
  names = list(rewards.values)
  extras = [
    {name: values[i].tolist() for name, values in rewards.extras.items()}
    for i in range(len(rewards.rewards))
  ]
  arrays = [rewards.rewards, rewards.failed, *rewards.values.values()]
  columns = [rewards.failures, extras, *(x.tolist() for x in arrays)]
  rows = gather_rows(list(zip(*columns, strict=True)), sizes)
  failures, extras, totals, failed, *values = zip(*rows, strict=True)
  extras_of_rows = [
    (1, {name: np.array([x], np.float32) for name, x in row.items()})
    for row in extras
  ]
  return GroupRewards(
    np.array(totals, np.float32),
    {n: np.array(x, np.float32) for n, x in zip(names, values, strict=True)},
    np.array(failed, bool),
    [[[Failure(*x) for x in one] for one in group] for group in failures],
    groups.joined_extras(extras_of_rows, rewards.rewards.shape[1]),
  )


def add_model(
  reward_pool: RewardPool,
  rewards: GroupRewards,
  by_model: Float[np.ndarray, "B G"],
  examples: Sequence[dict[str, Any]],
  texts: Sequence[Sequence[str]],
) -> GroupRewards:
  """Adds a reward model's rewards, also where all functions abstain.

  Args:
    reward_pool: Functions and model.
    rewards: Rewards by the functions.
    by_model: Rewards by the model.
    examples: Examples [B], for the failures.
    texts: Completions [B][G], likewise.

  Returns:
    Rewards, nan where there is none; the reward model's values are among those
    of the functions, by the name `MODEL`.
  """
  by_model = by_model.astype(np.float32)
  finite = np.isfinite(by_model)

  def failures(b, g):
    if finite[b, g]:
      return [*rewards.failures[b][g]]
    reason, prompt = f"returned {by_model[b, g]}", examples[b]["prompt_text"]
    failure = Failure(MODEL, reason, prompt, texts[b][g])
    return [*rewards.failures[b][g], failure]

  rows, columns = map(range, by_model.shape)
  by_functions = np.where(np.isnan(rewards.rewards), 0, rewards.rewards)
  failed = rewards.failed | ~finite
  total = by_functions + reward_pool.model_weight * by_model
  return rewards._replace(
    rewards=np.where(failed, np.nan, total).astype(np.float32),
    values=rewards.values | {MODEL: np.where(finite, by_model, np.nan)},
    failed=failed,
    failures=[[failures(b, g) for g in columns] for b in rows],
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
  """Places rewards on a mesh, with each function's where they are aggregated.

  Args:
    settings: Settings of the run.
    rewards: Rewards of a batch.
    mesh: Mesh of training.

  Returns:
    Rewards, one a completion; and the values of `stack_values` where
    `reward.aggregation` compares more than their sum, else None.
  """
  values = None
  if aggregation(settings.reward) is not None:
    values = stack_values(rewards)
  return (
    mesh_lib.place(rewards.rewards, mesh, "batch", "group"),
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
  names = [reward_pool.judges.get(e.get(SOURCE), first) for e in examples]
  return np.stack([rewards.values[name][i] for i, name in enumerate(names)])


def metrics(rewards: GroupRewards) -> dict[str, int | float]:
  """Returns scalars for a log.

  `reward_failures`, a count, and where there are several functions
  `reward_NAME` and `reward_NAME_std`, the mean and standard deviation of each
  over the completions that it has a value for; `reward_FUNCTION/NAME`, the mean
  of another number that a function gave.
  """
  row: dict[str, int | float] = {
    "reward_failures": len(groups.all_failures(rewards))
  }
  if len(rewards.values) > 1:
    for name, values in rewards.values.items():
      if not np.isnan(values).all():
        row[f"reward_{name}"] = float(np.nanmean(values))
        row[f"reward_{name}_std"] = float(np.nanstd(values))
  for name, values in rewards.extras.items():  # a number in each is not nan
    row[f"reward_{name}"] = float(np.nanmean(values))
  return row


def make_sample_and_reward(
  policy: Policy,
  sampler: Sampler,
  mesh: jax.sharding.Mesh,
  reward_pool: RewardPool,
  check_signals: Callable[[], None],
  parts: int,
):
  """Makes the sampling of prompts in parts, with rewards meanwhile.

  All parts are dispatched at once, and decoded one after another. What is done
  becomes text, and goes to the workers while the devices are at the next part.

  Args:
    policy: Model.
    sampler: Sampler of `sampling.on_sampling_mesh`.
    mesh: Mesh of training.
    reward_pool: Functions and model.
    check_signals: Function that is called while it waits; may raise. Rewards
      that are being computed then are abandoned.
    parts: Number of equal parts.

  Returns:
    `(params, prompts, examples, key, timer, first_prompt=None) -> (rollout,
    rewards)`, which gives the timer "rollout" and "rewards". `first_prompt` is
    the number of the first prompt among those that share the key, None for 0.
  """
  split = jax.jit(functools.partial(split_prompts, parts=parts))
  join = jax.jit(join_rollouts)

  def dispatch(params: Params, prompts: Prompts, key, *first) -> list[Rollout]:
    if parts == 1:
      return [sampler(params, prompts, key, *first)]
    return [
      sampler(params, part, key, number)
      for part, number in split(prompts, *first)
    ]

  def sample_and_reward(
    params: Params,
    prompts: Prompts,
    examples,
    key,
    timer: Timer,
    first_prompt=None,
  ) -> tuple[Rollout, GroupRewards]:
    first = (
      () if first_prompt is None else (mesh_lib.place(first_prompt, mesh),)
    )
    rollouts = dispatch(params, prompts, key, *first)
    submitted: list[PendingRewards] = []
    rows = len(examples) // parts
    try:
      for i, rollout in enumerate(rollouts):
        policy_lib.wait(rollout, check_signals)
        if i == len(rollouts) - 1:
          timer("rollout")
        submitted.append(
          submit_rollout(
            policy, reward_pool, examples[i * rows :][:rows], rollout
          )
        )
    except BaseException:
      abandon([part.pending for part in submitted])
      raise
    _, rewards = collect_rewards(
      reward_pool, examples, submitted, check_signals
    )
    timer("rewards")
    return rollouts[0] if parts == 1 else join(rollouts), rewards

  return sample_and_reward
