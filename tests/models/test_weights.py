"""Reading and writing of weights, against the safetensors library.

Run as a program with four devices, it reads and writes a sharded model.
"""

import functools
import json
import os
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from small_models import normal, run_python

from grpojax.core import meshes
from grpojax.models import huggingface as hf
from grpojax.models import sharding
from grpojax.models.families import phi3
from grpojax.models.huggingface import weights, weights_out

BF16 = ml_dtypes.bfloat16
CONFIG = dict(model_type="llama", architectures=["LlamaForCausalLM"])
CONFIG |= dict(vocab_size=11, hidden_size=8, num_hidden_layers=3, head_dim=2)
CONFIG |= dict(num_attention_heads=4, num_key_value_heads=2)
CONFIG |= dict(intermediate_size=12, attention_bias=True)
CONFIG |= dict(tie_word_embeddings=False, torch_dtype="float32")


def tensors_of(config, dtype):
  """Random tensors by transformers' names."""
  rng = np.random.default_rng(0)
  return {
    name: rng.random(leaf.stored_shape, np.float32).astype(dtype)
    for leaf in hf.layout(config).values()
    for name in leaf.names
  }


def write_model(path, tensors, shards=1, config=CONFIG):
  """Writes a model directory like transformers, by the safetensors library."""
  path.mkdir()
  (path / "config.json").write_text(json.dumps(config))
  names = sorted(tensors)
  if shards == 1:
    save_file(tensors, path / "model.safetensors")
    return path
  file_of = {n: f"model-{i % shards}.safetensors" for i, n in enumerate(names)}
  for file in sorted(set(file_of.values())):
    part = {n: tensors[n] for n in names if file_of[n] == file}
    save_file(part, path / file)
  index = {"metadata": {}, "weight_map": file_of}
  (path / weights.INDEX).write_text(json.dumps(index))
  return path


@pytest.fixture
def sharded(tmp_path):
  return write_model(tmp_path / "model", tensors_of(CONFIG, BF16), shards=3)


@pytest.mark.parametrize(
  "shards, stored, dtype",
  [
    (1, BF16, jnp.float32),
    (3, np.float32, jnp.bfloat16),
    (3, np.float16, jnp.float32),
  ],
)
def test_values_and_layout(shards, stored, dtype, tmp_path, monkeypatch):
  monkeypatch.setattr(weights, "_BLOCK", 48)  # a few rows at a time
  tensors = tensors_of(CONFIG, stored)
  path = write_model(tmp_path / "model", tensors, shards)
  params = hf.load_params(path, dtype=dtype)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
  params = flatten_dict(params, sep="/")
  for ours, leaf in hf.layout(CONFIG).items():
    theirs = [tensors[name] for name in leaf.names]
    theirs = np.stack([x.T if leaf.transposed else x for x in theirs])
    theirs = theirs if leaf.stacked else theirs[0]
    np.testing.assert_array_equal(params[ours], theirs.astype(dtype))


def test_parts_of_a_stored_matrix_are_read_and_joined(tmp_path):
  hf_config = dict(model_type="phi3", vocab_size=5, hidden_size=8)
  hf_config |= dict(num_attention_heads=2, num_key_value_heads=1)
  hf_config |= dict(num_hidden_layers=2, intermediate_size=6)
  hf_config["auto_map"] = phi3.FIXED["auto_map"]
  (tmp_path / "config.json").write_text(json.dumps(hf_config))
  shapes = hf.abstract_params(hf_config)
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: normal(rng, *x.shape), shapes)
  hf.save(tmp_path / "out", params, tmp_path)
  with safe_open(tmp_path / "out" / weights.SINGLE, "numpy") as file:
    stored = file.get_tensor("model.layers.1.self_attn.qkv_proj.weight")
  layer = {name: np.asarray(x[1]) for name, x in params["layers"].items()}
  joined = np.concatenate([layer[name].T for name in "qkv"])
  np.testing.assert_array_equal(stored, joined)
  assert "auto_map" not in hf.read_config(tmp_path / "out")
  again = hf.load_params(tmp_path / "out")
  assert jax.tree.all(jax.tree.map(np.array_equal, again, params))
  # A device's part of a part.
  tensors = weights.find(tmp_path / "out")
  index = slice(1, 2), slice(2, 7), slice(1, 3)
  part = hf.layout(hf_config)["layers/k"], tensors, index, np.float32
  expected = params["layers"]["k"][index]
  np.testing.assert_array_equal(weights._read_part(*part), expected)


