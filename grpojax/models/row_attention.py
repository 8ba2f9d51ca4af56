"""Choice of attention for long rows: at once, in blocks, or by kernels."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from grpojax.models.block_attention import block_attention

ATTENTION = ("auto", "plain", "blocks", "kernel")
"""Names of attention of long rows: "plain" of a whole row at once, "blocks"
(`block_attention`), "kernel" (`kernel_attention`), and "auto": kernels on TPUs
and GPUs, blocks on CPUs."""

WHOLE = 256
"""Rows of at most this many tokens attend at once, which is faster on CPUs (not
measured on accelerators): the logits of a row and its prompt, [S, S + P] per
head, exist as a whole."""

RowAttention = Callable[..., Array]
"""Attention of long rows, with the arguments of `block_attention`."""


def choose(attention: str, platform: str | None) -> RowAttention | None:
  """Returns attention of long rows by a name in `ATTENTION`; None is "plain".

  Blocks replace kernels on axes of a mesh that a user has taken, and in rows
  too long for the kernels. `platform` is that of `transformer`.
  """
  if attention in ("plain", "blocks"):
    return block_attention if attention == "blocks" else None

  def row_attention(q, row, prompt, visibility, **options):
    from grpojax.models import kernel_attention  # Pallas takes long to import

    where = platform or jax.default_backend()
    attend = block_attention
    if attention == "kernel" or where != "cpu":
      if kernel_attention.is_usable(where, q, prompt):
        attend = kernel_attention.kernel_attention
        options["platform"] = where
    return attend(q, row, prompt, visibility, **options)

  return row_attention
