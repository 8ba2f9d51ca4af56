"""Which slices of TPU a model can be trained on: the tables of README.md.

    python launch/slices.py [--models=DIR] [--chips=v5e,v6e] [--only=NAME]

DIR holds a config.json for each model, NAME.json. For each model and chip it
compiles a step of configs/gsm8k.py (32 prompts x 32 samples, 512 + 1024 tokens)
on ever larger slices, up to the first that it fits, in the layout that
`layout` guesses; one line of slices.jsonl for each compilation. What has a line
is not compiled again. `--table` prints the tables of what is there.
"""

import argparse
import itertools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import typing
from collections.abc import Sequence

from grpojax.aot import chips, search, topology
from grpojax.models import hf
from grpojax.models.config import parameter_shapes

HERE = pathlib.Path(__file__).parent
ROWS = HERE / "slices.jsonl"
CONFIG = HERE.parent / "configs" / "gsm8k.py"
# Chips of a slice, and the name of its topology.
FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split()
CUBES = "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8".split()
SHAPES = {"v5e": FLAT, "v6e": FLAT, "v5p": CUBES, "tpu7x": CUBES}
PROMPTS, GROUP, LENGTH = 32, 32, 1024


def parameters(model) -> int:
  """How many a model has."""
  shapes = parameter_shapes(model)
  layers = shapes.pop("layers")
  every = [*shapes.values(), *layers.values()]
  return sum(math.prod(shape) for shape in every)


class Need(typing.NamedTuple):
  """Bytes of a device, by rules of thumb that compiled programs taught."""

  state: float
  rollout: float
  update: float


def need(model, devices: int, settings: dict[str, int]) -> Need:
  """What a step takes on each device, roughly.

  Args:
    model: its shape.
    devices: XLA devices of the slice.
    settings: from `layout`.
  """
  size, embedding = parameters(model), 4 * model.vocab_size * model.width
  tensor, sharing = settings["mesh.tensor"], settings["mesh.sampling_tensor"]
  state = 12 * size / devices
  slots = 4 * model.layers * model.kv_heads * model.head_dim
  rows = PROMPTS * GROUP / devices
  # Weights in bfloat16, embeddings in float32, the cache, and its like.
  rollout = state + (2 * size + 1.2 * embedding) / sharing
  rollout += 1.25 * rows * LENGTH * slots + 0.5e9
  tokens = rows * LENGTH / settings["optim.micro_batches"] * tensor
  # A token keeps its state before each layer, and within one some ten more.
  kept = 6 * model.layers * model.width
  kept += (12 * model.mlp * max(model.experts_per_token, 1)) / tensor
  kept += 60 * model.width
  # Embedding and head, gathered in float32, and their gradients.
  update = state + 4 * size / devices + 4.5 * embedding / tensor
  return Need(state, rollout, update + tokens * kept + 0.5e9)


