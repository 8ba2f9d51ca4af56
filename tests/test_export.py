"""The program `export`: runs as model directories."""

import errno
import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from grpojax import export
from grpojax.models import huggingface as hf
from grpojax.models.huggingface import weights_out
from grpojax.runtime import checkpoint
from grpojax.runtime.text import tokenization
from grpojax.training.config import default_config, from_config
from grpojax.training.files import run_directory
from grpojax.training.files.sources import files_of
from grpojax.training.run import run_models, setup
from grpojax.training.run.setup import optimizer

MODEL = "arithmetic-instruct"


def noise(tree, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: x + jnp.asarray(rng.normal(size=x.shape) / 100, x.dtype), tree
  )


@pytest.fixture(scope="module")
def run(tmp_path_factory, settings_with):
  """A run with checkpoints of steps 2 and 4."""
  path = tmp_path_factory.mktemp("runs") / "run"
  settings = settings_with()
  run_directory.open_run(path, settings)
  base = hf.load_params(MODEL)
  tx = optimizer(settings)
  trained = {step: noise(base, step) for step in (2, 4)}
  with checkpoint.open_checkpointer(path / "checkpoints", keep=9) as saved:
    for step, params in trained.items():
      checkpoint.save(saved, step, setup.first_state(settings, tx, params))
  return types.SimpleNamespace(path=path, trained=trained)


def equal(ours, theirs):
  return jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))


def test_export_of_the_newest_and_of_a_given_step(run, tmp_path, capsys):
  for words, step in [([], 4), (["--step=2"], 2)]:
    out = tmp_path / "models" / str(step)
    export.main([str(run.path), f"--out={out}", *words])
    assert f"step {step} of {run.path} -> {out}/" in capsys.readouterr().out
    assert equal(hf.load_params(out), run.trained[step])


@pytest.mark.slow
def test_transformers_reads_an_export(run, tmp_path):
  pytest.importorskip("torch")
  import transformers

  out = tmp_path / "out"
  export.main([str(run.path), "--out", str(out)])
  model = transformers.AutoModelForCausalLM.from_pretrained(out)
  embedding = model.get_input_embeddings().weight.detach()
  np.testing.assert_array_equal(embedding, run.trained[4]["embed"])
  assert model.generation_config.eos_token_id is not None
  ours, theirs = map(tokenization.load, (hf.resolve(MODEL), out))
  chat = [{"role": "user", "content": "1+2"}]
  assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)


def test_transformers_4_reads_an_export(run, tmp_path):
  """transformers 4 has no class TokenizersBackend."""
  source = shutil.copytree(hf.resolve(MODEL), tmp_path / "source")
  file = source / "tokenizer_config.json"
  out = tmp_path / "out"
  settings = json.loads(file.read_text())
  other = settings | {"tokenizer_class": "TokenizersBackend"}
  file.write_text(json.dumps(other))
  hf.save(out, run.trained[2], source)
  assert json.loads((out / file.name).read_text()) == settings


@pytest.mark.slow
def test_export_of_a_finished_model_without_checkpoints(run, tmp_path):
  copy = shutil.copytree(run.path, tmp_path / "run")
  out = tmp_path / "out"
  hf.save(copy / "model", run.trained[2], MODEL)
  export.main([str(copy), f"--out={out}"])  # checkpoints are preferred
  assert equal(hf.load_params(out), run.trained[4])
  shutil.rmtree(copy / "checkpoints")
  shutil.rmtree(out)
  export.main([str(copy), f"--out={out}"])
  assert equal(hf.load_params(out), run.trained[2])


def test_export_copies_a_model_that_is_not_a_run(tmp_path, capsys):
  out = tmp_path / "half"
  export.main([f"--model={MODEL}", f"--out={out}", "--dtype=bfloat16"])
  assert f"the model {MODEL} -> {out}/" in capsys.readouterr().out
  assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
  stored = load_file(out / "model.safetensors").values()
  assert {str(x.dtype) for x in stored} == {"bfloat16"}
  half = lambda x: jnp.asarray(x, jnp.bfloat16).astype(x.dtype)
  expected = jax.tree.map(half, hf.load_params(MODEL))
  assert equal(hf.load_params(out), expected)
  export.main([str(out), f"--out={tmp_path / 'again'}"])
  assert equal(hf.load_params(tmp_path / "again"), expected)


@pytest.mark.parametrize(
  "words, message",
  [
    ([MODEL, "--step=3"], "need a run, and arithmetic-instruct is a model"),
    ([MODEL, "--best"], "need a run, and arithmetic-instruct is a model"),
    ([], "give RUN: run directory"),
    (["--config=gsm8k", "RUN"], "reads no config file"),
    (["nowhere"], "no run at nowhere"),
    (["RUN", "--step=3"], r"no checkpoint of step 3, only \[2, 4\]"),
    (["RUN", "--adapter"], "needs a run with LoRA"),
    (["EMPTY"], "EMPTY has no checkpoints"),
  ],
)
def test_bad_requests(run, tmp_path, words, message, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run_directory.open_run(pathlib.Path("EMPTY"), from_config(default_config()))
  pathlib.Path("RUN").symlink_to(run.path)
  with pytest.raises(SystemExit, match=f"error: .*{message}"):
    export.main([*words, "--out=out"])
  assert not pathlib.Path("out").exists()


@pytest.mark.parametrize(
  "out", ["file", "file/out", "x" * 300, "x" * 250, "dangling", "full"]
)
def test_unwritable_directories_are_refused(run, tmp_path, out, monkeypatch):
  def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")

  if out == "full":
    monkeypatch.setattr(weights_out, "write", full)
  monkeypatch.chdir(tmp_path)
  pathlib.Path("file").touch()
  pathlib.Path("dangling").symlink_to("nowhere")
  before = sorted(tmp_path.iterdir())
  message = "No space left" if out == "full" else "--out=.*(written|exists)"
  with pytest.raises(SystemExit, match=f"error: .*{message}"):
    export.main([str(run.path), f"--out={out}"])
  assert sorted(tmp_path.iterdir()) == before


def test_export_loads_only_parameters(run, tmp_path, monkeypatch):
  """The optimizer state, twice as large, is not loaded."""
  read = []
  load = checkpoint.stored_arrays.ocp.load
  spy = lambda path, like: read.append(like) or load(path, like)
  monkeypatch.setattr(checkpoint.stored_arrays.ocp, "load", spy)
  export.main([str(run.path), f"--out={tmp_path / 'out'}"])
  arrays = [x for x in jax.tree.leaves(read) if x is not ...]
  assert len(arrays) == len(jax.tree.leaves(run.trained[4]))
  assert read[0]["opt_state"] and read[0]["step"] is ...


def test_a_checkpoint_deleted_meanwhile_is_replaced_by_a_newer_one(
  run, tmp_path, monkeypatch
):
  folder = tmp_path / "run" / "checkpoints"
  read = checkpoint.restore_policy
  shutil.copytree(run.path, tmp_path / "run")
  newest = max(checkpoint.complete(folder))

  def restore_policy(checkpointer, like, step):
    if step == newest:  # the run deletes it and saves a newer one
      (folder / str(newest)).rename(folder / str(newest + 1))
      raise ValueError("is damaged")
    return read(checkpointer, like, step)

  monkeypatch.setattr(checkpoint, "restore_policy", restore_policy)
  settings = from_config(run_directory.read_config(run.path))
  loaded = run_models.load_params(
    tmp_path / "run", settings, files_of(settings)
  )
  assert loaded[0] == newest + 1
