#!/usr/bin/env bash
# Stock verl against WAR on two nodes of 8 GPUs of 80 GB: Qwen3-32B, 4 replicas of 4 GPUs, 64 prompts x 8 samples a step.
#
#   on the second node:  ray start --address=FIRST_NODE:6379
#   on the first:        ray start --head --port=6379
#                        recipes/baseline_comparison/gpu/two_nodes.sh [--steps N] [further options of verl-war compare]
#
# Both nodes need the clone, its environment, the model and the tasks below the same paths. May be stopped and run
# again: it goes on where it stopped. DATA names the directory of the tasks, made if missing. See README.md beside this
# file.
set -euo pipefail
case "${1:-}" in -h | --help)
    sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "$0"
    exit 0
    ;;
esac
exec "$(dirname "${BASH_SOURCE[0]}")/compare.sh" gpu_32b "$@" +ray_kwargs.ray_init.address=auto
