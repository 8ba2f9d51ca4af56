"""Reads GGUF files (ggml-org/ggml, docs/gguf.md): metadata and tensors.

The gguf library's reader trusts all counts and lengths: a flipped bit can keep
it busy for days. So headers are parsed here, and every read is checked against
the size of the file. The library decodes tensors.
"""

import functools
import math
import os
import pathlib
import re
import struct
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from grpojax.models.rope import Rope, frequencies

_LARGEST = 2**25  # maximum bytes of a header; 250,000 tokens take 10 MB
_MOST = 2**16  # maximum number of keys or tensors
_NUMBERS = {
  number: np.dtype(f"<{code}")
  for number, code in enumerate("u1 i1 u2 i2 u4 i4 f4 ?".split())
} | {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}
_TEXT, _ARRAY = 8, 9

ARCHITECTURES = {
  "llama": ("llama", "LlamaForCausalLM"),  # Mistral's too
  "qwen2": ("qwen2", "Qwen2ForCausalLM"),
  "qwen3": ("qwen3", "Qwen3ForCausalLM"),
  "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
  "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
"""transformers' model type and class, by GGUF's general.architecture."""

# The keys of config.json, by GGUF's keys without the prefix "ARCHITECTURE.".
_READ = {
  "embedding_length": "hidden_size",
  "block_count": "num_hidden_layers",
  "feed_forward_length": "intermediate_size",
  "context_length": "max_position_embeddings",
  "attention.head_count": "num_attention_heads",
  "attention.head_count_kv": "num_key_value_heads",
  "attention.key_length": "head_dim",
  "attention.layer_norm_rms_epsilon": "rms_norm_eps",
  "rope.freq_base": "rope_theta",
}
_EXPERTS = {
  "expert_count": "num_experts",
  "expert_used_count": "num_experts_per_tok",
  "expert_feed_forward_length": "moe_intermediate_size",
}
_GEMMA3 = {
  "attention.sliding_window": "sliding_window",
  "attention.sliding_window_pattern": "sliding_window_pattern",
  "rope.freq_base_swa": "rope_local_base_freq",
}
_GEMMA3_DEFAULTS = {  # llama.cpp's
  "attention.sliding_window_pattern": 6,  # every sixth layer is global
  "rope.freq_base_swa": 10_000.0,
}
OTHERWISE = "Get the model as a Hugging Face directory"
EMBEDDING = "token_embd.weight"
_SCALING = ("rope.scaling.type", "rope.scaling.factor")
_FACTORS = "rope_freqs.weight"  # divisors of rotary frequencies


class Tensor(NamedTuple):
  """Location of a tensor in a file, with the interface of `weights.Stored`."""

  file: pathlib.Path
  format: int  # gguf's number of the format
  shape: tuple[int, ...]  # in NumPy's order, the reverse of the file's
  offset: int  # in bytes
  # Number of heads if rows have GGUF's order for Llama, else 0. In this order,
  # the rows of a head's two halves alternate. For two heads of four rows:
  #   ours  0 1 2 3 | 4 5 6 7
  #   file  0 2 1 3 | 4 6 5 7
  heads: int = 0
  added: float = 0.0  # number that the file adds to each value

  dtype = "F32"  # safetensors' name for the result of `rows`

  def part(self, index: int) -> "Tensor":
    """Returns the tensor at an index of a stack."""
    size = _bytes(self.format, math.prod(self.shape[1:]))
    place = self.offset + index * size
    return self._replace(shape=self.shape[1:], offset=place)

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Reads rows start .. stop - 1 in float32."""
    gguf = library()
    index = np.arange(start, stop)
    if self.heads:
      size = self.shape[0] // self.heads
      head, row = np.divmod(index, size)
      half, pair = np.divmod(row, size // 2)
      index = head * size + 2 * pair + half
    first = index.min()
    last = index.max() + 1
    width = _bytes(self.format, math.prod(self.shape[1:]))
    place = self.offset + int(first) * width
    raw = np.memmap(self.file, np.uint8, "r", place, (last - first, width))
    kind = gguf.GGMLQuantizationType(self.format)
    with np.errstate(all="ignore"):  # readers check for NaN
      values = gguf.dequantize(raw[index - first], kind)
    return values.reshape(len(index), *self.shape[1:]) - self.added


class File(NamedTuple):
  """Header of a GGUF file: metadata by key, and tensors by name."""

  path: pathlib.Path
  metadata: dict[str, Any]  # arrays of numbers are NumPy's
  tensors: dict[str, Tensor]

  def below(self, prefix: str) -> dict[str, Any]:
    """Returns the metadata whose keys have a prefix, and removes the prefix."""
    keys = [key for key in self.metadata if key.startswith(prefix)]
    return {key.removeprefix(prefix): self.metadata[key] for key in keys}


def library() -> types.ModuleType:
  """Returns the gguf library; ValueError if it is not installed."""
  try:
    import gguf.quants  # `import gguf` would accept any folder named gguf
  except ImportError as error:
    text = "reading a .gguf file needs the gguf library: pip install gguf"
    raise ValueError(text) from error
  return gguf


def read(path: pathlib.Path) -> File:
  """Reads a header; ValueError for damaged files and unsupported formats."""
  library()
  if not os.path.isfile(path):  # reading a pipe would hang
    raise ValueError(f"{path} is no file: give the path of a .gguf file")
  try:
    with open(path, "rb") as stream:
      return _read(path, _Header(stream, path.stat().st_size))
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} is no readable GGUF file: {error}") from error


class _Header:
  """Reads a header, but never beyond the file or the limit of a header."""

  def __init__(self, stream: BinaryIO, size: int):
    self.stream = stream
    self.left = min(size, _LARGEST)

  def take(self, count: int) -> bytes:
    data = self.stream.read(count) if count <= self.left else b""
    if len(data) < count:
      raise ValueError("its header is cut off or damaged; download it again")
    self.left -= count
    return data

  def integer(self, code: str) -> int:
    return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

  def text(self) -> str:
    return self.take(self.integer("Q")).decode()

  def value(self) -> Any:
    """Reads a text, a number, a list of texts, or an array of numbers."""
    kind = self.integer("I")
    count = 1
    if is_array := kind == _ARRAY:
      kind, count = self.integer("I"), self.integer("Q")
    if kind == _TEXT:
      values = [self.text() for _ in range(count)]  # huge counts raise
      return values if is_array else values[0]
    if kind not in _NUMBERS:
      raise ValueError(f"its metadata has a value of unknown type {kind}")
    data = self.take(count * _NUMBERS[kind].itemsize)
    values = np.frombuffer(data, _NUMBERS[kind])
    if is_array:
      return values
    if values.dtype.kind == "f":  # item() would give 9.999999747378752e-06
      return float(str(values[0]))
    return values[0].item()

  def table(self, count: int, read: Callable[[str], Any]) -> dict[str, Any]:
    """Reads `count` named entries; `read(name)` reads each value."""
    entries = {}
    if count > _MOST:
      raise ValueError(f"its header has too many entries, {count}")
    for _ in range(count):
      name = self.text()
      if name in entries:
        raise ValueError(f"its key or tensor {name} appears twice")
      entries[name] = read(name)
    return entries


def _read(path: pathlib.Path, header: _Header) -> File:
  if header.take(4) != b"GGUF":
    raise ValueError("it does not begin with GGUF")
  version = header.integer("I")
  if version not in (2, 3):
    kind = "for big-endian machines" if version % 2**16 == 0 else "unknown"
    raise ValueError(f"its version, {version}, is {kind}; get version 3")
  count = header.integer("Q")
  keys = header.integer("Q")
  metadata = header.table(keys, lambda _: header.value())
  tensors = header.table(count, functools.partial(_tensor, path, header))
  alignment = metadata.get("general.alignment", 32)
  if type(alignment) is not int or not 0 < alignment < 2**20:
    raise ValueError(f"its general.alignment is {alignment!r:.40}, not a size")
  begin = -(-header.stream.tell() // alignment) * alignment
  end = begin
  size = path.stat().st_size
  for name, x in sorted(tensors.items(), key=lambda item: item[1].offset):
    x = tensors[name] = x._replace(offset=begin + x.offset)
    count = x.shape[0] * _bytes(x.format, math.prod(x.shape[1:]))
    if not count or x.offset < end or x.offset + count > size:
      where = f"overlaps another or is not in the file ({size} bytes)"
      raise ValueError(f"its tensor {name} {list(x.shape)} {where}")
    end = x.offset + count
  return File(path, metadata, tensors)


def _tensor(path: pathlib.Path, header: _Header, name: str) -> Tensor:
  """Reads the location of a tensor, relative to the end of the header."""
  dimensions = header.integer("I")
  if not 0 < dimensions <= 4:
    raise ValueError(f"its tensor {name} has {dimensions} dimensions, not 1..4")
  shape = tuple(header.integer("Q") for _ in range(dimensions))[::-1]
  tensor = Tensor(path, header.integer("I"), shape, header.integer("Q"))
  try:
    _bytes(tensor.format, shape[-1] if dimensions > 1 else 1)
  except (NotImplementedError, ValueError) as error:
    text = f"its tensor {name} {list(shape)} cannot be read ({error}); get"
    raise ValueError(f"{text} another format (F16, Q8_0, Q4_K_M)") from error
  return tensor


@functools.cache
def _bytes(number: int, values: int) -> int:
  """Returns the number of bytes of a row; raises for unreadable formats."""
  gguf = library()
  kind = gguf.GGMLQuantizationType(number)
  block, size = gguf.GGML_QUANT_SIZES[kind]
  gguf.dequantize(np.zeros((1, size), np.uint8), kind)
  if values % block:
    raise ValueError(f"a row of {values} values is no multiple of {block}")
  return values // block * size


def _architecture(file: File) -> str:
  name = file.metadata.get("general.architecture")
  if not isinstance(name, str) or name not in ARCHITECTURES:
    raise ValueError(
      f"{file.path} has the architecture {name!r:.80}; supported: "
      f"{', '.join(ARCHITECTURES)}. {OTHERWISE}"
    )
  return name


def to_hf_config(file: File) -> dict[str, Any]:
  """Converts a header to a config.json; ValueError for unknown values."""
  name = _architecture(file)
  model_type, architecture_class = ARCHITECTURES[name]
  more = {"qwen3moe": _EXPERTS, "gemma3": _GEMMA3}
  names = _READ | more.get(name, {})
  values = _values(file, f"{name}.", names)
  head_dim = values["attention.key_length"]
  vocab_size = file.tensors[EMBEDDING].shape[0]
  known = {
    "vocab_size": vocab_size,
    "attention.value_length": head_dim,
    "rope.dimension_count": head_dim,
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
  }
  unused = "rope.scaling.finetuned"
  for key in sorted(values.keys() - names.keys() - {*_SCALING, unused}):
    if key not in known or values[key] != known[key]:
      which = f"only {known[key]!r} is" if key in known else "this key is not"
      problem = f"{name}.{key}={values[key]!r:.80}; {which} supported"
      raise ValueError(f"{file.path} has {problem}. {OTHERWISE}")
  config = {
    "architectures": [architecture_class],
    "model_type": model_type,
    "vocab_size": vocab_size,
    "tie_word_embeddings": "output.weight" not in file.tensors,
  }
  config |= {names[key]: values[key] for key in names}
  if name == "qwen3moe":
    config["norm_topk_prob"] = True  # always in llama.cpp
  if name == "gemma3":
    # llama.cpp recognises the model of 27 billion parameters by its 62 layers.
    width = config["hidden_size"] // config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == 62
    config["query_pre_attn_scalar"] = width if is_27b else head_dim
    config["hidden_activation"] = "gelu_pytorch_tanh"
  else:
    config["hidden_act"] = "silu"
  return config | _rope_scaling(file, values) | _token_ids(file)


def _values(file: File, prefix: str, names: Iterable[str]) -> dict[str, Any]:
  """Returns metadata under `prefix`, with defaults; `names` must be numbers."""
  values = file.below(prefix)
  for key, value in values.items():
    is_number = type(value) in (int, float) and 0 < value < 2**31
    is_array = isinstance(value, (list, np.ndarray))  # for example, by layer
    if is_array or (key in names and not is_number):
      value = f"{prefix}{key}={value!r:.80}"
      needed = "one number" if is_array else "a number between 0 and 2**31"
      raise ValueError(f"{file.path} has {value}: it must be {needed}")
  width = values.get("embedding_length", 1)
  heads = values.get("attention.head_count", 1)
  values = {
    "attention.head_count_kv": heads,
    "attention.key_length": width // heads,
    "rope.freq_base": 10_000.0,
    **(_GEMMA3_DEFAULTS if prefix == "gemma3." else {}),
  } | values
  present = values.keys() | file.tensors.keys()
  if lacking := [x for x in (*names, EMBEDDING) if x not in present]:
    raise ValueError(f"{file.path} lacks {', '.join(lacking)} (of {prefix}*)")
  return values


def _rope_scaling(file: File, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns config.json's rope_scaling: linear, Llama 3's, or {} for none.

  For Llama 3, a file holds only the divisors of frequencies. They must be those
  of Llama 3.1 to 3.3, which differ only in `factor`, the largest divisor.
  """
  kind, factor = (values.get(key) for key in _SCALING)
  theta = values["rope.freq_base"]
  head_dim = values["attention.key_length"]
  factors = file.tensors.get(_FACTORS)
  rope = {"factor": 1.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
  if kind in (None, "none") and factor is None:
    if factors is None:
      return {}
    if factors.shape == (head_dim // 2,):
      divisors = factors.rows(0, head_dim // 2)
      rope["factor"] = max(1.0, float(divisors.max()))
      plain = frequencies(Rope(theta), head_dim)
      scaled = frequencies(Rope(theta, **rope, original_length=8192), head_dim)
      if np.allclose(divisors * scaled, plain, rtol=1e-4, atol=0.0):
        rope |= {"original_max_position_embeddings": 8192}
        return {"rope_scaling": {"rope_type": "llama3"} | rope}
  elif kind == "linear" and factor is not None and factors is None:
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
  raise ValueError(
    f"{file.path} has an unknown scaling of rotary frequencies ({kind!r:.80}, "
    f"or {_FACTORS} other than Llama 3.1's). {OTHERWISE}"
  )


def _token_ids(file: File) -> dict[str, Any]:
  """Returns bos_token_id, pad_token_id and eos_token_id (a list of end ids)."""
  named = lambda x: file.metadata.get(f"tokenizer.ggml.{x}_token_id")
  ends = [end for x in ("eos", "eot", "eom") if type(end := named(x)) is int]
  ids = {"bos_token_id": named("bos"), "pad_token_id": named("padding")}
  ids = {name: token for name, token in ids.items() if type(token) is int}
  return ids | ({"eos_token_id": list(dict.fromkeys(ends))} if ends else {})


def find(
  path: pathlib.Path, hf_config: dict[str, Any], names: Iterable[str]
) -> dict[str, Tensor]:
  """Returns a file's tensors by Hugging Face `names`, or else by GGUF's names.

  Stacked experts become separate tensors. ValueError if the file does not match
  `hf_config`.
  """
  gguf = library()
  file = read(path)
  name = _architecture(file)
  heads = {}
  if to_hf_config(file) != hf_config:
    raise ValueError(f"{path} changed after config.json was made: start again")
  if name == "llama":
    heads["attn_q"] = hf_config["num_attention_heads"]
    heads["attn_k"] = hf_config["num_key_value_heads"]
  kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name)
  gguf_names = gguf.get_tensor_name_map(kind, 1)  # of layer 0
  renamed = {}
  used = {_FACTORS}  # config.json has these
  for hf_name in names:
    layer = re.search(r"layers\.(\d+)", hf_name)
    expert = re.search(r"experts\.(\d+)", hf_name)
    general = re.sub(r"experts\.\d+", "experts", hf_name)
    general = re.sub(r"layers\.\d+", "layers.0", general)
    key = gguf_names.get_name(general, try_suffixes=(".weight", ".bias")) or ""
    if layer:
      key = key.replace("blk.0.", f"blk.{layer[1]}.")
    tensor = file.tensors.get(key)
    if expert and tensor and tensor.shape[0] == hf_config["num_experts"]:
      tensor = tensor.part(int(expert[1]))
    if tensor:
      tensor = tensor._replace(heads=heads.get(key.split(".")[-2], 0))
      if name == "gemma3" and key.endswith("norm.weight"):
        tensor = tensor._replace(added=1.0)
      renamed[hf_name] = tensor
      used.add(key)
  return renamed | {k: v for k, v in file.tensors.items() if k not in used}
