"""Samples with host environments: chunks of decoding alternate with answers.

    chunk   row 0   a a a E          row 1   b b b b     drawn on the devices
    answer          o o                                  by the environment
    chunk           a a ...                  b E

A turn may take several chunks. Where a chunk ends depends on the samples and
not on timing, so a run can be repeated exactly.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from grpojax.core import meshes
from grpojax.core.types import Params, Prompts, Rollout

TOKENS = 32  # maximum tokens per row in a chunk

BLOCKS = (32, 128)
"""Compiled sizes of a forward pass over observations, in tokens per row."""


class Turn(NamedTuple):
  """A turn of the model: its place in the batch, and its token ids."""

  prompt: int
  sample: int
  turn: int
  ids: Int[np.ndarray, "n"]


class Answer(NamedTuple):
  """Answer of an environment to a turn, with the observation's token ids."""

  ids: Sequence[int] = ()
  reward: float = 0.0
  done: bool = False


class Programs(NamedTuple):
  """Compiled functions of `core.decoding.chunks`, with their options bound.

  `decode` gets tokens=TOKENS.
  """

  begin: Callable  # `(params, prompts, key, *first_prompt) -> rows`
  decode: Callable  # `(params, rows, over, finished) -> rows`
  feed: Callable  # `(params, rows, ids, lengths, complete) -> rows`
  finish: Callable  # `(rows, finished, rewards) -> Rollout`


def play(
  programs: Programs,
  params: Params,
  prompts: Prompts,
  key: Array,
  answer: Callable[[list[Turn]], list[Answer]],
  *first_prompt: Array,
  max_turns: int,
  wait: Callable[[object], None] = lambda arrays: None,
  end: Callable[[list[Turn]], list[float]] | None = None,
) -> Generator[Any, None, Rollout]:
  """Samples trajectories and their rewards per turn, [B, G, K].

  This generator yields while the devices compute a chunk, so that environments
  of other trajectories can answer (`as_completed`). `wait(arrays)` waits for
  the arrays of a chunk. `answer` gets the turns that ended in a chunk. After
  `max_turns` = K turns, or if an observation and one more token do not fit, the
  trajectory is cut off without the observation. `end`, if any, gets the last
  turns of all unfinished trajectories, and returns rewards to add to them.
  `first_prompt` is as in `rollout`.
  """
  rows = programs.begin(params, prompts, key, *first_prompt)
  b, g, _ = rows.turns.shape
  over, finished = np.zeros((2, b, g), bool)
  rewards = np.zeros((b, g, max_turns), np.float32)
  begins = np.zeros((b, g), np.int32)
  limit = meshes.fetch(rows.limit)

  while True:
    rows = programs.decode(params, rows, over, finished)
    samples = rows.samples
    arrays = samples.ids, samples.length, rows.waiting, rows.turn, samples.done
    yield arrays
    wait(arrays)
    ids, length, waiting, turn, done = meshes.fetch(arrays)
    if (done | over).all():
      places = np.argwhere(~finished & (length > 0)).tolist()
      if end is not None:
        cut = [Turn(i, j, int(turn[i, j]), ids[i, j, :0]) for i, j in places]
        for last, reward in zip(cut, end(cut), strict=True):
          rewards[last.prompt, last.sample, last.turn] += reward
      return programs.finish(rows, finished, rewards)
    places = np.argwhere(waiting).tolist()
    turns = [
      Turn(i, j, int(turn[i, j]), ids[i, j, begins[i, j] : length[i, j]])
      for i, j in places
    ]
    observed = {}
    for (i, j), reply in zip(places, answer(turns), strict=True):
      rewards[i, j, turn[i, j]] = reply.reward
      finished[i, j] = reply.done
      last = turn[i, j] + 1 >= max_turns
      full = length[i, j] + len(reply.ids) + 1 > limit[i, j]
      over[i, j] = reply.done or last or full
      if not over[i, j]:
        observed[i, j] = reply.ids
        begins[i, j] = length[i, j] + len(reply.ids)
    rows = _feed(programs, params, rows, observed)


def as_completed(
  plays: Sequence[Generator[Any, None, Any]],
) -> Iterator[tuple[int, Any]]:
  """Runs generators, such as `play`, alternately; yields index and result."""
  running = set(range(len(plays)))
  while running:
    for i in sorted(running):
      try:
        next(plays[i])
      except StopIteration as end:
        running.remove(i)
        yield i, end.value


def result(play: Generator[Any, None, Any]) -> Any:
  """Runs a generator, such as `play`, and returns its result."""
  ((_, value),) = as_completed([play])
  return value


def _feed(programs, params, rows, observed):
  """Feeds observations to their rows, in blocks of one compiled size."""
  if not observed:
    return rows
  *shape, most = rows.turns.shape
  longest = max(map(len, observed.values()))
  small, large = BLOCKS
  size = small if min(longest, most) <= 3 * small else large
  for start in range(0, max(longest, 1), size):
    ids = np.zeros((*shape, size), np.int32)
    count = np.zeros(shape, np.int32)
    complete = np.zeros(shape)
    for place, observation in observed.items():
      part = observation[start : start + size]
      ids[place][: len(part)] = part
      count[place] = len(part)
      complete[place] = start <= max(len(observation) - 1, 0) < start + size
    rows = programs.feed(params, rows, ids, count, complete > 0)
  return rows
