"""Checks an installation on its devices: run it first on a new chip.

    python -m grpojax.selfcheck [--out=DIR] [--skip=resume,step]

It prints a Markdown table to paste into an issue, and writes it to
DIR/selfcheck.md. On several hosts run the same command on all of them, with
--shared=DIR for `resume`; the first host prints the table. The checks take
about ten minutes on an accelerator, mostly compilation:

resume      a bfloat16 run of the default job, killed and resumed, ends in the
            same model, bit for bit, as an uninterrupted run (the check sets
            --xla_gpu_deterministic_ops, which GPUs need); the trainer's
            log-probabilities are close to the rollout's
parity      log-probabilities of a bundled model are close to values recorded on
            a CPU
attention   attention in blocks and in kernels has the values and gradients of
            plain attention
step        seconds, memory and share of peak FLOPs of a step with 0.5 billion
            random weights, beside the estimates of `grpojax.compile` (on CPUs a
            small step without estimates)

The exit code is 1 if a check failed; the table marks the failed rows.
"""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from grpojax.aot import chips, programs
from grpojax.aot.report import GIB, compile_part
from grpojax.benchmarks import configured
from grpojax.core.logprobs import token_logprobs
from grpojax.core.random_keys import seed_key
from grpojax.models import huggingface as hf
from grpojax.models.attention import Visibility, two_part_attention
from grpojax.models.block_attention import block_attention
from grpojax.models.cache import KeysValues, PromptKeysValues
from grpojax.models.kernel_attention import kernel_attention
from grpojax.runtime.cli import command_line
from grpojax.runtime.cli.settings import setting
from grpojax.runtime.files import disk, records, run_storage
from grpojax.runtime.files.run_lock import LOCK
from grpojax.runtime.processes import distributed
from grpojax.training.config import default_config, from_config
from grpojax.training.files import run_directory
from grpojax.training.report.progress import MISMATCH
from grpojax.training.settings.run import TrainSettings

FIGURES = pathlib.Path(__file__).parent / "assets" / "cpu_logprobs.json"
MODEL = "arithmetic-instruct"
RUNS = "whole", "killed"  # directories of `check_resume`
# Largest mean differences of log-probabilities, in nats per token
FLOAT32, BFLOAT16 = 1e-4, 0.1  # from a CPU, by data type
# On GPUs the order of sums and the choice of kernels differ between runs.
SAME_BITS = "--xla_gpu_deterministic_ops=true"


class Row(NamedTuple):
  """Row of the table."""

  name: str
  seen: str  # measured value
  expected: str = ""  # "" if unknown
  ok: bool = True


def at_most(name: str, seen: float, most: int | float, unit: str = "") -> Row:
  """Returns a row that compares a number with an upper bound; nan fails."""
  return Row(name, f"{seen:.2g}{unit}", f"at most {most:g}{unit}", seen <= most)


def _train(
  run: epath.Path,
  log: pathlib.Path,
  kill_at: int | None = None,
  words: Sequence[str] = (),
) -> None:
  """Trains a small default job for 8 steps; kills it after step `kill_at`."""
  command = [sys.executable, "-m", "grpojax.train", f"--run_dir={run}", *words]
  settings = "steps=8 checkpoint.every=1 model.dtype=bfloat16 batch_size=8 "
  settings += "eval.num_prompts=8 group_size=4 diagnostics.every=0"
  command += [f"--config.{word}" for word in settings.split()]
  flags = f"{os.environ.get('XLA_FLAGS', '')} {SAME_BITS}"

  def reached() -> bool:
    rows = records.read_jsonl(run / run_directory.METRICS)
    return sum("reward_mean" in row for row in rows) >= kill_at

  with open(log, "ab") as file:
    process = subprocess.Popen(
      command, stdout=file, stderr=file, env=os.environ | {"XLA_FLAGS": flags}
    )
    try:
      while process.poll() is None:
        time.sleep(0.1)
        if kill_at and reached():
          return
    finally:
      process.kill()
      process.wait()
  if kill_at and reached():  # the kill on another host ended it
    return
  if process.returncode:
    text = log.read_text(errors="replace")
    lines = re.findall(r"^(?:error|\S+Error): .+", text, re.MULTILINE)
    raise RuntimeError("a run failed: " + (lines or [text[-600:]])[-1])


