"""Validation of the configuration, and typed settings."""

import math
from contextlib import nullcontext

import jax
import pytest

from grpojax.runtime.cli import command_line, configs
from grpojax.training.config import (
  SETTINGS,
  default_config,
  from_config,
  parse_job,
  to_config,
)
from grpojax.training.run import setup
from grpojax.training.settings import batches
from grpojax.training.settings.run import TrainSettings


def config_of(words):
  """The default config with changes SETTING=VALUE of a command line."""
  return command_line.parse([f"--{x}" for x in words.split()], {}, SETTINGS)[0]


def errors_of(config):
  """Lines of a config's error without the first."""
  with pytest.raises(ValueError) as error:
    from_config(config)
  return str(error.value).splitlines()[1:]


def test_unknown_missing_and_mistyped_keys():
  config = default_config().unlock()
  config.optim.learning_rat = 1.0
  config.optim_options = {"b1": 0.3}
  config.data.templates_options = {"enable_thinking": False}
  config.data.options.anything = 1  # checked by the data set
  config.reward.options.length = {"target": 3}
  del config.log.every, config.data["options"]
  with config.ignore_type():
    config.steps = "60"
    config.loss.clip_low = 1  # int instead of float is allowed
    config.eval = None
  lines = errors_of(config)
  texts = (
    "optim.learning_rat = 1.0: unknown key; did you mean --config.optim.learni",
    "optim_options.b1 = 0.3: unknown key",
    "data.templates_options.enable_thinking = False: unknown key",
    "log.every: missing",
    "data.options: missing",
    "steps = '60': must be of type int",
    "eval = None: is a section",
    *(f"eval.{name}: missing" for name in default_config().eval),
  )
  for text in texts:
    assert any(line.startswith(f"  --config.{text}") for line in lines), text
  assert len(lines) == len(texts)


