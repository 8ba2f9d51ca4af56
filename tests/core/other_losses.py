"""Runs TRL's and verl's losses on fixed numbers, in float64 by their own code.

Writes other_losses.json (inputs, losses and gradients for each of their
settings) and trl_corrections.json (TRL with an inexact sampler). Neither
library is a dependency; to make the files again:

    python -m venv trl && trl/bin/pip install trl==1.16.0
    pip download --no-deps verl==0.9.1 && unzip verl-0.9.1-*.whl -d verl
    trl/bin/python tests/core/other_losses.py verl
"""

import __future__

import ast
import collections
import importlib.metadata
import inspect
import itertools
import json
import math
import pathlib
import sys
import textwrap
import types
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

SEQUENCE = {"importance_sampling_level": "sequence"}
GSPO = {"loss_type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.15}
GSPO |= SEQUENCE
SAPO = {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0}
VESPO = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5}
VESPO |= {"vespo_k_neg": 0.0, "vespo_lambda_neg": 1.0}
TRL_CASES = {
  # name: changes of DEFAULTS, by TRL's names
  "grpo": {"loss_type": "grpo"},
  "grpo on-policy": {"loss_type": "grpo"},
  "bnpo": {"loss_type": "bnpo"},
  "dr_grpo": {"loss_type": "dr_grpo"},
  "dapo": {"epsilon_high": 0.28},
  "dapo delta": {"delta": 1.25},
  "dapo beta": {"beta": 0.1},
  "dapo beta corrected": {"beta": 0.1, "use_bias_correction_kl": True},
  "gspo": GSPO,
  "luspo": {"loss_type": "luspo", **SEQUENCE},
  "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
  "cispo on-policy": {"loss_type": "cispo", "epsilon_high": 1.5},
  "cispo sequence": {"loss_type": "cispo", "epsilon_high": 1.1, **SEQUENCE},
  "sapo": {"loss_type": "sapo"},
  "sapo settings": {"loss_type": "sapo", **SAPO},
  "sapo sequence": {"loss_type": "sapo", **SEQUENCE},
  "vespo": {"loss_type": "vespo"},
  "vespo settings": {"loss_type": "vespo", **VESPO},
  "top_entropy": {"top_entropy_quantile": 0.2},
  "top_entropy beta": {"top_entropy_quantile": 0.45, "beta": 0.1},
  "top_entropy highest": {"top_entropy_quantile": 0.0},
  "entropy": {"loss_type": "grpo", "entropy_coef": 0.3},
  "entropy top_entropy": {"entropy_coef": 0.3, "top_entropy_quantile": 0.2},
}
DEFAULTS = {
  "loss_type": "dapo",
  "importance_sampling_level": "token",
  "epsilon_low": 0.2,
  "epsilon_high": 0.2,
  "delta": None,
  "beta": 0.0,
  "use_bias_correction_kl": False,
  "sapo_temperature_pos": 1.0,
  "sapo_temperature_neg": 1.05,
  "vespo_k_pos": 2.0,
  "vespo_lambda_pos": 3.0,
  "vespo_k_neg": 3.0,
  "vespo_lambda_neg": 2.0,
  "top_entropy_quantile": 1.0,
  "entropy_coef": 0.0,
  "use_adaptive_entropy": False,
  "entropy_target": 0.2,
  "entropy_coef_delta": 0.005,
  "entropy_coef_min": 0.0,
  "entropy_coef_max": 1.0,
  "max_completion_length": 8,
  "off_policy_mask_threshold": None,
}
MEANS = "seq-mean-token-mean"
TOKENS = "token-mean"
LOW = "clip_ratio_low"
HIGH = "clip_ratio_high"
C = "clip_ratio_c"
VERL_CASES = {
  # name: verl's function, aggregation and settings
  "vanilla": ("vanilla", TOKENS, {HIGH: 0.28}),
  "vanilla dual": ("vanilla", TOKENS, {C: 1.25}),
  "vanilla sum": ("vanilla", "seq-mean-token-sum", {}),
  "vanilla norm": ("vanilla", "seq-mean-token-sum-norm", {}),
  "gspo": ("gspo", MEANS, {LOW: 0.1, HIGH: 0.15}),
  "gmpo": ("geo_mean", MEANS, {LOW: 0.4, HIGH: 0.3}),
  "cispo": ("cispo", TOKENS, {LOW: 0.4, HIGH: 0.5}),
  "sapo": ("sapo", MEANS, {"tau_pos": 0.7, "tau_neg": 2.0}),
  "dppo_tv": ("dppo_tv", TOKENS, {LOW: 0.05, HIGH: 0.1, C: 1.6}),
  "dro": ("dro", TOKENS, {"policy_loss": {"dro_beta": 0.3}}),
  "dppo_kl": ("dppo_kl", TOKENS, {LOW: 0.001, HIGH: 0.08, C: 20.0}),
}
ADAPTIVE = {
  "entropy_coef": 0.01,
  "entropy_coef_delta": 0.02,
  "entropy_coef_max": 0.06,
  "entropy_target": 1.0,
}
NAN = float("nan")
REWARDS = [  # of three functions, for B * G completions in groups of 4
  [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, NAN, 0.0, 1.0, 0.0],
  [0.2, 0.2, 0.7, 0.1, NAN, 0.5, 0.9, NAN, NAN, NAN, 0.3, NAN],
  [10.0, -5.0, 0.0, 2.5, 3.0, NAN, -4.0, 8.0, NAN, 1.0, NAN, 7.0],
]
REWARDS = [list(x) for x in zip(*REWARDS, strict=True)]  # [B * G, K]
REWARD_WEIGHTS = [1.0, 0.5, -2.0]
AGGREGATIONS = {  # our name: multi_objective_aggregation, scale_rewards
  "normalize_then_sum": ("normalize_then_sum", "group"),
  "grpo": ("sum_then_normalize", "group"),
  "dr_grpo": ("sum_then_normalize", "none"),
}
MODES = "token_truncate token_mask sequence_truncate sequence_mask".split()
ENTROPIES = [1.2, 0.9, 0.8, 0.7, 0.6, 1.1, 1.3, 1.4, 1.5, 1.6, 0.5]