@pytest.mark.parametrize(
  "name, text_name",
  [
    ("language_model.model.layers.0.x", "model.layers.0.x"),
    ("model.language_model.layers.0.x", "model.layers.0.x"),
    ("language_model.lm_head.weight", "lm_head.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("model.vision_tower.ln_pre.weight", None),
    ("multi_modal_projector.norm.weight", None),
  ],
)
def test_text_tensors_of_a_multimodal_model(name, text_name):
  tensor = weights.Stored(pathlib.Path("x"), "F32", (1,), 0)
  expected = {} if text_name is None else {text_name: tensor}
  assert weights.text_part({name: tensor}) == expected


def test_experts_are_stacked_on_a_second_axis(tmp_path):
  rng = np.random.default_rng(0)
  names = [f"{i}.{x}" for i, x in np.ndindex(2, 3)]
  tensors = {name: rng.random((5, 4), np.float32) for name in names}
  save_file(tensors, tmp_path / "model.safetensors")
  leaf = weights.Leaf(tuple(tensors), (2, 3, 4, 5), 2, True)
  stored = weights.find(tmp_path)
  array = weights.read(leaf, stored, np.float32)
  part = np.s_[1:2, 1:3, :, 2:5]  # for expert parallelism
  np.testing.assert_array_equal(
    weights._read_part(leaf, stored, part, np.float32), array[part]
  )
  for i, x in np.ndindex(2, 3):
    np.testing.assert_array_equal(array[i, x], tensors[f"{i}.{x}"].T)


def test_joined_experts_are_read_one_by_one(tmp_path):
  rng = np.random.default_rng(0)
  prefix = "model.layers.0.mlp.experts"
  joined = {
    f"{prefix}.gate_up_proj": rng.random((3, 8, 5)).astype(BF16),
    f"{prefix}.down_proj": rng.random((3, 5, 4)).astype(BF16),
  }
  # Of another shape: not split. Of another format: refused by `check`.
  odd = {"x.mlp.experts.gate_up_proj": rng.random((3, 7, 5))}
  integers = {"y.mlp.experts.gate_up_proj": np.ones((1, 8, 5), np.int8)}
  save_file(joined | odd | integers, tmp_path / "model.safetensors")
  split = weights.split_experts(weights.find(tmp_path))
  assert odd.keys() <= split.keys() and len(split) == 3 * 3 + 1 + 2
  stored = split["y.mlp.experts.0.up_proj.weight"]
  assert (stored.dtype, stored.shape) == ("I8", (4, 5))
  for i in range(3):
    gate, up = np.split(joined[f"{prefix}.gate_up_proj"][i], 2)
    down = joined[f"{prefix}.down_proj"][i]
    for name, want in (("gate", gate), ("up", up), ("down", down)):
      stored = split[f"{prefix}.{i}.{name}_proj.weight"]
      assert stored.shape == want.shape
      np.testing.assert_array_equal(stored.rows(1, 3), want[1:3])
  twice = {f"{prefix}.2.up_proj.weight": np.ones((4, 5))}
  for tensors in (joined | twice, twice | joined):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="gate_up_proj and .*.2.up_proj"):
      weights.split_experts(weights.find(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_saving_in_shards_is_bit_exact(sharded, dtype, tmp_path):
  (sharded / "chat_template.jinja").write_text("{{ messages }}")
  params = hf.load_params(sharded, dtype=dtype)
  hf.save(tmp_path / "out", params, sharded, max_shard_size=700)
  out = tmp_path / "out"
  index = json.loads((out / weights.INDEX).read_text())
  files = sorted(path.name for path in out.glob("*.safetensors"))
  assert len(files) > 2 and files == sorted({*index["weight_map"].values()})
  assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
  assert (out / "chat_template.jinja").is_file()
  config = json.loads((out / "config.json").read_text())
  name = str(np.dtype(dtype))
  assert config == CONFIG | {"dtype": name, "torch_dtype": name}
  total = 0
  for key, tensor in tensors_of(CONFIG, BF16).items():
    with safe_open(out / index["weight_map"][key], "numpy") as file:
      assert file.metadata() == {"format": "pt"}
      np.testing.assert_array_equal(file.get_tensor(key), tensor)
      assert file.get_tensor(key).dtype == dtype
    total += tensor.size * np.dtype(dtype).itemsize
  assert index["metadata"]["total_size"] == total
  for file in files:  # only a single tensor may exceed the limit
    saved = load_file(out / file)
    assert len(saved) == 1 or sum(x.nbytes for x in saved.values()) <= 700
  again = hf.load_params(out, dtype=dtype)
  assert jax.tree.all(jax.tree.map(np.array_equal, params, again))


def test_a_failed_save_leaves_no_files(sharded, tmp_path, monkeypatch):
  params = hf.load_params(sharded)
  out = tmp_path / "new" / "out"
  with pytest.raises(ValueError, match="parameters do not fit"):
    hf.save(out, {"embed": params["embed"]}, sharded)

  def fail(*args):
    assert not out.exists()
    raise OSError("disk full")

  monkeypatch.setattr(weights_out, "write", fail)
  with pytest.raises(OSError, match="disk full"):
    hf.save(out, params, sharded)
  assert not out.parent.exists() or not any(out.parent.iterdir())
  out.mkdir(parents=True)
  with pytest.raises(ValueError, match="exists already"):
    hf.save(out, params, sharded)


def test_a_directory_has_a_single_writer(tmp_path):
  path = tmp_path / "out"
  (tmp_path / "out.partial").mkdir()
  (tmp_path / "out.partial" / "left").touch()  # by a killed process
  with weights_out.new_directory(path) as first:
    (first / "a").write_text("first")
    second = weights_out.new_directory(path)
    with pytest.raises(ValueError, match="another process is writing to"):
      second.__enter__()
  assert (path / "a").read_text() == "first"
  assert sorted(os.listdir(path)) == ["a"]
  assert os.listdir(tmp_path) == ["out"]
  other = tmp_path / "other"
  with pytest.raises(ValueError, match="other exists already"):
    with weights_out.new_directory(other):
      other.mkdir()  # by a process without a lock
  assert not any(other.iterdir())


def test_a_link_in_place_of_the_partial_directory_is_refused(tmp_path):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "letter").touch()
  (tmp_path / "out.partial").symlink_to(tmp_path / "mine")
  with pytest.raises(ValueError, match="out.partial is a link"):
    with weights_out.new_directory(tmp_path / "out"):
      pass
  assert (tmp_path / "mine" / "letter").exists()


@pytest.mark.parametrize(
  ("target", "refused"),
  [
    ("elsewhere/secret", True),
    ("elsewhere/tokenizer.json", False),
    ("elsewhere/blobs/0a1b", True),
    ("hub/blobs/0a1b", False),
  ],
)
def test_links_to_other_files_are_refused(target, refused, tmp_path):
  place = "hub/snapshots/c0" if target.startswith("hub") else "model"
  directory = tmp_path / place
  directory.mkdir(parents=True)
  (directory / "config.json").write_text('{"model_type": "llama"}')
  (directory / "tokenizer.json").symlink_to(tmp_path / target)
  if refused:
    with pytest.raises(ValueError, match="tokenizer.json is a link to another"):
      hf.resolve(directory)
  else:
    assert hf.resolve(directory) == directory


def test_an_error_lists_all_wrong_tensors(tmp_path):
  tensors = tensors_of(CONFIG, np.float32)
  del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
  tensors["model.layers.0.extra"] = np.zeros(3, np.float32)
  tensors["lm_head.weight"] = np.zeros((8, 11), np.float32)
  tensors["model.embed_tokens.weight"] = np.zeros((11, 8), np.int8)
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(1)
  path = write_model(tmp_path / "model", tensors)
  with pytest.raises(ValueError) as error:
    hf.load_params(path)
  assert re.split("\n  ", str(error.value))[1:] == [
    "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight",
    "surplus: model.layers.0.extra",
    "of another shape: lm_head.weight [8, 11] instead of [11, 8]",
    "of an unsupported type: model.embed_tokens.weight I8",
  ]
  names = {f"x{i}": np.zeros(1, np.float32) for i in range(999)}
  path = write_model(tmp_path / "many", tensors | names)
  with pytest.raises(ValueError, match="x114, and 980 more\n"):
    hf.load_params(path)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
def test_is_finite_recognises_infinities_and_nan(dtype):
  block = np.arange(-6, 6).reshape(3, 4).astype(dtype)
  largest = jnp.finfo(dtype).max
  for value in (largest, -largest, jnp.finfo(dtype).smallest_subnormal, -0.0):
    block[1, 2] = value
    assert weights.is_finite(block) and weights.is_finite(block.T[:, 1:])
  for value in (np.inf, -np.inf, np.nan):
    block[1, 2] = value
    assert not weights.is_finite(block) and not weights.is_finite(block.T[1:])
    assert weights.is_finite(block[2:])
  assert weights.is_finite(block[:0])


@pytest.mark.parametrize("value, dtype", [(np.nan, BF16), (-np.inf, "float32")])
def test_nan_and_infinite_weights_are_refused(value, dtype, tmp_path):
  tensors = tensors_of(CONFIG, dtype)
  name = "model.layers.1.mlp.down_proj.weight"
  tensors[name][-1, -1] = value
  path = write_model(tmp_path / "model", tensors, shards=3)
  mesh = meshes.make_mesh(1, 1, 1, 1)
  places = functools.partial(sharding.shardings, mesh=mesh)
  for options in ((), (jnp.bfloat16, places)):
    with pytest.raises(ValueError, match=f"{name} has NaN or infinite values"):
      hf.load_params(path, *options)


def test_damaged_shards_are_refused(sharded):
  file = sharded / "model-1.safetensors"
  whole = file.read_bytes()
  for damaged in (whole[:-3], whole[:30], b"", b"\xff" * 64):
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="model-1.safetensors is cut off"):
      hf.load_params(sharded)
  file.unlink()
  with pytest.raises(ValueError, match="model-1.safetensors does not exist"):
    hf.load_params(sharded)


