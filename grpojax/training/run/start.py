"""Start of a training run: checks, and the initial state."""

import contextlib
import itertools
import pathlib
from collections.abc import Callable

import jax

from grpojax.core import meshes
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.types import TrainState
from grpojax.data.examples import SPLITS
from grpojax.models import sharding
from grpojax.models.transformer import last_layers
from grpojax.runtime import checkpoint
from grpojax.runtime.files import records, run_storage
from grpojax.runtime.processes import distributed
from grpojax.runtime.terminal import trackers
from grpojax.runtime.text import chat_template
from grpojax.training.data import prompts, splits
from grpojax.training.files import run_directory
from grpojax.training.files.sources import files_of
from grpojax.training.policies import check_positions
from grpojax.training.run import memory, setup
from grpojax.training.settings import batches
from grpojax.training.settings.run import Facts, TrainSettings, completed
from grpojax.training.step import episodes, reference, scoring
from grpojax.training.step.engine import sampler as engine
from grpojax.training.step.extension import Inputs, extended
from grpojax.training.step.extensions import (
  difficulty,
  moving_reference,
  open_extensions,
)
from grpojax.training.step.run import Run
from grpojax.training.step.sampling import NoSamples, make_sampler

LARGE = 50_000_000  # number of parameters from which learning rates are checked
FAR = 50  # a warning is printed from this factor above the usual learning rate
LOW = 10  # a warning is printed from this factor below the usual learning rate


