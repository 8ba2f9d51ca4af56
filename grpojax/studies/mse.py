"""Mean squared error of gradient estimators against group size, measured.

    python -m grpojax.studies.mse [--run_dir=DIR] [--config.key=value ...]

Figure 4 of arXiv 2603.01162 on the embedded arithmetic models: vanilla, GRPO
(leave-one-out, and centred with the group's own mean) and oracle, each against
the group size, for a base model, an instruct model, and the base model with
solved examples in its prompt. The gradient is that of the expected reward of a
prompt with respect to all parameters; errors are conditional on the prompt, and
averaged over held-out prompts.

For each prompt two pools of completions are sampled. Groups of the first are
measured (`errors.group_errors`); the curves are the exact formulas of
`statistics.u_statistics.mse` with moments estimated from the second, because
the completions of a real model cannot be enumerated. Intervals are over the
completions, with the prompts fixed.

The run directory has rows.jsonl, a line a prompt as soon as it is done (the
same command goes on where it stopped), results.csv, summary.json and mse.png.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from grpojax.data import arithmetic
from grpojax.rewards import exact
from grpojax.runtime import command_line, records
from grpojax.runtime import tokenizer as tokenizer_lib
from grpojax.runtime.config import config_error
from grpojax.runtime.settings import section, setting, to_config
from grpojax.studies import errors, gram, run
from grpojax.studies import mse_report as report
from grpojax.training import config as train_config
from grpojax.training import from_config, samplers, splits
from grpojax.training import policy as policy_lib
from grpojax.training import prompts as prompts_lib

CONFIGURATIONS = ("base", "instruct", "in-context")


FLAGS = run.FLAGS
SETTINGS = section(
  "the study",
  name=setting("mse", "name of the study; its directory is runs/NAME"),
  seed=setting(0, "seed of all random numbers", within="[0, 2**32)"),
  base=setting(
    "arithmetic-base", "model prompted in context: embedded, or a directory"
  ),
  instruct=setting(
    "arithmetic-instruct", "model prompted by its chat template, likewise"
  ),
  shots=setting(
    2, "solved training problems before an in-context prompt", within="[1, inf)"
  ),
  num_prompts=setting(12, "held-out problems", within="[1, inf)"),
  difficulty=setting(
    (2, 4), "operations of a problem, lowest and highest number"
  ),
  samples=setting(768, "completions a prompt in each of the two pools"),
  group_sizes=setting(
    (2, 4, 8, 16, 32, 64), "group sizes, each a divisor of the largest"
  ),
  max_new_tokens=setting(80, "longest completion, tokens", within="[1, inf)"),
  chunk_size=setting(
    8, "completions whose gradients are computed at once", within="[1, inf)"
  ),
)
"""About seven minutes of CPU time."""


def default_config() -> ConfigDict:
  """The embedded study."""
  return to_config(SETTINGS)


def problems(config: ConfigDict) -> list[str]:
  """What is wrong with values that are in their ranges, a line each."""
  wrong = []
  sizes = config.group_sizes
  if not sizes or not all(isinstance(g, int) and g >= 2 for g in sizes):
    wrong.append(
      config_error("group_sizes", sizes, "give whole numbers of 2 or more")
    )
  elif any(max(sizes) % g for g in sizes) or len(set(sizes)) < len(sizes):
    wrong.append(
      config_error("group_sizes", sizes, "each must divide the largest, once")
    )
  elif config.samples % max(sizes) or config.samples < 3 * max(sizes):
    todo = f"must be a multiple of {max(sizes)}, the largest group, at least 3"
    wrong.append(config_error("samples", config.samples, f"{todo} times"))
  for name in ("base", "instruct"):
    try:
      policy_lib.find_model(config[name])
    except ValueError as error:
      wrong.append(config_error(name, config[name], f"{error}"))
  try:
    arithmetic.load("test", difficulty=config.difficulty)
  except (TypeError, ValueError) as error:
    wrong.append(config_error("difficulty", config.difficulty, f"{error}"))
  return wrong


class Bench(NamedTuple):
  """All that one configuration's prompts need.

  Attributes:
    policy: the model.
    batches: one prompt each, with its example.
    sampler: of one pool, from `samplers.make_sampler`.
    score: from `gram.make_score`.
    rewards: `(example, texts) -> [S]`, of a pool's completions.
  """

  policy: policy_lib.Policy
  batches: list
  sampler: Any
  score: Any
  rewards: Callable[[dict[str, Any], Sequence[str]], np.ndarray]


def open_bench(config: ConfigDict, name: str) -> Bench:
  """Loads a configuration's model, and formats its prompts.

  Args:
    config: the study's.
    name: one of CONFIGURATIONS.

  Raises:
    ValueError: the model cannot be read, or takes no examples in its prompt.
  """
  path = config.instruct if name == "instruct" else config.base
  policy = policy_lib.load_policy(path)
  settings = train_config.default_config().unlock()
  settings.seed = config.seed
  settings.eval.num_prompts = config.num_prompts
  settings.data.options.difficulty = config.difficulty
  settings.sampling.max_new_tokens = config.max_new_tokens
  if name == "in-context":
    if policy.tokenizer.chat_template:
      raise ValueError(
        f"--config.base = {path!r} has a chat template: the in-context "
        "configuration needs a model of plain text"
      )
    examples = splits.load_examples(settings, "train")
    solved = [examples[i]["prompt"] for i in range(config.shots)]
    settings.data.template = (
      "".join(f"{p}\n{arithmetic.solution(p)}\n\n" for p in solved)
      + settings.data.template
    )
  held_out = splits.load_examples(settings, "test")
  settings.data.max_prompt_length = max(
    len(_encode(policy, held_out[i]["prompt"], settings.data.template))
    for i in range(config.num_prompts)
  )
  batches = prompts_lib.prompt_batches(
    settings, policy, held_out, batch_size=1, shuffle=False, repeat=False
  )
  sampling = from_config.sampling(settings)
  return Bench(
    policy,
    list(batches),
    samplers.make_sampler(settings, policy, config.samples, sampling),
    gram.make_score(policy.lm, sampling),
    rewards_of,
  )


def _encode(policy, prompt, template):
  return tokenizer_lib.encode_prompt(policy.tokenizer, prompt, template)[1]


def rewards_of(example: dict[str, Any], texts: Sequence[str]) -> np.ndarray:
  """Of the completions of one prompt, [S]."""
  rewards = [exact.exact_answer("", text, example) for text in texts]
  return np.array(rewards, np.float32)


def _measure(config: ConfigDict, bench: Bench, name: str, index: int):
  """Samples two pools for a prompt; returns its row of results."""
  prompts, examples = bench.batches[index]
  key = jax.random.key(config.seed)
  for number in (CONFIGURATIONS.index(name), index):
    key = jax.random.fold_in(key, number)
  ids, mask, rewards = [], [], []
  for pool in range(2):
    samples = bench.sampler(
      bench.policy.params, prompts, jax.random.fold_in(key, pool)
    )
    texts = policy_lib.decode(bench.policy, samples)
    rewards.append(bench.rewards(examples[0], texts[0]))
    ids.append(np.asarray(samples.completion_ids[0]))
    mask.append(np.asarray(samples.completion_mask[0]))
  products, distinct = gram.score_gram(
    bench.score,
    bench.policy.params,
    prompts,
    np.concatenate(ids),
    np.concatenate(mask),
    config.chunk_size,
  )
  n, blocks = config.samples, config.samples // max(config.group_sizes)
  first, second = products[:n, :n], products[n:, n:]
  baseline = errors.best_baseline(second, rewards[1])
  measured, measured_without = errors.group_errors(
    first, rewards[0], config.group_sizes, blocks, baseline
  )
  without = errors.moment_replicates(second, rewards[1], blocks)
  return {
    "configuration": name,
    "index": index,
    "problem": examples[0]["prompt"],
    "success": float(np.mean(rewards)),
    "distinct": distinct,
    "best_baseline": baseline,
    "errors": measured._asdict(),
    "errors_without": measured_without._asdict(),
    "moments": errors.score_moments(second, rewards[1])._asdict(),
    "moments_without": without._asdict(),
  }


def _collect(config: ConfigDict, path) -> list[dict[str, Any]]:
  """Measures the prompts that `path` lacks; returns the rows of all."""
  records.truncate_jsonl(path, 0)  # drops a line that was cut off
  rows = records.read_jsonl(path)
  done = {(row["configuration"], row["index"]) for row in rows}
  missing = [
    (name, index)
    for name in CONFIGURATIONS
    for index in range(config.num_prompts)
    if (name, index) not in done
  ]
  with command_line.usage_errors():
    benches = {name: open_bench(config, name) for name in dict(missing)}
  start, total = time.time(), len(rows) + len(missing)
  for number, (name, index) in enumerate(missing, 1):
    row = _measure(config, benches[name], name, index)
    records.append_jsonl(path, row)
    rows.append(row)
    left = (time.time() - start) / number * (len(missing) - number)
    print(
      f"prompt {len(rows)}/{total}  {name}: {row['problem']}  "
      f"{row['success']:.0%} right, {row['distinct']} distinct  "
      f"{records.duration(left)} left",
      flush=True,
    )
  return sorted(
    rows,
    key=lambda r: (CONFIGURATIONS.index(r["configuration"]), r["index"]),
  )


def main(argv: list[str]) -> None:
  """Runs the study with `argv`, the words after its name."""
  config, directory = run.open_study(
    argv, "python -m grpojax.studies.mse", SETTINGS, problems, __doc__
  )
  with run.resumable():
    rows = _collect(config, directory / "rows.jsonl")
  table = report.table(rows, config.group_sizes)
  run.write_csv(directory / "results.csv", table)
  records.write_json(directory / "summary.json", report.summary(rows, table))
  report.draw(table, config, directory / "mse.png")
  print(f"wrote {directory}/results.csv, summary.json and mse.png")


if __name__ == "__main__":
  main(sys.argv[1:])
