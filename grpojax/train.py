"""Trains a language model with GRPO.

    python -m grpojax.train [--config=configs/x.py] [--config.key=value ...]
                            [--run_dir=DIR]

Without --config it runs the embedded default (see configs/arithmetic.py). The
run directory, by default runs/NAME_OF_CONFIG, gets

    config.json         the resolved configuration
    metrics.jsonl       one line a step, and one an evaluation
    samples.jsonl       sampled completions with their rewards
    tensorboard/        the same metrics for TensorBoard
    checkpoints/        the newest states, by Orbax
    model/              the trained model, in Hugging Face format
    learning_curve.png
    summary.json        accuracy before and after, seconds, steps

The same command run again resumes; on a finished run it does nothing. SIGTERM
saves and exits with code 75: run the same command again to go on.
"""

import contextlib
import itertools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from grpojax import evaluate as evaluation
from grpojax import experiment
from grpojax.core.sampling import Sampling
from grpojax.core.step import (
  init_state,
  make_batch,
  make_grpo_step,
  make_update,
  rollout_metrics,
)
from grpojax.core.types import Params, Rollout, TrainState
from grpojax.models import hf
from grpojax.runtime import (
  checkpoint,
  command_line,
  metrics,
  preemption,
  sharding,
)
from grpojax.runtime import config as config_lib

SHOWN = (
  "reward_mean",
  "completion_length_mean",
  "entropy",
  "grad_norm",
  "tokens_per_second",
)


class Preempted(Exception):
  """SIGTERM arrived; the state is that of the last finished step."""


class Run(NamedTuple):
  """What stays the same all through a run."""

  config: ConfigDict
  directory: pathlib.Path
  policy: experiment.Policy
  mesh: jax.sharding.Mesh
  ref_params: Params | None
  reward: Callable[..., float]
  writer: Any

  def file(self, name: str) -> pathlib.Path:
    return self.directory / name


def make_learn(config: ConfigDict, policy: experiment.Policy, tx):
  """`(state, rollout, rewards, ref_params) -> (state, metrics)`, jitted."""
  options = experiment.update_options(config)
  update = make_update(policy.lm, tx, **options)

  def learn(state, samples, rewards, ref_params):
    batch = make_batch(
      policy.lm,
      samples,
      rewards,
      experiment.advantage(config),
      ref_params,
      on_policy=config.optim.epochs * config.optim.minibatches == 1,
      kl_in_reward=experiment.kl_in_reward(config),
      sampling=options["sampling"],
      chunk_size=options["chunk_size"],
    )
    state, row = update(state, batch)
    return state, rollout_metrics(samples, rewards) | row

  return jax.jit(learn, donate_argnums=0)


def make_step(run: Run, tx, requested: Callable[[], bool]):
  """`(state, prompts, examples) -> (state, metrics, shown)`.

  Three parts with the rewards on the host in the middle; or one XLA program,
  where `reward.on_device` asks for it. `shown` is what `log_samples` writes.
  The state is touched only by the last part, so a step that SIGTERM interrupts
  leaves no trace.
  """
  config, policy = run.config, run.policy
  if config.reward.on_device:
    _, reward = experiment.device_reward(config, policy)
    whole = jax.jit(
      make_grpo_step(
        policy.lm,
        tx,
        reward,
        group_size=config.group_size,
        max_new_tokens=config.sampling.max_new_tokens,
        eos_ids=policy.eos_ids,
        pad_id=policy.pad_id,
        advantage=experiment.advantage(config),
        kl_in_reward=experiment.kl_in_reward(config),
        **experiment.update_options(config),
      ),
      donate_argnums=0,
    )

    def fused(state, prompts, examples):
      state, row = whole(state, prompts, run.ref_params)
      return state, jax.device_get(row), []

    return fused

  sampler = experiment.make_sampler(
    config, policy, config.group_size, experiment.sampling(config)
  )
  learn = make_learn(config, policy, tx)

  def step(state, prompts, examples):
    clock = [time.perf_counter()]
    key = jax.random.fold_in(state.key, state.step)
    samples = jax.block_until_ready(sampler(state.params, prompts, key))
    clock.append(time.perf_counter())
    _poll(requested)
    texts = experiment.decode(policy, samples)
    rewards = experiment.score(run.reward, examples, texts)
    clock.append(time.perf_counter())
    _poll(requested)
    state, row = learn(state, samples, rewards, run.ref_params)
    row = jax.device_get(row)
    clock.append(time.perf_counter())
    names = ("seconds_rollout", "seconds_rewards", "seconds_update")
    row |= dict(zip(names, np.diff(clock), strict=True))
    return state, row, _samples(examples, texts, rewards)

  return step