def check(
  settings: TrainSettings,
  facts: Facts,
  directory: pathlib.Path,
  stack: contextlib.ExitStack,
  check_signals: Callable[[], None],
  today: str | None = None,
  limit: int | None = None,
) -> Run:
  """Loads models and rewards, and reads all prompts of finite data sets.

  Writes nothing; all errors are ValueErrors. The stack will end the reward
  workers and leave the mesh. `check_signals` is called during long reads and
  may raise. `facts` are known from before; `today` is the date for templates,
  `limit` the memory of an accelerator in bytes. Both must be the same in all
  processes, which do not wait for each other here.
  """
  run = read_inputs(settings, facts, directory, check_signals, today, limit)
  settings = run.settings
  policy = run.policy
  mesh = run.mesh
  if settings.reward.on_device:  # reading batches checks their prompts
    group_size = batches.group_sizes(settings)[0]
    checked = prompts.training_batches(
      settings, policy, run.train.examples, group_size
    )
    ahead = min(settings.steps, splits.MEASURED // settings.batch_size + 1)
    for _ in itertools.islice(checked, ahead):
      check_signals()
  policy = setup.with_weights(settings, policy, mesh)
  check_signals()
  if settings.diagnostics.every and settings.diagnostics.last_layers:
    last_layers(policy.params, settings.diagnostics.last_layers)
  reward_model = scoring.open_model(settings, run.reward_model, mesh)
  reward_pool = stack.enter_context(
    scoring.open_reward_pool(settings, reward_model)
  )
  if settings.sampling.engine:
    try:
      engine.open_servers(settings, directory, check_signals)
    except NoSamples as error:
      raise ValueError(str(error)) from error
  environment = reward_pool.environment
  if environment is not None:
    first = run.train.examples[0]
    episodes.check(settings, policy, environment, first, check_signals)
  stack.enter_context(jax.set_mesh(mesh))
  return run._replace(policy=policy, reward_pool=reward_pool)


def read_inputs(
  settings: TrainSettings,
  facts: Facts,
  directory: pathlib.Path,
  check_signals: Callable[[], None] = lambda: None,
  today: str | None = None,
  limit: int | None = None,
) -> Run:
  """Reads and checks all inputs except weights, the first part of `check`."""
  requested = settings
  settings = completed(requested, facts)
  for name in settings.log.trackers:
    trackers.opener(name)
  rewards = scoring.resolve_functions(settings)
  policy = setup.with_teacher(settings, setup.open_policy(settings))
  judge = settings.reward.model and files_of(settings, settings.reward.model)
  tokenizers = [model.tokenizer for model in (policy, judge) if model]
  if facts.date is None and any(map(chat_template.asks_for_date, tokenizers)):
    facts = facts._replace(date=today or chat_template.today())
    settings = completed(requested, facts)
  mesh = setup.make_mesh(settings)
  batches.check_mesh(settings, mesh)
  reference.check_memory(settings.model.reference, mesh)
  cache = directory / run_directory.LENGTHS
  train, held_out = (
    splits.load_split(settings, policy, split, cache, check_signals)
    for split in SPLITS
  )
  facts = facts._replace(
    prompt_length=facts.prompt_length or splits.longest_prompt(train, held_out),
    logits_chunk=memory.logits_chunk(policy.shape, limit),
  )
  settings = completed(requested, facts)
  teacher = policy.teacher.shape if policy.teacher else None
  memory.refuse(memory.training(settings, policy.shape, mesh, teacher))
  longest = settings.data.max_prompt_length
  # Check that the examples suit the models, rewards and settings.
  for model in filter(None, (policy, policy.teacher)):
    new_tokens = settings.sampling.max_new_tokens
    check_positions(model.files, longest, new_tokens)
  for split in (train, held_out):
    scoring.check_columns(settings, rewards, split)
  if train.dropped or held_out.dropped:
    print(
      f"dropped {train.dropped} training and {held_out.dropped} held-out "
      f"prompts of more than {longest} tokens"
    )
  if count := splits.in_training(train, held_out):
    print(
      f"{count} of {len(held_out.examples)} held-out prompts are also training "
      "prompts: their accuracy does not measure generalisation"
    )
  if settings.model.reference_prompt:
    reference.check_prompt(settings, train.examples[0])
  difficulty.init_rates(settings, train.examples)  # checks the examples
  return Run(settings, directory, policy, mesh, train, held_out, judge or None)


def _warn_of_learning_rate(settings: TrainSettings, parameters: int) -> None:
  usual = 1e-5 if settings.lora.rank else 1e-6
  kind = "adapters" if settings.lora.rank else "full fine-tuning"
  rate = settings.optim.learning_rate
  if parameters < LARGE or usual / LOW < rate < FAR * usual:
    return
  ratio = f"{rate / usual:.0f} times"
  danger = "ruin the model"
  if rate < usual:
    ratio = f"1/{usual / rate:.0f} of"
    danger = "learn nothing"
  print(
    f"warning: --config.optim.learning_rate = {rate:g} is {ratio} the usual "
    f"{usual:g} for {kind}, and may {danger}",
    flush=True,
  )


def _warn_of_warmup(settings: TrainSettings) -> None:
  update = settings.optim.update
  updates = settings.steps * update.epochs * update.minibatches
  warmup = settings.optim.warmup_steps
  if 0 < updates <= warmup:
    print(
      f"warning: --config.optim.warmup_steps = {warmup}, but the run has only "
      f"{updates} updates: the learning rate stays below "
      f"{settings.optim.learning_rate:g}",
      flush=True,
    )


def inputs_of(
  run: Run, check_signals: Callable[..., None] = lambda together=False: None
) -> Inputs:
  """Returns the inputs of a run's steps."""
  return Inputs(
    run.settings,
    run.policy,
    setup.optimizer(run.settings),
    run.shardings,
    run.mesh,
    run.ref_params,
    run.reward_pool,
    run.train.examples,
    run.directory,
    check_signals,
  )


def start(
  run: Run, checkpointer: checkpoint.Checkpointer
) -> tuple[Run, TrainState]:
  """Makes the initial state, and removes records of steps after the checkpoint.

  Parameters move from the run to the state.
  ValueError if the saved reference is damaged or belongs to another model.
  """
  settings = run.settings
  policy = run.policy
  mesh = run.mesh
  tx = setup.optimizer(settings)
  extensions = open_extensions(inputs_of(run))

  def fresh(params):
    state = setup.first_state(settings, tx, params)
    first = {name: x.init() for name, x in extensions.items() if x.init}
    return extended(state, **first)

  shardings = sharding.shardings(jax.eval_shape(fresh, policy.params), mesh)
  params = jax.device_put(policy.params, shardings.params)
  count = sum(x.size for x in jax.tree.leaves((params, policy.frozen)))
  # The reference is a copy that follows the policy, the base model of adapters,
  # or fixed weights stored with the run.
  ref_params = following = None
  if moving_reference.follows_policy(settings):
    following = meshes.run_like(reference.copied, params)
  elif policy.frozen is not None and not policy.teacher:
    ref_params = {} if settings.loss.needs_reference else None  # the base model
  elif settings.loss.needs_reference:
    fixed = policy.teacher.params if policy.teacher else params
    saved = run_storage.reference(run.directory)
    checkpoint.save_params(saved, fixed)
    ref_params = checkpoint.restore_params(saved, fixed)
    ref_params = reference.to_memory(ref_params, settings.model.reference)
  state = jax.jit(fresh, out_shardings=shardings, donate_argnums=0)(params)
  if following is not None:
    memory = settings.model.reference
    following = reference.to_memory(following, memory)
    state = extended(state, **{moving_reference.NAME: following})
  step = checkpoint.latest_step(checkpointer)
  if distributed.is_main():
    for name in run_directory.RECORDS:
      # Steps after the checkpoint are repeated, so their rows are removed.
      records.truncate_jsonl(run.file(name), -1 if step is None else step)
    run.file(run_directory.METRICS).touch()
  print(
    f"{settings.model.path}: {count / 1e6:.3g} million parameters on "
    f"{mesh.size} {mesh.devices.flat[0].platform} device(s)",
    flush=True,
  )
  _warn_of_learning_rate(settings, count)
  _warn_of_warmup(settings)
  environment = run.reward_pool.environment
  greedy = make_sampler(settings, policy, 1, Sampling(0.0), mesh, environment)
  teacher = policy.teacher and policy.teacher._replace(params=None)
  run = run._replace(
    policy=policy._replace(params=None, teacher=teacher),
    shardings=shardings,
    ref_params=ref_params,
    greedy=greedy,
  )
  return run, state
