"""Compiles a small model's rollout and update for eight devices.

mesh_programs.py PLATFORM LAYERS PROGRAM..., where PLATFORM is a topology of
libtpu, and a program is one of `PROGRAMS`. Prints JSON: {program:
{"text": HLO, "arguments": bytes on a device}}.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import optax
from jax import ShapeDtypeStruct
from jax.experimental import topologies
from jax.sharding import NamedSharding

from grpojax.core import meshes
from grpojax.core.decoding.sampling import Sampling
from grpojax.core.rollout import rollout
from grpojax.core.step import init_state
from grpojax.core.types import Batch, Prompts
from grpojax.core.update import make_update
from grpojax.models import contexts, sharding
from grpojax.models.transformer import TransformerConfig, transformer

SIZES = {"vocab_size": 4096, "width": 512, "heads": 8, "kv_heads": 4}
SIZES |= {"head_dim": 64, "mlp": 1024}
B = 32
G = 8
PROMPT = 64
T = 256
contexts.WHOLE = 128  # T is a long row, which attends in blocks
PROGRAMS = {  # function, axes of the mesh, of sampling
  "update": ("update", {"fsdp": 8}),
  "rollout": ("rollout", {"data": 2, "fsdp": 4}),
  "rollout tensor": ("rollout", {"data": 1, "fsdp": 4, "tensor": 2}),
  "rollout sampling_tensor": ("rollout", {"fsdp": 8}, 2),
  "rollout int8": ("rollout", {"data": 2, "fsdp": 4}),
  "rollout experts": ("rollout", {"data": 1}),  # on one device
}
EXPERTS = {"experts": 64, "experts_per_token": 2}


def placed(tree, shardings):
  return jax.tree.map(
    lambda x, s: ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
  )


def rows(mesh, shape, dtype):
  spec = meshes.activation_spec(mesh, shape, ("batch", "group"))
  return ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def update(lm, mesh, params):
  tx = optax.adam(1e-3)
  state = jax.eval_shape(lambda p: init_state(p, tx, jax.random.key(0)), params)
  shardings = sharding.shardings(state, mesh)
  samples = functools.partial(rows, mesh, (B, G, T))
  batch = Batch(
    prompt_ids=rows(mesh, (B, PROMPT), jnp.int32),
    prompt_mask=rows(mesh, (B, PROMPT), bool),
    completion_ids=samples(jnp.int32),
    completion_mask=samples(bool),
    advantages=rows(mesh, (B, G), jnp.float32),
    old_logprobs=samples(jnp.float32),
    ref_logprobs=None,
  )
  step = jax.jit(
    make_update(lm, tx), donate_argnums=0, out_shardings=(shardings, None)
  )
  return step.lower(placed(state, shardings), batch)


def sample(lm, mesh, params, tensor=0, sampling=Sampling()):
  shardings = sharding.shardings(params, mesh)
  mesh = meshes.sampling_mesh(mesh, tensor)
  run = functools.partial(
    rollout,
    lm,
    group_size=G,
    max_new_tokens=T,
    eos_ids=(1,),
    sampling=sampling,
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  prompts = Prompts(*(rows(mesh, (B, PROMPT), x) for x in (jnp.int32, bool)))
  with jax.set_mesh(mesh):
    return jax.jit(run).lower(placed(params, shardings), prompts, key)


def lowered(name, devices, layers):
  kind, axes, *tensor = PROGRAMS[name]
  experts = EXPERTS if name.endswith("experts") else {}
  devices = devices[:1] if experts else devices
  mesh = meshes.make_mesh(devices=devices, **{"data": 1} | axes)
  tied = kind == "update"
  config = TransformerConfig(**SIZES, layers=layers, tied=tied, **experts)
  lm = transformer(config, dtype=jnp.bfloat16, remat="full", platform="tpu")
  params = jax.eval_shape(lm.init, jax.random.key(0))
  with jax.set_mesh(mesh):
    if kind == "update":
      return update(lm, mesh, params)
  sampling = Sampling()
  if name.endswith("int8"):
    sampling = Sampling(weights_dtype="int8", cache_dtype="int8")
  return sample(lm, mesh, params, *tensor, sampling=sampling)


def main(platform, layers, *names):
  place = {"platform": "tpu", "topology_name": platform}
  devices = list(topologies.get_topology_desc(**place).devices)
  programs = {}
  for name in names:
    compiled = lowered(name, devices, int(layers)).compile()
    size = compiled.memory_analysis().argument_size_in_bytes
    programs[name] = {"text": compiled.as_text(), "arguments": size}
  json.dump(programs, sys.stdout)


if __name__ == "__main__":
  main(*sys.argv[1:])
