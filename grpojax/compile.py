"""Compiles a training step for machines that need not be there.

    python -m grpojax.compile --config=configs/x.py --topology=v5e:2x2
                              [--out=FILE.json] [--config.key=value ...]

It compiles the programs that `python -m grpojax.train` would run with this
config on the named slice (rollout, reference pass, update; one program with
reward.on_device) from shapes alone, and prints the memory, operations, HBM
traffic, bytes between chips and estimated seconds of each. No accelerator,
weights or data are needed: only the config.json of model.path is read (a
directory, ORG/NAME of the Hub, or the file itself). TPUs need libtpu (pip
install 'jax[tpu]'), GPUs JAX's CUDA plugin (pip install --no-deps
jax-cuda13-plugin jax-cuda13-pjrt, in JAX's version).

Slices: v5e:2x2, v6e:4x4, v4:2x2x1, v5p:2x2x2, tpu7x:2x2x1, ...; v5e:4x4*2 are
two of them, joined by a network whose bytes are counted ("between slices") and
whose time is not. h100:8, h200:1, a100:4 are GPUs of one node; cpu:8 is eight
CPU devices with made-up peaks, for trials.

Exit codes: 0, it fits; 3, it does not fit; 1, it was not compiled (see stderr).

Memory is what XLA allocates, exactly. Seconds are a roofline for completions of
full length (sampling.max_new_tokens), and on TPU what XLA's own cycles come to;
the truth lies between the two (grpojax/aot/roofline.py). Rewards, evaluations
and saving are not in them.
"""

import functools
import pathlib
import sys

from grpojax.aot import programs, report, topology
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records
from grpojax.training.config import SETTINGS, from_config, parse_job
from grpojax.training.run import setup
from grpojax.training.settings import batches as batches_lib

DOES_NOT_FIT = 3
"""Exit code; 1 is any error's."""

FLAGS = {
  "topology": setting(
    "", "the machine: v5e:2x2, v5p:2x2x2, v5e:4x4*2, ..., h100:8 or cpu:8"
  ),
  "out": setting("", 'also write the result to this JSON file; "" = none'),
}


def main(argv: list[str]) -> int:
  """Runs the program with `argv`, the words after its name."""
  with command_line.usage_errors():
    config, flags = parse_job(argv, FLAGS, SETTINGS, __doc__)
    out = pathlib.Path(flags.out) if flags.out else None
    if out:
      disk.check_file(out, "--out")  # before hours of compiling
    settings = from_config(config)
    machine = topology.machine(flags.topology)
    if count := settings.mesh.sampling_devices:
      text = "is not compiled for: set it to 0"
      raise ValueError(f"mesh.sampling_devices = {count}: {text}")
    mesh = setup.make_mesh(settings, machine.devices)
    batches_lib.check_mesh(settings, mesh)
    run = programs.open_run(settings, mesh)
  say = functools.partial(print, file=sys.stderr, flush=True)
  result = report.report(run, machine, say)
  print("\n".join(report.lines(result)), flush=True)
  if out:
    with command_line.usage_errors():
      records.write_json(out, result)
  return 0 if result["fits"] else DOES_NOT_FIT


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
