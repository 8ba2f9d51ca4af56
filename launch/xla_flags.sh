#!/usr/bin/env bash
# Starts a program with XLA flags that help training; used by all launchers.
#
#   launch/xla_flags.sh python -m grpojax.train ...
#
# Flags already in XLA_FLAGS come last and win. An unknown flag ends every program,
# so each flag must exist in jaxlib 0.7.2 to 0.12.0.
set -euo pipefail

flags=(
  # Gathers a layer's parameters while the previous layer computes. Compiled for
  # eight H100 (four layers of an MLP, fsdp = 8), all 13 gathers overlap with other
  # work; without the flag 2 of 7 do not. Qwen2.5-0.5B's update then takes 4.0 GiB
  # instead of 3.0, for the next micro-batch's embedding and head.
  --xla_gpu_enable_pipelined_all_gather=true
)
# xla_gpu_deterministic_ops=true is not set. On an H100 two equal runs ended in
# different models without it; with it, a resumed run ended in the same model. It
# leaves XLA fewer kernels, at a cost that was not measured.
# These are not set because they change neither memory nor overlapped bytes of the
# same MLP. GPU: the latency hiding scheduler and asynchronous collectives, which are
# on by default, and xla_gpu_enable_pipelined_reduce_scatter. TPU (libtpu 0.0.42, v5e):
# xla_enable_async_all_gather, xla_tpu_enable_async_collective_fusion and its
# _fuse_all_gather, _fuse_reduce_scatter and _multiple_steps,
# xla_tpu_overlap_compute_collective_tc, xla_tpu_enable_ag_backward_pipelining.

export XLA_FLAGS="${flags[*]} ${XLA_FLAGS:-}"
exec "$@"
