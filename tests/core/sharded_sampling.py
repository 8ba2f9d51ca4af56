"""Sampling and log-probabilities with a vocabulary sharded over devices.

Run with JAX_NUM_CPU_DEVICES=8; test_on_devices.py does.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpojax.core.decoding.sampling import Sampling, sample
from grpojax.core.logprobs import token_logprobs
from grpojax.core.types import LM, Prefix

B = 4
G = 2
T = 3
D = 5
V = 1012
ALL = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)
SETTINGS = [Sampling(), ALL, Sampling(temperature=0.0)]


def language_model(constrain):
  """Returns a model of the last token; `constrain` shards the logits."""
  hidden = lambda ids: jnp.sin(ids[..., None] * jnp.arange(1.0, 1 + D))
  return LM(
    init=None,
    prefill=lambda _, ids, mask: Prefix(hidden(ids[:, 0]), mask.sum(-1), ()),
    extend=lambda params, prefix, ids, cache=None, **_: (hidden(ids), cache),
    unembed=lambda params, hidden: constrain(hidden @ params),
    init_cache=None,
  )


def program(constrain):
  """Returns samples with all settings, log-probabilities and gradients."""
  lm = language_model(constrain)

  def run(keys, logits, params, prompts, ids):
    drawn = [sample(keys, constrain(logits), s) for s in SETTINGS]

    def score(params):
      tokens = prompts, prompts >= 0, ids
      options = {"sampling": ALL, "chunk_size": 2}
      scored = token_logprobs(lm, params, *tokens, **options)
      return scored[0].sum(), scored

    return drawn, jax.value_and_grad(score, has_aux=True)(params)

  return run


def arguments():
  rng = np.random.default_rng(0)
  return (
    jax.random.split(jax.random.key(0), (B, G)),
    jnp.asarray(2 * rng.normal(size=(B, G, V)), jnp.float32),
    jnp.asarray(rng.normal(size=(D, V)), jnp.float32),
    jnp.zeros((B, 1), jnp.int32),
    jnp.asarray(rng.integers(V, size=(B, G, T)), jnp.int32),
  )


def check_text(text):
  """Checks that no array spans the vocabulary, and exchanges are small."""
  wide = [x for x in text.splitlines() if re.search(rf"[\[,]{V}[\],]", x)]
  wide = [x for x in wide if re.match(r"\s*(ROOT )?%\S+ =", x)]
  assert not wide, "\n".join(wide)
  assert re.search(rf"[\[,]{V // 4}\]", text)  # It was sharded.
  names = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
  exchanged = re.findall(rf"= (.*?) (?:{names})(?:-start)?\(", text)
  assert exchanged
  for shape in exchanged:
    for sizes in re.findall(r"\[([\d,]*)\]", shape):
      sizes = [int(x) for x in sizes.split(",") if x]
      if sorted(sizes) == [D, V // 4]:
        continue  # The weights' gradient, summed over the rows.
      # Per row: a block of about sqrt(V) tokens, or the sums of all blocks.
      assert np.prod(sizes) <= 2 * G * 44, shape


def main():
  devices = np.reshape(jax.devices(), (2, 4))
  axes = ("fsdp", "tensor")
  mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)
  sharding = lambda *axes: NamedSharding(mesh, P(*axes))
  logits = lambda rank: sharding("fsdp", *[None] * (rank - 2), "tensor")
  rows = sharding("fsdp")
  places = rows, logits(3), sharding(None, "tensor"), rows, rows
  cut = lambda x: jax.lax.with_sharding_constraint(x, logits(x.ndim))
  values = arguments()
  shapes = jax.eval_shape(lambda: values)
  compiled = jax.jit(program(cut), in_shardings=places).lower(*shapes).compile()
  check_text(compiled.as_text())
  ours = jax.tree.leaves(compiled(*jax.device_put(values, places)))
  theirs = jax.tree.leaves(jax.jit(program(lambda x: x))(*values))
  for x, y in zip(ours, theirs, strict=True):
    exact = x.dtype == jnp.int32
    np.testing.assert_allclose(x, y, *((0, 0) if exact else (1e-5, 1e-5)))


if __name__ == "__main__":
  main()
