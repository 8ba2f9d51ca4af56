"""Checksums of a directory's files, in checksums.json.

They find flipped bits in weights, config.json or tokenizer.json, which would
otherwise raise no error. CRC-32 (zlib's) detects every burst of up to 32 wrong
bits, as fast as a disk. It protects against damage, not against forgery.
"""

import json
import pathlib
import zlib

CHECKSUMS = "checksums.json"
_BLOCK = 2**22  # bytes read at once


def _checksum(path: pathlib.Path) -> str:
  size = crc = 0
  buffer = bytearray(_BLOCK)
  with open(path, "rb", buffering=0) as file:
    while count := file.readinto(buffer):
      crc = zlib.crc32(memoryview(buffer)[:count], crc)
      size += count
  return f"{size} bytes, crc32 {crc:08x}"


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
  paths = sorted(directory.iterdir())
  return [path for path in paths if path.is_file() and path.name != CHECKSUMS]


def write(directory: pathlib.Path) -> None:
  """Writes the checksums of all files in a directory."""
  sums = {path.name: _checksum(path) for path in _files(directory)}
  text = json.dumps(sums, indent=2) + "\n"
  (directory / CHECKSUMS).write_text(text, encoding="utf-8")


def verify(directory: pathlib.Path) -> None:
  """Raises ValueError if a file with a checksum is missing or has changed."""
  listed = directory / CHECKSUMS
  if not listed.is_file():
    return
  try:
    sums = json.loads(listed.read_text(encoding="utf-8")).items()
  except (AttributeError, RecursionError, ValueError) as error:
    raise ValueError(
      f"{listed} is damaged ({error}): write the model again, or delete this "
      "file to read the model unverified"
    ) from error
  for name, expected in sums:
    # Use only the name, because a list must not reach outside its directory.
    path = directory / pathlib.PurePath(name).name
    actual = _checksum(path) if path.is_file() else "missing"
    if actual != expected:
      raise ValueError(
        f"{directory / name} is damaged or was edited ({actual} instead of "
        f"{expected}): write the model again or, if you edited it, delete "
        f"{CHECKSUMS} there"
      )


def intact(directory: pathlib.Path) -> bool:
  """Returns True if a directory has checksums and `verify` passes."""
  try:
    verify(directory)
  except ValueError:
    return False
  return (directory / CHECKSUMS).is_file()


def fingerprint(directory: pathlib.Path) -> str:
  """Returns a text that identifies a model, from a sample of its bytes.

  A line per file has its name, size, and the CRC-32 of up to 64 blocks spread
  over it. Training changes all blocks of weights.
  """
  lines = []
  size = 2**16
  for path in _files(directory):
    total = path.stat().st_size
    crc = 0
    with open(path, "rb") as file:
      for start in range(0, total, max(total // 64, size)):
        file.seek(start)
        crc = zlib.crc32(file.read(size), crc)
    lines.append(f"{path.name}: {total} bytes, crc32 {crc:08x}")
  return "\n".join(lines)
