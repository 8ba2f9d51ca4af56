"""Scripts, manifests and documented commands of launch/."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from run_helpers import ROOT

from grpojax import train
from grpojax.runtime.cli import command_line
from grpojax.training.config import SETTINGS, from_config

LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
SCRIPTS += [ROOT / ".ci/run", ROOT / ".ci/versions"]
SKYPILOT = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
JOBSET = yaml.safe_load((LAUNCH / "gke" / "jobset.yaml").read_text())


def lint(stand_ins, program, *arguments, **options):
  if not shutil.which(program):
    pytest.skip(f"{program} is not installed (.ci/run installs it)")
  done = stand_ins.run(program, *arguments, **options)
  assert done.returncode == 0, done.stdout


def check_training(arguments, monkeypatch):
  """Checks the settings of a train command line, without loading the model."""
  monkeypatch.chdir(ROOT)
  config, _ = command_line.parse(arguments, train.FLAGS, SETTINGS)
  from_config(config)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(stand_ins, script):
  text = script.read_text()
  assert text.startswith("#!/usr/bin/env bash\n")
  assert "\nset -euo pipefail\n" in text and "eval " not in text
  if script.suffix != ".sbatch":
    assert script.stat().st_mode & 0o111, "not executable"
  lint(stand_ins, "shellcheck", "--exclude=SC1091", script)


def test_other_shell_code_passes_linters(stand_ins):
  for part in ("setup", "run"):
    lint(stand_ins, "shellcheck", "--shell=bash", "-", input=SKYPILOT[part])
  lint(stand_ins, "hadolint", LAUNCH / "Dockerfile")


def test_the_dockerfile_copies_existing_files_but_no_secrets():
  text = (LAUNCH / "Dockerfile").read_text()
  *copied, everything = re.findall(r"^COPY (.+) \S+$", text, re.M)
  assert all((ROOT / name).exists() for name in " ".join(copied).split())
  assert everything == "."  # files of the user
  ignored = (LAUNCH / "Dockerfile.dockerignore").read_text().splitlines()
  assert {".*", "runs", "**/.env*"} <= set(ignored)
  assert re.search(r"^ENTRYPOINT \[", text, re.M)  # so that SIGTERM arrives


@pytest.mark.long  # it downloads
def test_the_dockerfiles_installation(stand_ins, tmp_path):
  """In a virtual environment with the copied files; CUDA is only resolved."""
  text = (LAUNCH / "Dockerfile").read_text()
  copied = re.findall(r"^COPY (.+) \S+$", text, re.M)[:-1]
  for name in " ".join(copied).split():
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    copy(ROOT / name, tmp_path / name)
  (line,) = re.findall(r"^RUN (pip .*)$", text, re.M)
  bin_ = tmp_path / "venv" / "bin"
  subprocess.run([sys.executable, "-m", "venv", bin_.parent], check=True)
  path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
  for accelerator, more in (("tpu", ""), ("cuda", " --dry-run")):
    env = os.environ | {"PATH": path, "ACCELERATOR": accelerator}
    env.pop("PYTHONPATH", None)
    subprocess.run(
      ["bash", "-c", line + more], env=env, cwd=tmp_path, check=True
    )
  (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)
  done = stand_ins.run(*json.loads(entry), "--help", env=env, cwd=tmp_path)
  assert "--config.steps" in done.stdout


@pytest.mark.slow
def test_the_jobset_has_the_published_schema():
  """JobSet's and Kubernetes' OpenAPI, as models published by Kubeflow."""
  models = pytest.importorskip(
    "kubeflow_trainer_api.models", reason=".ci/run installs it"
  )
  parsed = models.JobsetV1alpha2JobSet.from_dict(JOBSET)  # required, types
  assert parsed.to_dict() == JOBSET  # no unknown fields
  for rule in JOBSET["spec"]["failurePolicy"]["rules"]:
    fields = models.JobsetV1alpha2FailurePolicyRule.model_fields
    assert rule["action"] in re.findall(r"\w+", fields["action"].description)


def test_the_jobset_uses_all_chips_and_restarts(monkeypatch):
  """Interruptions restart it without limit; failures are counted."""
  spec = JOBSET["spec"]
  job = spec["replicatedJobs"][0]["template"]["spec"]
  pod = job["template"]["spec"]
  (container,) = pod["containers"]
  _, codes = job["podFailurePolicy"]["rules"]
  assert codes["onExitCodes"]["values"] == [75]
  assert codes["onExitCodes"]["containerName"] == container["name"]
  (rule,) = spec["failurePolicy"]["rules"]
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
  assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
  assert job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
  assert pod["terminationGracePeriodSeconds"] > 30
  x, y = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
  chips = container["resources"]["limits"]["google.com/tpu"]
  assert job["parallelism"] == job["completions"]
  assert job["parallelism"] * chips == int(x) * int(y)
  arguments = container["args"]
  assert any(word.startswith("--run_dir=gs://BUCKET/") for word in arguments)
  check_training(arguments, monkeypatch)


def test_skypilots_command_on_two_nodes(stand_ins, tmp_path, monkeypatch):
  """Runs the shell of `run` like SkyPilot on the second of two nodes."""
  recovery = SKYPILOT["resources"]["job_recovery"]
  assert recovery["recover_on_exit_codes"] == [75]
  assert not any(SKYPILOT["secrets"].values())
  python = tmp_path / "grpojax-venv" / "bin"
  python.mkdir(parents=True)
  stand_ins.program(python, "python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
  env = stand_ins.environment(
    tmp_path,
    HOME=str(tmp_path),
    RUN="my run",
    ARGUMENTS="--config=configs/gsm8k.py --config.steps=3",
    SKYPILOT_NODE_IPS="10.0.0.7\n10.0.0.8",
    SKYPILOT_NUM_NODES="2",
    SKYPILOT_NODE_RANK="1",
  )
  done = stand_ins.run("bash", "-c", SKYPILOT["run"], env=env)
  assert done.stdout.splitlines() == [
    *("-u", "-m", "grpojax.train", "--coordinator=10.0.0.7:8476"),
    *("--num_processes=2", "--process_id=1", "--run_dir=/bucket/my run"),
    *("--config=configs/gsm8k.py", "--config.steps=3"),
  ]
  check_training(done.stdout.splitlines()[3:], monkeypatch)


def test_names_of_slices_agree_with_the_readme(stand_ins):
  text = (LAUNCH / "README.md").read_text()
  rows = re.findall(
    r"^\| (\w+):([\dx]+) \| (\d+) \| (\d+) \| (.+) \| (\S+), (\S+), (\d+) \|$",
    text,
    re.M,
  )
  assert len(rows) == 7
  for family, sides, chips, hosts, types, _, topology, a_host in rows:
    assert math.prod(map(int, sides.split("x"))) == int(chips)
    assert int(hosts) * int(a_host) == int(chips) and topology == sides
    for name in (f"{family}:{sides}", *re.findall(r"v\w+-\d+", types)):
      done = stand_ins.run(
        *("bash", LAUNCH / "tpu_vm.sh", "create", "x", "--zone=z"),
        *("--dry-run", f"--type={name}"),
      )
      if "GKE alone" in types:
        assert "served by GKE" in done.stderr
      else:
        accelerator = re.findall(r"v\w+-\d+", types)[-1]
        assert f"--accelerator-type={accelerator} " in done.stdout


def readme_commands():
  """Returns the launchers' command lines in launch/README.md."""
  text = (LAUNCH / "README.md").read_text()
  block = re.search(r"## Launchers\n.*?```bash\n(.*?)```", text, re.S)
  return block[1].replace("\\\n", "").splitlines()


@pytest.mark.slow
def test_jaxlib_knows_the_flags_and_user_flags_come_last(stand_ins, tmp_path):
  user = "--xla_cpu_enable_fast_math=false"
  code = "import os, jax; jax.devices(); print(os.environ['XLA_FLAGS'])"
  done = stand_ins.run(
    *(LAUNCH / "xla_flags.sh", sys.executable, "-c", code),
    env=stand_ins.environment(tmp_path, XLA_FLAGS=user, JAX_PLATFORMS="cpu"),
  )
  flags = done.stdout.split()
  assert len(flags) > 1 and flags[-1] == user, done.stderr


@pytest.mark.parametrize(
  "line", [x for x in readme_commands() if "grpojax.train" in x or ".s" in x]
)
def test_commands_of_the_readme_are_valid(stand_ins, line, monkeypatch):
  words = shlex.split(line, comments=True)
  check_training([w for w in words if w.startswith("--config")], monkeypatch)
  if "tpu_vm.sh" in line:
    words.insert(3, "--dry-run")
    done = stand_ins.run("bash", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
  for word in words:
    if word.startswith("launch/"):
      assert (ROOT / word).is_file()
