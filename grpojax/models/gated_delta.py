"""Gated delta networks: linear attention with a decaying state per head.

Yang et al. 2024, arXiv 2412.06464. Each head keeps a memory [k, v], a matrix
that maps keys to values. Token t lets it decay by exp(g), and moves the value
stored under its key by the share beta towards its own value:

    M_t = exp(g_t) M_{t-1} + k_t u_t^T
    u_t = beta_t (v_t - exp(g_t) M_{t-1}^T k_t)
    out_t = M_t^T q_t

Decoding computes one such `step` per token. Whole rows are computed in chunks
of tokens (`scan`), whose u_t solve a triangular system. Before this, a short
convolution mixes the last tokens' queries, keys and values.

Axes are B, G, S, H (heads), and the widths k and v of keys and values.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.meshes import constrain

CHUNK = 64  # tokens of a chunk, a power of two

_HEADS = "batch", "group", None, "kv_heads"
_put = jax.lax.dynamic_update_index_in_dim

# Sums over tokens need float32; accelerators would round the factors.
_multiply = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of a layer; each key head serves consecutive value heads."""

  key_heads: int
  value_heads: int
  key_dim: int
  value_dim: int
  taps: int = 4  # tokens that the convolution reads

  @property
  def channels(self) -> int:
    """Returns the number of channels of queries, keys and values together."""
    return 2 * self.key_heads * self.key_dim + self.values

  @property
  def memory(self) -> int:
    """Returns the numbers in the memory of all heads."""
    return self.values * self.key_dim

  @property
  def values(self) -> int:
    """Returns the number of channels of all value heads."""
    return self.value_heads * self.value_dim


class State(NamedTuple):
  """State of rows after some tokens, in a layer or a stack of layers."""

  memory: Float[Array, "*layers B G H k v"]  # float32
  inputs: Float[Array, "*layers B G n C"]  # of the convolution, the last ones


class Inputs(NamedTuple):
  """Projections of tokens."""

  qkv: Float[Array, "B G S C"]  # before the convolution
  beta: Float[Array, "B G S H"]  # logits of beta
  step: Float[Array, "B G S H"]  # size of the decay before the softplus


class Rows(NamedTuple):
  """Description of the tokens [B, G, S] for all layers."""

  # False on padding, which leaves the state unchanged; None: all are real.
  real: Bool[Array, "B G S"] | None = None
  # True if the next tokens begin a completion; None except in decoding.
  begins: Bool[Array, "B G"] | None = None
  # Positions in completions if several share a row, else None.
  packed: Int[Array, "B G S"] | None = None


def empty(sizes: Sizes, rows: tuple[int, ...], dtype: Any) -> State:
  """Returns the state of rows [*rows] before the first token."""
  c = sizes
  memory = jnp.zeros((*rows, c.value_heads, c.key_dim, c.value_dim))
  return State(memory, jnp.zeros((*rows, c.taps - 1, c.channels), dtype))


def convolve(
  x: Float[Array, "B G S C"],
  weight: Float[Array, "C taps"],
  before: Float[Array, "B _ n C"],
  positions: Int[Array, "*rows S"],
) -> Float[Array, "B G S C"]:
  """Returns sum_i weight_i x_{t-i}, with i = 0 for the last of the weights.

  `before` are the n = taps - 1 inputs before position 0.
  """
  size, n = x.shape[2], before.shape[2]
  y = x * weight[:, n]
  for back in range(1, n + 1):
    tap = jnp.pad(x, [(0, 0), (0, 0), (back, 0), (0, 0)])[:, :, :size]
    for position in range(back):
      earlier = before[:, :, n + position - back, None]
      tap = jnp.where((positions == position)[..., None], earlier, tap)
    y = y + tap * weight[:, n - back]
  return y


