"""The program `selfcheck`, on CPUs."""

import subprocess
import sys

import pytest
from etils import epath
from run_helpers import environment, joined

from grpojax import selfcheck
from grpojax.aot.chips import CHIPS
from grpojax.selfcheck import Row


@pytest.mark.long
def test_attention_in_blocks_and_kernels():
  rows = [*selfcheck.check_attention()]
  assert len(rows) == 4 and all(row.ok for row in rows)


@pytest.mark.slow
def test_a_step_and_its_estimates(monkeypatch, tmp_path):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  monkeypatch.setattr(selfcheck.chips, "of_kind", lambda _: CHIPS["cpu"])
  rows = {row.name: row for row in selfcheck.check_step()}
  for name in ("rollout", "update"):
    assert rows[f"{name} of a step"].expected.endswith(" s, estimated")
  assert rows["model FLOPs utilization"].seen.endswith("%")
  assert float(rows["sampled tokens per second"].seen) > 0


def test_failures_are_marked_and_later_checks_still_run(
  monkeypatch, capsys, tmp_path
):
  def no_device():
    raise RuntimeError("Unable to initialize backend 'tpu'")

  def fails():
    yield Row("first", "1", "1")
    raise RuntimeError("no | such\ndevice")

  checks = {"a": fails, "b": lambda: [Row("second", "2", "3", ok=False)]}
  checks |= {"c": lambda: [Row("c", "")]}
  monkeypatch.setattr(selfcheck, "CHECKS", checks)
  monkeypatch.setattr(selfcheck.jax, "devices", no_device)
  assert selfcheck.main([f"--out={tmp_path}", "--skip=c"]) == 1
  text = (tmp_path / "selfcheck.md").read_text()
  assert text == capsys.readouterr().out
  assert text.startswith("no device, jax ")
  assert text.splitlines()[-3:] == [
    "| first | 1 | 1 |  |",
    "| a | RuntimeError: no / such device |  | **wrong** |",
    "| second | 2 | 3 | **wrong** |",
  ]
  with pytest.raises(SystemExit, match="--skip=d: use a, b"):
    selfcheck.main(["--skip=d"])


def test_a_failed_run_is_reported_in_a_line(monkeypatch, tmp_path):
  program = tmp_path / "python"
  program.write_text(
    "#!/bin/sh\n"
    "echo 'Traceback:\n  f(x)\njax.XError: no tpu\n--\nSee x'; exit 1\n"
  )
  program.chmod(0o700)
  monkeypatch.setattr(selfcheck.sys, "executable", str(program))
  with pytest.raises(RuntimeError, match="^a run failed: jax.XError: no tpu$"):
    selfcheck._train(epath.Path(tmp_path / "run"), tmp_path / "log")


def test_an_interruption_keeps_earlier_rows(monkeypatch, tmp_path):
  def interrupted():
    yield Row("first", "1")
    raise KeyboardInterrupt

  monkeypatch.setattr(selfcheck, "CHECKS", {"a": interrupted})
  with pytest.raises(KeyboardInterrupt):
    selfcheck.main([f"--out={tmp_path}"])
  *_, first, last = (tmp_path / "selfcheck.md").read_text().splitlines()
  assert first.startswith("| first | 1 |")
  assert last == "| interrupted | later checks did not run |  | **wrong** |"


@pytest.mark.parametrize(
  "skip",
  [
    pytest.param("resume,attention,step", marks=pytest.mark.slow),
    pytest.param("attention", marks=pytest.mark.long),
  ],
)
def test_two_processes_print_one_table(skip, tmp_path):
  shared = [f"--skip={skip}", f"--shared={tmp_path / 'shared'}"]
  command = [sys.executable, "-m", "grpojax.selfcheck", *shared]
  processes = []
  for i, flags in enumerate(joined(2)):
    (tmp_path / str(i)).mkdir()
    words = [*command, *flags, f"--out={tmp_path / str(i)}"]
    env = environment(JAX_NUM_CPU_DEVICES="2")
    processes.append(subprocess.Popen(words, env=env))
  assert [p.wait(500) for p in processes] == [0, 0]
  text = (tmp_path / "0" / "selfcheck.md").read_text()
  assert text.startswith("4 cpu (cpu), ") and "**wrong**" not in text
  assert "in float32" in text and "in bfloat16" in text
  assert ("bit for bit" in text) == ("resume" not in skip)
  assert not (tmp_path / "1" / "selfcheck.md").exists()


def test_several_hosts_need_an_empty_shared_directory(tmp_path):
  hosts = ["--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=0"]
  with pytest.raises(SystemExit, match="resume needs --shared=DIR"):
    selfcheck.main([f"--out={tmp_path}", *hosts])
  (tmp_path / "killed").mkdir()
  with pytest.raises(SystemExit, match="whole or killed of an earlier"):
    selfcheck.main([f"--out={tmp_path}", f"--shared={tmp_path}", *hosts])