def numbers():
  """Six completions of 1 to 5 tokens, far off-policy."""
  torch.manual_seed(0)

  def rounded(x):
    return (x * 1e4).round() / 1e4

  old = -2 * torch.rand(6, 5).double() - 1
  signs = torch.tensor([1, -1, -1, 1, -1, 1]).double()
  moved = 0.6 * torch.randn(6, 5).double()
  return {
    "logprobs": rounded(old + moved),
    "old_logprobs": rounded(old),
    "ref_logprobs": rounded(old + 0.3 * torch.randn(6, 5).double()),
    "entropy": rounded(2 * torch.rand(6, 5).double()),
    "advantages": signs * rounded(torch.rand(6).double() + 0.2),
    "mask": torch.arange(5) < torch.tensor([5, 3, 1, 4, 5, 2])[:, None],
  }


def trainer(settings: dict[str, Any]):
  """TRL's GRPOTrainer for a single process, without a model."""
  it = GRPOTrainer.__new__(GRPOTrainer)
  it.args = types.SimpleNamespace(**settings, steps_per_generation=1)
  for name, value in settings.items():
    setattr(it, name, value)
  it._entropy_bonus_enabled = bool(it.entropy_coef or it.use_adaptive_entropy)
  it._last_world_entropy, it._entropy_window_stats = float("inf"), None
  it.aux_loss_enabled = it.use_vllm = False
  it.vllm_importance_sampling_correction = True
  it.current_gradient_accumulation_steps = 1
  it.model = types.SimpleNamespace(training=True)
  it._metrics = {"train": collections.defaultdict(list)}
  same = lambda x, *args, **options: x
  names = ("gather", "reduce", "pad_across_processes")
  it.accelerator = types.SimpleNamespace(
    num_processes=1, sync_gradients=True, **dict.fromkeys(names, same)
  )
  return it


