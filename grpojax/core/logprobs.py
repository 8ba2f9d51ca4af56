"""Log-probabilities of completions, computed without a [B, G, T, V] array."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.arguments import check_read_prompts
from grpojax.core.decoding.sampling import Sampling, transform_logits
from grpojax.core.meshes import constrain, sample_cuts
from grpojax.core.packing import flat_tokens
from grpojax.core.types import LM, ForwardOutput, Params, Tokens

CHUNK = 256  # default, as a pure function does not know the device's memory


class TokenLogprobs(NamedTuple):
  """Results of `logprobs_and_load`, in nats."""

  logprobs: Float[Array, "_ _ S"]
  entropy: Float[Array, "_ _ S"]  # of the distribution of each token
  load: Any = None  # a `load_balancing.ExpertLoad`
  kl: Float[Array, "_ _ S"] | None = None  # KL(policy || reference)
  hidden: Float[Array, "_ _ S D"] | None = None  # predicts the token


class Reference(NamedTuple):
  """Reference policy of the exact KL divergence."""

  lm: LM  # prepared for a forward pass (`LM.prepared`)
  params: Params  # prepared with it
  hidden: Float[Array, "B G S D"]  # like `TokenLogprobs.hidden`


def completion_hidden(
  lm: LM, params: Params, tokens: Tokens
) -> tuple[Float[Array, "*tokens D"], Any]:
  """Returns the states that predict completion tokens, and the experts' load.

  A token is predicted by the state of the token before it; the first token of a
  completion (position 0) by the state of the last prompt token. States are [B,
  G, S, D] or, if flat, [C, 1, N, D]; the load is None without load weights.
  """
  positions = tokens.positions
  flat = tokens.flat
  load = None
  if lm.forward is not None:
    last, hidden, load = ForwardOutput(*lm.forward(params, tokens))
  else:
    prefix = lm.prefill(params, tokens.prompt_ids, tokens.prompt_mask)
    last = prefix.last_hidden
    options = dict(positions=positions, segments=tokens.segments)
    hidden = lm.extend(params, prefix, tokens.ids, **options)[0]
  # Shift the states by one token; a completion begins with its prompt's state.
  first = last[:, None, None]
  if flat is not None:
    # Flat tokens are of many prompts, so each has its own first state.
    first = flat.of_tokens(last)
    positions = flat_tokens.flatten(positions, flat.rows)
  start = jnp.broadcast_to(first[:, :, :1], hidden[:, :, :1].shape)
  before = jnp.concatenate([start, hidden[:, :, :-1]], axis=2)
  if positions is not None:  # a packed row has several completions
    before = jnp.where((positions == 0)[..., None], first, before)
  return before, load


def _is_16_bit(x):
  return getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16)


@jax.custom_jvp
def _with_gradient_of(wide: Array, narrow: Array) -> Array:
  """Returns `narrow`; its gradient goes to `wide`, a copy in float32.

  A cast of `wide` would be repeated for every chunk.
  """
  return narrow


_with_gradient_of.defjvps(lambda t, narrow, *_: t.astype(narrow.dtype), None)


def _logprob_entropy_lse(logits, ids):
  """Returns log-probabilities, entropies and log-sum-exps of the logits."""
  top = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - top)
  total = jnp.sum(weights, axis=-1)
  lse = top[..., 0] + jnp.log(total)
  lse = checkpoint_name(lse, "log_sum_exp")
  chosen = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
  # Tokens cut by top_k, top_p or min_p have weight 0 and a finite logit. On
  # CPUs XLA compiles a sum here to a much slower program than this product.
  mean = jnp.einsum("...v,...v->...", weights, logits, precision="highest")
  # Entropy -sum p log p with log p = logit - lse.
  return chosen - lse, lse - mean / total, lse


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _logprob_and_entropy(
  logits: Float[Array, "*n V"], ids: Int[Array, "*n"], entropy_gradient: bool
) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
  """Returns log-probabilities of `ids` under softmax(logits), and entropies.

  Derivatives with respect to a logit z_v: [v = id] - p_v and, of the entropy,
  -p_v (log p_v + entropy) if `entropy_gradient`.
  """
  return _logprob_entropy_lse(logits, ids)[:2]


@_logprob_and_entropy.defjvp
def _logprob_and_entropy_jvp(entropy_gradient, primals, tangents):
  logits, ids = primals
  logprobs, entropy, lse = _logprob_entropy_lse(logits, ids)
  if entropy_gradient:
    # Without this name the derivative would recompute it from the logits.
    entropy = checkpoint_name(entropy, "entropy")
  chosen = jax.nn.one_hot(ids, logits.shape[-1], dtype=bool)
  log_p = logits - lse[..., None]
  p = jnp.exp(log_p)
  tangent = lambda slope: jnp.sum(slope * tangents[0], axis=-1)
  entropy_tangent = jnp.zeros_like(entropy)
  if entropy_gradient:
    entropy_tangent = tangent(-p * (log_p + entropy[..., None]))
  return (logprobs, entropy), (tangent(chosen - p), entropy_tangent)


@jax.custom_jvp
def _kl_divergence(
  logits: Float[Array, "*n V"], ref_logits: Float[Array, "*n R"]
) -> Float[Array, "*n"]:
  """Returns KL(softmax(logits) || softmax(ref_logits)) for R >= V.

  The reference may have more ids (R > V). The derivative with respect to a
  logit z_v is p_v (log(p_v / q_v) - KL); the reference is constant.
  """
  return _kl_and_terms(logits, ref_logits)[0]


def _kl_and_terms(logits, ref_logits):
  """Returns the KL divergence, p and log(p / q)."""
  lse, ref_lse = (
    checkpoint_name(jax.nn.logsumexp(x, axis=-1, keepdims=True), "log_sum_exp")
    for x in (logits, ref_logits)
  )
  log_p = logits - lse
  # The reference's additional ids only count in its normalizer.
  log_ratio = log_p - (ref_logits - ref_lse)[..., : logits.shape[-1]]
  p = jnp.exp(log_p)
  kl = jnp.einsum("...v,...v->...", p, log_ratio, precision="highest")
  return kl, p, log_ratio


@_kl_divergence.defjvp
def _kl_divergence_jvp(primals, tangents):
  kl, p, log_ratio = _kl_and_terms(*primals)
  slope = p * (log_ratio - kl[..., None])
  return kl, jnp.sum(slope * tangents[0], axis=-1)


def _reference_logits(
  reference: Reference, vocab: int, sampling: Sampling
) -> Float[Array, "B G S R"]:
  """Returns a reference's logits; ValueError if they lack ids of the policy."""
  logits = reference.lm.unembed(reference.params, reference.hidden)
  logits = constrain(logits, "batch", "group", None, "vocabulary")
  if logits.shape[-1] < vocab:
    raise ValueError(
      f"the reference has {logits.shape[-1]} token ids and the policy {vocab}: "
      "an exact KL divergence needs a reference with all of the policy's ids"
    )
  return transform_logits(logits, sampling.uncut)


