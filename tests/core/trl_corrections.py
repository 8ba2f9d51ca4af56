"""Makes trl_corrections.json: what TRL makes of an inexact sampler.

    pip install trl==1.16.0 && python tests/core/trl_corrections.py

TRL's own lines are run: its `_compute_loss` and `get_off_policy_mask` on a
stand-in for a trainer, and the part of its `_generate_and_score_completions`
that makes the importance ratios, cut out of its source.
"""

import collections
import inspect
import json
import math
import pathlib
import textwrap
import types

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

OUT = pathlib.Path(__file__).with_suffix(".json")
B, T = 6, 5
BEGIN = "per_token_logps_diff = ("
END = "# Compute the per-token log probabilities for the reference model"


class Accelerator:
  num_processes = 1
  sync_gradients = True

  def gather(self, x):
    return x

  gather_for_metrics = gather

  def reduce(self, x, reduction):
    return x


def importance_ratios(old, sampler, mask, mode, low, high):
  source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
  lines = source.splitlines()
  first = next(i for i, line in enumerate(lines) if BEGIN in line)
  last = next(i for i, line in enumerate(lines) if END in line)
  scope = dict(
    torch=torch,
    math=math,
    mask=mask,
    old_per_token_logps=old,
    sampling_per_token_logps=sampler,
    self=types.SimpleNamespace(
      vllm_importance_sampling_mode=mode,
      vllm_importance_sampling_clip_min=low,
      vllm_importance_sampling_clip_max=high,
    ),
  )
  exec(textwrap.dedent("\n".join(lines[first:last])), scope)
  return scope["vllm_importance_sampling_ratio"]


def loss(arrays, ratios, threshold, loss_type):
  """Value and gradient of TRL's loss; `ratios` None is no correction."""
  logps = arrays["logprobs"].clone().requires_grad_()
  trainer = types.SimpleNamespace(
    args=types.SimpleNamespace(
      use_bias_correction_kl=False, delta=None, steps_per_generation=1
    ),
    accelerator=Accelerator(),
    model=types.SimpleNamespace(training=True),
    _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    _get_per_token_logps_and_entropies=lambda *a, **k: (
      logps,
      torch.zeros_like(logps),
      None,
    ),
    get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    aux_loss_enabled=False,
    top_entropy_quantile=1.0,
    importance_sampling_level="token",
    off_policy_mask_threshold=threshold,
    beta=0.1,
    loss_type=loss_type,
    epsilon_low=0.2,
    epsilon_high=0.2,
    use_vllm=ratios is not None,
    vllm_importance_sampling_correction=True,
    current_gradient_accumulation_steps=1,
    _entropy_bonus_enabled=False,
  )
  mask = arrays["mask"]
  inputs = dict(
    prompt_ids=torch.zeros(B, 1),
    prompt_mask=torch.ones(B, 1),
    completion_ids=torch.zeros(B, T),
    completion_mask=mask,
    advantages=arrays["advantages"],
    old_per_token_logps=arrays["old"],
    ref_per_token_logps=arrays["ref"],
    sampling_per_token_logps=arrays["sampler"],
    num_items_in_batch=mask.sum(),
  )
  if ratios is not None:
    inputs["importance_sampling_ratio"] = ratios
  value = GRPOTrainer._compute_loss(trainer, None, inputs)
  value.backward()
  return value.item(), logps.grad.tolist()


def main():
  torch.manual_seed(0)
  torch.set_default_dtype(torch.float64)
  lengths = torch.tensor([5, 3, 1, 4, 2, 5])
  sampler = -torch.rand(B, T) - 0.5
  arrays = {
    "sampler": sampler,
    "old": sampler + 0.5 * torch.randn(B, T),
    "ref": sampler + 0.3 * torch.randn(B, T),
    "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, -2.0, 1.5]),
    "mask": (torch.arange(T) < lengths[:, None]).double(),
  }
  arrays["logprobs"] = arrays["old"] + 0.2 * torch.randn(B, T)
  made = {name: x.tolist() for name, x in arrays.items()}
  cases = [(None, None, None)]
  for (
    mode
  ) in "token_truncate token_mask sequence_truncate sequence_mask".split():
    cases += [(mode, None, 1.5), (mode, 0.6, 1.3)]
  made["cases"] = []
  for mode, low, high in cases:
    ratios = None
    if mode is not None:
      old, mask = arrays["old"], arrays["mask"]
      ratios = importance_ratios(old, sampler, mask, mode, low, high)
    for threshold in (None, 0.05):
      for loss_type in ("grpo", "dapo"):
        value, gradient = loss(arrays, ratios, threshold, loss_type)
        made["cases"].append(
          dict(
            mode=mode,
            low=low,
            high=high,
            threshold=threshold,
            loss_type=loss_type,
            value=value,
            gradient=gradient,
          )
        )
  OUT.write_text(json.dumps(made))


if __name__ == "__main__":
  main()
