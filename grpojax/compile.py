"""Compiles a training step for accelerators, without the accelerators.

    python -m grpojax.compile --config=configs/x.py --topology=v5e:2x2
                              [--out=FILE.json] [--config.key=value ...]

It compiles the programs that `python -m grpojax.train` would run with this
config on the given slice (rollout, reference pass, update; with
reward.on_device a single program), and prints the memory, FLOPs, HBM traffic,
bytes between chips and estimated seconds of each. Weights and data are not
needed: it reads only the config.json of model.path (a directory, ORG/NAME of
the Hub, or the file itself). To compile for TPUs, install libtpu (pip install
'jax[tpu]'); for GPUs, JAX's CUDA plugin in JAX's version (pip install --no-deps
jax-cuda13-plugin jax-cuda13-pjrt).

Slices: v5e:2x2, v6e:4x4, v4:2x2x1, v5p:2x2x2, tpu7x:2x2x1, ...; v5e:4x4*2 are
two slices, for which the table has the bytes sent "between slices" but not
their time. h100:8, h200:1, a100:4 are GPUs of one node; cpu:8 is eight CPU
devices with invented peak rates, for trials.

The exit code is 0 if the step fits into memory, 3 if not, 1 after an error.

Memory is exact, because it is XLA's allocation. Seconds are a roofline estimate
for completions of full length (sampling.max_new_tokens); TPUs also have XLA's
own estimate in cycles, and real times lie between the two
(grpojax/aot/roofline.py). Rewards, evaluations and saving are not included.
"""

import sys

from grpojax.aot import programs, report, topology
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records
from grpojax.training.config import SETTINGS, from_config, parse_job
from grpojax.training.run import setup
from grpojax.training.settings import batches

DOES_NOT_FIT = 3  # exit code; errors exit with 1

FLAGS = {
  "topology": setting(
    "", "machine: v5e:2x2, v5p:2x2x2, v5e:4x4*2, ..., h100:8 or cpu:8"
  ),
  "out": setting("", 'JSON file for the result; "" = none'),
}


def main(argv: list[str]) -> int:
  """Runs the program with command line arguments `argv`."""
  with command_line.usage_errors():
    config, flags = parse_job(argv, FLAGS, SETTINGS, __doc__)
    if flags.out:
      disk.check_file(flags.out, "--out")
    settings = from_config(config)
    machine = topology.machine(flags.topology)
    if count := settings.mesh.sampling_devices:
      raise ValueError(f"mesh.sampling_devices = {count}: use 0 to compile")
    mesh = setup.make_mesh(settings, machine.devices)
    batches.check_mesh(settings, mesh)
    run = programs.open_run(settings, mesh)
  result = report.report(run, machine)
  print("\n".join(report.lines(result)), flush=True)
  if flags.out:
    with command_line.usage_errors():
      records.write_json(flags.out, result)
  return 0 if result["fits"] else DOES_NOT_FIT


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