def _in_chunks(
  lm: LM,
  params: Params,
  hidden: Float[Array, "B G S D"],
  ids: Int[Array, "B G S"],
  reference: Reference | None,
  sampling: Sampling,
  chunk_size: int,
  entropy_gradient: bool,
) -> tuple[Float[Array, "B G S"], ...]:
  """Returns log-probabilities, entropies and KLs, computed chunk by chunk."""
  # A chunk has some tokens of every row, so that rows stay on their devices.
  b, g, s = ids.shape
  rows = b * g // math.prod(sample_cuts(b, g))  # per device
  # Chunks of equal size: as few as chunk_size allows, with little padding.
  count = -(-s // max(1, chunk_size // rows))
  size = -(-s // count)

  # The backward pass keeps sums over V, and the logits if there is one chunk.
  saved = ["log_sum_exp"]
  saved += ["entropy"] if entropy_gradient else []
  saved += ["logits"] if count == 1 else []

  @functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(*saved),
    prevent_cse=False,  # not needed under a scan
  )
  def chunk_values(wide, hidden, ids, ref_hidden):
    narrow = lambda x, y: _with_gradient_of(x, y) if _is_16_bit(y) else x
    logits = lm.unembed(jax.tree.map(narrow, wide, fixed), hidden)
    logits = checkpoint_name(logits, "logits")
    logits = constrain(logits, "batch", "group", None, "vocabulary")
    logits = transform_logits(logits, sampling, keep=ids)
    values = _logprob_and_entropy(logits, ids, entropy_gradient)
    if reference is None:
      return values
    # The reference's logits, too, exist for one chunk only.
    chunk = reference._replace(hidden=ref_hidden)
    return *values, _kl_divergence(
      logits, _reference_logits(chunk, logits.shape[-1], sampling)
    )

  # Gradients of 16-bit parameters add up over the chunks in float32.
  wide = jax.tree.map(
    lambda x: x.astype(jnp.float32) if _is_16_bit(x) else x, params
  )
  fixed = jax.lax.stop_gradient(params)
  ref_hidden = None if reference is None else reference.hidden

  def to_chunks(x):  # [B, G, S, ...] -> [S / size, B, G, size, ...]
    padding = [(0, -s % size if axis == 2 else 0) for axis in range(x.ndim)]
    x = jnp.pad(x, padding).reshape(b, g, -1, size, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)

  # One chunk at a time; the results are [chunks, B, G, size].
  _, chunks = jax.lax.scan(
    lambda _, chunk: (None, chunk_values(wide, *chunk)),
    None,
    jax.tree.map(to_chunks, (hidden, ids, ref_hidden)),
  )
  return tuple(jnp.moveaxis(x, 0, 2).reshape(b, g, -1)[..., :s] for x in chunks)


def token_logprobs(
  lm: LM,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G S"],
  **options: Any,
) -> tuple[Float[Array, "B G S"], Float[Array, "B G S"]]:
  """Returns log-probabilities and entropies (nats) of completion tokens.

  Both are float32, and computed on padding too: mask them. Options are those of
  `logprobs_and_load`, such as `sampling` and `chunk_size`.
  """
  tokens = Tokens(prompt_ids, prompt_mask, ids)
  scored = logprobs_and_load(lm, params, tokens, **options)
  return scored.logprobs, scored.entropy


def logprobs_and_load(
  lm: LM,
  params: Params,
  tokens: Tokens,
  *,
  sampling: Sampling = Sampling(),
  chunk_size: int = 0,
  entropy_gradient: bool = False,
  reference: Reference | None = None,
) -> TokenLogprobs:
  """Computes log-probabilities, entropies and the load of experts, if any.

  Logits and their gradients exist for `chunk_size` tokens per device (at least
  one per row; 0 means `CHUNK`); several chunks are recomputed in the backward
  pass. So they take a few float32 arrays [chunk_size, V]. `sampling` is the
  distribution of the tokens; the reference has its temperature, but no top_k,
  top_p and min_p.

  Returns float32 arrays [B, G, S] or, of flat tokens, [C, 1, N]. ValueError for
  a negative chunk_size or wrong prompts (`arguments.check_read_prompts`).
  """
  check_read_prompts(lm, params, tokens.prompt_ids, tokens.prompt_mask)
  if chunk_size < 0:
    raise ValueError(f"chunk_size={chunk_size} must be at least 0")
  lm, params = lm.prepared(params, longest=None)
  # Transformer: the states that predict each token, [B, G, S, D] or flat.
  hidden, load = completion_hidden(lm, params, tokens)
  ids = tokens.ids
  if tokens.flat is not None:
    rows = tokens.flat.rows
    ids = flat_tokens.flatten(ids, rows)
    if reference is not None:
      ref_hidden = flat_tokens.flatten(reference.hidden, rows)
      reference = reference._replace(hidden=ref_hidden)
  # Head: `kl` is empty without a reference.
  logprobs, entropy, *kl = _in_chunks(
    lm,
    params,
    hidden,
    ids,
    reference,
    sampling,
    chunk_size or CHUNK,
    entropy_gradient,
  )
  return TokenLogprobs(logprobs, entropy, load, *kl or [None], hidden=hidden)