def computed(it, data, logprobs, entropy, on_policy=False, **more):
  """TRL's loss for these log-probabilities and entropies of the model."""
  mask = data["mask"].double()
  inputs = dict.fromkeys(("prompt_ids", "prompt_mask"), mask[:, :1])
  inputs |= dict.fromkeys(("completion_ids", "completion_mask"), mask)
  inputs["advantages"] = data["advantages"]
  inputs["ref_per_token_logps"] = data["ref_logprobs"]
  inputs["num_items_in_batch"] = mask.sum()
  inputs |= more
  if not on_policy:
    inputs["old_per_token_logps"] = data["old_logprobs"]
  answer = (logprobs, entropy, None)
  it._get_per_token_logps_and_entropies = lambda *args, **options: answer
  return it._compute_loss(None, inputs)


def leaf(x):
  return x.clone().requires_grad_()


def trl_loss(data, changes, on_policy):
  """Settings, value, and gradients by log-probabilities and entropies."""
  logprobs = leaf(data["logprobs"])
  entropy = leaf(data["entropy"])
  it = trainer(DEFAULTS | changes)
  loss = computed(it, data, logprobs, entropy, on_policy)
  (loss + 0 * entropy.sum()).backward()
  return {
    "loss": loss.item(),
    "by_logprobs": logprobs.grad.tolist(),
    "by_entropy": entropy.grad.tolist(),
    "settings": changes | {"on_policy": on_policy},
  }


def trl_adaptive(data):
  """Coefficients in each update and after it."""
  it = trainer(DEFAULTS | ADAPTIVE | {"use_adaptive_entropy": True})
  rows = []
  for value in ENTROPIES:
    entropy = leaf(torch.full((6, 5), value).double())
    computed(it, data, leaf(data["logprobs"]), entropy).backward()
    applied = -entropy.grad.sum().item()
    rows.append({"applied": applied, "coefficient": it.entropy_coef})
  return rows


def own_lines(function, begin: str, end: str, names: dict[str, Any]):
  """Runs a TRL function's lines from `begin` up to `end`."""
  lines = inspect.getsource(function).splitlines()
  first = next(i for i, line in enumerate(lines) if begin in line)
  last = next(i for i in range(first, len(lines)) if end in lines[i])
  exec(textwrap.dedent("\n".join(lines[first:last])), names)
  return names


def trl_several_rewards():
  """Advantages of several rewards."""
  advantages = {}
  for name, (aggregation, scale_rewards) in AGGREGATIONS.items():
    names = {
      "torch": torch,
      "nanstd": nanstd,
      "rewards_per_func": torch.tensor(REWARDS, dtype=torch.float64),
      "num_generations": 4,
      "device": "cpu",
      "self": types.SimpleNamespace(
        multi_objective_aggregation=aggregation,
        scale_rewards=scale_rewards,
        reward_funcs=REWARD_WEIGHTS,
        reward_weights=torch.tensor(REWARD_WEIGHTS, dtype=torch.float64),
      ),
    }
    own_lines(
      GRPOTrainer._generate_and_score_completions,
      "unscorable_mask = torch.isnan(rewards_per_func)",
      "# Slice to keep only the local part",
      names,
    )
    advantages[name] = [round(x, 7) for x in names["advantages"].tolist()]
  made = {"rewards": REWARDS, "weights": REWARD_WEIGHTS}
  return made | {"advantages": advantages}


