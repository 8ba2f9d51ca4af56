"""The program `compile`, on CPUs and for TPU slices and GPUs."""

import json
import re

import pytest
from run_helpers import ROOT, python

from grpojax import compile as program
from grpojax.aot import topology

SMALL = (
  "--config.batch_size=4 --config.group_size=4 --config.eval.batch_size=4 "
  "--config.sampling.max_new_tokens=8 --config.data.max_prompt_length=8 "
  "--config.optim.micro_batches=2"
).split()


def compile_step(tmp_path, *words):
  changes = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XLA_FLAGS": ""}
  program = ["-m", "grpojax.compile", *SMALL, "--out=out.json"]
  return python(*program, *words, cwd=tmp_path, **changes)


def report_of(
  tmp_path, topology, *words, parts=("rollout", "reference", "update")
):
  """Compiles a step; checks properties of every report."""
  done = compile_step(tmp_path, f"--topology={topology}", *words)
  assert done.returncode == 0, done.stderr
  assert "fits; a step takes about" in done.stdout
  report = json.loads((tmp_path / "out.json").read_text())
  assert report["fits"] is True and report["topology"] == topology
  assert tuple(report["parts"]) == parts
  for name, part in report["parts"].items():
    assert part["memory_bytes"] == sum(part["memory"].values())
    assert part["memory"]["parameters"] > 0
    left = report["device_memory_bytes"] - part["memory_bytes"]
    assert part["left_bytes"] == left
    assert part["compile_seconds"] > 0
    # Only programs that sample have a token loop.
    assert (part["token_loop_seconds"] > 0) == (name in ("rollout", "step"))
  seconds = sum(part["seconds"] for part in report["parts"].values())
  assert report["step_seconds"] == pytest.approx(seconds)
  return report


@pytest.mark.slow
def test_a_step_on_two_devices(tmp_path):
  words = ["--config.mesh.fsdp=2", "--config.loss.beta=0.1"]
  report = report_of(tmp_path, "cpu:2", *words)
  update = report["parts"]["update"]
  # Parameters, reference and Adam's moments are float32 and sharded in two,
  # except norms.
  memory = update["memory"]
  assert memory["reference"] == memory["parameters"] == memory["gradients"]
  assert 2 * memory["parameters"] <= memory["optimizer"]
  assert memory["optimizer"] <= 2 * memory["parameters"] + 100
  assert update["collective_bytes"] > 0
  # Sampling devices exchange only whether all samples are finished.
  sent = report["parts"]["rollout"]["token_loop_collective_bytes"]
  assert 0 < sent <= 100


@pytest.mark.long
def test_a_step_on_a_slice(tmp_path):
  pytest.importorskip("libtpu")
  config = ROOT / "tests/data/model_configs/Qwen2.5-0.5B-Instruct.json"
  small = json.loads(config.read_text()) | {"num_hidden_layers": 2}
  (tmp_path / "model.json").write_text(json.dumps(small))
  settings = "model.path=model.json mesh.fsdp=4 model.dtype=bfloat16".split()
  words = [f"--config.{setting}" for setting in settings]
  report = report_of(tmp_path, "v5e:2x2", *words)
  kinds = report["parts"]["update"]["collectives"]
  assert "reduce-scatter" in kinds and "all-gather" in kinds


@pytest.mark.slow
def test_the_fused_step(tmp_path):
  words = ["--config.reward.on_device=True"]
  words += ["--config.data.max_prompt_length=32"]
  report_of(tmp_path, "cpu:2", *words, parts=("step",))


def test_names_of_machines():
  sizes = {"v5e:2x4": 8, "tpu7x:2x2x4": 16, "cpu:8": 8, "h100:8": 8}
  for name, size in (sizes | {"v5e:4x4*2": 32}).items():
    assert topology.parse(name) == (name.partition(":")[0], size)
  large = {"h100:16": "a node has at most 8"}
  large |= {"v5e:2x2*65": "at most 64 slices"}
  for name, text in (large | {"v5e:1000x1000": "a slice has at most"}).items():
    with pytest.raises(ValueError, match=text):
      topology.parse(name)
  wrong = "v5e v5e:2x2*0 h100:4*2 v5e:8 v5p:2x2 h100:2x4 cpu:0 v5e:0x2"
  for name in ["", *wrong.split()]:
    with pytest.raises(ValueError, match=re.escape(f"={name}: give a chip")):
      topology.parse(name)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_an_error(tmp_path):
  done = compile_step(tmp_path, "--topology=cpu:3")
  assert done.returncode == 1 and not (tmp_path / "out.json").exists()
  *_, line = done.stderr.splitlines()  # libraries may warn first
  assert line.startswith("error: ")
  assert "cannot be split evenly over 3 devices" in line
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize("fits, code", [(True, 0), (False, 3)])
def test_exit_codes_of_fitting_and_too_large_steps(
  monkeypatch, capsys, fits, code
):
  results = {
    "report.report": {"fits": fits},
    "report.lines": ["said"],
    "topology.machine": topology.Machine("cpu:2", None, []),
    "setup.make_mesh": None,
    "batches.check_mesh": None,
    "programs.open_run": None,
  }
  for name, value in results.items():
    target = f"grpojax.compile.{name}"
    monkeypatch.setattr(target, lambda *_, value=value: value)
  assert program.main(["--topology=cpu:2"]) == code
  assert capsys.readouterr().out == "said\n"


@pytest.mark.slow
def test_a_step_on_a_gpu(tmp_path):
  pytest.importorskip("jax_plugins.xla_cuda13")
  report = report_of(tmp_path, "h100:2")
  assert report["device_memory_bytes"] > 75 * 2**30 > report["pool_bytes"]
  assert "xla_step_seconds" not in report
