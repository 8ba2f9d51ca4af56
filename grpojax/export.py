"""Exports the model of a training run for transformers and vLLM.

    python -m grpojax.export RUN --out=DIR [--step=N]
                             [--dtype=bfloat16|float32] [--adapter]

RUN (or --model=RUN) is the directory of a training run, finished or not, or a
model that training can start from. DIR gets the configuration, the tokenizer
with its chat template, the generation configuration and the weights
(safetensors, in files of at most 5 GB) of the newest checkpoint or of step N,
in the trained data type unless --dtype is given. A finished run without
checkpoints exports its model/. LoRA adapters are merged into the base model;
--adapter writes the adapter alone, in the format of the peft library.
"""

import pathlib
import sys

import jax

from grpojax.models.config import DTYPES
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk
from grpojax.training.run.run_models import export, host_device

FLAGS = {
  "model": setting("", "run directory, its gs:// URL, or a model to copy"),
  "out": setting("", "directory to write"),
  "step": setting(
    -1, "step of the checkpoint; -1 = the newest", within="[-1, inf)"
  ),
  "best": setting(False, "use the checkpoint of highest held-out accuracy"),
  "dtype": setting("", 'data type of the weights; "" = as trained', DTYPES),
  "ignore_keys": setting(
    (), "unknown keys of config.json to ignore, if a model is copied"
  ),
  "adapter": setting(False, "write only the adapter of a LoRA run"),
}
SETTINGS = None


def main(argv: list[str]) -> None:
  """Runs the program with command line arguments `argv`."""
  with command_line.usage_errors():
    _, flags = command_line.parse(
      argv, FLAGS, SETTINGS, __doc__, positional="model"
    )
    for name, example in {"model": "RUN", "out": "--out=DIR"}.items():
      if not flags[name]:
        raise ValueError(f"give {example}: {FLAGS[name].text}")
  with (
    command_line.usage_errors(),
    disk.errors(),
    jax.default_device(host_device()),
  ):
    written = export(
      flags.model,
      pathlib.Path(flags.out),
      None if flags.step < 0 else flags.step,
      flags.dtype or None,
      flags.adapter,
      flags.best,
      flags.ignore_keys,
    )
  print(f"{written} -> {flags.out}/")


if __name__ == "__main__":
  main(sys.argv[1:])
