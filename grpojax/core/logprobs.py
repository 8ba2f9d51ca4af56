"""Log-probabilities of completions, without a [B, G, T, V] array."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from grpojax.core import flat_tokens, repetition
from grpojax.core.arguments import check_prompts
from grpojax.core.flat_tokens import FlatTokens
from grpojax.core.mesh import constrain, sample_cuts
from grpojax.core.sampling import Sampling, transform_logits
from grpojax.core.types import LM, Params


def completion_hidden(
  lm: LM,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G S"],
  positions: Int[Array, "B G S"] | None = None,
  segments: Int[Array, "B G S"] | None = None,
) -> Float[Array, "B G S D"]:
  """Hidden states that predict each completion token.

  A token is predicted by the state of the token before it, the first one of a
  completion (position 0) by the state of the last prompt token. The prompt is
  computed once for its whole group.
  """
  args = prompt_ids, prompt_mask, ids, positions, segments
  return _hidden_and_load(lm, params, *args)[0]


def _hidden_and_load(
  lm,
  params,
  prompt_ids,
  prompt_mask,
  ids,
  positions,
  segments,
  flat=None,
  weights=None,
):
  """`completion_hidden`, and with weights what the routers did, else None.

  With `flat` of the flat tokens of completions, [C, 1, N, D].
  """
  where, load = dict(positions=positions, segments=segments), None
  given = prompt_ids, prompt_mask, ids
  if flat is not None:
    where["flat"] = flat
  if weights is not None:
    forward = functools.partial(lm.forward_with_load, load_weights=weights)
    last, hidden, load = forward(params, *given, **where)
  elif lm.forward is not None:
    last, hidden = lm.forward(params, *given, **where)
  else:
    prefix = lm.prefill(params, prompt_ids, prompt_mask)
    last = prefix.last_hidden
    hidden, _ = lm.extend(params, prefix, ids, **where)
  first = last[:, None, None]
  if flat is not None:
    first = flat.of_tokens(last)
    positions = flat_tokens.flatten(positions, flat.rows)
  start = jnp.broadcast_to(first[:, :, :1], hidden[:, :, :1].shape)
  before = jnp.concatenate([start, hidden[:, :, :-1]], axis=2)
  if positions is None:
    return before, load
  return jnp.where((positions == 0)[..., None], first, before), load


def _chunks(
  x: Float[Array, "B G S *more"] | Int[Array, "B G S"], positions: int
) -> Array:
  """[B, G, S, ...] -> [S / positions, B, G, positions, ...], padded with 0."""
  widths = [(0, 0)] * x.ndim
  widths[2] = (0, -x.shape[2] % positions)
  x = jnp.pad(x, widths)
  x = x.reshape(*x.shape[:2], -1, positions, *x.shape[3:])
  return jnp.moveaxis(x, 2, 0)


def _positions_at_once(shape: tuple[int, int, int], size: int) -> int:
  """How many positions of [B, G, S] tokens make a chunk.

  All rows take part in each chunk, because the mesh cuts them: so none leaves
  its device. The chunks are of about the same size.
  """
  b, g, s = shape
  rows = b * g // math.prod(sample_cuts(b, g))  # of a device
  count = -(-s // max(1, size // rows))
  return -(-s // count)


def _in_float32(x):
  """An array of 16-bit floats as float32, any other leaf as it is."""
  small = getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16)
  return x.astype(jnp.float32) if small else x


def _as(x, like):
  """What `_in_float32` made of `like`, in its dtype again."""
  return x if _in_float32(like) is like else x.astype(like.dtype)


@jax.custom_jvp
def _score(
  logits: Float[Array, "*n V"], ids: Int[Array, "*n"]
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
  """Log-probability of `ids` under softmax(logits), and its entropy.

  Its derivative is written as one product with (one-hot - softmax), linear in
  the logits' tangent. Transposed, it is the upstream gradient times that, in
  one pass.
  """
  return _score_with_lse(logits, ids)[0]


def _score_with_lse(logits, ids):
  top = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - top)
  total = jnp.sum(weights, axis=-1)
  lse = top[..., 0] + jnp.log(total)
  lse = checkpoint_name(lse, "log_sum_exp")
  chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
  # What was cut away has weight 0 and a finite logit. A product: what
  # XLA makes for CPUs of the sum of what is multiplied is four times slower.
  mean = jnp.einsum("...v,...v->...", weights, logits, precision="highest")
  entropy = lse - mean / total
  return (chosen - lse, entropy), lse


@_score.defjvp
def _score_jvp(primals, tangents):
  logits, ids = primals
  (logprobs, entropy), lse = _score_with_lse(logits, ids)
  chosen = jnp.arange(logits.shape[-1]) == ids[..., None]
  slope = chosen - jnp.exp(logits - lse[..., None])
  tangent = jnp.sum(slope * tangents[0], axis=-1)
  return (logprobs, entropy), (tangent, jnp.zeros_like(entropy))


@jax.custom_jvp
def _score_with_slope(logits, ids):
  """`_score`, whose entropy too can be differentiated.

  Its slope by a logit is -p (log p + entropy), which backward is one more
  product in the same pass over the vocabulary.
  """
  return _score_with_lse(logits, ids)[0]


@_score_with_slope.defjvp
def _score_with_slope_jvp(primals, tangents):
  logits, ids = primals
  (logprobs, entropy), lse = _score_with_lse(logits, ids)
  entropy = checkpoint_name(entropy, "entropy")
  chosen = jnp.arange(logits.shape[-1]) == ids[..., None]
  log_p = logits - lse[..., None]
  p = jnp.exp(log_p)
  slopes = chosen - p, -p * (log_p + entropy[..., None])
  moved = tuple(jnp.sum(slope * tangents[0], axis=-1) for slope in slopes)
  return (logprobs, entropy), moved


def token_logprobs(
  lm: LM,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "n G S"],
  *,
  sampling: Sampling = Sampling(),
  chunk_size: int = 256,
  positions: Int[Array, "n G S"] | None = None,
  segments: Int[Array, "n G S"] | None = None,
  entropy_gradient: bool = False,
  samples: Int[Array, "B samples T"] | None = None,
  flat: FlatTokens | None = None,
  load_weights: tuple[Array, Array] | None = None,
) -> tuple[Any, ...]:
  """Log-probability (nats) of each completion token, and the entropy there.

  Logits, and their gradients, exist for `chunk_size` tokens at a time: they are
  computed again in the backward pass, whose memory is a few times chunk_size x
  V float32 however long the completions are.

  Args:
    lm: the model.
    params: its parameters.
    prompt_ids: right-padded prompts.
    prompt_mask: True on real prompt tokens.
    ids: completion tokens; what stands on padding is scored too, mask it. n is
      B but with `flat`.
    sampling: the distribution to score under, the sampler's own.
    chunk_size: tokens whose logits are held at once, on each of the devices
      that rows are cut over; at least one of each row.
    positions: see `LM.extend`.
    segments: see `LM.extend`.
    entropy_gradient: whether a gradient flows through the entropy too.
    samples: the completions that `segments` counts, where the rows of `ids` are
      packed of them; a repetition penalty reads them.
    flat: where the real tokens of `ids` and of the prompts are, see
      `LM.forward`, which the model must have. `segments` count the samples of
      all prompts on a device.
    load_weights: see `LM.forward_with_load`, which the model must have.

  Returns:
    `(logprobs, entropy)`, float32 and [B, G, S], or [C, 1, N] of flat tokens;
    with `load_weights` also a `load_balancing.ExpertLoad`.

  Raises:
    ValueError: chunk_size below 1, a repetition penalty of packed rows without
      `samples`, or wrong prompts (see `arguments.check_prompts`).
  """
  check_prompts(lm, params, prompt_ids, prompt_mask)
  if chunk_size < 1:
    raise ValueError(f"chunk_size={chunk_size} must be at least 1")
  penalised, first = sampling.repetition_penalty != 1, None
  if penalised and segments is not None and samples is None:
    raise ValueError("a repetition penalty of packed rows needs `samples`")
  lm, params = lm.prepared(params, longest=None)
  where = positions, segments, flat, load_weights
  hidden, load = _hidden_and_load(
    lm, params, prompt_ids, prompt_mask, ids, *where
  )
  if flat is not None:
    ids, positions, segments = (
      flat_tokens.flatten(x, flat.rows) for x in (ids, positions, segments)
    )

  of_logits = _score_with_slope if entropy_gradient else _score
  kept = ("log_sum_exp", *["entropy"] * entropy_gradient)
  if penalised:
    first = repetition.first_places(
      prompt_ids,
      prompt_mask,
      ids if samples is None else samples,
      jax.eval_shape(lm.unembed, params, hidden).shape[-1],
    )
    if flat is not None:
      first = first.reshape(len(ids), -1, first.shape[-1])
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(ids.shape[-1]), ids.shape)

  # Of its logits, only sums over the vocabulary are kept for the backward pass.
  @functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(*kept),
    prevent_cse=False,  # under a scan nothing can be merged with it
  )
  def score(wide, chunk):
    hidden, ids, *where = chunk
    logits = lm.unembed(jax.tree.map(_as, wide, params), hidden)
    logits = constrain(logits, "batch", "group", None, "vocabulary")
    seen = repetition.seen_before(first, *where) if penalised else None
    logits = transform_logits(logits, sampling, keep=ids, seen=seen)
    return of_logits(logits, ids)

  # The gradients of what is used here are added up over the chunks.
  wide = jax.tree.map(_in_float32, params)
  at_once = _positions_at_once(ids.shape, chunk_size)
  parts = (hidden, ids, positions, segments) if penalised else (hidden, ids)
  chunks = jax.tree.map(lambda x: _chunks(x, at_once), parts)
  _, out = jax.lax.scan(
    lambda _, chunk: (None, score(wide, chunk)), None, chunks
  )
  logprobs, entropy = (
    jnp.moveaxis(x, 0, 2).reshape(*ids.shape[:2], -1)[..., : ids.shape[2]]
    for x in out
  )
  return (logprobs, entropy, load)[: 2 + (load is not None)]
