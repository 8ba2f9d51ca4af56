"""Decoding on TPUs reads experts without copying layers out of their stack."""

import functools

import jax
import jax.numpy as jnp
import pytest

from grpojax.aot import cost, hlo, topology
from grpojax.core.rollout import rollout
from grpojax.core.types import Prompts
from grpojax.models.layer_stacks import SHALLOW
from grpojax.models.transformer import TransformerConfig, transformer

SIZES = {"vocab_size": 256, "width": 256, "heads": 2, "kv_heads": 2}
SIZES |= {"head_dim": 128, "mlp": 512, "experts": 64, "experts_per_token": 2}
LAYERS = SHALLOW + 1
TOKENS = 32
MATRIX = 2 * 64 * 256 * 512  # bytes; a layer has three of these


@pytest.mark.slow
def test_experts_are_read_once_per_token():
  pytest.importorskip("libtpu")
  device = topology.machine("v5e:2x2").devices[0]
  config = TransformerConfig(**SIZES, layers=LAYERS)
  lm = transformer(config, dtype=jnp.bfloat16, platform="tpu")
  on_chip = jax.sharding.SingleDeviceSharding(device)
  shapes = functools.partial(jax.ShapeDtypeStruct, sharding=on_chip)
  params = jax.tree.map(
    lambda x: shapes(x.shape, x.dtype),
    jax.eval_shape(lm.init, key := jax.random.key(0)),
  )
  prompts = Prompts(shapes((16, 32), jnp.int32), shapes((16, 32), bool))
  sample = functools.partial(
    rollout, lm, group_size=8, max_new_tokens=TOKENS, eos_ids=(1,)
  )
  key = shapes(key.shape, key.dtype)
  text = jax.jit(sample).lower(params, prompts, key).compile().as_text()
  counted = cost.cost(hlo.parse(text), token_loop_trips=TOKENS).in_token_loop
  least = 3 * LAYERS * MATRIX
  experts = sum(
    i.bytes * i.trips
    for i in counted.instructions
    if "layer_product" in i.op_name or "dynamic_index" in i.op_name
  )
  assert least < experts / (TOKENS - 1) < 1.1 * least
  # The parser does not see the kernel: nothing else handles a layer's matrices.
  kernels = "layer_product", "decode_attention"
  others = (
    i
    for i in counted.instructions
    if not any(kernel in i.op_name for kernel in kernels)
  )
  assert max(i.bytes for i in others if i.trips > TOKENS) < MATRIX / 4
