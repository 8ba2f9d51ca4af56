"""Worker process of `EnvironmentPool`: python -m grpojax.environments.worker.

The first input line has the arguments of `conventions.resolve`; each later line
has a call (`pool.Call`), which is answered with a Step or an error message.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from grpojax.environments import conventions
from grpojax.environments.protocol import Step, to_step
from grpojax.runtime.processes import user_calls, workers


def parse(outcome: Any) -> Step | str:
  """Reads an outcome from JSON: an error message, or the fields of a Step."""
  return outcome if isinstance(outcome, str) else to_step(Step(*outcome))


def prepare(setup: dict[str, Any]) -> workers.Answer:
  """Loads an environment; returns a function that answers calls to it."""
  environment = conventions.resolve(**setup)

  def answer(call: Sequence[Any]) -> Iterator[Step | str]:
    name, *arguments = call
    function = getattr(environment, name)
    step, error = user_calls.call(lambda: function(*arguments))
    yield step if error is None else error

  answer.close = environment.close
  return answer


if __name__ == "__main__":
  workers.run(prepare)