AUTO = "group_size=auto diagnostics.every=1"
AGGREGATED = "reward.aggregation=normalize_then_sum"
FILTERED = "filter_groups.enable"
BY_DIFFICULTY = "difficulty.priority=varies"
WEIGHTED = f"{BY_DIFFICULTY} difficulty.importance_weights"
K1 = "loss.beta=0.1 loss.kl=k1 loss.kl_placement=reward"
EXACT = "loss.beta=1 loss.kl=exact"
AHEAD = "sampling.ahead=1 loss.correction=sequence_truncate"
INT8 = "sampling.weights_dtype=int8 sampling.cache_dtype=int8"
INT8 += " loss.correction=token_truncate"
IN_PARTS = "sampling.parts=2 batch_size=4 reward.workers=1"
TWO = "reward.functions=exact_answer,length reward.weights=1,1"
ACCURACY = "filter_groups.metric=acc filter_groups.rescale"
FEW = "batch_size=4 optim.micro_batches=1"
FOUR_PARTS = f"{FEW} sampling.parts=4 reward.workers=1"
QUANTILE = "loss.top_entropy_quantile=0.2"
PENALTY = "reward.length_penalty=0.1"
SUBSETS = "advantage=max_at_k optim.minibatches=2"
TRAINER = "loss.old_logprobs=trainer"
MIXED = "data.mixture.gsm8k"
PLAYED = "environment.path=retry"
BY_TURN = f"{PLAYED} environment.credit=turn"
RETURN = "reward.functions=environment"
REFUSED = [
  ("model.path=", "model.path = '': give a Hugging Face directory"),
  ("sampling.temperature=1e-9", "1e-09: must be 0.01 or more"),
  ("lora.targets=layers/(q", "is not a regular expression: missing )"),
  ("optim.name=adafactor optim.moments_dtype=bfloat16", "use 'float32', or"),
  ("lora.rank=4 diagnostics.last_layers=1", "as a whole: use 0"),
  ("profile.steps=5:4", "profile.steps = '5:4': give FIRST:LAST"),
  ("profile.steps=39:41", "the last step is 40"),
  # Loss and reference.
  ("loss.beta=0.1 loss.kl=k1", "has a gradient of mean zero"),
  (f"{EXACT} loss.kl_placement=ratio", "use k1 or k3"),
  (f"{EXACT} model.reference=host", "model.reference = 'host': loss.kl ="),
  ("model.reference_every=1", "use 0, or loss.beta > 0"),
  ("loss.kl=exact", "use 'k3', or loss.beta > 0"),
  ("model.reference_prompt={answer} loss.beta=1", "must contain {prompt}"),
  ("model.reference_mix=0.5", "a fixed reference is not mixed: use 1"),
  ("loss.entropy_coef=2 loss.entropy_target=0.1", "loss.entropy_coef = 2.0:"),
  (f"{QUANTILE} loss.surrogate=gmpo", "loss.top_entropy_quantile = 0.2: with"),
  (f"{QUANTILE} loss.ratio=sequence_ratio", "gradient of its whole completion"),
  # Sizes of batches.
  ("optim.minibatches=5", "must divide batch_size = 32"),
  ("optim.minibatches=4 optim.micro_batches=3", "8 prompts of 8 samples"),
  ("advantage=max_at_k subset_size=8", "subset_size = 8: advantage = 'max_"),
  ("advantage=shrinkage batch_size=2 optim.micro_batches=1", "shrinkage needs"),
  (
    "advantage=max_at_k loss.correction=token_truncate",
    "but samples corrected by",
  ),
  (f"{SUBSETS} sampling.ahead=1", "but samples drawn before the last"),
  (f"{SUBSETS} sampling.cache_dtype=int8", "but samples in int8"),
  (f"{AUTO} advantage=grpo", "'grpo': group_size = 'auto' needs the diag"),
  (f"{AUTO} loss.weighting=sequence_mean", "equal token weights"),
  (f"{AUTO} loss.truncated=drop", "use 'keep', or a number for"),
  (f"{AUTO} auto_group_size.largest=128", "leaves 256 / 128 prompts per step"),
  (f"{AUTO} auto_group_size.start=6", "must be powers of two"),
  ("group_size=auto", "needs diagnostics: use 1 or more"),
  # Rewards.
  ("reward.functions=() reward.weights=()", "at least one"),
  ("reward.functions=a,a reward.weights=1,1", "names a function twice: remove"),
  ("reward.weights=1,2", "must be finite numbers, one for each"),
  ("reward.on_device reward.functions=math_answer", "scores token ids: use"),
  ("reward.on_device mesh.sampling_tensor=2", "mesh.sampling_tensor = 2:"),
  (f"{PENALTY} reward.on_device", "length_penalty"),
  (f"{PENALTY} {FILTERED}", "length_penalty"),
  (f"{PENALTY} {AUTO}", "length_penalty"),
  (f"{PENALTY} {AGGREGATED} {TWO}", "length_penalty"),
  # Off-policy rollouts: int8, or sampled ahead.
  ("sampling.weights_dtype=int8", "loss.correction = 'none': samples in int8"),
  (f"sampling.cache_dtype=int8 optim.epochs=2 {TRAINER}", "(cache_dtype) are"),
  (f"{INT8} {K1}", "loss.kl_placement = 'reward': the penalty uses the"),
  ("sampling.ahead=1", "loss.correction = 'none': samples drawn before the"),
  (f"{AHEAD} {FILTERED}", "filter_groups.enable = True"),
  (f"{AHEAD} difficulty.priority=spread", "difficulty.priority ="),
  (f"sampling.ahead=1 optim.epochs=2 {AUTO}", "sampling.ahead = 1: group_size"),
  ("mesh.sampling_devices=4", "sampling_devices = 4: these devices would"),
  (f"{AHEAD} mesh.sampling_devices=4 environment.path=x.py", "with an env"),
  # Environments.
  (RETURN, "set environment.path"),
  (f"{PLAYED} environment.failed=zero reward.model=judge", "of a failed tr"),
  ("environment.credit=turn", "there are no turns"),
  (BY_TURN, "add 'environment' to reward.functions"),
  (f"{BY_TURN} {RETURN} advantage=grpo", "use advantage = 'leave_one_out'"),
  (f"{BY_TURN} {RETURN} diagnostics.every=2", "one advantage per traj"),
  # Mixtures of data sets.
  (f"{MIXED}.wieght=1", ".gsm8k.wieght = 1: unknown key: use name, path"),
  (f"{MIXED}.weight=0", ".gsm8k.weight = 0: must be a positive number"),
  (f"{MIXED}.name=gsm9k", "name = 'gsm9k': use one of arithmetic, gsm8k"),
  (f"{MIXED}.rewards=length", "rewards = 'length': use names of reward.fun"),
  (f"{MIXED}.rewards=exact_answer {TWO}", "uses the reward length: remove it"),
  (f"{MIXED}=3", "data.mixture.gsm8k = 3: is a section"),
  (f"{MIXED}.weight=1 data.path=x", "use data.mixture.NAME.path"),
  ("data.mixture.a/b.name=gsm8k", "data.mixture = 'a/b': is part of metric"),
  # Models of the Hub.
  ("model.revision=v1", "with model.path = ORG/NAME"),
  ("model.path=a/b model.revision=../x", "a branch, tag"),
  ("model.path=a/b@v1 model.revision=v2", "remove one of them"),
  # Parts of a step.
  ("loss.correction=token_mask optim.epochs=2", "several updates per step"),
  (f"{AGGREGATED} reward.on_device", "normalize', or reward.on_device = False"),
  (f"{AGGREGATED} group_size=1 advantage=vanilla", "a group of 1 has no"),
  (f"{AGGREGATED} advantage=beta_binomial", "cannot read normalised"),
  (f"{AGGREGATED} {K1}", "needs unnormalised rewards"),
  (f"{FILTERED} advantage=vanilla", "also uses groups of equal rewards: use"),
  (f"{FILTERED} filter_groups.gen_parts=3", "gen_parts = 3: must divide a"),
  (f"{FILTERED} {TWO} {ACCURACY}", "may differ in other rewards"),
  (f"{IN_PARTS} sampling.parts=3", "sampling.parts = 3: must divide"),
  (f"{IN_PARTS} reward.workers=0", "sampling.parts = 2: no process can"),
  ("difficulty.band=0.9,0.1", "band = (0.9, 0.1): must be two"),
  ("difficulty.target=0.5,1", "inside (0, 1)"),
  ("difficulty.importance_weights", "no priorities to correct for: use False"),
  (f"{BY_DIFFICULTY} reward.on_device", "priority = 'varies': a step on"),
  (f"{WEIGHTED} diagnostics.every=5", "weights = True: the diagnosis ig"),
]