def importance_ratios(data, mode, low, high):
  """TRL's weights for the sampler's log-probabilities."""
  names = {
    "torch": torch,
    "math": math,
    "mask": data["mask"],
    "old_per_token_logps": data["old_logprobs"],
    "sampling_per_token_logps": data["sampler"],
    "self": types.SimpleNamespace(
      vllm_importance_sampling_mode=mode,
      vllm_importance_sampling_clip_min=low,
      vllm_importance_sampling_clip_max=high,
    ),
  }
  own_lines(
    GRPOTrainer._generate_and_score_completions,
    "per_token_logps_diff = (",
    "# Compute the per-token log probabilities for the reference model",
    names,
  )
  return names["vllm_importance_sampling_ratio"]


def trl_corrections():
  """TRL's losses for an inexact sampler, with all corrections."""
  torch.manual_seed(0)
  normal = lambda: torch.randn(6, 5, dtype=torch.float64)
  sampler = -torch.rand(6, 5, dtype=torch.float64) - 0.5
  old = sampler + 0.5 * normal()
  data = {
    "sampler": sampler,
    "old_logprobs": old,
    "ref_logprobs": sampler + 0.3 * normal(),
    "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, -2.0, 1.5]).double(),
    "mask": torch.arange(5) < torch.tensor([5, 3, 1, 4, 2, 5])[:, None],
  }
  data["mask"] = data["mask"].double()
  data["logprobs"] = old + 0.2 * normal()
  made = {k.removesuffix("_logprobs"): x.tolist() for k, x in data.items()}
  made["cases"] = []
  bounds = [(None, None, None)]
  bounds += [(m, *b) for m in MODES for b in ((None, 1.5), (0.6, 1.3))]
  choices = bounds, (None, 0.05), ("grpo", "dapo")
  for (mode, low, high), threshold, loss_type in itertools.product(*choices):
    more = {"sampling_per_token_logps": sampler}
    if mode is not None:
      ratios = importance_ratios(data, mode, low, high)
      more["importance_sampling_ratio"] = ratios
    changes = {"loss_type": loss_type, "off_policy_mask_threshold": threshold}
    it = trainer(DEFAULTS | {"beta": 0.1} | changes)
    it.use_vllm = mode is not None
    logprobs = leaf(data["logprobs"])
    value = computed(it, data, logprobs, torch.zeros_like(logprobs), **more)
    value.backward()
    case = {"mode": mode, "low": low, "high": high, "threshold": threshold}
    case |= {"loss_type": loss_type, "value": value.item()}
    made["cases"].append(case | {"gradient": logprobs.grad.tolist()})
  return made


def load(path: pathlib.Path, prefixes: tuple[str, ...], names: dict[str, Any]):
  """Functions of a file, without its imports and decorators."""
  tree = ast.parse(path.read_text())
  functions = [x for x in tree.body if isinstance(x, ast.FunctionDef)]
  tree.body = [x for x in functions if x.name.startswith(prefixes)]
  for node in tree.body:
    node.decorator_list = []
  flags = __future__.annotations.compiler_flag
  exec(compile(tree, path.name, "exec", flags=flags), names)
  return names


class VerlConfig(types.SimpleNamespace):
  """An actor's settings."""

  def get(self, name, default=None):
    return getattr(self, name, default)


def verl_functions(source: pathlib.Path) -> dict[str, Any]:
  """Loads verl's losses without the imports that they do not need."""
  tools = source / "verl/utils/torch_functional.py"
  tools = load(tools, ("masked_",), {"torch": torch})
  names = {
    "torch": torch,
    "np": np,
    "defaultdict": collections.defaultdict,
    "verl_F": types.SimpleNamespace(**tools),
    "ActorConfig": VerlConfig,
    "AlgoConfig": type(None),
  }
  prefixes = ("agg_loss", "compute_policy_loss_", "compute_optimal_token")
  prefixes += ("compute_multi_turn", "compute_reinforce_plus_plus_outcome")
  algorithms = source / "verl/trainer/ppo"
  load(algorithms / "core_algos.py", prefixes, names)
  prefixes = ("compute_rollout_rejection", "_parse_rollout_rs", "compute_rs")
  names |= {"math": math, "SAFETY_BOUND": 20.0}
  names["SUPPORTED_ROLLOUT_RS_OPTIONS"] = {"seq_mean_k1"}
  names["TOKEN_LEVEL_ROLLOUT_RS_OPTIONS"] = set()
  return load(algorithms / "rollout_corr_helper.py", prefixes, names)


