"""Sampling with an environment of the host, by the settings of a run."""

import functools
import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, UInt

from grpojax.core import mesh as mesh_lib
from grpojax.core.decoding import chunks
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.types import Params, Prompts, Rollout
from grpojax.environments import conventions, episodes
from grpojax.environments.episodes import Answer, Turn
from grpojax.environments.pool import EnvironmentPool, check_replay
from grpojax.environments.protocol import Step
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.runtime.text.turns import TurnEncoder, turn_encoder
from grpojax.training import policy as policy_lib
from grpojax.training.policy import Policy
from grpojax.training.settings.inputs import EnvironmentSettings
from grpojax.training.settings.run import TrainSettings

Transcript = dict[str, Any]
"""What an environment did in a trajectory: its "messages", "turn_rewards",
"episode_error" (None, or why it failed), "episode_info" (sums of numbers)."""


class Sampled(NamedTuple):
  """Completions, and of trajectories what is known on the host.

  Attributes:
    rollout: Completions of all processes.
    transcripts: [B][G] of this process's prompts; None without an environment.
    seconds: Seconds in which environments were waited for.
  """

  rollout: Rollout
  transcripts: list[list[Transcript]] | None = None
  seconds: float = 0.0


def open_pool(settings: TrainSettings) -> EnvironmentPool:
  """Makes the workers of the environment; ValueError for what is none."""
  own = settings.environment
  return EnvironmentPool(
    own.path,
    own.tools,
    own.options,
    own.tool_format,
    workers=own.workers,
    timeout=own.timeout,
  )


def tools(settings: EnvironmentSettings) -> list[dict[str, Any]]:
  """Returns the schemas of the tools, for the chat template."""
  if not settings.on:
    return []
  return conventions.resolve(
    settings.path, settings.tools, settings.options, settings.tool_format
  ).tools


def make_programs(
  settings: TrainSettings, policy: Policy, group_size: int, sampling: Sampling
) -> episodes.Programs:
  """Compiles the functions of `core.decoding.chunks`."""
  longest = settings.sampling.max_new_tokens

  def begin(lm, params, prompts, key, first_prompt=0):
    return chunks.begin(
      lm,
      params,
      prompts,
      key,
      first_prompt,
      group_size=group_size,
      max_new_tokens=longest,
      pad_id=policy.pad_id,
      slots=episodes.cache_sizes(longest)[0],
    )

  def decode(lm, *args, slots):
    return chunks.decode(
      lm,
      *args,
      tokens=episodes.TOKENS,
      slots=slots,
      eos_ids=policy.eos_ids,
      sampling=sampling,
    )

  return episodes.Programs(
    policy_lib.jit(policy, begin),
    policy_lib.jit(policy, decode, static_argnames="slots", donate_argnums=2),
    policy_lib.jit(
      policy, chunks.feed, static_argnames="slots", donate_argnums=2
    ),
    jax.jit(chunks.finish),
  )


def encoder(settings: TrainSettings, policy: Policy) -> TurnEncoder:
  """Makes the encoder of observations; ValueError for a template that fails."""
  own, data = settings.environment, settings.data
  options = dict(data.template_options)
  if schemas := tools(own):
    options["tools"] = schemas
  return turn_encoder(
    policy.tokenizer,
    policy.eos_ids,
    template=own.template,
    template_options=options,
    special_tokens=data.special_tokens,
    max_observation=own.max_observation,
  )


def check(
  settings: TrainSettings,
  policy: Policy,
  pool: EnvironmentPool,
  example: dict[str, Any],
) -> None:
  """Plays a short episode, and sets its observations.

  Raises:
    ValueError: an environment that fails, differs from one time to the next or
      observes before the first turn; a chat template that cannot take turns.
  """
  encode, own = encoder(settings, policy), settings.environment
  if pool.tools:
    encode.check([{"role": "tool", "name": "tool", "content": "1"}])
  (first,) = pool.collect(pool.submit([("reset", example, settings.seed)]))
  if not isinstance(first, str) and (error := _reset_error(first)):
    raise ValueError(f"the environment's reset {error}")
  check_replay(pool, example, settings.seed)
  call = "step", getattr(first, "state", None), "1", example, settings.seed
  (step,) = pool.collect(pool.submit([call]))
  if isinstance(step, str):
    print(f"warning: to the turn '1' the environment {step}", flush=True)
  if own.max_observation >= settings.sampling.max_new_tokens:
    print(
      f"warning: an observation of environment.max_observation = "
      f"{own.max_observation} tokens leaves no room for a turn in "
      f"sampling.max_new_tokens = {settings.sampling.max_new_tokens}",
      flush=True,
    )


def _reset_error(step: Step) -> str:
  """Says what a reset must not return; "" where it is right."""
  if step.observation:
    return (
      f"observes {str(step.observation)[:80]!r}, but a trajectory begins with "
      "its prompt: put that into the data"
    )
  if step.done or step.reward:
    return "is done or has a reward: that is for step to say"
  return ""


