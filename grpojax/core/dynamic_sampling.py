"""Dynamic sampling: groups of equal rewards are replaced by fresh prompts.

DAPO (arXiv 2503.14476, equation 11) draws prompts until a batch has B groups
that vary. Let p(x) be the probability that the group of prompt x varies, p its
mean over prompts, U the estimate of the gradient from a group, and g(x) = E[U |
x]. Prompt x is p(x) / p times as frequent in the batch as in the data. Where U
is 0 in a group of equal rewards (`advantages.ZERO_IN_EQUAL_GROUPS`) E[U | x,
varies] = g(x) / p(x), and the two cancel: the mean of the groups that are kept
estimates E[g(x)] / p, and times `acceptance`, E[g(x)] without bias, whatever
the limit. Weights of 1 / p(x) on the prompts would be wrong.

What is not 0 in a group of equal rewards does change: a KL term is averaged
over the groups that vary, as are an entropy bonus and the loss of a mixture's
routers; vanilla and pooled advantages have another objective. All of it holds
for prompts drawn independently, on-policy, for the weightings `sequence_mean`,
`sequence_sum` and `fixed_length`; `token_mean` counts the groups' tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpojax.core import mesh as mesh_lib
from grpojax.core.types import Rollout


def varies(rewards: Float[np.ndarray, "*B G"]) -> Bool[np.ndarray, "*B"]:
  """True for groups that have two finite rewards that differ."""
  present = np.isfinite(rewards)
  best = np.max(rewards, axis=-1, where=present, initial=-np.inf)
  worst = np.min(rewards, axis=-1, where=present, initial=np.inf)
  return best > worst


def acceptance(varied: Bool[np.ndarray, "M"], size: int) -> float:
  """Estimates the probability that a group varies, without bias.

  Prompts were drawn until `size` groups varied, or up to a limit. Filled by the
  group of number m, the estimate is (size - 1) / (m - 1) (Haldane, 1945); not
  filled, the share of the groups that vary (Girshick, Mosteller and Savage,
  1946). The groups that are kept are independent of it.

  Args:
    varied: True for groups that vary, of all in the order of their prompts,
      those too that were drawn beyond the last one needed.
    size: B, number of groups that the batch needs.
  """
  places = np.flatnonzero(varied)
  if len(places) < size:
    return len(places) / len(varied)
  drawn = int(places[size - 1]) + 1
  if size == 1:
    return float(drawn == 1)
  return (size - 1) / (drawn - 1)


def replace_groups(
  batch: Rollout, drawn: Rollout, source: Int[Array, "B"]
) -> Rollout:
  """Replaces some groups of a batch. Jittable.

  For example, source = [-1, 1, 0] keeps the first group of a batch of 3, and
  takes its second one from drawn[1] and its third one from drawn[0].

  Args:
    batch: B groups.
    drawn: any number of groups; prompts may be padded to another length.
    source: for each group of the batch, the number of the one of `drawn` that
      takes its place; -1 for none.
  """
  longest = max(x.prompt_ids.shape[-1] for x in (batch, drawn))

  def padded(samples: Rollout) -> Rollout:
    more = ((0, 0), (0, longest - samples.prompt_ids.shape[-1]))
    return samples.replace(
      prompt_ids=jnp.pad(samples.prompt_ids, more),
      prompt_mask=jnp.pad(samples.prompt_mask, more),
    )

  def chosen(old: Array, new: Array) -> Array:
    axes = tuple(range(1, old.ndim))
    replaced = jnp.expand_dims(source >= 0, axes)
    return jnp.where(replaced, new[jnp.maximum(source, 0)], old)

  whole = jax.tree.map(chosen, padded(batch), padded(drawn))
  return mesh_lib.map_rows(mesh_lib.constrain, whole)
