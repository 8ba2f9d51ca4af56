"""configs/arithmetic.py, the job of a program that is given no config."""

from grpojax.runtime.cli import config as config_lib
from grpojax.training.config import default_config, default_job, from_config


def test_other_configs_and_studies_do_not_follow_it():
  job = config_lib.flatten(default_job())
  base = config_lib.flatten(default_config())
  assert job.keys() == base.keys()
  paths = job["model.path"], base["model.path"]
  assert paths == ("arithmetic-careless", "arithmetic-instruct")
  assert (job["name"], job["data.name"]) == ("arithmetic", "arithmetic")
  from_config(default_job())