def last_inputs(
  x: Float[Array, "B G S C"],
  before: Float[Array, "B G n C"],
  count: Int[Array, "B G"],
) -> Float[Array, "B G n C"]:
  """Returns the last n inputs after the first `count` of the tokens x."""
  n = before.shape[2]
  both = jnp.concatenate([before, x.astype(before.dtype)], axis=2)
  if x.shape[2] == 1:  # in decoding, without a gather
    return jnp.where(count[..., None, None] > 0, both[:, :, 1:], before)
  index = count[..., None] + jnp.arange(n)
  return jnp.take_along_axis(both, index[..., None], axis=2)


@jax.custom_jvp
def inverse(a: Float[Array, "*batch c c"]) -> Float[Array, "*batch c c"]:
  """Returns (I + a)^-1 of strictly lower triangular matrices; c is 2^n.

  Inverts blocks on the diagonal, from which it computes those of twice the
  size: like substitution this is stable, but it consists of products.
  """
  c = a.shape[-1]
  i = jnp.arange(c)[:, None]
  j = jnp.arange(c)

  def double(step, x):
    # Blocks in the lower left corner of blocks of twice the size, 2^step
    corner = (i >> step == (j >> step) + 1) & (j >> step & 1 == 0)
    return x - _multiply(_multiply(x, jnp.where(corner, a, 0)), x)

  x = jnp.broadcast_to(jnp.eye(c, dtype=a.dtype), a.shape)
  # A loop, because six copies of the products would compile for long.
  return jax.lax.fori_loop(0, c.bit_length() - 1, double, x)


@inverse.defjvp
def _inverse_jvp(primals, tangents):
  x = inverse(*primals)
  return x, -_multiply(_multiply(x, tangents[0]), x)


class Tokens(NamedTuple):
  """Arrays of tokens for `scan`; H are value heads."""

  q: Float[Array, "B G S H k"]  # of length at most 1 / sqrt(k)
  k: Float[Array, "B G S H k"]  # of length at most 1
  v: Float[Array, "B G S H v"]
  g: Float[Array, "B G S H"]  # logarithm of the decay, at most 0
  beta: Float[Array, "B G S H"]
  # True if the token's row begins again with the initial memory; None: never.
  restarts: Bool[Array, "B G S 1"] | None = None


class Update(NamedTuple):
  """Change of rows' memories by a token, see `updated`."""

  decay: Float[Array, "B G H"]
  key: Float[Array, "B G H k"]
  value: Float[Array, "B G H v"]


def updated(
  memory: Float[Array, "B G H k v"], update: Update
) -> Float[Array, "B G H k v"]:
  """Returns the memory after a token."""
  added = update.key[..., None] * update.value[..., None, :]
  return update.decay[..., None, None] * memory + added


def step(
  tokens: Tokens, memory: Float[Array, "B G H k v"]
) -> tuple[Float[Array, "B G 1 H v"], Update]:
  """Returns the outputs of one token per row, and its update of the memory."""
  q, k, v, g, beta = (x[:, :, 0] for x in tokens[:5])
  decay = jnp.exp(g)
  # Both sums read the old memory, so that XLA reads it once for them.
  stored = decay[..., None] * jnp.sum(k[..., None] * memory, axis=-2)
  out = decay[..., None] * jnp.sum(q[..., None] * memory, axis=-2)
  value = beta[..., None] * (v - stored)
  out = out + jnp.sum(q * k, axis=-1, keepdims=True) * value
  return out[:, :, None], Update(decay, k, value)


