"""Figure 5 of arXiv 2603.01162: Qwen2.5 on GSM8K, N = 1024, five runs.

Command:   python -m grpojax.studies.group_size --config=configs/figure5.py \
               --config.train.model.path=Qwen2.5-1.5B-Instruct \
               --config.train.data.path=gsm8k
           with the directories of the model (Hugging Face format) and of the
           data (an empty path downloads them, see configs/gsm8k.py).
Hardware:  one host of 8 GPUs of 80 GB; fewer need more micro-batches.
Time:      unknown; not run yet, for lack of an accelerator.
Expected:  in the paper accuracy is best near G = 32.
"""

from ml_collections import ConfigDict

from grpojax.runtime.cli.settings import to_config
from grpojax.studies import group_size


def get_config() -> ConfigDict:
  config = to_config(group_size.SETTINGS)
  config.name = "figure5"
  config.seeds = 5
  config.budgets = (1024,)
  config.group_sizes = (4, 8, 16, 32, 64, 128)
  config.predict.prompts = 512
  config.predict.batch = 32
  train = config.train
  train.steps = 200
  train.model.path = "Qwen2.5-1.5B-Instruct"
  train.model.dtype = "bfloat16"
  train.data.name = "gsm8k"
  train.data.path = "gsm8k"
  train.data.max_prompt_length = 512
  train.data.template = (
    "{prompt}\nPlease reason step by step, and put your final answer within "
    "\\boxed{{}}."
  )
  train.reward.functions = ("math_answer",)
  train.sampling.max_new_tokens = 1024
  train.logits_chunk = 512
  train.optim.learning_rate = 1e-6
  train.optim.micro_batches = 1  # 128 samples per device, in whole groups
  train.loss.weighting = "fixed_length"
  train.eval.every = 10
  train.eval.num_prompts = 1319
  train.eval.batch_size = 256
  train.checkpoint.every = 20
  train.mesh.data = 1
  train.mesh.fsdp = -1
  train.diagnostics.every = 10
  train.auto_group_size.largest = 128
  return config
