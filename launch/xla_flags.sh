#!/usr/bin/env bash
# Starts a program with XLA flags that help training; used by all launchers.
#
#   launch/xla_flags.sh python -m grpojax.train ...
#
# Flags already in XLA_FLAGS come last and win. An unknown flag ends every program,
# so each flag must exist in jaxlib 0.7.2 to 0.12.0.
set -euo pipefail

flags=(
  # Gathers a layer's parameters while the one before it computes, and not in its
  # own time. Compiled for eight H100 (four layers of an MLP, fsdp = 8) 2 of 7
  # gathers had nothing beside them, and none of 13 has now. It takes memory: of
  # Qwen2.5-0.5B's update 4.0 GiB in the place of 3.0, the next micro-batch's
  # embedding and head.
  --xla_gpu_enable_pipelined_all_gather=true
)
# Not here: xla_gpu_deterministic_ops=true. On an H100 two equal runs ended in
# different models without it, and a resumed one in the same model with it. It
# leaves XLA fewer kernels; what that costs was not measured.
# Nor these, because neither memory nor the bytes that are sent beside other work
# are others with them, compiled for the same MLP. GPU: the latency hiding
# scheduler and asynchronous collectives, which are on, and
# xla_gpu_enable_pipelined_reduce_scatter. TPU (libtpu 0.0.42, v5e):
# xla_enable_async_all_gather, xla_tpu_enable_async_collective_fusion and its
# _fuse_all_gather, _fuse_reduce_scatter and _multiple_steps,
# xla_tpu_overlap_compute_collective_tc, xla_tpu_enable_ag_backward_pipelining.

export XLA_FLAGS="${flags[*]} ${XLA_FLAGS:-}"
exec "$@"
