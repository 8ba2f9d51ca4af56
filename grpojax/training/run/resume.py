"""Resuming: the newest checkpoint, if the run's data are the same."""

import dataclasses
import json
import zlib
from collections.abc import Callable
from typing import Any

from grpojax.core.types import TrainState
from grpojax.data.examples import SPLITS
from grpojax.runtime import checkpoint
from grpojax.runtime.checkpoint import array_checksums
from grpojax.runtime.processes import distributed
from grpojax.training.report import reporting
from grpojax.training.run.progress import Progress, from_notes
from grpojax.training.run.start import Run
from grpojax.training.step import reference


def resume(
  run: Run,
  state: TrainState,
  checkpointer: checkpoint.Checkpointer,
  check_signals: Callable[[], None],
) -> tuple[TrainState, Progress]:
  """Loads the newest state, and what the run remembers beside it.

  Args:
    run: the run that `start` has made.
    state: state of the starting weights. They are evaluated where that accuracy
      is not known yet, or is of another number of prompts.
    checkpointer: the run's checkpoints.
    check_signals: called in the evaluation; may raise.

  Returns:
    The state to go on from, and the progress.

  Raises:
    ValueError: other data or frozen weights than before, or a checkpoint that
      is damaged or of another model.
  """
  step = checkpoint.latest_step(checkpointer)
  notes = {} if step is None else checkpoint.read_notes(checkpointer, step)
  progress = from_notes(notes)
  data, frozen = _fingerprints(run), _frozen(run)
  _check_data(progress.data, data)
  if progress.frozen not in ("", frozen):
    raise ValueError(
      f"the weights in {run.settings.model.path} are not those that this run's "
      "adapters were trained on: put those back, or export this run's model "
      "with them (python -m grpojax.export) and start a new run"
    )
  baseline = progress.baseline
  if baseline is None or baseline["prompts"] != len(run.held_out.examples):
    evaluated = distributed.on_main(lambda: reporting.evaluations(run, 0))
    baseline = next(iter(evaluated), None)  # of the starting weights
  if baseline is None:
    baseline = reporting.evaluate_held_out(run, state.params, 0, check_signals)
  baseline = {k: v for k, v in baseline.items() if k != "step"}
  progress = dataclasses.replace(
    progress, baseline=baseline, data=data, frozen=frozen
  )
  if step is not None:
    state = reference.state_to_device(state)
    state = checkpoint.restore(checkpointer, state, step)
    state = reference.state_to_memory(state, run.settings)
    print(f"resuming after step {step}", flush=True)
  return state, progress


def _fingerprints(run: Run) -> dict[str, Any]:
  """Returns the number of examples of each split, and a hash of them."""
  return {
    name: [len(split.examples) + split.dropped, split.fingerprint]
    for name, split in zip(SPLITS, (run.train, run.held_out), strict=True)
  }


def _frozen(run: Run) -> str:
  """Returns a hash of the weights under adapters, which fit others as well."""
  if run.policy.frozen is None:
    return ""
  sums = json.dumps(array_checksums.by_path(run.policy.frozen), sort_keys=True)
  return f"{zlib.crc32(sums.encode()):08x}"


def _check_data(before: dict[str, Any], now: dict[str, Any]) -> None:
  """Raises ValueError where training or held-out examples have changed."""
  for split, (count, fingerprint) in now.items():
    old, old_fingerprint = before.get(split, (count, fingerprint))
    # eval.num_prompts may have been changed: then there is nothing to compare.
    if fingerprint == old_fingerprint or (split == "test" and old != count):
      continue
    raise ValueError(
      f"the {split} split is not that of this run: {old} examples then, "
      f"{count} now"
      + (", of which some differ" if old == count else "")
      + ". Restore the data (data.path, data.options), or export this run's "
      "model (python -m grpojax.export) and start a new one from it"
    )
