"""Which slices of TPU a model can be trained on: the tables of README.md.

    python launch/slices.py [--models=DIR] [--chips=v5e,v6e] [--only=NAME]
                            [--limit=SECONDS] [--again] [--table]

DIR holds a config.json for each model, NAME.json. For each model and chip,
`grpojax.compile --search` looks for a layout of a step of configs/gsm8k.py (32
prompts x 32 samples, 512 + 1024 tokens) on ever larger slices, up to the first
that it fits. Each slice gets a line of slices.jsonl. What has a line is not
compiled again, so it goes on where it was stopped. A step that cannot be
compiled, or not within --limit, has a line that says so, and the next follows.
`--again` compiles the layouts that are there with the program as it is today,
in the place of a search. `--table` prints the tables.
"""

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile

from grpojax.aot import search

HERE = pathlib.Path(__file__).parent
ROWS = HERE / "slices.jsonl"
CONFIG = HERE.parent / "configs" / "gsm8k.py"
# Chips of a slice, and the name of its topology.
FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split()
CUBES = "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8".split()
SHAPES = {"v5e": FLAT, "v6e": FLAT, "v5p": CUBES, "tpu7x": CUBES}
MOMENTS = ("float32", "bfloat16")  # of Adam; rounded ones where need be


def compile_step(
  file: pathlib.Path,
  slice_: str,
  settings: dict,
  limit: float,
  *flags: str,
) -> dict:
  """Runs `grpojax.compile`; its report, or why there is none."""
  with tempfile.TemporaryDirectory() as scratch:
    out = pathlib.Path(scratch) / "out.json"
    command = [sys.executable, "-m", "grpojax.compile", f"--config={CONFIG}"]
    command += [f"--config.model.path={file}", f"--topology={slice_}"]
    command += search.command(settings).split()
    try:
      done = subprocess.run(
        [*command, *flags, f"--out={out}"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
      )
    except subprocess.TimeoutExpired:
      return {"error": f"took more than {limit:g} s", "late": True}
    if not out.exists():
      lines = [line for line in done.stderr.split("\n") if line.strip()]
      last = lines[-1] if lines else "nothing"
      return {"error": f"code {done.returncode}: {last[:300]}"}
    result = json.loads(out.read_text())
  if not result["fits"]:
    return {"fits": False}
  parts = result["parts"]
  return {
    "settings": result.get("settings", {}) | settings,
    "fits": True,
    "step_seconds": result["step_seconds"],
    "mfu": result.get("mfu"),
    "gib": {k: round(p["memory_bytes"] / 2**30, 2) for k, p in parts.items()},
    "seconds": {k: round(p["seconds"], 3) for k, p in parts.items()},
    "xla_seconds": {k: p["xla_seconds"] for k, p in parts.items()},
  }


def read_rows() -> list[dict]:
  """All whole lines of slices.jsonl."""
  rows = []
  for line in ROWS.read_text().splitlines() if ROWS.exists() else ():
    with contextlib.suppress(ValueError):  # stopped while it was written
      rows.append(json.loads(line))
  return rows


def write_rows(rows: list[dict]) -> None:
  """Replaces slices.jsonl, all of it or nothing."""
  whole = ROWS.with_suffix(".part")
  whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
  whole.replace(ROWS)


def try_slice(name: str, file: pathlib.Path, slice_: str, limit: float) -> dict:
  """A line of slices.jsonl, made where it is not there yet."""
  row = {"model": name, "topology": slice_}
  known = [other for other in read_rows() if other | row == other]
  if known:
    return known[-1]
  for moments in MOMENTS:
    settings = {"optim.moments_dtype": moments}
    result = compile_step(file, slice_, settings, limit, "--search")
    if result.get("fits", True):  # or an error
      break
  row |= result
  write_rows([*read_rows(), row])
  return row


def try_slices(name: str, file: pathlib.Path, chip: str, limit: float) -> None:
  """Tries ever larger slices, until a step fits, or takes too long."""
  for shape in SHAPES[chip]:
    row = try_slice(name, file, f"{chip}:{shape}", limit)
    print(json.dumps(row), flush=True)
    if row.get("fits") or row.get("late"):
      return


def compile_again(models: pathlib.Path, chip: str, only: str, limit: float):
  """Compiles a chip's layouts that fit; what comes out replaces their lines."""
  for row in filter(lambda row: row.get("fits"), read_rows()):
    if not row["topology"].startswith(f"{chip}:") or only not in row["model"]:
      continue
    file = models / f"{row['model']}.json"
    result = compile_step(file, row["topology"], row["settings"], limit)
    new = {key: row[key] for key in ("model", "topology", "settings")} | result
    print(json.dumps(new), flush=True)
    if "fits" in result:  # or an error: the line stays
      write_rows([new if other == row else other for other in read_rows()])


def _range(row: dict, part: str) -> str:
  """The roofline's seconds, to those of XLA's cycles where it has them."""
  words, most = f"{row['seconds'][part]:.3g}", row["xla_seconds"][part]
  return words if most is None else f"{words} to {most:.3g}"


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
    gib, seconds, mfu = row["gib"], "", ""
    if row.get("xla_seconds"):  # else a roofline of other programs, long ago
      seconds = f"{_range(row, 'rollout')} + {_range(row, 'update')}"
      mfu = f"{row['mfu']:.1%}"
    lines.append(
      f"| {row['model']} | {row['topology']} | {gib['rollout']}, "
      f"{gib['update']} | {seconds} | {mfu} | `{words}` |"
    )
  return "\n".join(lines)


def main() -> None:
  """Runs the program."""
  flags = argparse.ArgumentParser(description=__doc__)
  models = HERE.parent / "tests" / "data" / "model_configs"
  flags.add_argument("--models", type=pathlib.Path, default=models)
  flags.add_argument("--chips", default=",".join(SHAPES))
  flags.add_argument("--only", default="")
  flags.add_argument("--limit", type=float, default=86400.0)
  flags.add_argument("--again", action="store_true")
  flags.add_argument("--table", action="store_true")
  options = flags.parse_args()
  if options.table:
    print(table())
    return
  for chip in options.chips.split(","):
    if options.again:
      compile_again(options.models, chip, options.only, options.limit)
      continue
    for file in sorted(options.models.glob("*.json")):
      if options.only in file.stem:
        try_slices(file.stem, file, chip, options.limit)


if __name__ == "__main__":
  main()
