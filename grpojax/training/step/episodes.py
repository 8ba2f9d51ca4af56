"""Sampling with an environment of the host, by the settings of a run."""

import dataclasses
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
from grpojax.data.examples import READ
from grpojax.environments import episodes, tools
from grpojax.environments.episodes import Answer, Turn
from grpojax.environments.pool import Call, EnvironmentPool, check_replay
from grpojax.environments.protocol import Step
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenizer as tokenizer_lib
from grpojax.runtime.text.turns import Observation, TurnEncoder
from grpojax.training import policy as policy_lib
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.settings.inputs import DataSettings
from grpojax.training.settings.run import TrainSettings

Transcript = dict[str, Any]
"""An environment's part in a trajectory: "messages", "turn_rewards",
"episode_error" (None, or the reason of a failure), "episode_info" (sums of
numbers), and at the end the "prompt" that was read."""


class Sampled(NamedTuple):
  """Completions, and the host's records of trajectories."""

  rollout: Rollout  # of all processes
  read: dict[str, Array | None]  # arrays for rewards, whole on every device
  # [B][G] of this process's prompts; None without an environment
  transcripts: list[list[Transcript]] | None = None
  seconds: float = 0.0  # time spent waiting for environments


def sampled(rollout: Rollout, *of_host: Any) -> Sampled:
  """Returns `Sampled`, and asks the devices for the arrays to read."""
  names = "completion_ids", "completion_mask", "finished", "turns"
  read = mesh_lib.whole({name: getattr(rollout, name) for name in names})
  return Sampled(rollout, read, *of_host)


def open_pool(settings: TrainSettings) -> EnvironmentPool:
  """Returns the environment's workers; ValueError if it is not valid."""
  own = settings.environment
  names = "path tools options tool_format action workers timeout".split()
  return EnvironmentPool(**{name: getattr(own, name) for name in names})


def make_programs(
  settings: TrainSettings,
  policy: policy_lib.Policy,
  group_size: int,
  sampling: Sampling,
  record_experts: bool,
) -> episodes.Programs:
  """Compiles the functions of `core.decoding.chunks`."""
  longest = settings.sampling.max_new_tokens
  common = {"eos_ids": policy.ends, "sampling": sampling}
  begin = functools.partial(
    chunks.begin,
    group_size=group_size,
    max_new_tokens=longest,
    pad_id=policy.pad_id,
    slots=episodes.cache_sizes(longest)[0],
    record_experts=record_experts,
    **common,
  )
  turn = settings.environment.max_turn_tokens
  decode = functools.partial(
    chunks.decode, tokens=episodes.TOKENS, turn_tokens=turn, **common
  )
  feed = functools.partial(chunks.feed, sampling=sampling)
  in_place = {"static_argnames": "slots", "donate_argnums": 2}
  return episodes.Programs(
    policy_lib.jit(policy, begin),
    policy_lib.jit(policy, decode, **in_place),
    policy_lib.jit(policy, feed, **in_place),
    jax.jit(chunks.finish),
  )