def check_resume(shared: str = "", words: Sequence[str] = ()) -> Iterator[Row]:
  """Compares a run that was killed and resumed with an uninterrupted run.

  `shared` is an empty directory shared by all hosts, or "" for a temporary one;
  `words` are additional arguments of the runs.
  """
  with tempfile.TemporaryDirectory(prefix="grpojax-selfcheck-") as scratch:
    log = pathlib.Path(scratch, "log")
    whole, killed = (epath.Path(shared or scratch) / x for x in RUNS)
    _train(whole, log, words=words)
    _train(killed, log, 2, words)
    if run_storage.is_url(killed):
      (killed / LOCK).unlink(missing_ok=True)
    _train(killed, log, words=words)
    weights = [x / "model" / "model.safetensors" for x in (whole, killed)]
    same = weights[0].read_bytes() == weights[1].read_bytes()
    rows = records.read_jsonl(whole / run_directory.METRICS)
  seen = "the same model" if same else "another model"
  yield Row("killed and resumed", seen, "the same model, bit for bit", same)
  name = "rollout_mismatch_mean"
  mean = max(row[name] for row in rows if name in row)
  yield at_most("trainer against rollout", mean, MISMATCH, " nats per token")


def logprobs(dtype: Any) -> np.ndarray:
  """Returns log-probabilities [B, G, T] of random ids under `MODEL`."""
  lm, params = hf.load(MODEL, dtype=dtype)
  rng = np.random.default_rng(0)
  prompts = rng.integers(3, 13, (4, 8))
  ids = rng.integers(3, 13, (4, 2, 32))
  with jax.default_matmul_precision("highest"):
    run = jax.jit(functools.partial(token_logprobs, lm))
    values, _ = run(params, prompts, prompts > 0, ids)
  return np.asarray(values)


def check_parity() -> Iterator[Row]:
  """Compares log-probabilities with values recorded on a CPU."""
  figures = np.array(json.loads(FIGURES.read_text()))
  for dtype, most in ((jnp.float32, FLOAT32), (jnp.bfloat16, BFLOAT16)):
    distance = np.abs(logprobs(dtype) - figures).mean()
    name = f"log-probabilities in {jnp.dtype(dtype).name} against a CPU"
    yield at_most(name, float(distance), most, " nats per token")


def check_attention() -> Iterator[Row]:
  """Compares attention in blocks and in kernels with plain attention."""
  # Prompts, samples, KV heads, queries per head, tokens, head size, prompt size
  b, g, k, r, s, e, p = 1, 2, 2, 2, 512, 64, 128
  shapes = [(b, g, k, r, s, e), *[(b, g, k, s, e)] * 2, *[(b, k, p, e)] * 2]
  keys = jax.random.split(seed_key(0), 6)
  draws = [jax.random.normal(*x) for x in zip(keys, shapes, strict=False)]
  weights = jax.random.normal(keys[5], shapes[0])
  mask = jnp.arange(p)[None] < p - 28
  positions = jnp.broadcast_to(jnp.arange(s), (b, g, s))
  seen = Visibility(positions, None, mask, False)

  def plain(q, row, prompt, seen):
    causal = jnp.tril(jnp.ones((s, s), bool))
    return two_part_attention(q, row, causal, prompt, seen.prompt_mask)

  def value_and_gradients(attention, dtype):
    def loss(q, *x):
      row = KeysValues(*x[:2])
      prompt = PromptKeysValues(*x[2:])
      out = attention(q, row, prompt, seen).astype(jnp.float32)
      return jnp.sum(weights * out), out

    with jax.default_matmul_precision("highest"):
      run = jax.jit(jax.grad(loss, range(5), has_aux=True))
      return jax.tree.leaves(run(*[x.astype(dtype) for x in draws]))

  expected = value_and_gradients(plain, jnp.float32)
  kernels = functools.partial(kernel_attention, platform=jax.default_backend())
  for name, attention in (("in blocks", block_attention), ("kernels", kernels)):
    for dtype, most in ((jnp.float32, 1e-4), (jnp.bfloat16, 0.05)):
      results = value_and_gradients(attention, dtype)
      errors = [
        float(jnp.abs(x - y).max() / jnp.abs(y).max())
        for x, y in zip(results, expected, strict=True)
      ]
      row = f"attention {name}, {jnp.dtype(dtype).name}"
      yield at_most(row, max(errors), most, " of the largest value")


