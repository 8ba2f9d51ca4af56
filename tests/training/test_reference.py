"""The reference: updates, memory, teachers and prompts."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_helpers import assert_same_weights

from grpojax import sft
from grpojax.core import meshes
from grpojax.core.types import TrainState
from grpojax.models import sharding
from grpojax.runtime.files import run_storage
from grpojax.training import policies
from grpojax.training.files.sources import find_files
from grpojax.training.step import reference
from grpojax.training.step.extension import Inputs, extended
from grpojax.training.step.extensions import moving_reference


@pytest.fixture
def mesh(one_device):
  with jax.set_mesh(one_device):
    yield one_device


def state_of(params, mesh, **fields):
  """Returns a state on the mesh, and its shardings."""
  state = TrainState(params, (), *[jnp.zeros((), jnp.int32)] * 4)
  whole = ((r"params.*", jax.sharding.PartitionSpec()),)
  abstract = jax.eval_shape(lambda: state)
  shardings = sharding.shardings(abstract, mesh, rules=whole)
  return jax.device_put(state, shardings).replace(**fields), shardings


@pytest.mark.slow
@pytest.mark.parametrize("where", reference.REFERENCE_MEMORY)
@pytest.mark.parametrize("every, mix", [(1, 0.25), (3, 1.0), (2, 0.5)])
def test_the_reference_mixes_in_the_policy_when_due(
  settings_with, mesh, every, mix, where
):
  settings = settings_with(
    loss__beta=0.1,
    model__reference=where,
    model__reference_every=every,
    model__reference_mix=mix,
  )
  rng = np.random.default_rng(0)
  params = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)}
  state, shardings = state_of(params, mesh)
  first = meshes.run_like(reference.copied, state.params)
  first = reference.to_memory(first, settings.model.reference)
  state = extended(state, reference=first)
  inputs = Inputs(settings, None, None, shardings, mesh)
  update_reference = moving_reference.extension(inputs).after_update
  expected = np.asarray(params["w"])
  kinds = set()
  for step in range(1, 8):
    w = rng.normal(size=(3, 2)).astype(np.float32)
    new = jax.device_put({"w": w}, shardings.params)
    state = state.replace(params=new, step=jnp.int32(step))
    state = update_reference(state, None, {})
    moved = state.extras["reference"]
    if step % every == 0:
      expected = mix * w + (1 - mix) * expected
    np.testing.assert_allclose(moved["w"], expected, rtol=1e-5)
    if mix == 1 and step % every == 0:
      np.testing.assert_array_equal(moved["w"], w)
    new["w"].delete()  # as the update, which donates it
    kinds.add(moved["w"].sharding.memory_kind)
    back = reference.to_device(moved)["w"]
    np.testing.assert_array_equal(back, moved["w"])
  assert len(kinds) == 1
  assert (kinds == {"pinned_host"}) == (where == "host")


@pytest.mark.slow
@pytest.mark.parametrize(
  "every, on_device",
  [(1, False), pytest.param(2, True, marks=pytest.mark.long)],
)
def test_a_resumed_run_with_a_moving_reference_equals_an_uninterrupted_run(
  every, on_device, train_short, tmp_path
):
  def go(name, steps):
    settings = {"steps": steps, "eval.every": 4, "loss.beta": 0.05}
    settings |= {"model.reference_every": every, "reward.on_device": on_device}
    rows = train_short(name, **settings)
    return [row["kl"] for row in rows if "kl" in row]

  whole = go("whole", 4)
  go("parts", 2)
  np.testing.assert_array_equal(go("parts", 4), whole)
  assert_same_weights(*(tmp_path / x / "model" for x in ("parts", "whole")))
  assert whole[0] < 1e-9
  if every == 1:  # the policy is its own reference
    assert max(whole) < 1e-9
  else:
    assert max(whole) > 1e-7 and whole[2] < whole[1]
  assert not (tmp_path / "whole" / run_storage.REFERENCE).exists()


def test_a_teacher_with_other_tokens_is_refused(train_toy, toy_model, tmp_path):
  other = shutil.copytree(toy_model, tmp_path / "other")

  def refused(message, **changes):
    with pytest.raises(SystemExit, match=f"teacher .*{message}"):
      train_toy(loss__beta=1, **changes)

  file = other / "tokenizer.json"
  tokens = json.loads(file.read_text())
  vocab = tokens["model"]["vocab"]
  vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
  file.write_text(json.dumps(tokens))
  refused("has different tokens", model__teacher=other)
  shutil.copy(toy_model / "tokenizer.json", file)
  config = json.loads((other / "config.json").read_text())
  padded = json.dumps(config | {"vocab_size": 128})
  (other / "config.json").write_text(padded)
  changes = {"model.path": other, "model.teacher": toy_model}
  refused("fewer than the policy's 128", **changes)
  refused("nowhere", model__teacher=tmp_path / "nowhere")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"lora.rank": 2},
    {"optim.packing": False, "steps": 12, "loss.kl": "k3"},
    {"loss.kl": "exact", "loss.kl_placement": "loss", "optim.minibatches": 2},
  ],
)
def test_distillation_from_a_larger_teacher_and_its_resume(
  changes, train_toy, tmp_path
):
  sizes = {"width": 24, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 40}
  words = [f"--config.model.{k}={v}" for k, v in sizes.items()]
  words += ["--config.steps=20", "--config.optim.learning_rate=2e-2"]
  words += ["--config.optim.warmup_steps=5"]
  teacher = tmp_path / "teacher"
  sft.main([f"--out={teacher}", *words])
  settings = {"model.teacher": teacher, "loss.beta": 1, "steps": 4}
  settings |= {"loss.kl": "k1", "loss.kl_placement": "ratio"}
  settings |= {"batch_size": 8, "eval.num_prompts": 4, "eval.every": 4}
  settings |= {"optim.learning_rate": 1e-2, "reward.weights": "0,"} | changes

  def go(name, **more):
    rows = train_toy(name, **settings | more)
    return [row["kl"] for row in rows if "kl" in row]

  whole = go("whole")
  assert whole[0] > 0.05
  if "steps" in changes:
    assert np.mean(whole[-4:]) < 0.7 * np.mean(whole[:2])
    return
  go("parts", steps=2)
  config = teacher / "config.json"
  text = config.read_text()
  config.write_text(text.replace("10000.0", "20000.0"))
  assert config.read_text() != text
  with pytest.raises(SystemExit, match="or teacher. Restore the old files"):
    go("parts")
  config.write_text(text)
  np.testing.assert_array_equal(go("parts"), whole)


def test_a_hint_is_part_of_the_reference_prompt(settings_with, toy_model, mesh):
  settings = settings_with(
    model__reference_prompt="{prompt} ({answer}, {{}})",
    data__template="{prompt}",
    loss__beta=1.0,
  )
  policy = policies.open_policy(find_files(str(toy_model)))
  read_prompts = reference.make_read_prompts(settings, policy, mesh)
  examples = [{"prompt": "1+2=", "answer": 3}, {"prompt": "40+2="}]
  read = read_prompts(examples)
  assert read.prompt_ids.shape == (2, 64)
  rows = zip(*map(np.asarray, (read.prompt_ids, read.prompt_mask)), strict=True)
  texts = [policy.tokenizer.decode(ids[mask]) for ids, mask in rows]
  assert texts == ["1+2= (3, {})", "40+2= (, {})"]
  chat = {"prompt": [{"role": "user", "content": "Hi"}], "answer": "x"}
  template = settings.model.reference_prompt
  (message,) = reference.hinted(template, chat)
  assert message == {"role": "user", "content": "Hi (x, {})"}
  with pytest.raises(ValueError, match="no answer: use its fields prompt"):
    reference.check_prompt(settings, examples[1])
  plain = settings_with()
  assert reference.make_read_prompts(plain, policy, mesh) is None
