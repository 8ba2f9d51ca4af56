"""Environment `retry`: asks again after a wrong answer.

    --config.environment.path=retry

A right answer (by `exact_answer`) ends the episode. Its reward is `discount` to
the power of the number of wrong answers before it, which have reward 0.
"""

from typing import Any

from grpojax.environments.protocol import Step
from grpojax.rewards.exact import exact_answer


def step(
  state: dict[str, int] | None,
  action: str,
  example: dict[str, Any],
  *,
  discount: int | float = 0.5,
  message: str = "That is not right. Try again.",
) -> Step:
  """Judges an answer; the state counts the wrong answers before it."""
  if not 0 <= discount <= 1:
    raise ValueError(f"discount is {discount}: use a number from 0 to 1")
  wrong = state["wrong"] if state else 0
  if exact_answer("", action, example):
    return Step(reward=float(discount) ** wrong, done=True)
  return Step(message, state={"wrong": wrong + 1})