def step_settings(directory: pathlib.Path, devices: int) -> TrainSettings:
  """Returns settings of a step; writes its model's config.json to `directory`.

  On accelerators: a Llama of Qwen2.5-0.5B's sizes, 8 prompts x 16 samples per
  device, 512 tokens per prompt and 1,024 per completion.
  """
  small = jax.default_backend() == "cpu"
  sizes = dict(vocab_size=151_936, width=896, layers=24, heads=14, mlp=4864)
  if small:
    sizes = dict(vocab_size=512, width=128, layers=2, heads=2, mlp=256)
  hf.write_config(directory, pad_id=0, eos_id=1, kv_heads=2, **sizes)
  config = default_config().unlock()
  config.model.path = str(directory / "config.json")
  config.model.dtype = "bfloat16"
  config.model.remat = "full"
  config.mesh.data = 1
  config.mesh.fsdp = -1
  config.batch_size = 8 * devices
  config.group_size = 2 if small else 16
  config.optim.micro_batches = 2 if small else 16
  config.data.max_prompt_length = 32 if small else 512
  config.sampling.max_new_tokens = 64 if small else 1024
  config.diagnostics.every = 0
  return from_config(config.lock())


def check_step() -> Iterator[Row]:
  """Measures times and memory of a step, beside their estimates."""
  with tempfile.TemporaryDirectory(prefix="grpojax-selfcheck-") as scratch:
    settings = step_settings(pathlib.Path(scratch), jax.device_count())
    run = configured.open_run(settings)
    report = configured.measure(run, steps=3, warmup=1)
    chip = chips.of_kind(jax.devices()[0].device_kind)
    estimates = {}
    if chip:
      trips = settings.sampling.max_new_tokens - 1
      for name in ("rollout", "update"):
        lowered = programs.lower(run, name)
        estimates[name] = compile_part(lowered, chip, trips)
  for name in ("rollout", "update"):
    expected = ""
    if part := estimates.get(name):
      to = f" to {part.xla_seconds:.3g}" if part.xla_seconds else ""
      expected = f"{part.seconds:.3g}{to} s, estimated"
    seconds = report["seconds"][name]["median"]
    yield Row(f"{name} of a step", f"{seconds:.3g} s", expected)
  rates = report["tokens_per_second"]
  yield Row("sampled tokens per second", f"{rates['rollout']:.4g}")
  if chip:
    share = report["flops_of_peak"]["step"]
    yield Row("model FLOPs utilization", f"{share:.1%}")
  if memory := report["peak_memory_bytes"]:
    most = max((p.memory_bytes for p in estimates.values()), default=0)
    expected = f"{most / GIB:.2f} GiB per program" if most else ""
    yield Row("peak memory of a device", f"{memory / GIB:.2f} GiB", expected)
  yield Row("compiling the step", f"{report['compile_seconds']:.0f} s")


# `resume` comes first: only one process at a time can use a TPU.
CHECKS = {
  "resume": check_resume,
  "parity": check_parity,
  "attention": check_attention,
  "step": check_step,
}

