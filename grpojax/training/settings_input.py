"""Settings of what a step reads: model, data, completions and their rewards."""

from grpojax.core.multi_reward import AGGREGATIONS
from grpojax.data.datasets import DATASETS
from grpojax.data.survey import TOO_LONG
from grpojax.models.config import DTYPES
from grpojax.models.layer_stacks import REMAT
from grpojax.runtime.settings import free_section, section, setting
from grpojax.runtime.special_tokens import SPECIAL_TOKENS
from grpojax.statistics.success_rates import PRIORITIES
from grpojax.training import difficulty, filter_groups
from grpojax.training.reference import REFERENCE_MEMORY

ONE = "[1, inf)"
NOT_NEGATIVE = "[0, inf)"
POSITIVE = "(0, inf)"

_MODEL = section(
  "the policy, and the reference that it is held to",
  path=setting(
    "arithmetic-instruct",
    "a Hugging Face directory, the name of an embedded model, or ORG/NAME of "
    "the Hugging Face Hub",
  ),
  revision=setting(
    "", 'of ORG/NAME on the Hub: a branch, a tag or a commit; "" = main'
  ),
  dtype=setting(
    "float32",
    "format of computation; what is trained is float32 anyway, what is frozen "
    "(with LoRA) has this format",
    DTYPES,
  ),
  remat=setting(
    "selective",
    "what the backward pass computes again to save memory: nothing; the MLP's "
    "inner values and softmax weights; all but each layer's input",
    REMAT,
  ),
  reference=setting(
    "device",
    "where the reference policy is kept: on the devices, or in the host's "
    "memory but for its own pass",
    REFERENCE_MEMORY,
  ),
  reference_every=setting(
    0,
    "steps after which the reference follows the policy; 0 = it is fixed",
    within=NOT_NEGATIVE,
  ),
  reference_mix=setting(
    1.0,
    "the policy's share of the new reference then; 1 = a copy of the policy",
    within="(0, 1]",
  ),
)

_LORA = section(
  "low-rank adapters are trained, not the weights",
  rank=setting(
    0, "rank of the adapters; 0 = off: all is trained", within=NOT_NEGATIVE
  ),
  alpha=setting(32.0, "adapters are scaled by alpha / rank", within=POSITIVE),
  targets=setting(
    "layers/(q|k|v|o|gate|up|down)",
    "a regular expression of the paths of the weights that have adapters",
  ),
)

_DATA = section(
  "the prompts",
  name=setting("arithmetic", "the data set", DATASETS),
  path=setting(
    "",
    "of data in files: a file, a directory, or a pattern of files; of "
    "huggingface: ORG/NAME of the Hub",
  ),
  options=free_section("keyword arguments of the data set's load"),
  mixture=free_section(
    "several data sets in the place of that one: mixture.ANY.name, path, "
    "options, weight, and rewards (those of reward.functions that score it)"
  ),
  max_prompt_length=setting(
    32, "longest prompt, tokens with the template", within=ONE
  ),
  too_long=setting(
    "refuse", "what is done about prompts of more tokens", TOO_LONG
  ),
  template=setting(
    "{prompt}\n", "what a plain prompt becomes (a chat has its own template)"
  ),
  system_prompt=setting("", 'system prompt of chats without one; "" = none'),
  special_tokens=setting(
    "text",
    'what "<|im_end|>" in a prompt is: text, or the control token of that name',
    SPECIAL_TOKENS,
  ),
  template_options=free_section("keyword arguments of the chat template"),
)

