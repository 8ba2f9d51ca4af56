"""Models and data sets of the Hugging Face Hub: ORG/NAME or ORG/NAME@REVISION.

Files go to the Hub's own cache (HF_HOME); its library reads the token from
`hf auth login` or HF_TOKEN. A branch may move, so `commit` returns its current
commit; ORG/NAME@COMMIT always has the same files.

Files are fetched by name or pattern from the top directory only: no code, no
pickles, no second copy of the weights.
"""

import os
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpojax.models import huggingface as hf
from grpojax.runtime.processes import interrupts

# Files of a model: its config.json, all except the weights, or all.
CONFIG = ("config.json", hf.ADAPTER)  # ADAPTER only to refuse adapters
TEXTS = (*hf.COMPANIONS, hf.ADAPTER)
WHOLE = (*TEXTS, "model*.safetensors", "model.safetensors.index.json")

_SMALL = {"model": CONFIG, "dataset": ("README.md",)}  # to find a commit
KINDS = tuple(_SMALL)
SAY_EVERY = 10.0  # seconds between two lines about a download
_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
_NAME = rf"({_PART}/{_PART})(?:@([\w./-]+))?"
_LOGIN = "give its token with `hf auth login` or HF_TOKEN"


class Name(NamedTuple):
  """Name and revision of a repository on the Hub."""

  id: str
  revision: str = "main"

  def __str__(self) -> str:
    return f"{self.id}@{self.revision}"


def parse(text: str | os.PathLike) -> Name | None:
  """Parses ORG/NAME or ORG/NAME@REVISION; returns None for other texts."""
  text = os.fspath(text)
  match = re.fullmatch(_NAME, text, re.ASCII)
  if not match or "--" in match[1] or ".." in text:
    return None
  if match[1].lower().endswith(".gguf"):  # a local file
    return None
  return Name(*filter(None, match.groups()))


def is_commit(revision: str) -> bool:
  """Returns True for a full commit hash."""
  return re.fullmatch("[0-9a-f]{40}", revision) is not None


def commit(name: Name, kind: str = "model") -> str:
  """Returns the current commit of a name; offline, the last known commit."""
  if is_commit(name.revision):
    return name.revision
  return fetch(name, _SMALL[kind], kind).name


def fetch(name: Name, files: Sequence, kind: str = "model") -> pathlib.Path:
  """Downloads files of a repository; returns a read-only cached directory.

  `files` are names or patterns in the repository's top directory. The cached
  directory is named after the commit. Processes of a host wait for each other,
  file by file. Ctrl-C and SIGTERM end a download with interrupts.Left, after a
  piece of 10 MB. ValueError with the reason if the files cannot be fetched.
  """
  import huggingface_hub
  from huggingface_hub.utils import logging

  if parse(name.id) is None:  # must not get into URLs and paths
    raise ValueError(f"{name.id!r} is not a name on the Hub: give ORG/NAME")
  logging.set_verbosity_error()  # warnings would show signed addresses
  try:
    with interrupts.deferred(*interrupts.BOTH) as signals:
      directory = huggingface_hub.snapshot_download(
        name.id,
        repo_type=kind,
        revision=name.revision,
        allow_patterns=list(files),
        ignore_patterns=["*/*"],
        tqdm_class=_bar(name, signals),
      )
  except (ValueError, interrupts.Left):
    raise
  except Exception as error:
    raise ValueError(_describe_error(error, name, kind)) from error
  return pathlib.Path(directory)


def _bar(name: Name, signals: Sequence[int]) -> type:
  """Returns a class of progress bars that print a line every `SAY_EVERY` s."""
  from huggingface_hub import constants
  from tqdm import tqdm

  last = time.monotonic()

  class Bar(tqdm):
    monitor_interval = 0

    def __init__(self, *args: Any, **kwargs: Any):
      kwargs.pop("name", None)
      super().__init__(*args, **kwargs | {"disable": False})

    def display(self, *args: Any, **kwargs: Any) -> Any:
      return True  # without drawing

    def update(self, n: Any = 1) -> Any:
      nonlocal last
      is_drawn = super().update(n)
      if self.unit == "B" and signals:
        raise interrupts.Left(f"the download of {name.id} was interrupted")
      if self.unit == "B" and time.monotonic() - last > SAY_EVERY:
        last = time.monotonic()
        amount = f"{self.n / 1e6:.0f} MB of {(self.total or 0) / 1e6:.0f} MB"
        cache = constants.HF_HUB_CACHE
        print(f"downloading {name.id} to {cache}: {amount}", flush=True)
      return is_drawn

    def close(self) -> None:
      self.disable = True  # without clearing the line

  return Bar


def _describe_error(error: Exception, name: Name, kind: str) -> str:
  """Describes an error without its message, which may contain a signed URL."""
  from huggingface_hub import constants, errors

  cache = constants.HF_HUB_CACHE
  page = f"https://huggingface.co/{'datasets/' * (kind == 'dataset')}{name.id}"
  match error:
    case errors.GatedRepoError():
      return f"{name.id} is gated: accept its terms at {page}, then {_LOGIN}"
    case errors.RepositoryNotFoundError():
      return (
        f"no {kind} {name.id!r}: there is no such path here, and the Hub shows "
        f"no {kind} with this name (if it is private, {_LOGIN})"
      )
    case errors.RevisionNotFoundError():
      return (
        f"{name.id} has no revision {name.revision!r}: give a branch, a tag or "
        f"a commit of {page}"
      )
    case errors.LocalEntryNotFoundError():
      return (
        f"{kind} {name}: no such path here, it is missing or incomplete in "
        f"{cache}, and {constants.ENDPOINT} cannot be reached: check the "
        "network (HTTPS_PROXY, HF_ENDPOINT, HF_HUB_OFFLINE), or download it "
        f"elsewhere (`hf download --repo-type {kind} {name.id}`) and give its "
        f"{'directory' if kind == 'model' else 'files to data.name = parquet'}"
      )
    case errors.HfHubHTTPError():
      return (
        f"{name.id}: the Hub answered {error.response.status_code}; try again "
        f"later, or with an account that may read it: {_LOGIN}"
      )
    case OSError(strerror=reason) if reason:
      return (
        f"{name.id} cannot be stored in {cache} ({reason}): free some room "
        "there, or set HF_HOME to a directory that can be written"
      )
  return (
    f"the download of {name.id} was cut off ({type(error).__name__}): the same "
    "command continues it"
  )
