"""Translated configurations of TRL and verl are valid, and no code is run.

The expected settings were derived by hand from the sources of TRL 1.16 and
verl 0.9.1.
"""

import json
import math
import pathlib
import re

import pytest
import yaml
from translated import become, cases, check

from grpojax import translate
from grpojax.runtime.cli import config_file
from grpojax.runtime.cli.configs import flatten
from grpojax.training.config import default_config, from_config
from grpojax.translation import trl, verl

DATA = pathlib.Path(__file__).parent / "data"
DOCS = pathlib.Path(__file__).parents[2] / "docs"
FILES = {  # (options of translate, expected settings)
  # 8 x 8 x 4 = 256 completions in groups of 16; a single update, two epochs.
  "trl_grpo.yaml": (
    "processes=8",
    "batch_size=16 group_size=16 optim.minibatches=1 optim.micro_batches=4 "
    "optim.epochs=2 steps=250 optim.warmup_steps=50 checkpoint.every=50 "
    "eval.every=25 advantage=dr_grpo loss.weighting=fixed_length "
    "loss.clip_low=0.2 loss.clip_high=0.28 loss.beta=0.001 loss.truncated=mask "
    "loss.correction=sequence_mask loss.correction_high=3.0 "
    "sampling.temperature=0.9 sampling.max_new_tokens=2048 "
    "reward.functions=('trl.rewards:accuracy_reward',"
    "'trl.rewards:think_format_reward') reward.weights=(1.0,0.2) "
    "name=Qwen2.5-1.5B-GRPO seed=7",
  ),
  # 8 x 4 = 32 completions in groups of 8, in two updates of 2 x 8. There are
  # 10 // 4 steps, because TRL drops a partial generation.
  "trl_script.py": (
    "examples=10",
    "batch_size=4 group_size=8 optim.minibatches=2 optim.micro_batches=1 "
    "steps=2 advantage=grpo loss.weighting=token_mean lora.rank=8 "
    "lora.alpha=32.0 lora.targets=layers/(q|o) "
    "model.path=Qwen/Qwen2-0.5B-Instruct model.remat=selective "
    "data.name=huggingface data.path=trl-lib/tldr "
    "reward.functions=('OUT/config_functions.py:reward_num_unique_letters',"
    "'trl.rewards:think_format_reward') seed=42",
  ),
  # 256 x 5 / (16 x 8) = 10 micro-batches; 15 x (14976 // 1024) = 210 steps.
  "verl_grpo.yaml": (
    "examples=14976",
    "batch_size=1024 group_size=5 optim.minibatches=4 optim.micro_batches=10 "
    "steps=210 data.max_prompt_length=1024 data.too_long=drop "
    "data.name=parquet data.path=~/data/gsm8k/train.parquet "
    "sampling.max_new_tokens=2048 loss.beta=0.001 loss.dual_clip=3.0 "
    "model.reference=host optim.weight_decay=0.01 eval.every=5 "
    "checkpoint.every=20 name=qwen2_7b_function_rm",
  ),
  # A warmup of ten steps of 16 updates.
  "verl_dapo.yaml": (
    "",
    "batch_size=512 group_size=16 optim.minibatches=16 optim.warmup_steps=160 "
    "optim.weight_decay=0.1 steps=200 loss.clip_high=0.28 loss.dual_clip=10.0 "
    "filter_groups.enable=True filter_groups.max_num_gen_batches=10 "
    "reward.functions=('rewards/dapo.py:compute_score','overlong') "
    "reward.options.compute_score.strict=True "
    "reward.options.overlong.cache=4096",
  ),
}


@pytest.mark.parametrize("name", FILES)
def test_real_files(name, tmp_path, capsys):
  out = tmp_path / "config.py"
  options, expected = FILES[name]
  flags = [f"--{option}" for option in options.split()]
  translate.main([str(DATA / name), f"--out={out}", *flags])
  config = config_file.load_file(str(out), default_config)
  from_config(config)
  check(flatten(config), expected.replace("OUT", str(tmp_path)))
  output = capsys.readouterr().out
  assert "differs in meaning" in output
  for line in output.splitlines():
    if line.startswith("- "):
      about = line.removeprefix("- ").split(" ")[0]
      assert about in out.read_text()