@pytest.mark.parametrize("words, text", REFUSED)
def test_each_conflict_is_one_error_line(words, text):
  (line,) = errors_of(config_of(words))
  assert text in line and line.startswith("  --config.")


FINITE = "must be finite numbers, one for each"


@pytest.mark.parametrize(
  "name, value, text",
  [
    ("reward.weights", (10**400,), FINITE),
    ("reward.weights", (math.nan,), FINITE),
    ("difficulty.band", (0.1, 10**400), "0 <= low < high <= 1"),
    ("difficulty.band", (math.nan, 1), "0 <= low < high <= 1"),
    ("data.system_prompt", "\udcff", "'\\udcff': is not valid UTF-8"),
    ("data.template", "no field", "must hold {prompt}"),
    ("data.template", "{prompt.__class__} {prompt}", "must hold {prompt}"),
  ],
)
def test_malformed_values_are_refused(name, value, text, config_with):
  (line,) = errors_of(config_with(**{name: value}))
  assert text in line and line.startswith(f"  --config.{name} = ")


def test_invalid_values_are_reported_before_conflicts():
  conflicts = "optim.minibatches=5 model.reference_mix=0.5"
  words = f"optim.b2=1 loss.kl=k33 advantage=oracle {conflicts}"
  assert errors_of(config_of(words)) == [
    "  --config.loss.kl = 'k33': did you mean k3? use one of exact, "
    "k1, k2, k3 (estimator of the KL divergence from the reference; exact: sum "
    "over the vocabulary)",
    "  --config.advantage = 'oracle': needs the true value of each prompt, "
    "which training does not know: use one of "
    f"{', '.join(SETTINGS.fields['advantage'].choices)}",
    "  --config.optim.b2 = 1.0: must be in [0, 1) (decay of the second moment)",
  ]
  assert len(errors_of(config_of(conflicts))) == 2


