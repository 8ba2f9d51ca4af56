"""GGUF files: metadata, and tensors that are read in pieces.

The header is read here, because gguf's own reader believes each count and each
length: one flipped bit of the file can keep it busy for days. Every read is
checked against the size of the file first. Formats of tensors are gguf's.
(ggml-org/ggml, docs/gguf.md.)
"""

import functools
import math
import pathlib
import struct
import types
from typing import Any, BinaryIO, NamedTuple

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LARGEST = 2**25  # bytes of a header; that of 250,000 tokens has 10 MB
_MOST = 2**16  # keys, and tensors
_NUMBERS = {
  number: np.dtype(f"<{code}")
  for number, code in enumerate("u1 i1 u2 i2 u4 i4 f4 ?".split())
} | {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
_TEXT, _ARRAY = 8, 9
_AGAIN = "download it again"


class Tensor(NamedTuple):
  """Place of a tensor, which `weights` reads as it reads its `Stored`.

  Attributes:
    file: path of the file.
    format: gguf's number of how its values are stored.
    shape: NumPy's, the reverse of the file's.
    offset: byte of the file at which it begins.
    heads: heads whose rows are stored in GGUF's order of Llama, else 0. There
      the rows of a head's two halves, which are rotated together, alternate:

          ours  0 1 2 3 | 4 5 6 7      (a head of four, two heads)
          file  0 2 1 3 | 4 6 5 7
  """

  file: pathlib.Path
  format: int
  shape: tuple[int, ...]
  offset: int
  heads: int = 0

  dtype = "F32"  # of the values that `rows` returns, in safetensors' words

  def part(self, index: int) -> "Tensor":
    """Returns one of the tensors that are stacked in this one."""
    row = _bytes(self.format, self.shape[-1])
    size = row * math.prod(self.shape[1:-1])
    place = self.offset + index * size
    return self._replace(shape=self.shape[1:], offset=place)

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Reads the values [stop - start, ...] of some rows, in float32."""
    gguf, index = library(), np.arange(start, stop)
    if self.heads:
      size = self.shape[0] // self.heads
      head, row = np.divmod(index, size)
      half, pair = np.divmod(row, size // 2)
      index = head * size + 2 * pair + half
    first, last = index.min(), index.max() + 1
    width = _bytes(self.format, math.prod(self.shape[1:]))
    place = self.offset + int(first) * width
    raw = np.memmap(self.file, np.uint8, "r", place, (last - first, width))
    with np.errstate(all="ignore"):  # whoever reads it looks for NaN
      values = gguf.dequantize(
        raw[index - first], gguf.GGMLQuantizationType(self.format)
      )
    return values.reshape(len(index), *self.shape[1:])


class File(NamedTuple):
  """A file's header: metadata by key (arrays are NumPy's), tensors by name."""

  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, Tensor]


def library() -> types.ModuleType:
  """Returns the gguf library; ValueError where it is not installed."""
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      "a .gguf file is read with the gguf library: pip install gguf"
    ) from error
  return gguf


def read(path: pathlib.Path) -> File:
  """Reads a header, of which every tensor is in the file.

  Raises:
    ValueError: no file, a damaged one, or a tensor of a format that gguf does
      not turn into numbers.
  """
  library()
  if not path.is_file():  # a pipe would be waited for
    raise ValueError(f"{path} is no file: give the path of a .gguf file")
  try:
    with open(path, "rb") as stream:
      return _read(path, _Header(stream, path.stat().st_size))
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: a text is not UTF-8: {_AGAIN}") from error
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  except OSError as error:
    raise ValueError(f"{path} cannot be read: {error.strerror}") from error


class _Header:
  """A stream of which no more is taken than a file and a header can hold."""

  def __init__(self, stream: BinaryIO, size: int):
    self.stream, self.left = stream, min(size, _LARGEST)

  def take(self, count: int) -> bytes:
    data = self.stream.read(count) if count <= self.left else b""
    if len(data) < count:
      raise ValueError(f"its header is cut off or damaged: {_AGAIN}")
    self.left -= count
    return data

  def whole(self, code: str) -> int:
    (value,) = struct.unpack(f"<{code}", self.take(struct.calcsize(code)))
    return value

  def text(self) -> str:
    return self.take(self.whole("Q")).decode()

  def value(self) -> Any:
    """Returns a text, a number, or an array: a list of texts, or NumPy's."""
    kind, count = self.whole("I"), None
    if kind == _ARRAY:
      kind, count = self.whole("I"), self.whole("Q")
    if kind == _TEXT:
      if count is None:
        return self.text()
      return [self.text() for _ in range(count)]  # absurd counts end early
    if kind not in _NUMBERS:
      raise ValueError(f"its metadata have a value of type {kind}: {_AGAIN}")
    dtype = _NUMBERS[kind]
    size = dtype.itemsize * (1 if count is None else count)
    values = np.frombuffer(self.take(size), dtype)
    if count is not None:
      return values
    # 1e-05, not 9.999999747378752e-06, which float() would make of it.
    is_float = dtype.kind == "f"
    return float(str(values[0])) if is_float else values[0].item()


