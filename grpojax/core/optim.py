"""Optimizers and learning-rate schedules by name, from optax.

`SCHEDULES` has functions (peak learning rate, updates after the warm-up) -> an
optax schedule for these updates. `OPTIMIZERS` has functions (*, b1, b2,
moments_dtype, seed) -> an optax scaling of gradients before the learning rate.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, BFloat16, Float, Key, PyTree, UInt16

from grpojax.core.random_keys import seed_key

SCHEDULES = {
  "constant": lambda peak, updates: optax.constant_schedule(peak),
  "cosine": lambda peak, updates: optax.cosine_decay_schedule(peak, updates),
  "linear": lambda peak, updates: optax.linear_schedule(peak, 0.0, updates),
}


def decays(params: PyTree) -> PyTree:
  """True for parameters to decay: no "norm" or "bias" in the path."""

  def has_decay(path, _) -> bool:
    name = jax.tree_util.keystr(path).lower()
    return "norm" not in name and "bias" not in name

  return jax.tree_util.tree_map_with_path(has_decay, params)


# No step has this number, so no other draw, fold_in(key, step), has this key.
_ROUNDING = 2**31 - 1

MOMENTS = ("float32", "bfloat16")
"""Formats of Adam's two moments between updates (`optim.moments_dtype`)."""

# bfloat16 has 8 significant bits. With b2 = 0.999 a second moment moves by less
# than half the distance between two numbers, so rounding to nearest stalls it.
# Random rounding follows the float32 moment on average (arXiv 1502.02551,
# section 3.1; arXiv 2010.06192).

_INFINITY = 0x7F80  # bits of bfloat16's infinity, without the sign


def stochastic_round(
  x: Float[Array, "*shape"], bits: UInt16[Array, "*shape"]
) -> BFloat16[Array, "*shape"]:
  """Rounds at random to a neighbour in bfloat16, exact on average.

  bfloat16 is the upper half of float32, so random bits added to the lower half
  carry into the upper half with exactly the right probability:

    x      0 01111111 0000000|0000000011010001
    bits                     |1111111100110000
    sum    0 01111111 0000001|0000000000000001   rounded up

  bfloat16 numbers stay as they are, finite numbers stay finite, nan stays nan.
  """
  x = x.astype(jnp.float32)
  word = jax.lax.bitcast_convert_type(x, jnp.uint32)
  upper = (word + bits.astype(jnp.uint32)) >> 16
  upper -= (upper & 0x7FFF) == _INFINITY  # the largest number instead
  rounded = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
  # Adding bits could change inf or nan, so these are converted as they are.
  return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def scale_by_rounded_adam(
  b1: float, b2: float, key: Key[Array, ""]
) -> optax.GradientTransformation:
  """`optax.scale_by_adam` with both moments in bfloat16 between updates.

  An update computes in float32 and uses the moments before rounding. An
  element's rounding depends only on the key and the count of updates, not on
  the mesh. The state is optax's `ScaleByAdamState`.
  """
  inner = optax.scale_by_adam(b1, b2)

  def init(params):
    return _cast(inner.init(params), jnp.bfloat16)

  def update(updates, state, params=None):
    # One key per update, from which each array's key is derived.
    count_key = jax.random.fold_in(key, state.count)
    gradients = optax.tree.cast(updates, jnp.float32)
    updates, new = inner.update(gradients, _cast(state, jnp.float32), params)
    leaves, structure = jax.tree.flatten(new.mu)
    words = structure.unflatten(  # 32 random bits for both moments
      jax.random.bits(jax.random.fold_in(count_key, i), x.shape, jnp.uint32)
      for i, x in enumerate(leaves)
    )

    def rounded(moment, shift):
      return jax.tree.map(
        lambda x, word: stochastic_round(x, (word >> shift).astype(jnp.uint16)),
        moment,
        words,
      )

    # The upper 16 random bits round the first moment, the lower 16 the second.
    return updates, new._replace(mu=rounded(new.mu, 16), nu=rounded(new.nu, 0))

  return optax.GradientTransformation(init, update)


def _cast(state, dtype):
  mu, nu = optax.tree.cast((state.mu, state.nu), dtype)
  return state._replace(mu=mu, nu=nu)


def adamw(
  *, b1: float, b2: float, moments_dtype: str, seed: int
) -> optax.GradientTransformation:
  """Makes Adam's scaling (Loshchilov and Hutter 2019, arXiv 1711.05101).

  The state has 8 bytes per parameter, or 4 with moments in bfloat16.
  """
  if moments_dtype == "float32":
    return optax.scale_by_adam(b1, b2)
  key = jax.random.fold_in(seed_key(seed), _ROUNDING)
  return scale_by_rounded_adam(b1, b2, key)


def adafactor(
  *, b1: float, b2: float, moments_dtype: str, seed: int
) -> optax.GradientTransformation:
  """Makes Adafactor's scaling, without a first moment (arXiv 1804.04235).

  An array has a second moment per row and per column of its two largest
  dimensions if both have at least 128 elements, else one per element. The decay
  at update t is 1 - t**-0.8, but at most `b2` (arXiv 2106.04560). An array's
  update (a stack of layers is one array) is divided by its root mean square if
  that exceeds 1.
  """

  def decay(step, exponent):
    return jnp.minimum(1 - (step + 1.0) ** -exponent, b2)

  return optax.chain(
    optax.scale_by_factored_rms(decay_rate_fn=decay),
    optax.clip_by_block_rms(1.0),
  )


OPTIMIZERS = {"adamw": adamw, "adafactor": adafactor}
