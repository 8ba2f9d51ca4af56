"""verl's settings: what holds where a file says nothing, and what we ignore.

Of verl 0.9: verl/trainer/config/ppo_trainer.yaml.
"""

from collections.abc import Mapping
from typing import Any

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
FILTER = "algorithm.filter_groups"
CORRECTION = "algorithm.rollout_correction"
REWARD = "reward.custom_reward_function"
BUFFERS = (
  "reward_model.overlong_buffer",
  "reward_model.reward_kwargs.overlong_buffer_cfg",
  "reward.reward_kwargs.overlong_buffer_cfg",
)
"""Where DAPO's buffer stands, in older and newer configurations."""


DEFAULTS: Mapping[str, Any] = {
  "algorithm.adv_estimator": "gae",
  "algorithm.norm_adv_by_std_in_grpo": True,
  "algorithm.use_kl_in_reward": False,
  "algorithm.kl_penalty": "kl",
  "algorithm.kl_ctrl.type": "fixed",
  "algorithm.kl_ctrl.kl_coef": 0.001,
  f"{CORRECTION}.rollout_is": None,
  f"{CORRECTION}.rollout_is_threshold": "2.0",
  f"{CORRECTION}.rollout_rs": None,
  f"{ACTOR}.policy_loss.loss_mode": "vanilla",
  f"{ACTOR}.clip_ratio": 0.2,
  f"{ACTOR}.clip_ratio_low": 0.2,
  f"{ACTOR}.clip_ratio_high": 0.2,
  f"{ACTOR}.clip_ratio_c": 3.0,
  f"{ACTOR}.tau_pos": 1.0,
  f"{ACTOR}.tau_neg": 1.05,
  f"{ACTOR}.loss_agg_mode": "token-mean",
  f"{ACTOR}.loss_scale_factor": None,
  f"{ACTOR}.entropy_coeff": 0.0,
  f"{ACTOR}.use_kl_loss": False,
  f"{ACTOR}.kl_loss_coef": 0.001,
  f"{ACTOR}.kl_loss_type": "low_var_kl",
  f"{MODEL}.path": None,
  f"{MODEL}.lora_rank": 0,
  f"{MODEL}.lora_alpha": 16,
  f"{MODEL}.target_modules": "all-linear",
  f"{MODEL}.enable_gradient_checkpointing": True,
  "data.train_files": None,
  "data.val_files": None,
  "data.prompt_key": "prompt",
  "data.max_prompt_length": 512,
  "data.max_response_length": 512,
  "data.train_batch_size": 1024,
  "data.gen_batch_size": None,
  "data.truncation": "error",
  "data.filter_overlong_prompts": False,
  "data.seed": None,
  f"{ROLLOUT}.n": 1,
  f"{ROLLOUT}.temperature": 1.0,
  f"{ROLLOUT}.top_k": -1,
  f"{ROLLOUT}.top_p": 1.0,
  f"{ACTOR}.ppo_mini_batch_size": 256,
  f"{ACTOR}.ppo_micro_batch_size_per_gpu": None,
  f"{ACTOR}.ppo_epochs": 1,
  f"{ACTOR}.optim.optimizer": "AdamW",
  f"{ACTOR}.optim.lr": 1e-6,
  f"{ACTOR}.optim.lr_warmup_steps": -1,
  f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0,
  f"{ACTOR}.optim.lr_scheduler_type": "constant",
  f"{ACTOR}.optim.weight_decay": 0.01,
  f"{ACTOR}.optim.clip_grad": 1.0,
  f"{ACTOR}.optim.betas": (0.9, 0.999),
  f"{ACTOR}.grad_clip": 1.0,
  "actor_rollout_ref.ref.fsdp_config.param_offload": False,
  f"{FILTER}.enable": False,
  f"{FILTER}.metric": None,
  f"{FILTER}.max_num_gen_batches": 0,
  f"{REWARD}.path": None,
  f"{REWARD}.name": "compute_score",
  "custom_reward_function.path": None,
  "custom_reward_function.name": "compute_score",
  **{f"{buffer}.enable": False for buffer in BUFFERS},
  **{f"{buffer}.len": 0 for buffer in BUFFERS},
  **{f"{buffer}.penalty_factor": 1.0 for buffer in BUFFERS},
  "reward_model.enable": False,
  "reward_model.model.path": None,
  "reward.reward_model.enable": False,
  "reward.reward_model.model_path": None,
  "trainer.total_epochs": 30,
  "trainer.total_training_steps": None,
  "trainer.project_name": "verl_examples",
  "trainer.experiment_name": "gsm8k",
  "trainer.logger": ("console", "wandb"),
  "trainer.save_freq": -1,
  "trainer.test_freq": -1,
  "trainer.max_actor_ckpt_to_keep": None,
  "trainer.n_gpus_per_node": 8,
  "trainer.nnodes": 1,
}
"""Settings that are translated, with their defaults."""

IGNORED = (  # by how their names begin; the first that fits
  ("critic.", "there is no critic: advantages come from groups"),
  ("algorithm.gamma", "rewards are of whole completions"),
  ("algorithm.lam", "rewards are of whole completions"),
  (
    f"{ROLLOUT}.val_kwargs",
    "evaluations are greedy: grpojax.evaluate has more",
  ),
  (f"{ROLLOUT}.log_prob", "see logits_chunk and optim.micro_batches"),
  (f"{ROLLOUT}.multi_turn", "one turn a completion"),
  (f"{ROLLOUT}.calculate_log_probs", "they are always known"),
  (f"{ROLLOUT}.do_sample", "training always samples"),
  (f"{ROLLOUT}.", "there is no inference engine: sampling is in the program"),
  ("actor_rollout_ref.ref.", "see model.reference, mesh and logits_chunk"),
  (f"{ACTOR}.fsdp_config", "mesh.fsdp shards parameters and optimizer state"),
  (f"{ACTOR}.megatron", "see mesh.tensor and mesh.expert"),
  (f"{ACTOR}.strategy", "see mesh"),
  (f"{ACTOR}.ulysses", "sequences are not cut over devices"),
  (f"{ACTOR}.use_dynamic_bsz", "optim.packing puts short completions together"),
  (f"{ACTOR}.ppo_max_token_len", "see optim.micro_batches and optim.packing"),
  (f"{ACTOR}.", "nothing here does that"),
  (f"{MODEL}.use_remove_padding", "optim.packing does that"),
  (f"{MODEL}.", "nothing here does that"),
  ("actor_rollout_ref.", "nothing here does that"),
  ("data.shuffle", "prompts are always shuffled, each epoch anew"),
  ("data.return_raw_chat", "rewards get the messages"),
  ("data.reward_fn_key", "reward functions find it in data_source"),
  ("data.", "nothing here does that"),
  ("reward", "see reward.*"),
  ("trainer.val_before_train", "accuracy is always measured before"),
  ("trainer.resume_mode", "the same command resumes"),
  ("trainer.default_local_dir", "--run_dir says where"),
  ("trainer.critic_warmup", "there is no critic"),
  ("trainer.balance_batch", "completions are packed"),
  ("trainer.", "nothing here does that"),
  ("ray_kwargs", "there is no Ray: one program on all devices"),
  ("ray_init", "there is no Ray: one program on all devices"),
  ("algorithm.", "nothing here does that"),
)
"""Why nothing is translated, by how names begin: the first that fits counts."""

ROOTS = {name.partition(".")[0] for name in DEFAULTS}
ROOTS |= {"critic", "ray_kwargs", "ray_init", "global_profiler", "hydra"}
