"""Models and data of the Hub: resolution, pinned commits, downloads."""

import pathlib

import hub_server
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from grpojax import sft
from grpojax.aot import programs
from grpojax.runtime.cli.settings import to_config
from grpojax.training import config as config_module
from grpojax.training import policies
from grpojax.training.files import sources
from grpojax.training.run import run_models
from grpojax.training.settings.run import Facts, completed

COMMIT = hub_server.COMMIT
LATER = "b" * 40
ID = "org/tiny"


@pytest.fixture(scope="module")
def model():
  """A model directory."""
  return sources.find_model(config_module.default_config().model.path)


@pytest.fixture
def served(model, tmp_path, monkeypatch):
  server = hub_server.Hub()
  server.add(ID, hub_server.of_directory(model))
  with hub_server.client_of(server, tmp_path / "cache", monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield server


def move(served):
  """Adds a later commit with other files to the branch."""
  served.add(ID, {"config.json": b"{}"}, LATER)


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_weights_are_downloaded_later_at_the_same_commit(served, model):
  opened = policies.open_policy(sources.find_files(ID))
  assert opened.files.name == (ID, COMMIT)
  assert not [f for f in served.fetched() if f.endswith(".safetensors")]
  move(served)
  loaded = policies.with_weights(opened)
  same(loaded.params, policies.load_policy(str(model)).params)
  with pytest.raises(ValueError, match=f"no model at '{ID}@{LATER}'"):
    sources.find_files(ID)
  same(policies.load_policy(f"{ID}@{COMMIT}").params, loaded.params)


def test_shapes_need_only_config_json(served):
  hf_config = programs.read_model(ID)
  assert "model_type" in hf_config
  assert served.fetched() == ["config.json"]


def test_local_paths_take_precedence_over_hub_names(
  served, model, settings_with
):
  pathlib.Path("org").mkdir()
  pathlib.Path(ID).symlink_to(model)
  assert sources.find_model(ID).samefile(model)
  assert sources.find_model(model.name) == model
  assert sources.find_files(ID).name is None
  assert not served.log
  with pytest.raises(ValueError, match="is for models on the Hub, but"):
    sources.all_commits(settings_with(model__path=ID, model__revision="v1"))


def test_errors_for_unknown_paths_and_hub_names(served):
  with pytest.raises(ValueError, match="no such path here, and the Hub shows"):
    sources.find_model("runs/nothing")
  with pytest.raises(ValueError, match="a directory .*or ORG/NAME of the Hug"):
    sources.find_model("nothing")
  served.add("org/gguf", {"model.gguf": b"1", "README.md": b"2"})
  with pytest.raises(ValueError, match="no model at 'org/gguf@main'"):
    sources.find_model("org/gguf")
  served.add("org/old", {"pytorch_model.bin": b"1"} | texts(served))
  with pytest.raises(ValueError, match="get the model as safetensors"):
    policies.load_policy("org/old")


def texts(served):
  files = served.files[f"models/{ID}"][COMMIT]
  return {k: v for k, v in files.items() if not k.endswith(".safetensors")}


@pytest.mark.slow
def test_other_programs_accept_hub_names(served, model, tmp_path):
  config = to_config(sft.SETTINGS)
  config.model.path = ID
  config.rows = 1
  (tmp_path / "source").mkdir()
  _, params, _ = sft.start(config, tmp_path / "source")
  whole = policies.load_policy(str(model)).params
  same(params, whole)
  _, params = run_models.load(f"{ID}@{COMMIT}")
  same(params, whole)
  assert sources.pinned(ID) == sources.pinned(f"{ID}@main") == f"{ID}@{COMMIT}"
  for path in (model.name, str(model), "gs://a/b", "nothing"):
    assert sources.pinned(path) == path


LINES = (f"model:org/judge@v1={COMMIT}", f"model:{ID}@main={COMMIT}")


def with_commits(settings):
  return completed(settings, Facts(sources.all_commits(settings)))


def test_a_config_is_pinned_once(served, settings_with):
  assert sources.all_commits(settings_with()) == {} and not served.log
  served.add("org/judge", texts(served), branch="v1")
  settings = settings_with(model__path=ID, reward__model="org/judge@v1")
  whole = with_commits(settings)
  assert whole.commits == LINES and settings.commits == ()
  assert sources.policy_path(settings) == ID
  assert sources.policy_path(whole) == f"{ID}@{COMMIT}"
  assert sources.recorded(whole, "org/judge@v1") == f"org/judge@{COMMIT}"
  move(served)
  before = len(served.log)
  recorded = Facts(sources.commits_in_use(settings, whole.commits))
  again = completed(settings, recorded)
  assert again == whole == with_commits(again) and len(served.log) == before
  assert sources.all_commits(settings)[f"model:{ID}@main"] == LATER
  other = settings_with(model__path=ID, model__revision=LATER)
  assert sources.commits_in_use(other, whole.commits) == {}
  assert sources.policy_path(with_commits(other)) == f"{ID}@{LATER}"
  judge = sources.files_of(whole, "org/judge@v1")
  assert judge.name == ("org/judge", COMMIT)


def test_hub_data_are_pinned(served, settings_with):
  served.add("org/sums", {"README.md": b"sums"}, kind="datasets")
  served.add("org/sums", {}, LATER, kind="datasets", branch="v2")
  settings = settings_with(data__name=sources.HUB, data__path="org/sums")
  args = sources.HUB, "org/sums"
  whole = with_commits(settings)
  assert whole.commits == (f"dataset:org/sums@main={COMMIT}",)
  assert sources.data_options(settings, *args, {}) == {}
  sized = sources.data_options(whole, *args, {"size": 3})
  assert sized == {"size": 3, "revision": COMMIT}
  assert sources.data_options(whole, "jsonl", "org/sums", {}) == {}
  sums = {"name": sources.HUB, "path": "org/sums"}
  sums |= {"options": {"revision": "v2"}}
  whole = with_commits(settings_with(data__mixture=ConfigDict({"sums": sums})))
  assert whole.commits == (f"dataset:org/sums@v2={LATER}",)
  options = sources.data_options(whole, *args, {"revision": "v2"})
  assert options == {"revision": LATER}


@pytest.mark.parametrize(
  "line", ["x", f"space:a/b@main={COMMIT}", f"model:a/b@main={COMMIT[1:]}", 3]
)
def test_malformed_commits_are_refused(line, settings_with):
  with pytest.raises(ValueError, match="must be KIND:.* Runs fill it in"):
    settings_with(commits=(line,))


def test_fingerprints_of_models(tmp_path):
  file = tmp_path / "model.safetensors"
  data = np.random.default_rng(0).bytes(10**7)
  file.write_bytes(data)
  before = sources.fingerprint(tmp_path)
  assert before.startswith("model.safetensors: 10000000 bytes")
  file.write_bytes(data[:-1] + b"!")
  assert sources.fingerprint(tmp_path) == before  # outside the blocks
  file.write_bytes(b"!" + data[1:])
  assert sources.fingerprint(tmp_path) != before
