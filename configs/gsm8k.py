"""GRPO on GSM8K with any instruct model: the base of the gsm8k_* configs.

Command:   python -m grpojax.train --config=configs/gsm8k.py \
               --config.model.path=MODEL
           MODEL is a directory in Hugging Face format, or ORG/NAME of the
           Hugging Face Hub. The data are downloaded by tensorflow-datasets, or
           read from a local copy: --config.data.path=DIR
           (see grpojax/data/gsm8k.py).
Hardware:  one GPU of 80 GB for models of up to about 2 billion parameters.
Time:      unknown; not run yet, for lack of an accelerator.
Expected:  a rising reward, and a higher accuracy on the 1,319 test problems
           than at step 0.
"""

from ml_collections import ConfigDict

from grpojax.training.config import default_config


def get_config() -> ConfigDict:
  config = default_config().unlock()
  config.name = "gsm8k"
  config.steps = 233  # one epoch: 7,473 problems
  # 1024 samples per step in groups of 32, near the best size for GSM8K in
  # arXiv 2603.01162, Figure 5.
  config.batch_size = 32
  config.group_size = 32
  config.model.path = "give --config.model.path=MODEL"
  config.model.dtype = "bfloat16"
  config.model.remat = "full"
  config.data.name = "gsm8k"
  # The longest problem has 985 characters; with this template and a chat
  # template it has under 400 tokens, even with a small vocabulary.
  config.data.max_prompt_length = 512
  config.data.template = (
    "{prompt}\nPlease reason step by step, and put your final answer within "
    "\\boxed{{}}."
  )
  config.sampling.max_new_tokens = 1024
  config.sampling.temperature = 1.0
  config.sampling.top_p = 1.0
  config.reward.functions = ("math_answer",)
  config.reward.weights = (1.0,)
  # The unbiased gradient: leave-one-out advantages, tokens summed.
  config.advantage = "leave_one_out"
  config.loss.weighting = "fixed_length"
  config.loss.clip_high = 0.28  # takes effect with optim.minibatches > 1
  config.optim.learning_rate = 1e-6
  config.optim.warmup_steps = 5
  config.optim.micro_batches = 32  # one prompt, 32 samples, at a time
  config.eval.every = 20
  config.eval.num_prompts = 1319  # all of the test split
  config.eval.batch_size = 128
  config.checkpoint.every = 40
  config.mesh.data = 1
  config.mesh.fsdp = -1  # parameters and prompts over all devices
  return config.lock()
