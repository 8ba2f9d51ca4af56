"""GRPO on GSM8K with Qwen2.5-32B-Instruct.

Command:   python -m grpojax.train --config=configs/gsm8k_qwen2_5_32b.py
           Qwen/Qwen2.5-32B-Instruct comes from the Hugging Face Hub, or with
           --config.model.path=DIR from a directory. For the data see
           configs/gsm8k.py.
Hardware:  128 chips of TPU v5e (8x16): 14.3 of 16 GiB, as compiled for them
           (launch/README.md).
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
  config.name = "gsm8k_qwen2_5_32b"
  config.model.path = "Qwen/Qwen2.5-32B-Instruct"
  config.mesh.fsdp = 32
  config.mesh.tensor = 4
  config.mesh.sampling_tensor = 8
  config.optim.micro_batches = 16
  return config.lock()
