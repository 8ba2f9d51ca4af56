"""The configuration of a training run: its defaults, and what makes one valid.

A config is read here, in the rest of `grpojax.training`, in the programs and in
the studies, and nowhere below them: what these call takes plain arguments.
"""

from ml_collections import ConfigDict, FieldReference

from grpojax.runtime import config as config_lib
from grpojax.runtime import config_file
from grpojax.training import validation
from grpojax.training.group_sizes import AUTO

WORDS = {"group_size": (AUTO,)}
"""Words that may stand in the place of a number."""


def default_config() -> ConfigDict:
  """What every config starts from. Locked: an unknown key is an error."""
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
  # Recomputed in the backward pass: none, selective (MLP and softmax), full.
  config.model.remat = "selective"
  config.model.reference = "device"  # or "host": there but for its own pass
  config.model.reference_every = 0  # steps, when it follows; 0 = fixed
  config.model.reference_mix = 1.0  # the policy's share of it then; 1 = a copy
  config.difficulty = ConfigDict()  # prompts drawn by their success rates
  config.difficulty.priority = "none"  # or what of them makes a prompt wanted
  config.difficulty.uniform = 0.1  # share of prompts that is drawn as always
  config.difficulty.half_life = 100.0  # steps: what was seen counts half
  config.difficulty.band = (0.1, 0.9)  # of success rates, for "band"
  config.difficulty.target = (0.8, 0.3)  # at the first and the last step
  config.difficulty.rows = 1  # groups of a step that one prompt may have
  config.difficulty.importance_weights = False  # undo it in the loss
  config.lora = ConfigDict()  # train low-rank adapters, not the weights
  config.lora.rank = 0  # 0 = off
  config.lora.alpha = 32.0  # adapters are scaled by alpha / rank
  config.lora.targets = "layers/(q|k|v|o|gate|up|down)"  # a pattern of paths
  config.data = ConfigDict()
  config.data.name = "arithmetic"
  config.data.path = ""  # of a dataset that is read from disk
  config.data.options = ConfigDict()  # keyword arguments of the dataset's load
  # Several data sets in the place of that one: mixture.ANY.name, path, options,
  # weight, and rewards (those of reward.functions that it is scored by).
  config.data.mixture = ConfigDict()
  config.data.max_prompt_length = 32  # tokens
  config.data.too_long = "refuse"  # or "drop": prompts of more tokens
  config.data.template = "{prompt}\n"
  config.data.system_prompt = ""  # of chats without one
  # What "<|im_end|>" in a prompt is: text, or the token that ends a turn.
  config.data.special_tokens = "text"
  config.data.template_options = ConfigDict()  # keywords of the chat template
  config.sampling = ConfigDict()
  config.sampling.max_new_tokens = 80
  config.sampling.temperature = 1.0
  config.sampling.top_k = 0  # 0 = off
  config.sampling.top_p = 1.0
  config.sampling.min_p = 0.0
  config.sampling.repetition_penalty = 1.0  # 1 = off
  # How it is computed, which changes no sample: lengths that the cache takes
  # and that are compiled; whether the samples that are not done are put
  # together; samples of each prompt in memory at once, 0 = all.
  config.sampling.stages = 4
  config.sampling.compact = True
  config.sampling.slots = 0
  # Of a step's prompts, equal parts that are sampled one after another: the
  # reward workers are at one while the next decodes. Changes no sample either.
  config.sampling.parts = 1
  config.logits_chunk = 256  # tokens whose logits a device holds at once
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
  # Several functions' rewards are compared as their weighted sum, or each
  # normalised in its group before it: "normalize_then_sum" (GDPO).
  config.reward.aggregation = "sum_then_normalize"
  config.filter_groups = ConfigDict()  # dynamic sampling (DAPO):
  config.filter_groups.enable = False  # fresh prompts for groups that are equal
  config.filter_groups.metric = "reward"  # in that, or "acc": the 1st function
  config.filter_groups.max_num_gen_batches = 10  # batches drawn for one step
  config.filter_groups.gen_parts = 1  # draws of 1 / gen_parts of a batch
  config.filter_groups.rescale = False  # to the gradient's unfiltered length
  config.advantage = "leave_one_out"
  config.subset_size = 2  # k of max_at_k and min_at_k
  config.score_power = 2.0  # of score_weighted's weights
  config.score_norms = ConfigDict()  # of norm_ratio, from the diagnoses
  config.score_norms.decay = 0.9  # of past estimates, at each diagnosis
  config.loss = ConfigDict()
  config.loss.surrogate = "clipped"  # and those of its settings that it has:
  config.loss.clip_low = 0.2
  config.loss.clip_high = 0.2
  config.loss.dual_clip = 0.0  # 0 = off
  config.loss.cispo_min = 0.0  # bounds of the ratio itself
  config.loss.cispo_max = 5.0
  config.loss.gmpo_clip_low = 0.4  # of the log-ratio
  config.loss.gmpo_clip_high = 0.4
  config.loss.sapo_temperature_pos = 1.0  # where the advantage is positive
  config.loss.sapo_temperature_neg = 1.05
  config.loss.vespo_k_pos = 2.0
  config.loss.vespo_lambda_pos = 3.0
  config.loss.vespo_k_neg = 3.0
  config.loss.vespo_lambda_neg = 2.0
  config.loss.advantage_clip = 0.0  # bound of their size; 0 = off
  config.loss.top_entropy_quantile = 1.0  # share of the tokens; 1 = all
  config.loss.entropy_coef = 0.0  # of a bonus; 0 = off
  config.loss.entropy_target = 0.0  # nats a token; 0 = entropy_coef is fixed
  config.loss.entropy_coef_delta = 0.005  # a step of the adaptive coefficient
  config.loss.entropy_coef_max = 1.0
  config.loss.ratio = "token_ratio"
  config.loss.old_logprobs = "sampler"  # or "scorer": one more forward pass
  # Of losses by pi_scorer / pi_sampler, within bounds (0 = none).
  config.loss.correction = "none"
  config.loss.correction_low = 0.0
  config.loss.correction_high = 3.0
  config.loss.off_policy_threshold = 0.0  # nats a token; 0 = off
  # Completions cut off at their budget: keep; mask (not in the loss); or drop
  # (nor in the group's baseline).
  config.loss.truncated = "keep"
  config.loss.weighting = "token_mean"
  config.loss.kl = "k3"
  config.loss.kl_placement = "loss"
  config.loss.beta = 0.0  # 0 = no KL term and no reference model in memory
  config.optim = ConfigDict()
  config.optim.name = "adamw"  # or "adafactor", which has b2, but no b1
  # Of AdamW's two moments between updates; bfloat16 is rounded at random.
  config.optim.moments_dtype = "float32"
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
  # Completions share rows: padding costs little, other lengths may compile.
  config.optim.packing = True
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
  config.stop = ConfigDict()  # after so many steps in a row; 0 = never
  config.stop.skipped_updates = 10  # with gradients that are not finite
  config.stop.rewards_missing = 10  # without any reward
  config.stop.zero_variance_groups = 100  # without two rewards that differ
  config.stop.truncated = 0  # with most completions cut off
  config.mesh = ConfigDict()  # devices along each axis; -1 = all the others
  config.mesh.data = -1
  config.mesh.fsdp = 1
  config.mesh.expert = 1
  config.mesh.tensor = 1
  config.mesh.sampling_tensor = 0  # tensor while sampling; 0 = mesh.tensor
  config.lock()
  for section in (config.data, config.reward):
    section.options.unlock()  # keyword arguments of what the config names
  config.data.template_options.unlock()
  config.data.mixture.unlock()
  return config


def default_job() -> ConfigDict:
  """The config of a program that is given none: configs/arithmetic.py."""
  file = config_file.packaged()["arithmetic"]
  return config_file.load_file(file, default_config)


def validate(config: ConfigDict) -> None:
  """Checks a whole training config before anything compiles.

  Raises:
    ValueError: with every problem, a line each: field, value, what to do.
  """
  wrong_keys = config_lib.check_keys(config, default_config(), WORDS)
  config_lib.refuse(
    wrong_keys or validation.problems(config_lib.flatten(config))
  )
