"""GRPO on GSM8K with Qwen3-1.7B, thinking switched off.

Command:   python -m grpojax.train --config=configs/gsm8k_qwen3_1_7b.py
           Qwen/Qwen3-1.7B comes from the Hugging Face Hub, or with
           --config.model.path=DIR from a directory. For the data see
           configs/gsm8k.py.
Hardware:  one host of 8 GPUs of 80 GB.
           Or 16 chips of TPU v5e in the layout of launch/README.md:
           15.3 of 16 GiB, as compiled for them.
Time:      unknown; not run yet, for lack of an accelerator.
Expected:  a rising reward, and a higher accuracy on the 1,319 test problems
           than at step 0.
           With enable_thinking=True completions are several times longer: set
           sampling.max_new_tokens to 4096 or more and use a smaller batch,
           because attention scores grow with the square of the length.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

COMMON = pathlib.Path(__file__).with_name("gsm8k.py")


def get_config() -> ConfigDict:
  config = runpy.run_path(str(COMMON))["get_config"]().unlock()
  config.name = "gsm8k_qwen3_1_7b"
  config.model.path = "Qwen/Qwen3-1.7B"
  config.data.template_options = ConfigDict({"enable_thinking": False})
  config.sampling.max_new_tokens = 2048  # it writes more than the others
  config.optim.micro_batches = 4  # eight prompts at a time, one per device
  config.mesh.fsdp = 8
  return config.lock()