def test_missing_and_unneeded_settings_are_listed():
  def listed(file):
    x = translate.translate_file(DATA / file)
    missing = ", ".join(note.origin for note in x.notes if note.missing)
    return {*missing.split(", ")}, {*x.unneeded}

  missing, _ = listed("trl_script.py")
  assert missing == {"learning_rate", "num_train_epochs"}
  missing, unneeded = listed("trl_grpo.yaml")
  assert {"vllm_mode", "attn_implementation"} <= unneeded - missing
  missing, unneeded = listed("verl_grpo.yaml")
  assert "trainer.critic_warmup" in unneeded - missing
  assert "trainer.total_epochs" in missing


TRL = cases("""
loss_type: vespo, vespo_k_pos: 1.5 ->
  loss.surrogate=vespo loss.vespo_k_pos=1.5 loss.ratio=trajectory_ratio
loss_type: luspo, importance_sampling_level: sequence ->
  loss.ratio=sequence_ratio loss.weighting=sequence_sum
beta: 0.1, use_bias_correction_kl: false ->
  loss.beta=0.1 loss.kl_placement=loss loss.kl=k3
beta: 0.1, sync_ref_model: true, num_iterations: 4 ->
  model.reference_every=128 model.reference_mix=0.6
optim: adafactor -> optim.name=adafactor
generation_kwargs: {stop: [Q, x]} -> sampling.stop=('Q','x')
generation_kwargs: {stop_strings: x} -> sampling.stop=('x',)
max_grad_norm: 0 -> optim.max_grad_norm=1e9
generation_batch_size: 64 -> batch_size=8 optim.minibatches=8
# TRL's updates have half a prompt, but minibatches have whole groups.
num_generations: 16, steps_per_generation: 4 -> batch_size=2 optim.minibatches=2
reward_funcs: [my.module.score, org/reward-model], reward_weights: [2, 3] ->
  reward.functions=('my.module:score',) reward.weights=(2.0,)
  reward.model=org/reward-model reward.model_weight=3.0
max_steps: 10, warmup_ratio: 0.25, lr_scheduler_type: cosine ->
  optim.warmup_steps=3 optim.schedule=cosine
# transformers' get_scheduler ignores the warmup of "constant".
warmup_steps: 3, lr_scheduler_type: constant ->
  optim.warmup_steps=0 optim.schedule=constant
warmup_steps: 3, lr_scheduler_type: constant_with_warmup ->
  optim.warmup_steps=3 optim.schedule=constant
# An update of four generations of the same policy.
max_steps: 6, gradient_accumulation_steps: 4, steps_per_generation: 1 ->
  batch_size=4 steps=6 optim.minibatches=1
dataset_name: openai/gsm8k -> data.name=gsm8k
chat_template_kwargs: {enable_thinking: false} ->
  data.template_options.enable_thinking=False
chat_template_kwargs: '{"a": 1}' -> data.template_options.a=1
# Turns of _tool_call_loop: the first, and another after each iteration.
max_tool_calling_iterations: 3 -> environment.max_turns=4
max_tool_calling_iterations: 0 -> environment.max_turns=1
# 16 / sqrt(4) = 32 / 4
use_peft: true, lora_r: 4, lora_alpha: 16, use_rslora: true ->
  lora.rank=4 lora.alpha=32.0
max_completion_length: 9 -> data.max_prompt_length=0
dataset_name: a/b, dataset_config: main, dataset_train_split: 'fit[:5%]',
  dataset_test_split: val ->
  data.path=a/b data.options.configuration=main data.options.train_split=fit
  data.options.test_split=val
# Micro-batches of at least 16 completions, or of TRL's size if larger.
per_device_train_batch_size: 8, gradient_accumulation_steps: 32 ->
  optim.micro_batches=16
per_device_train_batch_size: 64, gradient_accumulation_steps: 4 ->
  optim.micro_batches=4
max_steps: 7, save_steps: 0.5 -> checkpoint.every=4 steps=7
""")


