"""The file of an adapter, compared with the adapters that it is of."""

import numpy as np
from safetensors.numpy import load_file

from grpojax.models import lora

MODULES = {
  "q": "self_attn.q_proj",
  "k": "self_attn.k_proj",
  "v": "self_attn.v_proj",
  "o": "self_attn.o_proj",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}
"""PyTorch's module of each of our matrices, in a layer."""


def check(path, adapters):
  """Holds names, shapes and values of a directory in peft's format."""
  expected = {}
  for name, sides in adapters["layers"].items():
    for side, stack in sides.items():
      for layer, matrix in enumerate(np.asarray(stack)):
        module = f"base_model.model.model.layers.{layer}.{MODULES[name]}"
        expected[f"{module}.lora_{side.upper()}.weight"] = matrix.T
  stored = load_file(path / lora.WEIGHTS)
  assert stored.keys() == expected.keys()
  for name, matrix in expected.items():
    np.testing.assert_array_equal(stored[name], matrix)
