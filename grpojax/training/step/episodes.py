"""Sampling of trajectories with an environment on the host."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, UInt

from grpojax.core import meshes, rows
from grpojax.core.decoding import chunks
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.types import Rollout
from grpojax.data import pipeline
from grpojax.data.examples import READ
from grpojax.environments import episodes, tools
from grpojax.environments.episodes import Answer, Turn
from grpojax.environments.pool import Call, EnvironmentPool, check_replay
from grpojax.environments.protocol import Step
from grpojax.runtime.processes import distributed
from grpojax.runtime.text import tokenization
from grpojax.runtime.text.turns import Observation, TurnEncoder
from grpojax.training import policies
from grpojax.training.data import prompts as prompts_lib
from grpojax.training.settings.inputs import DataSettings
from grpojax.training.settings.run import TrainSettings

Transcript = dict[str, Any]
"""Record of a trajectory: "messages", "turn_rewards", "episode_error" (None, or
the reason of a failure), "episode_info" (sums of numbers) and, after the last
turn, the "prompt"."""


class Sampled(NamedTuple):
  """Completions, and the host's records of trajectories."""

  rollout: Rollout  # of all processes
  read: dict[str, Array | None]  # arrays for rewards, whole on each device
  # [B][G], for this process's prompts; None without an environment
  transcripts: list[list[Transcript]] | None = None
  # Seconds spent by the host, by name, such as waiting for environments
  seconds: Mapping[str, float] = {}


def sampled(rollout: Rollout, *records: Any) -> Sampled:
  """Returns a `Sampled`, and starts to gather the arrays that rewards need."""
  names = "completion_ids", "completion_mask", "finished", "turns"
  read = meshes.whole({name: getattr(rollout, name) for name in names})
  return Sampled(rollout, read, *records)


def open_pool(settings: TrainSettings) -> EnvironmentPool:
  """Starts the workers; ValueError if the environment is invalid."""
  names = "path tools options tool_format action workers timeout".split()
  options = {name: getattr(settings.environment, name) for name in names}
  return EnvironmentPool(**options)


def make_programs(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  sampling: Sampling,
) -> episodes.Programs:
  """Compiles the functions of `core.decoding.chunks` for these settings."""
  longest = settings.sampling.max_new_tokens
  common = {
    "eos_ids": policy.ends,
    "sampling": sampling,
    "turn_tokens": settings.environment.max_turn_tokens,
  }
  begin = functools.partial(
    chunks.begin,
    group_size=group_size,
    max_new_tokens=longest,
    pad_id=policy.pad_id,
    **common,
  )
  decode = functools.partial(chunks.decode, tokens=episodes.TOKENS, **common)
  feed = functools.partial(chunks.feed, sampling=sampling)
  in_place = {"donate_argnums": 2}
  return episodes.Programs(
    policies.jit(policy, begin),
    policies.jit(policy, decode, **in_place),
    policies.jit(policy, feed, **in_place),
    jax.jit(chunks.finish),
  )


