"""Multiplies each run of consecutive rows by its own matrix.

    rows [N, D], matrices [X, D, F], runs [X]  ->  [N, F]

The first runs[0] rows are multiplied by matrix 0, the next runs[1] rows by
matrix 1, and so on; the result is undefined in rows after the last run.

On TPUs `jax.lax.ragged_dot` is a kernel that multiplies only each run's tiles.
XLA:GPU (jax 0.10) multiplies all rows with all matrices: X times the operations
and the memory. So GPUs have Pallas kernels here (Triton), in which a program
multiplies a tile of a run.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

# Largest tile of a result, and largest number of products summed at a time.
ROWS, COLUMNS, DEPTH = 128, 128, 64
LEAST = 16  # smallest tile of tensor cores
_KERNEL = {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=3)}
_OUTER = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=(0,),
  rhs_group_dimensions=(),
)


def _tile_rows(count: int, groups: int) -> int:
  """Returns the rows per tile: a power of two near the mean length of a run."""
  mean = max(count // groups, 1)
  return min(ROWS, max(LEAST, 1 << (mean - 1).bit_length()))


def _product(
  rows: Float[Array, "N A"],
  matrices: Float[Array, "X _ _"],
  runs: Int[Array, "X"],
  flipped: bool = False,
) -> Float[Array, "N B"]:
  """Multiplies each run by its matrix [A, B], or [B, A] if `flipped`."""
  if flipped:
    matrices = matrices.swapaxes(1, 2)
  return jax.lax.ragged_dot(rows, matrices, runs)


def _outer(
  rows: Float[Array, "N D"], other: Float[Array, "N F"], runs: Int[Array, "X"]
) -> Float[Array, "X D F"]:
  """Returns the product rows^T other for each run."""
  return jax.lax.ragged_dot_general(rows, other, runs, _OUTER)


def _load(x, at, columns, in_run) -> Array:
  """Reads a tile; rows outside of the run are 0."""
  mask = jnp.broadcast_to(in_run[:, None], (at.size, columns.size))
  return triton.load(x.at[at, columns], mask=mask, other=0)


def product_kernel(
  rows: Float[Array, "N A"],
  matrices: Float[Array, "X _ _"],
  runs: Int[Array, "X"],
  flipped: bool = False,
  interpret: bool = False,
) -> Float[Array, "N B"]:
  """Multiplies each run by its matrix on a GPU, like `_product`.

  Each run begins with a new tile, so there are at most N / tile + X tiles, of
  which the last may be empty:

      runs   3            6                  (X = 2, tiles of 4 rows, N = 9)
      tiles  [0 1 2 . ]   [3 4 5 6] [7 8 . . ]   [. . . .]
  """
  groups, a, b = matrices.shape
  inner, columns = (b, a) if flipped else (a, b)
  tile = _tile_rows(len(rows), groups)
  # Tiles must divide the matrices, so their sizes are common divisors.
  depth, width = math.gcd(inner, DEPTH), math.gcd(columns, COLUMNS)
  # Count each run's tiles, and find its end in tiles and in rows.
  tiles = -(-runs // tile)
  last, ends = jnp.cumsum(tiles), jnp.cumsum(runs)
  # A tile belongs to the first run whose tiles end after it. It starts after
  # the rows of earlier runs and of the run's earlier tiles.
  index = jnp.arange(len(rows) // tile + groups, dtype=runs.dtype)
  group = jnp.sum(index[:, None] >= last, axis=1, dtype=runs.dtype)
  group = jnp.minimum(group, groups - 1)  # empty tiles get the last run
  start = (ends - runs)[group] + (index - (last - tiles)[group]) * tile

  def kernel(start, end, group, rows, matrices, out):
    i = pl.program_id(0)
    matrix = group[i]
    at = pl.ds(start[i], tile)
    # Columns of the result that this program computes
    to = pl.ds(pl.program_id(1) * width, width)
    in_run = start[i] + jnp.arange(tile) < end[i]

    def add(k, total):
      along = pl.ds(k * depth, depth)
      x = _load(rows, at, along, in_run)
      if flipped:
        w = triton.load(matrices.at[matrix, to, along]).T
      else:
        w = triton.load(matrices.at[matrix, along, to])
      return total + jnp.dot(x, w, preferred_element_type=jnp.float32)

    total = jnp.zeros((tile, width), jnp.float32)
    total = jax.lax.fori_loop(0, inner // depth, add, total)
    # A run's last tile reaches into the next run, which other programs write.
    mask = jnp.broadcast_to(in_run[:, None], total.shape)
    triton.store(out.at[at, to], total.astype(out.dtype), mask=mask)

  return pl.pallas_call(
    kernel,
    grid=(len(index), columns // width),
    # Includes the mesh axes along which the result varies.
    out_shape=jax.eval_shape(
      functools.partial(_product, flipped=flipped), rows, matrices, runs
    ),
    name="grouped_product",
    interpret=interpret,
    **_KERNEL,
  )(start, ends[group], group, rows, matrices)


def outer_kernel(
  rows: Float[Array, "N D"],
  other: Float[Array, "N F"],
  runs: Int[Array, "X"],
  interpret: bool = False,
) -> Float[Array, "X D F"]:
  """Returns rows^T other for each run, on a GPU, like `_outer`."""
  groups = len(runs)
  d = rows.shape[1]
  f = other.shape[1]
  height, width = math.gcd(d, COLUMNS), math.gcd(f, COLUMNS)
  # The sum is over rows, so DEPTH limits the rows of a tile.
  tile = min(_tile_rows(len(rows), groups), DEPTH)
  ends = jnp.cumsum(runs)

  def kernel(start, end, rows, other, out):
    group = pl.program_id(0)
    left = pl.ds(pl.program_id(1) * height, height)
    right = pl.ds(pl.program_id(2) * width, width)
    first, stop = start[group], end[group]

    def add(k, total):
      at = pl.ds(first + k * tile, tile)
      in_run = first + k * tile + jnp.arange(tile) < stop
      x, y = _load(rows, at, left, in_run), _load(other, at, right, in_run)
      return total + jnp.dot(x.T, y, preferred_element_type=jnp.float32)

    total = jnp.zeros((height, width), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(stop - first, tile), add, total)
    triton.store(out.at[group, left, right], total.astype(out.dtype))

  return pl.pallas_call(
    kernel,
    grid=(groups, d // height, f // width),
    out_shape=jax.eval_shape(_outer, rows, other, runs),
    name="grouped_outer",
    interpret=interpret,
    **_KERNEL,
  )(ends - runs, ends, rows, other)


def _multiply(rows, matrices, runs, flipped=False) -> Array:
  plain, kernel = (
    functools.partial(f, flipped=flipped) for f in (_product, product_kernel)
  )
  return _by_platform(plain, kernel, matrices.shape[1:], rows, matrices, runs)


def _by_platform(plain, kernel, widths: tuple[int, ...], *args: Array) -> Array:
  """Runs `kernel` on NVIDIA GPUs if tiles divide the matrices, else `plain`."""
  if any(n % LEAST for n in widths):
    return plain(*args)
  return jax.lax.platform_dependent(*args, cuda=kernel, default=plain)


@jax.custom_jvp
def grouped_product(
  rows: Float[Array, "N D"],
  matrices: Float[Array, "X D F"],
  runs: Int[Array, "X"],
) -> Float[Array, "N F"]:
  """Multiplies each run of rows by its matrix, in the rows' dtype.

  Differentiable once, forward or in reverse. On GPUs, the kernels need D and F
  to be multiples of 16.
  """
  return _multiply(rows, matrices, runs)


@functools.partial(grouped_product.defjvp, symbolic_zeros=True)
def _jvp(primals, tangents):
  rows, matrices, runs = primals
  d_rows, d_matrices, _ = tangents
  y = grouped_product(rows, matrices, runs)
  # Frozen matrices have no tangent. `linear_call` gives the transpose of the
  # kernel, which JAX could not derive in reverse mode.
  addends = []
  if not isinstance(d_rows, SymbolicZero):
    d_rows = linear_call(
      lambda constants, x: _multiply(x, *constants),
      lambda constants, y: _multiply(y, *constants, flipped=True),
      (matrices, runs),
      d_rows,
    )
    addends.append(d_rows)
  if not isinstance(d_matrices, SymbolicZero):
    d_matrices = linear_call(
      lambda constants, x: _multiply(constants[0], x, constants[1]),
      # The transpose is an outer product for each run.
      lambda constants, y: _by_platform(
        _outer, outer_kernel, matrices.shape[1:], constants[0], y, constants[1]
      ),
      (rows, runs),
      d_matrices,
    )
    addends.append(d_matrices)
  return y, functools.reduce(jnp.add, addends)