def _read(path: pathlib.Path, header: _Header) -> File:
  if header.take(4) != _MAGIC:
    raise ValueError(f"it does not begin as GGUF files do: {_AGAIN}")
  version = header.whole("I")
  if version not in _VERSIONS:
    big = version % 2**16 == 0  # its bytes in the other order
    kind = "for big-endian machines" if big else f"of version {version}"
    raise ValueError(
      f"a GGUF file {kind} is not read; get one of version 3, little-endian"
    )
  tensors, keys = header.whole("Q"), header.whole("Q")
  if max(tensors, keys) > _MOST:
    raise ValueError(
      f"its header counts {tensors} tensors and {keys} keys: {_AGAIN}"
    )
  metadata, places = {}, {}
  for _ in range(keys):
    key = header.text()
    if key in metadata:
      raise ValueError(f"its key {key} stands there twice: {_AGAIN}")
    metadata[key] = header.value()
  for _ in range(tensors):
    name = header.text()
    if name in places:
      raise ValueError(f"its tensor {name} stands there twice: {_AGAIN}")
    places[name] = _place(path, name, header)
  alignment = metadata.get("general.alignment", 32)
  if type(alignment) is not int or not 0 < alignment < 2**20:
    raise ValueError(f"its general.alignment is {alignment!r:.40}: {_AGAIN}")
  begin = -(-header.stream.tell() // alignment) * alignment
  places = {
    name: tensor._replace(offset=begin + tensor.offset)
    for name, tensor in places.items()
  }
  _check_places(places, path.stat().st_size)
  return File(path, metadata, places)


def _place(path: pathlib.Path, name: str, header: _Header) -> Tensor:
  """Reads a tensor's place; its offset is from the end of the header."""
  count = header.whole("I")
  if not 0 < count <= 4:
    raise ValueError(f"its tensor {name} has {count} dimensions: {_AGAIN}")
  shape = tuple(header.whole("Q") for _ in range(count))[::-1]
  tensor = Tensor(path, header.whole("I"), shape, header.whole("Q"))
  try:
    _try_format(tensor.format)
    _bytes(tensor.format, shape[-1] if count > 1 else 1)
  except (NotImplementedError, ValueError) as error:
    raise ValueError(
      f"its tensor {name} {list(shape)} cannot be read ({error}): get the "
      "model in another format (F16, Q8_0, Q4_K_M)"
    ) from error
  return tensor


@functools.cache
def _try_format(number: int) -> None:
  """Turns one block of zeros into numbers; raises what gguf raises."""
  gguf = library()
  kind = gguf.GGMLQuantizationType(number)
  gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)


def _bytes(number: int, values: int) -> int:
  """Returns the bytes of a row of `values`; ValueError for half a block."""
  gguf = library()
  block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
  if values % block:
    raise ValueError(f"{values} values are no multiple of {block}")
  return values // block * size


def _check_places(tensors: dict[str, Tensor], size: int) -> None:
  """Refuses tensors that overlap, or that are not wholly in the file."""
  end = 0
  for name, x in sorted(tensors.items(), key=lambda item: item[1].offset):
    row = _bytes(x.format, math.prod(x.shape[1:]))
    count = x.shape[0] * row
    if not count or x.offset < end or x.offset + count > size:
      raise ValueError(
        f"its tensor {name} {list(x.shape)} is not where the header says, in "
        f"a file of {size} bytes: {_AGAIN}"
      )
    end = x.offset + count