def verl_loss(functions, data, name, aggregation, changes):
  """Value, and gradient by the log-probabilities."""
  norm = aggregation == "seq-mean-token-sum-norm"
  settings = {"clip_ratio": 0.2, LOW: None, HIGH: None, C: 1000.0}
  settings["global_batch_info"] = {"loss_scale_factor": 8} if norm else {}
  if "policy_loss" in changes:
    changes = {"policy_loss": VerlConfig(**changes["policy_loss"])}
  logprobs = leaf(data["logprobs"])
  mask = data["mask"].double()
  loss, _ = functions[f"compute_policy_loss_{name}"](
    data["old_logprobs"],
    logprobs,
    data["advantages"][:, None] * mask,
    mask,
    aggregation,
    VerlConfig(**settings | changes),
  )
  loss.backward()
  return {"loss": loss.item(), "by_logprobs": logprobs.grad.tolist()}


def verl_advantages(functions, data):
  """Advantages of tokens for two groups of three, and a geometric mask."""
  logprobs = data["old_logprobs"]
  mask = data["mask"].double()
  holes = mask.clone()  # an environment's tokens
  holes[0, 1:3] = holes[3, 0] = holes[4, 2] = 0
  rewards = torch.tensor([1.0, -0.5, 2, 0, 0.75, 1]).double()
  masses = torch.exp(logprobs) ** 2 + 0.05 + 0.1 * torch.sin(7 * logprobs) ** 2
  index = np.array([0, 0, 0, 1, 1, 1])
  made = {}

  def at_the_end(where):
    last = (where.cumsum(-1) == where.sum(-1, keepdim=True)) & (where > 0)
    return rewards[:, None] * last

  for prefix, where in {"": mask, "multi_turn_": holes}.items():
    name = f"{prefix}optimal_token_baseline"
    advantages, _ = functions[f"compute_{name}_advantage"](
      at_the_end(where), where, index, logprobs, masses
    )
    made[name] = advantages.tolist()
  advantages, _ = functions["compute_reinforce_plus_plus_outcome_advantage"](
    at_the_end(mask), mask, VerlConfig(gamma=1.0)
  )
  taken, _ = functions["compute_rollout_rejection_mask"](
    data["logprobs"] - logprobs, mask, "seq_mean_k1", "0.8_1.1"
  )
  return made | {
    "reinforce_plus_plus": advantages.tolist(),
    "geometric_mask": taken.tolist(),
    "rewards": rewards.tolist(),
    "sum_of_squares": masses.tolist(),
    "holes": holes.tolist(),
  }


def main(source: str) -> None:
  data = numbers()
  functions = verl_functions(pathlib.Path(source))
  made = {
    "versions": {"trl": importlib.metadata.version("trl"), "verl": "0.9.1"},
    "given": {name: x.tolist() for name, x in data.items()},
    "trl": {
      name: trl_loss(data, changes, name.endswith("on-policy"))
      for name, changes in TRL_CASES.items()
    },
    "entropies": ENTROPIES,
    "trl_adaptive": trl_adaptive(data),
    "trl_several_rewards": trl_several_rewards(),
    "verl": {
      name: verl_loss(functions, data, *case)
      for name, case in VERL_CASES.items()
    },
    "verl_advantages": verl_advantages(functions, data),
  }
  text = json.dumps(made).replace('}, "', '},\n"')
  path = pathlib.Path(__file__)
  path.with_suffix(".json").write_text(text + "\n")
  corrections = json.dumps(trl_corrections())
  path.with_name("trl_corrections.json").write_text(corrections)


if __name__ == "__main__":
  main(sys.argv[1])
