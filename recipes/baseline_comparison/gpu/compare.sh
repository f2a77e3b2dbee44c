#!/usr/bin/env bash
# What one_node.sh and two_nodes.sh have in common: tasks with long contexts, then both arms in turn.
#
#   recipes/baseline_comparison/gpu/compare.sh MACHINE [options of verl-war compare] [KEY=VALUE...]
set -euo pipefail
case "${1:-}" in -h | --help)
    sed -n '2,/^set/ { /^#/ s/^# \{0,1\}//p }' "$0"
    exit 0
    ;;
esac
machine=${1:?usage: compare.sh MACHINE [options of verl-war compare]; MACHINE is gpu_8b or gpu_32b}
shift
for command in python verl-war; do
    if ! command -v "$command" >/dev/null; then
        echo "compare.sh: no $command on PATH; activate the environment that verl_war is installed in" >&2
        exit 1
    fi
done
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
data=$(realpath -m "${DATA:-data/code_agent_long}")
if [[ ! -f $data/train.parquet ]]; then
    python -m recipes.code_agent.prepare_data --out "$data" --num-train 2048 --num-val 64 --seed 1 --size long
fi
exec verl-war compare --recipe code_agent --machine "$machine" --steps 20 --repeat 2 "$@" \
    "data.train_files=$data/train.parquet" "data.val_files=$data/val.parquet"
