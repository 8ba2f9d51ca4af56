"""Figure 5 of arXiv 2603.01162: Qwen2.5 on GSM8K, N = 1024, five runs.

Command:   python -m grpojax.studies.group_size --config=configs/figure5.py \
               --config.train.model.path=Qwen2.5-1.5B-Instruct \
               --config.train.data.options.path=gsm8k
           with the directories of the model (Hugging Face format) and of
           GSM8K's train.jsonl and test.jsonl.
Hardware:  an accelerator host, for instance 8 H100 or a TPU v5p-16.
Time:      not measured: nobody has run it yet.
Expected:  in the paper the accuracy is best near G = 32.
"""

from ml_collections import ConfigDict

from grpojax.studies import group_size


def get_config() -> ConfigDict:
  config = group_size.default_config()
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
  train.data.options = ConfigDict({"path": "gsm8k"})
  train.data.max_prompt_length = 512
  train.data.template = (
    "{prompt}\nThink step by step. End with the answer as a number, after ####."
  )
  train.sampling.max_new_tokens = 1024
  train.logits_chunk = 8
  train.optim.learning_rate = 1e-6
  train.optim.micro_batches = 8
  train.loss.weighting = "fixed_length"
  train.eval.every = 10
  train.eval.num_prompts = 1319
  train.eval.batch_size = 256
  train.checkpoint.every = 20
  train.diagnostics.every = 10
  train.auto_group_size.largest = 128
  return config
