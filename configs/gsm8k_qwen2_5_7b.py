"""GRPO on GSM8K with Qwen2.5-7B-Instruct.

Command:   python -m grpojax.train --config=configs/gsm8k_qwen2_5_7b.py
           Qwen/Qwen2.5-7B-Instruct comes from the Hugging Face Hub, or with
           --config.model.path=DIR from a directory. For the data see
           configs/gsm8k.py.
Hardware:  one host of 8 GPUs of 80 GB.
           Or 16 chips of TPU v5e in the layout of launch/README.md:
           15.3 of 16 GiB, as compiled for them.
Time:      unknown; not run yet, for lack of an accelerator.
Expected:  a rising reward, and a higher accuracy on the 1,319 test problems
           than at step 0.
"""

import pathlib
import runpy

from ml_collections import ConfigDict

COMMON = pathlib.Path(__file__).with_name("gsm8k.py")


def get_config() -> ConfigDict:
  config = runpy.run_path(str(COMMON))["get_config"]().unlock()
  config.name = "gsm8k_qwen2_5_7b"
  config.model.path = "Qwen/Qwen2.5-7B-Instruct"
  config.optim.micro_batches = 4  # eight prompts at a time, one per device
  config.mesh.fsdp = 8
  return config.lock()
