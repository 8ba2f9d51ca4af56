"""Checksums of a model directory, and damage to its files."""

import json
import random
import shutil

import jax
import numpy as np
import pytest

from grpojax.models import huggingface as hf

MODEL = "arithmetic-instruct"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  path = tmp_path_factory.mktemp("models") / "out"
  params = hf.load_params(MODEL)
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  hf.save(path, params, MODEL, max_shard_size=size // 2)
  return path, params


def test_flipped_bits_are_refused_by_file(written):
  path, params = written
  rng = random.Random(0)
  for file in sorted(path.iterdir()):
    whole = file.read_bytes()
    for byte in (0, len(whole) - 1, *rng.choices(range(len(whole)), k=3)):
      damaged = bytearray(whole)
      damaged[byte] ^= 1 << rng.randrange(8)
      file.write_bytes(damaged)
      with pytest.raises(ValueError, match=f"{path}/"):
        hf.load_params(path)
    file.write_bytes(whole)
  (path / "new").touch()  # files may be added
  again = hf.load_params(path)
  (path / "new").unlink()
  assert jax.tree.all(jax.tree.map(np.array_equal, params, again))


def test_missing_and_edited_files_are_refused_with_a_remedy(written, tmp_path):
  copy = tmp_path / "copy"
  shutil.copytree(written[0], copy)
  config = json.loads((copy / "config.json").read_text())
  text = json.dumps(config | {"rms_norm_eps": 0.5})
  (copy / "config.json").write_text(text)
  with pytest.raises(ValueError, match="config.json is damaged or was edited"):
    hf.load_params(copy)
  (copy / "tokenizer.json").unlink()
  (copy / "config.json").write_bytes((written[0] / "config.json").read_bytes())
  with pytest.raises(ValueError, match=r"tokenizer.json .*\(missing instead"):
    hf.load_params(copy)
  (copy / "checksums.json").unlink()  # the remedy
  hf.load_params(copy)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"../x": "1 bytes"}'])
def test_damaged_checksums_are_refused(written, tmp_path, text):
  copy = tmp_path / "copy"
  shutil.copytree(written[0], copy)
  (tmp_path / "x").write_text("1")
  (copy / "checksums.json").write_text(text, encoding="latin-1")
  with pytest.raises(ValueError, match="damaged"):
    hf.load_params(copy)