def test_a_wrong_index_is_refused(sharded):
  index = sharded / weights.INDEX
  file_of = json.loads(index.read_text())["weight_map"]
  change = lambda file_of: index.write_text(json.dumps({"weight_map": file_of}))
  name = next(n for n in file_of if file_of[n] == "model-0.safetensors")
  change(file_of | {name: "model-1.safetensors"})
  with pytest.raises(ValueError, match=f"missing: {name}"):
    hf.load_params(sharded)
  # A stale copy in a later file
  change(file_of)
  want = hf.load_params(sharded)
  last = load_file(sharded / "model-2.safetensors")
  stale = {name: np.zeros_like(tensors_of(CONFIG, BF16)[name])}
  save_file(last | stale, sharded / "model-2.safetensors")
  jax.tree.map(np.testing.assert_array_equal, hf.load_params(sharded), want)
  save_file({"x": np.zeros(1)}, sharded.parent / "x.safetensors")
  for outside in ("../x.safetensors", "a\\x.safetensors", "model.bin"):
    change(file_of | {"x": outside})
    with pytest.raises(ValueError, match=r"only \*.safetensors beside it"):
      hf.load_params(sharded)
  for text in ('{"weight_map": []}', "{}", "[]", "{", "\xff"):
    index.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="index.json"):
      hf.load_params(sharded)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_stored_head_of_a_tied_model(kind, shards, tmp_path, monkeypatch):
  """A copy of the embedding is dropped; a different head is refused."""
  monkeypatch.setattr(weights, "_BLOCK", 48)  # a few rows at a time
  architectures = [f"{kind.capitalize()}ForCausalLM"]
  untied = CONFIG | {"model_type": kind, "architectures": architectures}
  tied = untied | {"tie_word_embeddings": True}
  if kind == "gemma2":
    del tied["tie_word_embeddings"]  # its default
  tensors = tensors_of(untied, BF16)
  head = tensors["model.embed_tokens.weight"].copy()
  tensors["lm_head.weight"] = head.astype(np.float32)
  path = write_model(tmp_path / "copy", tensors, shards, tied)
  assert "head" not in hf.load_params(path)
  head[-1, -1] += 1  # in the last block
  tensors["lm_head.weight"] = head
  path = write_model(tmp_path / "other", tensors, shards, tied)
  with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
    hf.load_params(path)
  (path / "config.json").write_text(json.dumps(untied))
  again = hf.load_params(path)["head"].T
  np.testing.assert_array_equal(again, head.astype(np.float32))