_DIFFICULTY = section(
  "prompts drawn by their success rates",
  priority=setting(
    difficulty.OFF,
    "what of its success rate makes a prompt wanted",
    (difficulty.OFF, *PRIORITIES),
  ),
  uniform=setting(
    0.1, "share of prompts that is drawn as always", within="(0, 1]"
  ),
  half_life=setting(
    100.0, "steps after which what was seen counts half", within=POSITIVE
  ),
  band=setting((0.1, 0.9), "success rates that priority=band wants: low, high"),
  target=setting(
    (0.8, 0.3),
    "success rate that priority=target wants at the first and the last step",
  ),
  rows=setting(1, "groups of a step that one prompt may have", within=ONE),
  importance_weights=setting(
    False, "undo the choice in the loss, so that the objective stays the same"
  ),
)

_SAMPLING = section(
  "how completions are drawn (the first six change samples, the others not)",
  max_new_tokens=setting(80, "longest completion, tokens", within=ONE),
  temperature=setting(
    1.0,
    "temperature of the samples; greedy sampling (0) has no policy gradient",
    within=POSITIVE,
  ),
  top_k=setting(
    0, "draw from so many likeliest tokens; 0 = off", within=NOT_NEGATIVE
  ),
  top_p=setting(
    1.0,
    "draw from the likeliest tokens of this mass; 1 is off",
    within="(0, 1]",
  ),
  min_p=setting(
    0.0,
    "draw from tokens of at least this share of the likeliest one's "
    "probability; 0 is off",
    within="[0, 1]",
  ),
  repetition_penalty=setting(
    1.0,
    "logits of tokens that have been there, in the prompt too, are divided by "
    "it where positive (multiplied where not); 1 = off",
    within=POSITIVE,
  ),
  stages=setting(
    4, "lengths that the cache takes on the way, each compiled", within=ONE
  ),
  compact=setting(True, "put the samples that are not done together"),
  slots=setting(
    0, "samples of each prompt in memory at once; 0 = all", within=NOT_NEGATIVE
  ),
  parts=setting(
    1,
    "equal parts of a step's prompts, sampled one after another: "
    "reward.workers are at one while the next decodes",
    within=ONE,
  ),
)

_REWARD = section(
  "what completions are given",
  functions=setting(
    ("exact_answer",),
    'built in, "package.module:function" or "file.py:function"; the first says '
    "what a right answer is (1 or more), which evaluations count",
  ),
  weights=setting(
    (1.0,), "weights of the functions in the sum, a number for each"
  ),
  options=free_section("keyword arguments of a function: options.FUNCTION.key"),
  workers=setting(
    0,
    "processes of this machine that compute rewards; 0 = this one does, "
    "without a time limit",
    within="[0, 1024]",
  ),
  timeout=setting(10.0, "seconds a completion, in a worker", within=POSITIVE),
  model=setting(
    "",
    "a reward model (sequence classifier): a directory, or ORG/NAME[@REVISION] "
    'of the Hub; "" = none',
  ),
  model_weight=setting(1.0, "weight of the reward model in the sum"),
  on_device=setting(
    False, "score token ids on the device: the whole step is one XLA program"
  ),
  aggregation=setting(
    "sum_then_normalize",
    "compare several functions by their weighted sum, or each normalised in "
    "its group before it (GDPO)",
    AGGREGATIONS,
  ),
)

_FILTER_GROUPS = section(
  "dynamic sampling (DAPO): fresh prompts for groups that do not vary",
  enable=setting(False, "replace groups whose rewards are all equal"),
  metric=setting(
    "reward",
    "in what a group must vary: the reward, or the first function's (acc)",
    filter_groups.METRICS,
  ),
  max_num_gen_batches=setting(
    10, "most batches drawn for one step", within=ONE
  ),
  gen_parts=setting(
    1, "further draws are of 1 / gen_parts of a batch", within=ONE
  ),
  rescale=setting(
    False, "scale the gradient to its length without this filter"
  ),
)

SECTIONS = {
  "model": _MODEL,
  "lora": _LORA,
  "data": _DATA,
  "difficulty": _DIFFICULTY,
  "sampling": _SAMPLING,
  "reward": _REWARD,
  "filter_groups": _FILTER_GROUPS,
}
