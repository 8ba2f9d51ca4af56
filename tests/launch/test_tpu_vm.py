"""tpu_vm.sh with a stand-in for gcloud that records, fails and preempts."""

import re
import shutil
import subprocess
import tarfile

import pytest
from run_helpers import ROOT

SCRIPT = ROOT / "launch" / "tpu_vm.sh"
OPTIONS = ("--zone=us-west4-a", "--type=v5litepod-16", "--poll=0")
RUN = ("run", "my-run", *OPTIONS, "--", "--run_dir=gs://mine/run")

# Calls are appended to `calls`. The state of the resource is in `state`. Each
# line of `ends` is the result of a training: a code, "lost" (no connection) or
# "preempted". The next call that contains the text in `fail` fails; with a file
# `forever`, all such calls do.
GCLOUD = r"""#!/usr/bin/env bash
cd "$GCLOUD"
printf '%s\x1f' "$@" >>calls && echo >>calls
take() { # prints and removes the first line of a file
  local lines=()
  [[ -s "$1" ]] && mapfile -t lines <"$1" && echo "${lines[0]}"
  printf '%s\n' "${lines[@]:1}" >"$1"
}
state="$(<state)" 2>/dev/null
if [[ -s fail && "$*" == *"$(<fail)"* ]]; then
  echo "ERROR: (gcloud) as you wish" >&2
  [[ -e forever ]] || >fail
  exit 1
fi
case "$*" in
  *" list "*)
    if [[ "$state" ]]; then echo "$state"; fi
    if [[ "$state" == PROVISIONING ]]; then echo ACTIVE >state; fi ;;
  *" create "*) echo PROVISIONING >state ;;
  *" delete "*) rm -f state installed ;;
  *" scp "*) rm -f archive && ln "$5" archive ;;
  *" install "*) >installed ;;
  *" installed "*) [[ -e installed ]] ;;
  *" follow "*) echo "the training's own lines" ;;
  *" code "*)
    end="$(take ends)"
    if [[ "$end" == preempted ]]; then echo SUSPENDED >state; fi
    [[ "$end" == [0-9]* ]] && echo "$end" ;;
esac
"""


class Cloud:
  """The directory with the files of the stand-in."""

  def __init__(self, stand_ins, directory):
    self.directory = directory
    stand_ins.program(directory / "bin", "gcloud", GCLOUD)
    self._run = stand_ins.run
    self.env = stand_ins.environment(directory / "bin", GCLOUD=str(directory))

  def write(self, name, *lines):
    text = "".join(f"{line}\n" for line in lines)
    (self.directory / name).write_text(text)

  def launch(self, *arguments, **options):
    return self._run("bash", SCRIPT, *arguments, env=self.env, **options)

  def files(self):
    """Returns the files of the last archive copied to the workers."""
    with tarfile.open(self.directory / "archive") as archive:
      return {
        member.name.removeprefix("./"): archive.extractfile(member).read()
        for member in archive.getmembers()
        if member.isfile()
      }

  @property
  def calls(self):
    path = self.directory / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split("\x1f")[:-1] for line in lines]

  def verbs(self):
    """Returns the kinds of all calls: create, delete, scp, start, ..."""
    verbs = []
    for call in self.calls:
      command = next((w for w in call if w.startswith("--command=")), "")
      word = re.search(r"tpu_vm_worker.sh (\w+)", command)
      verbs.append(word[1] if word else call[3] + (" tar" * bool(command)))
    return verbs


@pytest.fixture
def cloud(stand_ins, tmp_path):
  return Cloud(stand_ins, tmp_path)


SETUP = ["scp", "ssh tar", "install"]
ATTEMPT = ["start", "follow", "code"]


def test_a_run_creates_the_slice_and_trains_on_all_workers(cloud, stand_ins):
  cloud.write("ends", "0")
  template = "--config.data.template={prompt} 'q' $HOME *"
  done = cloud.launch(*RUN, template)
  assert done.returncode == 0, done.stderr
  assert cloud.verbs() == [
    *["list", "list", "create", "list", "list"],  # the last two: provisioning
    *["installed", *SETUP, *ATTEMPT],
  ]
  create = next(call for call in cloud.calls if "create" in call)
  words = (
    "compute tpus queued-resources create my-run --node-id=my-run --spot"
    " --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite"
  )
  assert create == [*words.split(), "--zone=us-west4-a"]
  start = next(call for call in cloud.calls if " start " in call[-2])
  assert "--worker=all" in start
  line = next(w for w in start if w.startswith("--command="))
  shell = line.removeprefix("--command=bash grpojax/launch/tpu_vm_worker.sh ")
  echoed = stand_ins.run("bash", "-c", f"printf '%s\\n' {shell}").stdout
  assert echoed.splitlines() == ["start", RUN[-1], template]
  assert "the training's own lines" in done.stderr


