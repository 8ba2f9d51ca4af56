"""configs/arithmetic.py, the job of a program that is given no config."""

from grpojax.runtime.cli import config as config_lib
from grpojax.training.config import (
  SETTINGS,
  default_config,
  default_job,
  from_config,
  parse_job,
)


def test_a_model_of_ones_own_does_not_follow_it():
  def parsed(*argv):
    return parse_job(argv, {}, SETTINGS)[0]

  own = parsed("--config.model.path=org/model", "--config.seed=3")
  assert (own.name, own.seed, own.model.path) == ("own_model", 3, "org/model")
  assert own.optim.learning_rate == 1e-6
  lora = "--config.model.path=org/model", "--config.lora.rank=8"
  assert parsed(*lora).optim.learning_rate == 1e-5
  own_rate = parsed(*lora, "--config.optim.learning_rate=3e-6")
  assert own_rate.optim.learning_rate == 3e-6
  assert parsed("--config.model.path=arithmetic-base").name == "arithmetic"
  chosen = parsed("--config=gsm8k", "--config.model.path=org/model")
  assert chosen.name == "gsm8k"


def test_other_configs_and_studies_do_not_follow_it():
  job = config_lib.flatten(default_job())
  base = config_lib.flatten(default_config())
  assert job.keys() == base.keys()
  paths = job["model.path"], base["model.path"]
  assert paths == ("arithmetic-careless", "arithmetic-instruct")
  assert (job["name"], job["data.name"]) == ("arithmetic", "arithmetic")
  from_config(default_job())
