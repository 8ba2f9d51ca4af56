"""Requests for completions of token ids, and the servers' answers.

An answer comes from another program, so every field is checked.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from grpojax.core.decoding.sampling import Sampling

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
LARGEST = 1e30  # nats, finite in float32


class Invalid(ValueError):
  """Raised for an unusable answer."""


class Stale(Exception):
  """Raised for completions of other weights than the requested ones."""


class Vocabulary(NamedTuple):
  """Ids of the policy's tokens."""

  known: Bool[np.ndarray, "V"]  # False for ids without a token
  ends: tuple[int, ...]  # EOS ids


class Request(NamedTuple):
  """A prompt, and the distribution and number of its completions."""

  ids: list[int]
  count: int
  max_tokens: int
  seed: int
  sampling: Sampling


class Completion(NamedTuple):
  """Token ids, with the EOS if any, and their log-probabilities in nats."""

  ids: list[int]
  logprobs: list[float]


def body(
  request: Request, vocabulary: Vocabulary, path: str, model: str
) -> dict[str, Any]:
  """Returns the JSON value of a request to `GENERATE` or `COMPLETIONS`.

  It names every parameter, because a server's defaults depend on its model.
  """
  cut = request.sampling
  parameters = {
    "n": request.count,
    "max_tokens": request.max_tokens,
    "seed": request.seed,
    "temperature": cut.temperature,
    "top_k": cut.top_k,
    "top_p": cut.top_p,
    "min_p": cut.min_p,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    # The model's own EOS ids may differ from the policy's.
    "ignore_eos": True,
    "stop_token_ids": list(vocabulary.ends),
    "logprobs": 0,  # the sampled token's
  }
  if not vocabulary.known.all():
    # The policy gives ids without a token the probability 0.
    never = np.flatnonzero(~vocabulary.known).tolist()
    parameters["logit_bias"] = {str(i): -100.0 for i in never}
  if path == GENERATE:
    parameters["detokenize"] = False
    return {
      "model": model,
      "token_ids": request.ids,
      "sampling_params": parameters,
    }
  parameters |= {"prompt": request.ids, "return_token_ids": True}
  return {"model": model, **parameters}


def parse(text: bytes) -> Any:
  """Parses JSON; raises Invalid."""
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise Invalid(f"not JSON: {error}") from None


def field(value: Any, name: str, kind: Any) -> Any:
  """Returns `value[name]`; raises Invalid if it is missing or no `kind`."""
  if not isinstance(value, dict) or not isinstance(value.get(name), kind):
    kind = getattr(kind, "__name__", kind)
    raise Invalid(f"{name!r} is no {kind}: {str(value)[:200]}")
  return value[name]


def read(
  answer: Any,
  request: Request,
  vocabulary: Vocabulary,
  path: str,
  model: str,
  version: str,
) -> list[Completion]:
  """Returns the completions in an answer of `GENERATE` or `COMPLETIONS`.

  Raises Invalid for an answer of another form, and Stale for completions of
  another `model` or, with `GENERATE`, `version` of the base model's weights.
  """
  if isinstance(answer, dict) and (answer.get("model") or model) != model:
    raise Stale(f"a server sampled by {answer['model']!r}, not {model!r}")
  choices = field(answer, "choices", list)
  order = sorted(field(choice, "index", int) for choice in choices)
  if order != list(range(request.count)):
    raise Invalid(f"choices are numbered {order}, not 0 to {request.count - 1}")
  choices.sort(key=lambda choice: choice["index"])
  completions = []
  for choice in choices:
    if path == GENERATE:
      spans = field(choice, "weight_versions", list)
      versions = {field(span, "version", str) for span in spans}
      if versions != {version}:
        raise Stale(f"completions of weights {versions}, not {version!r}")
    ids = field(choice, "token_ids", list)
    logprobs = field(choice, "logprobs", dict)
    if path == GENERATE:
      tokens = field(logprobs, "content", list)
      values = [field(token, "logprob", int | float) for token in tokens]
    else:
      values = field(logprobs, "token_logprobs", list)
    completions.append(checked(ids, values, request, vocabulary))
  return completions


def checked(
  ids: Sequence[Any],
  logprobs: Sequence[Any],
  request: Request,
  vocabulary: Vocabulary,
) -> Completion:
  """Returns a completion; raises Invalid if the request cannot have it."""
  known = vocabulary.known
  for i in ids:
    if type(i) is not int or not 0 <= i < len(known) or not known[i]:
      raise Invalid(f"{i!r} is no id of a token of the policy")
  ends = [n for n, i in enumerate(ids, 1) if i in vocabulary.ends]
  length = min([*ends, request.max_tokens])
  if len(ids) != length:
    raise Invalid(
      f"a completion has {len(ids)} tokens, not {length}: it must end with its "
      f"first EOS, or have {request.max_tokens} tokens (is the server's "
      "--max-model-len too small?)"
    )
  for x in logprobs:
    # A sum of rounded probabilities may exceed 1; nan fails both comparisons.
    if type(x) not in (int, float) or not -LARGEST < x < 1e-3:
      raise Invalid(f"{x!r} is no log-probability")
  if len(logprobs) != len(ids):
    raise Invalid(f"{len(ids)} tokens have {len(logprobs)} log-probabilities")
  return Completion(list(ids), [min(float(x), 0.0) for x in logprobs])
