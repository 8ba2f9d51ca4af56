"""Which slices of TPU a model can be trained on: the tables of README.md.

    python launch/slices.py [--models=DIR] [--chips=v5e,v6e] [--only=NAME]
                            [--limit=SECONDS] [--table]

DIR holds a config.json for each model, NAME.json. For each model and chip it
compiles a step of configs/gsm8k.py (32 prompts x 32 samples, 512 + 1024 tokens)
on ever larger slices, up to the first that it fits, in the layout that
`layout` guesses; one line of slices.jsonl for each compilation. What has a line
is not compiled again, so it goes on where it was stopped. A step that cannot be
compiled, or not within --limit, has a line that says so, and the next follows.
`--table` prints the tables of what is there.
"""

import argparse
import contextlib
import itertools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import typing
from collections.abc import Sequence

import jax.numpy as jnp

from grpojax.aot import chips, search, topology
from grpojax.models import huggingface as hf
from grpojax.models.config import parameter_shapes

HERE = pathlib.Path(__file__).parent
ROWS = HERE / "slices.jsonl"
CONFIG = HERE.parent / "configs" / "gsm8k.py"
# Chips of a slice, and the name of its topology.
FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split()
CUBES = "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8".split()
SHAPES = {"v5e": FLAT, "v6e": FLAT, "v5p": CUBES, "tpu7x": CUBES}
PROMPTS, GROUP, LENGTH = 32, 32, 1024
MOMENTS = ("float32", "bfloat16")  # of Adam; rounded ones where need be
TRIES = 5  # compilations for a model on a chip, of which 2 on the same slice


def parameters(model) -> tuple[int, int]:
  """How many a model has, and how many of them are experts'."""
  shapes = parameter_shapes(model)
  shapes |= shapes.pop("layers")
  sizes = {name: math.prod(shape) for name, shape in shapes.items()}
  experts = (n for name, n in sizes.items() if name.startswith("expert_"))
  return sum(sizes.values()), sum(experts)


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
  size, experts = parameters(model)
  embedding = 4 * model.vocab_size * model.width
  tensor, sharing = settings["mesh.tensor"], settings["mesh.sampling_tensor"]
  # Experts stay where they are, while all else is gathered.
  whole = size - experts + experts / settings["mesh.expert"]
  moments = jnp.dtype(settings["optim.moments_dtype"]).itemsize
  cut = devices // settings["mesh.data"]  # whose copies are whole
  state = (4 + 2 * moments) * size / cut
  slots = 4 * model.layers * model.kv_heads * model.head_dim
  rows = PROMPTS * GROUP / devices
  # Weights in bfloat16, embeddings in float32, the cache, and its like.
  rollout = state + (2 * whole + 1.2 * embedding) / sharing
  # Where a stage ends, the cache is there in two sizes.
  rollout += 1.85 * rows * LENGTH * slots + 0.5e9
  tokens = rows * LENGTH / settings["optim.micro_batches"] * tensor
  # A token keeps its state before each layer, and within one some ten more.
  kept = 6 * model.layers * model.width
  kept += (12 * model.mlp * max(model.experts_per_token, 1)) / tensor
  kept += 60 * model.width
  # Embedding and head, gathered in float32, and their gradients.
  update = state + 4 * size / cut + 4.5 * embedding / tensor
  return Need(state, rollout, update + tokens * kept + 0.5e9)