def encoder(settings: TrainSettings, policy: policies.Policy) -> TurnEncoder:
  """Returns the encoder of observations; ValueError for bad templates."""
  environment = settings.environment
  data = settings.data
  half = max(1, settings.sampling.max_new_tokens // 2)
  return TurnEncoder(
    policy.tokenizer,
    policy.eos_ids,
    template=environment.template,
    template_options=prompts_lib.template_options(settings, policy),
    special_tokens=data.special_tokens,
    max_observation=min(environment.max_observation or half, half),
  )


def check(
  settings: TrainSettings,
  policy: policies.Policy,
  pool: EnvironmentPool,
  example: dict[str, Any],
  check_signals: Callable[[], None] = lambda: None,
) -> None:
  """Tests the environment in a short episode with made-up actions.

  ValueError if it fails or is not deterministic, the chat template does not
  support turns, or the reset's observation does not fit the prompt.
  """
  encode = encoder(settings, policy)
  environment = settings.environment
  actions = []
  if pool.tools:
    encode.check([{"role": "tool", "name": "tool", "content": "1"}])
  if environment.check == "tools":
    if not pool.tools:
      raise ValueError(
        "environment.check = 'tools': there are no tools to call, use actions"
      )
    actions = [tools.made_up(x, environment.tool_format) for x in pool.tools]
  seed = settings.seed
  first, *steps = check_replay(pool, example, seed, check_signals, actions)
  if error := _reset_error(first):
    raise ValueError(f"the environment's reset {error}")
  encode_prompt = prompts_lib.encoder(settings, policy)
  join_prompt(encode_prompt, settings.data, example, first.observation)
  if steps and isinstance(steps[-1], str):
    print(f"warning: in a made-up turn the environment {steps[-1]}", flush=True)


def _reset_error(step: Step) -> str:
  """Returns the error in the result of a reset, or ""."""
  if step.done or step.reward:
    return "ends the episode or has a reward: return these from `step`"
  return ""


def join_prompt(
  encode_prompt: Callable[..., tuple[str, list[int]]],
  data: DataSettings,
  example: dict[str, Any],
  observation: Observation,
) -> tuple[Any, str, list[int]]:
  """Appends a reset's observation to a prompt; returns prompt, text and ids.

  Text is appended to the prompt's last text, after a blank line unless white
  space separates them already; messages are appended to the chat. ValueError
  if the two cannot be joined or exceed `data.max_prompt_length`.
  """
  prompt = example["prompt"]
  # Messages continue a chat; a text prompt becomes its first message.
  if observation and not isinstance(observation, str):
    if isinstance(prompt, str):
      text = data.template.strip().format(prompt=prompt)
      prompt = [{"role": "user", "content": text}]
    prompt = [*prompt, *observation]
  elif observation:
    # A text is appended to the last text, which may be the whole prompt.
    *before, last = [{"content": prompt}] if isinstance(prompt, str) else prompt
    text = last.get("content")
    if not isinstance(text, str):
      raise ValueError(
        "the prompt's last message has no text to append the reset's text to: "
        f"let reset return messages, or change {str(last)[:200]}"
      )
    blank = not text or text[-1].isspace() or observation[0].isspace()
    text += observation if blank else f"\n\n{observation}"
    is_text = isinstance(prompt, str)
    prompt = text if is_text else [*before, {**last, "content": text}]
  text, ids = encode_prompt(prompt)
  if observation and len(ids) > (data.max_prompt_length or math.inf):
    raise ValueError(
      f"a prompt with the reset's observation has {len(ids)} tokens: raise "
      f"data.max_prompt_length = {data.max_prompt_length} (0 means the length "
      "of the longest prompt without observations)"
    )
  return prompt, text, ids


def make_player(
  settings: TrainSettings,
  policy: policies.Policy,
  group_size: int,
  sampling: Sampling,
  pool: EnvironmentPool,
  mesh: jax.sharding.Mesh | None = None,
):
  """Returns a function that samples trajectories with their environments.

  The function returns a generator: `(params, prompts, examples, key,
  *first_prompt, check_signals) -> Sampled`, for `as_completed`. It yields
  while the devices decode.
  """
  programs = make_programs(settings, policy, group_size, sampling)
  encode = encoder(settings, policy)
  join = functools.partial(
    join_prompt, prompts_lib.encoder(settings, policy), settings.data
  )
  episode_seeds = jax.jit(chunks.episode_seeds, static_argnames="shape")

  def player(
    params, prompts, examples, key, *first_prompt, check_signals=lambda: None
  ):
    shape = len(prompts.prompt_ids), group_size
    seeds = meshes.fetch(episode_seeds(key, *first_prompt, shape=shape))
    failed = Answer((), settings.environment.failed_reward, True)
    table = _Episodes(
      policy, pool, encode, examples, seeds, failed, check_signals
    )
    # Reset the environments, and append their observations to the prompts.
    observed = table.reset()
    if any(observed):
      longest = settings.data.max_prompt_length
      joined = table.join_prompts(join, observed, longest)
      if mesh is not None:
        joined = meshes.place(joined, mesh, "batch")
      prompts = prompts.replace(**joined)
    # Alternate between decoding and the environments until all episodes end.
    rollout = yield from episodes.play(
      programs,
      params,
      prompts,
      key,
      table.answer,
      *first_prompt,
      max_turns=settings.environment.max_turns,
      end=table.end if pool.ends else None,
      wait=functools.partial(policies.wait, check_signals=check_signals),
    )
    if mesh is not None:
      rollout = rows.place(rollout, mesh)
    # Transcripts have the prompt with the reset's observation.
    for i, group in zip(table.prompts, table.transcripts, strict=True):
      for row in group:
        row["prompt"] = examples[i]["prompt_text"]
    times = {"environment": table.seconds}
    return sampled(rollout, table.transcripts, times)

  return player


def _empty_transcript() -> Transcript:
  episode = {"episode_error": None, "episode_info": {}}
  return {"messages": [], "turn_rewards": []} | episode


def _place(turn: Turn) -> tuple[int, int]:
  return turn.prompt, turn.sample


def _in_order(
  turns: Sequence[Turn], answers: dict[tuple[int, int], Answer]
) -> list[Answer]:
  """Gathers the answers of all processes, in the order of `turns`."""
  # `gather` sends JSON, which has no tuples as keys.
  rows = [[i, j, *answer] for (i, j), answer in answers.items()]
  answers = {
    (i, j): Answer(*answer)
    for part in distributed.gather(rows)
    for i, j, *answer in part
  }
  return [answers[_place(x)] for x in turns]


@dataclasses.dataclass
class _Episodes:
  """Episodes of a batch; each process runs the environments of its prompts."""

  policy: policies.Policy
  pool: EnvironmentPool
  encode: TurnEncoder
  examples: Sequence[dict[str, Any]]
  seeds: UInt[np.ndarray, "B G"]
  failed: Answer  # answer to a turn whose environment fails
  check_signals: Callable[[], None]
  seconds: float = 0.0

  def __post_init__(self):
    rows = distributed.my_rows(len(self.examples))
    self.prompts = range(len(self.examples))[rows]  # of this process
    self.states: dict[tuple[int, int], Any] = {}
    self.unended: list[Call] = []  # "end" calls of failed episodes
    # Observations that the model has not read yet.
    self.observed: dict[tuple[int, int], list[dict[str, str]]] = {}
    samples = range(self.seeds.shape[1])
    self.transcripts = [
      [_empty_transcript() for _ in samples] for _ in self.prompts
    ]

  def reset(self) -> list[Observation]:
    """Resets one environment per prompt; returns all prompts' observations."""
    calls = [
      ("reset", self.examples[i], int(self.seeds[i, 0])) for i in self.prompts
    ]
    observed = []
    for i, step in zip(self.prompts, self._collect(calls), strict=True):
      error = step if isinstance(step, str) else _reset_error(step)
      observed.append("" if error else step.observation)
      if error:
        self._fail(i, error)
        continue
      for j in range(self.seeds.shape[1]):
        self.states[i, j] = step.state
    return [x for part in distributed.gather(observed) for x in part]

  def join_prompts(
    self,
    join: Callable[..., tuple[Any, str, list[int]]],
    observed: Sequence[Observation],
    longest: int,
  ) -> dict[str, np.ndarray]:
    """Returns ids and mask of the prompts with their observations.

    A group whose prompt becomes too long fails. Evaluations use the examples
    again, so only their fields "prompt_text" and `READ` may change.
    """
    rows = []
    for i, example in enumerate(self.examples):
      try:
        example[READ], example["prompt_text"], ids = join(example, observed[i])
      except ValueError as error:
        # A failed group keeps its rows, so it needs a prompt of valid length.
        example[READ], example["prompt_text"], ids = join(example, "")
        if i in self.prompts:
          self._fail(i, str(error))
      rows.append(ids)
    # Rows of the batch beyond the examples are empty padding.
    rows += [[]] * (len(self.seeds) - len(rows))
    # `longest` may be 0, or less than a prompt without an observation.
    width = max(longest, -(-max(map(len, rows)) // 32) * 32)
    joined = pipeline.padded(rows, width, self.policy.pad_id)
    joined = prompts_lib.trim(joined)
    return {"prompt_ids": joined.prompt_ids, "prompt_mask": joined.prompt_mask}

  def _fail(self, i: int, error: str) -> None:
    # All samples of a group share the state of one reset, so end it once.
    if (state := self.states.get((i, 0))) is not None:
      seed = int(self.seeds[i, 0])
      self.unended.append(("end", state, self.examples[i], seed))
    for j in range(self.seeds.shape[1]):
      self._transcript(i, j)["episode_error"] = f"reset: {error}"
      self.states.pop((i, j), None)

  def answer(self, turns: list[Turn]) -> list[Answer]:
    """Steps the environments after finished turns; returns their answers."""
    local = [x for x in turns if x.prompt in self.prompts]
    alive = [(x, self._text(x)) for x in local if _place(x) in self.states]
    steps = self._collect([self._call("step", *action) for action in alive])
    answers = {_place(x): self.failed for x in local}
    for (turn, text), step in zip(alive, steps, strict=True):
      answers[_place(turn)] = self._record(turn, text, step)
    return _in_order(turns, answers)

  def end(self, cut: list[Turn]) -> list[float]:
    """Ends failed and cut-off episodes; returns the rewards of the latter."""
    alive = [turn for turn in cut if _place(turn) in self.states]
    calls = [self._call("end", turn) for turn in alive]
    steps = self._collect(calls + self.unended)
    answers = {_place(x): Answer() for x in cut if x.prompt in self.prompts}
    # The results of the `unended` calls, which come last, are not used.
    for turn, step in zip(alive, steps, strict=False):
      row = self._transcript(*_place(turn))
      answer = self.failed
      if isinstance(step, str):
        row["episode_error"] = f"turn {turn.turn}: {step}"
      elif step.reward is None:
        continue
      else:
        answer = Answer((), float(step.reward))
        rewards = row["turn_rewards"]
        # A turn that was cut off before an answer has no entry yet.
        rewards += [0.0] * (turn.turn + 1 - len(rewards))
        rewards[turn.turn] += answer.reward
      answers[_place(turn)] = answer
    return [answer.reward for answer in _in_order(cut, answers)]

  def _record(self, turn: Turn, text: str, step: Any) -> Answer:
    """Records an environment's step in the transcript; returns its answer."""
    place = _place(turn)
    row = self._transcript(*place)
    # The model has now read the observation before this turn.
    row["messages"] += self.observed.pop(place, [])
    row["messages"].append({"role": "assistant", "content": text})
    ids = []
    if not isinstance(step, str):
      # If the episode goes on, the model reads the observation. If encoding
      # fails, the episode fails too, and `end` will end its environment.
      self.states[place] = step.state
      try:
        if not step.done:
          ids = self.encode(step.observation, int(turn.ids[-1]))
      except ValueError as error:
        self.unended.append(self._call("end", turn))
        step = f"{error}"
    if isinstance(step, str):  # the reason of a failure
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
    return self.transcripts[i - self.prompts.start][j]

  def _text(self, turn: Turn) -> str:
    mask = np.ones(len(turn.ids), bool)
    return tokenization.decode_completion(
      self.policy.tokenizer, turn.ids, mask, self.policy.ends
    )

  def _call(self, name: str, turn: Turn, *action: str) -> Call:
    """Returns a call for the pool, with the trajectory's current state."""
    place = _place(turn)
    example = self.examples[turn.prompt]
    seed = int(self.seeds[place])
    return name, self.states[place], *action, example, seed

  def _collect(self, calls: list[tuple]) -> list[Any]:
    began = time.perf_counter()
    with distributed.agreed():
      steps = self.pool.collect(self.pool.submit(calls), self.check_signals)
    self.seconds += time.perf_counter() - began
    return steps