FLAGS = {
  "out": setting(".", "directory of selfcheck.md"),
  "skip": setting((), f"checks to skip, of {', '.join(CHECKS)}"),
  "shared": setting(
    "", "shared empty directory or gs:// URL, for `resume` on several hosts"
  ),
  **distributed.FLAGS,
}
SETTINGS = None


def markdown(rows: list[Row]) -> str:
  """Formats the table, under a line with devices and versions."""
  about = f"jax {jax.__version__}, Python {sys.version.split()[0]}"
  try:
    devices = jax.devices()
    kind = f"{devices[0].device_kind} ({devices[0].platform})"
    about = f"{len(devices)} {kind}, {about}"
  except RuntimeError:  # the rows have the reason
    about = f"no device, {about}"
  lines = [about, "", "| check | seen | expected | |", "|---|---|---|---|"]
  for row in rows:
    mark = "" if row.ok else "**wrong**"
    lines.append(f"| {row.name} | {row.seen} | {row.expected} | {mark} |")
  return "\n".join(lines) + "\n"


def _run(names: Sequence[str], rows: list[Row], **options: Any) -> None:
  """Runs checks and adds their rows; an exception becomes a row."""
  for name in names:
    print(f"checking {name} ...", file=sys.stderr, flush=True)
    try:
      for row in CHECKS[name](**options):
        rows.append(row)
    except Exception as error:  # later checks still run
      text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
      rows.append(Row(name, text.replace("|", "/"), ok=False))
      if distributed.several():  # otherwise other processes wait for this one
        raise


def _parse(argv: list[str]) -> tuple[Any, list[str]]:
  _, flags = command_line.parse(argv, FLAGS, SETTINGS, __doc__)
  disk.check_file(pathlib.Path(flags.out) / "selfcheck.md", "--out")
  if unknown := [name for name in flags.skip if name not in CHECKS]:
    raise ValueError(f"--skip={unknown[0]}: use {', '.join(CHECKS)}")
  if set(flags.skip) == set(CHECKS):
    raise ValueError("--skip leaves no check to run: keep at least one")
  names = [name for name in CHECKS if name not in flags.skip]
  shared = flags.shared
  if "resume" not in names:
    return flags, names
  if flags.coordinator and not shared:
    raise ValueError(
      "resume needs --shared=DIR, an empty directory shared by all processes: "
      "give it, or --skip=resume"
    )
  if shared and any((epath.Path(shared) / x).exists() for x in RUNS):
    raise ValueError(
      f"--shared={shared} contains {' or '.join(RUNS)} of an earlier check: "
      "remove them, or give another directory"
    )
  return flags, names


def main(argv: list[str]) -> int:
  """Runs the program with command line arguments `argv`."""
  with command_line.usage_errors():
    flags, names = _parse(argv)
  # On SystemExit, `_train` kills the run that it has started.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  processes = {name: getattr(flags, name) for name in distributed.FLAGS}
  rows: list[Row] = []
  prints = True
  try:
    if "resume" in names:
      words = [f"--{key}={value}" for key, value in processes.items() if value]
      _run(["resume"], rows, shared=flags.shared, words=words)
    with command_line.usage_errors(), distributed.joined(**processes):
      prints = distributed.is_main()
      _run([name for name in names if name != "resume"], rows)
      by_process = distributed.gather([list(row) for row in rows])
    for i, columns in enumerate(by_process[1:], 1):
      wrong = [row for row in (Row(*x) for x in columns) if not row.ok]
      rows += [x._replace(name=f"process {i}: {x.name}") for x in wrong]
  except BaseException:  # earlier rows are still written
    rows.append(Row("interrupted", "later checks did not run", ok=False))
    raise
  finally:
    if prints:
      text = markdown(rows)
      print(text, end="", flush=True)
      with command_line.usage_errors():
        records.write_text(pathlib.Path(flags.out) / "selfcheck.md", text)
  return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