def encoder(settings: TrainSettings, policy: policy_lib.Policy) -> TurnEncoder:
  """Returns the encoder of observations; ValueError if its template fails."""
  own, data = settings.environment, settings.data
  half = max(1, settings.sampling.max_new_tokens // 2)
  return TurnEncoder(
    policy.tokenizer,
    policy.eos_ids,
    template=own.template,
    template_options=prompts_lib.template_options(settings, policy),
    special_tokens=data.special_tokens,
    max_observation=min(own.max_observation or half, half),
  )


def check(
  settings: TrainSettings,
  policy: policy_lib.Policy,
  pool: EnvironmentPool,
  example: dict[str, Any],
  check_signals: Callable[[], None] = lambda: None,
) -> None:
  """Plays a short episode to test the environment.

  ValueError if the environment fails or is not deterministic, the chat template
  cannot take turns, or the reset's observation does not fit the prompt.
  """
  encode, own = encoder(settings, policy), settings.environment
  actions = []
  if pool.tools:
    encode.check([{"role": "tool", "name": "tool", "content": "1"}])
  if own.check == "tools":
    if not pool.tools:
      raise ValueError(
        "environment.check = 'tools': the environment has no tools, use actions"
      )
    actions = [tools.made_up(x, own.tool_format) for x in pool.tools]
  seed = settings.seed
  first, *steps = check_replay(pool, example, seed, check_signals, actions)
  if error := _reset_error(first):
    raise ValueError(f"the environment's reset {error}")
  encode_prompt = prompts_lib.encoder(settings, policy)
  join_prompt(encode_prompt, settings.data, example, first.observation)
  if steps and isinstance(steps[-1], str):
    print(f"warning: to a made-up turn the environment {steps[-1]}", flush=True)


def _reset_error(step: Step) -> str:
  """Returns the error in a reset's result, or ""."""
  if step.done or step.reward:
    return "is done or has a reward: that is for step to say"
  return ""


def join_prompt(
  encode_prompt: Callable[..., tuple[str, list[int]]],
  data: DataSettings,
  example: dict[str, Any],
  observation: Observation,
) -> tuple[Any, str, list[int]]:
  """Returns a prompt with the reset's observation at its end, its text and ids.

  A text follows the prompt's last text, after a blank line unless one of them
  has white space there; messages follow the prompt's. ValueError if the two
  cannot be joined, or are longer than `data.max_prompt_length`.
  """
  prompt = example["prompt"]
  if observation and not isinstance(observation, str):
    if isinstance(prompt, str):
      text = data.template.strip().format(prompt=prompt)
      prompt = [{"role": "user", "content": text}]
    prompt = [*prompt, *observation]
  elif observation:
    *before, last = [{"content": prompt}] if isinstance(prompt, str) else prompt
    text = last.get("content")
    if not isinstance(text, str):
      raise ValueError(
        "what the environment's reset observes goes behind a text, and the "
        f"prompt's last message has none: {str(last)[:200]}"
      )
    blank = not text or text[-1].isspace() or observation[0].isspace()
    text += observation if blank else f"\n\n{observation}"
    is_text = isinstance(prompt, str)
    prompt = text if is_text else [*before, {**last, "content": text}]
  text, ids = encode_prompt(prompt)
  if observation and len(ids) > (data.max_prompt_length or math.inf):
    raise ValueError(
      f"a prompt with what the environment's reset observes has {len(ids)} "
      f"tokens: raise data.max_prompt_length = {data.max_prompt_length}, which "
      "as 0 is the longest prompt of the data alone"
    )
  return prompt, text, ids


def make_player(
  settings: TrainSettings,
  policy: policy_lib.Policy,
  group_size: int,
  sampling: Sampling,
  pool: EnvironmentPool,
  mesh: jax.sharding.Mesh | None = None,
  record_experts: bool = False,
):
  """Returns a function that samples trajectories with their environments.

  It is `(params, prompts, examples, key, *first_prompt, check_signals) ->
  Sampled`, a generator that yields while the devices decode (`play_together`).
  """
  programs = make_programs(
    settings, policy, group_size, sampling, record_experts
  )
  encode = encoder(settings, policy)
  join = functools.partial(
    join_prompt, prompts_lib.encoder(settings, policy), settings.data
  )
  episode_seeds = jax.jit(chunks.episode_seeds, static_argnames="shape")

  def player(
    params: Params,
    prompts: Prompts,
    examples: Sequence[dict[str, Any]],
    key: Array,
    *first_prompt: Array,
    check_signals: Callable[[], None] = lambda: None,
  ) -> Generator[Any, None, Sampled]:
    shape = len(prompts.prompt_ids), group_size
    seeds = mesh_lib.fetch(episode_seeds(key, *first_prompt, shape=shape))
    failed = Answer((), settings.environment.failed_reward, True)
    table = _Episodes(
      policy, pool, encode, examples, seeds, failed, check_signals
    )
    observed = table.reset()
    if any(observed):
      longest = settings.data.max_prompt_length
      joined = table.join_prompts(join, observed, longest)
      if mesh is not None:
        joined = mesh_lib.place(joined, mesh, "batch")
      prompts = prompts.replace(**joined)
    rollout = yield from episodes.play(
      programs,
      params,
      prompts,
      key,
      table.answer,
      *first_prompt,
      max_turns=settings.environment.max_turns,
      end=table.end if pool.ends else None,
      wait=functools.partial(policy_lib.wait, check_signals=check_signals),
    )
    if mesh is not None:
      rollout = mesh_lib.map_rows(
        lambda x, *names: mesh_lib.place(x, mesh, *names), rollout
      )
    for i, group in zip(table.own, table.transcripts, strict=True):
      for row in group:
        row["prompt"] = examples[i]["prompt_text"]
    return sampled(rollout, table.transcripts, table.seconds)

  return player


def _empty_transcript() -> Transcript:
  lists = {"messages": [], "turn_rewards": []}
  return lists | {"episode_error": None, "episode_info": {}}


def _place(turn: Turn) -> tuple[int, int]:
  return turn.prompt, turn.sample


def _in_order(
  turns: Sequence[Turn], answers: dict[tuple[int, int], Answer]
) -> list[Answer]:
  """Returns the answers to turns of all processes, from each process's own."""
  if distributed.several():
    rows = [[i, j, *reply] for (i, j), reply in answers.items()]
    answers = {
      (i, j): Answer(*reply)
      for part in distributed.gather(rows)
      for i, j, *reply in part
    }
  return [answers[_place(x)] for x in turns]


@dataclasses.dataclass
class _Episodes:
  """Environments of a batch's trajectories, while they are played.

  Each process steps those of its own prompts, and shares the answers.
  """

  policy: policy_lib.Policy
  pool: EnvironmentPool
  encode: TurnEncoder
  examples: Sequence[dict[str, Any]]
  seeds: UInt[np.ndarray, "B G"]
  failed: Answer  # to a turn whose environment fails
  check_signals: Callable[[], None]
  seconds: float = 0.0

  def __post_init__(self):
    own = distributed.my_rows(len(self.examples))
    self.own = range(len(self.examples))[own]
    self.states: dict[tuple[int, int], Any] = {}
    self.left: list[Call] = []  # ends of episodes that failed on our side
    self.observed: dict[tuple[int, int], list[dict[str, str]]] = {}
    samples = range(self.seeds.shape[1])
    self.transcripts = [
      [_empty_transcript() for _ in samples] for _ in self.own
    ]

  def reset(self) -> list[Observation]:
    """Resets each prompt's environment; returns all processes' observations."""
    calls = [
      ("reset", self.examples[i], int(self.seeds[i, 0])) for i in self.own
    ]
    observed = []
    for i, step in zip(self.own, self._ask(calls), strict=True):
      error = step if isinstance(step, str) else _reset_error(step)
      observed.append("" if error else step.observation)
      if error:
        self._fail(i, error)
        continue
      for j in range(self.seeds.shape[1]):
        self.states[i, j] = step.state
    if distributed.several():
      observed = [x for part in distributed.gather(observed) for x in part]
    return observed

  def join_prompts(
    self,
    join: Callable[..., tuple[Any, str, list[int]]],
    observed: Sequence[Observation],
    longest: int,
  ) -> dict[str, np.ndarray]:
    """Returns ids and mask of the prompts with their observations.

    A group whose prompt becomes too long fails. Only "prompt_text" and `READ`
    of the examples change, since evaluations use the same ones again.
    """
    rows = []
    for i, (example, seen) in enumerate(
      zip(self.examples, observed, strict=True)
    ):
      try:
        example[READ], example["prompt_text"], ids = join(example, seen)
      except ValueError as error:
        example[READ], example["prompt_text"], ids = join(example, "")
        if i in self.own:
          self._fail(i, str(error))
      rows.append(ids)
    rows += [[]] * (len(self.seeds) - len(rows))
    # In a chat the prompt may be longer than the setting, or that may be 0.
    width = max(longest, -(-max(map(len, rows)) // 32) * 32)
    joined = prompts_lib.padded(rows, width, self.policy.pad_id)
    joined = prompts_lib.trim(joined)
    return {"prompt_ids": joined.prompt_ids, "prompt_mask": joined.prompt_mask}

  def _fail(self, i: int, error: str) -> None:
    if (state := self.states.get((i, 0))) is not None:
      self.left.append(("end", state, self.examples[i], int(self.seeds[i, 0])))
    for j in range(self.seeds.shape[1]):
      self._transcript(i, j)["episode_error"] = f"reset: {error}"
      self.states.pop((i, j), None)

  def answer(self, turns: list[Turn]) -> list[Answer]:
    """Steps the environments of turns that have ended."""
    own = [x for x in turns if x.prompt in self.own]
    alive = [(x, self._text(x)) for x in own if _place(x) in self.states]
    steps = self._ask([self._call("step", *one) for one in alive])
    answers = {_place(x): self.failed for x in own}
    for (turn, text), step in zip(alive, steps, strict=True):
      answers[_place(turn)] = self._record(turn, text, step)
    return _in_order(turns, answers)

  def end(self, cut: list[Turn]) -> list[float]:
    """Ends failed and cut-off episodes; returns the rewards of the latter."""
    alive = [turn for turn in cut if _place(turn) in self.states]
    steps = self._ask([self._call("end", turn) for turn in alive] + self.left)
    answers = {_place(x): Answer() for x in cut if x.prompt in self.own}
    for turn, step in zip(alive, steps, strict=False):
      row, reply = self._transcript(*_place(turn)), self.failed
      if isinstance(step, str):
        row["episode_error"] = f"turn {turn.turn}: {step}"
      elif step.reward is None:
        continue
      else:
        reply = Answer((), float(step.reward))
        rewards = row["turn_rewards"]
        rewards += [0.0] * (turn.turn + 1 - len(rewards))
        rewards[turn.turn] += reply.reward
      answers[_place(turn)] = reply
    return [reply.reward for reply in _in_order(cut, answers)]

  def _record(self, turn: Turn, text: str, step: Any) -> Answer:
    """Writes a step into the transcript, and returns the answer to the row."""
    place = _place(turn)
    row = self._transcript(*place)
    # The observation before this turn, which only now has been read.
    row["messages"] += self.observed.pop(place, [])
    row["messages"].append({"role": "assistant", "content": text})
    ids = []
    if not isinstance(step, str):
      self.states[place] = step.state
      try:
        if not step.done:
          ids = self.encode(step.observation, int(turn.ids[-1]))
      except ValueError as error:
        self.left.append(self._call("end", turn))
        step = f"{error}"
    if isinstance(step, str):  # a failure, in words
      row["episode_error"] = f"turn {turn.turn}: {step}"
      row["turn_rewards"].append(None)
      return self.failed
    row["turn_rewards"].append(step.reward or 0.0)
    for name, number in step.info.items():
      row["episode_info"][name] = row["episode_info"].get(name, 0.0) + number
    observed = step.observation
    if isinstance(observed, str):
      observed = [{"role": "user", "content": observed}]
    self.observed[place] = observed
    return Answer(ids, float(step.reward or 0.0), step.done)

  def _transcript(self, i: int, j: int) -> dict[str, Any]:
    return self.transcripts[i - self.own.start][j]

  def _text(self, turn: Turn) -> str:
    everything = np.ones(len(turn.ids), bool)
    return tokenizer_lib.decode_completion(
      self.policy.tokenizer, turn.ids, everything, self.policy.ends
    )

  def _call(self, name: str, turn: Turn, *action: str) -> Call:
    """Returns a call of the pool on the trajectory's present state."""
    place = _place(turn)
    example, seed = self.examples[turn.prompt], int(self.seeds[place])
    return name, self.states[place], *action, example, seed

  def _ask(self, calls: list[tuple]) -> list[Any]:
    began = time.perf_counter()
    with distributed.agreed():
      steps = self.pool.collect(self.pool.submit(calls), self.check_signals)
    self.seconds += time.perf_counter() - began
    return steps
