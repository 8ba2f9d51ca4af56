"""Choice of attention for long rows: plain, in blocks, or by kernels."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from grpojax.models.block_attention import block_attention

ATTENTION = ("auto", "plain", "blocks", "kernel")
"""Attention of long rows: "plain" holds all logits of a row, "blocks" is
`block_attention`, "kernel" is `kernel_attention`, and "auto" uses kernels on
TPUs and GPUs and blocks on CPUs."""

WHOLE = 256  # rows of at most this many tokens always use plain attention

RowAttention = Callable[..., Array]  # with the arguments of `block_attention`


def choose(attention: str, platform: str | None) -> RowAttention | None:
  """Returns the attention of long rows by its name; None for "plain".

  Blocks replace kernels on mesh axes that a user has taken, and in rows too
  long for the kernels.
  """
  if attention in ("plain", "blocks"):
    return block_attention if attention == "blocks" else None

  def row_attention(q, row, prompt, visibility, **options):
    from grpojax.models import kernel_attention  # Pallas takes long to import

    runs_on = platform or jax.default_backend()
    attend = block_attention
    if attention == "kernel" or runs_on != "cpu":
      if kernel_attention.is_usable(runs_on, q, prompt):
        attend = kernel_attention.kernel_attention
        options["platform"] = runs_on
    return attend(q, row, prompt, visibility, **options)

  return row_attention