def layout(
  model, devices: int, memory: float, scales: Sequence[float]
) -> dict[str, int | str] | None:
  """Settings that should fit; None if none are thought to.

  Args:
    model: its shape.
    devices: XLA devices of the slice.
    memory: bytes of each.
    scales: how much more than `need` says the rollout takes, and the update.
  """
  powers = [2**i for i in range(12)]
  sharing = [n for n in powers if n <= devices and model.kv_heads % n == 0]
  apart = [n for n in powers[:6] if model.experts and model.experts % n == 0]
  # The least sharing that fits: a weight that is shared is waited for.
  for moments, tensor, expert, parts in itertools.product(
    MOMENTS, sharing, apart or [1], powers
  ):
    rows = devices // tensor
    settings = {
      "mesh.data": max(rows // PROMPTS, 1),
      "mesh.fsdp": min(rows, PROMPTS) // expert,
      "mesh.expert": expert,
      "mesh.tensor": tensor,
      "optim.micro_batches": parts,
      "optim.moments_dtype": moments,
    }
    if rows // PROMPTS > GROUP or parts * rows > PROMPTS * GROUP:
      continue
    if expert > min(rows, PROMPTS):
      continue
    for shared in sharing:
      settings["mesh.sampling_tensor"] = shared
      needed = need(model, devices, settings)
      most = max(scales[0] * needed.rollout, scales[1] * needed.update)
      if most < 0.95 * memory:
        return settings
  return None


def compile_step(
  name: str, file: pathlib.Path, slice_: str, settings, limit: float
) -> dict:
  """Runs `grpojax.compile`; its report, or why there is none.

  Args:
    name: of the model.
    file: its config.json.
    slice_: topology.
    settings: from `layout`.
    limit: seconds.
  """
  with tempfile.TemporaryDirectory() as scratch:
    out = pathlib.Path(scratch) / "out.json"
    words = search.command(settings).split()
    command = [sys.executable, "-m", "grpojax.compile", f"--config={CONFIG}"]
    command += [f"--config.model.path={file}", f"--topology={slice_}"]
    row = {"model": name, "topology": slice_, "settings": settings}
    try:
      done = subprocess.run(
        [*command, f"--out={out}", *words],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
      )
    except subprocess.TimeoutExpired:
      return row | {"error": f"took more than {limit:g} s", "late": True}
    if not out.exists():
      said = done.stderr.split("\n")
      said = [line for line in said if line.strip()] or ["nothing"]
      return row | {"error": f"code {done.returncode}: {said[-1][:300]}"}
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
  """All whole lines of slices.jsonl."""
  rows = []
  for line in ROWS.read_text().splitlines() if ROWS.exists() else ():
    with contextlib.suppress(ValueError):  # stopped while it was written
      rows.append(json.loads(line))
  return rows


def try_slice(
  name: str, file: pathlib.Path, slice_: str, settings, limit: float
) -> dict:
  """A line of slices.jsonl, compiled where it is not there yet."""
  tried = {"model": name, "topology": slice_, "settings": settings}
  for row in read_rows():
    if row | tried == row:
      return row
  row = compile_step(name, file, slice_, settings, limit)
  halved = ROWS.exists() and not ROWS.read_text().endswith("\n")
  with ROWS.open("a") as rows:
    rows.write("\n" * halved + json.dumps(row) + "\n")
  return row


def try_slices(name: str, file: pathlib.Path, chip: str, limit: float) -> None:
  """Compiles for ever larger slices, until a step fits.

  What XLA says of a step that does not fit corrects the rule of thumb; a slice
  is tried again if the rule then finds another layout for it. It ends after
  `TRIES`, or where one takes too long: a larger slice would too.
  """
  model = hf.to_transformer_config(json.loads(file.read_text()))
  memory = chips.device(chips.CHIPS[chip]).hbm_bytes
  scales, tries = [1.0, 1.0], 0
  for shape in SHAPES[chip]:
    slice_ = f"{chip}:{shape}"
    _, count = topology.parse(slice_)
    devices, tried = count * chips.CHIPS[chip].devices, []
    while len(tried) < 2:
      settings = layout(model, devices, memory, scales)
      if settings is None or settings in tried:
        break
      tried.append(settings)
      tries += 1
      row = try_slice(name, file, slice_, settings, limit)
      print(json.dumps(row), flush=True)
      if row.get("fits") or row.get("late") or tries == TRIES:
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
  flags.add_argument("--limit", type=float, default=600.0)
  flags.add_argument("--table", action="store_true")
  given = flags.parse_args()
  if given.table:
    print(table())
    return
  files = (f for f in given.models.glob("*.json") if given.only in f.stem)
  sizes = {
    file: parameters(hf.to_transformer_config(json.loads(file.read_text())))[0]
    for file in files
  }
  for chip in given.chips.split(","):
    for file in sorted(sizes, key=sizes.get):
      try_slices(file.stem, file, chip, given.limit)


if __name__ == "__main__":
  main()
