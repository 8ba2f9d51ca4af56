"""Compiles small programs and prints their HLO: programs.py [--all] PLATFORM...

Slow programs need --all. PLATFORM is cpu or a topology of libtpu (v5e:2x2).
Prints JSON: {platform: {program: HLO}}.
"""

import json
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpojax.models import tpu_decode_attention
from grpojax.models.attention import Visibility
from grpojax.models.cache import KeysValues, PromptKeysValues, Slots
from grpojax.models.kernel_attention import kernel_attention
from grpojax.models.transformer import TransformerConfig, transformer

TOKENS = 64


def decode(w, head, ids):
  """Samples until all are done: a token loop with a scan over layers."""

  def unfinished(state):
    return (state[0] < TOKENS) & ~jnp.all(state[2])

  def token(state):
    i, x, done, out = state
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
    ids = jnp.argmax(x @ head, -1).astype(jnp.int32)
    out = jax.lax.dynamic_update_slice(out, ids[:, None], (0, i))
    return i + 1, x, done | (ids == 0), out

  b = ids.shape[0]
  x = jnp.ones((b, head.shape[0]), head.dtype) * ids[:, None].astype(head.dtype)
  state = 0, x, jnp.zeros(b, bool), jnp.zeros((b, TOKENS), jnp.int32)
  return jax.lax.while_loop(unfinished, token, state)[3]


def cache(slots, new):
  """Writes a slot per iteration."""

  def write(i, slots):
    return jax.lax.dynamic_update_slice(slots, new, (0, i, 0))

  return jax.lax.fori_loop(0, 16, write, slots)


def attention_gradient(q, keys, prompt, positions, mask):
  """Runs all kernels of attention; values are keys."""
  visibility = Visibility(positions, None, mask, False)

  def attend(q, keys, prompt):
    row = KeysValues(keys, keys)
    prompt = PromptKeysValues(prompt, prompt)
    return kernel_attention(q, row, prompt, visibility, platform="tpu")

  out, pull = jax.vjp(attend, q, keys, prompt)
  return pull(out)


def decode_attention(q, new, slots):
  """Attends to a decoding cache and writes a token of all rows, 16 times."""

  def token(i, state):
    q, slots = state
    positions = jnp.full(q.shape[:2], i)
    rows = positions, jnp.zeros_like(positions)
    args = q, new, Slots(*new), slots, jnp.int32(0), *rows
    q, _, slots = tpu_decode_attention.attend(*args, scale=1.0)
    return q, slots

  return jax.lax.fori_loop(0, 16, token, (q, slots))


SIZES = {"vocab_size": 512, "width": 128, "layers": 2, "heads": 4}
SIZES |= {"kv_heads": 2, "head_dim": 64, "mlp": 256}
B = 2
G = 2
PROMPT = 32


def forward(dtype):
  lm = transformer(TransformerConfig(**SIZES), dtype=dtype)

  def loss(params, prompts, ids):
    prefix = lm.prefill(params, prompts, prompts > 0)
    hidden = lm.extend(params, prefix, ids).hidden
    return jnp.sum(jax.nn.logsumexp(lm.unembed(params, hidden), -1))

  return lm, loss


def cases(devices, dtype):
  """(name, function, arguments, options of jit)."""
  axis_types = (AxisType.Auto,)
  mesh = Mesh(devices[:4], ("x",), axis_types=axis_types)
  single = NamedSharding(Mesh(devices[:1], ("x",), axis_types=axis_types), P())
  rows, columns = (NamedSharding(mesh, s) for s in (P("x"), P(None, "x")))
  copies = NamedSharding(mesh, P())

  def array(*shape, dtype=dtype, sharding=single):
    return ShapeDtypeStruct(shape, dtype, sharding=sharding)

  ids = jnp.int32
  for name, x, w, out in (
    ("all-gather", rows, rows, rows),
    ("reduce-scatter", columns, rows, rows),
    ("all-reduce", columns, rows, copies),
  ):
    x = array(256, 512, sharding=x)
    w = array(512, 1024, sharding=w)
    yield name, jnp.matmul, (x, w), {"out_shardings": out}
  layers = array(6, 1024, 1024, sharding=columns)
  head = array(1024, 2048, sharding=rows)
  tokens = array(8, dtype=ids, sharding=copies)
  yield "decode", decode, (layers, head, tokens), {}
  args = array(4, 2048, 1024), array(4, 1, 1024)
  yield "cache", cache, args, {"donate_argnums": 0}
  if dtype == jnp.bfloat16:
    new = KeysValues(*[array(16, 32, 2, 64)] * 2)
    slots = Slots(*[array(2, 16, 32, 1, 1024, 128)] * 2)  # heads share lanes
    args = array(16, 32, 2, 4, 64), new, slots
    yield "decode attention", decode_attention, args, {"donate_argnums": 2}
    # More rows than fit a TPU's scalar memory.
    keys = array(40, 15, 1, 256, 64)
    args = array(40, 15, 1, 1, 256, 64), keys, array(40, 1, 256, 64)
    masks = array(40, 15, 256, dtype=ids), array(40, 256, dtype=bool)
    yield "attention", attention_gradient, (*args, *masks), {}
  args = array(256, 512), array(8, 512, 256), array(8, dtype=ids)
  yield "ragged dot", jax.lax.ragged_dot, args, {}
  product = lambda x, w, runs: jnp.sum(jax.lax.ragged_dot(x, w, runs)) ** 2
  yield "ragged gradient", jax.grad(product, argnums=1), args, {}
  lm, loss = forward(dtype)
  params = jax.eval_shape(lm.init, jax.random.key(0))
  params = jax.tree.map(lambda p: array(*p.shape, dtype=p.dtype), params)
  args = params, array(B, PROMPT, dtype=ids), array(B, G, TOKENS, dtype=ids)
  yield "forward", loss, args, {}
  yield "gradient", jax.grad(loss), args, {}


KERNELS = ("decode attention", "attention")  # need a mesh of a single device


def compiled(platform, everything):
  devices = jax.devices()
  dtype = jnp.float32
  if platform != "cpu":
    names = {"platform": "tpu", "topology_name": platform}
    devices = topologies.get_topology_desc(**names).devices
    dtype = jnp.bfloat16
  programs = {}
  for name, function, args, options in cases(np.array(devices), dtype):
    if name in ("forward", "gradient") and not everything:
      continue
    mesh = jax.tree.leaves(args)[0].sharding.mesh
    with jax.set_mesh(mesh) if name in KERNELS else nullcontext():
      program = jax.jit(function, **options).lower(*args).compile()
    programs[name] = program.as_text()
  return programs


if __name__ == "__main__":
  names = [name for name in sys.argv[1:] if name != "--all"]
  everything = "--all" in sys.argv
  json.dump({name: compiled(name, everything) for name in names}, sys.stdout)
