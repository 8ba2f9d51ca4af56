"""The wheel of `pip wheel .` works without the checkout."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

pytest.importorskip("pip")

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = (
  "steps=1 batch_size=2 group_size=2 diagnostics.every=0 reward.workers=1 "
  "sampling.max_new_tokens=4 eval.num_prompts=2 eval.batch_size=2 log.trackers="
).split()


def pip(*words):
  command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
  subprocess.run(command, check=True, stdout=subprocess.PIPE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """A wheel, built from a copy because building leaves folders behind."""
  source = tmp_path_factory.mktemp("source")
  for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, source)
  for name in ("grpojax", "configs"):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / name, source / name, ignore=ignored)
  installed = importlib.util.find_spec("setuptools")  # else pip downloads it
  offline = ["--no-build-isolation"] if installed else []
  out = tmp_path_factory.mktemp("wheel")
  pip("wheel", "--no-deps", *offline, f"--wheel-dir={out}", str(source))
  (path,) = out.glob("*.whl")
  return path


@pytest.fixture(scope="module")
def grpojax(wheel, tmp_path_factory):
  """Calls the console entry of a virtual environment with the wheel.

  Dependencies come from this environment, without its .pth files (one of them
  may point to this checkout).
  """
  home = tmp_path_factory.mktemp("installed")
  subprocess.run(
    [sys.executable, "-m", "venv", "--without-pip", home], check=True
  )
  (packages,) = home.glob("lib/python*/site-packages")
  dependencies = sysconfig.get_path("purelib")
  (packages / "dependencies.pth").write_text(f"{dependencies}\n")
  python = f"--python={home}/bin/python"
  pip(python, "install", "--no-deps", "--ignore-installed", str(wheel))
  env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

  def call(*words, cwd):
    return subprocess.run(
      [home / "bin" / "grpojax", *words],
      cwd=cwd,
      env=env,
      capture_output=True,
      text=True,
    )

  call.home = home
  return call


@pytest.mark.slow
def test_a_wheel_has_the_assets_and_the_configs(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  files = [p for p in ROOT.glob("grpojax/**/*.py")]
  files += [p for p in ROOT.glob("grpojax/assets/**/*") if p.is_file()]
  files += ROOT.glob("grpojax/reports/page/*")
  expected = {path.relative_to(ROOT).as_posix() for path in files}
  configs = {f"grpojax/configs/{p.name}" for p in ROOT.glob("configs/*.py")}
  assert configs and expected | configs <= names
  tops = {name.partition("/")[0].partition("-")[0] for name in names}
  assert tops == {"grpojax"}


@pytest.mark.slow
def test_an_installed_wheel_trains_from_an_empty_directory(grpojax, tmp_path):
  words = [f"--config.{word}" for word in TINY]
  run = grpojax("train", "--config=arithmetic", *words, cwd=tmp_path)
  assert run.returncode == 0, run.stderr
  assert [path.name for path in tmp_path.iterdir()] == ["runs"]
  assert (tmp_path / "runs" / "arithmetic" / "summary.json").is_file()

  # The error names the installed file.
  (config,) = grpojax.home.glob("lib/python*/site-packages/*/configs/gsm8k.py")
  config.write_text("get_config = None\n")
  broken = grpojax("train", "--config=configs/gsm8k.py", cwd=tmp_path)
  assert f"{config}: define get_config()" in broken.stderr