def _poll(requested: Callable[[], bool]) -> None:
  if requested():
    raise Preempted


def _samples(examples, texts, rewards) -> list[dict[str, Any]]:
  """The first group of a step, for people to read."""
  return [
    {
      "prompt": examples[0]["prompt_text"],
      "completion": text,
      "answer": examples[0].get("answer"),
      "reward": float(reward),
    }
    for text, reward in zip(texts[0], rewards[0], strict=True)
  ]


def _record(run: Run, row: dict[str, Any]) -> None:
  """Writes one row to metrics.jsonl and TensorBoard."""
  metrics.append_jsonl(run.file("metrics.jsonl"), row)
  if run.writer is not None:
    metrics.write_scalars(run.writer, row["step"], row)


def evaluate(run: Run, params: Params, sampler, step: int) -> dict[str, float]:
  """Greedy held-out accuracy; recorded, printed and returned."""
  config = run.config
  result = evaluation.evaluate(
    run.policy,
    params,
    sampler,
    evaluation.held_out(config, run.policy),
    run.reward,
    jax.random.key(config.seed),
    config.eval.batch_size,
  )
  row = {"step": step} | evaluation.accuracy(result)
  _record(run, row)
  print(
    f"held-out greedy accuracy after {step} steps: {row['accuracy']:.1%}  "
    f"[{row['accuracy_low']:.1%}, {row['accuracy_high']:.1%}]",
    flush=True,
  )
  if step in (0, config.steps):
    shown = zip(result.examples, result.texts, result.rewards, strict=True)
    for example, texts, rewards in itertools.islice(shown, config.eval.samples):
      _show(example["prompt_text"], texts[0], rewards[0])
  return row


def _show(prompt: str, completion: str, reward: float) -> None:
  text = (prompt + completion).rstrip()
  print("\n".join(f"    | {line}" for line in text.splitlines()))
  print(f"    | -> reward {float(reward):g}", flush=True)


def _log(run: Run, row: dict[str, Any], shown, began: float) -> None:
  """Writes a step's metrics, and shows progress and samples when due."""
  config, step = run.config, row["step"]
  if run.ref_params is None:
    row.pop("kl")  # there is nothing to diverge from
  _record(run, row)
  for sample in shown:
    metrics.append_jsonl(run.file("samples.jsonl"), {"step": step} | sample)
  if step % config.log.every == 0 or step == config.steps:
    line = {k: row[k] for k in SHOWN}
    print(
      metrics.progress(step, config.steps, row["seconds_step"], line),
      flush=True,
    )
  if shown and step % config.log.samples_every == 0:
    sample = shown[0]
    _show(sample["prompt"], sample["completion"], sample["reward"])


def fit(run: Run, state: TrainState, tx, checkpointer, requested) -> TrainState:
  """Runs the remaining steps; saves on the way and when SIGTERM arrives."""
  config = run.config
  step_fn = make_step(run, tx, requested)
  greedy = experiment.make_sampler(config, run.policy, 1, Sampling(0.0))
  target = None
  if config.reward.on_device:
    target, _ = experiment.device_reward(config, run.policy)
  batches = experiment.prompt_batches(
    config,
    run.policy,
    experiment.training_examples(config),
    batch_size=config.batch_size,
    target=target,
    seed=config.seed,
    start=int(state.prompts_consumed),
  )
  place = sharding.batch_sharding(run.mesh)
  step, saved = int(state.step), int(state.step)
  if step == 0:
    evaluate(run, state.params, greedy, 0)
  spent = _seconds(run)
  try:
    while step < config.steps:
      _poll(requested)
      began = time.perf_counter()
      prompts, examples = next(batches)
      state, row, shown = step_fn(
        state, jax.device_put(prompts, place), examples
      )
      step += 1
      seconds = time.perf_counter() - began
      tokens = config.batch_size * config.group_size
      tokens *= float(row["completion_length_mean"])
      row |= {"seconds_step": seconds, "tokens_per_second": tokens / seconds}
      due = step % config.eval.every == 0 or step == config.steps
      shown = shown if step % config.log.samples_every == 0 else []
      _log(run, {"step": step} | row, shown, began)
      if due:
        evaluate(run, state.params, greedy, step)
      spent += time.perf_counter() - began
      metrics.append_jsonl(
        run.file("metrics.jsonl"), {"step": step, "train_seconds": spent}
      )
      if step % config.checkpoint.every == 0 or step == config.steps:
        checkpoint.save(checkpointer, step, state)
        saved = step
  except Preempted:
    if step > saved:
      checkpoint.save(checkpointer, step, state)
    checkpoint.wait(checkpointer)
    print(f"stopped after step {step}; the same command resumes", flush=True)
    raise
  checkpoint.wait(checkpointer)
  return state


