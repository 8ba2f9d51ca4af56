"""Sums in words: an endless, seeded, offline data set for chat models.

A problem is a story about a number of things:

    Emma has 12 apples. She buys 7 more. Then she gives away 5. How many
    apples does Emma have now?

Each step adds or subtracts; the count never falls below 0. The solution has an
equation per step, "12 + 7 = 19" and "19 - 5 = 14", or calls a tool with
"12 + 7 - 5" (`environments.calculator`). `drawn.split_of` assigns the split.
"""

import itertools
import json
from collections.abc import Sequence

import numpy as np

from grpojax.data import drawn
from grpojax.data.examples import Example, Examples

PEOPLE = (
  *(("Anna", "She"), ("Emma", "She"), ("Lucy", "She"), ("Mia", "She")),
  *(("Ben", "He"), ("Jack", "He"), ("Sam", "He"), ("Tom", "He")),
)
THINGS = (
  *("apples", "books", "cards", "coins", "cookies"),
  *("eggs", "marbles", "pencils", "shells", "stickers"),
)
# Stories have one person, because SmolLM2-135M mixes up several.
MORE = ("buys {} more", "finds {} more", "gets {} more")
LESS = ("gives away {}", "loses {}", "sells {}")
LEAST = 2  # smallest number in a problem
_MOST_SHOTS = 100
_MOST_STEPS = 100
_MOST = 10**6


def load(
  split: str,
  *,
  seed: int = 0,
  steps: int | Sequence[int] = (1, 3),
  largest: int = 20,
  shots: int = 0,
  tool: str = "",
  size: int | None = None,
) -> Examples:
  """Returns problems {"prompt": "Emma has 12 apples. ...", "answer": "14"}.

  - `steps`: number of steps, or the bounds of a uniform draw.
  - `largest`: largest number in a problem; answers may be larger.
  - `shots`: number of solved training problems in a chat before each problem,
    for models that do not write steps by themselves. All problems share them.
  - `tool`: tool that the solutions call, in Qwen's format; "" for equations.
  """
  bounds = drawn.bounds("steps", steps, _MOST_STEPS)
  if not LEAST <= largest <= _MOST:
    raise ValueError(f"largest = {largest}: must be {LEAST} to {_MOST}")
  if not 0 <= shots <= _MOST_SHOTS:
    raise ValueError(f"shots = {shots}: must be 0 to {_MOST_SHOTS}")
  chat = _solved(shots, bounds, largest, tool)

  def draw(rng: np.random.Generator) -> Example:
    count = int(rng.integers(*bounds, endpoint=True))
    prompt, numbers = _draw(split, rng, count, largest)
    if chat:
      prompt = [*chat, {"role": "user", "content": prompt}]
    return {"prompt": prompt, "answer": str(sum(numbers))}

  return drawn.load(split, draw, seed=seed, size=size)


def _solved(
  shots: int, steps: tuple[int, int], largest: int, tool: str
) -> list[dict[str, str]]:
  """Draws a chat of solved problems, ordered from few to many steps."""
  rng = np.random.default_rng(0)
  chat = []
  for count in np.linspace(*steps, shots).round():
    prompt, numbers = _draw("train", rng, int(count), largest)
    chat.append({"role": "user", "content": prompt})
    if not tool:
      chat.append({"role": "assistant", "content": solution(numbers)})
      continue
    steps = [f"{'+' if n > 0 else '-'} {abs(n)}" for n in numbers[1:]]
    arguments = {"expression": " ".join([str(numbers[0]), *steps])}
    call = json.dumps({"name": tool, "arguments": arguments})
    call = f"<tool_call>{call}</tool_call>"
    chat.append({"role": "assistant", "content": call})
    chat.append({"role": "tool", "content": str(sum(numbers))})
  return chat


def _draw(
  split: str, rng: np.random.Generator, steps: int, largest: int
) -> tuple[str, list[int]]:
  while True:
    prompt, numbers = problem(rng, steps, largest)
    if drawn.split_of(prompt) == split:
      return prompt, numbers


def solution(numbers: Sequence[int]) -> str:
  """Returns the solution: a line "12 + 7 = 19" per number after the first."""
  counts = itertools.accumulate(numbers)
  return "\n".join(
    f"{before} {'+' if number > 0 else '-'} {abs(number)} = {after}"
    for (before, after), number in zip(
      itertools.pairwise(counts), numbers[1:], strict=True
    )
  )


def problem(
  rng: np.random.Generator, steps: int, largest: int
) -> tuple[str, list[int]]:
  """Draws a problem; returns its text, and its numbers with signs."""
  name, pronoun = rng.choice(PEOPLE)
  thing = rng.choice(THINGS)
  numbers = [int(rng.integers(LEAST, largest, endpoint=True))]
  sentences = [f"{name} has {numbers[0]} {thing}."]
  for step in range(steps):
    count = sum(numbers)
    less = count >= LEAST and rng.random() < 0.5
    most = min(count, largest) if less else largest
    number = int(rng.integers(LEAST, most, endpoint=True))
    event = str(rng.choice(LESS if less else MORE)).format(number)
    then = f"Then {pronoun.lower()}" if step else pronoun
    sentences.append(f"{then} {event}.")
    numbers.append(-number if less else number)
  sentences.append(f"How many {thing} does {name} have now?")
  return " ".join(sentences), numbers