def check_settings(text, expected, tmp_path):
  """Checks a YAML mapping; verl's names may omit "actor_rollout_ref."."""
  settings = {
    re.sub(r"^(actor|rollout|model|ref)\.", r"actor_rollout_ref.\g<0>", k): v
    for k, v in yaml.safe_load(f"{{{text}}}").items()
  }
  config, leaves, _ = become(json.dumps(settings), tmp_path, ".json")
  from_config(config)
  check(leaves, expected)


@pytest.mark.parametrize("text, expected", TRL)
def test_settings_of_trl(text, expected, tmp_path):
  check_settings(f"temperature: 1, {text}", expected, tmp_path)


@pytest.mark.parametrize(
  "paper, text",
  [
    ("GRPO (DeepSeekMath)", "loss_type: grpo\nbeta: 0.04"),
    ("Dr. GRPO", "loss_type: dr_grpo\nscale_rewards: false"),
    ("DAPO", "loss_type: dapo\nepsilon_high: 0.28"),
    (
      "GSPO",
      "loss_type: grpo\nimportance_sampling_level: sequence\nepsilon: 0.0003\n"
      "epsilon_high: 0.0004",
    ),
    ("CISPO", "loss_type: cispo\nepsilon_high: 5.0"),
    ("GDPO", "multi_objective_aggregation: normalize_then_sum"),
  ],
)
def test_recipes_of_papers_agree_with_trl(paper, text, tmp_path):
  """Compares the table of docs/objectives.md with TRL's paper index."""
  page = (DOCS / "objectives.md").read_text()
  (row,) = re.findall(rf"^\| {re.escape(paper)} \| (.*) \|$", page, re.M)
  recipe = dict(x.split("=") for x in re.findall(r"`([\w.]+=[\w.-]+)`", row))
  leaves = become(f"temperature: 1\n{text}\n", tmp_path)[1]
  recipe = {k: v for k, v in recipe.items() if "filter_" not in k}
  assert recipe.pop("advantage") == leaves["advantage"]
  for name, value in recipe.items():
    if name != "loss.truncated":  # DAPO's, instead of a reward
      assert str(leaves[name]) == str(type(leaves[name])(value)), name


@pytest.mark.parametrize("epochs", [1, 3, 2.5])
@pytest.mark.parametrize(
  "text, prompts, cuts",  # prompts and updates of a generation
  [
    ("gradient_accumulation_steps: 4", 4, 1),
    ("steps_per_generation: 8\ngradient_accumulation_steps: 4", 8, 2),
  ],
)
def test_epochs_are_counted_as_by_trl(text, prompts, cuts, epochs, tmp_path):
  """As transformers counts the batches of TRL's RepeatSampler."""
  chunks = [range(i, min(i + prompts, 50)) for i in range(0, 50, prompts)]
  whole = [chunk for chunk in chunks if len(chunk) == prompts]
  batches = len(whole) * 4 * cuts
  an_epoch = batches // 4 + (batches % 4 > 0)
  updates = math.ceil(epochs * an_epoch)
  text = f"{text}\nnum_train_epochs: {epochs}\n"
  _, leaves, _ = become(text, tmp_path, examples=50)
  assert leaves["batch_size"] == prompts
  assert leaves["optim.minibatches"] == cuts
  assert leaves["steps"] == math.ceil(updates / cuts)


