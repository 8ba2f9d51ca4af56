"""What a run learns from a step's diagnosis, beside the policy."""

import jax

from grpojax.core.types import TrainState
from grpojax.training import from_config, score_norms
from grpojax.training.start import Run


def make_update_group_size(run: Run):
  """`(state, row) -> state`: what is learned from a step's diagnosis.

  The group size, where it is chosen while training, and the scores' lengths,
  where the advantage asks for them.
  """
  config, shardings = run.config, run.shardings
  observe = jax.jit(
    from_config.observe(config), out_shardings=shardings.group_size
  )
  observe_norms = jax.jit(
    score_norms.observe(config), out_shardings=shardings.score_norms
  )

  def adapt(state: TrainState, row) -> TrainState:
    old = state.group_size
    if old is not None:
      new = observe(old, row["c1"], row["c1_se"], row["c3"], row["c3_se"])
      sizes = int(old.group_size), int(new.group_size)
      if sizes[0] != sizes[1]:
        print("group size {} -> {}".format(*sizes), flush=True)
      state = state.replace(group_size=new)
    if state.score_norms is not None:
      norms = observe_norms(state.score_norms, score_norms.from_row(row))
      state = state.replace(score_norms=norms)
    return state

  return adapt
