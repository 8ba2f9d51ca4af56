"""Defaults, validation and JSON of the configuration."""

import json
from contextlib import nullcontext

import jax
import pytest

from grpojax.core import advantages
from grpojax.runtime.cli import config as config_lib
from grpojax.training.config import (
  CHOICES,
  default_config,
  from_config,
  to_config,
)
from grpojax.training.run import setup
from grpojax.training.settings import batches
from grpojax.training.settings.run import TrainSettings


def test_default_is_valid_and_locked():
  config = default_config()
  from_config(config)
  with pytest.raises(AttributeError):
    config.optim.lerning_rate = 1.0


def test_another_name_is_refused_with_all_that_there_are(config_with):
  flat = config_lib.flatten(default_config())
  for name, names in CHOICES.items():
    several = isinstance(flat[name], tuple)
    assert set(flat[name] if several else [flat[name]]) <= set(names)
    wrong = (*flat[name], "none_such") if several else "none_such"
    with pytest.raises(ValueError) as error:
      from_config(config_with(**{name: wrong}))
    assert f"use one of {', '.join(names)}" in str(error.value)


def test_a_new_advantage_needs_no_check_but_its_own(monkeypatch, config_with):
  def picky(rewards, lengths):
    if rewards.shape[1] < 6:
      raise ValueError("small groups bore me")
    return rewards * lengths

  monkeypatch.setitem(advantages.ADVANTAGES, "picky", picky)
  from_config(config_with(advantage="picky"))
  with pytest.raises(ValueError, match="'picky': refuses .*4: small groups bo"):
    from_config(config_with(advantage="picky", group_size=4))


def test_only_free_sections_of_the_default_take_any_key():
  config = default_config().unlock()
  config.optim_options = {"b1": 0.3}
  config.data.templates_options = {"enable_thinking": False}
  config.optim.options = {"x": 1}
  config.reward.options.length = {"target": 3}
  with pytest.raises(ValueError) as error:
    from_config(config)
  lines = str(error.value).splitlines()[1:]
  assert [line.split(" = ")[0].strip() for line in lines] == [
    "--config.data.templates_options.enable_thinking",
    "--config.optim.options.x",
    "--config.optim_options.b1",
  ]


def test_sections_that_are_none():
  config = default_config().unlock()
  del config.data["options"]
  with config.ignore_type():
    config.loss = None
  with pytest.raises(ValueError) as error:
    from_config(config)
  text = str(error.value)
  assert "data.options: missing" in text
  assert "loss = None: is a section" in text and "loss.beta: missing" in text


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_the_automatic_group_size_is_that_of_leave_one_out(name, config_with):
  config = config_with(advantage=name, group_size="auto", diagnostics__every=1)
  if name in ("leave_one_out", "dr_grpo", "batch_std"):
    from_config(config)
  else:
    with pytest.raises(ValueError, match=f"{name}': group_size = 'auto' follo"):
      from_config(config)


AUTO = {"group_size": "auto", "diagnostics__every": 1}
AGGREGATED = {"reward__aggregation": "normalize_then_sum"}
FILTERED = {"filter_groups__enable": True}
BY_DIFFICULTY = {"difficulty__priority": "varies"}
K1 = {"loss__beta": 0.1, "loss__kl": "k1", "loss__kl_placement": "reward"}
AHEAD = {"sampling__ahead": 1, "loss__correction": "sequence_truncate"}
INT8 = {"sampling__weights_dtype": "int8", "sampling__cache_dtype": "int8"}
INT8 |= {"loss__correction": "token_truncate"}
IN_PARTS = {"sampling__parts": 2, "batch_size": 4, "reward__workers": 1}
TWO = {
  "reward__functions": ("exact_answer", "length"),
  "reward__weights": (1.0, 1.0),
}
ACCURACY = {"filter_groups__metric": "acc", "filter_groups__rescale": True}