def test_differences_to_trl_are_noted(tmp_path):
  def noted(text):
    return {note.origin for note in become(text, tmp_path)[2].notes}

  always = noted("temperature: 1\n")
  assert noted("max_steps: 9\nwarmup_steps: 2\n") - always == {"warmup_steps"}
  text = "scale_rewards: batch\nreport_to: [wandb, mlflow, all]\n"
  _, leaves, x = become(text, tmp_path)
  assert leaves["advantage"] == "batch_std"
  assert leaves["log.trackers"] == ("wandb",)
  notes = [note.text for note in x.notes]
  assert any("minus their group's mean" in text for text in notes)
  (tracker,) = [text for text in notes if "log.trackers=file.py" in text]
  assert "'mlflow'" in tracker
  masked = "mask_truncated_completions: true\nloss_type: {}\n"
  assert "loss_type" not in noted(masked.format("dapo"))
  for kind in ("grpo", "dr_grpo", "luspo", "sapo"):
    assert "loss_type" in noted(masked.format(kind))
  assert "loss_type" in noted("steps_per_generation: 4\n")


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
N_8 = f"{ROLLOUT}.n: 8"
REJECTION = "algorithm.rollout_correction.rollout_rs"
VERL = cases("""
algorithm.rollout_correction: {rollout_rs: seq_mean_k1,
  rollout_rs_threshold: '1.25'} ->
  loss.correction=geometric_mask loss.correction_low=0.8
  loss.correction_high=1.25
algorithm.rollout_correction: {rollout_rs: seq_mean_k1,
  rollout_rs_threshold: '0.5_4'} ->
  loss.correction=geometric_mask loss.correction_low=0.25
  loss.correction_high=2.0
actor.use_kl_loss: true, actor.kl_loss_type: low_var_kl+ -> loss.kl=k2
actor.use_kl_loss: true, actor.kl_loss_type: abs+ -> loss.kl=k2
actor.use_kl_loss: true, actor.kl_loss_type: full,
  ref.fsdp_config.param_offload: true ->
  loss.kl=exact model.reference=device
algorithm.adv_estimator: tir_optimal_token_baseline ->
  advantage=optimal_token_baseline score_power=1.0
rollout.enable_rollout_routing_replay: true -> loss.router_replay=True
algorithm.adv_estimator: gdpo ->
  advantage=batch_std reward.aggregation=normalize_then_sum
actor.policy_loss.loss_mode: gspo, actor.loss_agg_mode: seq-mean-token-mean ->
  loss.ratio=sequence_ratio loss.weighting=sequence_mean
actor.policy_loss.loss_mode: cispo, actor.clip_ratio_high: 4 ->
  loss.cispo_min=0.8 loss.cispo_max=5.0
actor.policy_loss.loss_mode: geo_mean, actor.clip_ratio_low: 0.4 ->
  loss.surrogate=gmpo loss.gmpo_clip_low=0.4 loss.weighting=sequence_mean
actor.policy_loss.loss_mode: dppo_kl, actor.clip_ratio_c: 9 ->
  loss.surrogate=dppo_kl loss.dppo_low=0.2 loss.dppo_ratio_max=9.0
actor.clip_ratio_low: null, actor.clip_ratio: 0.3 ->
  loss.clip_low=0.3 loss.clip_high=0.2
algorithm.use_kl_in_reward: true, algorithm.kl_ctrl.kl_coef: 0.05 ->
  loss.kl=k1 loss.kl_placement=reward loss.beta=0.05
algorithm.rollout_correction: {rollout_is: token,
  rollout_is_threshold: 0.5_5.0} ->
  loss.correction=token_mask loss.correction_low=0.5 loss.correction_high=5.0
  loss.old_logprobs=trainer
algorithm.rollout_correction.rollout_is: sequence ->
  loss.correction=sequence_truncate loss.correction_high=2.0
algorithm.filter_groups.enable: true, data.train_batch_size: 512,
  algorithm.filter_groups.metric: seq_final_reward ->
  filter_groups.metric=reward filter_groups.max_num_gen_batches=100
reward.reward_kwargs.overlong_buffer_cfg:
  {enable: true, len: 64, penalty_factor: 0.5} ->
  reward.functions=('math_answer','overlong') reward.weights=(1.0,0.5)
  reward.options.overlong.cache=64
# By the ratio, with 4 updates per step.
actor.optim.lr_warmup_steps: 0, trainer.total_training_steps: 50,
  actor.optim.lr_warmup_steps_ratio: 0.1 ->
  optim.warmup_steps=20
# 256 does not divide it.
data.train_batch_size: 384 -> batch_size=384 optim.minibatches=2
# The model has another turn after the user's last.
rollout.multi_turn: {max_assistant_turns: 5, max_user_turns: 2} ->
  environment.max_turns=3
rollout.multi_turn.max_assistant_turns: 2 -> environment.max_turns=2
rollout.multi_turn.max_user_turns: 0 -> environment.max_turns=8
rollout.top_k: -1 -> sampling.top_k=0
model.lora_rank: 32 -> lora.alpha=16.0
""")


