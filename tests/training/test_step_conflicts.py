"""Settings of a step that do not go together: one line says which, and why."""

import pytest

from grpojax.training.config import from_config

AGGREGATED = {"reward__aggregation": "normalize_then_sum"}
FILTERED = {"filter_groups__enable": True}
BY_DIFFICULTY = {"difficulty__priority": "varies"}
AUTO = {"group_size": "auto", "diagnostics__every": 1}
K1 = {"loss__beta": 0.1, "loss__kl": "k1", "loss__kl_placement": "reward"}
IN_PARTS = {"sampling__parts": 2, "batch_size": 4, "reward__workers": 1}
TWO = {
  "reward__functions": ("exact_answer", "length"),
  "reward__weights": (1.0, 1.0),
}
ACCURACY = {"filter_groups__metric": "acc", "filter_groups__rescale": True}


@pytest.mark.parametrize(
  "changes, text",
  [
    ({"loss__correction": "tis"}, "use one of none, t"),
    ({"loss__correction_low": 1.5}, "loss.correction_low = 1.5: must be in [0"),
    (
      {"loss__correction": "token_mask", "optim__epochs": 2},
      "with several updates a step and loss.old_logprobs = 'rollout' the",
    ),
    (
      AUTO | {"loss__truncated": "drop"},
      "loss.truncated = 'drop': group_size = 'auto' follows",
    ),
    ({"model__reference_every": 2}, "no reference without a KL term"),
    ({"model__reference_mix": 0.5}, "a fixed reference is not mixed"),
    (
      AGGREGATED | {"reward__on_device": True},
      "reward.on_device has one function only",
    ),
    (AGGREGATED | AUTO, "the best size for the weighted sum"),
    (
      AGGREGATED | {"group_size": 1, "advantage": "vanilla"},
      "a group of 1 has no spread",
    ),
    (AGGREGATED | {"advantage": "beta_binomial"}, "cannot read as successes"),
    (
      AGGREGATED | {"advantage": "norm_ratio", "diagnostics__every": 1},
      "'norm_ratio' knows the scores' lengths by their sum",
    ),
    (AGGREGATED | K1, "rewards without unit"),
    (
      FILTERED | {"reward__on_device": True},
      "reward.on_device is one program, which dra",
    ),
    (
      FILTERED | {"advantage": "vanilla"},
      "learns from groups of equal rewards too: use",
    ),
    (FILTERED | K1, "groups of equal rewards teach something"),
    (
      FILTERED | {"filter_groups__gen_parts": 3},
      "gen_parts = 3: must divide a step's",
    ),
    (FILTERED | TWO | ACCURACY, "may still differ in other rewards"),
    (IN_PARTS | {"sampling__parts": 3}, "sampling.parts = 3: must divide"),
    (
      IN_PARTS | {"reward__workers": 0},
      "sampling.parts = 2: nothing computes rewards",
    ),
    ({"difficulty__band": (0.9, 0.1)}, "band = (0.9, 0.1): must be two numb"),
    ({"difficulty__target": (0.5, 1.0)}, "inside (0, 1)"),
    ({"difficulty__importance_weights": True}, "nothing is to be undone"),
    (
      BY_DIFFICULTY | {"reward__on_device": True},
      "priority = 'varies': reward.on_device",
    ),
    (
      BY_DIFFICULTY
      | {"difficulty__importance_weights": True, "diagnostics__every": 5},
      "importance_weights = True: the diagnosis",
    ),
  ],
)
def test_what_cannot_be_is_refused(changes, text, config_with):
  with pytest.raises(ValueError) as error:
    from_config(config_with(**changes))
  (line,) = str(error.value).splitlines()[1:]
  assert text in line


@pytest.mark.parametrize(
  "changes",
  [
    {
      "loss__correction": "token_mask",
      "optim__epochs": 2,
      "loss__old_logprobs": "trainer",
    },
    {"loss__off_policy_threshold": 0.1, "optim__epochs": 2},
    {"loss__truncated": "mask", "reward__on_device": True},
    {
      "model__reference_every": 1,
      "model__reference_mix": 0.01,
      "loss__beta": 0.1,
      "lora__rank": 2,
    },
    {"sampling__repetition_penalty": 1.2},
    IN_PARTS,
    BY_DIFFICULTY,
  ],
)
def test_what_can_be_is_not(changes, config_with):
  from_config(config_with(**changes))