def make_player(
  settings: TrainSettings,
  policy: Policy,
  group_size: int,
  sampling: Sampling,
  pool: EnvironmentPool,
  mesh: jax.sharding.Mesh | None = None,
):
  """Makes the sampling of trajectories with their environments.

  Returns:
    `(params, prompts, examples, key, *first_prompt, check_signals) -> Sampled`,
    as a generator that yields while the devices decode (`play_together`).
  """
  programs = make_programs(settings, policy, group_size, sampling)
  encode = encoder(settings, policy)

  def player(
    params: Params,
    prompts: Prompts,
    examples: Sequence[dict[str, Any]],
    key: Array,
    *first_prompt: Array,
    check_signals: Callable[[], None] = lambda: None,
  ) -> Generator[None, None, Sampled]:
    table = _Episodes(policy, pool, encode, examples, group_size, check_signals)
    rollout = yield from episodes.play(
      programs,
      params,
      prompts,
      key,
      table.answer,
      *first_prompt,
      max_turns=settings.environment.max_turns,
      wait=functools.partial(policy_lib.wait, check_signals=check_signals),
      reset=table.reset,
    )
    if mesh is not None:
      rollout = mesh_lib.map_rows(
        lambda x, *names: mesh_lib.place(x, mesh, *names), rollout
      )
    return Sampled(rollout, table.transcripts, table.seconds)

  return player


def _empty_transcript() -> Transcript:
  lists = {"messages": [], "turn_rewards": []}
  return lists | {"episode_error": None, "episode_info": {}}


class _Episodes:
  """Environments of a batch's trajectories, while they are played.

  Each process steps those of its own prompts, and all are told the answers.
  """

  def __init__(
    self,
    policy: Policy,
    pool: EnvironmentPool,
    encode: TurnEncoder,
    examples: Sequence[dict[str, Any]],
    group_size: int,
    check_signals: Callable[[], None],
  ):
    self.policy, self.pool, self.encode = policy, pool, encode
    self.examples, self.group_size = examples, group_size
    self.check_signals, self.seconds = check_signals, 0.0
    own = distributed.my_rows(len(examples))
    self.own = range(len(examples))[own]
    self.states: dict[tuple[int, int], Any] = {}
    self.observed: dict[tuple[int, int], list[dict[str, str]]] = {}
    self.seeds: np.ndarray | None = None
    self.transcripts = [
      [_empty_transcript() for _ in range(group_size)] for _ in self.own
    ]

  def reset(self, seeds: UInt[np.ndarray, "B G"]) -> None:
    """Resets the environments, one a prompt; its samples begin alike."""
    self.seeds = seeds
    calls = [("reset", self.examples[i], int(seeds[i, 0])) for i in self.own]
    for i, step in zip(self.own, self._ask(calls), strict=True):
      error = step if isinstance(step, str) else _reset_error(step)
      for j in range(self.group_size):
        if error:
          self._transcript(i, j)["episode_error"] = f"reset: {error}"
        else:
          self.states[i, j] = step.state

  def answer(self, turns: list[Turn]) -> list[Answer]:
    """Steps the environments of turns that have ended."""
    own = [x for x in turns if x.prompt in self.own]
    texts = [self._text(x) for x in own]
    alive = [
      (turn, text)
      for turn, text in zip(own, texts, strict=True)
      if (turn.prompt, turn.sample) in self.states
    ]
    steps = self._ask(
      [
        (
          "step",
          self.states[turn.prompt, turn.sample],
          text,
          self.examples[turn.prompt],
          int(self.seeds[turn.prompt, turn.sample]),
        )
        for turn, text in alive
      ]
    )
    answers = {(x.prompt, x.sample): Answer((), math.nan, True) for x in own}
    for (turn, text), step in zip(alive, steps, strict=True):
      answers[turn.prompt, turn.sample] = self._record(turn, text, step)
    if distributed.several():
      rows = [
        [i, j, reply.ids, reply.reward, reply.done]
        for (i, j), reply in answers.items()
      ]
      answers = {
        (i, j): Answer(ids, reward, done)
        for part in distributed.gather(rows)
        for i, j, ids, reward, done in part
      }
    return [answers[x.prompt, x.sample] for x in turns]

  def _record(self, turn: Turn, text: str, step: Any) -> Answer:
    """Writes a step into the transcript, and returns what the row reads."""
    place = turn.prompt, turn.sample
    row = self._transcript(turn.prompt, turn.sample)
    # What was observed before, which only now is known to have been read.
    row["messages"] += self.observed.pop(place, [])
    row["messages"].append({"role": "assistant", "content": text})
    ids = []
    if not isinstance(step, str) and not step.done:
      try:
        ids = self.encode(step.observation, int(turn.ids[-1]))
      except ValueError as error:
        step = f"{error}"
    if isinstance(step, str):  # a failure, in words
      row["episode_error"] = f"turn {turn.turn}: {step}"
      row["turn_rewards"].append(None)
      return Answer((), math.nan, True)
    self.states[place] = step.state
    row["turn_rewards"].append(step.reward or 0.0)
    for name, number in step.info.items():
      row["episode_info"][name] = row["episode_info"].get(name, 0.0) + number
    reward = float(step.reward or 0.0)
    observed = step.observation
    if isinstance(observed, str):
      observed = [{"role": "user", "content": observed}]
    self.observed[place] = observed
    return Answer(ids, reward, step.done)

  def _transcript(self, i: int, j: int) -> dict[str, Any]:
    return self.transcripts[i - self.own.start][j]

  def _text(self, turn: Turn) -> str:
    everything = np.ones(len(turn.ids), bool)
    return tokenizer_lib.decode_completion(
      self.policy.tokenizer, turn.ids, everything, self.policy.eos_ids
    )

  def _ask(self, calls: list[tuple]) -> list[Any]:
    began = time.perf_counter()
    with distributed.agreed():
      steps = self.pool.collect(self.pool.submit(calls), self.check_signals)
    self.seconds += time.perf_counter() - began
    return steps