@pytest.mark.parametrize("text, expected", VERL)
def test_settings_of_verl(text, expected, tmp_path):
  always = "rollout.n: 8"
  if "adv_estimator" not in text:
    always += ", algorithm.adv_estimator: grpo"
  check_settings(f"{always}, {text}", expected, tmp_path)


BOMB = ["a0: &a0 {x: 1, y: 2}"]  # aliases that expand exponentially
BOMB += [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 28)]
BAD = {
  ".yaml": [
    ("a: 1\n", "no setting of TRL's.*a$"),
    ("- 1\n", "must have keys and values, not list"),
    ("a: !!python/object/apply:os.system [ls]", "cannot be read"),
    ("\n".join(BOMB), "more than 5000 keys"),
    (
      "beta: 0\nx: {y: 1}\nlearning_rate: 1\nbeta: 0.1",
      "line 4: the key 'beta' is also in line 1: remove one",
    ),
    ("actor: {x: 1}\nactor.x: 2", "'actor.x' is set twice"),
    ("num_generations: eight", "num_generations = 'eight': TRL 1.16 needs"),
    ("temperature: .inf", "temperature = inf: TRL 1.16 needs a number"),
    ("loss_type: other", "loss_type = 'other': use one of grpo"),
    ("num_generations: 7", "multiple of num_generations = 7"),
    (
      "generation_batch_size: 8\nsteps_per_generation: 2",
      "TRL accepts only one of them",
    ),
    (
      f"{ACTOR}.ppo_mini_batch_size: 4096",
      "4096: verl allows at most data.train_batch_size = 1024",
    ),
    (
      "data.train_batch_size: 2147483647",
      "completions is over 1048576: check the sizes",
    ),
    ("beta: 0\nchat_template_kwargs: '{a'", "'{a' is not JSON"),
    ("reward_funcs: [a, b]\nreward_weights: [1]", "a weight for each of"),
    ("report_to: 5\nbeta: 0", "a value has a type that TRL"),
    *(
      (
        f"{REJECTION}: seq_mean_k1\n{REJECTION}_threshold: {x}",
        "rollout_rs_threshold.*two positive",
      )
      for x in ("x", "'0_2'", "'2_0.5'", "'inf_2'", "null", "'1_x'")
    ),
  ],
  ".json": [
    ("{", "cannot be read"),
    ('{"beta": 0, "beta": 1}', "the key 'beta' is repeated"),
  ],
  ".py": [
    ("print(1)", r"it calls neither GRPOConfig"),
    ("def f(:", "theirs.py, line 1"),
  ],
  ".sh": [("x", "use a file ending in .yaml, .yml, .json, .py")],
}


@pytest.mark.parametrize(
  "suffix, text, message", [(x, *case) for x in BAD for case in BAD[x]]
)
def test_bad_files_are_one_line_errors(suffix, text, message, tmp_path):
  path = tmp_path / f"theirs{suffix}"
  path.write_text(text)
  with pytest.raises(ValueError, match=message) as caught:
    translate.translate_file(path)
  assert "\n" not in str(caught.value)


def test_code_in_a_file_is_never_run(tmp_path):
  """Neither while it is read, nor by the written config file."""
  ran = tmp_path / "ran"
  bad = f"__import__('pathlib').Path({str(ran)!r}).touch()"
  script = f"{bad}\nfrom trl import GRPOConfig\n"
  script += f"GRPOConfig(beta={bad}, run_name='x', num_generations=4)\n"
  become(script, tmp_path, ".py")
  name = json.dumps(f'x"""\n{bad}\n"""')
  yaml = f'run_name: {name}\nmodel: "a\\n{bad}"\n"k\\0\\n{bad}": 1\n'
  yaml += f'output_dir: "\\u2028{bad}"\nreward_funcs: ["a:b\'; {bad}"]\n'
  yaml += f'chat_template_kwargs: {{"x\'] = 1; {bad} #": "y"}}\n'
  _, leaves, _ = become(yaml, tmp_path)
  assert leaves["model.path"] == f"a\n{bad}"
  assert not ran.exists()


