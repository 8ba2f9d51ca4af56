r"""GRPO on your own model: the default config with --config.model.path.

Command:   python -m grpojax.train --config.model.path=DIR_OR_NAME \
             --config.data.name=jsonl --config.data.path=FILE.jsonl \
             --config.reward.functions=FILE.py:FUNCTION
           (models that are not bundled use this config unless --config is set)
Hardware:  depends on the model; estimate it by `python -m grpojax.compile`.
Time:      200 steps of 16 x 8 completions of up to 256 tokens.
Expected:  depends on model, data and reward. The learning rate is usual for
           full fine-tuning; with adapters (lora.rank) and without --config it
           is 1e-5.
"""

from ml_collections import ConfigDict

from grpojax.training.config import default_config


def get_config() -> ConfigDict:
  config = default_config().unlock()
  config.name = "own_model"
  config.steps = 200
  config.batch_size = 16
  config.group_size = 8
  config.sampling.max_new_tokens = 256
  config.optim.learning_rate = 1e-6
  config.optim.warmup_steps = 5
  config.optim.micro_batches = 8
  config.eval.every = 10
  config.eval.num_prompts = 128
  config.eval.batch_size = 64
  return config.lock()