def test_pickled_weights_and_adapters_are_refused(tmp_path):
  path = write_model(tmp_path / "model", tensors_of(CONFIG, np.float32))
  (path / "model.safetensors").unlink()
  (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
  with pytest.raises(ValueError, match="cannot read pytorch_model.bin"):
    hf.load_params(path)
  text = json.dumps({"base_model_name_or_path": "org/base", "r": 8})
  (path / "adapter_config.json").write_text(text)
  with pytest.raises(ValueError, match="PEFT adapter, .* model, 'org/base'"):
    hf.resolve(path)


def memory(name):
  with open("/proc/self/status") as file:
    lines = dict(line.split(":", 1) for line in file)
  return 1024 * int(lines[name].split()[0])


def main(path, parameters):
  """Reads and writes a model of 20 million parameters on four devices."""
  assert jax.device_count() == 4
  mesh = meshes.make_mesh(1, 2, 1, 2)
  places = functools.partial(sharding.shardings, mesh=mesh)
  jnp.zeros(3).block_until_ready()
  before = memory("VmRSS")
  params = hf.load_params(path, jnp.float32, places)
  peak = memory("VmHWM") - before
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  assert size == 4 * int(parameters)
  assert peak < 1.5 * size, (peak, size)
  assert jax.tree.map(lambda x: x.sharding, params) == places(params)
  tensors = load_file(path + "/model.safetensors")
  embedding = tensors["model.embed_tokens.weight"].astype(np.float32)
  for shard in params["embed"].addressable_shards:
    np.testing.assert_array_equal(shard.data, embedding[shard.index])
  # Shardings may be a tree, and sharded parameters are saved whole.
  again = hf.load_params(path, jnp.bfloat16, places(params))
  assert jax.tree.map(lambda x: x.sharding, again) == places(params)
  hf.save(path + "2", again, path)
  saved = load_file(path + "2/model.safetensors")
  jax.tree.map(np.testing.assert_array_equal, saved, tensors)


@pytest.mark.slow
@pytest.mark.skipif(
  not pathlib.Path("/proc/self/status").exists(), reason="needs /proc"
)
def test_shards_and_memory_on_four_devices(tmp_path):
  config = CONFIG | dict(attention_bias=False, tie_word_embeddings=True)
  config |= dict(num_attention_heads=8, num_key_value_heads=8, head_dim=64)
  config |= dict(vocab_size=8000, hidden_size=512, num_hidden_layers=4)
  config["intermediate_size"] = 2048
  tensors = tensors_of(config, BF16)
  path = write_model(tmp_path / "model", tensors, config=config)
  parameters = sum(tensor.size for tensor in tensors.values())
  run_python(4, __file__, path, parameters)


if __name__ == "__main__":
  main(*sys.argv[1:])
