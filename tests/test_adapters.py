"""Runs that train LoRA adapters."""

import json
import os
import signal

import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from run_helpers import rows_of

from grpojax import evaluate, train
from grpojax.models import huggingface as hf
from grpojax.runtime import checkpoint


@pytest.mark.slow
def test_adapters_resume_exactly_and_are_exported_merged(
  toy_task, toy_model, tmp_path, monkeypatch, capsys
):
  changes = {"lora.rank": 2, "lora.alpha": 4.0, "lora.targets": "layers/(q|up)"}
  changes |= {"loss.beta": 0.05, "steps": 6, "optim.learning_rate": 3e-2}
  argv = toy_task.arguments(toy_model, **changes)
  train.main([*argv, f"--run_dir={tmp_path / 'whole'}"])
  run = tmp_path / "run"
  with monkeypatch.context() as patch:
    original = checkpoint.save
    saved = []

    def save(checkpointer, step, state, *rest):
      saved.append(state.params)
      original(checkpointer, step, state, *rest)
      if len(saved) == 1:
        os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(checkpoint, "save", save)
    with pytest.raises(SystemExit):
      train.main([*argv, f"--run_dir={run}"])
  assert set(flatten_dict(saved[0], sep="/")) == {
    f"layers/{name}/{side}" for name in ("q", "up") for side in "ab"
  }
  train.main([*argv, f"--run_dir={run}"])
  assert "resuming after step 2" in capsys.readouterr().out
  assert not (run / "reference").exists()
  kl = [row["kl"] for row in rows_of(run, "kl")]
  assert kl[0] < 1e-9 < 1e-3 < kl[-1]
  # The finished model is base + alpha / rank A B in these two matrices.
  base, model, whole = (
    flatten_dict(hf.load_params(path), sep="/")
    for path in (toy_model, run / "model", tmp_path / "whole" / "model")
  )
  for name in base:
    changed = name in ("layers/q", "layers/up")
    assert (base[name] != model[name]).any() == changed, name
    np.testing.assert_array_equal(model[name], whole[name])
    if changed:
      change = np.asarray(model[name] - base[name])
      assert (np.linalg.matrix_rank(change, tol=1e-4) <= 2).all()
  # A run and its exported model have the same accuracy.
  results = []
  out = tmp_path / "result.json"
  settings = toy_task.arguments(toy_model, evaluate.READS)
  for name in (run, run / "model", toy_model):
    words = [f"--model={name}", "--samples=32", f"--out={out}"]
    evaluate.main([*words, *settings])
    results.append(json.loads(out.read_text())["pass@1"][0])
  assert results[0] == results[1] != results[2]
