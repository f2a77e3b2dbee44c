#!/usr/bin/env bash
# Stock verl against WAR on one node of 8 GPUs of 80 GB: Qwen3-8B, 8 replicas, 64 prompts x 8 samples a step.
#
#   recipes/baseline_comparison/gpu/one_node.sh [--steps N] [--repeat N] [further options of verl-war compare]
#
# May be stopped and run again: it goes on where it stopped. DATA names the directory of the tasks, made if missing.
# See README.md beside this file.
set -euo pipefail
case "${1:-}" in -h | --help)
    sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "$0"
    exit 0
    ;;
esac
exec "$(dirname "${BASH_SOURCE[0]}")/compare.sh" gpu_8b "$@"
