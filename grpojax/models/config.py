"""Configuration of a decoder, and shapes and initial values of parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from grpojax.core.random_keys import random_key
from grpojax.core.types import Params
from grpojax.models import gated_delta
from grpojax.models.rope import Rope

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
"""Dtypes for computation and for exported weights, by name."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Architecture of a decoder; hashable, so it can be static in `jax.jit`.

  Sizes are V = `vocab_size`, D = `width`, L = `layers`, H = `heads`, K =
  `kv_heads` (divides H), E = `head_dim` (even), F = `mlp` (per expert, if any).

  Attributes:
    rope: rotary embedding.
    norm_eps: number added to the mean square in RMSNorm.
    qkv_bias: query, key and value projections have biases.
    o_bias: the attention's output projection has a bias.
    mlp_bias: the MLP's three projections have biases.
    tied: the output head is the transposed embedding.
    qk_norm: each head's queries and keys are normalised.
    wide_qk_norm: queries and keys are normalised over all heads together.
    norm_offset: norms multiply by 1 + their weights.
    pre_norms: inputs of attention and MLP are normalised.
    post_norms: outputs of attention and MLP are normalised.
    activation: function of the MLP's gate, "silu" or "gelu_tanh".
    embedding_scale: factor of the embedding, rounded to the dtype of products.
    residual_scale: factor of the outputs of attention and MLP.
    attention_scale: factor of the attention logits; None means 1 / sqrt(E).
    attention_cap: soft cap of the attention logits, or None.
    logits_cap: soft cap of the output logits, or None.
    logits_divisor: divisor of the output logits, before the cap.
    local_layers: True for each layer with `window` and `local_rope`; () means
      no local layers.
    window: number of last tokens that a token of a local layer attends to, the
      token itself included; 0 means all.
    local_rope: rotary embedding of local layers; None means `rope`.
    attention_gate: each head's output is multiplied by a sigmoid of as many
      more outputs of the query projection.
    linear: sizes of linear layers (`gated_delta`), or None.
    linear_layers: True for each layer that is linear; () means no linear ones.
    experts: X, experts per layer; 0 means a dense MLP without a router.
    experts_per_token: number of experts that each token uses.
    normalize_experts: the weights of a token's experts sum to 1.
    labels: outputs of a sequence classifier; 0 means it is a language model.
    gaps: ranges [start, stop) of unused ids, which have probability 0.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  rope: Rope = Rope()
  norm_eps: float = 1e-6
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  tied: bool = True
  qk_norm: bool = False
  wide_qk_norm: bool = False
  norm_offset: bool = False
  pre_norms: bool = True
  post_norms: bool = False
  activation: str = "silu"
  embedding_scale: float = 1.0
  residual_scale: float = 1.0
  attention_scale: float | None = None
  attention_cap: float | None = None
  logits_cap: float | None = None
  logits_divisor: float = 1.0
  local_layers: tuple[bool, ...] = ()
  window: int = 0
  local_rope: Rope | None = None
  attention_gate: bool = False
  linear: gated_delta.Sizes | None = None
  linear_layers: tuple[bool, ...] = ()
  experts: int = 0
  experts_per_token: int = 0
  normalize_experts: bool = False
  labels: int = 0
  gaps: tuple[tuple[int, int], ...] = ()

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """Rotary embeddings of global layers and, if different, of local layers."""
    return (self.rope, *([self.local_rope] if self.local_rope else []))

  @property
  def locality(self) -> tuple[bool, ...]:
    """For each layer, True if it is local."""
    return self.local_layers or (False,) * self.layers

  @property
  def period(self) -> tuple[bool, ...]:
    """The shortest part of `linear_layers` that repeats; () without any."""
    kinds = self.linear_layers
    sizes = (n for n in range(1, len(kinds) + 1) if len(kinds) % n == 0)
    parts = (kinds[:n] for n in sizes)
    return next((x for x in parts if x * (len(kinds) // len(x)) == kinds), ())

  def layers_with(self, name: str) -> tuple[int, ...]:
    """Returns the numbers of the layers that have a parameter."""
    linear = self.linear_layers or (False,) * self.layers
    if name.startswith("linear_"):
      return tuple(i for i, x in enumerate(linear) if x)
    if name.partition("_")[0] in ("q", "k", "v", "o"):
      return tuple(i for i, x in enumerate(linear) if not x)
    return tuple(range(self.layers))


def check(config: TransformerConfig) -> None:
  """Raises ValueError if fields of a configuration contradict each other."""
  c = config
  if c.heads % c.kv_heads:
    raise ValueError(f"heads={c.heads} is no multiple of kv_heads={c.kv_heads}")
  if c.head_dim % 2:
    raise ValueError(f"head_dim={c.head_dim} must be even for RoPE")
  for rope in c.ropes:
    rotated = rope.rotated(c.head_dim)
    if not 0 <= rope.share <= 1:
      raise ValueError(f"RoPE's share={rope.share} of channels must be in 0..1")
    if rotated % 2 or len(rope.divisors) not in (0, rotated // 2):
      raise ValueError(
        f"RoPE rotates {rotated} of {c.head_dim} channels, with "
        f"{len(rope.divisors)} divisors: use an even number of channels, and "
        "a divisor for each pair"
      )
  if len({(x.share, x.query_beta > 0) for x in c.ropes}) > 1:
    raise ValueError("rope and local_rope need the same share and query_beta")
  if len(c.locality) != c.layers:
    raise ValueError(
      f"local_layers has {len(c.local_layers)} entries for {c.layers} layers"
    )
  if any(c.local_layers) and c.window < 1 and not c.local_rope:
    raise ValueError(f"window={c.window} must be at least 1 for local layers")
  if c.linear_layers and (
    len(c.linear_layers) != c.layers or set(c.period) != {False, True}
  ):
    raise ValueError(
      f"linear_layers={c.linear_layers} needs {c.layers} entries, of both kinds"
    )
  if c.linear_layers and (c.local_layers or c.experts or not c.linear):
    raise ValueError(
      "linear layers need the sizes `linear`, no experts and no local layers"
    )
  if c.linear and c.linear.value_heads % c.linear.key_heads:
    raise ValueError(
      f"linear.value_heads={c.linear.value_heads} is no multiple of "
      f"linear.key_heads={c.linear.key_heads}"
    )
  if c.experts and not 1 <= c.experts_per_token <= c.experts:
    raise ValueError(
      f"experts_per_token={c.experts_per_token} must be in 1..{c.experts}"
    )


def _layer_shapes(c: TransformerConfig) -> dict[str, tuple[int, ...]]:
  q = c.heads * c.head_dim
  kv = c.kv_heads * c.head_dim
  width = (c.width,)
  layer = {
    "q": (c.width, 2 * q if c.attention_gate else q),
    "k": (c.width, kv),
    "v": (c.width, kv),
    "o": (q, c.width),
  }
  up, down = (c.width, c.mlp), (c.mlp, c.width)
  if c.experts:
    layer |= {
      "router": (c.width, c.experts),
      "expert_gate": (c.experts, *up),
      "expert_up": (c.experts, *up),
      "expert_down": (c.experts, *down),
    }
  else:
    layer |= {"gate": up, "up": up, "down": down}
  if c.qkv_bias:
    q_bias = layer["q"][1:]
    layer |= {"q_bias": q_bias, "k_bias": (kv,), "v_bias": (kv,)}
  if c.o_bias:
    layer |= {"o_bias": width}
  if c.mlp_bias:
    layer |= {"gate_bias": (c.mlp,), "up_bias": (c.mlp,), "down_bias": width}
  if c.qk_norm:
    layer |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
  if c.wide_qk_norm:
    layer |= {"q_norm": (q,), "k_norm": (kv,)}
  if c.pre_norms:
    layer |= {"attn_norm": width, "mlp_norm": width}
  if c.post_norms:
    layer |= {"attn_post_norm": width, "mlp_post_norm": width}
  if c.linear:
    layer |= {
      "linear_qkv": (c.width, c.linear.channels),
      "linear_z": (c.width, c.linear.values),
      "linear_b": (c.width, c.linear.value_heads),
      "linear_a": (c.width, c.linear.value_heads),
      "linear_a_bias": (c.linear.value_heads,),
      "linear_rate_bias": (c.linear.value_heads,),  # of the decay
      "linear_conv": (c.linear.channels, 1, c.linear.taps),
      "linear_norm": (c.linear.value_dim,),
      "linear_o": (c.linear.values, c.width),
    }
  return layer


def parameter_shapes(config: TransformerConfig) -> dict[str, Any]:
  """Returns the shapes of all parameters, in a nested dict like `init`'s."""
  c = config
  layers = {
    name: (len(c.layers_with(name)), *shape)
    for name, shape in _layer_shapes(c).items()
  }
  shapes = {"embed": (c.vocab_size, c.width), "layers": layers}
  shapes["final_norm"] = (c.width,)
  if c.labels:
    return shapes | {"score": (c.width, c.labels)}
  return shapes if c.tied else shapes | {"head": (c.width, c.vocab_size)}


def _initial(config, key, name: str, shape: tuple[int, ...]):
  """Returns neutral norms and biases, and random matrices as in GPT-2."""
  if "norm" in name:
    offset = config.norm_offset and name != "linear_norm"
    return jnp.zeros(shape) if offset else jnp.ones(shape)
  if "bias" in name:
    return jnp.zeros(shape)
  is_output = name in ("o", "linear_o", "down", "expert_down")
  scale = 0.02 / (2 * config.layers) ** 0.5 if is_output else 0.02
  return scale * jax.random.normal(key, shape)


def init(config: TransformerConfig, key: Key[Array, ""]) -> Params:
  """Returns randomly initialised float32 parameters."""
  leaves, tree = jax.tree.flatten_with_path(
    parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
  )
  keys = jax.random.split(random_key(key), len(leaves))
  arrays = [
    _initial(config, key, path[-1].key, shape)
    for key, (path, shape) in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(tree, arrays)
