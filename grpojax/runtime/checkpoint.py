"""Checkpoints by Orbax.

Orbax writes each checkpoint under a temporary name and renames it when it is
complete, so a process that is killed leaves nothing that looks like one.
"""

import os
import pathlib
from typing import Any

import jax
from jaxtyping import PyTree
from orbax.checkpoint import v1 as ocp

from grpojax.core.types import Params, TrainState


def open_checkpointer(
  directory: str | os.PathLike, keep: int = 2, readonly: bool = False
) -> ocp.training.Checkpointer:
  """Opens a directory of checkpoints, STEP/ each; use it as a context manager.

  Args:
    directory: of the checkpoints.
    keep: how many of the newest checkpoints stay on disk.
    readonly: for looking into a run that may be training: leave alone the
      temporary directory of a save in flight.

  Returns:
    A checkpointer for `save`, `latest_step`, `restore` and `wait`. Leaving its
    context waits for saves in flight.

  Raises:
    ValueError: `readonly`, and there are no checkpoints.
  """
  path = pathlib.Path(directory).absolute()
  save_policies = ocp.training.save_decision_policies
  keep_policies = ocp.training.preservation_policies
  if readonly and not path.is_dir():
    raise ValueError(f"{directory} does not exist: there are no checkpoints")
  return ocp.training.Checkpointer(
    path,
    # Whoever calls `save` means it. Orbax's default policy skips a save while
    # another is in flight.
    save_decision_policy=save_policies.FixedIntervalPolicy(1),
    preservation_policy=keep_policies.LatestN(None if readonly else keep),
    cleanup_tmp_directories=not readonly,
  )


def _is_key(leaf) -> bool:
  return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(key) -> str:
  """Name of a typed key's generator; `key` may be abstract."""
  names = []
  jax.eval_shape(lambda k: names.append(jax.random.key_impl(k)), key)
  return names[0]


def save(
  checkpointer: ocp.training.Checkpointer,
  step: int,
  state: TrainState,
  notes: dict[str, Any] | None = None,
) -> None:
  """Saves `state` in the background, after any save still in flight.

  The arrays are copied before this returns, so they may be donated at once.
  A step that is on disk already is left as it is.

  Args:
    checkpointer: from `open_checkpointer`.
    step: GRPO steps done; names the checkpoint.
    state: typed random keys are stored as their data.
    notes: JSON values to keep with it, see `read_notes`.
  """
  if any(done.step == step for done in checkpointer.checkpoints):
    return
  state = jax.tree.map(
    lambda x: jax.random.key_data(x) if _is_key(x) else x, state
  )
  checkpointer.save_async(int(step), state, custom_metadata=notes)


def read_notes(
  checkpointer: ocp.training.Checkpointer, step: int
) -> dict[str, Any]:
  """What `save` was given to keep with a state; {} where there is nothing."""
  try:
    return dict(checkpointer.metadata(step).custom_metadata or {})
  except Exception:  # `restore` says what is damaged
    return {}


def wait(checkpointer: ocp.training.Checkpointer) -> None:
  """Returns when all saves are on disk; raises what went wrong in them."""
  checkpointer.wait()


def latest_step(checkpointer: ocp.training.Checkpointer) -> int | None:
  """Step of the newest complete checkpoint, or None."""
  latest = checkpointer.latest
  return None if latest is None else latest.step


def _abstract(leaf) -> jax.ShapeDtypeStruct:
  """Shape, dtype and sharding of a leaf; keys as their data."""
  data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
  sharding = getattr(leaf, "sharding", None)
  if sharding is None or _is_key(leaf):
    # Orbax would otherwise repeat the sharding of the machine that saved.
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
      sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    else:
      spec = jax.sharding.PartitionSpec()
      sharding = jax.sharding.NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _leaves(tree: PyTree) -> dict[str, str]:
  """Shape and dtype of each leaf by path, in words that compare."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): (
      f"{leaf.dtype}{list(leaf.shape)}"
    )
    for path, leaf in leaves
  }


def _check_fits(stored: PyTree, wanted: PyTree, path: pathlib.Path) -> None:
  # Before loading: a load that fails half-way leaves Orbax's threads behind.
  a, b = _leaves(stored), _leaves(wanted)
  different = [
    f"{name}: {a.get(name, '(none)')} -> {b.get(name, '(none)')}"
    for name in sorted(a.keys() | b.keys())
    if a.get(name) != b.get(name)
  ]
  if different:
    more = f"\n  and {len(different) - 8} more" if len(different) > 8 else ""
    raise ValueError(
      f"{path} is of another model or optimizer (its array -> yours):\n  "
      + "\n  ".join(different[:8])
      + more
    )


def _damaged(path: pathlib.Path, error: Exception) -> ValueError:
  inner: BaseException = error
  while inner.__cause__ or inner.__context__:
    inner = inner.__cause__ or inner.__context__
  return ValueError(
    f"{path} is damaged ({type(inner).__name__}: {str(inner)[:200]}): delete "
    "that directory to go back to the checkpoint before it"
  )


def restore(
  checkpointer: ocp.training.Checkpointer,
  state: TrainState,
  step: int | None = None,
) -> TrainState:
  """Loads a checkpoint.

  Args:
    checkpointer: from `open_checkpointer`.
    state: says what to load and where to: arrays, or `jax.ShapeDtypeStruct`s
      with shardings (without one, the first device).
    step: default the newest.

  Returns:
    A state of the same structure, shapes, dtypes and shardings.

  Raises:
    ValueError: there is no such checkpoint, it is damaged, or it is of another
      model or optimizer.
  """
  step = latest_step(checkpointer) if step is None else step
  steps = [done.step for done in checkpointer.checkpoints]
  if step not in steps:
    folder = checkpointer.directory
    raise ValueError(f"{folder} has no checkpoint of step {step}, only {steps}")
  path = pathlib.Path(checkpointer.directory) / str(step)
  abstract = jax.tree.map(_abstract, state)
  try:
    stored = checkpointer.metadata(step).metadata
    if stored is None:  # Orbax logs why and goes on
      raise ValueError("its metadata cannot be read")
  except Exception as error:
    raise _damaged(path, error) from error
  _check_fits(stored, abstract, path)
  try:
    loaded = checkpointer.load(step, abstract)
  except Exception as error:
    raise _damaged(path, error) from error

  def as_key(old, new):
    if not _is_key(old):
      return new
    return jax.random.wrap_key_data(new, impl=_key_impl(old))

  return jax.tree.map(as_key, state, loaded)


def save_params(path: str | os.PathLike, params: Params) -> None:
  """Saves parameters alone, unless they are there already."""
  path = pathlib.Path(path).absolute()
  if not path.exists():
    ocp.save(path, params)


def restore_params(path: str | os.PathLike, params: PyTree) -> Params:
  """Loads what `save_params` saved onto abstract or concrete `params`.

  Raises:
    ValueError: there is nothing, or it does not fit.
  """
  path = pathlib.Path(path).absolute()
  if not path.exists():
    raise ValueError(f"{path} does not exist: save_params comes first")
  abstract = jax.tree.map(_abstract, params)
  _check_fits(ocp.metadata(path).metadata, abstract, path)
  return ocp.load(path, abstract)