def test_a_preempted_slice_is_recreated_and_training_resumed(cloud):
  cloud.write("state", "ACTIVE")
  cloud.write("installed")
  cloud.write("ends", "75", "preempted", "0")
  done = cloud.launch(*RUN)
  assert done.returncode == 0, done.stderr
  lock = "gs://mine/run/.lock"
  again = ["delete", lock, "list", "create", "list", "list"]
  assert cloud.verbs() == [
    *["list", "installed", *ATTEMPT],  # 75: saved
    *["list", "installed", *ATTEMPT],  # preempted
    *["list", "list", *again, "installed", *SETUP, *ATTEMPT],
  ]
  starts = {tuple(c) for c in cloud.calls if " start " in c[-2]}
  assert len(starts) == 1
  delete = next(call for call in cloud.calls if "delete" in call)
  assert {"--force", "--quiet"} <= set(delete)


def test_setup_and_exec_run_on_all_workers(cloud):
  done = cloud.launch("setup", "my-run", "--zone=z")
  assert done.returncode == 0, done.stderr
  assert cloud.verbs() == SETUP
  needed = {"setup.py", "grpojax/train.py", "configs/gsm8k.py"}
  assert {*needed, "launch/tpu_vm_worker.sh"} <= set(cloud.files())
  words = ("--zone=z", "--", "python", "-m", "grpojax.selfcheck")
  assert cloud.launch("exec", "my-run", *words).returncode == 0
  assert all("--worker=all" in call for call in cloud.calls)
  command = "worker.sh exec python -m grpojax.selfcheck "
  assert cloud.calls[-1][-2].endswith(command)


def test_user_files_and_variables_reach_the_workers(cloud, tmp_path):
  """Tracked files and named files; values are not in command lines."""
  user = tmp_path / "user"
  (user / "lib").mkdir(parents=True)
  for name in ("rewards.py", "lib/tracked.py", "notes.txt", "data.jsonl"):
    (user / name).write_text(name)
  for words in (["init", "-q"], ["add", "lib"]):
    subprocess.run(["git", *words], cwd=user, check=True)
  cloud.env |= {"HF_TOKEN": "se'cret $1", "WANDB_API_KEY": "another"}
  cloud.write("state", "ACTIVE")
  cloud.write("ends", "0", "0")
  words = [
    *RUN[:2],
    *("--zone", "z", "--type", "v5e-16", "--poll=0"),
    *("--env=HF_TOKEN,WANDB_API_KEY", "--extras=wandb"),
    *("--ssh-args=--tunnel-through-iap --project=p", *RUN[5:]),
    "--config.reward.functions=rewards.py:right,format",
    "--config.data.path=data.jsonl",
    "--config=configs/gsm8k.py",
  ]
  done = cloud.launch(*words, cwd=user)
  assert done.returncode == 0, done.stderr
  files = cloud.files()
  assert files["rewards.py"] == b"rewards.py"
  assert files["data.jsonl"] == b"data.jsonl"
  assert files["lib/tracked.py"] == b"lib/tracked.py"
  assert "notes.txt" not in files
  line = f'{files[".grpojax-env"].decode()} printf %s "$HF_TOKEN"'
  assert cloud._run("bash", "-c", line).stdout == "se'cret $1"
  assert "cret" not in str(cloud.calls) + done.stdout + done.stderr
  assert "tpu,gcs,wandb" in str(cloud.calls).replace("\\", "")
  for call in cloud.calls:
    assert ("--tunnel-through-iap" in call) == (call[3] in ("ssh", "scp"))
  sums = re.findall(r"installed (\d+)", str(cloud.calls))
  (user / "rewards.py").write_text("another")
  cloud.launch(*words, cwd=user)
  again = re.findall(r"installed (\d+)", str(cloud.calls))
  assert sums == again[:1] and again[0] != again[1]


FILES = {  # arguments with files, and the reason of a refusal
  "--config.reward.functions=reward.py:right": "no file reward.py here",
  "--config=config.py:steps": "no file config.py here",
  "--config.data.path=../data.jsonl": "../data.jsonl is not below",
  "--config.data.path=hf:openai/gsm8k": None,
  "--config.data.path=gs://b/data.jsonl": None,
  "--config.data.template={prompt} as in notes.txt": None,
}


@pytest.mark.parametrize("word", FILES)
def test_missing_files_and_files_elsewhere_are_refused(cloud, word):
  user = cloud.directory / "user"
  user.mkdir()
  (cloud.directory / "data.jsonl").write_text("")
  done = cloud.launch(*RUN[:2], "--dry-run", *RUN[2:], word, cwd=user)
  assert done.returncode == (2 if FILES[word] else 0), done.stderr
  assert (FILES[word] or "") in done.stderr


