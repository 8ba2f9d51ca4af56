"""Shapes and containers shared by all modules.

| letter | meaning                                    |
|--------|--------------------------------------------|
| B      | prompts in a batch                         |
| G      | group size: completions sampled per prompt |
| N      | samples in a batch, N = B * G              |
| P      | prompt length in tokens, right-padded      |
| T      | completion length in tokens                |
| V      | vocabulary size                            |
| D      | model width                                |
| L      | decoder layers                             |
| H      | attention heads                            |
| K      | key/value heads                            |
| R      | query heads per key/value head, R = H / K  |
| E      | width of a head                            |
| F      | width of the MLP                           |

The group is always an axis: prompts are [B, P], completions [B, G, T], rewards
and advantages [B, G]. Containers may hold tracers, shapes or shardings, so
their fields are not type-checked at run time.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer, Key, PyTree

from grpojax.core.prompt_checks import check_fields

Params = PyTree
Cache = PyTree


@typing.no_type_check
@struct.dataclass
class Prefix:
  """Result of `LM.prefill`: states of prompts, each shared by its group."""

  last_hidden: Float[Array, "B D"]  # predicts the first completion token
  length: Int[Array, "B"]  # number of real tokens of each prompt
  state: Any  # other inputs of `LM.extend`, such as keys and values
  experts: Integer[Array, "B P X"] | None = None  # of the tokens, if recorded


@typing.no_type_check
@struct.dataclass
class Tokens:
  """Prompts and the completion tokens of a forward pass over both.

  Fields that are None are not used. The other fields of completions have the
  shape of `ids`, whose rows are completions or packed (`packing`).

  Attributes:
    ids: tokens of completions, a group of G per prompt.
    positions: places in the completion; None means 0, 1, ...
    segments: numbers of the completions that share a row.
    load_weights: weight of each token in the experts' load, which is computed
      only if weights are present.
    experts: experts to use in place of the routers' choice, X numbers per
      token, layer by layer; a number out of range makes the token NaN.
    prompt_load_weights: weights of the prompts' tokens.
    prompt_experts: experts of the prompts' tokens.
    flat: a `flat_tokens.FlatTokens` of prompts [B, P] and rows [n, 1, S], one
      prompt per row (then B is n in all fields of completions).
  """

  prompt_ids: Int[Array, "B P"]
  prompt_mask: Bool[Array, "B P"]
  ids: Int[Array, "B G S"]
  positions: Int[Array, "B G S"] | None = None
  segments: Int[Array, "B G S"] | None = None
  load_weights: Float[Array, "B G S"] | None = None
  experts: Integer[Array, "B G S X"] | None = None
  prompt_load_weights: Float[Array, "B P"] | None = None
  prompt_experts: Integer[Array, "B P X"] | None = None
  flat: Any = None


class ExtendOutput(NamedTuple):
  """Result of `LM.extend`."""

  hidden: Float[Array, "B G S D"]
  cache: Cache
  experts: Integer[Array, "B G S X"] | None = None  # if recorded


class ForwardOutput(NamedTuple):
  """Result of `LM.forward`."""

  last_hidden: Float[Array, "B D"]  # of the prompts
  hidden: Float[Array, "*tokens D"]  # of the completions
  load: Any = None  # a `load_balancing.ExpertLoad`


class LM(NamedTuple):
  """A causal language model as pure functions, of which five are required.

  `extend` and `forward` may return plain pairs, their outputs' first fields.

  Attributes:
    init: `(key) -> params`.
    prefill: `(params, right-padded prompt_ids [B, P], prompt_mask) -> Prefix`.
    extend: `(params, prefix, ids [B, G, S], cache=None, positions=None,
      segments=None) -> ExtendOutput`. Each token attends to its prompt and
      causally to its own completion. Without a cache `ids` are whole
      completions (training), with a cache the next S tokens (decoding).
      `positions [B, G, S]` count from the first completion token and default to
      0, 1, ... without a cache. In decoding they also are the tokens' places in
      the cache, which holds the row's earlier tokens; tokens at -1, the last
      ones of a row or all of it, are not decoded: the cache must not change,
      and their states are not used.
      `segments [B, G, S]` separate completions that share a row.
    unembed: `(params, hidden [..., D]) -> logits [..., V]`.
    init_cache: `(B, G, T) -> cache` for T completion tokens per sample.
    grow_cache: `(cache, slots) -> cache` with room for more tokens, or None.
    map_rows: `(function, prefix or cache) -> prefix or cache`, maps a function
      of arrays over the rows of a prefix, [B, ...], or a cache, [B, G, ...]; or
      None. With this and `grow_cache` a rollout's work follows the tokens in
      the cache and the unfinished samples (`decoding.compaction`).
    prepare: `(params, longest, **formats) -> (lm, params)`, or None. It does
      once the work that would be repeated for each token (casts, tables of
      positions, gathering of split parameters). It prepares for a rollout of at
      most `longest` tokens per row, prompt included, in `Sampling.formats`; if
      `longest` is None, for a forward pass over whole completions.
    forward: `(params, tokens: Tokens) -> ForwardOutput`, or None: `prefill` and
      `extend` (without a cache) in one. `hidden` is [B, G, S, D] or, with
      `Tokens.flat`, [C, 1, N, D], the rows' real tokens.
    has_experts: True for a mixture of experts. Its `prefill` and `extend` (with
      a cache) return the experts of each token if `record=True` (`recording`),
      and its `forward` reads the load weights and experts of `Tokens`.
    forward_mode: the same model for `jax.jvp`; None if this model supports it.
    draw_parts: `(params, hidden [B, G, D], uniform [B, G, 2], temperature) ->
      sampling.Parts [B, G, n]`, tokens drawn without storing logits, or None.
  """

  init: Callable[..., Params]
  prefill: Callable[..., Prefix]
  extend: Callable[..., ExtendOutput | tuple[Array, Cache]]
  unembed: Callable[..., Array]
  init_cache: Callable[..., Cache]
  grow_cache: Callable[..., Cache] | None = None
  map_rows: Callable[..., Any] | None = None
  prepare: Callable[..., tuple["LM", Params]] | None = None
  forward: Callable[..., ForwardOutput | tuple[Array, Array]] | None = None
  has_experts: bool = False
  forward_mode: "LM | None" = None
  draw_parts: Callable[..., Any] | None = None

  def prepared(
    self, params: Params, *, longest: int | None, **formats: str
  ) -> tuple["LM", Params]:
    """Calls `prepare`, if any; ValueError for formats that need it."""
    if self.prepare is None:
      if formats:
        names = ", ".join(f"{name}={x}" for name, x in formats.items())
        raise ValueError(
          f"this model has no LM.prepare: sample without {names}"
        )
      return self, params
    return self.prepare(params, longest, **formats)

  def recording(self) -> "LM":
    """Returns this model, whose rollouts record the experts of each token.

    ValueError without experts.
    """
    if not self.has_experts:
      raise ValueError(
        "only a model with experts (LM.has_experts) records them"
      )

    def prepare(params, longest, **formats):
      lm, params = self.prepared(params, longest=longest, **formats)
      return lm if longest is None else lm.recording(), params

    return self._replace(
      prefill=functools.partial(self.prefill, record=True),
      extend=functools.partial(self.extend, record=True),
      prepare=prepare,
    )


@typing.no_type_check
@dataclasses.dataclass(frozen=True)
class Prompts:
  """A batch of prompts; arrays outside of jit are checked (`prompt_checks`).

  Attributes:
    prompt_ids: token ids of the model's vocabulary, right-padded with any id.
    prompt_mask: True on real tokens. A row without tokens pads the batch: its
      completions are empty, and `make_batch` ignores it.
    targets: arrays [B, ...] for a jittable reward, or None.
    weights: importance weight of each prompt in the loss; None is 1.
  """

  prompt_ids: Int[Array, "B P"]
  prompt_mask: Bool[Array, "B P"]
  targets: Any = None
  weights: Float[Array, "B"] | None = None

  def __post_init__(self):
    check_fields(*vars(self).values())

  def replace(self, **changes: Any) -> "Prompts":
    """Returns a copy in which these fields are changed."""
    return dataclasses.replace(self, **changes)


def _flatten_prompts(prompts: Prompts) -> tuple[list[tuple[Any, Any]], None]:
  key = jax.tree_util.GetAttrKey
  return [(key(name), value) for name, value in vars(prompts).items()], None


def _unflatten_prompts(_: None, fields: Iterable[Any]) -> Prompts:
  """Makes prompts inside a transformation, without checks."""
  prompts = object.__new__(Prompts)
  names = (field.name for field in dataclasses.fields(Prompts))
  vars(prompts).update(zip(names, fields, strict=True))
  return prompts


jax.tree_util.register_pytree_with_keys(
  Prompts, _flatten_prompts, _unflatten_prompts
)


@typing.no_type_check
@struct.dataclass
class Rollout:
  """Completions sampled from a policy, and their prompts.

  Attributes:
    completion_ids: sampled ids, with the EOS if any, then padding.
    completion_mask: True up to and including the first EOS.
    logprobs: log-probability of each sampled token under its sampling
      distribution (after temperature and truncation); 0 on padding.
    finished: True if it ended with an EOS, False if it was cut off.
    turns: turn in which each token was sampled, from 0; -1 on observations and
      padding. None is a single turn.
    turn_rewards: reward after each of up to K turns, 0 after the end, or None.
    experts: experts of each token (`LM.has_experts`), if recorded.
    prompt_experts: experts of the prompts' tokens.
  """

  prompt_ids: Int[Array, "B P"]
  prompt_mask: Bool[Array, "B P"]
  completion_ids: Int[Array, "B G T"]
  completion_mask: Bool[Array, "B G T"]
  logprobs: Float[Array, "B G T"]
  finished: Bool[Array, "B G"]
  turns: Int[Array, "B G T"] | None = None
  turn_rewards: Float[Array, "B G K"] | None = None
  experts: Integer[Array, "B G T X"] | None = None
  prompt_experts: Integer[Array, "B P X"] | None = None

  @property
  def sampled(self) -> Bool[Array, "B G T"]:
    """True on the tokens sampled by the policy."""
    if self.turns is None:
      return self.completion_mask
    return self.completion_mask & (self.turns >= 0)

  @property
  def tokens(self) -> Tokens:
    """The tokens of a forward pass, with the recorded experts if any."""
    return Tokens(
      self.prompt_ids,
      self.prompt_mask,
      self.completion_ids,
      experts=self.experts,
      prompt_experts=self.prompt_experts,
    )


@typing.no_type_check
@struct.dataclass
class Batch:
  """Data of a policy update; prompts, ids and experts are the rollout's.

  Attributes:
    completion_mask: True on sampled tokens, but False on completions without a
      reward, and on truncated ones left out (`core.losses.truncation`).
    advantages: per completion or per token; they have no gradient.
    old_logprobs: log-probabilities under the policy that sampled, computed by
      the rollout or the trainer; None means exactly on-policy (the ratio is 1).
    ref_logprobs: log-probabilities under the reference policy, or None.
    ref_hidden: the reference's last hidden states, in its compute dtype, for an
      exact KL term; else None.
    rollout_logprobs: `logprobs` of `Rollout`, for the mismatch and corrections.
    packing: a `packing.Packing`; None computes padding too, [B, G, T].
    weights: weights in the loss: of completions (`Prompts.weights`) or, in a
      minibatch, of tokens; None is 1.
    experts: experts to replay; None lets routers choose.
  """

  prompt_ids: Int[Array, "B P"]
  prompt_mask: Bool[Array, "B P"]
  completion_ids: Int[Array, "B G T"]
  completion_mask: Bool[Array, "B G T"]
  advantages: Float[Array, "B G *t"]
  old_logprobs: Float[Array, "B G T"] | None = None
  ref_logprobs: Float[Array, "B G T"] | None = None
  rollout_logprobs: Float[Array, "B G T"] | None = None
  packing: Any = None
  weights: Float[Array, "B G *t"] | None = None
  experts: Integer[Array, "B G T X"] | None = None
  prompt_experts: Integer[Array, "B P X"] | None = None
  ref_hidden: Float[Array, "B G T R"] | None = None

  tokens = Rollout.tokens


@typing.no_type_check
@struct.dataclass
class TrainState:
  """The state of training; a checkpoint is exactly this.

  Attributes:
    params: parameters of the policy.
    opt_state: state of the optax transformation.
    key: the run's random key; step s draws from `fold_in(key, s)`.
    step: number of finished GRPO steps.
    prompts_consumed: number of prompts taken from the data stream so far.
    skipped: number of optimizer updates skipped for a non-finite gradient.
    extras: states of optional parts of a step by name, such as "entropy", an
      `entropy.EntropyControl` if the entropy bonus adapts.
    pending: the next step's completions, if drawn a step ahead.
  """

  params: Params
  opt_state: Any
  key: Key[Array, ""]
  step: Int[Array, ""]
  prompts_consumed: Int[Array, ""]
  skipped: Int[Array, ""]
  extras: dict[str, Any] = struct.field(default_factory=dict)
  pending: Any = None
