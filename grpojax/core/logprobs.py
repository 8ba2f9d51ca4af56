"""Log-probabilities of completions, without a [B, G, T, V] array."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpojax.core.arguments import check_prompts
from grpojax.core.mesh import constrain
from grpojax.core.sampling import Sampling, token_logprob, transform_logits
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
  where = dict(positions=positions, segments=segments)
  if lm.forward is not None:
    last, hidden = lm.forward(params, prompt_ids, prompt_mask, ids, **where)
  else:
    prefix = lm.prefill(params, prompt_ids, prompt_mask)
    last = prefix.last_hidden
    hidden, _ = lm.extend(params, prefix, ids, **where)
  first = jnp.broadcast_to(last[:, None, None], hidden[:, :, :1].shape)
  before = jnp.concatenate([first, hidden[:, :, :-1]], axis=2)
  if positions is None:
    return before
  return jnp.where((positions == 0)[..., None], first, before)


def token_logprobs(
  lm: LM,
  params: Params,
  prompt_ids: Int[Array, "B P"],
  prompt_mask: Bool[Array, "B P"],
  ids: Int[Array, "B G S"],
  *,
  sampling: Sampling = Sampling(),
  chunk_size: int = 32,
  positions: Int[Array, "B G S"] | None = None,
  segments: Int[Array, "B G S"] | None = None,
) -> tuple[Float[Array, "B G S"], Float[Array, "B G S"]]:
  """Log-probability (nats) of each completion token, and the entropy there.

  Logits exist for `chunk_size` positions at a time, and are recomputed in the
  backward pass.

  Args:
    lm: the model.
    params: its parameters.
    prompt_ids: right-padded prompts.
    prompt_mask: True on real prompt tokens.
    ids: completion tokens; what stands on padding is scored too, mask it.
    sampling: the distribution to score under, the sampler's own.
    chunk_size: positions whose logits are held at once.
    positions: see `LM.extend`.
    segments: see `LM.extend`.

  Returns:
    `(logprobs, entropy)`, float32; no gradient flows through the entropy.

  Raises:
    ValueError: chunk_size below 1, or wrong prompts (see
      `arguments.check_prompts`).
  """
  check_prompts(lm, params, prompt_ids, prompt_mask)
  lm, params = lm.prepared(params, decoding=False)
  hidden = completion_hidden(
    lm, params, prompt_ids, prompt_mask, ids, positions, segments
  )
  if chunk_size < 1:
    raise ValueError(f"chunk_size={chunk_size} must be at least 1")
  s = ids.shape[-1]
  chunk = min(chunk_size, s)
  padding = -s % chunk

  def split(x):  # [B, G, S, ...] -> [S / chunk, B, G, chunk, ...]
    x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3))
    x = x.reshape(*x.shape[:2], -1, chunk, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)

  def join(x):
    return jnp.moveaxis(x, 0, 2).reshape(*ids.shape[:2], -1)[:, :, :s]

  @jax.checkpoint
  def score(params, hidden, ids):
    logits = lm.unembed(params, hidden)
    logits = constrain(logits, "batch", "group", None, "vocabulary")
    logits = transform_logits(logits, sampling, keep=ids)
    still = jax.lax.stop_gradient(logits)
    log_p = jax.nn.log_softmax(still)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return token_logprob(logits, ids), entropy

  _, (logprobs, entropy) = jax.lax.scan(
    lambda _, x: (None, score(params, *x)), None, (split(hidden), split(ids))
  )
  return join(logprobs), join(entropy)