def _chunk(
  initial: Float[Array, "B G H k v"],
  memory: Float[Array, "B G H k v"],
  tokens: Tokens,
) -> tuple[Float[Array, "B G H k v"], Float[Array, "B G H c v"]]:
  """Returns the memory after a chunk of tokens [B, G, H, c], and its outputs.

  No exponent is positive, so strong decays underflow to 0.
  """
  q, k, v, g, beta, restarts = tokens
  index = jnp.arange(g.shape[-1])
  later = index[:, None] > index
  visible = index[:, None] >= index
  begun = None
  if restarts is not None:
    segment = jnp.cumsum(restarts, axis=-1)
    visible &= segment[..., :, None] == segment[..., None, :]
    begun = (segment > 0)[..., None]  # the token's row began in this chunk

  # Decays from token j to i, and from the beginning to i. A difference of sums
  # over all tokens would be inexact after strong decays.
  pairs = jnp.cumsum(jnp.where(later, g[..., None], 0), axis=-2)
  pairs = jnp.exp(jnp.where(visible, pairs, -jnp.inf))
  sums = jnp.sum(jnp.where(visible, g[..., None, :], 0), axis=-1)
  since_start = jnp.exp(sums)[..., None]

  def choose(begun, fresh, old):
    return old if begun is None else jnp.where(begun, fresh(), old)

  def recall(x):
    y = _multiply(x, memory)
    return since_start * choose(begun, lambda: _multiply(x, initial), y)

  transposed = k.swapaxes(-2, -1)
  beta = beta[..., None]
  overlap = jnp.where(later, beta * pairs * _multiply(k, transposed), 0)
  update = _multiply(inverse(overlap), beta * (v - recall(k)))
  out = recall(q) + _multiply(pairs * _multiply(q, transposed), update)
  last = None if begun is None else begun[..., -1:, :]
  memory = since_start[..., -1:, :] * choose(last, lambda: initial, memory)
  # The last row has the decays to the end of the chunk.
  memory = memory + _multiply(transposed * pairs[..., -1:, :], update)
  return memory, out


def scan(
  tokens: Tokens, initial: Float[Array, "B G H k v"]
) -> tuple[Float[Array, "B G S H v"], Float[Array, "B G H k v"]]:
  """Returns the outputs of whole rows, and the memory after them."""
  s = tokens.g.shape[2]
  size = min(CHUNK, 1 << (s - 1).bit_length())

  def split(x):  # [B, G, S, H, ...] -> [chunks, B, G, H, size, ...]
    x = jnp.pad(x, [(0, -s % size if i == 2 else 0) for i in range(x.ndim)])
    x = x.reshape(*x.shape[:2], -1, size, *x.shape[3:])
    return jnp.moveaxis(x, (2, 4), (0, 3))

  # Recompute a chunk in the backward pass.
  chunk = functools.partial(jax.checkpoint(_chunk, prevent_cse=False), initial)
  memory, out = jax.lax.scan(chunk, initial, jax.tree.map(split, tokens))
  # [chunks, B, G, H, size, v] -> [B, G, chunks, size, H, v]
  out = out.transpose(1, 2, 0, 4, 3, 5)
  out = out.reshape(*out.shape[:2], -1, *out.shape[4:])
  return out[:, :, :s], memory


def _unit(x: Float[Array, "*axes k"]) -> Float[Array, "*axes k"]:
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _tokens(
  sizes: Sizes, qkv: Float[Array, "B G S C"], inputs: Inputs, bias: Array
) -> Tokens:
  """Splits channels after the convolution into heads."""
  c = sizes
  shape = qkv.shape[:3]
  keys = c.key_heads * c.key_dim
  q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)

  def heads(x):  # repeats key heads for the value heads that they serve
    x = _unit(x.reshape(*shape, c.key_heads, 1, c.key_dim))
    each = c.value_heads // c.key_heads
    x = jnp.broadcast_to(x, (*shape, c.key_heads, each, c.key_dim))
    return constrain(x.reshape(*shape, c.value_heads, c.key_dim), *_HEADS)

  v = constrain(v.reshape(*shape, c.value_heads, c.value_dim), *_HEADS)
  g = -jnp.exp(bias) * jax.nn.softplus(inputs.step.astype(jnp.float32))
  beta = jax.nn.sigmoid(inputs.beta.astype(jnp.float32))
  return Tokens(heads(q) * c.key_dim**-0.5, heads(k), v, g, beta)


