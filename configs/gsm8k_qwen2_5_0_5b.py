"""GRPO on GSM8K with Qwen2.5-0.5B-Instruct.

Command:   python -m grpojax.train --config=configs/gsm8k_qwen2_5_0_5b.py
           Qwen/Qwen2.5-0.5B-Instruct comes from the Hugging Face Hub, or with
           --config.model.path=DIR from a directory. For the data see
           configs/gsm8k.py.
Hardware:  four chips of TPU v5e with --config.optim.micro_batches=8: 11.5 of
           16 GiB, as compiled for v5e:2x2; one chip with fewer samples, see
           launch/README.md. Or one GPU of 40 GB or more.
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
  config.name = "gsm8k_qwen2_5_0_5b"
  config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
  return config.lock()
