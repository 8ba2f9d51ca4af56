"""Compiles a training step for accelerators, without the accelerators.

    python -m grpojax.compile --config=configs/x.py --topology=v5e:2x2
                              [--out=FILE.json] [--config.key=value ...]

It compiles the programs that `python -m grpojax.train` would run with this
config on the given slice (rollout, reference pass, update; with
reward.on_device a single program), and prints the memory, FLOPs, HBM traffic,
bytes between chips and estimated seconds of each. Weights and data are not
needed: it reads only the config.json of model.path (a directory, ORG/NAME of
the Hub, or the file itself). TPUs need libtpu (pip install 'jax[tpu]'), GPUs
JAX's CUDA plugin (pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt, in
JAX's version).

Slices: v5e:2x2, v6e:4x4, v4:2x2x1, v5p:2x2x2, tpu7x:2x2x1, ...; v5e:4x4*2 is
two slices and a network whose bytes are counted ("between slices") but whose
time is not. h100:8, h200:1, a100:4 are GPUs of one node; cpu:8 is eight CPU
devices with made-up peaks, for trials.

Exit codes: 0, it fits; 3, it does not fit; 1, compilation failed (see stderr).

Memory is exact: XLA's allocation. Seconds are a roofline for completions of
full length (sampling.max_new_tokens), and on TPUs also XLA's own cycle count;
expect a time between the two (grpojax/aot/roofline.py). Rewards, evaluations
and saving are not included.
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
      raise ValueError(f"mesh.sampling_devices = {count}: unsupported, use 0")
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
