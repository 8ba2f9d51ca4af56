"""A training run as a model directory that transformers and vLLM read.

    python -m grpojax.export RUN --out DIR [--step N]
                             [--dtype bfloat16|float32] [--adapter]

RUN is the run directory of a training run, finished or not. DIR gets the
configuration, the tokenizer with its chat template, the generation
configuration and the weights (safetensors, in files of at most 5 GB) of the
newest checkpoint, or of step N. The weights are stored as they were trained
(float32) unless --dtype says otherwise. Where the checkpoints are gone, the
weights are those of the finished run's model/.

A LoRA run is written merged into its base model; with --adapter it is written
as the peft library does, without the base model.
"""

import argparse
import pathlib
import sys

import jax

from grpojax import runs
from grpojax.models import hf, lora
from grpojax.runtime import command_line

DTYPES = ("bfloat16", "float32")


def _cpu() -> jax.Device:
  """The host: a model that was trained on many devices may not fit on one."""
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:  # JAX_PLATFORMS leaves it out
    return jax.local_devices()[0]


def export(
  run: pathlib.Path,
  out: pathlib.Path,
  step: int | None = None,
  dtype: str | None = None,
  adapter: bool = False,
) -> str:
  """Writes a run's model, or with `adapter` its adapters, into a new directory.

  Args:
    run: the run directory.
    out: the directory to make; nothing stands there until all is written.
    step: of the checkpoint; None is the newest, or a finished run's model/
      where there are no checkpoints.
    dtype: of the stored weights; None is as they were trained.
    adapter: write LoRA's adapters in PEFT's format instead of the model.

  Returns:
    What was written, in words.

  Raises:
    ValueError: no run, no such checkpoint, `out` exists, or `adapter` of a run
      without LoRA.
  """
  config = runs.read_config(run)
  source, rank = config.model.path, config.lora.rank
  if out.exists():
    raise ValueError(f"--out={out} exists already; choose another directory")
  if adapter and not rank:
    raise ValueError(f"--adapter: {run} was not trained with LoRA (lora.rank)")
  finished = (run / "model" / "config.json").is_file()
  if step is None and not (run / "checkpoints").is_dir() and finished:
    if adapter:
      raise ValueError(f"--adapter: {run} has no checkpoints, only its model")
    params = hf.load_params(run / "model")
    hf.save(out, params, run / "model", dtype=dtype)
    return f"the finished model of {run}"
  step, params = runs.trained(run, config, step, _cpu())
  what = f"step {step} of {run}"
  if adapter:
    lora.save_peft(out, params, source, config.lora.alpha, dtype=dtype)
    return f"the adapters of {what}"
  if rank:
    base = hf.load_params(source)
    params = lora.merge(base, params, config.lora.alpha / rank)
  hf.save(out, params, source, dtype=dtype)
  return what


def main(argv: list[str]) -> None:
  """Runs the program with `argv`, the words after its name."""
  parser = argparse.ArgumentParser(
    prog="python -m grpojax.export",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage=argparse.SUPPRESS,
    allow_abbrev=False,
  )
  parser.add_argument("run", type=pathlib.Path, help="a run directory")
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--step", type=int, help="default: the newest")
  parser.add_argument("--dtype", choices=DTYPES, help="default: as trained")
  parser.add_argument("--adapter", action="store_true", help="LoRA only")
  flags = parser.parse_args(argv)
  with command_line.usage_errors(), jax.default_device(_cpu()):
    what = export(**vars(flags))
  print(f"{what} -> {flags.out}/")


if __name__ == "__main__":
  main(sys.argv[1:])