def layout(
  model, devices: int, memory: float, scales: Sequence[float]
) -> dict[str, int] | None:
  """Settings that should fit; None if none are thought to.

  Args:
    model: its shape.
    devices: XLA devices of the slice.
    memory: bytes of each.
    scales: how much more than `need` says the rollout takes, and the update.
  """
  powers = [2**i for i in range(12)]
  sharing = [n for n in powers if n <= devices and model.kv_heads % n == 0]
  # The least sharing that fits: a weight that is shared is waited for.
  for tensor, parts in itertools.product(sharing, powers):
    rows = devices // tensor
    settings = {
      "mesh.data": max(rows // PROMPTS, 1),
      "mesh.fsdp": min(rows, PROMPTS),
      "mesh.tensor": tensor,
      "optim.micro_batches": parts,
    }
    if rows // PROMPTS > GROUP or parts * rows > PROMPTS * GROUP:
      continue
    for shared in sharing:
      settings["mesh.sampling_tensor"] = shared
      needed = need(model, devices, settings)
      most = max(scales[0] * needed.rollout, scales[1] * needed.update)
      if most < 0.95 * memory:
        return settings
  return None


def compile_step(name: str, file: pathlib.Path, slice_: str, settings):
  """Runs `grpojax.compile`; its report, or what it said."""
  with tempfile.TemporaryDirectory() as scratch:
    out = pathlib.Path(scratch) / "out.json"
    words = search.command(settings).split()
    command = [sys.executable, "-m", "grpojax.compile", f"--config={CONFIG}"]
    command += [f"--config.model.path={file}", f"--topology={slice_}"]
    done = subprocess.run(
      [*command, f"--out={out}", *words], capture_output=True, text=True
    )
    row = {"model": name, "topology": slice_, "settings": settings}
    if not out.exists():
      return row | {"error": done.stderr.strip().splitlines()[-1]}
    found = json.loads(out.read_text())
  parts = found["parts"]
  return row | {
    "fits": found["fits"],
    "step_seconds": found["step_seconds"],
    "mfu": found.get("mfu"),
    "gib": {k: round(p["memory_bytes"] / 2**30, 2) for k, p in parts.items()},
    "seconds": {k: round(p["seconds"], 3) for k, p in parts.items()},
    "compile_seconds": {
      k: round(p["compile_seconds"]) for k, p in parts.items()
    },
  }


def read_rows() -> list[dict]:
  """All lines of slices.jsonl."""
  if not ROWS.exists():
    return []
  return [json.loads(line) for line in ROWS.read_text().splitlines()]


def try_slice(name: str, file: pathlib.Path, slice_: str, settings) -> dict:
  """A line of slices.jsonl, compiled where it is not there yet."""
  tried = {"model": name, "topology": slice_, "settings": settings}
  for row in read_rows():
    if row | tried == row:
      return row
  row = compile_step(name, file, slice_, settings)
  with ROWS.open("a") as rows:
    rows.write(json.dumps(row) + "\n")
  return row


def try_slices(name: str, file: pathlib.Path, chip: str) -> None:
  """Compiles for ever larger slices, until a step fits.

  What XLA says of a step that does not fit corrects the rule of thumb; a slice
  is tried again if the rule then finds another layout for it.
  """
  model = hf.to_transformer_config(json.loads(file.read_text()))
  memory = chips.device(chips.CHIPS[chip]).hbm_bytes
  scales = [1.0, 1.0]
  for shape in SHAPES[chip]:
    slice_ = f"{chip}:{shape}"
    _, count = topology.parse(slice_)
    devices, tried = count * chips.CHIPS[chip].devices, []
    while len(tried) < 3:
      settings = layout(model, devices, memory, scales)
      if settings is None or settings in tried:
        break
      tried.append(settings)
      row = try_slice(name, file, slice_, settings)
      print(json.dumps(row), flush=True)
      if row.get("fits"):
        return
      if "error" in row:
        break
      needed = need(model, devices, settings)
      for i, part in enumerate(("rollout", "update")):
        said = row["gib"][part] * 2**30
        scales[i] = max(scales[i], said / getattr(needed, part))


def table() -> str:
  """The smallest slices that fit, in Markdown."""
  lines = [
    "| model | slice | GiB a device: rollout, update | s a step, estimated: "
    "rollout + update | MFU | settings |",
    "|---|---|---|---|---|---|",
  ]
  for row in read_rows():
    if not row.get("fits"):
      continue
    words = search.command(row["settings"])
    gib, seconds = row["gib"], row["seconds"]
    lines.append(
      f"| {row['model']} | {row['topology']} | {gib['rollout']}, "
      f"{gib['update']} | {seconds['rollout']:.3g} + {seconds['update']:.3g} | "
      f"{row['mfu']:.1%} | `{words}` |"
    )
  return "\n".join(lines)


def main() -> None:
  """Runs the program."""
  flags = argparse.ArgumentParser(description=__doc__)
  models = HERE.parent / "tests" / "data" / "model_configs"
  flags.add_argument("--models", type=pathlib.Path, default=models)
  flags.add_argument("--chips", default=",".join(SHAPES))
  flags.add_argument("--only", default="")
  flags.add_argument("--table", action="store_true")
  given = flags.parse_args()
  if given.table:
    print(table())
    return
  files = (f for f in given.models.glob("*.json") if given.only in f.stem)
  sizes = {
    file: parameters(hf.to_transformer_config(json.loads(file.read_text())))
    for file in files
  }
  for chip in given.chips.split(","):
    for file in sorted(sizes, key=sizes.get):
      try_slices(file.stem, file, chip)


if __name__ == "__main__":
  main()
