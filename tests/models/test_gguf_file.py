"""GGUF files byte by byte: formats, places of tensors, and damage."""

import os
import struct
import time

import numpy as np
import pytest

from grpojax.models.huggingface import gguf_file

gguf = pytest.importorskip("gguf")
U8 = 0
U32 = 4
F32 = 6
BOOL = 7
TEXT = 8
ARRAY = 9
Q8_0 = 8
HUGE = 2**60


def text(value):
  value = value if isinstance(value, bytes) else value.encode()
  return struct.pack("<Q", len(value)) + value


def key(name, kind, value):
  return text(name) + struct.pack("<I", kind) + value


def tensor(name, shape, kind=0, offset=0):
  places = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
  return text(name) + places + struct.pack("<IQ", kind, offset)


def whole(keys=(), tensors=(), data=b"", magic=b"GGUF", version=3, counts=None):
  header = magic + struct.pack("<I", version)
  header += struct.pack("<QQ", *(counts or (len(tensors), len(keys))))
  header += b"".join(keys) + b"".join(tensors)
  return header + bytes(-len(header) % 32) + data


KEYS = [
  key("general.architecture", TEXT, text("llama")),
  key("a.eps", F32, struct.pack("<f", 1e-5)),
  key("a.flag", BOOL, b"\1"),
  key("a.sizes", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3)),
  key("a.words", ARRAY, struct.pack("<IQ", TEXT, 2) + text("é") + text("")),
]
TENSORS = [tensor("x", [3, 2]), tensor("y", [4], offset=32)]
OUTSIDE = "overlaps another or is not in the file"
DATA = np.arange(12, dtype="<f4").tobytes()


def read(tmp_path, data):
  path = tmp_path / "model.gguf"
  path.write_bytes(data)
  return gguf_file.read(path)


def test_a_header_is_read(tmp_path):
  file = read(tmp_path, whole(KEYS, TENSORS, DATA))
  assert file.metadata.pop("a.sizes").tolist() == [1, 2, 3]
  assert file.metadata == {
    "general.architecture": "llama",
    "a.eps": 1e-5,
    "a.flag": True,
    "a.words": ["é", ""],
  }
  x = file.tensors["x"].rows(0, 2)
  assert x.tolist() == [[0, 1, 2], [3, 4, 5]] and x.dtype == np.float32
  assert file.tensors["y"].rows(1, 3).tolist() == [9, 10]


@pytest.mark.slow
def test_truncated_files_are_refused(tmp_path):
  data = whole(KEYS, TENSORS, DATA)
  for size in range(len(data)):
    with pytest.raises(ValueError, match="model.gguf is no readable GGUF"):
      read(tmp_path, data[:size])


def array(kind, count, data=b""):
  return [key("a", ARRAY, struct.pack("<IQ", kind, count) + data)]


@pytest.mark.parametrize(
  "data, message",
  [
    (whole(magic=b"GGML"), "begin with GGUF"),
    (whole(version=1), "its version, 1, is unknown"),
    (whole(version=3 * 2**24), "is for big-endian machines"),
    (whole(counts=(HUGE, 0)), f"too many entries, {HUGE}"),
    (whole(counts=(0, 2**16)), "cut off or damaged"),
    (whole([struct.pack("<Q", 2**63) + b"a"]), "cut off or damaged"),
    (whole(array(U8, HUGE)), "cut off or damaged"),
    (whole(array(TEXT, HUGE)), "cut off or damaged"),
    (whole(array(ARRAY, 1, struct.pack("<IQ", U8, 0))), "of unknown type 9"),
    (whole([key("a", U8, b"1")] * 2), "key or tensor a appears twice"),
    (whole([key("a", TEXT, text(b"\xc3"))]), "codec can't decode"),
    (whole([key("general.alignment", U32, bytes(4))]), "alignment is 0"),
    (whole([], [tensor("x", [])]), "x has 0 dimensions"),
    (whole([], [tensor("x", [1] * 5)]), "x has 5 dimensions"),
    (whole([], [tensor("x", [0, 2])]), OUTSIDE),
    (whole([], [tensor("x", [32, 2**58], Q8_0)]), OUTSIDE),
    (whole([], [tensor("x", [2**62], Q8_0)]), r"x \[.* cannot be read"),
    (whole([], [tensor("x", [33, 2], Q8_0)]), "33 values is no multiple"),
    (whole([], [tensor("x", [2, 2], 24)]), "I8 is not yet implemented"),
    (whole([], [tensor("x", [2, 2], 9999)]), "9999 is not a valid"),
    (whole([], [tensor("x", [2], offset=2**63)], DATA), OUTSIDE),
    (whole([], [tensor("x", [2], offset=41)], DATA), OUTSIDE),
    (whole([], [tensor("x", [4]), tensor("y", [4])], DATA), OUTSIDE),
    (whole([], [tensor(b"\xff", [4])], DATA), "codec can't decode"),
  ],
  ids=lambda x: "file" if isinstance(x, bytes) else None,
)
def test_damage_is_refused_quickly(tmp_path, data, message):
  began = time.process_time()
  with pytest.raises(ValueError, match=f"no readable GGUF file: .*{message}"):
    read(tmp_path, data)
  assert time.process_time() - began < 2  # no loop to 2**60


def test_a_sparse_file_of_empty_texts_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(gguf_file, "_LARGEST", 2**15)
  path = tmp_path / "model.gguf"
  path.write_bytes(whole(array(TEXT, HUGE)))
  os.truncate(path, 2**30)
  with pytest.raises(ValueError, match="cut off or damaged"):
    gguf_file.read(path)


def test_folders_and_pipes_are_refused(tmp_path):
  os.mkfifo(tmp_path / "pipe")
  for path in (tmp_path, tmp_path / "pipe", tmp_path / "nothing"):
    with pytest.raises(ValueError, match="is no file: give the path"):
      gguf_file.read(path)


def test_a_missing_library_raises_with_a_remedy(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "gguf", None)
  with pytest.raises(ValueError, match="pip install gguf"):
    read(tmp_path, whole())


FORMATS = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q6_K IQ4_XS".split()


@pytest.mark.parametrize("name", FORMATS)
def test_parts_equal_slices_of_the_whole(tmp_path, name):
  kind = gguf.GGMLQuantizationType[name]
  block, size = gguf.GGML_QUANT_SIZES[kind]
  rng = np.random.default_rng(0)
  shape = (3, 8, 2 * block)  # three experts of 8 rows
  raw = rng.integers(0, 60, (3, 8, 2 * size), np.uint8)  # finite numbers
  values = gguf.dequantize(raw.reshape(24, -1), kind).reshape(shape)
  assert np.isfinite(values).all() and values.any()
  stored = [tensor("x", shape[::-1], kind.value)]
  x = read(tmp_path, whole([], stored, raw.tobytes())).tensors["x"]
  assert x.shape == shape
  np.testing.assert_array_equal(x.rows(0, 3), values)
  matrix = x.part(1)
  np.testing.assert_array_equal(matrix.rows(2, 5), values[1, 2:5])
  # Two heads of four rows: 0 2 1 3 | 4 6 5 7.
  swapped = values[1][[0, 2, 1, 3, 4, 6, 5, 7]]
  matrix = matrix._replace(heads=2)
  np.testing.assert_array_equal(matrix.rows(0, 8), swapped)
  for start, stop in ((1, 2), (3, 6), (5, 8)):
    rows = matrix.rows(start, stop)
    np.testing.assert_array_equal(rows, swapped[start:stop])