def _seconds(run: Run) -> float:
  """Training seconds spent so far, over all the times the run was started."""
  rows = metrics.read_jsonl(run.file("metrics.jsonl"))
  return max((r["train_seconds"] for r in rows if "train_seconds" in r), default=0.0)


def finish(run: Run, params: Params) -> dict[str, Any]:
  """Writes the model, the picture and the summary."""
  model = run.file("model")
  if not model.exists():  # a run that was killed here has written it whole
    hf.save(model, jax.device_get(params), run.config.model.path)
  metrics.learning_curve(
    run.file("metrics.jsonl"), run.file("learning_curve.png")
  )
  rows = metrics.read_jsonl(run.file("metrics.jsonl"))
  tests = [row for row in rows if "accuracy" in row]
  names = ("accuracy", "accuracy_low", "accuracy_high")
  before, after = ([test[name] for name in names] for test in (tests[0], tests[-1]))
  summary = {
    "accuracy_before": before[0],
    "accuracy_before_interval": before[1:],
    "accuracy_after": after[0],
    "accuracy_after_interval": after[1:],
    "train_seconds": _seconds(run),
    "steps": run.config.steps,
    "eval_prompts": run.config.eval.num_prompts,
    "skipped_updates": sum(r.get("skipped_updates", 0) for r in rows),
  }
  metrics.write_json(run.file("summary.json"), summary)
  return summary


def _print_summary(directory: pathlib.Path, summary: dict[str, Any]) -> None:
  for when in ("before", "after"):
    low, high = summary[f"accuracy_{when}_interval"]
    print(
      f"accuracy {when:6} {summary[f'accuracy_{when}']:6.1%}  "
      f"[{low:.1%}, {high:.1%}]"
    )
  print(
    f"{summary['steps']} steps in {metrics.duration(summary['train_seconds'])}"
    f"; results, curve and model are in {directory}/"
  )


def _start(config: ConfigDict, directory: pathlib.Path, checkpointer):
  """Loads the model and the newest state, and cleans up after a lost run."""
  policy = experiment.load_policy(
    config.model.path, config.model.dtype, config.model.remat
  )
  mesh = sharding.make_mesh(**config.mesh)
  tx = experiment.optimizer(config)
  key = jax.random.key(config.seed)

  def fresh(params):
    return init_state(params, tx, key)

  places = sharding.shardings(jax.eval_shape(fresh, policy.params), mesh)
  params = jax.device_put(policy.params, places.params)
  state = jax.jit(fresh, out_shardings=places)(params)
  ref_params = None
  if experiment.needs_reference(config):
    checkpoint.save_reference(directory, params)
    ref_params = checkpoint.restore_reference(directory, params)
  step = checkpoint.latest_step(checkpointer)
  if step is not None:
    state = checkpoint.restore(checkpointer, state, step)
    print(f"resuming after step {step}")
  for name in ("metrics.jsonl", "samples.jsonl"):
    metrics.truncate_jsonl(directory / name, -1 if step is None else step)
  writer = None
  if config.log.tensorboard:
    writer = metrics.tensorboard_writer(
      directory / "tensorboard", -1 if step is None else step
    )
  reward = experiment.host_reward(config)
  policy = policy._replace(params=None)  # the state owns them now
  run = Run(config, directory, policy, mesh, ref_params, reward, writer)
  return run, state, tx


def main(argv: list[str]) -> None:
  with command_line.usage_errors():
    config, flags = command_line.parse(
      argv, {"run_dir": ("", "where to write; default runs/NAME_OF_CONFIG")}
    )
    config_lib.validate(config)
    hf.to_transformer_config(hf.read_config(config.model.path))
    directory = pathlib.Path(flags.run_dir or pathlib.Path("runs") / config.name)
    checkpoint.open_run(directory, config)
  summary = directory / "summary.json"
  if summary.exists():
    print(f"{directory} is finished: nothing to do (see {summary})")
    return
  with contextlib.ExitStack() as stack:
    requested = stack.enter_context(preemption.install())
    checkpointer = stack.enter_context(
      checkpoint.open_checkpointer(directory, config.checkpoint.keep)
    )
    with command_line.usage_errors():
      run, state, tx = _start(config, directory, checkpointer)
    if run.writer is not None:
      stack.callback(run.writer.close)
    try:
      state = fit(run, state, tx, checkpointer, requested)
    except Preempted:
      sys.exit(preemption.EXIT_PREEMPTED)
    _print_summary(directory, finish(run, state.params))


if __name__ == "__main__":
  main(sys.argv[1:])
