"""Extensions of a training step: each in a file of its own, absent when off.

An extension is to a step what a transformation of optax is to a gradient: a
few functions (`extension.Extension`), called by each step in this order. To add
an extension, write a file and a row here.
"""

from grpojax.training.step.extension import Extension, Inputs
from grpojax.training.step.extensions import (
  diagnosis,
  difficulty,
  dynamic_sampling,
  group_size,
  length_penalty,
  moving_reference,
)

EXTENSIONS = {
  diagnosis.NAME: diagnosis.extension,
  group_size.NAME: group_size.extension,
  dynamic_sampling.NAME: dynamic_sampling.extension,
  difficulty.NAME: difficulty.extension,
  length_penalty.NAME: length_penalty.extension,
  moving_reference.NAME: moving_reference.extension,
}
"""`(inputs) -> Extension`, or None if it is off."""


def open_extensions(inputs: Inputs) -> dict[str, Extension]:
  """Opens the extensions of a run, by name."""
  opened = {name: function(inputs) for name, function in EXTENSIONS.items()}
  return {name: x for name, x in opened.items() if x is not None}