@pytest.mark.parametrize(
  ("ends", "code", "starts"),
  [
    (["1", "lost", "1"], 2, 3),
    # Interruptions reset the count.
    (["1", "1", "75", "1", "1", "preempted", "1", "0"], 0, 8),
  ],
)
def test_three_failures_in_a_row_end_a_run(cloud, ends, code, starts):
  cloud.write("state", "ACTIVE")
  cloud.write("installed")
  cloud.write("ends", *ends)
  done = cloud.launch(*RUN)
  assert done.returncode == code
  assert ("3 attempts failed in a row" in done.stderr) == bool(code)
  assert cloud.verbs().count("start") == starts


def test_only_a_failed_setup_is_tried_again(cloud):
  cloud.write("state", "ACTIVE")
  cloud.write("fail", " scp ")
  cloud.write("ends", "0")
  done = cloud.launch(*RUN)
  assert done.returncode == 0, done.stderr
  first = cloud.verbs().index("scp")
  assert cloud.verbs()[first + 1] not in SETUP
  assert cloud.verbs()[-6:] == [*SETUP, *ATTEMPT]
  cloud.write("state", "FAILED")
  done = cloud.launch("create", "my-run", *OPTIONS)
  assert done.returncode == 2
  assert "queued-resources describe my-run" in done.stderr
  assert "create" not in cloud.verbs()
  before = len(cloud.calls)
  cloud.write("fail", " list ")
  cloud.write("forever")
  done = cloud.launch(*RUN)
  assert done.returncode == 2
  assert "ERROR: (gcloud) as you wish" in done.stderr
  assert "gcloud does not report the state of my-run" in done.stderr
  assert cloud.verbs()[before:] == ["list"] * 3


def test_create_status_logs_and_delete(cloud):
  zone = "--zone=us-west4-a"
  assert cloud.launch("status", "my-run", zone).stdout == "NONE\n"
  words = ("--on-demand", "--create-args=--network=n --labels=a=b")
  done = cloud.launch("create", "my-run", *OPTIONS, *words)
  assert done.returncode == 0, done.stderr
  assert not any("--spot" in call for call in cloud.calls)
  (create,) = (call for call in cloud.calls if "create" in call)
  assert {"--network=n", "--labels=a=b"} <= set(create)
  assert cloud.launch("status", "my-run", zone).stdout == "ACTIVE\n"
  cloud.launch("create", "my-run", *OPTIONS)
  assert cloud.verbs().count("create") == 1
  logs = cloud.launch("logs", "my-run", zone, "--worker=3").stdout
  assert "own lines" in logs
  assert "--worker=3" in cloud.calls[-1]
  assert cloud.launch("delete", "my-run", zone).returncode == 0
  assert cloud.launch("status", "my-run", zone).stdout == "NONE\n"


def test_a_dry_run_only_prints_commands(cloud):
  done = cloud.launch(*RUN[:2], "--dry-run", *RUN[2:])
  assert done.returncode == 0, done.stderr
  assert not cloud.calls
  lines = [x for x in done.stdout.splitlines() if x.startswith("gcloud ")]
  for line in lines:
    assert cloud._run("bash", "-c", line, env=cloud.env).returncode in (0, 1)
  verbs = ["create", *SETUP, *ATTEMPT]
  assert [verb for verb in cloud.verbs() if verb in verbs] == verbs


WRONG = {
  "fly my-run": "unknown command fly",
  "run My_Run": "NAME is 'My_Run'",
  "status my-run": "--zone is missing",
  "create my-run --zone=z": "--type is missing",
  "create my-run --zone=z --type=v9-8": "give --version",
  "create my-run --zones=z": "unknown option --zones=z",
  "create my-run --zone": "--zone has no value",
  "create my-run --zone=z --type=v5e:4": "is like v5e:4x4",
  "setup my-run --zone=z --env=NOT_THERE": "has no NOT_THERE",
  "exec my-run --zone=z": "exec needs a command",
  "logs my-run --zone=z --worker=all": "--worker=all",
  f"run my-run {' '.join(OPTIONS)}": "give -- --run_dir=gs://BUCKET/RUN",
  f"{' '.join(RUN[:-1])} --run_dir=runs/x": "--run_dir is 'runs/x'",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_refused(cloud, words):
  done = cloud.launch(*words.split())
  assert done.returncode == 2
  assert WRONG[words] in done.stderr
  assert len(done.stderr.splitlines()) == 1
  assert not cloud.calls


def test_usage_and_a_missing_gcloud(stand_ins, tmp_path):
  for name in ("bash", "dirname"):
    (tmp_path / name).symlink_to(shutil.which(name))
  done = stand_ins.run("bash", SCRIPT, *RUN, env={"PATH": str(tmp_path)})
  assert done.returncode == 2
  assert "gcloud was not found: install the Google Cloud CLI" in done.stderr
  done = stand_ins.run("bash", SCRIPT, "--help")
  assert done.returncode == 0
  assert done.stdout.startswith("Trains on a slice of Cloud TPU VMs")
  assert "--dry-run" in done.stdout and "set -euo" not in done.stdout
  assert stand_ins.run("bash", SCRIPT).stderr == done.stdout
