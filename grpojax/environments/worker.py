"""One environment worker: python -m grpojax.environments.worker, of `pool`.

Its first line has the arguments of `conventions.resolve`; other lines are
calls, ["reset", example, seed] or ["step", state, action, example, seed]. It
answers the Step, or an error in words.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from grpojax.environments import conventions
from grpojax.environments.protocol import Step, to_step
from grpojax.runtime.processes import user_calls, workers


def parse(outcome: Any) -> Step | str:
  """Reads an outcome of JSON; raises an error if it is none."""
  return outcome if isinstance(outcome, str) else to_step(Step(*outcome))


def prepare(setup: dict[str, Any]) -> workers.Answer:
  """Returns the function that makes of a call its one outcome."""
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
