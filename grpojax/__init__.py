"""GRPO for JAX: the group is an array axis.

The functions most programs need, by their short names; the rest is in
`grpojax.core` (pure functions of arrays) and `grpojax.models`.
"""

from grpojax.core import advantages as advantages
from grpojax.core import diagnostics as diagnostics
from grpojax.core import losses as losses
from grpojax.core.logprobs import token_logprobs as token_logprobs
from grpojax.core.rollout import rollout as rollout
from grpojax.core.sampling import Sampling as Sampling
from grpojax.core.step import init_state as init_state
from grpojax.core.step import make_batch as make_batch
from grpojax.core.step import make_grpo_step as make_grpo_step
from grpojax.core.step import rollout_metrics as rollout_metrics
from grpojax.core.types import LM as LM
from grpojax.core.types import Batch as Batch
from grpojax.core.types import Prefix as Prefix
from grpojax.core.types import Prompts as Prompts
from grpojax.core.types import Rollout as Rollout
from grpojax.core.types import TrainState as TrainState
from grpojax.core.update import make_update as make_update
from grpojax.models.adapters import from_apply as from_apply
from grpojax.models.adapters import from_linen as from_linen
from grpojax.models.adapters import from_nnx as from_nnx
from grpojax.models.transformer import TransformerConfig as TransformerConfig
from grpojax.models.transformer import transformer as transformer
