"""What the backward pass computes again of a layer, by name."""

from collections.abc import Callable
from typing import Any

import jax

from grpojax.models import sharding
from grpojax.models.block import SAVED
from grpojax.models.config import TransformerConfig

REMAT = {
  "none": sharding.all_but_gathered,
  "selective": jax.checkpoint_policies.save_only_these_names(SAVED),
  "full": jax.checkpoint_policies.nothing_saveable,
}
"""What is kept of a layer besides its input, as policies of `jax.checkpoint`:
all of it; queries, keys, values and what attention gives, so that neither is
computed again but softmax weights and the MLP's inner values are (as
Korthikanti et al. 2022, "Reducing activation recomputation in large
transformer models", and the MLP); nothing."""

SHALLOW = 8
"""Layers up to which a model is not scanned but written out, in training and in
decoding: a scan fills its stacks of kept values with zeros first, and copies
each layer's in and out."""


def unrolled(config: TransformerConfig, remat: str) -> bool:
  """Whether training writes the layers out.

  Only where they keep everything: out of a loop XLA merges what is recomputed
  with what it repeats, and keeps that; and parameters are whole, for those of
  several layers could be gathered at once.
  """
  shallow = config.layers <= SHALLOW
  return shallow and remat == "none" and sharding.fsdp_shards() == 1


def layer_step(remat: str) -> Callable[..., Any]:
  """`step(function, *args)`, which is `function(*args)` of one layer.

  Its parameters are gathered while it runs, and what the policy does not keep
  is computed again in the backward pass.

  Args:
    remat: a name in `REMAT`.

  Raises:
    ValueError: no such name.
  """
  if remat not in REMAT:
    raise ValueError(f"remat={remat!r}: use one of {', '.join(REMAT)}")

  def step(function, *args):
    if remat == "none" and sharding.fsdp_shards() == 1:
      return function(*args)

    def gathered(config, x, layer, *args):
      return function(config, x, sharding.gather(layer, "layer/"), *args)

    return jax.checkpoint(
      gathered,
      # Where no two layers differ, `local` is a Python value.
      static_argnums=(0, 3) if isinstance(args[3], bool) else (0,),
      policy=REMAT[remat],
      prevent_cse=False,  # under a scan nothing can be merged with it
    )(*args)

  return step