@pytest.mark.parametrize(
  "page, library",
  [("from-trl.md", trl.LIBRARY), ("from-verl.md", verl.LIBRARY)],
)
def test_the_tables_of_the_guides_agree(page, library):
  """The guides list the setting of each row next to its name."""
  text = (DOCS / page).read_text().split("\n## Names\n")[1]
  rows = [x.split("|") for x in text.splitlines() if x.startswith("| `")]
  checked = 0
  for full_name, rule in library.table.items():
    name = full_name.removeprefix("actor_rollout_ref.")
    ours = [row[2] for row in rows if f"`{name}`" in row[1]]
    if ours and isinstance(rule.to, str):
      assert any(f"`{rule.to}" in cell for cell in ours), name
      checked += 1
  assert checked > 12


def test_invalid_configs_are_written_and_reported(tmp_path, capsys):
  file = tmp_path / "theirs.yaml"
  file.write_text("actor_rollout_ref.rollout.temperature: 0\n")
  out = tmp_path / "ours.py"
  with pytest.raises(SystemExit, match="(?s)refuse this config:.*temperature"):
    translate.main([str(file), f"--out={out}"])
  assert out.is_file()


@pytest.mark.parametrize(
  "words, message",
  [
    ("", "give FILE: a .yaml"),
    ("nowhere.yaml", "nowhere.yaml: No such file"),
    ("theirs.py --out=theirs.py", "would overwrite"),
    ("theirs_functions.py --out=theirs.py", "would overwrite"),
  ],
)
def test_wrong_command_lines(words, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("theirs.py", "theirs_functions.py"):
    pathlib.Path(name).touch()
  with pytest.raises(SystemExit, match=message):
    translate.main(words.split())


def test_control_characters_are_escaped_on_the_terminal(tmp_path, capsys):
  path = tmp_path / "theirs.yaml"
  path.write_text('num_generations: 8\n"\\e]0;title\\a evil": 1\n')
  translate.main([str(path), f"--out={tmp_path / 'ours.py'}"])
  output = capsys.readouterr().out
  assert "\x1b" not in output and r"\x1b]0;title\x07 evil may change" in output


SCHEDULER = "lr_scheduler_type: cosine_with_min_lr"


@pytest.mark.parametrize(
  "text, words",
  [
    ("num_generation: 4\nbeta: 0", "did you mean num_generations"),
    ("logging_step: 3\nbeta: 0", "did you mean logging_steps"),
    ("my_own: 3\nbeta: 0", "unknown here: see docs/from-trl.md"),
    ("lora_dropout: 0.1", "0.1: adapters have no dropout"),
    ("generation_kwargs: {typical_p: 1}", "sampling.*"),
    ("lr_scheduler_type: cosine", None),
    (SCHEDULER, "'cosine' is used, which ends at 0"),
    ("repetition_penalty: 1.1", "1.1: no repetition penalty is available"),
    ("repetition_penalty: 1.0", None),
    (
      "data_files: [a.jsonl, b.jsonl, c.jsonl]",
      "only 'a.jsonl' is read; use a pattern to add 'b.jsonl', 'c.jsonl'",
    ),
    ("data_files: [a.jsonl]", None),
    ("eval_data_files: [a, b]", "to add 'b'"),
    (f"{ACTOR}.optim.{SCHEDULER}", "which ends at 0"),
    (f"{ACTOR}.megatron.router_replay.mode: R2", "experts (R3)"),
    (f"{ROLLOUT}.temprature: 1\n{N_8}", "did you mean actor_rollout_ref.roll"),
    (f"{ROLLOUT}.name: vllm\n{N_8}", None),
    (f"{ACTOR}.fsdp_config.param_offload: 1\n{N_8}", None),
  ],
)
def test_settings_that_change_the_run_are_reported_as_missing(
  text, words, tmp_path
):
  notes = become(f"{text}\n", tmp_path)[2].notes
  name = text.partition(":")[0]
  missing = [x.text for x in notes if x.missing and x.origin == name]
  assert len(missing) == (words is not None)
  assert not missing or words in missing[0]