@pytest.mark.parametrize(
  "words",
  [
    "group_size=1 advantage=vanilla subset_size=20",  # unused
    "advantage=max_at_k subset_size=7",
    "advantage=shrinkage batch_size=3 optim.micro_batches=1",
    K1,
    "loss.entropy_target=0.3 loss.entropy_coef_delta=0",
    f"{QUANTILE} loss.surrogate=cispo",
    # Groups are split as well.
    "optim.minibatches=4 optim.micro_batches=64",
    "steps=0 reward.functions=math_answer,my.module:f reward.weights=1,0.5",
    "steps=40 profile.steps=39:40 data.template={{x}}{prompt}",
    f"loss.correction=token_mask optim.epochs=2 {TRAINER}",
    # Ratios to the rollout policy correct for int8.
    "sampling.weights_dtype=int8 optim.minibatches=2",
    "sampling.ahead=1 optim.minibatches=2",
    f"{INT8} {K1} {TRAINER} optim.minibatches=2",
  ],
)
def test_valid_combinations(words):
  from_config(config_of(words))


@pytest.mark.parametrize(
  "devices, words, text",
  [
    (8, "mesh.fsdp=8", ""),  # 8 prompts a micro-batch
    (8, "mesh.fsdp=8 batch_size=4", ""),  # a prompt, and 8 samples
    (8, "mesh.fsdp=8 mesh.sampling_tensor=4", ""),
    (8, "mesh.fsdp=4 optim.micro_batches=8", ""),  # 8 x 4 samples
    (2, "mesh.data=3", "mesh data=3 .* needs 3 devices, and there are 2"),
    (8, "mesh.fsdp=8 mesh.sampling_tensor=3", "= 3: .* divide the 8 devices"),
    (8, "eval.batch_size=12", "eval_batch: 12 prompts x 1 .* 8 devices"),
    (8, f"{FEW} group_size=6", "rollout: 4 prompts x 6 samples .* 8 devices"),
    (2, f"{FOUR_PARTS} group_size=2", ""),  # groups are split
    (2, f"{FOUR_PARTS} group_size=3", "rollout: 1 prompts x 3 samples"),
    # The rollout divides, a micro-batch does not.
    (8, f"{FEW} optim.micro_batches=8", "micro_batch: 1 prompts x 4 samples"),
    (8, f"{AHEAD} mesh.sampling_devices=9", "9: leaves no device for training"),
    (8, f"{AHEAD} mesh.sampling_devices=4 mesh.fsdp=8", "not counting 4 of"),
  ],
)
def test_batches_must_divide_over_devices(devices, words, text):
  settings = from_config(config_of(words))
  with pytest.raises(ValueError, match=text) if text else nullcontext():
    mesh = setup.make_mesh(settings, jax.devices()[:1] * devices)
    batches.check_mesh(settings, mesh)


def test_settings_and_config_convert_both_ways():
  config = config_of(
    f"advantage=dr_grpo logits_chunk=7 loss.clip_high=0.3 sampling.top_k=2 "
    f"optim.micro_batches=2 data.options.size=5 {AUTO}"
  )
  settings = from_config(config)
  assert settings.loss.advantage == "dr_grpo"
  assert settings.optim.update.chunk_size == 7
  assert settings.sampling.distribution.top_k == 2
  assert configs.flatten(to_config(settings)) == configs.flatten(config)
  assert from_config(to_config(settings)) == settings
  assert from_config(default_config()) == TrainSettings()


def test_another_model_has_another_default_job():
  def parsed(*argv):
    return parse_job(argv, {}, SETTINGS)[0]

  model = "--config.model.path=org/model"
  job = parsed(model, "--config.seed=3")
  assert (job.name, job.seed, job.model.path) == ("own_model", 3, "org/model")
  assert job.optim.learning_rate == 1e-6
  assert parsed("-model.path", "org/model").name == "own_model"
  lora = model, "--config.lora.rank=8"
  assert parsed(*lora).optim.learning_rate == 1e-5
  changed = parsed(*lora, "--config.optim.learning_rate=3e-6")
  assert changed.optim.learning_rate == 3e-6
  assert parsed("--config.model.path=arithmetic-base").name == "arithmetic"
  assert parsed(model, "--model.path=arithmetic-base").name == "arithmetic"
  assert parsed().model.path == "arithmetic-careless"
  assert default_config().model.path != "arithmetic-careless"
  assert parsed("--config=gsm8k", model).name == "gsm8k"
