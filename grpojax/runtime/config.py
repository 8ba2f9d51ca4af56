"""The configuration of a training run: defaults, validation, JSON.

Only programs read a config; the functions that they call take plain arguments.
`command_line.parse` makes one from a file and overrides.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, FieldReference

from grpojax.runtime import validation

# Numbers in whose place a word may stand.
WORDS = {"group_size": (validation.AUTO,)}
# Sections with keys of their own: keyword arguments of what the config names.
FREE = ("data.options.", "data.template_options.", "reward.options.")


def default_config() -> ConfigDict:
  """The embedded arithmetic job. Locked: an unknown key is an error."""
  config = ConfigDict()
  config.name = "arithmetic"  # the run directory is runs/NAME
  config.seed = 0
  config.steps = 40
  config.batch_size = 32  # prompts a step
  # Completions a prompt; "auto" follows the best size (see auto_group_size).
  config.group_size = FieldReference(8, field_type=object)
  config.auto_group_size = ConfigDict()  # powers of two, at equal samples
  config.auto_group_size.start = 8  # with batch_size prompts
  config.auto_group_size.smallest = 4
  config.auto_group_size.largest = 32
  config.auto_group_size.decay = 0.9  # of past estimates, at each diagnosis
  config.auto_group_size.margin = 0.25  # hysteresis, in powers of two
  config.auto_group_size.confidence = 1.0  # standard errors, before a move
  config.model = ConfigDict()
  config.model.path = "arithmetic-instruct"  # or a Hugging Face directory
  # Of computation; what is trained is float32, what is frozen (LoRA) this.
  config.model.dtype = "float32"
  config.model.remat = True  # recompute activations in the backward pass
  config.lora = ConfigDict()  # train low-rank adapters, not the weights
  config.lora.rank = 0  # 0 = off
  config.lora.alpha = 32.0  # adapters are scaled by alpha / rank
  config.lora.targets = "layers/(q|k|v|o|gate|up|down)"  # a pattern of paths
  config.data = ConfigDict()
  config.data.name = "arithmetic"
  config.data.path = ""  # of a dataset that is read from disk
  config.data.options = ConfigDict()  # keyword arguments of the dataset's load
  config.data.max_prompt_length = 32  # tokens
  config.data.too_long = "refuse"  # or "drop": prompts of more tokens
  config.data.template = "{prompt}\n"
  config.data.system_prompt = ""  # of chats without one
  config.data.template_options = ConfigDict()  # keywords of the chat template
  config.sampling = ConfigDict()
  config.sampling.max_new_tokens = 80
  config.sampling.temperature = 1.0
  config.sampling.top_k = 0  # 0 = off
  config.sampling.top_p = 1.0
  config.sampling.min_p = 0.0
  config.logits_chunk = 32  # completion positions whose logits are held at once
  config.reward = ConfigDict()
  # Built in, "package.module:function" or "file.py:function". The first says
  # what a right answer is (1 or more), which is what evaluations count.
  config.reward.functions = ("exact_answer",)
  config.reward.weights = (1.0,)
  config.reward.options = ConfigDict()  # options.FUNCTION.keyword
  config.reward.workers = 0  # processes; 0 = in this one, without a time limit
  config.reward.timeout = 10.0  # seconds a completion
  config.reward.model = ""  # directory of a sequence classifier; "" = none
  config.reward.model_weight = 1.0
  config.reward.on_device = False  # True: the whole step is one XLA program
  config.advantage = "leave_one_out"
  config.subset_size = 2  # k of max_at_k and min_at_k
  config.loss = ConfigDict()
  config.loss.ratio = "token_ratio"
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.2
  config.loss.dual_clip = 0.0  # 0 = off
  config.loss.weighting = "token_mean"
  config.loss.kl = "k3"
  config.loss.kl_placement = "loss"
  config.loss.beta = 0.0  # 0 = no KL term and no reference model in memory
  config.optim = ConfigDict()
  config.optim.learning_rate = 3e-4
  config.optim.schedule = "constant"
  config.optim.warmup_steps = 0  # optimizer updates
  config.optim.b1 = 0.9
  config.optim.b2 = 0.95
  config.optim.weight_decay = 0.0
  config.optim.max_grad_norm = 1.0
  config.optim.epochs = 1  # passes over a step's completions
  config.optim.minibatches = 1  # optimizer updates a pass
  config.optim.micro_batches = 4  # parts whose gradients are added up
  config.diagnostics = ConfigDict()
  config.diagnostics.every = 0  # steps; 0 = off: nothing compiled or run
  config.diagnostics.tangents = 4  # random directions
  config.diagnostics.share = 0.375  # of a step's prompts, at least 3
  config.diagnostics.last_layers = 0  # scores of the last layers; 0 = all
  config.eval = ConfigDict()
  config.eval.every = 5  # steps
  config.eval.num_prompts = 256
  config.eval.batch_size = 128
  config.eval.samples = 4  # completions shown
  config.checkpoint = ConfigDict()
  config.checkpoint.every = 10  # steps
  config.checkpoint.keep = 2  # newest checkpoints on disk
  config.log = ConfigDict()
  config.log.every = 1  # steps
  config.log.samples_every = 10  # steps
  config.log.tensorboard = True
  config.mesh = ConfigDict()  # devices along each axis; -1 = all the others
  config.mesh.data = -1
  config.mesh.fsdp = 1
  config.mesh.tensor = 1
  config.lock()
  for path in FREE:
    section = config
    for name in path.split(".")[:-1]:
      section = section[name]
    section.unlock()
  return config


def flatten(config: ConfigDict | Mapping, prefix: str = "") -> dict[str, Any]:
  """Leaves by dotted path: `{"optim.learning_rate": 1e-4, ...}`."""
  leaves = {}
  for key, value in config.items():
    if isinstance(value, (ConfigDict, Mapping)):
      leaves |= flatten(value, f"{prefix}{key}.")
    else:
      leaves[f"{prefix}{key}"] = value
  return leaves


def nearest(name: str, candidates: Sequence[str]) -> str | None:
  """The candidate most like `name`, by last path element or as a whole.

  Args:
    name: a dotted name that is none of the candidates.
    candidates: dotted names.

  Returns:
    A candidate, or None where nothing is similar.
  """

  def likeness(a, b):
    return difflib.SequenceMatcher(None, a, b).ratio()

  def score(candidate):
    last = likeness(name.split(".")[-1], candidate.split(".")[-1])
    whole = likeness(name, candidate)
    return max(last, whole), whole

  best = max(candidates, key=score, default=None)
  return best if best is not None and score(best)[0] >= 0.6 else None


def validate(config: ConfigDict) -> None:
  """Checks a whole training config before anything compiles.

  Raises:
    ValueError: with every problem, a line each: field, value, what to do.
  """
  allowed, leaves = flatten(default_config()), flatten(config)
  found = []
  for name, value in leaves.items():
    if name not in allowed and not name.startswith(FREE):
      guess = nearest(name, list(allowed))
      hint = f"; did you mean {guess}?" if guess else ""
      found.append(f"{name} = {value!r}: unknown key{hint}")
  for name, value in allowed.items():
    if name not in leaves:
      found.append(f"{name}: missing; start from default_config()")
    elif leaves[name] in WORDS.get(name, ()):
      continue
    elif not _same_type(value, leaves[name]):
      kind = type(value).__name__
      found.append(f"{name} = {leaves[name]!r}: must be of type {kind}")
  found = found or validation.problems(leaves)
  if found:
    raise ValueError("\n  ".join(["the config is not valid:", *found]))


def _same_type(expected: Any, value: Any) -> bool:
  if isinstance(expected, float):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
  return type(value) is type(expected)


def to_json(config: ConfigDict) -> str:
  """The config as JSON text with sorted keys."""
  return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def from_json(text: str) -> ConfigDict:
  """The config that `to_json` wrote, locked; JSON lists become tuples."""

  def restore(value):
    if isinstance(value, dict):
      return {key: restore(item) for key, item in value.items()}
    return tuple(map(restore, value)) if isinstance(value, list) else value

  return ConfigDict(restore(json.loads(text))).lock()


def difference(old: ConfigDict, new: ConfigDict) -> list[str]:
  """What changed, as lines "key: old -> new", sorted by key."""
  a, b = flatten(from_json(to_json(old))), flatten(from_json(to_json(new)))
  missing = "(none)"
  return [
    f"{key}: {a.get(key, missing)!r} -> {b.get(key, missing)!r}"
    for key in sorted(a.keys() | b.keys())
    if a.get(key, missing) != b.get(key, missing)
  ]