class Stored(NamedTuple):
  """States of all linear layers of a stack, and a layer's place in them."""

  states: State
  index: Int[Array, ""]
  platform: str | None  # whose kernel decodes, if it has one


def _start(prompt: State | None, like: State) -> State:
  """Returns the state of rows before a completion, or before a prompt."""
  if prompt is None:
    return jax.tree.map(jnp.zeros_like, like)
  spread = lambda x, like: jnp.broadcast_to(x[:, None], like.shape)
  return jax.tree.map(spread, prompt, like)


def _current(
  start: State, states: State, index: Int[Array, ""], rows: Rows
) -> State:
  """Returns the states of a layer's rows before the next tokens."""

  def choose(new, x):
    begins = rows.begins.reshape(new.shape[:2] + (1,) * (new.ndim - 2))
    old = jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
    return jnp.where(begins, new, old)

  return jax.tree.map(choose, start, states)


def _decode(
  tokens: Tokens, rows: Rows, prompt: State, start: State, stored: Stored
) -> tuple[Float[Array, "B G 1 H v"], Float[Array, "L B G H k v"]]:
  """Returns the outputs of one token per row, and the stack's memories."""
  from grpojax.models import delta_kernels  # importing Pallas is slow

  states, index, platform = stored
  if delta_kernels.serves(platform, states.memory):
    one = tuple(x[:, :, 0] for x in tokens[:5])
    memories = prompt.memory, states.memory
    args = platform, one, rows.begins, *memories, index
    out, memory = delta_kernels.step(*args)
    return out[:, :, None], memory
  memory = _current(start, states, index, rows).memory
  out, update = step(tokens, constrain(memory, "batch", "group", "kv_heads"))
  # Read the memory again, because XLA:TPU would write a copy for `updated`.
  states, update = jax.lax.optimization_barrier((states, update))
  memory = updated(_current(start, states, index, rows).memory, update)
  return out, _put(states.memory, memory, index, 0)


def mix(
  sizes: Sizes,
  layer: dict[str, Array],
  rows: Rows,
  prompt: State | None,
  stored: Stored | None,
  inputs: Inputs,
) -> tuple[Float[Array, "B G S values"], State]:
  """Mixes the tokens of rows; returns outputs and the state after them.

  A completion begins with the state of its `prompt` [B, ...], and a prompt with
  an empty state. In decoding, rows have `stored` states; then the second result
  are the states of all layers.
  """
  b, g, s = inputs.beta.shape[:3]
  dtype = inputs.qkv.dtype
  start = _start(prompt, jax.eval_shape(lambda: empty(sizes, (b, g), dtype)))
  before = start
  if stored is not None:
    before = _current(start, stored.states, stored.index, rows)
  positions = jnp.arange(s) if rows.packed is None else rows.packed
  x = inputs.qkv.astype(jnp.float32)
  earlier = before.inputs.astype(jnp.float32)
  x = convolve(x, layer["linear_conv"][:, 0], earlier, positions)
  tokens = _tokens(sizes, jax.nn.silu(x), inputs, layer["linear_rate_bias"])
  count = jnp.full((b, g), s)
  if rows.real is not None:
    count = jnp.sum(rows.real, axis=-1)
    mask = lambda x: jnp.where(rows.real[..., None], x, 0)
    tokens = tokens._replace(g=mask(tokens.g), beta=mask(tokens.beta))
  if rows.packed is not None:
    tokens = tokens._replace(restarts=(positions == 0)[..., None])
  last = last_inputs(inputs.qkv, before.inputs, count)
  if stored is not None and s == 1:
    out, memory = _decode(tokens, rows, prompt, start, stored)
  else:
    memory = constrain(before.memory, "batch", "group", "kv_heads")
    out, memory = scan(tokens, memory)
  out = out.reshape(b, g, s, -1)
  if stored is None:
    return out, State(memory, last)
  states, index, _ = stored
  if s > 1:
    memory = _put(states.memory, memory, index, 0)
  return out, State(memory, _put(states.inputs, last, index, 0))