@pytest.mark.parametrize(
  "changes, text",
  [
    # A value out of its range: one of each kind.
    ({"batch_size": 0}, "batch_size = 0"),
    ({"name": "a/b"}, "name = 'a/b'"),
    ({"optim__learning_rate": float("nan")}, "optim.learning_rate = nan"),
    ({"reward__timeout": float("inf")}, "more than 0, and finite"),
    ({"reward__workers": 10**12}, "must be in [0, 1024]"),
    ({"reward__weights": (10**400,)}, "must be finite numbers, one for each"),
    ({"difficulty__band": (0.1, 10**400)}, "0 <= low < high <= 1"),
    ({"difficulty__band": (float("nan"), 1)}, "0 <= low < high <= 1"),
    ({"optim__epochs": 2**31}, "optim.epochs = 2147483648"),
    ({"logits_chunk": 2**31}, "logits_chunk = 2147483648"),
    ({"optim__schedule": "cosin"}, "use one of constant, cosine, linear"),
    ({"loss__dual_clip": 0.5}, "loss.dual_clip = 0.5"),
    ({"advantage": "oracle"}, "true value of each prompt"),
    # Names, and what belongs to one kind of thing.
    ({"model__path": ""}, "model.path = '': give a Hugging Face directory"),
    ({"sampling__temperature": 0.0}, "sampling.temperature = 0.0"),
    ({"sampling__temperature": 1e-9}, "1e-09: must be 0.01 or more"),
    ({"sampling__temperature": 1e9}, "1000000000.0: must be in [0, 100]"),
    ({"lora__targets": "layers/(q"}, "is no regular expression (missing )"),
    ({"data__template": "no field"}, "must hold {prompt}"),
    (
      {"data__template": "{prompt}\udcff"},
      "'{prompt}\\udcff': is no UTF-8 text",
    ),
    ({"data__system_prompt": "\udcff"}, "'\\udcff': is no UTF-8 text"),
    *(
      ({"data__template": template}, "must hold {prompt}")
      for template in (
        "{prompt} {answer}",
        "{prompt} {prompt[0]}",
        "{prompt.__class__} {prompt}",
        "{prompt} {prompt!r}",
        "{prompt:>9999999999}",
        "{prompt:{prompt}}",
        "{{prompt}}",
        "{prompt} {",
      )
    ),
    (
      {"optim__name": "adafactor", "optim__moments_dtype": "bfloat16"},
      "use 'float32', or optim.name = 'adamw'",
    ),
    ({"lora__rank": 4, "diagnostics__last_layers": 1}, "as a whole: use 0"),
    ({"profile__steps": "3"}, "profile.steps = '3'"),
    ({"profile__steps": "3:50"}, "the last step is 40"),
    # The loss and its reference.
    ({"loss__beta": 0.1, "loss__kl": "k1"}, "pulls nowhere"),
    (
      {"loss__beta": 0.1, "loss__kl": "k3", "loss__kl_placement": "reward"},
      "use k1",
    ),
    (
      {"loss__beta": 0.1, "loss__kl": "k2", "loss__kl_placement": "ratio"},
      "use k1 or k3",
    ),
    (
      {"loss__beta": 1, "loss__kl": "exact", "model__reference": "host"},
      "model.reference = 'host': loss.kl = 'exact' reads the",
    ),
    (
      {"loss__beta": 1, "loss__kl": "exact", "loss__kl_placement": "ratio"},
      "use k1 or k3",
    ),
    ({"model__reference_every": 1}, "use 0, or loss.beta > 0"),
    ({"model__teacher": "arithmetic-base"}, "use '', or loss.beta > 0"),
    ({"model__reference_prompt": "{prompt}!"}, "use '', or loss.beta > 0"),
    (
      {"model__reference_prompt": "{answer}", "loss__beta": 1.0},
      "must hold {prompt}",
    ),
    (
      {"model__reference_prompt": "{prompt.x}", "loss__beta": 1.0},
      "must hold {prompt}",
    ),
    ({"model__reference_mix": 0.5}, "a fixed reference is not mixed: use 1"),
    (
      {"loss__entropy_coef": 2.0, "loss__entropy_target": 0.1},
      "loss.entropy_coef = 2.0: starts above loss.entropy_coef_max = 1.0",
    ),
    (
      {"loss__top_entropy_quantile": 0.2, "loss__surrogate": "gmpo"},
      "loss.top_entropy_quantile = 0.2: with loss.surrogate = 'gmpo'",
    ),
    (
      {"loss__top_entropy_quantile": 0.2, "loss__ratio": "sequence_ratio"},
      "has the gradient of its whole completion",
    ),
    # The sizes of batches.
    ({"optim__minibatches": 5}, "must divide batch_size = 32"),
    (
      {"optim__minibatches": 4, "optim__micro_batches": 3},
      "8 prompts of 8 samples cannot be cut into 3 equal parts",
    ),
    ({"group_size": 1}, "baseline (vanilla, reinforce_plus_plus)"),
    (
      {"advantage": "max_at_k", "subset_size": 8},
      "group_size = 8, subset_size = 8: max_at_k with k = 8 needs rewards",
    ),
    ({"advantage": "min_at_k", "subset_size": 20}, "group size G >= 21"),
    (
      {"advantage": "shrinkage", "batch_size": 2, "optim__micro_batches": 1},
      "shrinkage needs a batch of at least 3 prompts",
    ),
    (AUTO | {"loss__advantage_clip": 2.0}, "clip = 2.0: group_size = 'auto'"),
    (AUTO | {"loss__off_policy_threshold": 0.1}, "group_size = 'auto'"),
    (AUTO | {"loss__correction": "token_truncate"}, "group_size = 'auto'"),
    (AUTO | {"loss__weighting": "sequence_mean"}, "all tokens count alike"),
    (AUTO | {"loss__truncated": "drop"}, "use 'keep', or a number for group"),
    (AUTO | {"auto_group_size__largest": 128}, "leaves 256 / 128 prompts a "),
    (AUTO | {"auto_group_size__start": 6}, "must be powers of two"),
    ({"group_size": "auto"}, "rests on the diagnostics: give 1 or more"),
    # Rewards.
    ({"reward__functions": (), "reward__weights": ()}, "at least one"),
    (
      {"reward__functions": ("a", "a"), "reward__weights": (1.0, 1.0)},
      "names must differ",
    ),
    ({"reward__weights": (1.0, 2.0)}, "must be finite numbers, one for each"),
    ({"reward__weights": (float("nan"),)}, "must be finite numbers"),
    ({"reward__weights": ("1",)}, "must be finite numbers"),
    ({"reward__model_weight": float("inf")}, "reward.model_weight = inf"),
    (
      {"reward__on_device": True, "reward__functions": ("math_answer",)},
      "nothing else can be computed on token ids",
    ),
    ({"reward__on_device": True, "reward__model": "x"}, "reward.on_device"),
    (
      {"reward__on_device": True, "mesh__sampling_tensor": 2},
      "mesh.sampling_tensor = 2: reward.on_device is one program",
    ),
    (
      {"reward__on_device": True, "model__reference": "host"},
      "use 'device', or reward.on_device = False",
    ),
    ({"score_power": 0.0}, "score_power = 0.0: must be more than 0"),
    # Rollouts in int8, which are not the policy's.
    (
      {"sampling__weights_dtype": "int8"},
      "loss.correction = 'none': samples in int8 (weights_dtype) are not",
    ),
    (
      {"sampling__ahead": 1, "loss__correction": "geometric_mask"},
      "loss.correction = 'geometric_mask': samples drawn before the last",
    ),
    (
      {
        "sampling__cache_dtype": "int8",
        "optim__epochs": 2,
        "loss__old_logprobs": "trainer",
      },
      "loss.correction = 'none': samples in int8 (cache_dtype) are not",
    ),
    (
      INT8 | K1,
      "loss.kl_placement = 'reward': the penalty is of the rollout's",
    ),
    # Rollouts of the parameters before the last update.
    (
      {"sampling__ahead": 1},
      "loss.correction = 'none': samples drawn before the last update",
    ),
    (  # It multiplies by no ratio.
      {"sampling__ahead": 1, "optim__minibatches": 2, "loss__surrogate": "dro"},
      "loss.correction = 'none': samples drawn before the last update",
    ),
    (
      K1 | {"loss__correction": "sequence_truncate"},
      "loss.kl_placement = 'reward': the penalty is of the rollout's",
    ),
    ({"sampling__ahead": 2}, "sampling.ahead = 2: must be in [0, 1]"),
    (AHEAD | {"filter_groups__enable": True}, "filter_groups.enable = True"),
    (AHEAD | {"difficulty__priority": "spread"}, "difficulty.priority ="),
    (AHEAD | {"reward__on_device": True}, "use 0, or reward.on_device = F"),
    (
      {"sampling__ahead": 1, "optim__epochs": 2} | AUTO,
      "sampling.ahead = 1: group_size = 'auto' follows",
    ),
    ({"mesh__sampling_devices": 4}, "sampling_devices = 4: devices would wait"),
    (
      AHEAD | {"mesh__sampling_devices": 4, "environment__path": "x.py"},
      "mesh.sampling_devices = 4: not with an environment",
    ),
    # Parts of a step.
    (
      {"loss__correction": "token_mask", "optim__epochs": 2},
      "with several updates a step and loss.old_logprobs = 'rollout' the",
    ),
    (
      AGGREGATED | {"reward__on_device": True},
      "use 'sum_then_normalize', or reward.on_device = False",
    ),
    (AGGREGATED | AUTO, "use 'sum_then_normalize', or a number for group_size"),
    (
      AGGREGATED | {"group_size": 1, "advantage": "vanilla"},
      "a group of 1 has no spread",
    ),
    (AGGREGATED | {"advantage": "beta_binomial"}, "cannot read normalised"),
    (AGGREGATED | K1, "a KL penalty is in nats"),
    (
      FILTERED | {"reward__on_device": True},
      "filter_groups.enable = True: the step is one program",
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
    ({"difficulty__importance_weights": True}, "no choice to undo: use False"),
    (
      BY_DIFFICULTY | {"reward__on_device": True},
      "priority = 'varies': the step is one program",
    ),
    (
      BY_DIFFICULTY
      | {"difficulty__importance_weights": True, "diagnostics__every": 5},
      "importance_weights = True: the diagnosis",
    ),
  ],
)
def test_one_problem_is_one_line(changes, text, config_with):
  with pytest.raises(ValueError) as error:
    from_config(config_with(**changes))
  lines = str(error.value).splitlines()
  assert len(lines) == 2 and text in lines[1]
  assert lines[1].startswith("  --config.")  # as it is typed


def test_a_value_is_refused_with_what_its_setting_is(config_with):
  with pytest.raises(ValueError) as error:
    from_config(config_with(optim__b2=1.0, loss__kl="k33", advantage="oracle"))
  lines = str(error.value).splitlines()[1:]
  assert lines == [
    "  --config.loss.kl = 'k33': did you mean k3? use one of exact, "
    "k1, k2, k3 (estimator of the KL divergence from the reference; exact sums "
    "over the vocabulary)",
    "  --config.advantage = 'oracle': needs the true value of each prompt, "
    "which a training run does not know; use one of "
    f"{', '.join(CHOICES['advantage'])}",
    "  --config.optim.b2 = 1.0: must be in [0, 1) (decay of the second moment)",
  ]


@pytest.mark.parametrize(
  "changes",
  [
    {"group_size": 1, "advantage": "vanilla"},
    {"group_size": 1, "advantage": "reinforce_plus_plus"},
    {"advantage": "max_at_k", "subset_size": 7},
    {"subset_size": 20},  # nobody asks for it
    {"advantage": "shrinkage", "batch_size": 3, "optim__micro_batches": 1},
    {"loss__beta": 0.1, "loss__kl": "k1", "loss__kl_placement": "reward"},
    {"loss__beta": 0.1, "loss__kl": "k3", "loss__kl_placement": "ratio"},
    {"loss__dual_clip": 3.0, "sampling__top_p": 0.9},
    {"loss__entropy_coef": 2.0},
    {"loss__entropy_target": 0.3, "loss__entropy_coef_delta": 0.0},
    {
      "loss__top_entropy_quantile": 0.2,
      "loss__surrogate": "cispo",
    },
    {"optim__minibatches": 4, "optim__micro_batches": 8},
    # Groups are cut too.
    {"optim__minibatches": 4, "optim__micro_batches": 64},
    {"optim__minibatches": 32, "optim__micro_batches": 2},
    {"mesh__data": 2, "mesh__fsdp": 4},
    {"lora__rank": 8, "data__too_long": "drop"},
    {
      "reward__functions": ("math_answer", "my.module:f"),
      "reward__weights": (1, 0.5),
    },
    {"steps": 0, "data__template": "{{x}} {prompt}"},
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
    INT8,
    # Ratios to the rollout's log-probabilities correct it, too.
    {"sampling__weights_dtype": "int8", "optim__minibatches": 2},
    INT8 | K1 | {"loss__old_logprobs": "trainer", "optim__minibatches": 2},
    IN_PARTS,
    BY_DIFFICULTY,
  ],
)
def test_valid_combinations(changes, config_with):
  from_config(config_with(**changes))


@pytest.mark.parametrize(
  "devices, changes, text",
  [
    (1, {}, ""),
    (8, {"mesh__fsdp": 8}, ""),  # 8 prompts a micro-batch
    (8, {"mesh__fsdp": 8, "batch_size": 4}, ""),  # a prompt, and 8 samples
    (8, {"mesh__tensor": 8, "batch_size": 3, "optim__micro_batches": 1}, ""),
    (8, {"mesh__fsdp": 8, "mesh__sampling_tensor": 4}, ""),
    (8, {"mesh__fsdp": 4, "optim__micro_batches": 8}, ""),  # 8 x 4 samples
    (2, {"mesh__fsdp": -1}, "mesh data=-1 fsdp=-1 .* at most one is -1"),
    (2, {"mesh__data": 3}, "mesh data=3 .* needs 3 devices, and there are 2"),
    (
      8,
      {"mesh__fsdp": 8, "mesh__sampling_tensor": 3},
      "mesh.sampling_tensor = 3: .* divide the 8 devices",
    ),
    (8, {"eval__batch_size": 12}, "eval_batch: 12 prompts x 1 .* 8 devices"),
    (
      8,
      {"batch_size": 4, "group_size": 6, "optim__micro_batches": 1},
      "rollout: 4 prompts x 6 samples .* 8 devices",
    ),
    (
      8,  # the rollout can be cut, a micro-batch cannot
      {"batch_size": 4, "group_size": 8, "optim__micro_batches": 8},
      "micro_batch: 1 prompts x 4 samples .* 8 devices",
    ),
  ],
)
def test_batches_are_cut_over_real_devices(devices, changes, text, config_with):
  config = config_with(**changes)
  settings = from_config(config)
  with pytest.raises(ValueError, match=text) if text else nullcontext():
    mesh = setup.make_mesh(settings, jax.devices()[:1] * devices)
    batches.check_mesh(settings, mesh)


def test_all_problems_at_once(config_with):
  ranges = {"steps": -1, "loss__ratio": "tokn", "advantage": "vanila"}
  conflicts = {"optim__minibatches": 5, "model__reference_mix": 0.5}
  with pytest.raises(ValueError) as error:
    from_config(config_with(**ranges, **conflicts))
  assert len(str(error.value).splitlines()) == 4
  with pytest.raises(ValueError) as error:
    from_config(config_with(**conflicts))
  assert len(str(error.value).splitlines()) == 3


def test_settings_and_config_are_each_other(config_with):
  config = config_with(
    advantage="dr_grpo",
    logits_chunk=7,
    loss__clip_high=0.3,
    optim__micro_batches=2,
    sampling__stages=2,
    group_size="auto",
    diagnostics__every=1,
    data__options__size=5,
  )
  settings = from_config(config)
  assert settings.loss.advantage == "dr_grpo"
  assert settings.loss.clip_high == 0.3
  assert settings.optim.update.chunk_size == 7
  assert settings.optim.update.micro_batches == 2
  assert settings.sampling.decoding.stages == 2
  assert settings.data.options == {"size": 5}
  assert config_lib.flatten(to_config(settings)) == config_lib.flatten(config)
  assert from_config(to_config(settings)) == settings
  assert from_config(default_config()) == TrainSettings()


def test_unknown_missing_and_mistyped_keys():
  config = default_config().unlock()
  config.optim.learning_rat = 1.0
  config.data.options.anything = 1  # the dataset checks these
  del config.log.every
  with config.ignore_type():
    config.steps = "60"
    config.loss.clip_low = 1  # an int does for a float
  with pytest.raises(ValueError) as error:
    from_config(config)
  text = str(error.value)
  assert "did you mean --config.optim.learning_rate?" in text
  assert "log.every: missing" in text
  assert "steps = '60': must be of type int" in text
  assert len(text.splitlines()) == 4


def test_json_round_trip_keeps_types(config_with):
  config = config_with(optim__learning_rate=3, data__options__difficulty=(1, 2))
  text = config_lib.to_json(config)
  again = config_lib.from_json(text)
  assert json.loads(text)["optim"]["learning_rate"] == 3.0
  assert again.data.options.difficulty == (1, 2)
  assert isinstance(again.optim.learning_rate, float)
  assert again.eq_as_configdict(config) and again.is_locked
  from_config(again)


def test_difference(config_with):
  old, new = config_with(), config_with(steps=61, loss__kl="k2")
  with old.unlocked():
    del old.seed
  assert config_lib.difference(old, new) == [
    "loss.kl: 'k3' -> 'k2'",
    "seed: '(none)' -> 0",
    "steps: 40 -> 61",
  ]
  assert config_lib.difference(new, new) == []
